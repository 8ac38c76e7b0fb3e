"""Bench of the root-mean-square norm: the compared implementations (peers) and the timed passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rl_kernel_native as rk

from .comparison import Candidate, Comparison, Options, count_of_buffers, cuda_peers
from .measure import Call

EPS = 1e-6
MOST_BUFFERS = 512
CHECKED_ROWS = 8  # compared with float64
PASSES = ("forward", "forward + backward", "forward, residual", "forward + backward, residual")
READS_AND_WRITES = dict(zip(PASSES, (2, 5, 4, 8), strict=True))  # least number of passes over all rows


class Operands(NamedTuple):
    """The arguments of one call (a buffer). Calls rotate over many buffers, which together exceed the caches."""

    x: Tensor  # [rows, columns]
    residual: Tensor
    weight: Tensor  # [columns]
    dy: Tensor  # [rows, columns]
    d_new_residual: Tensor


Norm = Callable[[Tensor, Tensor], Tensor]
NormWithResidual = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Peer(NamedTuple):
    """An implementation. ``norm(x, weight)`` returns y, and ``with_residual(x, residual, weight)`` returns y and the
    sum."""

    name: str
    norm: Norm
    with_residual: NormWithResidual


def _rk(x: Tensor, weight: Tensor) -> Tensor:
    return rk.rms_norm(x, weight, EPS)


def _rk_with_residual(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y, new_residual = rk.rms_norm(x, weight, EPS, residual=residual)
    return y, new_residual


def _torch(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)


def _after_sum(norm: Norm) -> NormWithResidual:
    def with_residual(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return norm(h, weight), h

    return with_residual


def _written_out(x: Tensor, weight: Tensor) -> Tensor:
    """The norm as models write it, except that the result is rounded once, as in torch's norm and in this library."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)


def peers(device: torch.device, use_compile: bool) -> tuple[list[Peer], list[str]]:
    """Returns the peers that can run here, this library first, and the reasons why other peers cannot run."""
    found = [Peer("rk", _rk, _rk_with_residual)]
    found.append(Peer("torch rms_norm", _torch, _after_sum(_torch)))
    found.append(Peer("torch written out", _written_out, _after_sum(_written_out)))
    if use_compile:
        compiled: Any = torch.compile(_written_out, dynamic=False)
        with_sum: Any = torch.compile(_after_sum(_written_out), dynamic=False)
        found.append(Peer("torch.compile", compiled, with_sum))
    others, absent = cuda_peers(device, {"liger_kernel": _liger, "quack": _quack})
    return found + others, absent


def _liger() -> Peer:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # The argument "gemma" selects the casts that round once. The argument False keeps Liger from writing gradients in
    # place, which would overwrite dy.
    return Peer(
        "Liger",
        lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "gemma", False),
        lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, 0.0, "gemma", False),
    )


def _quack() -> Peer:
    from quack.rmsnorm import rmsnorm

    return Peer(
        "quack",
        lambda x, weight: rmsnorm(x, weight, eps=EPS),
        lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True),
    )


def _buffers(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[Operands]:
    size = 4 * rows * columns * dtype.itemsize
    count = count_of_buffers(size, device, MOST_BUFFERS)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device).normal_(0, 1, generator=generator)

    shape = (rows, columns)
    return [
        Operands(normal(*shape), normal(*shape), normal(columns), normal(*shape), normal(*shape)) for _ in range(count)
    ]


def _call(peer: Peer, which: str, buffers: list[Operands]) -> Call:
    """Returns the function that is timed for a peer in a pass. The function's argument is the number of the call, which
    selects the buffer."""
    n = len(buffers)
    residual, backward = "residual" in which, "backward" in which
    if not backward:
        if residual:
            return lambda i: peer.with_residual(buffers[i % n].x, buffers[i % n].residual, buffers[i % n].weight)
        return lambda i: peer.norm(buffers[i % n].x, buffers[i % n].weight)
    leaves = [
        o._replace(
            x=o.x.detach().requires_grad_(),
            residual=o.residual.detach().requires_grad_(),
            weight=o.weight.detach().requires_grad_(),
        )
        for o in buffers
    ]

    def forward_backward(i: int) -> Any:
        o = leaves[i % n]
        if residual:
            outputs = peer.with_residual(o.x, o.residual, o.weight)
            return torch.autograd.grad(outputs, (o.x, o.residual, o.weight), (o.dy, o.d_new_residual))
        return torch.autograd.grad(peer.norm(o.x, o.weight), (o.x, o.weight), o.dy)

    return forward_backward


def _error(call: Call, which: str, o: Operands) -> float | None:
    """Returns the worst error against float64 in the first rows of a forward, relative to the largest magnitude."""
    if "backward" in which:
        return None
    result: Any = call(0)
    got = (result[0] if isinstance(result, tuple) else result)[:CHECKED_ROWS].double()
    h = (o.x + o.residual if "residual" in which else o.x)[:CHECKED_ROWS].double()
    expected = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * o.weight.double()
    return float((got - expected).abs().max() / expected.abs().max())


def run(
    rows: int, columns: int, dtype_name: str, device_name: str, *, seconds: float = 2.0, use_compile: bool = True
) -> dict[str, Any]:
    """Times every peer on ``[rows, columns]``, and returns the results for :mod:`rl_kernel_native.bench.report`."""
    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    comparison = Comparison(device, seconds)
    buffers = _buffers(rows, columns, dtype, device)
    candidates, absent = peers(device, use_compile)
    comparison.absent += absent
    for which in PASSES:
        calls = [(peer.name, _call(peer, which, buffers)) for peer in candidates]
        comparison.add(
            which,
            [Candidate(name, call, partial(_error, call, which, buffers[0])) for name, call in calls],
            READS_AND_WRITES[which] * rows * columns * dtype.itemsize,
        )
    return comparison.report("rms_norm", f"[{rows}, {columns}]", dtype_name, len(buffers), rows=rows, columns=columns)


def measured(o: Options) -> dict[str, Any]:
    """Runs the bench with the options of the command line."""
    return run(o.rows, o.sizes["columns"], o.dtype, o.device, seconds=o.seconds, use_compile=o.use_compile)
