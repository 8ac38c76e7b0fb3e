"""engine="auto" has the bytes of engine="native" wherever cuBLASLt may be used, and uses cuBLASLt nowhere else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


class Products(NamedTuple):
    kind: str  # "forward", "input_grad", "weight_grad"
    dtype: str
    out_dtype: str
    in_features: int
    out_features: int
    first_rows: int
    last_rows: int


@pytest.fixture(scope="module")
def products() -> list[Products]:
    from rl_kernel_native import _native

    torch.zeros(1, device="cuda")  # loads torch's cuBLASLt
    found = [Products(*row) for row in _native.module.linear_vendor_products(0)]
    if not found:
        pytest.skip(f"no record for {torch.cuda.get_device_name()} and the cuBLASLt that is here")
    return found


def operands(p: Products, rows: int, spread: float) -> list[Any]:
    """Normal values whose exponents spread over `spread` powers of two."""
    sizes = {
        "forward": ((rows, p.in_features), (p.out_features, p.in_features)),
        "input_grad": ((rows, p.out_features), (p.out_features, p.in_features)),
        "weight_grad": ((rows, p.out_features), (rows, p.in_features)),
    }[p.kind]

    def values(*size: int) -> Any:
        x = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        return x if spread == 0 else x * torch.exp2(spread * torch.randn_like(x))

    return [values(*size) for size in sizes]


def call(p: Products, pair: list[Any], engine: str) -> Any:
    if p.kind == "forward":
        return rk.linear(*pair, engine=engine)
    if p.kind == "input_grad":
        return rk.linear_input_grad(*pair, engine=engine)
    return rk.linear_weight_grad(*pair, out_dtype=p.out_dtype, engine=engine)


def kernels(run: Callable[[], Any]) -> list[str]:
    """Names of the kernels that a call runs."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in found if not name.startswith(("Mem", "Activity"))]


def is_ours(name: str) -> bool:
    return "rlk::" in name or "gemm_" in name


def each_size(products: list[Products]) -> Iterator[tuple[Products, int]]:
    for p in products:
        for rows in sorted({p.first_rows, (p.first_rows + p.last_rows) // 2, p.last_rows}):
            yield p, rows


def test_every_record_has_the_bytes_of_our_kernels(products: list[Products]) -> None:
    torch.manual_seed(0)
    for p, rows in each_size(products):
        for spread in (0.0, 4.0):
            pair = operands(p, rows, spread)
            auto, native = call(p, pair, "auto"), call(p, pair, "native")
            bits = torch.int32 if p.out_dtype == "float32" else torch.int16
            assert torch.equal(auto.view(bits), native.view(bits)), f"{p}, {rows} rows, spread {spread}"
            del auto, native, pair


def test_auto_is_cublaslt_where_that_is_recorded_and_native_never_is(products: list[Products]) -> None:
    for kind in ("forward", "input_grad", "weight_grad"):
        p = min((p for p in products if p.kind == kind), key=lambda p: p.last_rows)
        pair = operands(p, p.last_rows, 0.0)
        auto, native = (kernels(partial(call, p, pair, engine)) for engine in ("auto", "native"))
        assert [is_ours(name) for name in auto] == [False], auto
        assert [is_ours(name) for name in native] == [True], native


def test_what_no_record_covers_is_ours(products: list[Products]) -> None:
    p = next(p for p in products if p.kind == "forward" and p.last_rows >= 8)
    x, weight = operands(p, p.last_rows, 0.0)
    bias = torch.zeros(p.out_features, device="cuda", dtype=torch.bfloat16)
    wide = torch.zeros(p.last_rows, p.in_features + 8, device="cuda", dtype=torch.bfloat16)[:, : p.in_features]
    recorded = {(q.in_features, q.out_features) for q in products}
    assert (p.in_features, p.out_features - 8) not in recorded
    for what, run in {
        "a bias": lambda: rk.linear(x, weight, bias),
        "strided rows": lambda: rk.linear(wide, weight),
        "another width": lambda: rk.linear(x, weight[:-8]),
        "another dtype of y": lambda: rk.linear(x, weight, out_dtype="float32"),
        "segments": lambda: rk.linear(x, weight, k_segments=2),
        "float16": lambda: rk.linear(x.half(), weight.half()),
    }.items():
        found = kernels(run)
        assert all(is_ours(name) for name in found if "gemm" in name or "nvjet" in name), f"{what}: {found}"


FIRST_CALL_IN_A_GRAPH = """
import torch, rl_kernel_native as rk
x = torch.randn({rows}, {ins}, device="cuda", dtype=torch.bfloat16)
weight = torch.randn({outs}, {ins}, device="cuda", dtype=torch.bfloat16)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = rk.linear(x, weight)
graph.replay()
assert torch.equal(y.view(torch.int16), rk.linear(x, weight, engine="native").view(torch.int16))
"""


def test_the_first_call_of_a_process_may_be_under_capture(products: list[Products]) -> None:
    """The library is opened and its handle is made during the capture, which must survive this."""
    p = min((p for p in products if p.kind == "forward"), key=lambda p: p.out_features)
    script = FIRST_CALL_IN_A_GRAPH.format(rows=p.last_rows, ins=p.in_features, outs=p.out_features)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
