"""Reference of ``sample`` in float64, by a sort. The reference computes kept sets, log-probabilities, and how near each
row's cuts are to a tie.

The reference draws no tokens. Its exponentials are float64, but those of a kernel are float32. A kernel must keep the
same set only if ``margin`` exceeds the rounding of the kernel's exponentials."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class SampleReference(NamedTuple):
    """``kept`` holds the ids of each row, ascending. ``logprob`` is float64 ``[num_rows, vocab_size]``, -inf where cut.
    ``margin`` is the smallest relative distance between a threshold of top_p or min_p and a probability compared with
    it."""

    kept: list[np.ndarray]
    logprob: np.ndarray
    margin: np.ndarray

    def best(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids and log-probabilities ``[num_rows, count]`` of the most probable columns; equal columns are in
        the order of their ids."""
        ids = np.argsort(-self.logprob, axis=1, kind="stable")[:, :count]
        return ids, np.take_along_axis(self.logprob, ids, 1)


def _row(
    z: np.ndarray, present: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, order: str
) -> tuple[np.ndarray, float]:
    ids = np.flatnonzero(present)
    ids = ids[np.lexsort((ids, -z[ids]))]  # z descending, then id ascending
    mass = np.exp((z[ids] - z[ids[0]]) / temperature)
    margin = np.inf

    def by_min_p(keep: np.ndarray) -> np.ndarray:
        nonlocal margin
        if min_p > 0:
            margin = min(margin, float(np.abs(mass - min_p).min()) / min_p)
            return keep & (mass >= min_p)
        return keep

    def by_top_k(keep: np.ndarray) -> np.ndarray:
        return keep & (np.cumsum(keep) <= top_k) if top_k > 0 else keep

    def by_top_p(keep: np.ndarray, of: np.ndarray) -> np.ndarray:
        nonlocal margin
        if top_p >= 1:
            return keep
        before = np.cumsum(mass * of) - mass * of
        bound = top_p * (mass * of).sum()
        margin = min(margin, float(np.abs(before - bound).min() / bound))
        return keep & of & (before < bound)

    everything = np.ones(len(ids), bool)
    if order == "vllm":
        keep = by_top_k(by_min_p(everything))
        keep = by_top_p(keep, keep)
    elif order == "hf":
        keep = by_top_k(everything)
        keep = by_min_p(by_top_p(keep, keep))
    else:
        keep = by_min_p(by_top_k(by_top_p(everything, everything)))
    return np.sort(ids[keep]), margin


def sample_reference(
    logits: Any,
    *,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    greedy: Any = False,
    allowed: Any = None,
    valid_vocab: int | None = None,
    order: str = "vllm",
) -> SampleReference:
    """Args: as :func:`rl_kernel_native.sample`, for rows without a bad value."""
    z = np.asarray(logits).astype(np.float64)
    rows, vocab = z.shape
    valid = vocab if valid_vocab is None else valid_vocab
    present = np.zeros((rows, vocab), bool)
    present[:, :valid] = True
    if allowed is not None:
        bits = np.asarray(allowed).view(np.uint32)[:, :, None] >> np.arange(32, dtype=np.uint32) & 1
        present &= bits.reshape(rows, -1)[:, :vocab].astype(bool)
    of_rows = [
        np.broadcast_to(np.asarray(x), rows).astype(dtype).tolist()
        for x, dtype in ((temperature, np.float32), (top_k, np.int64), (top_p, np.float32), (min_p, np.float32))
    ]
    flags = np.broadcast_to(np.asarray(greedy), rows).tolist()
    kept, margins = [], np.full(rows, np.inf)
    logprob = np.full((rows, vocab), -np.inf)
    for i, (t, k, p, m) in enumerate(zip(*of_rows, strict=True)):
        if flags[i]:
            t, k, p, m = 1.0, 0, 1.0, 0.0
        ids, margins[i] = _row(z[i], present[i], t, k, p, m, order)
        kept.append(ids)
        y = z[i, ids] / t
        top = y.max()
        logprob[i, ids] = y - (top + np.log(np.exp(y - top).sum()))
    return SampleReference(kept, logprob, margins)
