"""Both passes of rk.attention beside torch's SDPA: training shapes, other head sizes, values narrower than keys,
partials, and an engine's steps on pages. The script prints the tables of cuda/attention/README.md.

    python bench/attention_passes.py [--only training|widths|values|partials|steps]

Each call follows a rest; the compared calls alternate; numbers are medians. R is torch's bf16 product of 8192 x 8192 x
8192 in the same run. cuDNN and FlashAttention-2 are the kernels that torch's SDPA brings. A pass that SDPA refuses has
no number.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import rl_kernel_native as rk
from attention_peers import KV_HEADS, PAGE, Q_HEADS, Call, in_turn_us
from attention_splits import graph_of

REST = 0.04
RAGGED = [64, 4096, 130, 2900, 1800, 4018, 3700, 229, 3100, 2400, 3600, 3330, 3401]
TRAINING = [[4096] * 4, [16384], [1024] * 32, RAGGED]
WIDTHS = [(64, [4096] * 4), (64, [16384]), (96, [4096] * 4), (256, [4096] * 4)]  # columns of a head, lengths
VALUES = [(192, 128, [4096] * 4)]  # columns of q and k, columns of v, tokens of sequences
PARTIALS = [(1, 16384), (4, 4096), (64, 4096)]  # sequences, keys; one query each, and 128
# An engine's steps: sequences, queries of each, keys of each. Mixed batches, prefill behind a cache, drafts.
STEPS = [
    [(2, 2048, 4096), (62, 1, 4096)],
    [(1, 512, 8192), (31, 1, 8192)],
    [(4, 1024, 2048), (252, 1, 2048)],
    [(1, 2048, 2048), (128, 1, 2048)],
    [(1, 256, 4096), (63, 1, 4096)],
    [(4, 4096, 4096)],
    [(8, 1024, 8192)],
    [(32, 512, 512)],
    [(64, 128, 2048)],
    [(64, 4, 4096)],
    [(64, 8, 4096)],
    [(256, 4, 1024)],
]
PEERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}


def pairs(lengths: list[int]) -> int:
    """The number of pairs of a query and a key, half of the square as libraries count them."""
    return sum(n * n for n in lengths) // 2


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def product() -> Call:
    a = normal(8192, 8192)
    return lambda: a @ a


def ours(lengths: list[int], columns: int, values: int) -> dict[str, Call]:
    total = sum(lengths)
    q, k = normal(total, Q_HEADS, columns), normal(total, KV_HEADS, columns)
    v, dout = normal(total, KV_HEADS, values), normal(total, Q_HEADS, values)
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    lists = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    out, lse = rk.attention(q, k, v, return_lse=True, **lists)
    return {
        "ours forward": lambda: rk.attention(q, k, v, return_lse=True, **lists),
        "ours backward": lambda: rk.attention_backward(dout, q, k, v, out, lse, **lists),
    }


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def peers(lengths: list[int], columns: int, values: int) -> dict[str, Call]:
    """Calls of each library that serves the shape. SDPA takes sequences of one length."""
    if len(set(lengths)) > 1:
        return {}
    batch, tokens = len(lengths), lengths[0]
    works: dict[str, Call] = {}

    def add(name: str, backend: SDPBackend) -> None:
        heads = ((Q_HEADS, columns), (KV_HEADS, columns), (KV_HEADS, values))
        q, k, v = (normal(batch, tokens, h, d).transpose(1, 2).requires_grad_() for h, d in heads)
        dout = normal(batch, tokens, Q_HEADS, values).transpose(1, 2)

        def forward() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def plain() -> None:
            with torch.no_grad():
                forward()

        def backward(out: torch.Tensor, on: bool) -> Any:
            with deterministic(on):
                return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        plain()
        works[f"{name} forward"] = plain
        out = forward()
        for on in (False, True):
            try:
                backward(out, on)
            except RuntimeError as error:
                print(f"{name} backward, deterministic {on}: {str(error).splitlines()[0][:90]}")
                continue
            works[f"{name} backward{', deterministic' if on else ''}"] = lambda on=on: backward(out, on)

    for name, backend in PEERS.items():
        try:
            add(name, backend)
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0][:90]}")
    return works


def passes(name: str, lengths: list[int], columns: int, values: int, more: dict[str, Call] | None = None) -> None:
    """Prints each call's time, and its rate over R. A backward has 2.5 times the products of a forward."""
    torch.manual_seed(1)
    works = {"R": product(), **(more if more is not None else ours(lengths, columns, values))}
    times = in_turn_us({**works, **peers(lengths, columns, values)}, 1, rest=REST)
    rate = 2 * 8192**3 / times.pop("R")
    of_forward = 2 * pairs(lengths) * Q_HEADS * (columns + values)
    of_backward = 2 * pairs(lengths) * Q_HEADS * (3 * columns + 2 * values)
    print(f"{name} (R {rate / 1e6:.0f} TFLOP/s):")
    for work, us in times.items():
        flops = of_backward if "backward" in work else of_forward
        print(f"  {work:<34} {us:9.1f} us  {flops / us / 1e6:6.1f} TFLOP/s  {flops / us / rate:.3f} R")
    if more is None:
        both = times["ours forward"] + times["ours backward"]
        print(
            f"  {'ours, both passes':<34} {both:9.1f} us  {(of_forward + of_backward) / both / rate:23.3f} R",
            flush=True,
        )


def partials(batch: int, keys: int, queries: int) -> None:
    """Partials of all splits and their merge, beside the call that computes the same outputs at once."""
    torch.manual_seed(1)
    q = normal(batch, queries, Q_HEADS, 128)
    k, v = normal(batch, keys, KV_HEADS, 128), normal(batch, keys, KV_HEADS, 128)
    found = rk.attention(q, k, v, return_partials=True)
    same = torch.equal(rk.attention_merge(found, out_dtype=q.dtype), rk.attention(q, k, v))
    times = in_turn_us(
        {
            "whole": lambda: rk.attention(q, k, v),
            "partials": lambda: rk.attention(q, k, v, return_partials=True),
            "merge": lambda: rk.attention_merge(found, out_dtype=q.dtype),
        },
        1,
        rest=REST,
    )
    text = ", ".join(f"{name} {us:.1f} us" for name, us in times.items())
    ratio = (times["partials"] + times["merge"]) / times["whole"]
    print(f"{batch} x ({queries} of {keys}): {text}; both over whole {ratio:.2f}; same bytes: {same}", flush=True)


def step(parts: list[tuple[int, int, int]]) -> Call:
    """A call of sequences whose keys lie in pages in random order. Sequences with the fewest queries come first."""
    torch.manual_seed(1)
    lengths = [(queries, keys) for n, queries, keys in sorted(parts, key=lambda part: part[1]) for _ in range(n)]
    pages = [keys // PAGE for _, keys in lengths]
    k, v = (normal(sum(pages), PAGE, KV_HEADS, 128) for _ in "kv")
    table = torch.zeros(len(lengths), max(pages), device="cuda", dtype=torch.int32)
    for b, of_sequence in enumerate(torch.randperm(sum(pages), device="cuda").int().split(pages)):
        table[b, : pages[b]] = of_sequence
    offsets = torch.tensor([0, *(n for n, _ in lengths)], device="cuda").cumsum(0).int()
    used = torch.tensor([n for _, n in lengths], device="cuda", dtype=torch.int32)
    q = normal(int(offsets[-1]), Q_HEADS, 128)
    return lambda: rk.attention(q, k, v, cu_seqlens_q=offsets, seqused_k=used, block_table=table)


def steps(parts: list[tuple[int, int, int]]) -> None:
    """An engine's step in one call, and each kind of its sequences in a separate call. CUDA graphs of four calls."""
    names = [f"{n} x {queries} of {keys}" for n, queries, keys in parts]
    works = {" + ".join(names): step(parts)}
    if len(parts) > 1:
        works |= {name: step([part]) for name, part in zip(names, parts, strict=True)}
    replays = {name: graph_of([work] * 4).replay for name, work in works.items()}
    times = in_turn_us(replays, 4, rest=REST)
    print(", ".join(f"{name}: {us:.1f} us" for name, us in times.items()), flush=True)
    torch.cuda.empty_cache()


def name_of(lengths: list[int]) -> str:
    same = len(set(lengths)) == 1
    return f"{len(lengths)} x {lengths[0]}" if same else f"{sum(lengths)} tokens in {len(lengths)} sequences"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("training", "widths", "values", "partials", "steps"))
    only = parser.parse_args().only
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    if only in (None, "training"):
        for lengths in TRAINING:
            passes(name_of(lengths), lengths, 128, 128)
    if only in (None, "widths"):
        for columns, lengths in WIDTHS:
            passes(f"{name_of(lengths)}, {columns} columns", lengths, columns, columns)
    if only in (None, "values"):
        for columns, values, lengths in VALUES:
            passes(f"{name_of(lengths)}, {columns} columns and values of {values}", lengths, columns, values)
    if only in (None, "partials"):
        for batch, keys in PARTIALS:
            for queries in (1, 128):
                partials(batch, keys, queries)
    if only in (None, "steps"):
        for parts in STEPS:
            steps(parts)


if __name__ == "__main__":
    main()
