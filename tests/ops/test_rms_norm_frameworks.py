"""rms_norm for every framework: the same bytes, results of the caller's own kind, and writes in place."""

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
)
from rl_kernel_native.contract import row

ROWS, COLUMNS, EPS = 13, 100, 1e-6  # only the first row is 16-byte aligned

_random = np.random.default_rng(11)
X, R, DY, E = (_random.standard_normal((ROWS, COLUMNS)).astype(np.float32) for _ in range(4))
W = _random.standard_normal(COLUMNS).astype(np.float32)


def everything(make: Any, dtype: str = "float32") -> list[Any]:
    """Calls every function on arrays that ``make`` makes."""
    x, r, dy, e, w = (make(a) for a in of(dtype, X, R, DY, E, W))
    y, new_residual, rstd = rk.rms_norm(x, w, EPS, residual=r, return_rstd=True, weight_offset=1.0)
    return [
        rk.rms_norm(x, None, EPS),
        y,
        new_residual,
        rstd,
        *rk.rms_norm_backward(dy, new_residual, w, EPS, rstd=rstd, d_new_residual=e, weight_offset=1.0),
        *rk.rms_norm_backward(dy, x, w, EPS, dweight_dtype="float32"),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_in_numpy_out(dtype: str) -> None:
    x, w = of(dtype, X, W)
    got = everything(lambda a: a, dtype)
    assert all(type(a) is np.ndarray for a in got)
    assert [a.dtype for a in got] == [x.dtype] * 3 + [np.float32] + [x.dtype] * 3 + [np.float32]
    want = rk.rms_norm_reference(got[2], w, EPS, weight_offset=1.0)
    allowed = row("rms_norm", "y").allowed(dtype, expected=want["y"], columns=COLUMNS)
    assert (np.abs(got[1].astype(np.float64) - want["y"]) <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_has_the_bytes_of_numpy(dtype: str) -> None:
    assert_torch_has_the_bytes_of_numpy(everything, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_in_jax_out_with_the_bytes_of_numpy(dtype: str) -> None:
    assert_jax_has_the_bytes_of_numpy(everything, dtype)
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]
    x = jax.device_put(X, cpu)
    with pytest.raises(TypeError, match=r"main_grad: .*JAX array, which is immutable"):
        rk.rms_norm_backward(x, x, jax.device_put(W, cpu), EPS, main_grad=jax.numpy.zeros(COLUMNS))


@pytest.mark.parametrize("exporter", [dlpack.Exporter, dlpack.OldExporter])
def test_any_exporter_works_and_gets_numpy(exporter: Any) -> None:
    x, w = exporter(X), exporter(W)
    got = [rk.rms_norm(x, w, EPS), *rk.rms_norm_backward(exporter(DY), x, w, EPS)]
    assert all(type(r) is np.ndarray for r in got)
    assert bytes_of(got) == bytes_of([rk.rms_norm(X, W, EPS), *rk.rms_norm_backward(DY, X, W, EPS)])


def test_frameworks_may_be_mixed_on_the_cpu() -> None:
    """The first argument decides which framework the result belongs to."""
    torch = pytest.importorskip("torch")
    got = rk.rms_norm(X, torch.from_numpy(W), EPS)
    assert type(got) is np.ndarray
    assert raw(got) == raw(rk.rms_norm(X, W, EPS))
    with pytest.raises(TypeError, match="weight: expected an array of the framework of the first argument"):
        rk.rms_norm(torch.from_numpy(X), W, EPS)


def test_negative_row_strides_of_numpy() -> None:
    """Only NumPy has negative strides. Reversed rows give reversed rows."""
    assert raw(rk.rms_norm(X[::-1], W, EPS, residual=R[::-1])[0]) == raw(rk.rms_norm(X, W, EPS, residual=R)[0][::-1])
    backwards = [np.ascontiguousarray(a[::-1]) for a in (DY, X)]
    got, want = rk.rms_norm_backward(DY[::-1], X[::-1], W, EPS), rk.rms_norm_backward(*backwards, W, EPS)
    assert bytes_of(list(got)) == bytes_of(list(want))


def test_numpy_arrays_are_written_in_place() -> None:
    main_grad = np.full(COLUMNS, 0.5, np.float32)
    want = rk.rms_norm_backward(DY, X, W, EPS)[1]
    assert rk.rms_norm_backward(DY, X, W, EPS, main_grad=main_grad)[1] is main_grad
    assert raw(main_grad) == raw(np.float32(0.5) + want)


def test_numpy_works_where_torch_is_not_loaded() -> None:
    code = """
x = np.full((3, 32), 2, np.float16)
print(rk.rms_norm(x, x[0], 1e-6)[0, 0], rk.rms_norm_backward(x, x, x[0], 1e-6)[1].dtype)
"""
    assert_prints_without_torch(code, "2.0 float16")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # CuPy has no bfloat16
def test_cupy_in_cupy_out_with_the_bytes_of_torch(dtype: str) -> None:
    assert_cupy_has_the_bytes_of_torch(everything, dtype)
