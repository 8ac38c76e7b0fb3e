"""Shared by the tests of rms_norm: operands, the contract in NumPy, the float64 truth, and error bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import rl_kernel_native as rk
from rl_kernel_native.contract import ROUNDING, row

DTYPES = ("float32", "bfloat16", "float16")
EPS = 1e-6


class Operands(NamedTuple):
    x: Any  # [..., K]
    weight: Any  # [K]
    residual: Any  # [..., K]
    dy: Any  # [..., K]
    d_new_residual: Any  # [..., K]


def operands(
    rng: np.random.Generator, rows: tuple[int, ...], columns: int, dtype: str = "bfloat16", device: str = "cpu"
) -> Operands:
    """Normal values, so that sums of products cancel and every rounding shows."""
    import torch

    shapes = ((*rows, columns), (columns,), *((*rows, columns),) * 3)
    return Operands(
        *(
            torch.from_numpy(rng.standard_normal(s, dtype=np.float32)).to(getattr(torch, dtype)).to(device)
            for s in shapes
        )
    )


class Results(NamedTuple):
    y: Any
    new_residual: Any
    rstd: Any
    dx: Any
    dweight: Any


def results(o: Operands, eps: float = EPS, **options: Any) -> Results:
    """All outputs; dweight in float32. The residual and its gradient are left out if None."""
    y, *new_residual, rstd = rk.rms_norm(o.x, o.weight, eps, residual=o.residual, return_rstd=True, **options)
    h = new_residual[0] if new_residual else o.x
    dx, dweight = rk.rms_norm_backward(
        o.dy,
        h,
        o.weight,
        eps,
        rstd=rstd,
        d_new_residual=o.d_new_residual,
        dweight_dtype="float32",
        **options,
    )
    return Results(y, h, rstd, dx, dweight)


# ---- a second implementation of the contract -------------------------------------------------------------------------


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fl32(a * b + c). The product has 48 bits and x86's extended type 64, so a second rounding matters at most once in
    2^39 operations."""
    exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    return exact.astype(np.float32)


def lane_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums over the last axis of [rows, K] with 256 lanes of vec8s, then the tree over neighbours. A narrow row has as
    many lanes as vec8s, rounded up to a power of two; missing lanes would add +0."""
    rows, columns = a.shape
    vec8s = max(-(-columns // 8), 1)
    width = min(256, 1 << (vec8s - 1).bit_length())
    chunks = -(-vec8s // width)
    padded = [np.zeros((rows, chunks * width * 8), np.float32) for _ in range(2)]
    padded[0][:, :columns], padded[1][:, :columns] = a, b
    x, y = (p.reshape(rows, chunks, width, 8) for p in padded)
    lanes = np.zeros((rows, width), np.float32)
    for chunk in range(chunks):
        for j in range(8):
            lanes = fma(x[:, chunk, :, j], y[:, chunk, :, j], lanes)
    while lanes.shape[1] > 1:
        lanes = lanes[:, ::2] + lanes[:, 1::2]
    return lanes[:, 0] + np.float32(0)


def contract(o: Operands, eps: float = EPS, weight_offset: float = 0.0, round_before_weight: bool = False) -> Results:
    """The bytes that :func:`results` must give."""
    import torch

    dtype = o.x.dtype
    columns = o.x.shape[-1]

    def rows_of(t: Any) -> np.ndarray:
        return t.detach().cpu().float().reshape(-1, columns).numpy()

    def rounded(a: np.ndarray) -> Any:
        return torch.from_numpy(np.ascontiguousarray(a)).to(dtype)

    x = rows_of(o.x)
    h = x if o.residual is None else rounded(x + rows_of(o.residual)).float().numpy()
    mean = lane_sum(h, h) / np.float32(columns)
    rstd = (np.float32(1) / np.sqrt(mean + np.float32(eps)))[:, None]
    xhat = h * rstd
    w = np.ones(columns, np.float32) if o.weight is None else o.weight.detach().cpu().float().numpy()
    if weight_offset:
        w = w + np.float32(weight_offset)
    z = rounded(xhat).float().numpy() if round_before_weight else xhat
    dy = rows_of(o.dy)
    e = np.zeros_like(h) if o.d_new_residual is None else rows_of(o.d_new_residual)
    g = dy * w
    c = (lane_sum(g, xhat) / np.float32(columns))[:, None]
    dx = fma(np.broadcast_to(rstd, h.shape), fma(-xhat, np.broadcast_to(c, h.shape), g), e)
    total = None
    for block in range(0, len(h), 8192):
        rows = min(8192, len(h) - block)
        level = np.zeros((128, columns), np.float32)
        for i in range(min(rows, 64)):
            present = -(-(rows - i) // 64)  # groups that have a row i
            picked = slice(block + i, block + rows, 64)
            level[:present] = fma(dy[picked], z[picked], level[:present])
        while len(level) > 1:
            level = level[::2] + level[1::2]
        total = level[0] if total is None else total + level[0]
    shape = o.x.shape
    return Results(
        rounded(z * w).view(shape),
        rounded(h).view(shape),
        torch.from_numpy(rstd[:, 0].copy()).view(shape[:-1]),
        rounded(dx).view(shape),
        None if o.weight is None else torch.from_numpy(total),
    )


# ---- float64 --------------------------------------------------------------------------------------------------------


def _wide(t: Any) -> np.ndarray:
    return t.detach().cpu().double().numpy()


def failures(
    o: Operands, got: Results, eps: float = EPS, weight_offset: float = 0.0, round_before_weight: bool = False
) -> str:
    """Results that are further from float64 than the contract allows. The truth of every output except x + residual
    starts from the rounded sum."""
    h = got.new_residual
    columns = h.shape[-1]
    want = rk.rms_norm_reference(
        _wide(h),
        None if o.weight is None else _wide(o.weight),
        eps,
        weight_offset=weight_offset,
        dy=_wide(o.dy),
        d_new_residual=None if o.d_new_residual is None else _wide(o.d_new_residual),
    )
    if o.residual is not None:
        want["new_residual"] = _wide(o.x) + _wide(o.residual)
    rounding = ROUNDING[str(o.x.dtype).removeprefix("torch.")]
    inner = {"inner": rounding.inner, "inner_least": rounding.least} if round_before_weight else {}
    rows = int(np.prod(h.shape[:-1]))
    facts: dict[str, dict[str, Any]] = {
        "y": {"columns": columns, "other_scale": want["y_other_scale"], **inner},
        "new_residual": {},
        "rstd": {"columns": columns},
        "dx": {"columns": columns},
        "dweight": {"columns": columns, "rows": rows, "other_scale": want["dweight_other_scale"], **inner},
    }
    wrong = []
    for name, of in facts.items():
        result = getattr(got, name)
        if result is None or name not in want:
            continue
        if f"{name}_scale" in want:
            of["scale"] = want[f"{name}_scale"]
        dtype = str(result.dtype).removeprefix("torch.")
        bound = row("rms_norm", name).allowed(dtype, expected=want[name], **of)
        off = np.abs(_wide(result) - want[name])
        if not (off <= bound).all():
            i = np.unravel_index(int(np.argmax(np.nan_to_num(off - bound, nan=np.inf))), off.shape)
            wrong.append(f"{name}{list(map(int, i))}: off by {off[i]:.3g}, allowed {bound[i]:.3g}")
    return "; ".join(wrong)


def contract_failures(rng: np.random.Generator) -> str:
    """What test_contract.py compares with the bounds of the table, one at a time."""
    o = operands(rng, (5,), 40)
    return failures(o, results(o))
