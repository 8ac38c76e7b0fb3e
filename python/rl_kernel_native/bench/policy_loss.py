"""Policy objective with a KL term: the peers and the passes that are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rl_kernel_native as rk

from .logprob import ROTATED_BYTES
from .measure import Call, copy_bytes_per_second, device_text, measure

MOST_BUFFERS = 256
PASSES = ("loss and gradient", "through backward()")
ARRAYS = 6  # of tokens: five are read, one is written
SPEC = rk.presets.verl(use_kl_loss=True, kl_loss_coef=0.001)


class Operands(NamedTuple):
    """One buffer's arguments, float32 ``[sequences, tokens]``."""

    logprob: Tensor
    old_logprob: Tensor
    advantage: Tensor
    ref_logprob: Tensor
    mask: Tensor


def written_out(o: Operands, logprob: Tensor) -> Tensor:
    """verl's vanilla loss with low_var_kl, as its own source has it."""
    log_ratio = (logprob - o.old_logprob).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    unclipped, clipped = -o.advantage * ratio, -o.advantage * ratio.clamp(0.8, 1.2)
    loss = torch.maximum(unclipped, clipped)
    loss = torch.where(o.advantage < 0, torch.minimum(-o.advantage * 3.0, loss), loss)
    d = (o.ref_logprob - logprob).clamp(-20.0, 20.0)
    kl = (d.exp() - d - 1).clamp(-10.0, 10.0)
    size = o.mask.sum()
    total = (loss * o.mask).sum() / size + 0.001 * (kl * o.mask).sum() / size
    with torch.no_grad():  # what frameworks log of it
        for metric in (clipped > unclipped, -log_ratio, kl, ratio):
            (metric.float() * o.mask).sum() / size
    return total


def _ours(o: Operands, logprob: Tensor) -> Tensor:
    loss: Tensor = rk.policy_loss(
        logprob, o.old_logprob, o.advantage, o.mask, spec=SPEC, ref_logprob=o.ref_logprob
    ).loss
    return loss


class Peer(NamedTuple):
    """``loss(operands, logprob)``, and for ours the call that has no autograd."""

    name: str
    loss: Callable[[Operands, Tensor], Tensor]
    direct: Callable[[Operands], Any] | None = None


def peers(use_compile: bool) -> list[Peer]:
    """Ours first."""

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
    count = min(MOST_BUFFERS, max(1, -(-ROTATED_BYTES[device.type] // size)))
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
    """The timed call of a peer for a pass. Buffers rotate with the call's number."""
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
    """Worst error of a gradient against float64, relative to the largest."""
    leaf, wide = o.logprob.detach().requires_grad_(), o.logprob.double().requires_grad_()
    (got,) = torch.autograd.grad(peer.loss(o, leaf), leaf)
    (expected,) = torch.autograd.grad(written_out(Operands(*(t.double() for t in o)), wide), wide)
    return float((got - expected).abs().max() / expected.abs().max())


def run(
    sequences: int, tokens: int, device_name: str, *, seconds: float = 2.0, use_compile: bool = True
) -> dict[str, Any]:
    """Times every peer on ``[sequences, tokens]``; see :mod:`rl_kernel_native.bench.report` for what follows."""
    device = torch.device(device_name)
    ceiling = copy_bytes_per_second(device)
    buffers = _buffers(sequences, tokens, device)
    absent: list[str] = []
    results = []
    for which in PASSES:
        calls: list[tuple[Peer, Call]] = []
        errors: list[float] = []
        for peer in peers(use_compile):
            try:
                errors.append(_error(peer, buffers[0]))
            except Exception as problem:  # a peer's own trouble, such as a missing compiler, is not ours
                absent.append(f"{peer.name}, {which}: {type(problem).__name__}: {str(problem).splitlines()[0]}")
                continue
            calls.append((peer, _call(peer, which, buffers)))
        timings = measure([call for _, call in calls], device, seconds)
        bytes_moved = ARRAYS * 4 * sequences * tokens
        for (peer, _), timing, error in zip(calls, timings, errors, strict=True):
            rate = bytes_moved / (timing.median_ms * 1e-3)
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
        "operator": "policy_loss",
        "shape": f"[{sequences}, {tokens}]",
        "rows": sequences,
        "tokens": tokens,
        "dtype": "float32",
        "device": device_text(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "buffers": len(buffers),
        "copy_gb_per_s": ceiling / 1e9,
        "versions": {"rl_kernel_native": rk.__version__, "variant": rk.variant, "torch": str(torch.__version__)},
        "results": results,
        "absent": absent,
    }
