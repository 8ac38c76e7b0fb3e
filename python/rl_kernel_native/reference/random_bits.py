"""Reference of random words: Philox4x32-10 in Python's integers, from the paper's text alone."""

from __future__ import annotations

from typing import Any

import numpy as np

_WORD = (1 << 32) - 1


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32 as Salmon et al., SC 2011, define it."""
    a, b, c, d = counter
    left, right = key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ left, second & _WORD, (first >> 32) ^ d ^ right, first & _WORD
        left, right = (left + 0x9E3779B9) & _WORD, (right + 0xBB67AE85) & _WORD
    return a, b, c, d


def random_bits_reference(seed: Any, sample_id: Any, position: Any, n: int, *, stream: int = 0) -> np.ndarray:
    """Args: as :func:`rl_kernel_native.random_bits`."""
    rows = [np.broadcast_to(np.asarray(x), np.shape(sample_id)).tolist() for x in (seed, sample_id, position)]
    found = np.full((len(rows[0]), n), -1, np.int64)
    for i, (k, s, t) in enumerate(zip(*rows, strict=True)):
        if not 0 <= t <= _WORD:
            continue
        for w in range(n):
            counter = (s & _WORD, (s >> 32) & _WORD, t, 256 * stream + w // 4)
            found[i, w] = philox4x32(counter, (k & _WORD, (k >> 32) & _WORD))[w % 4]
    return found
