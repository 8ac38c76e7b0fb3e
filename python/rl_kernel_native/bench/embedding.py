"""Bench of token embedding: the compared implementations (peers) and the timed passes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rl_kernel_native as rk

from .comparison import Candidate, Comparison, Options, count_of_buffers, cuda_peers
from .measure import Call

MOST_BUFFERS = 64
PASSES = ("forward", "forward + backward")


class Operands(NamedTuple):
    """The arguments of one call (a buffer). Calls rotate over many buffers, which together exceed the caches."""

    ids: Tensor  # [tokens], Zipf-distributed
    dy: Tensor  # [tokens, columns]


Rows = Callable[[Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    """An implementation; ``rows(ids, weight)`` returns the rows of the table."""

    name: str
    rows: Rows


def peers(device: torch.device, use_compile: bool) -> tuple[list[Peer], list[str]]:
    """Returns the peers that can run here, this library first, and the reasons why other peers cannot run."""
    found = [Peer("rk", rk.embedding), Peer("torch", torch.nn.functional.embedding)]
    if use_compile:
        compiled: Any = torch.compile(torch.nn.functional.embedding, dynamic=False)
        found.append(Peer("torch.compile", compiled))
    others, absent = cuda_peers(device, {"liger_kernel": _liger})
    return found + others, absent


def _liger() -> Peer:
    function = importlib.import_module("liger_kernel.ops.experimental.embedding").LigerEmbeddingFunction
    return Peer("Liger", lambda ids, weight: function.apply(weight, ids))


def _buffers(tokens: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[Operands]:
    size = tokens * columns * dtype.itemsize
    count = count_of_buffers(size, device, MOST_BUFFERS)
    generator = torch.Generator(device).manual_seed(0)

    def one() -> Operands:
        u = torch.rand(tokens, device=device, generator=generator, dtype=torch.float64)
        ids = (rows**u).long().sub_(1).clamp_(0, rows - 1)
        dy = torch.empty((tokens, columns), dtype=dtype, device=device).normal_(0, 1, generator=generator)
        return Operands(ids, dy)

    return [one() for _ in range(count)]


def _table(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.empty((rows, columns), dtype=dtype, device=device).normal_(0, 1, generator=generator)


def _call(peer: Peer, which: str, weight: Tensor, buffers: list[Operands]) -> Call:
    """Returns the function that is timed for a peer in a pass. The function's argument is the number of the call, which
    selects the buffer."""
    n = len(buffers)
    if "backward" not in which:
        return lambda i: peer.rows(buffers[i % n].ids, weight)
    leaf = weight.detach().requires_grad_()

    def forward_backward(i: int) -> Any:
        o = buffers[i % n]
        return torch.autograd.grad(peer.rows(o.ids, leaf), leaf, o.dy)

    return forward_backward


def _error(call: Call, which: str, weight: Tensor, o: Operands) -> float:
    """Returns the error of a result, relative to the largest magnitude. A forward is compared with the table's rows,
    and a gradient with a float64 sum."""
    result: Any = call(0)
    if "backward" not in which:
        expected, got = weight[o.ids], result
    else:
        # Only one column of every row is compared. A float64 sum of this column is exact enough.
        sums = torch.zeros(weight.shape[0], dtype=torch.float64, device=weight.device)
        expected = sums.index_add_(0, o.ids, o.dy[:, 0].double())
        got = result[0][:, 0]
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def run(
    tokens: int,
    rows: int,
    columns: int,
    dtype_name: str,
    device_name: str,
    *,
    seconds: float = 2.0,
    use_compile: bool = True,
) -> dict[str, Any]:
    """Times every peer on ``tokens`` ids of a table ``[rows, columns]``, and returns the results for
    :mod:`rl_kernel_native.bench.report`."""
    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    comparison = Comparison(device, seconds)
    weight = _table(rows, columns, dtype, device)
    buffers = _buffers(tokens, rows, columns, dtype, device)
    candidates, absent = peers(device, use_compile)
    comparison.absent += absent
    for which in PASSES:
        # A table row that several tokens look up counts as read once. The gradient of the whole table is written.
        present = sum(int(o.ids.unique().numel()) for o in buffers) / len(buffers)
        elements = (tokens + present) * columns
        if "backward" in which:
            elements += (tokens + rows) * columns
        calls = [(peer.name, _call(peer, which, weight, buffers)) for peer in candidates]
        comparison.add(
            which,
            [Candidate(name, call, partial(_error, call, which, weight, buffers[0])) for name, call in calls],
            elements * dtype.itemsize,
        )
    return comparison.report(
        "embedding", f"{tokens} of [{rows}, {columns}]", dtype_name, len(buffers),
        rows=tokens, vocab=rows, columns=columns,
    )  # fmt: skip


def measured(o: Options) -> dict[str, Any]:
    """Runs the bench with the options of the command line."""
    shape = (o.rows, o.sizes["vocab"], o.sizes["columns"])
    return run(*shape, o.dtype, o.device, seconds=o.seconds, use_compile=o.use_compile)
