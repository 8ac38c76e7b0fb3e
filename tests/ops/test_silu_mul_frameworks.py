"""Tests of silu_mul and gelu_mul for every framework: the same bytes, and results in the caller's framework."""

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

ROWS, COLUMNS = 13, 100  # rows after the first may not be aligned to 16 bytes

_random = np.random.default_rng(11)
GATE, UP, DY = (_random.standard_normal((ROWS, COLUMNS)).astype(np.float32) for _ in range(3))


def everything(make: Any, dtype: str = "float32") -> list[Any]:
    """Results of every function in both forms, on arrays that ``make`` makes."""
    gate_up = np.concatenate((GATE, UP), -1)
    gate, up, dy, both = (make(a) for a in of(dtype, GATE, UP, DY, gate_up))
    return [
        rk.silu_mul(gate, up, round_before_mul=True),
        rk.silu_mul(both),
        rk.gelu_mul(gate, up, approximate="none"),
        rk.gelu_mul(both),
        *rk.silu_mul_backward(dy, gate, up),
        rk.silu_mul_backward(dy, both, round_before_mul=True),
        *rk.gelu_mul_backward(dy, gate, up, approximate="none"),
        rk.gelu_mul_backward(dy, both),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_in_numpy_out(dtype: str) -> None:
    gate, up = of(dtype, GATE, UP)
    got = everything(lambda a: a, dtype)
    assert all(type(a) is np.ndarray and a.dtype == gate.dtype for a in got)
    want = rk.silu_mul_reference(gate, up)
    facts = {
        "act": np.abs(want["act"]),
        "gate": np.abs(gate.astype(np.float64)),
        "other": np.abs(up.astype(np.float64)),
    }
    allowed = row("silu_mul", "y").allowed(dtype, expected=want["y"], **facts)
    assert (np.abs(got[1].astype(np.float64) - want["y"]) <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_has_the_bytes_of_numpy(dtype: str) -> None:
    assert_torch_has_the_bytes_of_numpy(everything, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_in_jax_out_with_the_bytes_of_numpy(dtype: str) -> None:
    assert_jax_has_the_bytes_of_numpy(everything, dtype)


@pytest.mark.parametrize("exporter", [dlpack.Exporter, dlpack.OldExporter])
def test_any_exporter_works_and_gets_numpy(exporter: Any) -> None:
    got = everything(exporter)
    assert all(type(r) is np.ndarray for r in got)
    assert bytes_of(got) == bytes_of(everything(lambda a: a))


def test_frameworks_may_be_mixed_on_the_cpu() -> None:
    """The result belongs to the framework of the gate."""
    torch = pytest.importorskip("torch")
    got = rk.silu_mul(GATE, torch.from_numpy(UP))
    assert type(got) is np.ndarray
    assert raw(got) == raw(rk.silu_mul(GATE, UP))
    with pytest.raises(TypeError, match="up: expected an array of the framework of the first argument"):
        rk.silu_mul(torch.from_numpy(GATE), UP)


def test_negative_row_strides_of_numpy() -> None:
    """Only NumPy has negative strides. Reversed rows give the same results in reverse."""
    assert raw(rk.silu_mul(GATE[::-1], UP[::-1])) == raw(rk.silu_mul(GATE, UP)[::-1])
    got = rk.silu_mul_backward(DY[::-1], GATE[::-1], UP[::-1])
    assert bytes_of(list(got)) == bytes_of([g[::-1] for g in rk.silu_mul_backward(DY, GATE, UP)])


def test_a_read_only_array_is_a_fine_input() -> None:
    gate = GATE.copy()
    gate.flags.writeable = False
    assert raw(rk.silu_mul(gate, UP)) == raw(rk.silu_mul(GATE, UP))


def test_numpy_works_where_torch_is_not_loaded() -> None:
    code = """
x = np.full((3, 32), 2, np.float16)
print(rk.gelu_mul(x)[0, 0], rk.silu_mul_backward(x[:, :16], x).dtype)
"""
    assert_prints_without_torch(code, "3.91 float16")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # CuPy has no bfloat16
def test_cupy_in_cupy_out_with_the_bytes_of_torch(dtype: str) -> None:
    assert_cupy_has_the_bytes_of_torch(everything, dtype)
