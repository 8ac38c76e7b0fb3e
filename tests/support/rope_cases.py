"""Shared by the tests of rope: operands, the contract in NumPy, the float64 truth, and error bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import rl_kernel_native as rk
from rl_kernel_native.contract import ROUNDING, row

DTYPES = ("float32", "bfloat16", "float16")
INTERMEDIATES = ("float32", "input")


class Operands(NamedTuple):
    q: Any  # [tokens..., num_q_heads, head_dim]
    k: Any  # [tokens..., num_kv_heads, head_dim], or None
    cos: Any  # [max_position, width], or [3?, tokens..., width]
    sin: Any
    position_ids: Any  # [3?, tokens...], or None


def operands(
    rng: np.random.Generator,
    tokens: tuple[int, ...],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    dtype: str = "bfloat16",
    device: str = "cpu",
    *,
    rotary_dim: int | None = None,
    angle_dtype: str = "float32",
    per_pair: bool = True,
    ids: bool = True,
    sections: bool = False,
    max_position: int = 500,
    id_dtype: str = "int64",
) -> Operands:
    """Normal values, and the angles of positions as models compute them."""
    import torch

    def normal(*shape: int) -> Any:
        return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(getattr(torch, dtype)).to(device)

    dim = head_dim if rotary_dim is None else rotary_dim
    leading = (3, *tokens) if sections else tokens
    position_ids = rng.integers(0, max_position, leading)
    positions = np.arange(max_position) if ids else position_ids
    angles = positions[..., None] / 1000.0 ** (np.arange(dim // 2) / (dim // 2))
    if not per_pair:
        angles = np.concatenate((angles, angles + 0.1), -1)  # the halves differ, so each column has its own angle
    cos, sin = (torch.from_numpy(f(angles)).to(getattr(torch, angle_dtype)).to(device) for f in (np.cos, np.sin))
    return Operands(
        normal(*tokens, heads[0], head_dim),
        normal(*tokens, heads[1], head_dim) if heads[1] else None,
        cos,
        sin,
        torch.from_numpy(position_ids).to(getattr(torch, id_dtype)).to(device) if ids else None,
    )


def results(o: Operands, *, backward: bool = False, **options: Any) -> tuple[Any, Any]:
    function = rk.rope_backward if backward else rk.rope
    return function(*o[:4], position_ids=o.position_ids, **options)


# ---- a second implementation of the contract -------------------------------------------------------------------------


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fl32(a * b + c). The product has 48 bits and x86's extended type 64, so a second rounding matters at most once in
    2^39 operations."""
    exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    return exact.astype(np.float32)


def contract(
    o: Operands,
    *,
    backward: bool = False,
    interleaved: bool = False,
    partial_dim: int | None = None,
    intermediate: str = "float32",
    mrope_sections: tuple[int, int, int] | None = None,
    head_axis: int = -2,
) -> tuple[Any, Any]:
    """The bytes that :func:`results` must give."""
    import torch

    dtype = o.q.dtype
    dim = o.q.shape[-1] if partial_dim is None else partial_dim

    def rounded(a: np.ndarray) -> np.ndarray:
        return torch.from_numpy(np.ascontiguousarray(a)).to(dtype).float().numpy()

    def angles(table: Any) -> tuple[np.ndarray, np.ndarray]:
        """The angles of the first and second elements of pairs, for each token."""
        values = table.detach().cpu().float().numpy()
        if o.position_ids is not None:
            values = values[o.position_ids.cpu().numpy()]
        if intermediate == "input":
            values = rounded(values)
        if values.shape[-1] != dim:
            pair = (values, values)
        elif interleaved:
            pair = (values[..., 0::2], values[..., 1::2])
        else:
            pair = (values[..., : dim // 2], values[..., dim // 2 :])
        if mrope_sections is not None:
            edges = np.cumsum((0, *mrope_sections))
            first, second = (np.concatenate([v[s, ..., edges[s] : edges[s + 1]] for s in range(3)], -1) for v in pair)
            pair = (first, second)
        return pair[0][..., None, :], pair[1][..., None, :]

    (cos_a, cos_b), (sin_a, sin_b) = angles(o.cos), angles(o.sin)
    if backward:
        sin_a, sin_b = -sin_b, -sin_a

    def rotate(heads: Any) -> Any:
        if heads is None:
            return None
        x = heads.detach().cpu().movedim(head_axis, -2)
        wide = x[..., :dim].float().numpy()
        a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., : dim // 2], wide[..., dim // 2 :])
        if intermediate == "input":
            first = rounded(a * cos_a) - rounded(b * sin_a)
            second = rounded(b * cos_b) + rounded(a * sin_b)
        else:
            first, second = fma(a, cos_a, -(b * sin_a)), fma(b, cos_b, a * sin_b)
        y = x.clone()
        both = np.stack((first, second), -1).reshape(wide.shape) if interleaved else np.concatenate((first, second), -1)
        y[..., :dim] = torch.from_numpy(np.ascontiguousarray(both)).to(dtype)
        return y.movedim(-2, head_axis).contiguous()

    return rotate(o.q), rotate(o.k)


# ---- float64 --------------------------------------------------------------------------------------------------------


def failures(o: Operands, got: tuple[Any, Any], backward: bool, intermediate: str, **options: Any) -> str:
    """Describes outputs that are further from float64 than the contract allows; empty if none are."""
    moved = [None if t is None else t.detach().cpu() for t in o]
    arrays = [None if t is None else (t.double() if t.is_floating_point() else t).numpy() for t in moved]
    want = rk.rope_reference(*arrays[:4], position_ids=arrays[4], transposed=backward, **options)
    dtype = str(o.q.dtype).removeprefix("torch.")
    rounds = intermediate == "input"
    inner = {"inner": ROUNDING[dtype].inner, "inner_least": ROUNDING[dtype].least} if rounds else {}
    wrong = []
    for name, result in zip(("q", "k"), got, strict=True):
        if result is None:
            continue
        output = f"d{name}" if backward else name
        bound = row("rope", output).allowed(dtype, expected=want[name], scale=want[f"{name}_scale"], **inner)
        off = np.abs(result.detach().cpu().double().numpy() - want[name])
        if not (off <= bound).all():
            i = np.unravel_index(int(np.argmax(np.nan_to_num(off - bound, nan=np.inf))), off.shape)
            wrong.append(f"{output}{list(map(int, i))}: off by {off[i]:.3g}, allowed {bound[i]:.3g}")
    return "; ".join(wrong)


def contract_failures(rng: np.random.Generator) -> str:
    """What test_contract.py compares with the bounds of the table, one at a time."""
    o = operands(rng, (5,))
    return "; ".join(failures(o, results(o, backward=b), b, "float32") for b in (False, True))
