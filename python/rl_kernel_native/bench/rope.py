"""Bench of the rotary position embedding: the compared implementations (peers) and the timed passes."""

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

MOST_BUFFERS = 512
CHECKED_TOKENS = 8  # compared with float64
PASSES = ("forward", "forward + backward")
READS_AND_WRITES = dict(zip(PASSES, (2, 4), strict=True))  # least number of passes over all heads
POSITIONS = 8192


class Operands(NamedTuple):
    """The arguments of one call (a buffer). Calls rotate over many buffers, which together exceed the caches."""

    q: Tensor  # [tokens, num_q_heads, head_dim]
    k: Tensor  # [tokens, num_kv_heads, head_dim]
    dq_out: Tensor
    dk_out: Tensor


class Angles(NamedTuple):
    """Angles of positions 0, 1, ...: tables with one angle per pair, and wide rows that hold each angle twice. Models
    pass wide rows."""

    cos: Tensor  # [POSITIONS, head_dim / 2], float32
    sin: Tensor
    position_ids: Tensor  # [tokens]
    wide_cos: Tensor  # [tokens, head_dim], the dtype of q
    wide_sin: Tensor


Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Peer(NamedTuple):
    """An implementation; ``rotate(q, k)`` returns the rotated q and k."""

    name: str
    rotate: Rotate
    has_backward: bool = True


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _written_out(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotation as models write it."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def peers(device: torch.device, a: Angles, use_compile: bool) -> tuple[list[Peer], list[str]]:
    """Returns the peers that can run here, this library first, and the reasons why other peers cannot run."""
    found = [
        Peer("rk", lambda q, k: rk.rope(q, k, a.cos, a.sin, position_ids=a.position_ids)),
        Peer("rk, input", lambda q, k: rk.rope(q, k, a.wide_cos, a.wide_sin, intermediate="input")),
        Peer("torch written out", lambda q, k: _written_out(q, k, a.wide_cos, a.wide_sin)),
    ]
    if use_compile:
        compiled: Any = torch.compile(_written_out, dynamic=False)
        found.append(Peer("torch.compile", lambda q, k: compiled(q, k, a.wide_cos, a.wide_sin)))
    makers = {"liger_kernel": _liger, "vllm": _vllm, "flashinfer": _flashinfer}
    others, absent = cuda_peers(device, {name: partial(make, a) for name, make in makers.items()})
    return found + others, absent


def _liger(a: Angles) -> Peer:
    function = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    cos, sin = a.wide_cos[None], a.wide_sin[None]

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        # Liger takes [batch, heads, seq, head_dim] and overwrites its inputs, so it gets copies.
        q_out, k_out = function.apply(q.clone()[None].transpose(1, 2), k.clone()[None].transpose(1, 2), cos, sin)
        return q_out.transpose(1, 2)[0], k_out.transpose(1, 2)[0]

    return Peer("Liger and a copy", rotate)


def _vllm(a: Angles) -> Peer:
    """vLLM's own kernel. The kernel rotates in place, so it gets copies. The kernel's cache of cos and sin has the
    dtype of q."""
    importlib.import_module("vllm._custom_ops")
    cache = torch.cat((a.cos, a.sin), -1).to(a.wide_cos.dtype)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = q.clone(), k.clone()
        torch.ops._C.rotary_embedding(a.position_ids, q.flatten(1), k.flatten(1), q.shape[-1], cache, True)
        return q, k

    return Peer("vLLM and a copy", rotate, has_backward=False)


def _flashinfer(a: Angles) -> Peer:
    apply = importlib.import_module("flashinfer.rope").apply_rope_with_cos_sin_cache
    cache = torch.cat((a.cos, a.sin), -1)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q_out, k_out = apply(a.position_ids, q.flatten(1), k.flatten(1), q.shape[-1], cache, is_neox=True)
        return q_out.view(q.shape), k_out.view(k.shape)

    return Peer("FlashInfer", rotate, has_backward=False)


def angles(tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Angles:
    frequencies = 1e6 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    table = torch.arange(POSITIONS)[:, None] * frequencies
    cos, sin = table.cos().float().to(device), table.sin().float().to(device)
    ids = (torch.arange(tokens) % POSITIONS).to(device)
    wide_cos, wide_sin = (torch.cat((t[ids], t[ids]), -1).to(dtype) for t in (cos, sin))
    return Angles(cos, sin, ids, wide_cos, wide_sin)


def _buffers(
    tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device
) -> list[Operands]:
    size = 2 * tokens * sum(heads) * head_dim * dtype.itemsize
    count = count_of_buffers(size, device, MOST_BUFFERS)
    generator = torch.Generator(device).manual_seed(0)

    def normal(num_heads: int) -> Tensor:
        return torch.empty((tokens, num_heads, head_dim), dtype=dtype, device=device).normal_(0, 1, generator=generator)

    return [Operands(*(normal(heads[i % 2]) for i in range(4))) for _ in range(count)]


def _call(peer: Peer, which: str, buffers: list[Operands]) -> Call:
    """Returns the function that is timed for a peer in a pass. The function's argument is the number of the call, which
    selects the buffer."""
    n = len(buffers)
    if "backward" not in which:
        return lambda i: peer.rotate(buffers[i % n].q, buffers[i % n].k)
    leaves = [o._replace(q=o.q.detach().requires_grad_(), k=o.k.detach().requires_grad_()) for o in buffers]

    def forward_backward(i: int) -> Any:
        o = leaves[i % n]
        return torch.autograd.grad(peer.rotate(o.q, o.k), (o.q, o.k), (o.dq_out, o.dk_out))

    return forward_backward


def _error(call: Call, which: str, o: Operands, a: Angles) -> float | None:
    """Returns the worst error against float64 in the queries of the first tokens of a forward, relative to the largest
    magnitude."""
    if "backward" in which:
        return None
    result: Any = call(0)
    got = result[0][:CHECKED_TOKENS].double()
    cos, sin = (torch.cat((t, t), -1)[a.position_ids[:CHECKED_TOKENS]].double()[:, None] for t in (a.cos, a.sin))
    x = o.q[:CHECKED_TOKENS].double()
    expected = x * cos + rotate_half(x) * sin
    return float((got - expected).abs().max() / expected.abs().max())


def run(
    tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype_name: str,
    device_name: str,
    *,
    seconds: float = 2.0,
    use_compile: bool = True,
) -> dict[str, Any]:
    """Times every peer on ``[tokens, heads, head_dim]``, and returns the results for
    :mod:`rl_kernel_native.bench.report`."""
    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    comparison = Comparison(device, seconds)
    buffers = _buffers(tokens, heads, head_dim, dtype, device)
    a = angles(tokens, head_dim, dtype, device)
    candidates, absent = peers(device, a, use_compile)
    comparison.absent += absent
    for which in PASSES:
        able = [peer for peer in candidates if peer.has_backward or "backward" not in which]
        calls = [(peer.name, _call(peer, which, buffers)) for peer in able]
        comparison.add(
            which,
            [Candidate(name, call, partial(_error, call, which, buffers[0], a)) for name, call in calls],
            READS_AND_WRITES[which] * tokens * sum(heads) * head_dim * dtype.itemsize,
        )
    return comparison.report(
        "rope", f"[{tokens}, {heads[0]} + {heads[1]}, {head_dim}]", dtype_name, len(buffers),
        rows=tokens, heads=list(heads), head_dim=head_dim,
    )  # fmt: skip


def measured(o: Options) -> dict[str, Any]:
    """Runs the bench with the options of the command line."""
    heads = (o.sizes["q_heads"], o.sizes["kv_heads"])
    shape = (o.rows, heads, o.sizes["head_dim"])
    return run(*shape, o.dtype, o.device, seconds=o.seconds, use_compile=o.use_compile)
