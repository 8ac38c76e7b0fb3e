"""rope for every framework: the same bytes, and results in the caller's framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dlpack
import rl_kernel_native as rk
from cases import raw
from framework_arrays import (
    DTYPES,
    assert_cupy_has_the_bytes_of_torch,
    assert_jax_has_the_bytes_of_numpy,
    assert_prints_without_torch,
    assert_torch_has_the_bytes_of_numpy,
    bytes_of,
    of,
    of_torch,
)
from rl_kernel_native.contract import row

TOKENS, DIM = 13, 36  # only the first head is 16-byte aligned

_random = np.random.default_rng(12)
Q, K = (_random.standard_normal((TOKENS, h, DIM)).astype(np.float32) for h in (3, 1))
_angles = np.arange(40)[:, None] / 100.0 ** (np.arange(16) / 16)
COS, SIN = np.cos(_angles).astype(np.float32), np.sin(_angles).astype(np.float32)
IDS = _random.integers(0, 40, TOKENS)


def everything(make: Any, dtype: str = "float32") -> list[Any]:
    """Calls every function on arrays that ``make`` makes."""
    q, k, *narrow = (make(a) for a in of(dtype, Q, K, COS, SIN))
    cos, sin = make(COS), make(SIN)
    small = make(IDS.astype(np.int32))
    return [
        *rk.rope(q, k, cos, sin, position_ids=small, partial_dim=32),
        *rk.rope(q, k, *narrow, position_ids=small, partial_dim=32, intermediate="input", interleaved=True),
        *rk.rope_backward(q, k, cos, sin, position_ids=small, partial_dim=32),
        rk.rope(k, None, make(COS[:TOKENS]), make(SIN[:TOKENS]), partial_dim=16)[0],
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_in_numpy_out(dtype: str) -> None:
    (q,) = of(dtype, Q)
    got = everything(lambda a: a, dtype)
    assert all(type(a) is np.ndarray and a.dtype == q.dtype for a in got)
    want = rk.rope_reference(q, None, COS, SIN, position_ids=IDS, partial_dim=32)
    allowed = row("rope", "q").allowed(dtype, expected=want["q"], scale=want["q_scale"])
    assert (np.abs(got[0].astype(np.float64) - want["q"]) <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_has_the_bytes_of_numpy(dtype: str) -> None:
    assert_torch_has_the_bytes_of_numpy(everything, dtype)


@pytest.mark.parametrize("make", [of_torch, lambda a: a], ids=["torch", "numpy"])
def test_positions_of_int64_are_those_of_int32(make: Any) -> None:
    q, cos, sin = make(Q), make(COS), make(SIN)
    wide, small = (
        rk.rope(q, None, cos, sin, position_ids=make(ids), partial_dim=32)[0] for ids in (IDS, IDS.astype(np.int32))
    )
    assert raw(wide) == raw(small)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_in_jax_out_with_the_bytes_of_numpy(dtype: str) -> None:
    assert_jax_has_the_bytes_of_numpy(everything, dtype)


@pytest.mark.parametrize("exporter", [dlpack.Exporter, dlpack.OldExporter])
def test_any_exporter_works_and_gets_numpy(exporter: Any) -> None:
    got = rk.rope(*(exporter(a) for a in (Q, K, COS, SIN)), position_ids=exporter(IDS), partial_dim=32)
    assert all(type(r) is np.ndarray for r in got)
    assert bytes_of(list(got)) == bytes_of(list(rk.rope(Q, K, COS, SIN, position_ids=IDS, partial_dim=32)))


def test_frameworks_may_be_mixed_on_the_cpu() -> None:
    """The first argument decides which framework the result belongs to."""
    torch = pytest.importorskip("torch")
    want = rk.rope(Q, K, COS, SIN, position_ids=IDS, partial_dim=32)
    got = rk.rope(Q, K, torch.from_numpy(COS), SIN, position_ids=torch.from_numpy(IDS), partial_dim=32)
    assert type(got[0]) is np.ndarray
    assert bytes_of(list(got)) == bytes_of(list(want))
    with pytest.raises(TypeError, match="cos: expected an array of the framework of the first argument"):
        rk.rope(torch.from_numpy(Q), None, COS, SIN, partial_dim=32)


def test_negative_strides_of_numpy() -> None:
    """Only NumPy has negative strides. Reversed tokens and heads give the reversed results."""
    want = rk.rope(Q, K, COS, SIN, position_ids=IDS, partial_dim=32)
    got = rk.rope(Q[::-1, ::-1], K[::-1], COS, SIN, position_ids=IDS[::-1], partial_dim=32)
    assert raw(got[0]) == raw(np.ascontiguousarray(want[0][::-1, ::-1]))
    assert raw(got[1]) == raw(np.ascontiguousarray(want[1][::-1]))
    got = rk.rope(Q, K, COS[::-1], SIN[::-1], position_ids=39 - IDS, partial_dim=32)
    assert bytes_of(list(got)) == bytes_of(list(want))


def test_numpy_works_where_torch_is_not_loaded() -> None:
    code = """
x = np.full((3, 1, 4), 2, np.float16)
c = np.ones((3, 2), np.float32)
print(rk.rope(x, None, c, c)[0][0, 0, 3], rk.rope_backward(x, x, c, c)[1].dtype)
"""
    assert_prints_without_torch(code, "4.0 float16")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # CuPy has no bfloat16
def test_cupy_in_cupy_out_with_the_bytes_of_torch(dtype: str) -> None:
    assert_cupy_has_the_bytes_of_torch(everything, dtype)
