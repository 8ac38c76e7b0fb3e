"""Bench of gated activations: the compared implementations (peers) and the timed passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rl_kernel_native as rk

from .comparison import Candidate, Comparison, Options, count_of_buffers, cuda_peers
from .measure import Call

MOST_BUFFERS = 512
CHECKED_ROWS = 8  # compared with float64
PASSES = ("silu, packed", "silu, apart", "gelu tanh, packed", "silu, packed, forward + backward")
READS_AND_WRITES = dict(zip(PASSES, (3, 3, 3, 8), strict=True))  # least number of passes over [rows, columns]


class Operands(NamedTuple):
    """The arguments of one call (a buffer). Calls rotate over many buffers, which together exceed the caches."""

    gate_up: Tensor  # [rows, 2 * columns]
    gate: Tensor  # [rows, columns]
    up: Tensor
    dy: Tensor


Apart = Callable[[Tensor, Tensor], Tensor]
Packed = Callable[[Tensor], Tensor]


class Peer(NamedTuple):
    """The functions of a peer. A function is None if the peer lacks that form of the operator."""

    name: str
    silu_packed: Packed | None
    silu: Apart | None
    gelu_packed: Packed | None


def _of_halves(function: Apart) -> Packed:
    def packed(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return function(gate, up)

    return packed


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu_mul`` as transformers and vLLM's native path write it: the activation is rounded before the product."""
    return torch.nn.functional.silu(gate) * up


def _gelu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def peers(device: torch.device, use_compile: bool) -> tuple[list[Peer], list[str]]:
    """Returns the peers that can run here, this library first, and the reasons why other peers cannot run."""
    found = [Peer("rk", rk.silu_mul, rk.silu_mul, rk.gelu_mul)]
    found.append(Peer("torch", _of_halves(_silu), _silu, _of_halves(_gelu)))
    if use_compile:
        compiled: list[Any] = [torch.compile(f, dynamic=False) for f in (_of_halves(_silu), _silu, _of_halves(_gelu))]
        found.append(Peer("torch.compile", *compiled))
    others, absent = cuda_peers(device, {"liger_kernel": _liger, "flashinfer": _flashinfer, "vllm": _vllm})
    return found + others, absent


def _liger() -> Peer:
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return Peer(
        "Liger",
        _of_halves(LigerSiLUMulFunction.apply),
        LigerSiLUMulFunction.apply,
        _of_halves(LigerGELUMulFunction.apply),
    )


def _flashinfer() -> Peer:
    from flashinfer.activation import gelu_tanh_and_mul, silu_and_mul

    return Peer("FlashInfer", silu_and_mul, None, gelu_tanh_and_mul)


def _vllm() -> Peer:
    import vllm._custom_ops  # noqa: F401 - registers the operators

    def into(name: str) -> Packed:
        operator = getattr(torch.ops._C, name)

        def packed(gate_up: Tensor) -> Tensor:
            out = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
            operator(out, gate_up)
            return out

        return packed

    return Peer("vLLM", into("silu_and_mul"), None, into("gelu_tanh_and_mul"))


def _buffers(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[Operands]:
    size = 5 * rows * columns * dtype.itemsize
    count = count_of_buffers(size, device, MOST_BUFFERS)
    generator = torch.Generator(device).manual_seed(0)

    def normal(width: int) -> Tensor:
        return torch.empty((rows, width), dtype=dtype, device=device).normal_(0, 1, generator=generator)

    return [Operands(normal(2 * columns), normal(columns), normal(columns), normal(columns)) for _ in range(count)]


def _call(peer: Peer, which: str, buffers: list[Operands]) -> Call | None:
    """Returns the function that is timed for a peer in a pass, or None if the peer lacks the pass. The function's
    argument is the number of the call, which selects the buffer."""
    n = len(buffers)
    if which == "silu, apart":
        silu = peer.silu
        return None if silu is None else lambda i: silu(buffers[i % n].gate, buffers[i % n].up)
    packed = peer.gelu_packed if which.startswith("gelu") else peer.silu_packed
    if packed is None:
        return None
    if "backward" not in which:
        return lambda i: packed(buffers[i % n].gate_up)
    leaves = [o.gate_up.detach().requires_grad_() for o in buffers]

    def forward_backward(i: int) -> Any:
        leaf = leaves[i % n]
        return torch.autograd.grad(packed(leaf), leaf, buffers[i % n].dy)

    return forward_backward


def _error(call: Call, which: str, o: Operands) -> float | None:
    """Returns the worst error against float64 in the first rows of a forward, relative to the largest magnitude."""
    if "backward" in which:
        return None
    gate, up = (o.gate, o.up) if which == "silu, apart" else o.gate_up.chunk(2, -1)
    wide = gate[:CHECKED_ROWS].double()
    act = _gelu if which.startswith("gelu") else _silu
    expected = act(wide, up[:CHECKED_ROWS].double())
    got: Any = call(0)
    return float((got[:CHECKED_ROWS].double() - expected).abs().max() / expected.abs().max())


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
            [Candidate(name, call, partial(_error, call, which, buffers[0])) for name, call in calls if call],
            READS_AND_WRITES[which] * rows * columns * dtype.itemsize,
        )
    return comparison.report("silu_mul", f"[{rows}, {columns}]", dtype_name, len(buffers), rows=rows, columns=columns)


def measured(o: Options) -> dict[str, Any]:
    """Runs the bench with the options of the command line."""
    return run(o.rows, o.sizes["columns"], o.dtype, o.device, seconds=o.seconds, use_compile=o.use_compile)
