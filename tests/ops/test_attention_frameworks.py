"""attention for every framework: the same bytes, and results in the caller's framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dlpack
import rl_kernel_native as rk
from cases import beyond, raw
from framework_arrays import (
    DTYPES,
    assert_cupy_has_the_bytes_of_torch,
    assert_jax_has_the_bytes_of_numpy,
    assert_prints_without_torch,
    assert_torch_has_the_bytes_of_numpy,
    of,
)
from rl_kernel_native.reference.attention import attention_facts

_random = np.random.default_rng(12)
Q, DOUT = (_random.standard_normal((2, 9, 4, 24)).astype(np.float32) for _ in range(2))
K, V = (_random.standard_normal((2, 11, 2, 24)).astype(np.float32) for _ in range(2))
SLOPE = _random.standard_normal((2, 4, 9)).astype(np.float32)
USED = np.array([11, 5], np.int32)
SINKS = _random.standard_normal(4).astype(np.float32)


def everything(make: Any, dtype: str = "float32") -> list[Any]:
    """Calls every function on arrays that ``make`` makes."""
    q, k, v, dout = (make(a) for a in of(dtype, Q, K, V, DOUT))
    used = make(USED)
    out, lse = rk.attention(q, k, v, seqused_k=used, exp="portable", return_lse=True)
    return [
        out,
        lse,
        *rk.attention_backward(dout, q, k, v, out, lse, dlse=make(SLOPE), seqused_k=used, exp="portable"),
        rk.attention(q, k, v, window_size=3, exp="portable"),
        rk.attention(q, k, v, sinks=make(SINKS), exp="portable"),
        *rk.attention_backward(dout, q, k, v, out, lse, sinks=make(SINKS), exp="portable"),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_in_numpy_out(dtype: str) -> None:
    q, k, v = of(dtype, Q, K, V)
    got = everything(lambda a: a, dtype)
    assert all(type(a) is np.ndarray for a in got)
    assert got[0].dtype == q.dtype
    want = rk.attention_reference(q, k, v, seqused_k=USED)
    for i, used in enumerate(USED):
        at = slice(i, i + 1)
        facts = attention_facts(q[at], k[at, :used], v[at, :used], q[at], dtype)
        assert not beyond("attention", "out", got[0][at], want["out"][at], dtype, **facts["out"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_has_the_bytes_of_numpy(dtype: str) -> None:
    assert_torch_has_the_bytes_of_numpy(everything, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_in_jax_out_with_the_bytes_of_numpy(dtype: str) -> None:
    assert_jax_has_the_bytes_of_numpy(everything, dtype)


@pytest.mark.parametrize("exporter", [dlpack.Exporter, dlpack.OldExporter])
def test_any_exporter_works_and_gets_numpy(exporter: Any) -> None:
    got = rk.attention(exporter(Q), exporter(K), exporter(V), seqused_k=exporter(USED))
    assert type(got) is np.ndarray
    assert raw(got) == raw(rk.attention(Q, K, V, seqused_k=USED))


def test_negative_strides_of_numpy() -> None:
    """Only NumPy has negative strides. Reversed heads and sequences give the reversed results."""
    want = rk.attention(Q, K, V)
    got = rk.attention(Q[::-1, :, ::-1], K[::-1, :, ::-1], V[::-1, :, ::-1])
    assert raw(got) == raw(np.ascontiguousarray(want[::-1, :, ::-1]))


def test_numpy_works_where_torch_is_not_loaded() -> None:
    code = """
x = np.ones((1, 3, 2, 8), np.float16)
out, lse = rk.attention(x, x, x, return_lse=True)
print(out[0, 2, 1, 7], rk.attention_backward(x, x, x, x, out, lse)[0].dtype)
"""
    assert_prints_without_torch(code, "1.0 float16")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # CuPy has no bfloat16
def test_cupy_in_cupy_out_with_the_bytes_of_torch(dtype: str) -> None:
    assert_cupy_has_the_bytes_of_torch(everything, dtype)
