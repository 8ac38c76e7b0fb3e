#!/usr/bin/env python3
"""Host time of a call in microseconds: torch's own calls, an autograd Function that does nothing, and operators.

    python tools/host_time.py [--device cpu] [--json FILE]

It runs bursts of calls that the device's queue holds, and waits for the device between them. A row has the median and
the least of the bursts. Hosts differ and change, so compare rows of one run alone, or files of runs that alternate. The
file of ``--json`` also has a digest of each call's results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rl_kernel_native as rk

BURSTS, CALLS = 21, 16
# Tokens, heads, heads of keys, their columns, columns of a row, of an activation and of the vocabulary, and pages. The
# arrays of a CPU are small, since it computes within the call.
SIZES = {"cuda": (64, 32, 8, 128, 1024, 3072, 32000, 64), "cpu": (4, 4, 2, 16, 32, 64, 128, 8)}

Calls = dict[str, Callable[[], Any]]


class Nothing(torch.autograd.Function):
    """An autograd Function that does nothing but allocate its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None


class Saving(torch.autograd.Function):
    """The same with two tensors that are saved and have gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def digest(found: Any) -> Any:
    if isinstance(found, (tuple, list)):
        return [digest(x) for x in found]
    if not isinstance(found, Tensor):
        return None
    return hashlib.sha256(found.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]


def call_tables(device: str) -> tuple[Calls, Calls, Calls, Calls]:
    """Calls without gradients, of registered operators in inference mode, with gradients, and with backward()."""
    torch.manual_seed(0)
    num_tokens, heads, kv_heads, columns, hidden, inner, vocab, num_pages = SIZES[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    def leaf(x: Tensor) -> Tensor:
        return x.clone().requires_grad_()

    x, residual, norm, weight = (
        made(num_tokens, hidden),
        made(num_tokens, hidden),
        made(hidden),
        made(hidden, hidden) / 32,
    )
    gate_up, table, logits = made(num_tokens, 2 * inner), made(vocab, hidden), made(num_tokens, vocab)
    q, k, v = made(num_tokens, heads, columns), made(num_tokens, kv_heads, columns), made(num_tokens, kv_heads, columns)
    k_pages, v_pages = made(num_pages, 16, kv_heads, columns), made(num_pages, 16, kv_heads, columns)
    k_cache, v_cache = k_pages.clone(), v_pages.clone()
    cos, sin = (torch.randn(num_tokens, columns // 2, device=device) for _ in range(2))
    tokens, ids = (
        torch.arange(num_tokens, device=device),
        torch.arange(num_tokens + 1, device=device, dtype=torch.int32),
    )
    used, blocks = torch.full_like(ids[1:], 30), (ids[:num_tokens, None] % (num_pages // 2) * 2 + ids[:2]).contiguous()
    cu = (ids[:5] * (num_tokens // 4)).contiguous()
    x_leaf, norm_leaf, weight_leaf, gate_up_leaf = map(leaf, (x, norm, weight, gate_up))
    q_leaf, k_leaf, v_leaf = map(leaf, (q, k, v))
    rk.rms_norm(x, norm, 1e-6)  # registers the operators
    of, functional = torch.ops.rl_kernel_native, torch.nn.functional
    without: Calls = {
        "torch.empty_like": lambda: torch.empty_like(x),
        "torch.add": lambda: torch.add(x, residual),
        "attention, decode in pages": lambda: rk.attention(
            q, k_pages, v_pages, cu_seqlens_q=ids, block_table=blocks, seqused_k=used
        ),
        "attention, packed": lambda: rk.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu),
        "attention, packed, with lse": lambda: rk.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True),
        "kv_cache_append": lambda: rk.kv_cache_append(k, v, k_cache, v_cache, tokens),
        "linear": lambda: rk.linear(x, weight),
        "rms_norm": lambda: rk.rms_norm(x, norm, 1e-6),
        "rms_norm, residual": lambda: rk.rms_norm(x, norm, 1e-6, residual=residual),
        "silu_mul": lambda: rk.silu_mul(gate_up),
        "rope": lambda: rk.rope(q, k, cos, sin, position_ids=tokens),
        "embedding": lambda: rk.embedding(tokens, table),
        "logprob": lambda: rk.logprob(logits, tokens),
        "sample": lambda: rk.sample(logits, seed=0, sample_id=0, position=0)[:2],
    }
    registered: Calls = {
        "operator linear": lambda: of.linear.default(x, weight, None, 1, None, True, -1),
        "operator rms_norm": lambda: of.rms_norm.default(x, norm, None, 1e-6, 0.0, True),
        "operator rms_norm, residual": lambda: of.rms_norm.default(x, norm, residual, 1e-6, 0.0, True),
        "operator silu_mul": lambda: of.gated_mul.default(gate_up, None, 0, True),
    }
    forward: dict[str, tuple[Callable[[], Tensor], tuple[Tensor, ...]]] = {
        "a Function that does nothing": (lambda: Nothing.apply(x_leaf, norm_leaf), (x_leaf, norm_leaf)),
        "a Function that saves two": (lambda: Saving.apply(x_leaf, norm_leaf), (x_leaf, norm_leaf)),
        "torch's rms_norm": (
            lambda: functional.rms_norm(x_leaf, (hidden,), norm_leaf, 1e-6), (x_leaf, norm_leaf)
        ),
        "torch's linear": (lambda: functional.linear(x_leaf, weight_leaf), (x_leaf, weight_leaf)),
        "rms_norm": (lambda: rk.rms_norm(x_leaf, norm_leaf, 1e-6), (x_leaf, norm_leaf)),
        "linear": (lambda: rk.linear(x_leaf, weight_leaf), (x_leaf, weight_leaf)),
        "silu_mul": (lambda: rk.silu_mul(gate_up_leaf), (gate_up_leaf,)),
        "attention, packed": (
            lambda: rk.attention(q_leaf, k_leaf, v_leaf, cu_seqlens_q=cu, cu_seqlens_k=cu), (q_leaf, k_leaf, v_leaf)
        ),
    }  # fmt: skip

    def backward(call: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Callable[[], Any]:
        dy = torch.ones_like(call())

        def run() -> Any:
            for x in leaves:
                x.grad = None
            call().backward(dy)
            return [x.grad for x in leaves]

        return run

    both = {f"{name}, with backward()": backward(*given) for name, given in forward.items()}
    return without, registered, {f"{name}, with gradients": call for name, (call, _) in forward.items()}, both


def measured(call: Callable[[], Any], device: str) -> tuple[float, float]:
    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(CALLS):
        call()
    found = []
    for _ in range(BURSTS):
        wait()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    return statistics.median(found), min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="a file for the times and the digests of results")
    asked = parser.parse_args()
    times, digests = {}, {}
    contexts = (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.enable_grad)
    for context, calls in zip(contexts, call_tables(asked.device), strict=True):
        with context():
            for name, call in calls.items():
                digests[name] = None if "torch" in name or "Function" in name else digest(call())
                times[name] = measured(call, asked.device)
                print(f"{name:45}{times[name][0]:9.2f}{times[name][1]:9.2f}")
    if asked.json:
        asked.json.write_text(json.dumps({"times": times, "digests": digests}))


if __name__ == "__main__":
    main()
