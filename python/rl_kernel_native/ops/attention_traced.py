"""attention as torch operators for torch.compile, export, FakeTensor and torch.func, with its derivatives.

The forward is native and so is the first derivative. Forward-mode and second derivatives are composed from torch's own
operators in float64: they are built for correctness, and need memory for every pair of a query and a key.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import _check
from .._arithmetic import AS_CALLED, IEEE, PORTABLE, resolve_traced, resolve_traced_unit
from .._described import check
from .._in_graph import apply, callable_in_graph
from .._native import module as _C
from .._register import define, fake, implement
from .._torch import apply_function, device_type, gradient, memory, prepare
from .._transforms import batched, looped, pulled, pushed
from .attention_lists import NO_PAGES, PAGES, PLACES

MOST_HEAD_DIM = 256
_HOW = "bool causal, SymInt? window_size, float? softmax_scale, float? softcap, int exp, int unit"
_PLACED = ", ".join(f"Tensor? {name}" for name in PLACES)
_LISTED = ", ".join(f"Tensor? {name}" for name in PLACES + PAGES)
define(f"attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_LISTED}, {_HOW}) -> (Tensor, Tensor)")
# Unwanted results are empty tensors.
define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor? sinks, {_PLACED}, {_HOW}, bool wants_q, bool wants_kv, bool wants_sinks) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
_ops = torch.ops.rl_kernel_native


def _forward_kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *lists, mode, unit = rest
    kind = device_type(q, "q")
    mode = resolve_traced(mode, kind)
    unit = IEEE if q.dtype == torch.float32 else resolve_traced_unit(unit, kind)
    prepare(q)
    arrays, options = (memory(q), memory(k), memory(v), *lists[:-4]), tuple(lists[-4:])
    out, lse = _C.attention(arrays, options, mode, unit, True, None, 0)
    return out, lse


def _backward_kernel(
    dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> Any:
    *lists, mode, unit, wants_q, wants_kv, wants_sinks = rest
    kind = device_type(q, "q")
    if mode == AS_CALLED:
        mode = resolve_traced(mode, kind) if q.is_cuda else PORTABLE
    unit = IEEE if q.dtype == torch.float32 else resolve_traced_unit(unit, kind)
    prepare(q)
    dout, dlse, out, lse, *arrays = (memory(t) for t in (dout, dlse, out, lse, q, k, v))
    call = (*arrays, *lists[:-4], *NO_PAGES), tuple(lists[-4:]), mode, unit
    found = _C.attention_backward(dout, dlse, out, lse, *call, wants_q, wants_kv, wants_sinks, None, 0)
    *found, dsinks = found
    nothing = q.new_empty(0, dtype=torch.float32)
    return *(q.new_empty(0) if g is None else g for g in found), nothing if dsinks is None else dsinks


implement("attention", _forward_kernel, functools.partial(apply, "Attention"))
implement("attention_backward", _backward_kernel, functools.partial(apply, "AttentionBackward"))


# ---- options and shapes ---------------------------------------------------------------------------------------------


def checked(options: tuple[Any, ...]) -> tuple[Any, ...]:
    causal, window_size, softmax_scale, softcap = options
    return (
        causal,
        None if window_size is None else _check.integer("window_size", window_size),
        None if softmax_scale is None else _check.number("softmax_scale", softmax_scale),
        None if softcap is None else _check.number("softcap", softcap),
    )


def require_no_pages(block_table: Any, differentiable: bool) -> None:
    if differentiable and block_table is not None:
        raise ValueError("block_table: pages have no gradient; call under torch.no_grad(), or without block_table")


def out_shape(q: Any, v: Any) -> tuple[Any, ...]:
    """The shape of out: that of q, with the last dimension of v."""
    return (*q.shape[:-1], v.shape[-1])


def _lse_shape(q: Tensor) -> list[Any]:
    """The shape [..., heads, tokens] of lse for q [..., tokens, heads, head_dim]."""
    return [*q.shape[:-3], q.shape[-2], q.shape[-3]]


@fake("attention")
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    check(_forward_kernel, q, k, v, *rest)
    return q.new_empty(out_shape(q, v)), q.new_empty(_lse_shape(q), dtype=torch.float32)


@fake("attention_backward")
def _backward_fake(
    dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> Any:
    check(_backward_kernel, dout, dlse, q, k, v, out, lse, *rest)
    wants_q, wants_kv, wants_sinks = rest[-3:]
    dk, dv = (q.new_empty(t.shape if wants_kv else 0) for t in (k, v))
    dsinks = q.new_empty(q.shape[-2] if wants_sinks else 0, dtype=torch.float32)
    return q.new_empty(q.shape if wants_q else 0), dk, dv, dsinks


# ---- the same by torch's operators in float64 -----------------------------------------------------------------------


def _numbers(x: Tensor, cu: Any, used: Any, leftpad: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's sequence, each token's number in it, and each sequence's count of tokens in use.

    A token that is not in use has a negative number, or one that is at least the count. Tokens [batch, tokens, ...]
    give [batch, tokens], packed ones [1, tokens].
    """
    if cu is None:
        batch, length = x.shape[:2]
        sequence = torch.arange(batch, device=x.device)[:, None].expand(batch, length)
        number = torch.arange(length, device=x.device).expand(batch, length)
        count = torch.full((batch,), length, device=x.device)
    else:
        offsets, tokens = cu.long(), torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(offsets[1:].contiguous(), tokens, right=True)[None]
        number = tokens - offsets[sequence.clamp(max=max(len(offsets) - 2, 0))]
        count = offsets[1:] - offsets[:-1]
    if leftpad is not None:
        number, count = number - leftpad.long()[:, None], count - leftpad.long()
    if used is not None:
        count = used.long()
    return sequence, number, count


def _paths(parents: Tensor) -> Tensor:
    """Whether the segment of a row has the segment of a column on its path, which is itself and its ancestors."""
    segments = torch.arange(len(parents), device=parents.device)
    path = (segments == segments[:, None]) | (segments == parents[:, None])
    for _ in range(len(parents).bit_length()):  # paths of 1, 2, 4, ... steps
        path = (path.double() @ path.double()) > 0
    return path


def _paged(k: Tensor, table: Tensor, prefix_table: Any, prefix_lens: Any, group_offsets: Any) -> tuple[Tensor, Tensor]:
    """The page of each key of a sequence, and the key's place in the page."""
    size = k.shape[1]
    own = torch.arange(size * table.shape[1], device=k.device).expand(table.shape[0], -1)
    page = table.long().repeat_interleave(size, 1)
    place = own % size
    if prefix_table is not None and prefix_table.shape[0]:
        b, of = torch.arange(table.shape[0], device=k.device), group_offsets.long()
        group = torch.searchsorted(of[1:].contiguous(), b, right=True)
        lens = torch.where(group < len(prefix_lens), prefix_lens.long()[group.clamp(max=len(prefix_lens) - 1)], 0)
        j = torch.arange(size * (prefix_table.shape[1] + table.shape[1]), device=k.device)[None]
        shares, number = j < lens[:, None], j - lens[:, None]
        shared = prefix_table.long()[group.clamp(max=len(prefix_lens) - 1)].repeat_interleave(size, 1)
        shared, page = (torch.nn.functional.pad(t, (0, j.shape[1] - t.shape[1])) for t in (shared, page))
        own = number.clamp(0, max(own.shape[1] - 1, 0))
        page = torch.where(shares, shared, page.gather(1, own))
        place = torch.where(shares, j % size, own % size)
    return page.clamp(0, max(k.shape[0] - 1, 0)), place


def _scene(q: Tensor, k: Tensor, v: Tensor, lists: tuple[Any, ...], how: tuple[Any, ...]) -> Any:
    """q [b, i, kv_heads, group, d], k and v [b, j, kv_heads, d] in float64, which query sees which key [b, 1, 1, i, j],
    and the scale."""
    cu_q, cu_k, used_q, used_k, leftpad, parents, *pages = lists
    causal, window_size, softmax_scale = how[:3]
    if pages[0] is not None:
        page, place = _paged(k, *pages)
        k, v = (t[page, place] for t in (k, v))
    of_q, of_k = _numbers(q, cu_q, used_q, None), _numbers(k, cu_k, used_k, leftpad)
    if cu_q is not None or cu_k is not None:  # one batch of all tokens, each beside all others
        of_q, of_k = ((s.reshape(1, -1), n.reshape(1, -1), c) for s, n, c in (of_q, of_k))
        q, k, v = (t.reshape(1, -1, *t.shape[-2:]) for t in (q, k, v))
    (seq_q, i, queries), (seq_k, j, keys) = of_q, of_k
    b, of = seq_q.clamp(max=max(len(queries) - 1, 0)), seq_k.clamp(max=max(len(keys) - 1, 0))
    alike = seq_q[:, :, None] == seq_k[:, None, :]
    first: Any = 0
    if parents is not None and len(queries):
        path = _paths(parents)
        alike = path[b[:, :, None], of[:, None, :]]
        first = ((path.double() @ queries.double()).long() - queries)[b]
    sees = alike & ((i >= 0) & (i < queries[b]))[:, :, None]
    sees = sees & ((j >= 0) & (j < keys[of]))[:, None, :]
    if causal:
        j = j + first  # q and k have the same segments
        behind = (keys[b] - queries[b] + i + first)[:, :, None] - j[:, None, :]
        sees = sees & (behind >= 0)
        sees = sees if window_size is None else sees & (behind < window_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    # Elements that attention does not read may hold any value, so they become 0.
    x = _where(sees.any(2), q.double()).unflatten(2, (k.shape[2], q.shape[2] // k.shape[2]))
    seen = sees.any(1)
    return x, _where(seen, k.double()), _where(seen, v.double()), sees[:, None, None], scale


def _where(used: Tensor, x: Tensor) -> Tensor:
    return torch.where(used[:, :, None, None], x, torch.zeros_like(x))


def _probabilities(x: Tensor, y: Tensor, sinks: Any, sees: Tensor, scale: float, softcap: float | None) -> Any:
    """Probabilities [b, kv_heads, group, i, j], those of sinks [b, kv_heads, group, i, 1] or None, lse [b, kv_heads,
    group, i], and the softcap's slope."""
    s = torch.einsum("bihgd,bjhd->bhgij", x, y) * scale
    slope: Any = 1.0
    if softcap is not None:
        h = torch.tanh(s / softcap)
        s, slope = softcap * h, 1 - h * h
    any_key = sees.any(-1, keepdim=True)
    s = torch.where(sees, s, torch.where(any_key, float("-inf"), 0.0))
    lse = torch.logsumexp(s, -1, keepdim=True) if s.shape[-1] else s.sum(-1, keepdim=True)
    of_sinks = None
    if sinks is not None:
        u = sinks.double().view(1, *x.shape[2:4], 1, 1)
        lse = torch.where(any_key, torch.logaddexp(lse, u), lse)
        of_sinks = torch.where(any_key, torch.exp(u - lse), 0.0)
    p = torch.where(sees, torch.exp(s - lse), torch.zeros_like(s))
    return p, of_sinks, torch.where(any_key, lse, float("-inf")).squeeze(-1), slope


def _composed_forward(q: Tensor, k: Tensor, v: Tensor, sinks: Any, lists: tuple[Any, ...], how: tuple[Any, ...]) -> Any:
    x, y, z, sees, scale = _scene(q, k, v, lists, how)
    p, _, lse, _ = _probabilities(x, y, sinks, sees, scale, how[3])
    out = torch.einsum("bhgij,bjhd->bihgd", p, z).to(q.dtype)
    lse = lse.flatten(1, 2)
    if lists[0] is None and lists[1] is not None:  # [1, heads, batch * tokens]
        lse = lse[0].unflatten(1, (q.shape[0], q.shape[1])).transpose(0, 1)
    return out.reshape(out_shape(q, v)), lse.reshape(_lse_shape(q)).float()


def _composed_backward(
    dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, lists: tuple[Any, ...], how: tuple[Any, ...]
) -> tuple[Any, ...]:
    x, y, z, sees, scale = _scene(q, k, v, (*lists, *NO_PAGES), how)
    p, of_sinks, _, slope = _probabilities(x, y, sinks, sees, scale, how[3])
    g = _where(sees.any(-1)[:, 0, 0], dout.double().reshape(*x.shape[:2], q.shape[-2], v.shape[-1]))
    g = g.unflatten(2, x.shape[2:4])
    dp = torch.einsum("bihgd,bjhd->bhgij", g, z)
    delta = (p * dp).sum(-1, keepdim=True)
    if dlse is not None:
        wide = dlse.double()
        if lists[0] is None and lists[1] is not None:
            wide = wide.transpose(0, 1).flatten(1)[None]
        rows = wide.reshape(p.shape[:-1])[..., None]
        delta = delta - torch.where(sees.any(-1, keepdim=True), rows, torch.zeros_like(rows))
    ds = p * (dp - delta) * slope * scale
    dq = torch.einsum("bhgij,bjhd->bihgd", ds, y)
    dk = torch.einsum("bhgij,bihgd->bjhd", ds, x)
    dv = torch.einsum("bhgij,bihgd->bjhd", p, g)
    dsinks = None if of_sinks is None else -(of_sinks * delta).sum((0, 3, 4)).reshape(sinks.shape).float()
    dq, dk, dv = (g.reshape(t.shape).to(q.dtype) for g, t in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, dsinks


# ---- derivatives ----------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """``rest``: sinks, the ten lists, causal, window_size, softmax_scale, softcap, exp, unit."""
    return apply_function(_ops.attention, "Attention", q, k, v, *rest)


def backward(*arguments: Any) -> tuple[Any, ...]:
    """dq, dk, dv and dsinks, None for those that are not wanted."""
    found = apply_function(_ops.attention_backward, "AttentionBackward", *arguments)
    return tuple(g if wanted else None for g, wanted in zip(found, _wanted(arguments), strict=True))


def _wanted(arguments: tuple[Any, ...]) -> tuple[bool, ...]:
    """The wanted gradients among dq, dk, dv and dsinks."""
    wants_q, wants_kv, wants_sinks = arguments[-3:]
    return wants_q, wants_kv, wants_kv, wants_sinks


def incoming(dout: Any, dlse: Any, out: Tensor) -> tuple[Tensor, Any]:
    """The incoming gradients in the form that the operator takes."""
    dout = torch.zeros_like(out) if dout is None else gradient(dout, out.dtype, "dout", dims=4)
    return dout, None if dlse is None else gradient(dlse, torch.float32, "dlse").contiguous()


_TENSORS = 4 + len(PLACES + PAGES)  # q, k, v, sinks, lists


@callable_in_graph
class Attention(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.attention(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.options = tuple(inputs[_TENSORS:])
        ctx.save_for_backward(*inputs[:_TENSORS], *output)
        ctx.save_for_forward(*inputs[:_TENSORS])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        if dout is None and dlse is None:
            return (None,) * (_TENSORS + len(ctx.options))
        q, k, v, *given, table, _, _, _, out, lse = ctx.saved_tensors  # given: sinks and lists
        needs = ctx.needs_input_grad[:4]
        require_no_pages(table, True)  # for calls of the registered operator; attention itself has already checked
        dout, dlse = incoming(dout, dlse, out)
        wants = needs[0], needs[1] or needs[2], needs[3]
        found = backward(dout, dlse, q, k, v, out, lse, *given, *ctx.options, *wants)
        return *(g if n else None for g, n in zip(found, needs, strict=True)), *(None,) * (
            _TENSORS - 4 + len(ctx.options)
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        # Packed, or pages; sinks of each call.
        if any(inputs[i] is not None for i in (4, 5, 10)) or in_dims[3] is not None or info.batch_size == 0:
            return looped(Attention.apply, info, in_dims, inputs), (0, 0)
        tensors, unfold = _folded(info, _but(3, in_dims[:_TENSORS]), _but(3, inputs[:_TENSORS]))
        outputs = Attention.apply(*tensors[:3], inputs[3], *tensors[3:], *inputs[_TENSORS:])
        return tuple(map(unfold, outputs)), (0, 0)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        q, k, v, sinks, *lists = ctx.saved_tensors

        def composed(q: Tensor, k: Tensor, v: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = _composed_forward(q, k, v, sinks, tuple(lists), ctx.options)
            return found

        return pushed(composed, (q, k, v, sinks), tangents[:4])


def _but(place: int, values: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*values[:place], *values[place + 1 :])


def _folded(info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """Folds vmap's dimension into the batch of sequences, and returns a function that unfolds an output."""
    tensors = [None if x is None else x.flatten(0, 1) for x in batched(info, in_dims, inputs)]

    def unfold(x: Tensor) -> Tensor:
        return x.unflatten(0, (info.batch_size, x.shape[0] // info.batch_size))

    return tensors, unfold


@callable_in_graph
class AttentionBackward(torch.autograd.Function):
    """The native backward, itself differentiable through a composition of torch's operators (create_graph)."""

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return _ops.attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        dout, dlse, q, k, v, _out, _lse, *given = inputs[:14]  # given: sinks and lists
        ctx.how = tuple(inputs[14:18])
        ctx.wanted = _wanted(inputs)
        ctx.save_for_backward(dout, dlse, q, k, v, *given)
        ctx.save_for_forward(dout, dlse, q, k, v, *given)
        ctx.mark_non_differentiable(*(o for o, w in zip(output, ctx.wanted, strict=True) if not w))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        cotangents = tuple(g for g, w in zip(gradients, ctx.wanted, strict=True) if w)
        *found, dsinks = pulled(_composed_call(ctx), ctx.saved_tensors[:6], cotangents)
        return *found, None, None, dsinks, *(None,) * 15

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        dims = tuple(0 if wanted else None for wanted in _wanted(inputs))
        # Packed sequences; sinks, whose gradient belongs to each call.
        if any(inputs[i] is not None for i in (7, 8, 9)) or info.batch_size == 0:
            found = looped(AttentionBackward.apply, info, in_dims, inputs)
            return found, (0, 0, 0, 0)
        tensors, unfold = _folded(info, _but(7, in_dims[:14]), _but(7, inputs[:14]))
        outputs = AttentionBackward.apply(*tensors[:7], None, *tensors[7:], *inputs[14:])
        return tuple(o if d is None else unfold(o) for o, d in zip(outputs, dims, strict=True)), dims

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        found = iter(pushed(_composed_call(ctx), ctx.saved_tensors[:6], (*tangents[:5], tangents[7])))
        return tuple(next(found) if w else None for w in ctx.wanted)


def _composed_call(ctx: Any) -> Any:
    """The wanted results of the composed backward, as a function of dout, dlse, q, k, v and sinks."""
    lists, how, wanted = tuple(ctx.saved_tensors[6:]), ctx.how, ctx.wanted

    def composed(dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any) -> tuple[Tensor, ...]:
        found = _composed_backward(dout, dlse, q, k, v, sinks, lists, how)
        return tuple(g for g, w in zip(found, wanted, strict=True) if w)

    return composed
