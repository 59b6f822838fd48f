"""Four-bit floats, against a decoder that spells out the format bit by bit, and against transformers'."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagmoe.config.recipe import load_recipe
from disagmoe.hugging_face.load import load_hugging_face
from disagmoe.models.state_dict import load
from disagmoe.models.state_dict.mxfp4 import dequantise
from tests.unit.hugging_face.models import our_model, save_transformers


def decode(code: int, scale: int) -> float:
    """One E2M1 value times its E8M0 scale: sign, 2 bits of exponent (bias 1), 1 bit of mantissa."""
    if scale == 255:
        return math.nan
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    # In double, then as float32 rounds it: beyond its range is infinity.
    return float(torch.tensor((-1) ** sign * value * 2.0 ** (scale - 127), dtype=torch.float64).float())


def test_all_codes_and_scales() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(256, 16, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).expand(256, 16).contiguous()
    values = dequantise(blocks, scales).view(256, 256, 2)
    for scale in range(256):
        for byte in range(0, 256, 7 if scale % 16 else 1):
            for half, code in enumerate((byte & 15, byte >> 4)):
                found, expected = float(values[scale, byte, half]), decode(code, scale)
                assert found == expected or (math.isnan(found) and math.isnan(expected)), (scale, byte, half)
    assert math.copysign(1.0, float(values[127, 8, 0])) == -1.0  # code 8 is -0


def test_as_transformers_does() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 2, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(100, 150, (3, 10, 2), generator=draw, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    assert torch.equal(dequantise(blocks, scales).transpose(1, 2), theirs)


def quantised(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """The folder with random experts in MXFP4; returns what they stand for, [E, out, in]."""
    tensors, values = load_file(folder / "model.safetensors"), {}
    draw = torch.Generator().manual_seed(1)
    table = torch.tensor([[decode(code, scale) for scale in range(256)] for code in range(16)])
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outer, inner // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(118, 128, (experts, outer, inner // 32), generator=draw, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
        values[name] = table[halves.int(), scales.int().unsqueeze(-1)].view(experts, outer, inner)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return values


@pytest.mark.parametrize("slice_bytes", [load.SLICE_BYTES, 700])
def test_import(tmp_path: Path, slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "SLICE_BYTES", slice_bytes)
    save_transformers("gpt_oss", tmp_path / "plain")
    values = quantised(tmp_path / "plain", tmp_path / "mxfp4")
    model, _ = our_model("gpt_oss", str(tmp_path / "mxfp4"))
    load_hugging_face([model], load_recipe("gpt_oss"), str(tmp_path / "mxfp4"), tmp_path / "mxfp4")
    parameters = dict(model.named_parameters())
    for layer in range(3):
        inner = f"layers.{layer}.moe.routed_experts.inner_experts"
        published = f"model.layers.{layer}.mlp.experts"
        assert torch.equal(parameters[f"{inner}.mlp1_weight_EGD"], values[f"{published}.gate_up_proj"])
        assert torch.equal(parameters[f"{inner}.mlp2_weight_EDF"], values[f"{published}.down_proj"])
