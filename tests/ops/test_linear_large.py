"""linear beyond 2^31 elements of each array, where 32-bit offsets overflow. Parts must have the same bytes; other tests
check small calls."""

from __future__ import annotations

from typing import Any

import pytest

import rl_kernel_native as rk
from cases import differing

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.gpu_memory(24)]


def normal(*shape: int) -> Any:
    """Filled row by row, since torch's own generators have 32-bit limits, too."""
    found = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    for i in range(0, shape[0], 4096):
        found[i : i + 4096].normal_()
    return found


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("engine", ["auto", "native"])
def test_x_and_dx(engine: str) -> None:
    """[66,000, 32,768] = 2^31 and 15 million more."""
    x, weight, rows = normal(66_000, 32_768), normal(24, 32_768), slice(65_990, None)
    y = rk.linear(x, weight, engine=engine)
    assert not differing(y[rows], rk.linear(x[rows].clone(), weight, engine=engine))
    dx = rk.linear_input_grad(y, weight, engine=engine)
    assert not differing(dx[rows], rk.linear_input_grad(y[rows].clone(), weight, engine=engine))


@pytest.mark.parametrize("engine", ["auto", "native"])
def test_y_and_dy(engine: str) -> None:
    """[16,500, 131,072] = 2^31 and 15 million more."""
    x, weight, rows = normal(16_500, 32), normal(131_072, 32), slice(16_490, None)
    y = rk.linear(x, weight, engine=engine)
    assert not differing(y[rows], rk.linear(x[rows].clone(), weight, engine=engine))
    dx = rk.linear_input_grad(y, weight, engine=engine)
    assert not differing(dx[rows], rk.linear_input_grad(y[rows].clone(), weight, engine=engine))
    columns = slice(131_060, None)
    dweight = rk.linear_weight_grad(y, x, engine=engine)
    assert not differing(dweight[columns], rk.linear_weight_grad(y[:, columns].contiguous(), x, engine=engine))
    assert not differing(rk.linear_bias_grad(y)[columns], rk.linear_bias_grad(y[:, columns].contiguous()))


@pytest.mark.parametrize("engine", ["auto", "native"])
def test_weight_and_dweight(engine: str) -> None:
    """[131,072, 16,500]: a head of 128 K tokens, with in_features that are no multiple of a tile."""
    weight, x, outs = normal(131_072, 16_500), normal(40, 16_500), slice(131_060, None)
    y = rk.linear(x, weight, engine=engine)
    assert not differing(y[:, outs], rk.linear(x, weight[outs].clone(), engine=engine))
    dweight = rk.linear_weight_grad(y, x, engine=engine)
    assert not differing(dweight[outs], rk.linear_weight_grad(y[:, outs].contiguous(), x, engine=engine))


def test_parts() -> None:
    parts = [torch.ones(2**15, 2**16 + 8, device="cuda") for _ in range(2)]
    parts[1][-1, -3:] = 5.0
    bias = torch.zeros(2**16 + 8, device="cuda")
    bias[-1] = 1.0
    assert rk.tree_sum(parts, bias=bias, out_dtype="bfloat16")[-1, -4:].tolist() == [2.0, 6.0, 6.0, 7.0]
