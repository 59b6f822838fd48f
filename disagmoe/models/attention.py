"""Inner attention that runs everywhere, and the masks that the blocks want.

Suffixes: B batch, L sequence, H query heads, G key/value heads, N heads per key/value head (H / G), C head dim.

Flex attention has no backward on CPU and variable-length attention no CPU kernel, so on CPU every block gets
`PortableAttention`; on CUDA torchtitan's flex attention stays. Both take the mask of a whole micro-batch, built once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.attention import (
    BaseAttention,
    FlexAttention,
    create_attention_mask,
    get_causal_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
    get_sliding_window_mask_mod,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module

Masks: TypeAlias = Any
"""What `attention_masks` returns and a block takes: one mask, or {"basic_mask", "sliding_window_mask"}."""


class PortableAttention(Module):
    """Masked softmax attention in plain torch, for torchtitan's `inner_attention` slot.

    Without `out_transform` it is `scaled_dot_product_attention` with a boolean mask; with it (GPT-OSS's sinks, which
    need the log-sum-exp) the softmax is written out, in float32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLHC: Tensor,
        k_BLGC: Tensor,
        v_BLGC: Tensor,
        *,
        attention_masks: Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **_: Any,
    ) -> Tensor:
        """Args:
            attention_masks: bool [B, 1, L, L] (query, key); True: attend. Every query attends at least to itself.
            scale: factor on the scores; None: 1 / sqrt(C).
            out_transform: (out [B, L, H, C], log-sum-exp [B, L, H]) -> out.

        Returns: [B, L, H, C] in the dtype of `q_BLHC`.
        """
        q, k, v = (t.transpose(1, 2) for t in (q_BLHC, k_BLGC, v_BLGC))
        if out_transform is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa)
            return out.transpose(1, 2)
        out_BLHC, lse_BLH = _explicit_attention(q, k, v, attention_masks, scale or q.shape[-1] ** -0.5)
        return out_transform(out_BLHC, lse_BLH)


def _explicit_attention(
    q_BHLC: Tensor, k_BGLC: Tensor, v_BGLC: Tensor, mask_B1LL: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention and its log-sum-exp in float32: ([B, L, H, C] in the dtype of v, [B, L, H])."""
    B, H, L, C = q_BHLC.shape
    G = k_BGLC.shape[1]
    hidden_B1LL = torch.zeros(mask_B1LL.shape, device=mask_B1LL.device).masked_fill(~mask_B1LL, float("-inf"))
    q = (q_BHLC * scale).reshape(B, G, H // G * L, C)
    scores = (q @ k_BGLC.transpose(-2, -1)).float().view(B, G, H // G, L, L) + hidden_B1LL.unsqueeze(2)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1).view(B, G, H // G * L, L)
    out = (weights.to(v_BGLC.dtype) @ v_BGLC).view(B, H, L, C)
    return out.transpose(1, 2), lse.view(B, H, L).transpose(1, 2)


def document_causal_mask(positions_BL: Tensor, window: int | None = None) -> Tensor:
    """Which keys a query attends to: bool [B, 1, L, L].

    Key j for query i iff both are in the same packed document, j <= i, and i - j < `window` when there is one. A
    document starts where positions restart at 0.
    """
    document_BL = torch.cumsum((positions_BL == 0).int(), dim=1)
    index_L = torch.arange(positions_BL.shape[1], device=positions_BL.device)
    distance_LL = index_L[:, None] - index_L[None, :]
    near_LL = distance_LL >= 0
    if window is not None:
        near_LL = near_LL & (distance_LL < window)
    same_BLL = document_BL[:, :, None] == document_BL[:, None, :]
    return (same_BLL & near_LL).unsqueeze(1)


def _flex_mask(positions_BL: Tensor, window: int | None, block_size: Any) -> Any:
    """The same as a flex-attention BlockMask, from torchtitan's builders."""
    from torch.nn.attention.flex_attention import and_masks

    mods = [get_causal_mask_mod(), get_efficient_causal_mask_mod_for_packed_document(positions_BL)]
    if window is not None:
        mods.append(get_sliding_window_mask_mod(window))
    batch, length = positions_BL.shape
    return create_attention_mask(
        and_masks(*mods), batch, None, length, length, device=positions_BL.device, BLOCK_SIZE=block_size
    )


def attention_masks(model_config: Decoder.Config, positions_BL: Tensor) -> Masks:
    """The masks of one micro-batch, for all its attention sublayers.

    Args:
        model_config: a config from `make_portable`.
        positions_BL: int [B, L], restarting at 0 with every packed document; position 0 first.

    Returns:
        One mask, or {"basic_mask": mask, "sliding_window_mask": mask} for models whose layers choose (GPT-OSS).

    Raises:
        ValueError: layers with different windows, or an inner attention other than portable or flex.
    """
    configs: list[Any] = [layer.attention for layer in model_config.layers]
    inner = configs[0].inner_attention

    def build(window: int | None) -> Any:
        if isinstance(inner, PortableAttention.Config):
            return document_causal_mask(positions_BL, window)
        if isinstance(inner, FlexAttention.Config):
            return _flex_mask(positions_BL, window, inner.block_size)
        raise ValueError(
            f"inner attention {type(inner).__qualname__}: must be portable or flex attention; use make_portable"
        )

    if not hasattr(configs[0], "sliding_window_size"):
        return build(None)
    windows = {c.sliding_window_size for c in configs} - {None}
    if len(windows) > 1:
        raise ValueError(f"sliding windows {sorted(windows)}: the layers of one model may have only one window size")
    masks = {"basic_mask": build(None)}
    if windows:
        masks["sliding_window_mask"] = build(windows.pop())
    return masks


def mask_for(attention: BaseAttention.Config, masks: Masks) -> Any:
    """The mask of one attention sublayer, out of what `attention_masks` returned."""
    if not isinstance(masks, dict):
        return masks
    windowed = getattr(attention, "sliding_window_size", None) is not None
    return masks["sliding_window_mask" if windowed else "basic_mask"]
