"""Bench of importance_weights, mismatch_metrics, covariance_mask and entropy_mask. The peers are the frameworks'
formulas in torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rl_kernel_native as rk

from .comparison import Candidate, Comparison, Options, count_of_buffers

MOST_BUFFERS = 256
BYTES = {
    "importance_weights": 8 + 8 + 4 + 8,
    "mismatch_metrics": 8 + 4,
    "covariance_mask": 12 + 4 + 4,
    "entropy_mask": 4 + 4 + 4,
}  # bytes per token; sequence-level weights read the log-probabilities twice


class Operands(NamedTuple):
    """The arguments of one call (a buffer), float32 ``[sequences, tokens]``. Calls rotate over many buffers."""

    train: Tensor
    rollout: Tensor
    mask: Tensor


Function = Callable[[Operands], Any]


def _mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    return (x * mask).sum(dim) / mask.sum(dim)


def weights(o: Operands) -> tuple[Tensor, Tensor]:
    """verl's weights: sequence weights are truncated at 2, and sequences whose mean k3 exceeds 0.01 are rejected."""
    d = o.train - o.rollout
    total = (d * o.mask).sum(-1, keepdim=True)
    w = (total.clamp(-20, 20).exp().expand_as(d) * o.mask).clamp(max=2.0)
    safe = d.clamp(-20, 20)
    keep = _mean(safe.exp() - 1 - safe, o.mask, -1) <= 0.01
    return w, o.mask * keep[:, None]


def metrics(o: Operands) -> Tensor:
    """The mismatch metrics that verl logs, without verl's copies to the host, and the other scalars of
    ``mismatch_metrics``."""
    d = o.train - o.rollout
    rho = d.clamp(-20, 20).exp()
    train, rollout = _mean(o.train, o.mask, -1), _mean(o.rollout, o.mask, -1)
    diff, total = rollout - train, (d * o.mask).sum(-1).clamp(-20, 20)
    p, q = o.train.exp(), o.rollout.exp()
    p, q = (p - _mean(p, o.mask)) * o.mask, (q - _mean(q, o.mask)) * o.mask
    bins = torch.bucketize(d, d.new_tensor(rk.MismatchMetrics.histogram_edges), right=True)
    counts = torch.stack([_mean((bins == i).float(), o.mask) for i in range(9)])
    scalars = (
        _mean(d.abs(), o.mask), (d.abs() * o.mask).max(), -_mean(d, o.mask), _mean(d.exp() - d - 1, o.mask),
        _mean(rho, o.mask), _mean(rho, o.mask) ** 2 / _mean(rho.square(), o.mask), _mean(rho.square(), o.mask) - 1,
        (2 * total).exp().mean() - 1, (-train).exp().mean(), (-rollout).exp().mean(), -train.mean(), -rollout.mean(),
        diff.exp().mean(), diff.mean(), diff.abs().mean(), diff.min(), diff.max(),
        (p * q).sum() / (p.square().sum() * q.square().sum()).sqrt(), _mean((d != 0).float(), o.mask),
    )  # fmt: skip
    return torch.cat((torch.stack(scalars), counts))


def chosen(o: Operands) -> Tensor:
    """Clip-Cov's choice in verl: each candidate gets a random number, and the candidates with the largest numbers are
    chosen. The host computes how many are chosen. The rollout's log-probabilities serve as the old log-probabilities,
    and the trainer's as the advantage."""
    advantage = o.train + 0.8
    a, ell = advantage - _mean(advantage, o.mask), o.train - _mean(o.train, o.mask)
    ratio = (o.train - o.rollout).exp()
    clipped = -advantage * ratio.clamp(0.8, 1.2) > -advantage * ratio
    cov = a * ell
    drawn = torch.where((cov > 1) & (cov < 5) & ~clipped & (o.mask > 0), torch.rand_like(cov) + 1, 0).reshape(-1)
    values, indices = torch.topk(drawn, max(int(0.0002 * o.mask.sum().item()), 1))
    return torch.zeros_like(drawn).scatter_(0, indices, (values > 0).to(drawn.dtype)).view_as(cov)


def uncertain(o: Operands) -> Tensor:
    """TRL's mask: it selects the 20 % of tokens with the highest entropy. Negative log-probabilities serve as
    entropies."""
    h = -o.train
    return ((h >= torch.quantile(h[o.mask > 0], 0.8)) & (o.mask > 0)).to(h.dtype)


_OURS: dict[str, Function] = {
    "importance_weights": lambda o: rk.importance_weights(
        *o, level="sequence", upper=2.0, rejection={"seq_mean_k3": 0.01}
    ),
    "mismatch_metrics": lambda o: rk.mismatch_metrics(*o).vector,
    "covariance_mask": lambda o: rk.covariance_mask(
        o.train, o.rollout, o.train + 0.8, o.mask, kind="clip", ratio=0.0002, seed=0
    ),
    "entropy_mask": lambda o: rk.entropy_mask(-o.train, o.mask, top_quantile=0.2),
}
_WRITTEN_OUT: dict[str, Function] = {
    "importance_weights": weights,
    "mismatch_metrics": metrics,
    "covariance_mask": chosen,
    "entropy_mask": uncertain,
}


def _buffers(sequences: int, tokens: int, device: torch.device) -> list[Operands]:
    size = 4 * len(Operands._fields) * sequences * tokens
    count = count_of_buffers(size, device, MOST_BUFFERS)
    generator = torch.Generator(device).manual_seed(0)

    def normal(scale: float) -> Tensor:
        return torch.empty((sequences, tokens), device=device).normal_(0, scale, generator=generator)

    found = []
    for _ in range(count):
        train = -normal(1.0).abs()
        found.append(Operands(train, train + normal(0.02), (normal(1.0) > -1).float()))
    return found


def _comparable(result: Any) -> Tensor:
    """Returns the part of a result that is compared: the weights, the number of chosen tokens, or the metrics that both
    peers compute. ``num_tokens``, ``num_sequences`` and ``nonfinite_fraction`` are not compared."""
    if isinstance(result, tuple):
        weights: Tensor = result[0]
        return weights
    found: Tensor = result
    if found.dim() == 2:
        return found.sum()
    return torch.cat((found[2:21], found[22:])) if len(found) == len(rk.MismatchMetrics.names) else found


def peers(operator: str, use_compile: bool) -> dict[str, Function]:
    """Returns the peers, with this library as the first."""
    found = {"rk": _OURS[operator], "torch written out": _WRITTEN_OUT[operator]}
    if use_compile:
        found["torch.compile"] = torch.compile(_WRITTEN_OUT[operator], dynamic=False)
    return found


def _call(function: Function, buffers: list[Operands], i: int) -> Any:
    """Calls a peer. The number of the call, ``i``, selects the buffer."""
    return function(buffers[i % len(buffers)])


def _error(function: Function, operator: str, o: Operands) -> float:
    """Returns the worst error against float64."""
    want = _comparable(_WRITTEN_OUT[operator](Operands(*(x.double() for x in o))))
    return float((_comparable(function(o)) - want).abs().max())


def run(
    operator: str, sequences: int, tokens: int, device_name: str, *, seconds: float = 2.0, use_compile: bool = True
) -> dict[str, Any]:
    """Times every peer on ``[sequences, tokens]``, and returns the results for :mod:`rl_kernel_native.bench.report`."""
    device = torch.device(device_name)
    comparison = Comparison(device, seconds)
    buffers = _buffers(sequences, tokens, device)
    comparison.add(
        "forward",
        [
            Candidate(name, partial(_call, function, buffers), partial(_error, function, operator, buffers[0]))
            for name, function in peers(operator, use_compile).items()
        ],
        BYTES[operator] * sequences * tokens,
    )
    return comparison.report(
        operator, f"[{sequences}, {tokens}]", "float32", len(buffers), rows=sequences, tokens=tokens
    )


def measured(o: Options) -> dict[str, Any]:
    """Runs the bench with the options of the command line."""
    return run(o.operator, o.rows, o.sizes["tokens"], o.device, seconds=o.seconds, use_compile=o.use_compile)
