"""Sizes and layouts of fuzzed operands."""

from __future__ import annotations

from typing import Any

import numpy as np


def log_uniform(rng: np.random.Generator, low: float, high: float) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))


def as_laid_out_on(t: Any, device: str) -> Any:
    """A view of a copy of ``t``'s whole memory on another device, with the same strides and offset."""
    flat = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return flat.to(device).as_strided(t.shape, t.stride(), t.storage_offset())


def laid_out(rng: np.random.Generator, values: Any, layout: str) -> Any:
    """``values`` [rows..., columns] as a view into memory of NaN; some views begin at multiples of 16 bytes, some do
    not."""
    import torch

    *leading, columns = values.shape
    vec8s = rng.random() < 0.6
    step = columns + (int(rng.integers(1, 6)) * (8 if vec8s else 1) if layout != "contiguous" else 0)
    offset = int(rng.integers(0, 3)) * (8 if vec8s else 5)
    if len(leading) == 2:
        strides = {"transposed": (step, step * leading[0], 1), "sliced": (step * (leading[1] + 1), step, 1)}.get(
            layout, (step * leading[1], step, 1)
        )
    else:
        strides = (step, 1)
    length = offset + sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True)) + 1 if values.numel() else 1
    memory = torch.full((max(length, 1) + offset + int(rng.integers(0, 32)),), float("nan"), dtype=values.dtype)
    return memory.as_strided(values.shape, strides, offset).copy_(values)
