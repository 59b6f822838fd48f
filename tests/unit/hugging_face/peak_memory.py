"""Run by a process of its own: builds one worker's part of a model, loads it, and prints what that took.

python -m tests.unit.hugging_face.peak_memory RECIPE FOLDER ROLE ATTN_DEPTH FFN_WORKERS
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch
from torch import nn

from disagmoe.config.recipe import load_recipe
from disagmoe.hugging_face.load import load_hugging_face
from disagmoe.layout import Layout, Role, build_stages, split_evenly
from disagmoe.models.init import make_portable
from disagmoe.models.parts import DecoderParts


def memory_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (at most) of this process."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) * 1024


def main() -> None:
    name, folder, role, attn_depth, ffn_workers = sys.argv[1:]
    recipe = load_recipe(name)
    config = make_portable(recipe.model_config(folder), seq_len=64, attention=True)
    layout = Layout(attn_depth=int(attn_depth), ffn_depth=1, attn_workers=1, ffn_workers=int(ffn_workers))
    parts = DecoderParts(config, seed=None, device=torch.device("cpu"), dtype=torch.bfloat16)
    stages = [s for s in build_stages(layout, parts.is_moe_layer) if s.role is Role(role) and s.group == 0]

    def build_and_load() -> int:
        modules: list[nn.Module] = []
        for stage in stages:
            if stage.role is Role.ATTN:
                modules.append(parts.attention_part(stage))
            else:
                assert stage.moe_layer is not None
                ranges = split_evenly(parts.num_experts(stage.moe_layer), layout.ffn_workers)
                modules.append(parts.expert_part(stage, ranges[-1]))
        return load_hugging_face(modules, recipe, folder, folder)

    build_and_load()  # so that code and caches that any first use brings along are there
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is kept would count as there before
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the maximum
    part = build_and_load()
    print(json.dumps({"part_bytes": part, "peak_bytes": memory_bytes("VmHWM") - before}))


if __name__ == "__main__":
    main()
