"""Operands, the contract in NumPy and bounds against float64, for the tests of silu_mul and gelu_mul."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

import rl_kernel_native as rk
from rl_kernel_native.contract import ROUNDING, row

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class Operands(NamedTuple):
    gate: Any  # [..., I]
    up: Any  # [..., I]
    dy: Any  # [..., I]


class Results(NamedTuple):
    y: Any
    d_gate: Any
    d_up: Any


def operands(
    rng: np.random.Generator, rows: tuple[int, ...], columns: int, dtype: str = "bfloat16", device: str = "cpu"
) -> Operands:
    """Normal values. Gates are three times as wide, so that they take every branch of the functions."""
    import torch

    def normal(deviation: float) -> Any:
        values = rng.standard_normal((*rows, columns), dtype=np.float32) * np.float32(deviation)
        return torch.from_numpy(values).to(getattr(torch, dtype)).to(device)

    return Operands(normal(3), normal(1), normal(1))


def functions(activation: str) -> tuple[Any, Any, dict[str, Any]]:
    """The function, its backward, and their options."""
    if activation == "silu":
        return rk.silu_mul, rk.silu_mul_backward, {}
    return rk.gelu_mul, rk.gelu_mul_backward, {"approximate": "none" if activation == "gelu" else "tanh"}


def results(o: Operands, activation: str = "silu", **options: Any) -> Results:
    forward, backward, more = functions(activation)
    y = forward(o.gate, o.up, **more, **options)
    return Results(y, *backward(o.dy, o.gate, o.up, **more, **options))


def packed_results(gate_up: Any, dy: Any, activation: str = "silu", **options: Any) -> Results:
    """Results of the call with one packed array; its gradient is returned as two halves."""
    forward, backward, more = functions(activation)
    d_gate_up = backward(dy, gate_up, **more, **options)
    columns = gate_up.shape[-1] // 2
    return Results(forward(gate_up, **more, **options), d_gate_up[..., :columns], d_gate_up[..., columns:])


# ---- the contract, a second time ------------------------------------------------------------------------------------


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """fl32(a * b + c) in x86's extended type. Its second rounding changes about one in 2^39 results, or none."""
    exact = np.asarray(a, np.longdouble) * np.asarray(b, np.longdouble) + np.asarray(c, np.longdouble)
    return exact.astype(np.float32)


def _horner(x: np.ndarray, *coefficients: str) -> np.ndarray:
    r = np.full_like(x, float.fromhex(coefficients[-1]))
    for c in reversed(coefficients[:-1]):
        r = fma(r, x, np.float32(float.fromhex(c)))
    return r


# From docs/math.md: tables kExp2C, kTanhC, kErfC and kErfcC, and the two terms of log2 e.
EXP2 = (
    "0x1.0p+0",
    "0x1.62e43p-1",
    "0x1.ebfbdcp-3",
    "0x1.c6af7cp-5",
    "0x1.3b2dep-7",
    "0x1.5f082ep-10",
    "0x1.416b5ep-13",
)
TANH = ("-0x1.55555p-2", "0x1.110f52p-3", "-0x1.b9bb3cp-5", "0x1.617feep-6", "-0x1.02974p-7", "0x1.f256p-10")
ERF = (
    "0x1.06eba8p-3", "-0x1.81273ep-2", "0x1.ce2ce6p-4", "-0x1.b7f71ap-6", "0x1.53f224p-8", "-0x1.a3515ep-11",
    "0x1.4771fep-14",
)  # fmt: skip
ERFC = (
    "-0x1.558eaep+1", "-0x1.e75306p+1", "-0x1.37666ap+0", "-0x1.e8d72ep-5", "0x1.c73882p-7", "-0x1.31809p-9",
    "0x1.7ddc8ep-13",
)  # fmt: skip
LOG2E, LOG2E_LOW = np.float32(float.fromhex("0x1.715476p+0")), np.float32(float.fromhex("0x1.4ae0cp-26"))
ROUND_TO_INT = np.float32(1.5 * 2**23)
ONE, HALF = np.float32(1), np.float32(0.5)


def _scaled(significand: np.ndarray, rounded: np.ndarray) -> np.ndarray:
    return np.ldexp(significand, (rounded - ROUND_TO_INT).astype(np.int32)).astype(np.float32)


def _exp_nonpositive(x: np.ndarray) -> np.ndarray:
    large = x >= np.float32(float.fromhex("-0x1.5d589ep+6"))
    x = np.where(large, x, np.float32(0))
    rounded = fma(x, LOG2E, ROUND_TO_INT)
    f = fma(x, LOG2E_LOW, fma(x, LOG2E, -(rounded - ROUND_TO_INT)))
    return np.where(large, _scaled(_horner(f, *EXP2), rounded), np.float32(0))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    e = _exp_nonpositive(-np.abs(x))
    return np.where(np.isnan(x), np.float32(np.nan), np.where(x < 0, e, ONE) / (ONE + e))


def _tanh(x: np.ndarray) -> np.ndarray:
    a = np.where(np.abs(x) < 10, np.abs(x), np.float32(10))
    u = a * a
    below = fma(u * a, _horner(u, *TANH), a)
    twice = np.float32(2) * LOG2E
    rounded = fma(a, twice, ROUND_TO_INT)
    e = _scaled(_horner(fma(a, twice, -(rounded - ROUND_TO_INT)), *EXP2), rounded)
    above = ONE - np.float32(2) / (e + ONE)
    return np.where(np.isnan(x), np.float32(np.nan), np.copysign(np.where(a < np.float32(0.7), below, above), x))


def _erf(x: np.ndarray) -> np.ndarray:
    a = np.where(np.abs(x) < 4, np.abs(x), np.float32(4))
    below = fma(a, _horner(a * a, *ERF), a)
    g = _horner(a - ONE, *ERFC)
    rounded = g + ROUND_TO_INT
    above = ONE - _scaled(_horner(g - (rounded - ROUND_TO_INT), *EXP2), rounded)
    return np.where(np.isnan(x), np.float32(np.nan), np.copysign(np.where(a < 1, below, above), x))


def activated(g: np.ndarray, activation: str) -> tuple[np.ndarray, np.ndarray]:
    """The activation of float32 gates and its derivative, with every rounding of the contract."""
    m = np.where(g < -88, np.float32(-88), g)
    c = np.where(m > 88, np.float32(88), m)
    if activation == "silu":
        s = _sigmoid(g)
        return m * s, s * fma(c, ONE - s, ONE)
    if activation == "gelu":
        w = ONE + _erf(g * np.float32(math.sqrt(0.5)))
        density = np.float32(1 / math.sqrt(2 * math.pi)) * _exp_nonpositive(-HALF * (c * c))
        return (HALF * m) * w, fma(c, density, HALF * w)
    root = np.float32(math.sqrt(2 / math.pi))
    t = _tanh(root * fma(np.float32(0.044715) * (g * g), g, g))
    w = ONE + t
    inner = root * fma(np.float32(3 * 0.044715), c * c, ONE)
    return (HALF * m) * w, fma((HALF * c) * fma(-t, t, ONE), inner, HALF * w)


def contract(o: Operands, activation: str = "silu", round_before_mul: bool = False) -> Results:
    """The bytes that :func:`results` must give."""
    import torch

    gate, up, dy = (t.detach().cpu().float().contiguous().numpy() for t in o)

    def rounded(a: np.ndarray) -> Any:
        return torch.from_numpy(np.ascontiguousarray(a)).to(o.gate.dtype)

    with np.errstate(all="ignore"):
        value, slope = activated(gate, activation)
        if round_before_mul:
            value = rounded(value).float().numpy()
        return Results(rounded(value * up), rounded((dy * up) * slope), rounded(dy * value))


def canonical(values: Any) -> tuple[Any, ...]:
    """The results with every NaN replaced by one NaN, since NumPy's and torch's NaNs have different bits."""
    import torch

    return tuple(
        None if r is None else torch.where(torch.isnan(r), torch.full_like(r, float("nan")), r).contiguous()
        for r in values
    )


# ---- float64 --------------------------------------------------------------------------------------------------------


def failures(o: Operands, got: Results, activation: str, round_before_mul: bool = False) -> str:
    """Names the results that are further from float64 than the contract allows."""
    wide = [t.detach().cpu().double().numpy() for t in o]
    reference = rk.silu_mul_reference if activation == "silu" else rk.gelu_mul_reference
    want = reference(*wide[:2], dy=wide[2], **functions(activation)[2])
    operator = "silu_mul" if activation == "silu" else "gelu_mul"
    gate, up, dy = (np.abs(a) for a in wide)
    value = {"act": np.abs(want["act"]), "gate": gate}
    dtype = str(o.gate.dtype).removeprefix("torch.")
    if round_before_mul:
        value |= {"inner": ROUNDING[dtype].inner, "inner_least": ROUNDING[dtype].least}
    facts = {"y": value | {"other": up}, "d_gate": {"gate": gate, "other": up * dy}, "d_up": value | {"other": dy}}
    wrong = []
    for name, of in facts.items():
        result = getattr(got, name)
        bound = row(operator, name).allowed(dtype, expected=want[name], **of)
        off = np.abs(result.detach().cpu().double().numpy() - want[name])
        if not (off <= bound).all():
            i = np.unravel_index(int(np.argmax(np.nan_to_num(off - bound, nan=np.inf))), off.shape)
            wrong.append(f"{name}{list(map(int, i))}: off by {off[i]:.3g}, allowed {bound[i]:.3g}")
    return "; ".join(wrong)


def contract_failures(rng: np.random.Generator) -> str:
    """Compares results with the bounds of the contract's table for test_contract.py, one activation at a time."""
    o = operands(rng, (5,), 40)
    return "; ".join(failures(o, results(o, a), a) for a in ACTIVATIONS)
