"""Attention over padded, packed and paged sequences: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/attention.h."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

from .. import _call, _check, _dispatch
from .._native import functions
from .._types import AnyArray, ArrayT, Exp, Generic, NamedTuple
from ..contract import (
    BY_EXPONENTIAL,
    BY_PRODUCT,
    COMPOSED,
    LEAST,
    NO_SHARDS,
    TOKEN_SUM,
    Bound,
    Row,
    U,
    add_rows,
    derivatives,
)
from ..reference.attention import attention_reference
from . import attention_traced
from .attention_lists import BESIDE_TREE, PAGES
from .attention_partials import AttentionPartials, partials, unit_of

__all__ = ["AttentionResult", "attention", "attention_backward", "attention_reference"]

_C = functions(
    attention="object*3, int, bool, object*2, int",
    attention_backward="object*7, int, bool*3, object, int",
    attention_eager="object*3, int, bool, object",
)


class AttentionResult(NamedTuple, Generic[ArrayT]):
    """The result of ``attention(..., return_lse=True)``.

    Attributes:
        out: the shape of ``q`` with the last dimension of ``v``, the dtype of ``q``, contiguous.
        lse: float32, ``[batch, heads, tokens]``, or ``[heads, tokens]`` for packed queries. ``lse`` is the natural
            logarithm of a sum: ``exp(softmax_scale * score)`` over the keys that the query sees, plus ``exp(sink)`` if
            the head has a sink. ``lse`` is -Inf if the query sees no key.
    """

    out: ArrayT
    lse: ArrayT


_NO_PREFIX = (None, None, None)


def _narrow(offsets: Any) -> Any:
    """Turns torch's int64 offsets into int32, the type that kernels read. An offset that does not fit int32 becomes -1
    or 2^31 - 1, which kernels treat as out of range."""
    if offsets is None or not _dispatch.is_tensor(offsets) or str(offsets.dtype) != "torch.int64":
        return offsets
    return offsets.clamp(-1, (1 << 31) - 1).int()


def _prefix(shared_prefix: Any) -> tuple[Any, ...]:
    """Checks ``shared_prefix``, and returns the prefix table, the prefix lengths and the offsets of the groups."""
    if shared_prefix is None:
        return _NO_PREFIX
    wanted = "None or (prefix_table, prefix_lens, group_offsets)"
    if not isinstance(shared_prefix, (tuple, list)):
        raise TypeError(f"shared_prefix: expected {wanted}, got {type(shared_prefix).__name__}")
    if len(shared_prefix) != 3:
        raise ValueError(f"shared_prefix: expected {wanted}, got {len(shared_prefix)} arrays")
    for name, given in zip(PAGES[1:], shared_prefix, strict=True):
        if given is None:
            raise TypeError(f"{name}: expected an array in shared_prefix, got None")
    table, lens, offsets = shared_prefix
    return table, lens, _narrow(offsets)


def _tree(tree: Any, causal: bool, beside: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the sequence lists of a call with a tree, from ``cu_seqlens_q`` to ``parents``. Every argument in
    ``beside`` must be None, because a tree excludes it."""
    wanted = "None or (cu_segments, parents)"
    if not isinstance(tree, (tuple, list)):
        raise TypeError(f"tree: expected {wanted}, got {type(tree).__name__}")
    if len(tree) != 2:
        raise ValueError(f"tree: expected {wanted}, got {len(tree)} arrays")
    for name, given in zip(("cu_segments", "parents"), tree, strict=True):
        if given is None:
            raise TypeError(f"{name}: expected an array in tree, got None")
    for name, given in beside.items():
        if given is not None:
            raise ValueError(f"tree: expected None beside {name}: a tree says where its tokens are, got a tuple")
    if not causal:
        raise ValueError("tree: expected None beside causal=False: a token sees those before it, got a tuple")
    offsets = _narrow(tree[0])
    return offsets, offsets, None, None, None, tree[1]


@overload
def attention(
    q: ArrayT, k: AnyArray, v: AnyArray, *, causal: bool = True, window_size: int | None = None,
    softmax_scale: float | None = None, softcap: float | None = None, sinks: AnyArray | None = None,
    cu_seqlens_q: AnyArray | None = None, cu_seqlens_k: AnyArray | None = None, seqused_q: AnyArray | None = None,
    seqused_k: AnyArray | None = None, leftpad_k: AnyArray | None = None, block_table: AnyArray | None = None,
    shared_prefix: tuple[AnyArray, AnyArray, AnyArray] | None = None, tree: tuple[AnyArray, AnyArray] | None = None,
    exp: Exp = None, return_lse: Literal[False] = False, return_partials: Literal[False] = False,
    splits: None = None
) -> ArrayT: ...  # fmt: skip


@overload
def attention(
    q: ArrayT, k: AnyArray, v: AnyArray, *, causal: bool = True, window_size: int | None = None,
    softmax_scale: float | None = None, softcap: float | None = None, sinks: None = None,
    cu_seqlens_q: AnyArray | None = None, cu_seqlens_k: AnyArray | None = None, seqused_q: AnyArray | None = None,
    seqused_k: AnyArray | None = None, leftpad_k: AnyArray | None = None, block_table: AnyArray | None = None,
    shared_prefix: tuple[AnyArray, AnyArray, AnyArray] | None = None, tree: None = None, exp: Exp = None,
    return_lse: Literal[False] = False, return_partials: Literal[True], splits: Sequence[int] | None = None
) -> AttentionPartials[ArrayT]: ...  # fmt: skip


@overload
def attention(
    q: ArrayT, k: AnyArray, v: AnyArray, *, causal: bool = True, window_size: int | None = None,
    softmax_scale: float | None = None, softcap: float | None = None, sinks: AnyArray | None = None,
    cu_seqlens_q: AnyArray | None = None, cu_seqlens_k: AnyArray | None = None, seqused_q: AnyArray | None = None,
    seqused_k: AnyArray | None = None, leftpad_k: AnyArray | None = None, block_table: AnyArray | None = None,
    shared_prefix: tuple[AnyArray, AnyArray, AnyArray] | None = None, tree: tuple[AnyArray, AnyArray] | None = None,
    exp: Exp = None, return_lse: bool = False, return_partials: Literal[False] = False, splits: None = None
) -> AttentionResult[ArrayT]: ...  # fmt: skip
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    window_size: int | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    leftpad_k: Any = None,
    block_table: Any = None,
    shared_prefix: Any = None,
    tree: Any = None,
    exp: str | None = None,
    return_lse: bool = False,
    return_partials: bool = False,
    splits: Any = None,
) -> Any:
    """``softmax(softmax_scale * q k^T) v``, with grouped heads, causal and sliding-window masks, forward and backward.

    The output of a query has the same bits in any batch, whether packed, padded, paged or chunked, and at any stride.
    The gradients of a query and of a key do not depend on batch and layout either. In torch, ``q``, ``k``, ``v`` and
    ``sinks`` have gradients, except with pages. Under ``torch.autocast``, ``q``, ``k`` and ``v`` are cast as in torch's
    attention.

    ``q`` holds the queries; ``k`` and ``v`` hold the keys and values, and may have another layout than ``q``. The last
    query of a sequence is at its last key (bottom right): with Q queries and L keys in use, query i is at key ``L - Q +
    i``. A query before the first key sees no key. Argument names follow FlashAttention:

    - training, padded on the left as Hugging Face generates: ``leftpad_k`` (queries that are padding see no key);
    - padded on the right: ``seqused_q`` and ``seqused_k``, which hold the lengths;
    - packed: ``cu_seqlens_q`` and ``cu_seqlens_k``, with ``[tokens, heads, head_dim]``;
    - a KV cache: ``seqused_k``, the number of keys in the cache, including the new keys;
    - a paged cache as in vLLM: ``block_table`` and ``seqused_k``, with ``q`` padded or packed;
    - training on a prompt that several answers share, or on a tree of turns: ``tree``.

    Args:
        q: ``[batch, tokens, q_heads, head_dim]``, or packed ``[tokens, q_heads, head_dim]`` with ``cu_seqlens_q``;
            float32, bfloat16 or float16. The last dimension is contiguous, and other strides are free, so a transposed
            ``[batch, heads, tokens, head_dim]`` is valid. ``head_dim`` is a multiple of 8, at most 256.
        k, v: ``[batch, tokens, kv_heads, head_dim]``; packed ``[tokens, kv_heads, head_dim]`` with ``cu_seqlens_k``;
            pages ``[num_pages, page_size, kv_heads, head_dim]`` of any size with ``block_table``. ``kv_heads`` divides
            ``q_heads``: query head h reads head ``h // (q_heads / kv_heads)``. The last dimension of ``v`` may be
            smaller, a multiple of 8 (192 and 128 in DeepSeek's MLA). The bits are the same as for ``v`` padded with
            zeros.
        causal: True: a query sees the keys up to its own position. False: a query sees all keys of its sequence.
        window_size: the number of keys that a query sees, including its own: ``q_pos - k_pos < window_size``, as
            Hugging Face's ``sliding_window`` (FlashAttention's ``window_size=(window_size - 1, 0)``). A window requires
            ``causal=True``.
        softmax_scale: > 0; default ``1 / sqrt(head_dim)``.
        softcap: > 0: scores become ``softcap * tanh(score / softcap)``, after the scale (Gemma 2's
            ``attn_logit_softcapping``). On CUDA a call with a softcap never uses wgmma.
        sinks: float32 ``[q_heads]``, one extra score per head, in natural logarithms, after ``softmax_scale`` and
            ``softcap``. A sink has no value vector (gpt-oss): ``exp(sink)`` is added to the sum of a row's
            exponentials.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 ``[num_sequences + 1]``, offsets of the packed sequences
            (docs/tokens.md); they may end before the last token.
        seqused_q, seqused_k: int32 ``[num_sequences]``: the number of queries and of keys in use, from the beginning of
            each sequence; default: all. ``seqused_k`` counts from key ``leftpad_k``.
        leftpad_k: int32 ``[num_sequences]``: the number of padding keys at the front; for ``k`` with a batch dimension.
        block_table: int32 ``[num_sequences, max_pages]``: the pages of each sequence, in order.
        shared_prefix: ``(prefix_table, prefix_lens, group_offsets)`` beside ``block_table``: pages that the sequences
            of a group share, such as the rollouts of one prompt. ``group_offsets``, int32 or int64 ``[num_groups +
            1]``: group g has the sequences ``group_offsets[g]`` to ``group_offsets[g + 1]``; sequences after the last
            group share no prefix. ``prefix_lens``, int32 ``[num_groups]``: the number of keys that a group shares; the
            prefix may end inside a page. ``prefix_table``, int32 ``[num_groups, max_prefix_pages]``: the pages with
            these keys. ``block_table`` lists the pages of the sequence's other keys. Key ``prefix_lens[g]`` is at the
            beginning of the first page in ``block_table``. ``seqused_k`` counts all keys. The bits are the same as for
            a call whose ``block_table`` lists all keys. Forward only.
        tree: ``(cu_segments, parents)``: packed ``q``, ``k`` and ``v`` hold segments of trees, such as a prompt and its
            answers. ``cu_segments``, int32 or int64 ``[num_segments + 1]``: offsets of the segments, from 0 to the
            number of tokens. ``parents``, int32 ``[num_segments]``: the segment's parent, which has a lower number, or
            -1 for a root. A token sees its own segment up to itself, and all segments of its ancestors. For windows and
            RoPE, a token's position is the number of tokens before it on its path, which leads from the root to the
            token. A token's output and the gradient of its query have the same bits as if its path were one sequence.
            In a segment without children, the gradients of keys also have these bits. A tree requires ``causal=True``
            and excludes the other lists of sequences. On a GPU, a segment whose parent is out of range becomes a root;
            it sees a single key, whose value is NaN.
        exp: the exponential: ``"hardware"``, ``"portable"`` or None. None means ``"hardware"`` on CUDA and under
            ``rk.arithmetic("sm_90")``, else ``"portable"``. With ``"portable"``, all backends with the same matrix
            products give the same bits. With ``"hardware"``, all GPUs of one architecture give the same bits, and the
            CPU can give those of sm_90. On CUDA, the matrix unit computes products of bfloat16 and float16. Under
            ``rk.arithmetic("sm_90")``, the CPU computes these products as this unit does, and values must be finite.
            All other products are chains of fused multiply-adds.
        return_lse: also return the logarithm of each row's sum.
        return_partials: instead of ``out``, return the :class:`AttentionPartials` of the call's splits (ranges of the
            keys) for :func:`attention_merge`. Pass sinks to :func:`attention_merge`. Forward only.
        splits: the numbers of the splits (:func:`attention_splits`) that this call computes for every row, ascending.
            Default: all splits. ``k`` and ``v`` hold only the keys of these splits, split by split, in any layout.
            ``cu_seqlens_k`` and ``block_table`` describe these keys. ``seqused_k`` is required. ``seqused_k`` and the
            masks refer to the whole sequence. Arrays need not contain keys from number ``seqused_k`` on. Not supported
            with ``shared_prefix``.
    Returns:
        ``out``, with the shape of ``q`` but the last dimension of ``v``, and the dtype of ``q``, contiguous; or
        :class:`AttentionResult` or :class:`AttentionPartials`. A query that is not in use, or sees no key, gets an
        output of +0 and an lse of -Inf. Neither such a query nor padding among the keys is ever read.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value, for arguments that
        do not go together, and on the CPU for lists that contradict the arrays; RuntimeError if this build has no
        kernel for the device. On a GPU, lists that contradict the arrays are not an error: nothing out of range is
        read, offsets and counts are clamped, and keys of an invalid page are NaN.
    Source:
        docs/numerics.md, rule 6; grouped heads: arXiv:2305.13245; the backward's formulas: arXiv:2307.08691.

    Example:
        >>> q = k = v = torch.arange(16.0).view(1, 2, 1, 8) / 16
        >>> rk.attention(q, k, v)[0, :, 0]
        tensor([[0.0000, 0.0625, 0.1250, 0.1875, 0.2500, 0.3125, 0.3750, 0.4375],
                [0.3671, 0.4296, 0.4921, 0.5546, 0.6171, 0.6796, 0.7421, 0.8046]])
    """
    options = (_check.flag("causal", causal), window_size, softmax_scale, softcap)
    if return_lse is not False:
        return_lse = _check.flag("return_lse", return_lse)
    if tree is None:
        prefix = _NO_PREFIX if shared_prefix is None else _prefix(shared_prefix)
        if return_partials is False and splits is None and not _call.is_read_by_dynamo():
            places = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, None)  # offsets may be int64 here
            arrays = (q, k, v, sinks, *places, block_table, *prefix)
            result = _C.attention_eager(arrays, options, exp, 0, return_lse, None)
            if result is not NotImplemented:
                return AttentionResult(*result) if return_lse else result[0]
        places = (_narrow(cu_seqlens_q), _narrow(cu_seqlens_k), seqused_q, seqused_k, leftpad_k, None)
        lists = (*places, block_table, *prefix)
    else:
        given = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table, shared_prefix)
        lists = (*_tree(tree, causal, dict(zip(BESIDE_TREE, given, strict=True))), None, *_NO_PREFIX)
    if return_partials is not False and _check.flag("return_partials", return_partials):
        if return_lse:
            raise ValueError("return_lse: expected False beside return_partials; attention_merge gives it")
        if sinks is not None:
            raise ValueError("sinks: expected None beside return_partials; give them to attention_merge")
        if tree is not None:
            raise ValueError(
                "tree: expected None beside return_partials, whose splits are of one sequence, got a tuple"
            )
        return partials(q, k, v, (*lists[:5], *lists[6:]), splits, options, exp)
    if splits is not None:
        raise ValueError(f"splits: expected None without return_partials, got {type(splits).__name__}")
    if block_table is not None and _dispatch.is_tensor(q) and _call.engine().wants_grad(q, k, v, sinks):
        attention_traced.refuse_pages(block_table)
    how = (*options, exp, unit_of(q), return_lse)
    out, lse = _call.call(attention_traced.FORWARD, (q, k, v, sinks, *lists), how)
    return AttentionResult(out, lse) if return_lse else out


def attention_into(
    out: Any, q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, block_table: Any, seqused_k: Any, softmax_scale: float,
    window_size: int | None, shared_prefix: Any,
) -> None:  # fmt: skip
    """Writes the result of :func:`attention` into ``out``, an engine's contiguous tensor of the result's shape and
    dtype."""
    result: Any = NotImplemented
    if not _call.is_read_by_dynamo():
        places = (cu_seqlens_q, None, None, seqused_k, None, None, block_table)
        arrays = (q, k, v, None, *places, *(_NO_PREFIX if shared_prefix is None else _prefix(shared_prefix)))
        result = _C.attention_eager(arrays, (True, window_size, softmax_scale, None), None, 0, False, out)
    if result is NotImplemented:
        given = {"cu_seqlens_q": cu_seqlens_q, "block_table": block_table, "seqused_k": seqused_k}
        out.copy_(
            attention(
                q, k, v, softmax_scale=softmax_scale, window_size=window_size, shared_prefix=shared_prefix, **given
            )
        )
    else:
        _dispatch.count_write(out)


def attention_backward(
    dout: ArrayT,
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray,
    lse: AnyArray,
    *,
    dlse: AnyArray | None = None,
    causal: bool = True,
    window_size: int | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    cu_seqlens_q: AnyArray | None = None,
    cu_seqlens_k: AnyArray | None = None,
    seqused_q: AnyArray | None = None,
    seqused_k: AnyArray | None = None,
    leftpad_k: AnyArray | None = None,
    tree: tuple[AnyArray, AnyArray] | None = None,
    exp: Exp = None,
) -> tuple[ArrayT, ...]:
    """Gradients of :func:`attention`, for callers that run backward themselves; torch's autograd also calls this
    function.

    Args:
        dout: the gradient of ``out``, with its shape and dtype.
        q, k, v and the options: as given to :func:`attention`. Paged calls have no gradients.
        out, lse: the results of attention, for the whole sequences.
        dlse: the gradient of ``lse``, float32, contiguous; None means 0.
    Returns: ``(dq, dk, dv)``, contiguous, with the shapes and dtype of ``q``, ``k`` and ``v``. With ``sinks``, a fourth
        array follows: the gradient of ``sinks``, float32 ``[q_heads]``, summed over all sequences. Gradients of tokens
        that are not in use are +0.
    Raises: as :func:`attention`.
    Source: docs/numerics.md, rule 6; arXiv:2307.08691.
    Example:
        >>> q, k, v = torch.randn(1, 4, 2, 16), torch.randn(1, 4, 1, 16), torch.randn(1, 4, 1, 16)
        >>> out, lse = rk.attention(q, k, v, return_lse=True)
        >>> dq, dk, dv = rk.attention_backward(torch.ones_like(out), q, k, v, out, lse)
        >>> tuple(dk.shape)
        (1, 4, 1, 16)
    """
    options: tuple[Any, ...] = (_check.flag("causal", causal), window_size, softmax_scale, softcap)
    if tree is None:
        lists: tuple[Any, ...] = (_narrow(cu_seqlens_q), _narrow(cu_seqlens_k), seqused_q, seqused_k, leftpad_k, None)
    else:
        given = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k)
        lists = _tree(tree, causal, dict(zip(BESIDE_TREE, given, strict=False)))
    arrays = (dout, dlse, q, k, v, out, lse, sinks, *lists)
    gradients = _call.call(
        attention_traced.BACKWARD, arrays, (*options, exp, unit_of(q), True, True, sinks is not None)
    )
    return gradients if sinks is not None else gradients[:3]


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _probability(keys: Any, head_dim: Any, max_abs_s: Any, score_scale: Any) -> Any:
    """Bounds the relative error of a probability by the errors of its score and of the softmax statistics."""
    return 2e-5 + 8e-7 * max_abs_s + 2 * (head_dim + 2) * U * score_scale + (keys / 128 + 40) * U


_OFF_P = "(2e-5 + 8e-7 * max_abs_s + 2 * (head_dim + 2) * u * score_scale + (keys / 128 + 40) * u)"
_OFF_ATTENTION_OUT = Bound(
    lambda keys, head_dim, max_abs_s, score_scale, scale, inner=0.0, inner_least=0.0, other_scale=0.0: (
        (_probability(keys, head_dim, max_abs_s, score_scale) + (keys + 8) * U + inner) * scale
        + inner_least * other_scale
    ),
    f"({_OFF_P} + (keys + 8) * u + inner) * scale + {LEAST}",
    "probabilities by rule 4 from scores that are chains over head_dim, rounded to the dtype; a chain over keys",
)
_OFF_ATTENTION_LSE = Bound(
    lambda head_dim, max_abs_s, score_scale: 1e-5 + 4e-7 * max_abs_s + (head_dim + 2) * U * score_scale,
    "1e-5 + 4e-7 * max_abs_s + (head_dim + 2) * u * score_scale",
    "as a log-probability's, from scores that are chains over head_dim",
)
_OFF_ATTENTION_DV = Bound(
    lambda keys, head_dim, max_abs_s, score_scale, scale, inner=0.0, inner_least=0.0, other_scale=0.0: (
        (_probability(0, head_dim, max_abs_s, score_scale) + (keys + 8) * U + inner) * scale + inner_least * other_scale
    ),
    f"({_OFF_P.replace('keys', '0')} + (keys + 8) * u + inner) * scale + {LEAST}",
    "as out, the chain over queries",
)


def _attention_ds(
    keys: Any,
    head_dim: Any,
    max_abs_s: Any,
    score_scale: Any,
    scale: Any,
    gradient_scale: Any,
    inner: Any = 0.0,
    inner_least: Any = 0.0,
    other_scale: Any = 0.0,
) -> Any:
    off = (_probability(0, head_dim, max_abs_s, score_scale) + (keys + head_dim + 16) * U + inner) * scale
    return off + ((head_dim + 16) * U + inner) * gradient_scale + inner_least * other_scale


_OFF_ATTENTION_DS = Bound(
    _attention_ds,
    f"({_OFF_P.replace('keys', '0')} + (keys + head_dim + 16) * u + inner) * scale "
    f"+ ((head_dim + 16) * u + inner) * gradient_scale + {LEAST}",
    "ds = p (dp - delta), rounded to the dtype, as out is, of which delta is made; their difference cancels; a chain "
    "over keys or queries",
)
_OFF_ATTENTION_SINKS = Bound(
    lambda rows, head_dim, max_abs_s, score_scale, scale, gradient_scale, inner=0.0, inner_least=0.0, other_scale=0.0: (
        (_probability(0, head_dim, max_abs_s, score_scale) + (72 + rows / 8192) * U) * scale
        + ((head_dim + 16) * U + inner) * gradient_scale
        + inner_least * other_scale
    ),
    f"({_OFF_P.replace('keys', '0')} + (72 + rows / 8192) * u) * scale "
    f"+ ((head_dim + 16) * u + inner) * gradient_scale + {LEAST}",
    "delta, of which out is rounded to the dtype, weighed by the sink's probability; summed as a token sum is",
)


def _contract_rows() -> Iterator[Row]:
    attended: dict[str, Any] = {
        "kind": "attention",
        "backends": BY_PRODUCT,
        "stem": "attention",
        "keeps": NO_SHARDS,
    }
    yield Row("attention", "out", "forward", bound=_OFF_ATTENTION_OUT, **attended)
    yield Row("attention", "lse", "forward", bound=_OFF_ATTENTION_LSE, rounded=False, **attended)
    for output in ("dq", "dk"):
        yield Row("attention", output, "backward", bound=_OFF_ATTENTION_DS, **attended)
    yield Row("attention", "dv", "backward", bound=_OFF_ATTENTION_DV, **attended)
    summed: dict[str, Any] = attended | {"kind": "token sum", "keeps": TOKEN_SUM, "rounded": False}
    yield Row("attention", "dsinks", "backward", bound=_OFF_ATTENTION_SINKS, **summed)

    yield Row(
        "attention", "derivatives", "backward", stem="attention", bound=derivatives(1e-4), backends=BY_EXPONENTIAL,
        **COMPOSED,
    )  # fmt: skip


add_rows(_contract_rows())
