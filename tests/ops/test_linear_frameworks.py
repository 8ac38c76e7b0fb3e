"""linear for every framework: the same bytes, results of the caller's own kind, and writes in place."""

from __future__ import annotations

import sys
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

ROWS, INS, OUTS = 13, 96, 37  # rows of weight are not 16-byte aligned, but rows of x are

_random = np.random.default_rng(11)
X = _random.standard_normal((ROWS, INS)).astype(np.float32)
W = _random.standard_normal((OUTS, INS)).astype(np.float32)
B = _random.standard_normal(OUTS).astype(np.float32)
DY = _random.standard_normal((ROWS, OUTS)).astype(np.float32)


def everything(make: Any, dtype: str = "float32") -> list[Any]:
    """Calls every function on arrays that ``make`` makes."""
    x, w, b, dy = (make(a) for a in of(dtype, X, W, B, DY))
    parts = [
        rk.linear_partial(make(xs), make(ws), k_segments=2, first_segment=i, num_segments=1)
        for i, (xs, ws) in enumerate(of(dtype, X[:, c], W[:, c]) for c in (slice(0, 48), slice(48, 96)))
    ]
    return [
        rk.linear(x, w, b),
        rk.linear(x, w, k_segments=2, out_dtype="float32", engine="native"),
        rk.linear_input_grad(dy, w),
        rk.linear_weight_grad(dy, x),
        rk.linear_bias_grad(dy, out_dtype="float32"),
        rk.tree_sum(parts, bias=b),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_in_numpy_out(dtype: str) -> None:
    x, w, b, dy = of(dtype, X, W, B, DY)
    got = everything(lambda a: a, dtype)
    assert all(type(r) is np.ndarray for r in got)
    assert [r.dtype for r in got] == [x.dtype, np.float32, x.dtype, x.dtype, np.float32, np.float32]
    want = rk.linear_reference(x, w, b, dy=dy)
    terms = {"y": x.shape[-1], "dx": dy.shape[-1], "dweight": dy[..., 0].size}
    for name, result in zip(terms, (got[0], got[2], got[3]), strict=True):
        error = np.abs(result.astype(np.float64) - want[name])
        facts = {"terms": terms[name], "scale": want[f"{name}_scale"], "expected": want[name]}
        assert (error <= row("linear", name).allowed(dtype, **facts)).all(), name
    assert rk.linear_partial(x, w, k_segments=1, first_segment=0, num_segments=1).dtype == np.float32


@pytest.mark.parametrize("unit", ["ieee", "sm_90"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_has_the_bytes_of_numpy(dtype: str, unit: str) -> None:
    if dtype == "float32" and unit != "ieee":
        pytest.skip("units multiply 16-bit types alone")
    with rk.arithmetic(unit):
        assert_torch_has_the_bytes_of_numpy(everything, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_in_jax_out_with_the_bytes_of_numpy(dtype: str) -> None:
    assert_jax_has_the_bytes_of_numpy(everything, dtype)
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]
    x, w = (jax.device_put(a, cpu) for a in (X, W))
    with pytest.raises(TypeError, match=r"main_grad: .*JAX array, which is immutable"):
        rk.linear_weight_grad(x, x, main_grad=jax.numpy.zeros((INS, INS)))
    with pytest.raises(TypeError, match=r"x: expected an array that speaks DLPack, got \w*Tracer"):
        jax.jit(lambda a: rk.linear(a, w))(x)


def test_a_dtype_may_be_any_frameworks_or_a_name() -> None:
    x, w = of("float16", X, W)
    given: list[Any] = ["float32", np.float32, np.dtype("float32")]
    for module, name in (("torch", "float32"), ("jax.numpy", "float32")):
        if module.split(".")[0] in sys.modules or module == "torch":
            given.append(getattr(pytest.importorskip(module), name))
    want = raw(rk.linear(x, w, out_dtype="float32"))
    assert all(raw(rk.linear(x, w, out_dtype=d)) == want for d in given)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert rk.linear(x, w, out_dtype=ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("exporter", [dlpack.Exporter, dlpack.OldExporter])
def test_any_exporter_works_and_gets_numpy(exporter: Any) -> None:
    got = everything(exporter)
    assert all(type(r) is np.ndarray for r in got)
    assert bytes_of(got) == bytes_of(everything(lambda a: a))


def test_frameworks_may_be_mixed_on_the_cpu() -> None:
    """The first argument decides which framework the result belongs to."""
    torch = pytest.importorskip("torch")
    got = rk.linear(X, torch.from_numpy(W), torch.from_numpy(B))
    assert type(got) is np.ndarray
    assert raw(got) == raw(rk.linear(X, W, B))
    with pytest.raises(
        TypeError, match="weight: expected an array of the framework of the first argument, got ndarray"
    ):
        rk.linear(torch.from_numpy(X), W)


def test_negative_row_strides_of_numpy() -> None:
    """Only NumPy has negative strides. Reversed rows give reversed rows; reversed rows of a weight give reversed
    columns of y."""
    y = rk.linear(X, W, B)
    assert raw(rk.linear(X[::-1], W, B)) == raw(y[::-1])
    assert raw(rk.linear(X, W[::-1], np.ascontiguousarray(B[::-1]))) == raw(y[:, ::-1])
    assert raw(rk.linear_input_grad(DY[::-1], W)) == raw(rk.linear_input_grad(DY, W)[::-1])
    backwards = np.ascontiguousarray(DY[::-1]), np.ascontiguousarray(X[::-1])
    assert raw(rk.linear_weight_grad(DY[::-1], X[::-1])) == raw(rk.linear_weight_grad(*backwards))
    memory = np.zeros((OUTS, INS), np.float32)
    assert rk.linear_weight_grad(DY, X, out=memory[::-1]) is not memory
    assert raw(memory[::-1]) == raw(rk.linear_weight_grad(DY, X))


def test_numpy_arrays_are_written_in_place() -> None:
    main_grad, out = np.full((OUTS, INS), 0.5, np.float32), np.empty((OUTS, INS), np.float32)
    want = rk.linear_weight_grad(DY, X)
    assert rk.linear_weight_grad(DY, X, out=out) is out
    assert raw(out) == raw(want)
    assert rk.linear_weight_grad(DY, X, main_grad=main_grad) is main_grad
    assert raw(main_grad) == raw(np.float32(0.5) + want)


def test_numpy_works_where_torch_is_not_loaded() -> None:
    code = """
x, w = np.ones((3, 32), np.float16), np.ones((5, 32), np.float16)
parts = [rk.linear_partial(x[:, i:i+16], w[:, i:i+16], k_segments=2, first_segment=i // 16, num_segments=1)
         for i in (0, 16)]
print(rk.linear(x, w)[0, 0], rk.tree_sum(parts, out_dtype="float16").dtype)
"""
    assert_prints_without_torch(code, "32.0 float16")


@pytest.mark.gpu
def test_cupy_in_cupy_out_with_the_bytes_of_torch() -> None:
    assert_cupy_has_the_bytes_of_torch(everything, "float16")  # CuPy has no bfloat16, and GPUs have no float32 products
