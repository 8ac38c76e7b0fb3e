"""Memory and time of a GRPO step's head, loss and backward as the group grows: a table and a plot.

    python bench/grpo_head_memory.py [--groups 64,128,256,512] [--plot grpo_head_memory.png]

One group of answers of 512 tokens goes through a head of Llama 3 8B, with hidden states and weight in bfloat16. A step
computes the log-probabilities of the answers' tokens, PPO's clip over all tokens, and the gradients of hidden states
and weight. Memory is the peak of torch's allocator, less the memory allocated before the step (hidden states, weight,
ids, masks) and less the two gradients that remain after it. TRL's and Liger's functions come from the installed
packages. Out of memory is a reported result.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import rl_kernel_native as rk

TRL_CHUNK = 32768  # columns of the vocabulary, as TRL 1.16 gives it
CLIP = 0.2


class Batch(NamedTuple):
    """A group's answers. ``hidden`` and ``weight`` are leaves that want gradients."""

    hidden: Tensor  # [answers, tokens, in_features]
    weight: Tensor  # [vocab, in_features]
    ids: Tensor  # [answers, tokens], int64
    mask: Tensor  # [answers, tokens], bool
    advantage: Tensor  # [answers], float32
    old_logprob: Tensor  # [answers, tokens], float32


def make_batch(answers: int, tokens: int, in_features: int, vocab: int, device: str) -> Batch:
    generator = torch.Generator(device).manual_seed(answers)
    make = functools.partial(torch.empty, device=device, dtype=torch.bfloat16)
    hidden = make(answers, tokens, in_features).normal_(generator=generator)
    weight = make(vocab, in_features).normal_(0, in_features**-0.5, generator=generator)
    ids = torch.randint(0, vocab, (answers, tokens), device=device, generator=generator)
    lengths = torch.randint(tokens // 2, tokens + 1, (answers, 1), device=device, generator=generator)
    mask = torch.arange(tokens, device=device) < lengths
    advantage = torch.empty(answers, device=device).normal_(generator=generator)
    old = torch.empty(answers, tokens, device=device).normal_(-11.5, 0.1, generator=generator)
    return Batch(hidden.requires_grad_(), weight.requires_grad_(), ids, mask, advantage, old)


def clipped(logprob: Tensor, batch: Batch) -> Tensor:
    """PPO's loss over all tokens, in torch."""
    ratio = (logprob - batch.old_logprob).exp()
    advantage = batch.advantage.unsqueeze(-1)
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return (loss * batch.mask).sum() / batch.mask.sum()


def stock(batch: Batch) -> Tensor:
    logits = torch.nn.functional.linear(batch.hidden, batch.weight)
    logprob = torch.log_softmax(logits, -1, dtype=torch.float32).gather(-1, batch.ids.unsqueeze(-1)).squeeze(-1)
    return clipped(logprob, batch)


def trl() -> Callable[[Batch], Tensor]:
    from trl.kernels import ChunkedLogProbFunction

    def loss(batch: Batch) -> Tensor:  # scores only tokens that count, as TRL's trainers do on a GPU
        rows, ids = batch.hidden[batch.mask], batch.ids[batch.mask]
        scored = ChunkedLogProbFunction.apply(rows, batch.weight, None, ids, 1.0, TRL_CHUNK, None, 1.0, ())[0]
        return clipped(scored.new_zeros(batch.mask.shape).masked_scatter(batch.mask, scored), batch)

    return loss


def liger() -> Callable[[Batch], Tensor]:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    fused = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, epsilon_low=CLIP, epsilon_high=CLIP, loss_type="bnpo"
    )

    def loss(batch: Batch) -> Tensor:
        h, w, ids, mask, advantage, old = batch
        return fused(h, w, ids, mask.float(), advantage, old_per_token_logps=old)[0]

    return loss


def ours(batch: Batch, main_grad: Tensor | None = None) -> Tensor:
    # Besides the workspace, a bfloat16 gradient needs its own float32 sums, with the size of the smaller operand.
    sums = 0 if main_grad is not None else 4 * min(batch.hidden.numel(), batch.weight.numel())
    logprob = rk.linear_logprob(
        batch.hidden, batch.weight, batch.ids, loss_mask=batch.mask, main_grad=main_grad,
        workspace_bytes=(512 << 20) + sums,
    )  # fmt: skip
    spec = rk.presets.trl(loss_type="bnpo", epsilon=CLIP)
    return rk.policy_loss(logprob, batch.old_logprob, batch.advantage, batch.mask, spec=spec).loss


def ways(batch: Batch) -> tuple[dict[str, Callable[[Batch], Tensor]], list[str]]:
    """The ways to compute the loss, by name, and a sentence for each library that is not installed."""
    found: dict[str, Callable[[Batch], Tensor]] = {"torch": stock}
    absent = []
    for name, load in (("TRL", trl), ("Liger", liger)):
        try:
            found[name] = load()
        except ImportError as error:
            absent.append(f"{name}: {error}")
    total = torch.zeros_like(batch.weight, dtype=torch.float32)  # the trainer's main_grad, allocated before the step
    found["rk"] = ours
    found["rk, main_grad"] = functools.partial(ours, main_grad=total)
    return found, absent


class Cost(NamedTuple):
    extra_bytes: int
    time_ms: float


def step(loss: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
    batch.hidden.grad = batch.weight.grad = None
    value = loss(batch)
    value.backward()
    return value.detach()


def cost(loss: Callable[[Batch], Tensor], batch: Batch, steps: int) -> Cost | None:
    """None where memory does not suffice."""
    try:
        step(loss, batch)  # compiles, and makes workspaces that stay
        times = []
        extra = 0
        for _ in range(steps):
            batch.hidden.grad = batch.weight.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step(loss, batch)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
            gradients = sum(t.grad.nbytes for t in (batch.hidden, batch.weight) if t.grad is not None)
            extra = max(extra, torch.cuda.max_memory_allocated() - before - gradients)
        return Cost(extra, statistics.median(times))
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        batch.hidden.grad = batch.weight.grad = None
        torch.cuda.empty_cache()


def text(found: Cost | None) -> str:
    return "out of memory" if found is None else f"{found.extra_bytes / 2**30:.2f} GiB, {found.time_ms:.0f} ms"


def plot(groups: list[int], costs: dict[str, list[Cost | None]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (memory, time) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, found in costs.items():
        there = [(g, c) for g, c in zip(groups, found, strict=True) if c is not None]
        memory.plot([g for g, _ in there], [c.extra_bytes / 2**30 for _, c in there], marker=".", label=name)
        time.plot([g for g, _ in there], [c.time_ms for _, c in there], marker=".", label=name)
    for axes, label in ((memory, "GiB beyond inputs and gradients"), (time, "ms, forward and backward")):
        axes.set(xlabel="answers in the group", ylabel=label, xscale="log", yscale="log", xticks=groups)
        axes.set_xticks(groups, map(str, groups))
        axes.minorticks_off()
    memory.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


def main(
    groups: Annotated[str, typer.Option(help="Answers in the group.")] = "64,128,256,512",
    tokens: Annotated[int, typer.Option(help="Of an answer.")] = 512,
    in_features: int = 4096,
    vocab: int = 128256,
    steps: Annotated[int, typer.Option(help="That are timed.")] = 3,
    plot_path: Annotated[Path, typer.Option("--plot", help="Where the plot goes.")] = Path("grpo_head_memory.png"),
) -> None:
    sizes = [int(g) for g in groups.split(",")]
    console = Console()
    console.print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, head {vocab} x {in_features}, {tokens} tokens"
    )
    costs: dict[str, list[Cost | None]] = {}
    for g, size in enumerate(sizes):
        torch.compiler.reset()  # each size for itself: torch 2.11 fails to compile Liger's loss for any size
        batch = make_batch(size, tokens, in_features, vocab, "cuda")
        found, absent = ways(batch)
        if g == 0:
            for sentence in absent:
                console.print(sentence)
        for name in list(found):
            costs.setdefault(name, []).append(cost(found.pop(name), batch, steps))
            typer.echo(f"{size} answers, {name}: {text(costs[name][-1])}", err=True)
    table = Table("answers", *costs)
    for row in zip(sizes, *costs.values(), strict=True):
        table.add_row(str(row[0]), *map(text, itertools.islice(row, 1, None)))
    console.print(table)
    plot(sizes, costs, plot_path)
    console.print(f"plot: {plot_path}")


if __name__ == "__main__":
    typer.run(main)
