"""Bench of three sampling operators. ``random_bits`` is compared with torch's generator, ``sample`` with a sort and
with FlashInfer, and ``linear_sample`` with the matrix product alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import rl_kernel_native as rk

from .comparison import Candidate, Comparison, Options, count_of_buffers, cuda_peers

WORDS = 4  # random words per row


VOCAB = 128256
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "top-p 0.95": {"top_p": 0.95},
}


def _sorted(x: Tensor, top_k: int = 0, top_p: float = 1.0, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Samples as an engine does without a kernel: by a sort, two masks, a draw, and the log-probability."""
    z = x.float() / temperature
    if top_k or top_p < 1:
        y, order = z.sort(dim=-1)
        if top_k:
            y = y.masked_fill(y < y[:, -top_k, None], -torch.inf)
        below = y.softmax(-1).cumsum(-1) <= 1 - top_p
        below[:, -1] = False
        z = torch.empty_like(z).scatter_(-1, order, y.masked_fill(below, -torch.inf))
    logprobs = z.log_softmax(-1)
    ids = torch.multinomial(logprobs.exp(), 1)
    return ids, logprobs.gather(-1, ids)


def _flashinfer(given: dict[str, Any]) -> tuple[str, Callable[[Tensor], Any]]:
    """FlashInfer's sampler, which returns no log-probability."""
    sampling = importlib.import_module("flashinfer.sampling")
    k, p, t = given.get("top_k", 0), given.get("top_p", 1.0), given.get("temperature", 1.0)
    if k:
        return "flashinfer", lambda x: sampling.top_k_top_p_sampling_from_logits(x.float() / t, k, p)
    if p < 1:
        return "flashinfer", lambda x: sampling.top_p_sampling_from_probs((x.float() / t).softmax(-1), p)
    return "flashinfer", lambda x: sampling.sampling_from_logits(x.float() / t)


def _sample(rows: int, dtype: torch.dtype, comparison: Comparison) -> dict[str, Any]:
    device = comparison.device
    size = rows * VOCAB * dtype.itemsize
    count = count_of_buffers(size, device, 8)
    keys: dict[str, Any] = {"seed": 7, "sample_id": torch.arange(rows, device=device), "position": 0}
    for scale in (1.0, 4.0, 10.0):
        buffers = [(torch.randn(rows, VOCAB, device=device) * scale).to(dtype) for _ in range(count)]
        for name, given in CASES.items():
            kept: dict[str, Any] = (
                {} if "temperature" in given else {"return_kept": True, "kept_capacity": rows * VOCAB}
            )
            found, comparison.absent = cuda_peers(device, {"flashinfer": partial(_flashinfer, given)})
            peers: list[tuple[str, Any]] = [
                ("rk", partial(rk.sample, **(given | keys | kept))),
                ("torch sort", partial(_sorted, **given)),
                *found,
            ]
            if "top_k" in given or "top_p" not in given:
                peers.append(("rk, 8 shards on one device", partial(_shards, given | keys)))
            candidates = [Candidate(peer, partial(_call, function, buffers)) for peer, function in peers]
            comparison.add(f"{name}, {scale:g} randn", candidates, float(size))
    return comparison.report("sample", f"[{rows}, {VOCAB}]", str(dtype).removeprefix("torch."), count, rows=rows)


def _shards(how: dict[str, Any], logits: Tensor) -> Any:
    """Does the work of eight ranks that share a vocabulary, one rank after another on one device."""
    starts = range(0, VOCAB, VOCAB // 8)
    parts = [rk.sample_partial(logits[:, i : i + VOCAB // 8], vocab_start=i, vocab_size=VOCAB, **how) for i in starts]
    return rk.sample_merge(torch.stack(parts), vocab_size=VOCAB, **how)


def _composed(hidden: Tensor, weight: Tensor, how: dict[str, Any]) -> Any:
    return rk.sample(rk.linear(hidden, weight), **how)


def _once(call: Callable[[], Any], _: int) -> Any:
    return call()


def _linear_sample(rows: int, ins: int, dtype: torch.dtype, comparison: Comparison) -> dict[str, Any]:
    device = comparison.device
    hidden = torch.randn(rows, ins, device=device).to(dtype)
    weight = (torch.randn(VOCAB, ins, device=device) * ins**-0.5).to(dtype)
    keys: dict[str, Any] = {"seed": 7, "sample_id": torch.arange(rows, device=device), "position": 0}
    moved = float((VOCAB + rows) * ins * dtype.itemsize)
    cases: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 0.8}, "top-k 50": {"top_k": 50}, "greedy": {"greedy": True},
    }  # fmt: skip
    for name, given in cases.items():
        how = given | keys
        peers: list[tuple[str, Any]] = [
            ("rk", partial(rk.linear_sample, hidden, weight, **how)),
            ("rk.sample of rk.linear", partial(_composed, hidden, weight, how)),
            ("rk.linear alone", partial(rk.linear, hidden, weight)),
            ("torch.nn.functional.linear alone", partial(torch.nn.functional.linear, hidden, weight)),
        ]
        candidates = [Candidate(peer, partial(_once, call)) for peer, call in peers]
        comparison.add(name, candidates, moved, operations=2.0 * rows * ins * VOCAB)
    shape = f"[{rows}, {ins}] x [{VOCAB}, {ins}]"
    return comparison.report("linear_sample", shape, str(dtype).removeprefix("torch."), 1, rows=rows)


def _call(function: Callable[[Tensor], Any], buffers: list[Tensor], call: int) -> Any:
    return function(buffers[call % len(buffers)])


def run(
    operator: str, rows: int, device_name: str, *, dtype_name: str = "float32", seconds: float = 2.0,
    in_features: int = 4096,
) -> dict[str, Any]:  # fmt: skip
    """Times every peer, and returns the results for :mod:`rl_kernel_native.bench.report`."""
    device = torch.device(device_name)
    comparison = Comparison(device, seconds)
    if operator == "sample":
        return _sample(rows, getattr(torch, dtype_name), comparison)
    if operator == "linear_sample":
        return _linear_sample(rows, in_features, getattr(torch, dtype_name), comparison)
    ids = torch.arange(rows, device=device)
    generator = torch.Generator(device).manual_seed(7)

    def ours(call: int) -> Any:
        return rk.random_bits(7, ids, call % 1024, WORDS)

    def theirs(_call: int) -> Any:
        return torch.randint(1 << 32, (rows, WORDS), generator=generator, device=device)

    candidates = [Candidate("rk", ours), Candidate("torch.randint", theirs)]
    comparison.add("words", candidates, 8.0 * (WORDS + 1) * rows)
    return comparison.report(operator, f"[{rows}, {WORDS}]", "int64", 1, rows=rows)


def measured(o: Options) -> dict[str, Any]:
    """Runs the bench with the options of the command line."""
    width = o.sizes.get("in_features", 0)
    return run(o.operator, o.rows, o.device, dtype_name=o.dtype, seconds=o.seconds, in_features=width)
