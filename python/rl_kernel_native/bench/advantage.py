"""Bench of the operators on rewards and advantages: the peers are formulas in torch's own operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rl_kernel_native as rk

from .comparison import Candidate, Comparison, Options, count_of_buffers
from .measure import Call

MOST_BUFFERS = 64
GROUP = 8  # answers to a prompt
GAMMA, LAM = 0.99, 0.95
KL_COEF = 0.05
MASKED_SHARE = 0.1


class Operands(NamedTuple):
    """The arguments of one call (a buffer). ``group_advantage`` reads only the first column of ``rewards``.
    ``scatter_rewards`` takes its rewards from this column too. Its log-probabilities are ``values`` (policy) and
    ``rewards`` (reference)."""

    rewards: Tensor  # [sequences, tokens]
    values: Tensor
    mask: Tensor  # bool
    logprob: Tensor
    sum_p_sq: Tensor


Function = Callable[[Operands], Tensor]


def loop_over_time(o: Operands) -> Tensor:
    """GAE as frameworks write it. A token whose mask is 0 passes on the next value and the advantage unchanged."""
    following = last = torch.zeros_like(o.rewards[:, 0])
    found = []
    for t in reversed(range(o.rewards.shape[1])):
        counts = o.mask[:, t]
        now = o.rewards[:, t] + GAMMA * following - o.values[:, t] + GAMMA * LAM * last
        following = torch.where(counts, o.values[:, t], following)
        last = torch.where(counts, now, last)
        found.append(last)
    return torch.stack(found[::-1], dim=1)


def whiten(o: Operands) -> Tensor:
    m = o.mask.float()
    mean = (o.values * m).sum() / m.sum()
    var = ((o.values - mean) ** 2 * m).sum() / (m.sum() - 1)
    return (o.values - mean) * (var + 1e-8).rsqrt() * m


def groups(o: Operands) -> Tensor:
    x = o.rewards[:, 0].reshape(-1, GROUP)
    return ((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-6)).flatten()


def scattered(o: Operands) -> Tensor:
    """``scatter_rewards`` as frameworks write it. Each token gets ``-KL_COEF`` times its KL, and the last token that
    counts also gets the reward."""
    last = o.mask.shape[1] - 1 - o.mask.long().fliplr().argmax(dim=1, keepdim=True)
    kl = (o.values - o.rewards) * o.mask
    return (-KL_COEF * kl).scatter_add(1, last, o.rewards[:, :1])


def _tokens(o: Operands) -> tuple[Tensor, ...]:
    """Returns rewards, logprob, sum_p_sq, mask."""
    return o.rewards, o.logprob, o.sum_p_sq, o.mask


def position_baselines(o: Operands) -> Tensor:
    """verl's optimal token baseline for all groups at once. As in verl, tokens of the longest sequence beyond the
    length of the second longest have no baseline."""
    m = o.mask.to(o.rewards.dtype)
    to_go = (o.rewards * m).flip(-1).cumsum(-1).flip(-1)
    w = ((1 - 2 * o.logprob.exp() + o.sum_p_sq) * m).cumsum(-1) * m
    shape = (-1, GROUP, o.rewards.shape[1])
    baseline = (to_go * w).view(shape).sum(1, keepdim=True) / (w.view(shape).sum(1, keepdim=True) + 1e-8)
    lengths = m.sum(-1).view(-1, GROUP)
    first, second = lengths.topk(2, dim=1).values.unbind(1)
    longest = (lengths == first[:, None]) & (first > second)[:, None]
    positions = torch.arange(o.rewards.shape[1], device=m.device)
    tail = longest[:, :, None] & (positions >= second[:, None, None])
    return (to_go.view(shape) - baseline.masked_fill(tail, 0.0)).view_as(m) * m


_OURS: dict[str, Function] = {
    "gae": lambda o: rk.gae(o.rewards, o.values, o.mask, gamma=GAMMA, lam=LAM).advantages,
    "group_advantage": lambda o: rk.group_advantage(o.rewards[:, 0], group_size=GROUP),
    "optimal_token_baseline": lambda o: rk.optimal_token_baseline(*_tokens(o), group_size=GROUP).advantages,
    "masked_whiten": lambda o: rk.masked_whiten(o.values, o.mask),
    "scatter_rewards": lambda o: (
        rk.scatter_rewards(o.rewards[:, 0], o.mask, logprob=o.values, ref_logprob=o.rewards, kl_coef=KL_COEF).rewards
    ),
}
_WRITTEN_OUT: dict[str, Function] = {
    "gae": loop_over_time,
    "group_advantage": groups,
    "optimal_token_baseline": position_baselines,
    "masked_whiten": whiten,
    "scatter_rewards": scattered,
}


def peers(operator: str, use_compile: bool) -> list[tuple[str, Function]]:
    """Returns the peers, with this library as the first."""
    found = [("rk", _OURS[operator]), ("torch written out", _WRITTEN_OUT[operator])]
    if use_compile and operator != "gae":  # torch would take hours to compile a loop of thousands of steps
        found.append(("torch.compile", torch.compile(_WRITTEN_OUT[operator], dynamic=False)))
    return found


def buffers(sequences: int, tokens: int, device: torch.device) -> list[Operands]:
    size = 4 * sequences * tokens * 4
    count = count_of_buffers(size, device, MOST_BUFFERS)
    generator = torch.Generator(device).manual_seed(0)

    def normal() -> Tensor:
        return torch.empty((sequences, tokens), device=device).normal_(0, 1, generator=generator)

    def operands() -> Operands:
        mask, logprob = normal().abs() > MASKED_SHARE, -normal().abs()
        return Operands(normal(), normal(), mask, logprob, logprob.exp() ** 2)

    return [operands() for _ in range(count)]


def _call(function: Function, rotated: list[Operands]) -> Call:
    return lambda i: function(rotated[i % len(rotated)])


def bytes_moved(operator: str, sequences: int, tokens: int) -> int:
    """Returns the bytes that a call reads and writes: one byte per token of a mask, four bytes per token of any other
    array. ``masked_whiten`` reads its inputs three times."""
    if operator == "group_advantage":
        return 8 * sequences
    bytes_of_token = {
        "gae": 4 * 4 + 1, "optimal_token_baseline": 5 * 4 + 1, "masked_whiten": 4 * 4 + 3, "scatter_rewards": 3 * 4 + 1,
    }  # fmt: skip
    return sequences * tokens * bytes_of_token[operator]


def run(
    operator: str, sequences: int, tokens: int, device_name: str, *, seconds: float = 2.0, use_compile: bool = True
) -> dict[str, Any]:
    """Times every peer on ``[sequences, tokens]``, and returns the results for :mod:`rl_kernel_native.bench.report`."""
    device = torch.device(device_name)
    comparison = Comparison(device, seconds)
    rotated = buffers(sequences, tokens, device)
    exact = _WRITTEN_OUT[operator](Operands(*(a.double() if a.is_floating_point() else a for a in rotated[0])))

    def error(function: Function) -> float:
        return float((function(rotated[0]).double() - exact).abs().max() / exact.abs().max())

    comparison.add(
        "forward",
        [
            Candidate(name, _call(function, rotated), partial(error, function))
            for name, function in peers(operator, use_compile)
        ],
        bytes_moved(operator, sequences, tokens),
    )
    return comparison.report(
        operator, f"[{sequences}, {tokens}]", "float32", len(rotated), rows=sequences, tokens=tokens
    )


def measured(o: Options) -> dict[str, Any]:
    """Runs the bench with the options of the command line."""
    return run(o.operator, o.rows, o.sizes["tokens"], o.device, seconds=o.seconds, use_compile=o.use_compile)
