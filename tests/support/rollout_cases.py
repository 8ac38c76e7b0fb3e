"""Batches of log-probabilities of a trainer and an engine, for the tests of importance_weights and mismatch_metrics."""

from __future__ import annotations

import numpy as np

LENGTHS = [300, 0, 17, 256, 131]


def rollouts(rows: int, columns: int, seed: int = 0, masked: float = 0.3) -> dict[str, np.ndarray]:
    """``train`` and ``rollout``, float32; one token in ten is equal in both. With three sequences or more, the second
    sequence has no token that counts."""
    random = np.random.default_rng(seed)
    train = -np.abs(random.normal(0, 1.5, (rows, columns))).astype(np.float32)
    off = random.normal(0, 0.2, train.shape) * (random.random(train.shape) < 0.9)
    mask = random.random(train.shape) >= masked
    if rows > 2:
        mask[1] = False
    return {"train": train, "rollout": train + off.astype(np.float32), "mask": mask}


def wild(a: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tokens, with values in masked slots that must not reach a result."""
    random = np.random.default_rng(3)
    values = np.array([np.nan, np.inf, -np.inf, 3e38], np.float32)
    found = {k: np.where(a["mask"], x, random.choice(values, x.shape)) for k, x in a.items() if k != "mask"}
    return {**found, "mask": a["mask"]}


def ragged() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """Sequences of LENGTHS padded and packed, and the offsets of the packed sequences."""
    a = rollouts(len(LENGTHS), max(LENGTHS), seed=1)
    a["mask"] &= np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    packed = {k: np.concatenate([x[:n] for x, n in zip(v, LENGTHS, strict=True)]) for k, v in a.items()}
    return a, packed, np.concatenate([[0], np.cumsum(LENGTHS)])
