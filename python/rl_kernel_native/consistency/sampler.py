"""Seeded sampling that depends on nothing but (seed, prompt, position) and the logits of that one row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .errors import BadInput

_MASK = 0xFFFFFFFF


def philox4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon et al. (2011): four 32-bit words from a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0 = 0xD2511F53 * c0
        p1 = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, prompt: int, position: int) -> float:
    """A float64 in (0, 1) for one token: the batch, the step and the slot of the request play no part.

    Args:
        seed: 0 <= seed < 2**64.
        prompt: index of the prompt, so that equal prompts still explore differently.
        position: index of the sampled token in its sequence.
    """
    words = philox4x32_10((position & _MASK, position >> 32, prompt & _MASK, prompt >> 32), (seed & _MASK, seed >> 32))
    bits = (words[0] << 21) | (words[1] >> 11)
    return (bits + 0.5) * 2.0**-53


def sample(logits: npt.NDArray[np.floating], temperature: float, u: float) -> int:
    """One token by inverse CDF of softmax(logits / temperature).

    Float64 and one row at a time: a batched softmax may take another code path for another batch, and a sampler whose
    own rounding depends on the batch would be blamed on the model.

    Args:
        logits: [vocab_size], any float type.
        temperature: > 0.
        u: uniform in (0, 1).

    Raises:
        BadInput: the row holds NaN or +Inf, or nothing but -Inf.
    """
    row = logits.astype(np.float64)
    top = row.max()
    if not np.isfinite(top):
        raise BadInput("the model produced NaN or Inf logits")
    cdf = np.cumsum(np.exp((row - top) / temperature))
    token = int(np.searchsorted(cdf, u * cdf[-1], side="right"))
    # u * total may round up to total; the last token with any probability is then the right answer.
    return min(token, int(np.searchsorted(cdf, cdf[-1], side="left")))
