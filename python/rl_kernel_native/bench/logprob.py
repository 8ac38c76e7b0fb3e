"""Bench of the selected log-probability from logits: the compared implementations (peers) and the timed passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rl_kernel_native as rk

from .._types import Exp
from .comparison import Candidate, Comparison, Options, count_of_buffers, cuda_peers
from .measure import Call

MOST_BUFFERS = 512
CHECKED_ROWS = 8  # compared with float64
PASSES = ("forward", "forward + entropy", "forward + backward")
READS_AND_WRITES = {"forward": 1, "forward + entropy": 1, "forward + backward": 3}  # reads plus writes of all logits


class Batch(NamedTuple):
    """The arguments of one call (a buffer). Calls rotate over many buffers, which together exceed the caches."""

    logits: Tensor  # [rows, vocab]
    padded: Tensor  # [rows + 1, vocab]: `logits` and one more row, in the same memory: Liger's kernel expects this row
    target: Tensor  # [rows]


Forward = Callable[[Batch], Any]


class Peer(NamedTuple):
    """An implementation. ``forward`` returns logprob. ``with_entropy`` returns the pair (logprob, entropy); it is None
    if the peer computes no entropy."""

    name: str
    forward: Forward
    with_entropy: Forward | None = None
    has_backward: bool = True


def _log_softmax(dtype: torch.dtype | None) -> Forward:
    def forward(batch: Batch) -> Tensor:
        log_p = torch.log_softmax(batch.logits, -1, dtype=dtype)
        return log_p.gather(-1, batch.target.unsqueeze(-1)).squeeze(-1)

    return forward


def _log_softmax_entropy(batch: Batch) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(batch.logits, -1, dtype=torch.float32)
    return log_p.gather(-1, batch.target.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def _gather_minus_lse(batch: Batch) -> Tensor:
    x = batch.logits.float()
    return x.gather(-1, batch.target.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(x, -1)


def _rk(exp: Exp) -> tuple[Forward, Forward]:
    def forward(batch: Batch) -> Any:
        return rk.logprob(batch.logits, batch.target, exp=exp)

    def with_entropy(batch: Batch) -> Any:
        result = rk.logprob(batch.logits, batch.target, return_entropy=True, exp=exp)
        return result.logprob, result.entropy

    return forward, with_entropy


def _compiled(function: Callable[..., Any]) -> Forward:
    """Returns ``function`` under torch.compile. The compiled function takes two fields of a Batch instead of the Batch
    itself, because Dynamo would guard on every field."""
    compiled = torch.compile(lambda logits, target: function(Batch(logits, logits, target)), dynamic=False)
    return lambda batch: compiled(batch.logits, batch.target)


def peers(device: torch.device, dtype: torch.dtype, use_compile: bool) -> tuple[list[Peer], list[str]]:
    """Returns the peers that can run here, this library first, and the reasons why other peers cannot run."""
    found = [Peer("rk", *_rk(None))]
    if device.type == "cuda":
        found.append(Peer("rk, portable exp", *_rk("portable")))
    found.append(Peer("torch log_softmax, fp32", _log_softmax(torch.float32), _log_softmax_entropy))
    if dtype != torch.float32:
        found.append(Peer(f"torch log_softmax, {str(dtype).removeprefix('torch.')}", _log_softmax(None)))
    found.append(Peer("torch gather - logsumexp", _gather_minus_lse))
    if use_compile:
        found.append(Peer("torch.compile", _compiled(_gather_minus_lse), _compiled(_log_softmax_entropy)))
    others, absent = cuda_peers(device, {"liger_kernel": _liger, "quack": _quack})
    return found + others, absent


def _liger() -> Peer:
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax

    def selective(batch: Batch) -> Tensor:
        ids = batch.target.unsqueeze(0)
        return fused_selective_log_softmax(batch.padded.unsqueeze(0), ids, temperature=1.0).squeeze(0)

    # Liger's cross-entropy with a backward overwrites its input with the gradient, so it cannot run on rotated buffers.
    return Peer("Liger selective", selective, has_backward=False)


def _quack() -> Peer:
    from quack.cross_entropy import cross_entropy

    return Peer("quack cross-entropy", lambda batch: -cross_entropy(batch.logits, batch.target, reduction="none"))


def _batches(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> list[Batch]:
    size = (rows + 1) * vocab * dtype.itemsize
    count = count_of_buffers(size, device, MOST_BUFFERS)
    generator = torch.Generator(device).manual_seed(0)
    batches = []
    for _ in range(count):
        padded = torch.empty((rows + 1, vocab), dtype=dtype, device=device).normal_(0, 3, generator=generator)
        target = torch.randint(0, vocab, (rows,), device=device, generator=generator)
        batches.append(Batch(padded[:rows], padded, target))
    return batches


def _call(peer: Peer, which: str, batches: list[Batch]) -> Call | None:
    """Returns the function that is timed for a peer in a pass, or None if the peer lacks the pass. The function's
    argument is the number of the call, which selects the buffer."""
    if which == "forward":
        return lambda i: peer.forward(batches[i % len(batches)])
    if which == "forward + entropy":
        with_entropy = peer.with_entropy
        return None if with_entropy is None else lambda i: with_entropy(batches[i % len(batches)])
    if not peer.has_backward:
        return None
    leaves = [batch._replace(logits=batch.logits.detach().requires_grad_()) for batch in batches]
    gradient = torch.randn(leaves[0].target.shape, device=leaves[0].target.device)

    def forward_backward(i: int) -> Any:
        batch = leaves[i % len(leaves)]
        result = peer.forward(batch)
        return torch.autograd.grad(result, batch.logits, gradient.to(result.dtype))

    return forward_backward


def _error(call: Call, which: str, batch: Batch) -> float | None:
    """Returns the worst absolute error against float64 in the log-probabilities of the first rows."""
    if which == "forward + backward":
        return None
    result: Any = call(0)
    got = (result[0] if isinstance(result, tuple) else result)[:CHECKED_ROWS].double()
    log_p = batch.logits[:CHECKED_ROWS].double().log_softmax(-1)
    expected = log_p.gather(-1, batch.target[:CHECKED_ROWS].unsqueeze(-1)).squeeze(-1)
    return float((got - expected).abs().max())


def run(
    rows: int, vocab: int, dtype_name: str, device_name: str, *, seconds: float = 2.0, use_compile: bool = True
) -> dict[str, Any]:
    """Times every peer on ``[rows, vocab]``, and returns the results for :mod:`rl_kernel_native.bench.report`."""
    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    comparison = Comparison(device, seconds)
    batches = _batches(rows, vocab, dtype, device)
    candidates, absent = peers(device, dtype, use_compile)
    comparison.absent += absent
    for which in PASSES:
        calls = [(peer.name, _call(peer, which, batches)) for peer in candidates]
        comparison.add(
            which,
            [Candidate(name, call, partial(_error, call, which, batches[0])) for name, call in calls if call],
            READS_AND_WRITES[which] * rows * vocab * dtype.itemsize,
        )
    return comparison.report("logprob", f"[{rows}, {vocab}]", dtype_name, len(batches), rows=rows, vocab=vocab)


def measured(o: Options) -> dict[str, Any]:
    """Runs the bench with the options of the command line."""
    return run(o.rows, o.sizes["vocab"], o.dtype, o.device, seconds=o.seconds, use_compile=o.use_compile)
