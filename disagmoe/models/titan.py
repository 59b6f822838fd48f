"""How torchtitan is told about this process: to be called before any of its model packages is imported."""

from __future__ import annotations

import torch


def prepare_torchtitan() -> None:
    """Make torchtitan's model code run on a machine with or without CUDA and without a current mesh. Idempotent.

    torchtitan 0.3 takes its device type to be "cuda" even where there is none, copies it on import, and its default
    SPMD backend asks for a mesh in every rotary embedding.
    """
    import torchtitan.tools.utils as tools
    from torchtitan.distributed.utils import set_spmd_backend

    if not torch.cuda.is_available():
        tools.device_type, tools.device_module = "cpu", torch.cpu
    set_spmd_backend("partial_dtensor")
