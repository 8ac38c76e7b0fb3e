"""Bench of attention: the compared implementations (peers) and the timed passes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rl_kernel_native as rk

from .comparison import Candidate, Comparison, Options, count_of_buffers, cuda_peers
from .measure import Call

MOST_BUFFERS = 64
CHECKED_TOKENS = 8  # compared with float64
PASSES = ("forward", "forward + backward")
PRODUCTS = dict(zip(PASSES, (2, 7), strict=True))  # products of [tokens, tokens, head_dim], half of them masked


class Operands(NamedTuple):
    """The arguments of one call (a buffer): one causal sequence. Calls rotate over many buffers."""

    q: Tensor  # [1, tokens, num_q_heads, head_dim]
    k: Tensor  # [1, tokens, num_kv_heads, head_dim]
    v: Tensor
    dout: Tensor


class Peer(NamedTuple):
    """An implementation; ``attend(q, k, v)`` returns the output of attention."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    differentiable: bool = True


def _partials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes all splits (ranges of the keys) and merges them on one rank. In a real run, several ranks share this
    work."""
    return rk.attention_merge(rk.attention(q, k, v, return_partials=True), out_dtype=q.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def peers(device: torch.device) -> tuple[list[Peer], list[str]]:
    """Returns the peers that can run here, this library first, and the reasons why other peers cannot run."""
    found = [Peer("rk", rk.attention), Peer("torch SDPA", _sdpa), Peer("rk, partials merged", _partials, False)]
    if device.type == "cuda":
        found.insert(1, Peer("rk, portable", lambda q, k, v: rk.attention(q, k, v, exp="portable")))
    others, absent = cuda_peers(device, {"flash_attn": _flash_attention})
    return found + others, absent


def of_pass(candidates: list[Peer], which: str) -> list[Peer]:
    """Returns the peers that implement the pass."""
    return [peer for peer in candidates if peer.differentiable or which == "forward"]


def _flash_attention() -> Peer:
    function = importlib.import_module("flash_attn").flash_attn_func
    return Peer("FlashAttention", lambda q, k, v: function(q, k, v, causal=True))


def _buffers(
    tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device
) -> list[Operands]:
    size = 2 * tokens * sum(heads) * head_dim * dtype.itemsize
    count = count_of_buffers(size, device, MOST_BUFFERS)
    generator = torch.Generator(device).manual_seed(0)

    def normal(num_heads: int) -> Tensor:
        shape = (1, tokens, num_heads, head_dim)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 1, generator=generator)

    return [Operands(*(normal(heads[i]) for i in (0, 1, 1, 0))) for _ in range(count)]


def _call(peer: Peer, which: str, buffers: list[Operands]) -> Call:
    """Returns the function that is timed for a peer in a pass. The function's argument is the number of the call, which
    selects the buffer."""
    n = len(buffers)
    if "backward" not in which:
        return lambda i: peer.attend(*buffers[i % n][:3])
    leaves = [o._replace(**{n: getattr(o, n).detach().requires_grad_() for n in "qkv"}) for o in buffers]

    def forward_backward(i: int) -> Any:
        o = leaves[i % n]
        return torch.autograd.grad(peer.attend(*o[:3]), o[:3], o.dout)

    return forward_backward


def _error(call: Call, which: str, o: Operands) -> float | None:
    """Returns the worst error against float64 in the last tokens of a forward, relative to the largest magnitude."""
    if "backward" in which:
        return None
    result: Any = call(0)
    got = result[0, -CHECKED_TOKENS:].double()
    expected = rk.attention_reference(*(t.float().cpu().numpy() for t in (o.q[:, -CHECKED_TOKENS:], o.k, o.v)))
    want = torch.from_numpy(expected["out"][0]).to(got.device)
    return float((got - want).abs().max() / want.abs().max())


def run(
    tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype_name: str,
    device_name: str,
    *,
    seconds: float = 2.0,
) -> dict[str, Any]:
    """Times every peer on one causal sequence, and returns the results for :mod:`rl_kernel_native.bench.report`."""
    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    comparison = Comparison(device, seconds)
    buffers = _buffers(tokens, heads, head_dim, dtype, device)
    candidates, absent = peers(device)
    comparison.absent += absent
    for which in PASSES:
        calls = [(peer.name, _call(peer, which, buffers)) for peer in of_pass(candidates, which)]
        comparison.add(
            which,
            [Candidate(name, call, partial(_error, call, which, buffers[0])) for name, call in calls],
            (2 if which == "forward" else 4) * tokens * sum(heads) * head_dim * dtype.itemsize,
            PRODUCTS[which] * tokens * tokens * heads[0] * head_dim,  # 2 operations per query-key pair; half are masked
        )
    return comparison.report(
        "attention", f"[{tokens}, {heads[0]} + {heads[1]}, {head_dim}]", dtype_name, len(buffers),
        rows=tokens, heads=list(heads), head_dim=head_dim,
    )  # fmt: skip


def measured(o: Options) -> dict[str, Any]:
    """Runs the bench with the options of the command line."""
    heads = (o.sizes["q_heads"], o.sizes["kv_heads"])
    return run(o.rows, heads, o.sizes["head_dim"], o.dtype, o.device, seconds=o.seconds)
