"""Which published tensor holds which part of which parameter: names and shapes only, nothing is read here.

A `ParameterMap` says it for one parameter of the unsplit model, in every form that is published (experts one by one or
stacked, plain or quantised). The families' files beside this one list them; `files` finds out which form a folder has,
`load` and `write` move the data.

Suffixes: G key/value heads, N query heads per key/value head, C head dim, D model, E experts, F expert hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from disagmoe.shapes import AttentionShape, ModelShape

FLOATS = ("BF16", "F16", "F32", "F64")
"""Types of plain published tensors, as safetensors calls them."""
MXFP4_BLOCK = 32
"""Values that share a scale, two of them in a byte."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A tensor in the files."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    """What it may be stored as."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A region of a parameter and the published tensor, or the region of one, that holds its values.

    parameter.view(view)[index] and published[:, columns] (all of it without `columns`) are the same values in the same
    order, after exchanging the published tensor's last two dimensions where `transposed`.
    """

    name: str
    """Of the published tensor; of its two halves without `_blocks` and `_scales` where quantised."""
    shape: tuple[int, ...]
    """Of the published tensor, decoded."""
    view: tuple[int, ...]
    index: tuple[slice, ...]
    columns: slice | None = None
    transposed: bool = False
    encoding: Literal["plain", "mxfp4"] = "plain"

    @property
    def region(self) -> tuple[int, ...]:
        """Shape of the parameter's region."""
        starts = [range(size)[part] for size, part in zip(self.view, self.index, strict=False)]
        return (*(len(r) for r in starts), *self.view[len(starts) :])

    @property
    def first(self) -> range:
        """Which rows of the view, along its first dimension, the region covers."""
        return range(self.view[0])[self.index[0]] if self.index else range(self.view[0])

    @property
    def tensors(self) -> tuple[Published, ...]:
        """What has to be in the files."""
        if self.encoding == "plain":
            return (Published(name=self.name, shape=self.shape),)
        *rows, columns = self.shape
        groups = columns // MXFP4_BLOCK
        return (
            Published(name=f"{self.name}_blocks", shape=(*rows, groups, MXFP4_BLOCK // 2), dtypes=("U8",)),
            Published(name=f"{self.name}_scales", shape=(*rows, groups), dtypes=("U8",)),
        )


@dataclass(frozen=True, kw_only=True)
class ParameterMap:
    """A parameter of the unsplit model and where published files keep it."""

    name: str
    shape: tuple[int, ...]
    forms: tuple[tuple[Part, ...], ...]
    """Alternatives, each covering the parameter once. The first one is what an export writes."""
    experts: bool = False
    """The first dimension is the routed experts, of which a worker may hold a range."""
    tied: tuple[Part, ...] = ()
    """Where to find it in the files of a model that ties it to another parameter."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def whole(name: str, shape: Sequence[int], published: str, *, tied_to: str = "") -> ParameterMap:
    """A parameter that is published as it is."""

    def part(published: str) -> tuple[Part, ...]:
        return (Part(name=published, shape=tuple(shape), view=tuple(shape), index=()),)

    tied = part(tied_to) if tied_to else ()
    return ParameterMap(name=name, shape=tuple(shape), forms=(part(published),), tied=tied)


def fused_qkv(name: str, attention: AttentionShape, tail: tuple[int, ...], published: Sequence[str]) -> ParameterMap:
    """torchtitan's fused projection [G (N + 2) C, ...]: for each key/value head its N query heads, its key, its value.

    Args:
        tail: (D,) for the weight, () for the bias.
        published: names of the query, key and value tensors.
    """
    kv, dim = attention.num_kv_heads, attention.head_dim
    per_kv = attention.num_heads // kv
    view = (kv, per_kv + 2, dim, *tail)
    places = (slice(0, per_kv), slice(per_kv, per_kv + 1), slice(per_kv + 1, per_kv + 2))
    form = tuple(
        Part(
            name=tensor,
            shape=(kv * (place.stop - place.start) * dim, *tail),
            view=view,
            index=(slice(0, kv), place),
        )
        for tensor, place in zip(published, places, strict=True)
    )
    return ParameterMap(name=name, shape=(attention.qkv_dim, *tail), forms=(form,))


def expert_by_expert(shape: tuple[int, ...], pattern: str) -> tuple[Part, ...]:
    """A form with a tensor an expert; `pattern` has {} for its id. `shape` is the stacked parameter's, [E, ...]."""
    return tuple(
        Part(name=pattern.format(expert), shape=shape[1:], view=shape, index=(slice(expert, expert + 1),))
        for expert in range(shape[0])
    )


def stacked(
    shape: tuple[int, ...],
    published: str,
    *,
    columns: tuple[slice, int] | None = None,
    transposed: bool = False,
    encoding: Literal["plain", "mxfp4"] = "plain",
) -> tuple[Part, ...]:
    """A form with one tensor for all experts, [E, ...] like the parameter.

    Args:
        columns: (which part of the published tensor's dimension 1 it is, size of that dimension).
        transposed: the published tensor has the last two dimensions the other way round.
    """
    theirs = shape
    if columns is not None:
        theirs = (shape[0], columns[1], *shape[2:])
    if transposed:
        theirs = (*theirs[:-2], theirs[-1], theirs[-2])
    return (
        Part(
            name=published,
            shape=theirs,
            view=shape,
            index=(slice(0, shape[0]),),
            columns=None if columns is None else columns[0],
            transposed=transposed,
            encoding=encoding,
        ),
    )


def trunk(shape: ModelShape) -> Iterator[ParameterMap]:
    """What all families name alike: embedding, attention, norms, head."""
    dim = shape.dim
    embedding = "model.embed_tokens.weight"
    yield whole("tok_embeddings.weight", (shape.vocab_size, dim), embedding)
    for i, layer in enumerate(shape.layers):
        attn, ours, theirs = layer.attention, f"layers.{i}", f"model.layers.{i}"
        yield whole(f"{ours}.attention_norm.weight", (dim,), f"{theirs}.input_layernorm.weight")
        yield whole(f"{ours}.ffn_norm.weight", (dim,), f"{theirs}.post_attention_layernorm.weight")
        for kind, tail in (("weight", (dim,)), ("bias", ())):
            if kind == "bias" and not attn.bias:
                continue
            qkv = [f"{theirs}.self_attn.{letter}_proj.{kind}" for letter in "qkv"]
            yield fused_qkv(f"{ours}.attention.qkv_linear.wqkv.{kind}", attn, tail, qkv)
            out = (dim, attn.out_dim) if kind == "weight" else (dim,)
            yield whole(f"{ours}.attention.wo.{kind}", out, f"{theirs}.self_attn.o_proj.{kind}")
        for letter in "qk" if attn.qk_norm else "":
            norm = f"{letter}_norm.weight"
            yield whole(f"{ours}.attention.{norm}", (attn.head_dim,), f"{theirs}.self_attn.{norm}")
        if attn.sinks:
            yield whole(f"{ours}.attention.sinks", (attn.num_heads,), f"{theirs}.self_attn.sinks")
    yield whole("norm.weight", (dim,), "model.norm.weight")
    yield whole("lm_head.weight", (shape.vocab_size, dim), "lm_head.weight", tied_to=embedding)


def gated(ours: str, theirs: str, dim: int, hidden_dim: int) -> Iterator[ParameterMap]:
    """A gated feed-forward layer, w2 (silu(w1 x) * w3 x)."""
    yield whole(f"{ours}.w1.weight", (hidden_dim, dim), f"{theirs}.gate_proj.weight")
    yield whole(f"{ours}.w3.weight", (hidden_dim, dim), f"{theirs}.up_proj.weight")
    yield whole(f"{ours}.w2.weight", (dim, hidden_dim), f"{theirs}.down_proj.weight")


def gated_experts(ours: str, theirs: str, dim: int, hidden_dim: int, num_experts: int) -> Iterator[ParameterMap]:
    """Routed gated experts: one by one, or stacked with gate and up projection in one tensor [E, 2 F, D]."""
    up_shape, down_shape = (num_experts, hidden_dim, dim), (num_experts, dim, hidden_dim)
    halves = {"gate": slice(0, hidden_dim), "up": slice(hidden_dim, 2 * hidden_dim)}
    for parameter, kind in (("w1_EFD", "gate"), ("w3_EFD", "up")):
        together = stacked(up_shape, f"{theirs}.gate_up_proj", columns=(halves[kind], 2 * hidden_dim))
        yield ParameterMap(
            name=f"{ours}.{parameter}",
            shape=up_shape,
            forms=(expert_by_expert(up_shape, f"{theirs}.{{}}.{kind}_proj.weight"), together),
            experts=True,
        )
    yield ParameterMap(
        name=f"{ours}.w2_EDF",
        shape=down_shape,
        forms=(
            expert_by_expert(down_shape, f"{theirs}.{{}}.down_proj.weight"),
            stacked(down_shape, f"{theirs}.down_proj"),
        ),
        experts=True,
    )
