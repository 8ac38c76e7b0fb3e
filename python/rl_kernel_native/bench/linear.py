"""Bench of the matrix product with a weight: the compared implementations (peers) and the timed passes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rl_kernel_native as rk

from .. import _blas
from .._types import Engine
from .comparison import Candidate, Comparison, Options, count_of_buffers
from .measure import Call

MOST_BUFFERS = 64
UNITS = ("sm_90", "sm_80", "gfx942")
CHECKED_ROWS = 8  # compared with float64
PASSES = ("forward", "input gradient", "weight gradient", "forward + backward")
PRODUCTS = {"forward": 1, "input gradient": 1, "weight gradient": 1, "forward + backward": 3}


class Operands(NamedTuple):
    """The arguments of one call (a buffer). Calls rotate over many buffers, which together exceed the caches."""

    x: Tensor  # [rows, in_features]
    weight: Tensor  # [out_features, in_features]
    dy: Tensor  # [rows, out_features]


class Peer(NamedTuple):
    """A peer's functions, one for each pass except the last. The last pass, forward + backward, runs torch's autograd
    over ``forward``."""

    name: str
    forward: Callable[[Tensor, Tensor], Tensor]
    input_grad: Callable[[Tensor, Tensor], Tensor]
    weight_grad: Callable[[Tensor, Tensor], Tensor]


def _rk(name: str, engine: Engine) -> Peer:
    return Peer(
        name,
        lambda x, weight: rk.linear(x, weight, engine=engine),
        lambda dy, weight: rk.linear_input_grad(dy, weight, engine=engine),
        lambda dy, x: rk.linear_weight_grad(dy, x, engine=engine),
    )


def _as_unit(unit: str) -> Peer:
    """Returns a peer that runs this library on a CPU with the arithmetic of a GPU's matrix unit."""

    def under(operator: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def run_under(a: Tensor, b: Tensor) -> Tensor:
            with rk.arithmetic(unit):
                return operator(a, b)

        return run_under

    return Peer(f"rk as {unit}", under(rk.linear), under(rk.linear_input_grad), under(rk.linear_weight_grad))


def peers(device: torch.device, dtype: torch.dtype) -> list[Peer]:
    """Returns the peers, with this library as the first."""
    found = [_rk("rk", "auto")]
    if device.type == "cuda":
        found.append(_rk("rk, native engine", "native"))
    elif dtype != torch.float32:  # matrix units do not multiply float32
        found.extend(_as_unit(unit) for unit in UNITS)
    theirs = Peer("torch linear", torch.nn.functional.linear, lambda dy, weight: dy @ weight, lambda dy, x: dy.T @ x)
    return [*found, theirs]


def _buffers(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> list[Operands]:
    rows, ins, outs = shape
    size = (rows * ins + outs * ins + rows * outs) * dtype.itemsize
    count = count_of_buffers(size, device, MOST_BUFFERS)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device).normal_(0, 1, generator=generator)

    return [Operands(normal(rows, ins), normal(outs, ins), normal(rows, outs)) for _ in range(count)]


def _call(peer: Peer, which: str, buffers: list[Operands]) -> Call:
    """Returns the function that is timed for a peer in a pass. The function's argument is the number of the call, which
    selects the buffer."""
    n = len(buffers)
    if which == "forward":
        return lambda i: peer.forward(buffers[i % n].x, buffers[i % n].weight)
    if which == "input gradient":
        return lambda i: peer.input_grad(buffers[i % n].dy, buffers[i % n].weight)
    if which == "weight gradient":
        return lambda i: peer.weight_grad(buffers[i % n].dy, buffers[i % n].x)
    leaves = [o._replace(x=o.x.detach().requires_grad_(), weight=o.weight.detach().requires_grad_()) for o in buffers]

    def forward_backward(i: int) -> Any:
        o = leaves[i % n]
        return torch.autograd.grad(peer.forward(o.x, o.weight), (o.x, o.weight), o.dy)

    return forward_backward


def _error(call: Call, which: str, o: Operands) -> float | None:
    """Returns the worst error against float64 in the first rows of the forward, relative to the largest magnitude."""
    if which != "forward":
        return None
    got: Any = call(0)
    expected = o.x[:CHECKED_ROWS].double() @ o.weight.double().T
    return float((got[:CHECKED_ROWS].double() - expected).abs().max() / expected.abs().max())


def run(shape: tuple[int, int, int], dtype_name: str, device_name: str, *, seconds: float = 2.0) -> dict[str, Any]:
    """Times every peer on ``(rows, in_features, out_features)``."""
    rows, ins, outs = shape
    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    comparison = Comparison(device, seconds)
    buffers = _buffers(shape, dtype, device)
    for which in PASSES:
        calls = [(peer.name, _call(peer, which, buffers)) for peer in peers(device, dtype)]
        comparison.add(
            which,
            [Candidate(name, call, partial(_error, call, which, buffers[0])) for name, call in calls],
            (rows * ins + outs * ins + rows * outs) * dtype.itemsize * PRODUCTS[which],
            2 * rows * ins * outs * PRODUCTS[which],
        )
    sizes = {"rows": rows, "in_features": ins, "out_features": outs}
    report = comparison.report("linear", f"[{rows}, {ins}] x [{outs}, {ins}]", dtype_name, len(buffers), **sizes)
    return report | {"notes": _notes(device)}


def _notes(device: torch.device) -> list[str]:
    """A note for the report: with a workspace, cuBLAS may split K in torch's linear, which is then not
    batch-invariant."""
    wrong = _blas.wrong_settings(os.environ)
    if device.type != "cuda":
        return []
    if not wrong:
        return ["torch linear is cuBLAS without a workspace: it cannot split K"]
    return [f"torch linear is cuBLAS as it comes; without a workspace, as rk sums: set {' '.join(wrong)}"]


def measured(o: Options) -> dict[str, Any]:
    """Runs the bench with the options of the command line."""
    shape = (o.rows, o.sizes["in_features"], o.sizes["out_features"])
    return run(shape, o.dtype, o.device, seconds=o.seconds)
