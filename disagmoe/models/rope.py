"""Rotary embeddings from a `RopeShape`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.models.common import CosSinRoPE

from disagmoe.shapes import RopeShape


class ScaledCosSinRoPE(CosSinRoPE):
    """Cosines and sines times a factor: YaRN's stretch of queries and keys.

    torchtitan's rotary embeddings leave the factor to the attention's softmax scale. GPT-OSS's attention applies it
    there; the plain grouped-query attention has no place for it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        attention_factor: float = 1.0

    def _precompute_cache(self) -> torch.Tensor:
        assert isinstance(self.config, ScaledCosSinRoPE.Config)
        return super()._precompute_cache() * self.config.attention_factor


def make_rope(rope: RopeShape, *, head_dim: int, max_seq_len: int, scaled: bool) -> CosSinRoPE.Config:
    """torchtitan's rotary embedding in halves, the convention of every family here.

    Args:
        scaled: whether it multiplies by YaRN's attention factor itself.
    """
    if rope.factor == 1.0:
        return CosSinRoPE.Config(dim=head_dim, max_seq_len=max_seq_len, theta=rope.theta)
    yarn = {
        "dim": head_dim,
        "max_seq_len": max_seq_len,
        "theta": rope.theta,
        "scaling": "yarn",
        "rope_factor": rope.factor,
        "original_seq_len": rope.original_seq_len,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "truncate": rope.truncate,
    }
    if scaled:
        return ScaledCosSinRoPE.Config(**yarn, attention_factor=rope.attention_factor)
    return CosSinRoPE.Config(**yarn)
