"""Relative Frobenius errors of dhidden and dweight against float64, for linear_logprob and its peers.

    python bench/head_gradient_error.py [--rows 8192] [--in-features 4096] [--vocab 128256] [--device cuda]

Hidden states N(0, 1), weights N(0, 1 / in_features), gradients of log-probabilities N(0, 1), all bfloat16 except the
gradients. The float64 result takes the same bfloat16 operands, some columns of the vocabulary at a time.
"""

from __future__ import annotations

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import rl_kernel_native as rk
from rl_kernel_native.bench.linear_logprob import Head, peers

COLUMNS = 4096  # columns of float64 logits at a time


def squares(x: Tensor) -> float:
    return float(x.double().square().sum())


def main(rows: int = 8192, in_features: int = 4096, vocab: int = 128256, device: str = "cuda") -> None:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    hidden = normal(rows, in_features).bfloat16()
    weight = (normal(vocab, in_features) / in_features**0.5).bfloat16()
    target = torch.randint(0, vocab, (rows,), generator=generator, device=device)
    dlogprob = normal(rows)
    x, chunks = hidden.double(), weight.split(COLUMNS)
    lse = torch.stack([(x @ w.double().T).logsumexp(-1) for w in chunks]).logsumexp(0)

    forwards, absent = peers(torch.device(device), use_compile=False)
    forwards.append(("rk, portable", lambda head: rk.linear_logprob(*head, exp="portable")))
    gradients: dict[str, tuple[Tensor, Tensor]] = {}
    for name, forward in forwards:
        head = Head(hidden.detach().requires_grad_(), weight.detach().requires_grad_(), target)
        try:
            logprob = forward(head)
        except ValueError as error:  # a peer's error for a shape that it does not take
            absent.append(f"{name}: {error}")
            continue
        if logprob.ndim == 0:  # a sum, which has no gradients of tokens
            continue
        of_hidden, of_weight = torch.autograd.grad(logprob, (head.hidden, head.weight), dlogprob.to(logprob.dtype))
        gradients[name] = of_hidden, of_weight
    dhidden, norm = torch.zeros_like(x), 0.0
    wrong = dict.fromkeys(gradients, 0.0)  # squares of dweight's differences
    for i, w in enumerate(chunks):
        first = i * COLUMNS
        dlogits = -(x @ w.double().T - lse.unsqueeze(-1)).exp_() * dlogprob.double().unsqueeze(-1)
        here = (target >= first) & (target < first + len(w))
        dlogits[here.nonzero().squeeze(-1), target[here] - first] += dlogprob[here].double()
        dhidden += dlogits @ w.double()
        dweight = dlogits.T @ x
        norm += squares(dweight)
        for name, (_, got) in gradients.items():
            wrong[name] += squares(got[first : first + len(w)].double() - dweight)
    table = Table("", "dhidden", "dweight", title=f"relative error, {rows} x {in_features} x {vocab}")
    for name, (got, _) in gradients.items():
        error = (squares(got.double() - dhidden) / squares(dhidden)) ** 0.5
        table.add_row(name, f"{error:.2e}", f"{(wrong[name] / norm) ** 0.5:.2e}")
    Console().print(table, *absent, sep="\n")


if __name__ == "__main__":
    typer.run(main)
