"""MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 four-bit floats that share a power of two."""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""By code: sign, two bits of exponent, one of mantissa."""
_BIAS, _NAN = 127, 255


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Values of MXFP4 blocks, in float32, which holds each of them exactly.

    Args:
        blocks: uint8 [..., groups, 16], two values a byte, the first in the lower half.
        scales: uint8 [..., groups]: exponent plus 127; 255 stands for NaN.

    Returns: float32 [..., groups * 32].
    """
    # By byte instead of by value: one look-up gives both of its values.
    pairs = torch.tensor([(E2M1_VALUES[byte & 15], E2M1_VALUES[byte >> 4]) for byte in range(256)])
    values = pairs[blocks.int()].flatten(-2)
    # In two factors: 2^-127 alone is below the normal numbers, which some machines take for zero.
    exponents = [code - _BIAS for code in range(256)]
    for half in ([e // 2 for e in exponents], [e - e // 2 for e in exponents]):
        values = values * torch.tensor([2.0**e for e in half])[scales.int()].unsqueeze(-1)
    values[scales == _NAN] = torch.nan
    return values.flatten(-2)
