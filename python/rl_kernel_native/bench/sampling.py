"""What rollouts draw by: random words beside torch's generator, which has other words."""

from __future__ import annotations

from typing import Any

import torch

import rl_kernel_native as rk

from .comparison import Candidate, Comparison

OPERATORS = ("random_bits",)
WORDS = 4  # of a row


def run(operator: str, rows: int, device_name: str, *, seconds: float = 2.0) -> dict[str, Any]:
    """Times every peer; see :mod:`rl_kernel_native.bench.report` for what is done with it."""
    device = torch.device(device_name)
    comparison = Comparison(device, seconds)
    ids = torch.arange(rows, device=device)
    generator = torch.Generator(device).manual_seed(7)

    def ours(call: int) -> Any:
        return rk.random_bits(7, ids, call % 1024, WORDS)

    def theirs(_call: int) -> Any:
        return torch.randint(1 << 32, (rows, WORDS), generator=generator, device=device)

    candidates = [Candidate("rk", ours), Candidate("torch.randint", theirs)]
    comparison.add("words", candidates, 8.0 * (WORDS + 1) * rows)
    return comparison.report(operator, f"[{rows}, {WORDS}]", "int64", 1, rows=rows)
