"""Benches of the operators whose passes and peers are defined in :mod:`rl_kernel_native.cases`, next to their example
inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..cases import CASES, Buffers, Pass
from .comparison import Candidate, Comparison, Options, count_of_buffers
from .measure import Call

MOST_BUFFERS = 64


def passes_of(
    operator: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Any], list[Pass]]:
    """Returns an operator's buffers and its passes. A buffer holds the arguments of one call, and a pass holds each
    peer's function of a buffer."""
    bench = CASES[operator].bench
    assert bench is not None
    assert bench.passes is not None
    count = partial(count_of_buffers, device=device, most=MOST_BUFFERS)
    return bench.passes(Buffers(torch, rows, columns, dtype, device, count))


def _call(function: Callable[[Any], Any], buffers: list[Any]) -> Call:
    return lambda i: function(buffers[i % len(buffers)])


def measured(o: Options) -> dict[str, Any]:
    """Runs the bench with the options of the command line, and returns the results for
    :mod:`rl_kernel_native.bench.report`."""
    device, dtype, columns = torch.device(o.device), getattr(torch, o.dtype), o.sizes.get("columns", 1)
    comparison = Comparison(device, o.seconds)
    buffers, passes = passes_of(o.operator, o.rows, columns, dtype, device)
    for which in passes:
        peers = dict(which.peers)
        if which.compiles and o.use_compile:
            peers["torch.compile"] = torch.compile(peers[which.compiles], dynamic=False)
        comparison.add(
            which.name, [Candidate(name, _call(function, buffers)) for name, function in peers.items()], which.moved
        )
    shape = ", ".join(str(size) for size in (o.rows, *o.sizes.values()))
    return comparison.report(o.operator, f"[{shape}]", o.dtype, len(buffers), rows=o.rows, **o.sizes)
