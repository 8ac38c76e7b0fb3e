"""Bench of ``kl`` and ``value_loss``: the compared implementations (peers) and the timed passes."""

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
PASSES = ("forward", "through backward()")


class Operands(NamedTuple):
    """The arguments of one call (a buffer), float32 ``[sequences, tokens]``. ``kl`` takes logprob, ref_logprob and an
    incoming gradient; ``value_loss`` takes value, old_value and returns. Calls rotate over many buffers, which together
    exceed the caches."""

    first: Tensor
    second: Tensor
    third: Tensor
    mask: Tensor


def _kl(o: Operands, x: Tensor) -> Tensor:
    found: Tensor = rk.kl(x, o.second, o.mask, estimator="k3", input_clamp=20.0, clamp=10.0)
    return found


def _kl_written_out(o: Operands, x: Tensor) -> Tensor:
    """verl's low_var_kl, as verl's source has it, with 0 in masked slots."""
    d = (o.second - x).clamp(-20.0, 20.0)
    return (d.exp() - d - 1).clamp(-10.0, 10.0) * o.mask


def _value_loss(o: Operands, x: Tensor) -> Tensor:
    found: Tensor = rk.value_loss(x, o.second, o.third, o.mask, clip=0.2).loss
    return found


def _value_loss_written_out(o: Operands, x: Tensor) -> Tensor:
    """TRL's value loss with the metrics that TRL logs, as TRL's source has it."""
    clipped = torch.clamp(x, o.second - 0.2, o.second + 0.2)
    plain, other = torch.square(x - o.third), torch.square(clipped - o.third)
    size = o.mask.sum()
    with torch.no_grad():
        for metric in ((other > plain).float(), x, o.third):
            (metric * o.mask).sum() / size
    return 0.5 * (torch.max(plain, other) * o.mask).sum() / size


class Operator(NamedTuple):
    """``ours`` and ``written_out`` compute the result from the operands and the tensor that gets the gradient.
    ``arrays`` holds, for each pass, the number of token arrays that a call must read or write."""

    ours: Callable[[Operands, Tensor], Tensor]
    written_out: Callable[[Operands, Tensor], Tensor]
    arrays: dict[str, int]


OPERATORS = {
    # `kl` reads logprob, ref_logprob and mask twice and the incoming gradient once, and writes two arrays.
    "kl": Operator(_kl, _kl_written_out, {PASSES[0]: 4, PASSES[1]: 9}),
    # `value_loss` writes the gradient in the forward pass.
    "value_loss": Operator(_value_loss, _value_loss_written_out, {PASSES[0]: 4, PASSES[1]: 5}),
}


def peers(operator: str, use_compile: bool) -> dict[str, Callable[[Operands, Tensor], Tensor]]:
    """Returns the peers, with this library as the first."""
    of = OPERATORS[operator]
    found = {"rk": of.ours, "torch written out": of.written_out}
    if use_compile:
        found["torch.compile"] = torch.compile(of.written_out, dynamic=False)
    return found


def _buffers(sequences: int, tokens: int, device: torch.device) -> list[Operands]:
    size = 4 * len(Operands._fields) * sequences * tokens
    count = count_of_buffers(size, device, MOST_BUFFERS)
    generator = torch.Generator(device).manual_seed(0)

    def normal(scale: float) -> Tensor:
        return torch.empty((sequences, tokens), device=device).normal_(0, scale, generator=generator)

    found = []
    for _ in range(count):
        first = normal(1.0)
        found.append(Operands(first, first + normal(0.1), normal(1.0), (normal(1.0) > -1).float()))
    return found


def _call(peer: Callable[[Operands, Tensor], Tensor], which: str, buffers: list[Operands]) -> Call:
    """Returns the function that is timed for a peer in a pass. The function's argument is the number of the call, which
    selects the buffer."""
    n = len(buffers)
    leaves = [o.first.detach().requires_grad_(which == PASSES[1]) for o in buffers]

    def call(i: int) -> Any:
        o, leaf = buffers[i % n], leaves[i % n]
        result = peer(o, leaf)
        if which == PASSES[0]:
            return result
        leaf.grad = None
        result.backward(o.third if result.dim() else None)
        return leaf.grad

    return call


def _error(peer: Callable[[Operands, Tensor], Tensor], of: Operator, which: str, o: Operands) -> float:
    """Returns the worst error against float64 in the result of a pass, relative to the largest magnitude."""
    got: Any = _call(peer, which, [o])(0)
    expected: Any = _call(of.written_out, which, [Operands(*(t.double() for t in o))])(0)
    return float(((got - expected).abs().max() / expected.abs().max()).detach())


def run(
    operator: str,
    sequences: int,
    tokens: int,
    device_name: str,
    *,
    seconds: float = 2.0,
    use_compile: bool = True,
) -> dict[str, Any]:
    """Times every peer on ``[sequences, tokens]``, and returns the results for :mod:`rl_kernel_native.bench.report`."""
    device, of = torch.device(device_name), OPERATORS[operator]
    comparison = Comparison(device, seconds)
    buffers = _buffers(sequences, tokens, device)
    for which in PASSES:
        comparison.add(
            which,
            [
                Candidate(name, _call(peer, which, buffers), partial(_error, peer, of, which, buffers[0]))
                for name, peer in peers(operator, use_compile).items()
            ],
            of.arrays[which] * 4 * sequences * tokens,
        )
    return comparison.report(
        operator, f"[{sequences}, {tokens}]", "float32", len(buffers), rows=sequences, tokens=tokens
    )


def measured(o: Options) -> dict[str, Any]:
    """Runs the bench with the options of the command line."""
    return run(o.operator, o.rows, o.sizes["tokens"], o.device, seconds=o.seconds, use_compile=o.use_compile)
