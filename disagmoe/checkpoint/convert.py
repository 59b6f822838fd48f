"""A checkpoint as one file: the unsplit model's weights for use without this project's checkpoints."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disagmoe.checkpoint.folder import CheckpointError, file_problems, read_state
from disagmoe.checkpoint.state import MODEL, Piece
from disagmoe.checkpoint.storage import read, stored_keys
from disagmoe.config.recipe import load_recipe
from disagmoe.models.init import build_model, make_portable, materialize
from disagmoe.models.titan import prepare_torchtitan

SUFFIXES = (".pt", ".safetensors")
_SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


def convert(checkpoint: Path, target: Path) -> dict[str, Tensor]:
    """Write the `state_dict()` of the unsplit torchtitan model, router biases included, optimizer left out.

    Args:
        checkpoint: a complete one; its files are verified.
        target: `*.pt` (torch.save of the dict) or `*.safetensors`; must not exist.

    Returns: what was written. The whole model is held in memory once.

    Raises:
        CheckpointError: the checkpoint is damaged, or `target` can't be written.
    """
    if target.suffix not in SUFFIXES:
        raise CheckpointError(f"{target}: must end in {' or '.join(SUFFIXES)}")
    if target.exists():
        raise CheckpointError(f"{target}: exists already; remove it or choose another name")
    state_dict = load_state_dict(checkpoint)
    partial = target.with_name(f".{target.name}.part")
    try:
        with partial.open("wb") as file:
            if target.suffix == ".pt":
                torch.save(state_dict, file)
            else:
                for data in safetensors_chunks(state_dict):
                    file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, target)
    except OSError as error:
        raise CheckpointError(f"{target}: can't be written ({error.strerror})") from error
    finally:
        partial.unlink(missing_ok=True)
    return state_dict


def load_state_dict(checkpoint: Path) -> dict[str, Tensor]:
    """The unsplit model's `state_dict()` from a checkpoint, on the CPU: the model is built and filled.

    Raises:
        CheckpointError: files are damaged, or the checkpoint holds other tensors than the model.
    """
    problems = file_problems(checkpoint)
    if problems:
        raise CheckpointError("; ".join(problems))
    config = read_state(checkpoint)["config"]
    prepare_torchtitan()
    model_config = make_portable(
        load_recipe(config["recipe"]["name"]).model_config(config["recipe"]["flavor"]),
        seq_len=config["training"]["seq_len"],
        attention=True,
        load_balance_coeff=config["training"]["load_balance_coeff"],
    )
    with torch.device("meta"):
        model = build_model(model_config)
    materialize(model, device="cpu", dtype=getattr(torch, config["training"]["dtype"]))
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    persistent = model.state_dict()
    tensors |= {name: b for name, b in model.named_buffers() if name in persistent}
    stored = {key for key in stored_keys(checkpoint) if key.startswith(MODEL)}
    if stored != {MODEL + name for name in tensors}:
        other = sorted(stored ^ {MODEL + name for name in tensors})
        raise CheckpointError(f"{checkpoint}: holds other tensors than {config['recipe']['name']}: {other[:5]}")
    pieces = [Piece(key=MODEL + name, start=0, tensor=t, sharded=False) for name, t in tensors.items()]
    read(checkpoint, pieces, {piece.key: tuple(piece.tensor.shape) for piece in pieces})
    return {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}


def safetensors_chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes]:
    """A safetensors file, piece by piece: length of the header, header, data in its order."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        kind = _SAFETENSORS_TYPES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for tensor in tensors.values():
        yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
