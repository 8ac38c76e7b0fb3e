"""Reference of the draw of ``sample`` in float64. The draw descends the contract's tree of partial sums, and reports
how near its comparisons are to a tie."""

from __future__ import annotations

from typing import Any

import numpy as np

from .random_bits import random_bits_reference

WORDS = 16  # the deepest tree, for 2^19 columns, uses words 0 to 15


def draw_reference(
    logits: Any, kept: list[np.ndarray], temperature: Any, seed: Any, sample_id: Any, position: Any
) -> Any:
    """Returns ids int64 ``[num_rows]``, and a margin for each row. The margin is the smallest distance between a random
    word, scaled to [0, 1), and the threshold to which it is compared.

    Args: ``kept``: the ids of each row, from :func:`sample_reference`. The other arguments are as for :func:`sample`.
    """
    z = np.asarray(logits).astype(np.float64)
    rows = len(z)
    each = np.broadcast_to(np.asarray(temperature, np.float32).astype(np.float64), rows)
    keys: Any = [np.broadcast_to(np.asarray(x), rows) for x in (seed, sample_id, position)]
    words = random_bits_reference(keys[0], keys[1], keys[2], WORDS)
    found = [_draw(z[i], kept[i], each[i], words[i] / 2.0**32) for i in range(rows)]
    return np.array([i for i, _ in found], np.int64), np.array([margin for _, margin in found])


def _draw(z: np.ndarray, kept: np.ndarray, temperature: float, words: np.ndarray) -> tuple[int, float]:
    vocab = len(z)
    mass = np.zeros(vocab)
    mass[kept] = np.exp((z[kept] - z[kept].max()) / temperature)
    cuts = [min(vocab, 8 * (i * -(-vocab // 8) // 8)) for i in range(8)] + [vocab]
    height = 0
    while 128 << height < max(np.diff(cuts)):
        height += 1
    leaves = [(cuts[part] + 128 * k, cuts[part + 1]) for part in range(8) for k in range(1 << height)]
    leaves = [(first, max(first, min(first + 128, end))) for first, end in leaves]
    margin = np.inf

    def is_left(word: int, left: float, both: float) -> bool:
        nonlocal margin
        margin = min(margin, abs(words[word] - left / both))
        return bool(words[word] < left / both)

    begin, end = 0, len(leaves)
    for depth in range(height + 3):
        middle = (begin + end) // 2
        left, both = (sum(mass[a:b].sum() for a, b in leaves[begin:last]) for last in (middle, end))
        if is_left(depth if depth < 3 else 7 + height + 2 - depth, left, both):
            end = middle
        else:
            begin = middle
    first, last = leaves[begin]
    chains = [mass[first + r : last : 8] for r in range(8)]
    lower, upper = 0, 8
    for word in (3, 4, 5):
        middle = (lower + upper) // 2
        left, both = (sum(chain.sum() for chain in chains[lower:stop]) for stop in (middle, upper))
        lower, upper = (lower, middle) if is_left(word, left, both) else (middle, upper)
    prefix = np.cumsum(chains[lower])
    for k, share in enumerate(prefix):
        if chains[lower][k] > 0 and is_left(6, share, prefix[-1]):
            return first + lower + 8 * k, margin
    raise AssertionError("no column of the chain was drawn")
