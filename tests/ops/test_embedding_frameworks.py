"""embedding for every framework: the same bytes, and results in the caller's framework."""

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
    bytes_of,
    of,
)

ROWS, TOKENS, COLUMNS = 20, 300, 36  # only the first row is 16-byte aligned

_random = np.random.default_rng(12)
IDS = _random.integers(0, ROWS + 2, TOKENS)
WEIGHT = _random.standard_normal((ROWS, COLUMNS)).astype(np.float32)
DY = _random.standard_normal((TOKENS, COLUMNS)).astype(np.float32)


def everything(make: Any, dtype: str = "float32") -> list[Any]:
    """Calls every function on arrays that ``make`` makes."""
    weight, dy = (make(a) for a in of(dtype, WEIGHT, DY))
    ids = make(IDS.astype(np.int32))
    return [
        rk.embedding(ids, weight),
        rk.embedding(ids, weight, vocab_start=5, vocab_size=40),
        rk.embedding_backward(dy, ids, ROWS),
        rk.embedding_backward(dy, ids, ROWS, padding_idx=2, vocab_size=ROWS - 1, dweight_dtype="float32"),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_in_numpy_out(dtype: str) -> None:
    got = everything(lambda a: a, dtype)
    weight, dy = of(dtype, WEIGHT, DY)
    assert all(type(a) is np.ndarray for a in got)
    assert [a.dtype for a in got] == [weight.dtype] * 3 + [np.dtype(np.float32)]
    want = rk.embedding_reference(IDS, weight, dy=dy)
    assert np.array_equal(got[0].astype(np.float64), want["y"], equal_nan=True)
    assert not beyond("embedding", "dweight", got[2], want["dweight"], dtype, rows=TOKENS, scale=want["dweight_scale"])
    wide = rk.embedding(IDS, weight)
    assert raw(wide) == raw(got[0]), "int64"


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_has_the_bytes_of_numpy(dtype: str) -> None:
    assert_torch_has_the_bytes_of_numpy(everything, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_in_jax_out_with_the_bytes_of_numpy(dtype: str) -> None:
    assert_jax_has_the_bytes_of_numpy(everything, dtype)
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]
    ids, weight = jax.device_put(IDS.astype(np.int32), cpu), jax.device_put(WEIGHT, cpu)
    with pytest.raises(ValueError, match=r"ids: expected ids in \[0, 20\)"):
        rk.embedding(ids, weight, check=True)
    assert rk.embedding(ids, weight, check=True, vocab_size=22).shape == (TOKENS, COLUMNS)


@pytest.mark.parametrize("exporter", [dlpack.Exporter, dlpack.OldExporter])
def test_any_exporter_works_and_gets_numpy(exporter: Any) -> None:
    got = [
        rk.embedding(exporter(IDS), exporter(WEIGHT)),
        rk.embedding_backward(exporter(DY), exporter(IDS), ROWS),
    ]
    assert all(type(r) is np.ndarray for r in got)
    assert bytes_of(got) == bytes_of([rk.embedding(IDS, WEIGHT), rk.embedding_backward(DY, IDS, ROWS)])


def test_the_table_decides_on_the_framework() -> None:
    torch = pytest.importorskip("torch")
    got = rk.embedding(torch.from_numpy(IDS), WEIGHT)
    assert type(got) is np.ndarray
    assert raw(got) == raw(rk.embedding(IDS, WEIGHT))


def test_main_grad_of_numpy_is_written_in_place() -> None:
    main_grad = np.ones((ROWS, COLUMNS), np.float32)
    assert rk.embedding_backward(DY, IDS, ROWS, main_grad=main_grad) is main_grad
    want = rk.embedding_reference(IDS, WEIGHT, dy=DY)
    facts = {"rows": TOKENS, "scale": 1 + want["dweight_scale"]}
    assert not beyond("embedding", "dweight", main_grad, 1 + want["dweight"], **facts)


def test_negative_strides_of_numpy() -> None:
    """Only NumPy has negative strides."""
    want = rk.embedding(IDS, WEIGHT)
    assert raw(rk.embedding(IDS[::-1], WEIGHT)) == raw(np.ascontiguousarray(want[::-1]))
    ids = np.minimum(IDS, ROWS - 1)
    assert raw(rk.embedding(ROWS - 1 - ids, WEIGHT[::-1])) == raw(rk.embedding(ids, WEIGHT))
    backward = rk.embedding_backward(DY[::-1], IDS, ROWS)
    assert raw(backward) == raw(rk.embedding_backward(np.ascontiguousarray(DY[::-1]), IDS, ROWS))


def test_numpy_works_where_torch_is_not_loaded() -> None:
    code = """
w = np.full((3, 4), 2, np.float16)
ids = np.array([1, 2])
print(rk.embedding(ids, w)[0, 0], rk.embedding_backward(w[:2], ids, 3)[:, 0].tolist())
"""
    assert_prints_without_torch(code, "2.0 [0.0, 2.0, 2.0]")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # CuPy has no bfloat16
def test_cupy_in_cupy_out_with_the_bytes_of_torch(dtype: str) -> None:
    assert_cupy_has_the_bytes_of_torch(everything, dtype)
