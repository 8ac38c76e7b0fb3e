"""Bench of the log-probability from hidden states: the compared implementations (peers) and the timed passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rl_kernel_native as rk

from .comparison import Candidate, Comparison, Options, cuda_peers
from .measure import Call

CHECKED_ROWS = 8  # compared with float64
PASSES = ("head alone", "forward", "forward + backward")


class Head(NamedTuple):
    hidden: Tensor  # [rows, in_features]
    weight: Tensor  # [vocab, in_features]
    target: Tensor  # [rows]


Forward = Callable[[Head], Tensor]


def _torch(head: Head) -> Tensor:
    log_p = torch.log_softmax(torch.nn.functional.linear(head.hidden, head.weight), -1, dtype=torch.float32)
    return log_p.gather(-1, head.target.unsqueeze(-1)).squeeze(-1)


def peers(device: torch.device, use_compile: bool) -> tuple[list[tuple[str, Forward]], list[str]]:
    """Returns the peers that can run here, this library first, and the reasons why other peers cannot run."""
    found: list[tuple[str, Forward]] = [
        ("rk", lambda head: rk.linear_logprob(*head)),
        ("rk, 512 MiB", lambda head: rk.linear_logprob(*head, workspace_bytes=512 << 20)),
        ("rk logprob of linear", lambda head: rk.logprob(rk.linear(head.hidden, head.weight), head.target)),
        ("torch", _torch),
    ]
    if use_compile:
        compiled = torch.compile(lambda hidden, weight, target: _torch(Head(hidden, weight, target)), dynamic=False)
        found.append(("torch.compile", lambda head: compiled(*head)))
    others, absent = cuda_peers(device, {"liger_kernel": _liger, "cut_cross_entropy": _cut, "quack": _quack})
    return found + [peer for package in others for peer in package], absent


def _liger() -> list[tuple[str, Forward]]:
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def chunked(head: Head) -> Tensor:
        return -liger_fused_linear_cross_entropy(head.hidden, head.weight, head.target, reduction="none")

    def fused(head: Head) -> Tensor:
        return -LigerFusedLinearScaledCrossEntropyFunction.apply(*head)

    return [("Liger", chunked), ("Liger, scaled", fused)]


def _cut() -> list[tuple[str, Forward]]:
    from cut_cross_entropy import linear_cross_entropy

    return [("cut-cross-entropy", lambda head: -linear_cross_entropy(*head, reduction="none"))]


def _quack() -> list[tuple[str, Forward]]:
    """Returns two peers. The first returns a loss per token and keeps the logits for its backward. The second returns
    the sum of the losses and computes the gradients in its forward."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy, linear_cross_entropy_func

    def tokens(head: Head) -> Tensor:
        return -linear_cross_entropy_func(head.hidden, head.weight, None, head.target, reduction="none")

    def summed(head: Head) -> Tensor:
        return -chunked_linear_cross_entropy(head.hidden, head.weight, head.target, reduction="sum")

    return [("quack", tokens), ("quack, sum of all", summed)]


def _call(forward: Forward, which: str, head: Head) -> Call:
    if which == "forward":
        return lambda _: forward(head)
    leaves = head._replace(hidden=head.hidden.detach().requires_grad_(), weight=head.weight.detach().requires_grad_())
    gradient = torch.randn(head.target.shape, device=head.target.device)

    def forward_backward(_: int) -> Any:
        result = forward(leaves)
        of_result = gradient[: result.numel()].reshape(result.shape).to(result.dtype)
        return torch.autograd.grad(result, (leaves.hidden, leaves.weight), of_result)

    return forward_backward


def _error(call: Call, which: str, head: Head) -> float | None:
    """Returns the worst absolute error against float64 in the log-probabilities of the first rows."""
    if which != "forward":
        return None
    got: Any = call(0)
    if got.ndim == 0:  # the peer returns only the sum of all rows
        return None
    log_p = (head.hidden[:CHECKED_ROWS].double() @ head.weight.double().T).log_softmax(-1)
    expected = log_p.gather(-1, head.target[:CHECKED_ROWS].unsqueeze(-1)).squeeze(-1)
    return float((got[:CHECKED_ROWS].double() - expected).abs().max())


def run(
    rows: int, in_features: int, vocab: int, dtype_name: str, device_name: str, *, seconds: float = 2.0,
    use_compile: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Times every peer on one LM head. For comparison, it also times the head's matrix product alone."""
    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=device).normal_(0, 1, generator=generator)

    target = torch.randint(0, vocab, (rows,), device=device, generator=generator)
    head = Head(normal(rows, in_features), normal(vocab, in_features) / in_features**0.5, target)
    comparison = Comparison(device, seconds)
    candidates, absent = peers(device, use_compile)
    comparison.absent += absent
    operations = 2 * rows * in_features * vocab
    products: list[tuple[str, Forward]] = [
        ("rk", lambda h: rk.linear(h.hidden, h.weight)),
        ("rk, native engine", lambda h: rk.linear(h.hidden, h.weight, engine="native")),
        ("torch", lambda h: torch.nn.functional.linear(h.hidden, h.weight)),
    ]
    for which in PASSES:
        timed = products if which == "head alone" else candidates
        name_of_pass = "forward" if which == "head alone" else which
        calls = [(name, _call(forward, name_of_pass, head)) for name, forward in timed]
        comparison.add(
            which,
            [Candidate(name, call, partial(_error, call, which, head)) for name, call in calls],
            (rows + vocab) * in_features * dtype.itemsize,
            operations * (4 if which == "forward + backward" else 1),
        )
    shape = f"[{rows}, {in_features}] x [{vocab}, {in_features}]"
    return comparison.report("linear_logprob", shape, dtype_name, 1, rows=rows, in_features=in_features, vocab=vocab)


def measured(o: Options) -> dict[str, Any]:
    """Runs the bench with the options of the command line."""
    shape = (o.rows, o.sizes["in_features"], o.sizes["vocab"])
    return run(*shape, o.dtype, o.device, seconds=o.seconds, use_compile=o.use_compile)
