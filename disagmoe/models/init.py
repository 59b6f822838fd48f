"""Initialisation that does not depend on the layout, and the unsplit reference model.

torchtitan draws all parameters from one random stream, so a worker that holds a part of the model could not draw the
same values. Here every parameter (and every expert of a stacked one) has a seed of its own.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torchtitan.models.common.attention import BaseAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.protocols.module import Module

from disagmoe.models.attention import PortableAttention
from disagmoe.models.experts import portable_experts
from disagmoe.models.router import float32_router


def make_portable(
    model_config: Decoder.Config,
    *,
    seq_len: int,
    attention: bool,
    load_balance_coeff: float | None = None,
) -> Decoder.Config:
    """A copy of a model config that the parts and the reference are built from.

    Args:
        model_config: a torchtitan config, e.g. of `Recipe.model_config`; left as it is.
        seq_len: tokens a sample; the rotary caches are made for this many positions.
        attention: replace the inner attention by `PortableAttention` (needed on CPU); False keeps flex attention.
        load_balance_coeff: step of the router bias; 0 turns the bias off, None keeps the config's own.

    Routers are computed in float32 and experts in their input's dtype from here on, in every layout.

    Raises:
        ValueError: tied embedding and head, a bad number, or experts that have no portable form.
    """
    if model_config.enable_weight_tying:
        raise ValueError(
            "enable_weight_tying = True: the embedding is on the first A-group and the head on the last, so they "
            "cannot share a weight; set enable_weight_tying = False in the recipe"
        )
    if seq_len < 1:
        raise ValueError(f"[training] seq_len = {seq_len}: must be at least 1")
    if load_balance_coeff is not None and load_balance_coeff < 0:
        raise ValueError(f"[training] load_balance_coeff = {load_balance_coeff}: must be at least 0 (0: no bias)")
    config = copy.deepcopy(model_config)
    for _, attn, _, _ in config.traverse(BaseAttention.Config):
        attn.rope = dataclasses.replace(attn.rope, max_seq_len=seq_len)
        if attention:
            attn.inner_attention = PortableAttention.Config()
    for _, moe, _, _ in config.traverse(MoE.Config):
        assert isinstance(moe, MoE.Config)
        moe.router = float32_router(moe.router)
        moe.routed_experts.inner_experts = portable_experts(moe.routed_experts.inner_experts)
        if load_balance_coeff is not None:
            moe.load_balance_coeff = load_balance_coeff or None
    return config


def build_model(model_config: Decoder.Config) -> Decoder:
    """The unsplit torchtitan model of a config from `make_portable`, uninitialised, on the current default device.

    Called as `model(tokens_BL, positions_BL, masks)` with `attention_masks(model_config, positions_BL)`.
    """
    model = model_config.build()
    assert isinstance(model, Decoder)
    return model


def materialize(module: nn.Module, *, device: torch.device | str, dtype: torch.dtype) -> None:
    """Give a module (built on any device, meta included) storage on `device`, its *parameters* in `dtype`.

    Buffers keep their own dtype: rotary caches and router biases are float32 in every training dtype. All values are
    undefined afterwards: call `init_parameters`.
    """
    for parameter in module.parameters():
        if parameter.is_meta:  # before there is storage, so that there never is any in the dtype it was built in
            parameter.data = parameter.data.to(dtype)
    module.to_empty(device=device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _seed(*parts: object) -> int:
    """A 63-bit seed, the same in every process and version of Python."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _draw(init: Callable[[Tensor], object], shape: torch.Size, seed: int) -> Tensor:
    """`init` applied to a float32 CPU tensor under its own seed; the global generator is left as it was."""
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        init(values)
    return values


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter, Callable[[Tensor], object]]]:
    """(unsplit name, owner, parameter, initialiser) of every parameter."""
    for prefix, owner in module.named_modules():
        inits = getattr(owner, "_param_init", None) or {}
        for name, parameter in owner.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if name not in inits:
                raise ValueError(f"parameter {full}: its config has no param_init[{name!r}]; add one in the recipe")
            yield full, owner, parameter, inits[name]


@torch.no_grad()
def init_parameters(module: nn.Module, model_config: Decoder.Config, seed: int | None, expert_offset: int = 0) -> None:
    """Set every parameter and buffer of a model or a part of one, in place.

    A parameter's values depend on `seed` and its unsplit name only, those of a stacked expert parameter on the global
    expert id besides (drawn expert by expert). So any part is bit-equal to the same part of the unsplit model. Values
    are drawn in float32 on CPU, then cast and copied: CPU and CUDA start equal.

    Args:
        module: from `build_model`, `build_attention_part` or `build_expert_part`; its parameters have storage.
        model_config: the config that `module` was built from.
        seed: of the run; None: parameters stay undefined, for weights that are loaded anyway. Buffers are set.
        expert_offset: global id of the module's first expert.

    Raises:
        ValueError: a parameter without an initialiser or without storage, or experts beyond the config's number.
    """
    total = {moe.num_experts for _, moe, _, _ in model_config.traverse(MoE.Config)}
    for name, owner, parameter, init in _own_parameters(module) if seed is not None else ():
        if parameter.is_meta:
            raise ValueError(f"parameter {name} is on the meta device: call materialize first")
        if not isinstance(owner, GroupedExperts):
            parameter.copy_(_draw(init, parameter.shape, _seed(seed, name)))
            continue
        if total and expert_offset + parameter.shape[0] > max(total):
            raise ValueError(
                f"expert_offset = {expert_offset}: {name} holds {parameter.shape[0]} experts, beyond the {max(total)}"
            )
        for local in range(parameter.shape[0]):
            row_seed = _seed(seed, name, expert_offset + local)
            parameter[local].copy_(_draw(init, parameter.shape[1:], row_seed))
    for child in module.modules():
        if isinstance(child, Module):
            child._init_self_buffers()
