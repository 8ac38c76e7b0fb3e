"""attention for every framework: the same bytes, and results in the caller's own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import dlpack
import rl_kernel_native as rk
from cases import beyond, raw
from rl_kernel_native.reference.attention import attention_facts

_random = np.random.default_rng(12)
Q, DOUT = (_random.standard_normal((2, 9, 4, 24)).astype(np.float32) for _ in range(2))
K, V = (_random.standard_normal((2, 11, 2, 24)).astype(np.float32) for _ in range(2))
SLOPE = _random.standard_normal((2, 4, 9)).astype(np.float32)
USED = np.array([11, 5], np.int32)
DTYPES = ["float32", "float16", "bfloat16"]


def of(dtype: str, *arrays: np.ndarray) -> list[np.ndarray]:
    if dtype == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy's bfloat16 comes from ml_dtypes")
        return [a.astype(ml_dtypes.bfloat16) for a in arrays]
    return [a.astype(dtype) for a in arrays]


def everything(make: Any, dtype: str = "float32") -> list[Any]:
    """Every function, of arrays that ``make`` makes."""
    q, k, v, dout = (make(a) for a in of(dtype, Q, K, V, DOUT))
    used = make(USED)
    out, lse = rk.attention(q, k, v, seqused_k=used, exp="portable", return_lse=True)
    return [
        out,
        lse,
        *rk.attention_backward(dout, q, k, v, out, lse, dlse=make(SLOPE), seqused_k=used, exp="portable"),
        rk.attention(q, k, v, window_size=3, exp="portable"),
    ]


def bytes_of(results: list[Any]) -> list[bytes]:
    return [raw(r) for r in results]


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
    torch = pytest.importorskip("torch")
    kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

    def make(a: np.ndarray) -> Any:
        if a.dtype.name == "bfloat16":
            return torch.from_numpy(a.astype(np.float32)).to(kinds[dtype])
        return torch.from_numpy(a)

    got = everything(make, dtype)
    assert all(isinstance(r, torch.Tensor) for r in got)
    assert bytes_of(got) == bytes_of(everything(lambda a: a, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_in_jax_out(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]
    got = everything(lambda a: jax.device_put(a, cpu), dtype)
    assert all(isinstance(r, jax.Array) for r in got)
    assert bytes_of(got) == bytes_of(everything(lambda a: a, dtype))


@pytest.mark.parametrize("exporter", [dlpack.Exporter, dlpack.OldExporter])
def test_any_exporter_works_and_gets_numpy(exporter: Any) -> None:
    got = rk.attention(exporter(Q), exporter(K), exporter(V), seqused_k=exporter(USED))
    assert type(got) is np.ndarray
    assert raw(got) == raw(rk.attention(Q, K, V, seqused_k=USED))


def test_negative_strides_of_numpy() -> None:
    """Only NumPy has them. Heads and sequences backwards are the same ones backwards."""
    want = rk.attention(Q, K, V)
    got = rk.attention(Q[::-1, :, ::-1], K[::-1, :, ::-1], V[::-1, :, ::-1])
    assert raw(got) == raw(np.ascontiguousarray(want[::-1, :, ::-1]))


def test_numpy_works_where_torch_is_not_loaded() -> None:
    code = """
import sys, numpy as np, rl_kernel_native as rk
x = np.ones((1, 3, 2, 8), np.float16)
out, lse = rk.attention(x, x, x, return_lse=True)
print(out[0, 2, 1, 7], rk.attention_backward(x, x, x, x, out, lse)[0].dtype, 'torch' in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1.0 float16 False\n"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # CuPy has no bfloat16
def test_cupy_in_cupy_out_with_the_bytes_of_torch(dtype: str) -> None:
    cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")
    got = everything(cupy.asarray, dtype)
    assert all(isinstance(r, cupy.ndarray) for r in got)
    assert bytes_of(got) == bytes_of(everything(lambda a: torch.from_numpy(a).cuda(), dtype))
