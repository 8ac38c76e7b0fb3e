"""The sequence family (kv_cache_append, pack, sequence_logprob, preference_loss, shift_labels_packed): the peers and
the passes timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import rl_kernel_native as rk

from .comparison import Candidate, Comparison, Options, count_of_buffers
from .measure import Call

MOST_BUFFERS = 64


class Pass:
    """One pass: what each peer does with a buffer, and the bytes that it must move."""

    def __init__(self, name: str, moved: float, peers: Mapping[str, Callable[[Any], Any]], compiles: str = "") -> None:
        self.name, self.moved, self.peers, self.compiles = name, moved, peers, compiles


def _pack(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[list[Any], list[Pass]]:
    lengths = torch.randint(0, columns + 1, (rows,), generator=torch.Generator().manual_seed(0)).to(device)
    kept = torch.arange(columns, device=device)[None] < lengths[:, None]
    total = int(lengths.sum())
    size = dtype.itemsize
    count = count_of_buffers(rows * columns * size, device, MOST_BUFFERS)
    buffers = [torch.randn(rows, columns, device=device).to(dtype) for _ in range(count)]
    packed = rk.pack(buffers[0], lengths=lengths, max_tokens=total)

    def scattered(x: Tensor) -> Tensor:
        back = torch.zeros_like(x)
        back[kept] = packed.tensors
        return back

    ours = {"rk": lambda x: rk.pack(x, lengths=lengths, max_tokens=total).tensors, "torch x[mask]": lambda x: x[kept]}
    back = {"rk": lambda x: rk.unpack(packed.tensors, packed.cu_seqlens, columns), "torch y[mask] = x": scattered}
    return buffers, [
        Pass("pack", 2 * total * size, ours),
        Pass("unpack", (total + rows * columns) * size, back),
    ]


def _sums(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[list[Any], list[Pass]]:
    size = rows * columns * (dtype.itemsize + 1)
    count = count_of_buffers(size, device, MOST_BUFFERS)
    buffers = [
        (-torch.rand(rows, columns, device=device).to(dtype), torch.rand(rows, columns, device=device) < 0.7)
        for _ in range(count)
    ]

    def eager(x: Any) -> Any:
        return torch.where(x[1], x[0], 0).sum(1, dtype=torch.float32), x[1].sum(1)

    peers = {"rk": lambda x: rk.sequence_logprob(*x), "torch": eager}
    return buffers, [Pass("forward", size, peers, compiles="torch")]


def _losses(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[list[Any], list[Pass]]:
    buffers = [tuple(torch.randn(rows, device=device) * 9 - 30 for _ in range(4)) for _ in range(MOST_BUFFERS)]

    def eager(x: Any) -> Any:
        w, l = x[0] - x[2], x[1] - x[3]  # noqa: E741
        losses = -torch.nn.functional.logsigmoid(0.1 * (w - l))
        return losses, 0.1 * w.detach(), 0.1 * l.detach(), losses.mean()

    def trained(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step(x: Any) -> Any:
            leaves = [t.detach().requires_grad_() for t in x[:2]]
            return torch.autograd.grad(function((*leaves, *x[2:]))[0].sum(), leaves)

        return step

    def ours(x: Any) -> Any:
        *of_pairs, metrics = rk.preference_loss(*x)
        return *of_pairs, metrics.vector  # whose first is the loss

    return buffers, [
        Pass("dpo, forward", 4 * 9 * rows, {"rk": ours, "torch": eager}, compiles="torch"),
        Pass("dpo, forward + backward", 4 * 13 * rows, {"rk": trained(ours), "torch": trained(eager)}),
    ]


def _appends(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[list[Any], list[Pass]]:
    """Rows are tokens, columns those of k of all heads; the cache is packed K|V in pages of 16, twice the tokens."""
    page, width = 16, 128 if columns % 128 == 0 else columns
    heads, pages = columns // width, 2 * -(-rows // page)
    moved = 4 * rows * columns * dtype.itemsize
    count = count_of_buffers(moved, device, MOST_BUFFERS)
    buffers = [torch.randn(2, rows, heads, width, device=device).to(dtype) for _ in range(count)]
    caches = torch.zeros(2, pages, page, heads, 2 * width, device=device, dtype=dtype)
    ours, theirs = ((cache[..., :width], cache[..., width:]) for cache in caches)
    slots = torch.randperm(pages * page, generator=torch.Generator().manual_seed(0))[:rows].to(device)

    def append(x: Tensor) -> tuple[Tensor, Tensor]:
        rk.kv_cache_append(x[0], x[1], *ours, slots)
        return ours

    def eager(x: Tensor) -> tuple[Tensor, Tensor]:
        for cache, rows_of in zip(theirs, x, strict=True):
            cache[slots // page, slots % page] = rows_of
        return theirs

    peers = {"rk": append, "torch cache[slot] = k": eager}
    return buffers, [Pass("append", moved, peers)]


def _labels(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[list[Any], list[Pass]]:
    cu = torch.arange(0, rows * columns + 1, columns, device=device)
    buffers = [torch.randint(0, 1000, (rows * columns,), device=device) for _ in range(4)]

    def eager(x: Tensor) -> Tensor:
        labels = torch.roll(x, -1)
        labels[cu[1:] - 1] = -100
        return labels

    peers = {"rk": lambda x: rk.shift_labels_packed(x, cu), "torch": eager}
    return buffers, [Pass("labels", 16 * rows * columns, peers)]


_MAKERS = {
    "kv_cache_append": _appends,
    "pack": _pack,
    "sequence_logprob": _sums,
    "preference_loss": _losses,
    "shift_labels_packed": _labels,
}


def _call(function: Callable[[Any], Any], buffers: list[Any]) -> Call:
    return lambda i: function(buffers[i % len(buffers)])


def run(
    operator: str, rows: int, columns: int, dtype_name: str, device_name: str, *, seconds: float = 2.0,
    use_compile: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Times every peer; see :mod:`rl_kernel_native.bench.report` for what is done with it."""
    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    comparison = Comparison(device, seconds)
    buffers, passes = _MAKERS[operator](rows, columns, dtype, device)
    for which in passes:
        peers = dict(which.peers)
        if which.compiles and use_compile:
            peers["torch.compile"] = torch.compile(peers[which.compiles], dynamic=False)
        comparison.add(
            which.name, [Candidate(name, _call(function, buffers)) for name, function in peers.items()], which.moved
        )
    return comparison.report(operator, f"[{rows}, {columns}]", dtype_name, len(buffers), rows=rows, columns=columns)


def measured(o: Options) -> dict[str, Any]:
    """The command's run."""
    shape = (o.rows, o.sizes["columns"])
    return run(o.operator, *shape, o.dtype, o.device, seconds=o.seconds, use_compile=o.use_compile)
