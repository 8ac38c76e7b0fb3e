"""Shared by the tests of linear: operands, the float64 truth, and each unit's error bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import rl_kernel_native as rk
from rl_kernel_native.contract import ROUNDING, row

HALF = ("bfloat16", "float16")
UNITS = ("ieee", "sm_90", "sm_80", "gfx942", "gfx90a")
UNIT_DTYPES = [*((unit, dtype) for unit in UNITS for dtype in HALF), ("ieee", "float32")]  # units do not take float32
NAMES = ("y", "dx", "dweight", "dbias")


class Operands(NamedTuple):
    x: Any  # [..., in_features]
    weight: Any  # [out_features, in_features]
    bias: Any  # [out_features]
    dy: Any  # [..., out_features]


def dtypes_of(device: str) -> tuple[str, ...]:
    return HALF if device == "cuda" else (*HALF, "float32")


def operands(
    rng: np.random.Generator, rows: tuple[int, ...], ins: int, outs: int, dtype: str = "bfloat16", device: str = "cpu"
) -> Operands:
    """Normal values, so that sums cancel and every rounding shows."""
    import torch

    shapes = ((*rows, ins), (outs, ins), (outs,), (*rows, outs))
    return Operands(
        *(
            torch.from_numpy(rng.standard_normal(s, dtype=np.float32)).to(getattr(torch, dtype)).to(device)
            for s in shapes
        )
    )


def results(o: Operands, **options: Any) -> tuple[Any, ...]:
    """y, dx, dweight and dbias; all except dx in float32."""
    return (
        rk.linear(o.x, o.weight, o.bias, out_dtype="float32", **options),
        rk.linear_input_grad(o.dy, o.weight, **options),
        rk.linear_weight_grad(o.dy, o.x, out_dtype="float32", **options),
        rk.linear_bias_grad(o.dy, out_dtype="float32"),
    )


def _wide(x: Any) -> np.ndarray:
    return x.detach().cpu().double().numpy() if hasattr(x, "detach") else np.asarray(x).astype(np.float64)


def as_multiplied(operand: Any, unit: str) -> np.ndarray:
    """CDNA2 flushes subnormal operands (docs/numerics.md, fact 2)."""
    values = _wide(operand)
    return np.where(np.abs(values) < flushed_below(operand, unit), 0.0, values)


def flushed_below(operand: Any, unit: str) -> float:
    if unit != "gfx90a":
        return 0.0
    return 2.0**-14 if str(operand.dtype) == "torch.float16" else 2.0**-126


def failures(o: Operands, got: tuple[Any, ...], unit: str) -> str:
    """Describes what is wrong with :func:`results`; empty if all is right."""
    x, weight, dy = (as_multiplied(t, unit) for t in (o.x, o.weight, o.dy))
    want = rk.linear_reference(x, weight, _wide(o.bias), dy=dy) | {
        key: value for key, value in rk.linear_reference(x, weight, dy=_wide(o.dy)).items() if "dbias" in key
    }
    rows = int(np.prod(o.x.shape[:-1]))
    terms = {"y": o.x.shape[-1], "dx": o.dy.shape[-1], "dweight": rows}
    wrong = []
    for name, result in zip(NAMES, got, strict=True):
        dtype = str(result.dtype).removeprefix("torch.")
        facts = {"rows": rows} if name == "dbias" else {"terms": terms[name]}
        scale = want[f"{name}_scale"]
        bound = row("linear", name).allowed(dtype, unit=unit, expected=want[name], scale=scale, **facts)
        limit = ROUNDING[dtype].limit
        values = _wide(result)
        overflown = np.isinf(values) & (np.sign(values) == np.sign(want[name])) & (np.abs(want[name]) + bound >= limit)
        error = np.abs(np.where(overflown, want[name], values) - want[name])
        if not (error <= bound).all():
            i = np.unravel_index(int(np.argmax(np.nan_to_num(error - bound, nan=np.inf))), error.shape)
            wrong.append(f"{name}{list(map(int, i))}: off by {error[i]:.3g}, allowed {bound[i]:.3g}")
    return "; ".join(wrong)


def chain(a: np.ndarray, b: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """Rule 1 in ieee arithmetic for bfloat16 values: one ascending chain of fused multiply-adds over the last axis.

    A product of two bfloat16 values has 16 bits, so at similar magnitudes a float64 holds product plus accumulator
    exactly.
    """
    sums = np.zeros((a.shape[0], b.shape[0]), np.float32) if start is None else start
    for i in range(a.shape[1]):
        sums = (sums.astype(np.float64) + np.outer(a[:, i].astype(np.float64), b[:, i])).astype(np.float32)
    return sums
