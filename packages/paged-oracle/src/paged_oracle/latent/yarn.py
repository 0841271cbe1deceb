"""The softmax scale of a model whose context was stretched with YaRN.

YaRN multiplies the rotary tables by a magnitude. Models with latent attention fold it into the scale instead,
so the tables stay plain cosines. The formula is that of the DeepSeek-V2 and V3 model code.
"""

from __future__ import annotations

import math


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return ``0.1 * mscale * ln(factor) + 1``, or 1 when the context is not stretched.

    Args:
        factor: how many times the context was stretched.
        mscale: the model's multiplier of the logarithm.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_scale(qk_head_size: int, factor: float = 1.0, mscale_all_dim: float = 1.0) -> float:
    """Return ``qk_head_size ** -0.5 * magnitude ** 2``: the operator's `scale` attribute.

    Args:
        qk_head_size: channels of a decomposed key head, rotated ones included; not the latent width.
        factor: how many times the context was stretched.
        mscale_all_dim: the model's multiplier; 0 leaves the scale alone.

    Example:
        >>> round(yarn_scale(192, factor=40, mscale_all_dim=1.0), 6)
        0.135234
    """
    magnitude = yarn_magnitude(factor, mscale_all_dim)
    return magnitude * magnitude / math.sqrt(qk_head_size)
