"""Bench of a policy objective with a KL term: the compared implementations (peers) and the timed passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rl_kernel_native as rk

from .comparison import Candidate, Comparison, Options, count_of_buffers
from .measure import Call

MOST_BUFFERS = 256
PASSES = ("loss and gradient", "through backward()")
ARRAYS = 6  # arrays of tokens: five arrays are read, one array is written
SPEC = rk.presets.verl(use_kl_loss=True, kl_loss_coef=0.001)


class Operands(NamedTuple):
    """The arguments of one call (a buffer), float32 ``[sequences, tokens]``. Calls rotate over many buffers."""

    logprob: Tensor
    old_logprob: Tensor
    advantage: Tensor
    ref_logprob: Tensor
    mask: Tensor


def written_out(o: Operands, logprob: Tensor) -> Tensor:
    """verl's vanilla loss with low_var_kl, as verl's source has it."""
    log_ratio = (logprob - o.old_logprob).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    unclipped, clipped = -o.advantage * ratio, -o.advantage * ratio.clamp(0.8, 1.2)
    loss = torch.maximum(unclipped, clipped)
    loss = torch.where(o.advantage < 0, torch.minimum(-o.advantage * 3.0, loss), loss)
    d = (o.ref_logprob - logprob).clamp(-20.0, 20.0)
    kl = (d.exp() - d - 1).clamp(-10.0, 10.0)
    size = o.mask.sum()
    total = (loss * o.mask).sum() / size + 0.001 * (kl * o.mask).sum() / size
    with torch.no_grad():  # frameworks also log these metrics
        for metric in (clipped > unclipped, -log_ratio, kl, ratio):
            (metric.float() * o.mask).sum() / size
    return total


def _ours(o: Operands, logprob: Tensor) -> Tensor:
    loss: Tensor = rk.policy_loss(
        logprob, o.old_logprob, o.advantage, o.mask, spec=SPEC, ref_logprob=o.ref_logprob
    ).loss
    return loss


class Peer(NamedTuple):
    """An implementation. ``loss(operands, logprob)`` returns the loss. This library's peer also has ``direct``, a call
    without autograd."""

    name: str
    loss: Callable[[Operands, Tensor], Tensor]
    direct: Callable[[Operands], Any] | None = None


def peers(use_compile: bool) -> list[Peer]:
    """Returns the peers, with this library as the first."""

    def direct(o: Operands) -> Any:
        return rk.policy_loss_and_grad(
            o.logprob, o.old_logprob, o.advantage, o.mask, spec=SPEC, ref_logprob=o.ref_logprob
        )

    found = [Peer("rk", _ours, direct), Peer("torch written out", written_out)]
    if use_compile:
        found.append(Peer("torch.compile", torch.compile(written_out, dynamic=False)))
    return found


def _buffers(sequences: int, tokens: int, device: torch.device) -> list[Operands]:
    size = 4 * (ARRAYS - 1) * sequences * tokens
    count = count_of_buffers(size, device, MOST_BUFFERS)
    generator = torch.Generator(device).manual_seed(0)

    def normal(scale: float) -> Tensor:
        return torch.empty((sequences, tokens), device=device).normal_(0, scale, generator=generator)

    found = []
    for _ in range(count):
        logprob = -normal(1.0).abs()
        mask = (normal(1.0) > -1).float()
        found.append(Operands(logprob, logprob + normal(0.1), normal(1.0), logprob + normal(0.1), mask))
    return found


def _call(peer: Peer, which: str, buffers: list[Operands]) -> Call:
    """Returns the function that is timed for a peer in a pass. The function's argument is the number of the call, which
    selects the buffer."""
    n = len(buffers)
    if which == PASSES[0] and peer.direct is not None:
        direct = peer.direct
        return lambda i: direct(buffers[i % n])
    leaves = [o.logprob.detach().requires_grad_() for o in buffers]

    def call(i: int) -> Any:
        leaf = leaves[i % n]
        if which == PASSES[0]:
            return torch.autograd.grad(peer.loss(buffers[i % n], leaf), leaf)
        leaf.grad = None
        peer.loss(buffers[i % n], leaf).backward()
        return leaf.grad

    return call


def _error(peer: Peer, o: Operands) -> float:
    """Returns the worst error against float64 in a gradient, relative to the largest magnitude."""
    leaf, wide = o.logprob.detach().requires_grad_(), o.logprob.double().requires_grad_()
    (got,) = torch.autograd.grad(peer.loss(o, leaf), leaf)
    (expected,) = torch.autograd.grad(written_out(Operands(*(t.double() for t in o)), wide), wide)
    return float((got - expected).abs().max() / expected.abs().max())


def run(
    sequences: int, tokens: int, device_name: str, *, seconds: float = 2.0, use_compile: bool = True
) -> dict[str, Any]:
    """Times every peer on ``[sequences, tokens]``, and returns the results for :mod:`rl_kernel_native.bench.report`."""
    device = torch.device(device_name)
    comparison = Comparison(device, seconds)
    buffers = _buffers(sequences, tokens, device)
    for which in PASSES:
        comparison.add(
            which,
            [
                Candidate(peer.name, _call(peer, which, buffers), partial(_error, peer, buffers[0]))
                for peer in peers(use_compile)
            ],
            ARRAYS * 4 * sequences * tokens,
        )
    return comparison.report(
        "policy_loss", f"[{sequences}, {tokens}]", "float32", len(buffers), rows=sequences, tokens=tokens
    )


def measured(o: Options) -> dict[str, Any]:
    """Runs the bench with the options of the command line."""
    return run(o.rows, o.sizes["tokens"], o.device, seconds=o.seconds, use_compile=o.use_compile)
