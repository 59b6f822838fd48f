"""A worker that starts from published weights never holds much more than its own part of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from disagmoe.config.hugging_face import config_for
from disagmoe.config.recipe import load_recipe
from disagmoe.hugging_face.source import format_of
from disagmoe.models.state_dict.write import lay_out, plan_files
from disagmoe.shapes import AttentionShape, LayerShape, ModelShape, MoEShape

ROOT = Path(__file__).parents[3]
LIMIT = 1.2
"""Of the part's own size, at the peak, the part included."""


def large_shape(name: str) -> ModelShape:
    """About 0.9 GB in bfloat16: 4 layers of 16 experts of 9.4 MB, an embedding and a head of 123 MB."""
    oss = name == "gpt_oss"
    attention = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, qk_norm=not oss, bias=oss, sinks=oss)
    moe = MoEShape(num_experts=16, top_k=2, expert_dim=1536, bias=oss, route_norm=True)
    base = load_recipe(name).shape("debug")
    return ModelShape(
        name="large",
        dim=1024,
        vocab_size=60000,
        layers=(LayerShape(attention=attention, ffn=moe),) * 4,
        max_seq_len=4096,
        norm_eps=base.norm_eps,
        rope=base.rope,
    )


def write_folder(name: str, folder: Path, *, quantised: bool = False) -> None:
    """A model of zeros; files without content take no space."""
    recipe, shape = load_recipe(name), large_shape(name)
    form = format_of(recipe)
    (folder / "config.json").write_text(json.dumps(config_for(form, shape)))
    maps = list(form.parameters(shape))
    if not quantised:
        lay_out(folder, plan_files(maps, "bfloat16", most_bytes=200_000_000))
        return
    tensors = [tensor for entry in maps for part in entry.forms[-1] for tensor in part.tensors]
    dtypes = {"U8": torch.uint8, "BF16": torch.bfloat16}
    save_file({t.name: torch.zeros(t.shape, dtype=dtypes[t.dtypes[0]]) for t in tensors}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "quantised", "role"),
    [
        ("qwen3", False, "ffn"),
        pytest.param("qwen3", False, "attn", marks=pytest.mark.full),
        pytest.param("gpt_oss", False, "ffn", marks=pytest.mark.full),
        pytest.param("gpt_oss", True, "ffn", marks=pytest.mark.full),
    ],
)
def test_peak_memory(name: str, quantised: bool, role: str, tmp_path: Path) -> None:
    write_folder(name, tmp_path, quantised=quantised)
    # One A-worker holds all attention; an F-worker holds half of the experts.
    arguments = [name, str(tmp_path), role, "1", "2"]
    command = [sys.executable, "-m", "tests.unit.hugging_face.peak_memory", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name} {role}{' MXFP4' if quantised else ''}: {found['peak_bytes'] / found['part_bytes']:.3f} of its part")
    assert found["part_bytes"] > 80_000_000
    assert found["peak_bytes"] < LIMIT * found["part_bytes"]
