"""rk.attention beside FlashAttention-3: paged decode, also after shared prompts, and prefill; trees beside the same
paths unshared. The script prints the tables of cuda/attention/README.md.

    python bench/attention_peers.py [--fa3 FILE] [--softcap C] [--only decode|shared|prefill|chunks|trees]

FILE is vLLM's _vllm_fa3_C.abi3.so, which has FlashAttention-3. CUDA graphs over rotated caches time decode. Events time
prefill, chunks and trees, each call after a rest. Works alternate. R is torch's bf16 product of 8192 x 8192 x 8192.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rl_kernel_native as rk
from attention_splits import graph_of

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
SCALE = HEAD_DIM**-0.5
DECODE = [
    (1, 1024), (1, 4096), (1, 8192), (1, 32768), (4, 8192), (8, 4096), (32, 1024), (16, 4096), (64, 4096), (256, 1024)
]  # fmt: skip
SHARED = [(16, 16, 8192, 512), (4, 16, 8192, 512), (32, 8, 2048, 1024)]  # groups, rollouts, keys of a prompt and own
PREFILL = [(4, 4096), (1, 16384), (32, 1024)]
CHUNKS = [
    (4, 4096, 4096),
    (8, 1024, 8192),
    (32, 512, 512),
    (64, 128, 2048),
]  # sequences, their queries and keys in pages
TREES = [(8, 4096, 1024), (16, 1000, 500), (64, 2048, 256)]  # rollouts, tokens of the prompt and of each rollout
ROUNDS = 7
AHEAD = 1_000_000  # cycles

Call = Callable[[], object]


def in_turn_us(works: dict[str, Call], calls: int, rest: float = 0.0) -> dict[str, float]:
    """Median microseconds of a call, for calls that alternate."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(ROUNDS + 1):
        for name, work in works.items():
            time.sleep(rest)
            torch.cuda._sleep(AHEAD)  # the call's launches are queued before the first one begins
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            if turn > 0:  # the first one warms
                times[name].append(begin.elapsed_time(end) * 1e3 / calls)
    return {name: statistics.median(found) for name, found in times.items()}


def fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, longest: int, **lists: object) -> object:
    """Causal forward of FlashAttention-3; `lists` has cu_k, or used, keys and table."""
    no = None
    tail = (no,) * 8 + (SCALE, True, -1, -1, 0.0, True, no, 0, no, 0, no, 1, 0, no)
    cu_k, used, table = (lists.get(name) for name in ("cu_k", "used", "table"))
    keys = lists.get("keys", longest)
    return torch.ops._vllm_fa3_C.fwd(
        q, k, v, no, no, no, no, cu_q, cu_k, no, no, used, longest, keys, table, *tail
    )  # fmt: skip


def decode(batch: int, keys: int, softcap: float | None, with_fa3: bool) -> str:
    torch.manual_seed(1)
    pages = keys // PAGE
    copies = max(2, min(16, int(400e6 / (batch * keys * KV_HEADS * HEAD_DIM * 4))))
    q = torch.randn(batch, Q_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    cu_q = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    used = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    caches = []
    for _ in range(copies):
        k, v = (torch.randn(batch * pages, PAGE, KV_HEADS, HEAD_DIM, device="cuda", dtype=q.dtype) for _ in "kv")
        caches.append((k, v, torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages)))

    def ours(i: int, cap: float | None) -> Call:
        k, v, table = caches[i]
        lists = {"cu_seqlens_q": cu_q, "seqused_k": used, "block_table": table}
        return lambda: rk.attention(q, k, v, softmax_scale=SCALE, softcap=cap, **lists)

    def peer(i: int) -> Call:
        k, v, table = caches[i]
        return lambda: fa3(q, k, v, cu_q, 1, used=used, table=table, keys=keys)

    works = {"ours": graph_of([ours(i, None) for i in range(copies)])}
    if softcap is not None:
        works["ours, softcap"] = graph_of([ours(i, softcap) for i in range(copies)])
    if with_fa3:
        works["FlashAttention-3"] = graph_of([peer(i) for i in range(copies)])

    def replays(graph: torch.cuda.CUDAGraph) -> Call:
        return lambda: [graph.replay() for _ in range(5)]

    return row_of(f"{batch} x {keys}", in_turn_us({n: replays(g) for n, g in works.items()}, 5 * copies))


def shared_tables(groups: int, rollouts: int, prompt: int, own: int, device: str) -> tuple[torch.Tensor, ...]:
    """Pages of prompts [groups, pages], and pages of rollouts [groups * rollouts, pages], in random order."""
    of_prompt, of_own = prompt // PAGE, own // PAGE
    pages = torch.randperm(groups * (of_prompt + rollouts * of_own), device=device).to(torch.int32)
    prompts, owns = pages.split([groups * of_prompt, groups * rollouts * of_own])
    return prompts.view(groups, of_prompt), owns.view(groups * rollouts, of_own)


def shared(groups: int, rollouts: int, prompt: int, own: int, with_fa3: bool) -> str:
    """A decode step in three forms: shared_prefix; one prompt's pages in every rollout's table; separate pages."""
    torch.manual_seed(1)
    batch, keys = groups * rollouts, prompt + own
    q = torch.randn(batch, Q_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    cu_q = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    used = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    prompts, owns = shared_tables(groups, rollouts, prompt, own, "cuda")
    whole = torch.cat((prompts.repeat_interleave(rollouts, 0), owns), 1)
    alone = torch.randperm(batch * (keys // PAGE), device="cuda").to(torch.int32).view(batch, -1)
    lens = torch.full((groups,), prompt, device="cuda", dtype=torch.int32)
    prefix = (prompts, lens, torch.arange(groups + 1, device="cuda", dtype=torch.int32) * rollouts)
    k, v = (torch.randn(alone.numel(), PAGE, KV_HEADS, HEAD_DIM, device="cuda", dtype=q.dtype) for _ in "kv")

    def ours(table: torch.Tensor, **more: object) -> Call:
        lists = {"cu_seqlens_q": cu_q, "seqused_k": used, "block_table": table, **more}
        return lambda: rk.attention(q, k, v, softmax_scale=SCALE, **lists)

    calls = {
        "ours": ours(owns, shared_prefix=prefix), "ours, same pages": ours(whole), "ours, own pages": ours(alone)
    }  # fmt: skip
    if with_fa3:
        calls["FlashAttention-3, same pages"] = lambda: fa3(q, k, v, cu_q, 1, used=used, table=whole, keys=keys)
    graphs = {name: graph_of([call]) for name, call in calls.items()}
    return row_of(
        f"{groups} x {rollouts} x ({prompt} + {own})", in_turn_us({n: g.replay for n, g in graphs.items()}, 1)
    )


def prefill(batch: int, tokens: int, with_fa3: bool) -> str:
    torch.manual_seed(1)
    total = batch * tokens
    q = torch.randn(total, Q_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(total, KV_HEADS, HEAD_DIM, device="cuda", dtype=q.dtype) for _ in "kv")
    cu = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * tokens
    sinks = torch.randn(Q_HEADS, device="cuda")
    a = torch.randn(8192, 8192, device="cuda", dtype=q.dtype)
    lists = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "return_lse": True}
    works: dict[str, Call] = {
        "R": lambda: a @ a,
        "ours": lambda: rk.attention(q, k, v, softmax_scale=SCALE, **lists),
        "ours, sinks": lambda: rk.attention(q, k, v, softmax_scale=SCALE, sinks=sinks, **lists),
    }
    if with_fa3:
        works["FlashAttention-3"] = lambda: fa3(q, k, v, cu, tokens, cu_k=cu)
    times = in_turn_us(works, 1, rest=0.04)
    product = 2 * 8192**3 / times.pop("R")
    flops = 2 * batch * tokens * tokens * Q_HEADS * HEAD_DIM
    shares = ", ".join(f"{name} {flops / us / product:.3f} R" for name, us in times.items())
    return f"{row_of(f'{batch} x {tokens}', times)}; {shares}"


def chunks(batch: int, queries: int, keys: int, with_fa3: bool) -> str:
    """The last `queries` of `keys` tokens, whose keys lie in pages."""
    torch.manual_seed(1)
    pages = keys // PAGE
    q = torch.randn(batch * queries, Q_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch * pages, PAGE, KV_HEADS, HEAD_DIM, device="cuda", dtype=q.dtype) for _ in "kv")
    cu_q = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * queries
    used = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
    table = torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages)
    lists = {"cu_seqlens_q": cu_q, "seqused_k": used, "block_table": table}
    works: dict[str, Call] = {"ours": lambda: rk.attention(q, k, v, softmax_scale=SCALE, **lists)}
    if with_fa3:
        works["FlashAttention-3"] = lambda: fa3(q, k, v, cu_q, queries, used=used, table=table, keys=keys)
    return row_of(f"{batch} x {queries} of {keys}", in_turn_us(works, 1, rest=0.04))


def trees(rollouts: int, prompt: int, own: int) -> str:
    """A prompt and its rollouts as a tree, and as one sequence for each rollout: forward, and with the backward."""
    torch.manual_seed(1)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device="cuda", dtype=torch.int32)

    cu = ints([0, *(prompt + i * own for i in range(rollouts + 1))])
    paths = ints([i * (prompt + own) for i in range(rollouts + 1)])
    forms: dict[str, tuple[int, dict[str, Any]]] = {
        "tree": (prompt + rollouts * own, {"tree": (cu, ints([-1] + [0] * rollouts))}),
        "unshared": (rollouts * (prompt + own), {"cu_seqlens_q": paths, "cu_seqlens_k": paths}),
    }

    def calls(total: int, lists: dict[str, Any]) -> tuple[Call, Call]:
        q, dout = (torch.randn(total, Q_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "qd")
        k, v = (torch.randn(total, KV_HEADS, HEAD_DIM, device="cuda", dtype=q.dtype) for _ in "kv")

        def forward() -> Any:
            return rk.attention(q, k, v, softmax_scale=SCALE, return_lse=True, **lists)

        return forward, lambda: rk.attention_backward(dout, q, k, v, *forward(), softmax_scale=SCALE, **lists)

    works: dict[str, Call] = {}
    for form, (total, lists) in forms.items():
        works[f"{form}, forward"], works[form] = calls(total, lists)
    times = in_turn_us(works, 1, rest=0.04)
    ratios = [times[f"unshared{which}"] / times[f"tree{which}"] for which in (", forward", "")]
    text = ", ".join(f"{name} {us:.1f} us" for name, us in times.items())
    return f"{rollouts} x ({prompt} + {own}): {text}; unshared / tree: forward {ratios[0]:.3f}, both {ratios[1]:.3f}"


def row_of(name: str, times: dict[str, float]) -> str:
    base = times.get("FlashAttention-3", times["ours"])
    return f"{name:>12}: " + ", ".join(f"{n} {us:.1f} us ({us / base:.3f})" for n, us in times.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fa3", type=Path)
    parser.add_argument("--softcap", type=float)
    parser.add_argument("--only", choices=("decode", "shared", "prefill", "chunks", "trees"))
    options = parser.parse_args()
    if options.fa3 is not None:
        torch.ops.load_library(str(options.fa3))
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    if options.only in (None, "decode"):
        for batch, keys in DECODE:
            print(decode(batch, keys, options.softcap, options.fa3 is not None), flush=True)
    if options.only in (None, "shared"):
        for case in SHARED:
            print(shared(*case, options.fa3 is not None), flush=True)
    if options.only in (None, "prefill"):
        for batch, tokens in PREFILL:
            print(prefill(batch, tokens, options.fa3 is not None), flush=True)
    if options.only in (None, "chunks"):
        for case in CHUNKS:
            print(chunks(*case, options.fa3 is not None), flush=True)
    if options.only in (None, "trees"):
        for rollouts, prompt, own in TREES:
            print(trees(rollouts, prompt, own), flush=True)


if __name__ == "__main__":
    main()
