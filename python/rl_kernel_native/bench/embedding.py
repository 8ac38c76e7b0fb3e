"""Token embedding: the peers and the passes that are timed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rl_kernel_native as rk

from .logprob import ROTATED_BYTES
from .measure import Call, copy_bytes_per_second, device_text, measure

MOST_BUFFERS = 64
PASSES = ("forward", "forward + backward")


class Operands(NamedTuple):
    """One buffer's arguments."""

    ids: Tensor  # [tokens], Zipf-distributed
    dy: Tensor  # [tokens, columns]


Rows = Callable[[Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    """``rows(ids, weight)``."""

    name: str
    rows: Rows


def peers(device: torch.device, use_compile: bool) -> tuple[list[Peer], list[str]]:
    """Ours first, then every peer that can run here; and a sentence for each that cannot."""
    absent: list[str] = []
    found = [Peer("rk", rk.embedding), Peer("torch", torch.nn.functional.embedding)]
    if use_compile:
        compiled: Any = torch.compile(torch.nn.functional.embedding, dynamic=False)
        found.append(Peer("torch.compile", compiled))
    if importlib.util.find_spec("liger_kernel") is None:
        absent.append("liger_kernel: not installed")
    elif device.type != "cuda":
        absent.append("liger_kernel: runs on CUDA only")
    else:
        try:
            function = importlib.import_module("liger_kernel.ops.experimental.embedding").LigerEmbeddingFunction
            found.append(Peer("Liger", lambda ids, weight: function.apply(weight, ids)))
        except Exception as error:  # a peer's own trouble, such as a missing compiler, is not ours
            absent.append(f"liger_kernel: {type(error).__name__}: {error}")
    return found, absent


def _buffers(tokens: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[Operands]:
    size = tokens * columns * dtype.itemsize
    count = min(MOST_BUFFERS, max(1, -(-ROTATED_BYTES[device.type] // size)))
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
    """The timed call of a peer for a pass. Buffers rotate with the call's number."""
    n = len(buffers)
    if "backward" not in which:
        return lambda i: peer.rows(buffers[i % n].ids, weight)
    leaf = weight.detach().requires_grad_()

    def forward_backward(i: int) -> Any:
        o = buffers[i % n]
        return torch.autograd.grad(peer.rows(o.ids, leaf), leaf, o.dy)

    return forward_backward


def _error(call: Call, which: str, weight: Tensor, o: Operands) -> float:
    """Of the result, relative to the largest magnitude: rows are exact, the gradient is that of float64."""
    result: Any = call(0)
    if "backward" not in which:
        expected, got = weight[o.ids], result
    else:
        # One column of every row, which float64 sums exactly enough.
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
    """Times every peer on ``tokens`` ids of a table ``[rows, columns]``; see :mod:`rl_kernel_native.bench.report` for
    what is done with it."""
    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    ceiling = copy_bytes_per_second(device)
    weight = _table(rows, columns, dtype, device)
    buffers = _buffers(tokens, rows, columns, dtype, device)
    candidates, absent = peers(device, use_compile)
    results = []
    for which in PASSES:
        calls: list[tuple[Peer, Call]] = []
        errors: list[float] = []
        for peer in candidates:
            call = _call(peer, which, weight, buffers)
            try:
                errors.append(_error(call, which, weight, buffers[0]))
            except Exception as problem:
                absent.append(f"{peer.name}, {which}: {type(problem).__name__}: {str(problem).splitlines()[0]}")
                continue
            calls.append((peer, call))
        timings = measure([call for _, call in calls], device, seconds)
        # Rows of the table that tokens share are read once, at least; the gradient is written whole.
        present = sum(int(o.ids.unique().numel()) for o in buffers) / len(buffers)
        elements = (tokens + present) * columns
        if "backward" in which:
            elements += (tokens + rows) * columns
        for (peer, _), timing, error in zip(calls, timings, errors, strict=True):
            rate = elements * dtype.itemsize / (timing.median_ms * 1e-3)
            results.append(
                {
                    "pass": which,
                    "peer": peer.name,
                    **timing._asdict(),
                    "gb_per_s": rate / 1e9,
                    "share_of_copy": rate / ceiling,
                    "times_rk": timing.median_ms / timings[0].median_ms,
                    "max_error": error,
                }
            )
    return {
        "operator": "embedding",
        "shape": f"{tokens} of [{rows}, {columns}]",
        "rows": tokens,
        "vocab": rows,
        "columns": columns,
        "dtype": dtype_name,
        "device": device_text(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "buffers": len(buffers),
        "copy_gb_per_s": ceiling / 1e9,
        "versions": {"rl_kernel_native": rk.__version__, "variant": rk.variant, "torch": str(torch.__version__)},
        "results": results,
        "absent": absent,
    }
