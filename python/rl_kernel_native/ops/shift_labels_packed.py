"""Labels and loss masks of sequences: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/shift_labels_packed.h."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from .. import _check, _dispatch
from .._call import call
from .._native import functions
from .._operator import Operator
from .._types import AnyArray, ArrayT
from ..contract import BITWISE, OF_TOKENS, Row, add_rows
from ..reference.shift_labels_packed import (
    loss_mask_from_spans_reference,
    shift_labels_packed_reference,
    tool_mask_reference,
)

__all__ = [
    "loss_mask_from_spans",
    "loss_mask_from_spans_reference",
    "shift_labels_packed",
    "shift_labels_packed_reference",
    "tool_mask",
    "tool_mask_reference",
]

functions(
    loss_mask_from_spans="object*3, int, object, int",
    shift_labels_packed="object*3, int*2, bool, int, object, int",
    tool_mask="object*4, bool, object, int",
)

MOST_MARKER_IDS = 16


def _spans_shape(arrays: Any, how: tuple[Any, ...]) -> Any:
    _, span_offsets, cu_seqlens = arrays
    return (how if cu_seqlens is not None else (span_offsets.shape[0] - 1, *how),)


_SHIFT_LABELS_PACKED = Operator(
    "shift_labels_packed",
    "ids, cu_seqlens, mask?",
    "SymInt cp_rank, SymInt cp_size, bool zigzag, SymInt ignore_index",
    outputs=lambda arrays, how: ((arrays[0].shape[0] // how[1],),),
    dtypes=(None,),
)
_LOSS_MASK_FROM_SPANS = Operator(
    "loss_mask_from_spans",
    "spans, span_offsets, cu_seqlens?",
    "SymInt num_tokens",
    outputs=_spans_shape,
    dtypes=("bool",),
)
_TOOL_MASK = Operator("tool_mask", "ids, cu_seqlens?", "int[] begin, int[] end, bool include_end", dtypes=("bool",))


def shift_labels_packed(
    ids: ArrayT,
    cu_seqlens: AnyArray,
    *,
    mask: AnyArray | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    cp_layout: Literal["zigzag", "contiguous"] = "zigzag",
    ignore_index: int = -100,
) -> ArrayT:
    """For each token, the next token of its sequence: the label of the token's logits.

    The last token of a sequence has no label. A context-parallel rank gets the labels of its own tokens, in the order
    in which it holds them. The label of a chunk's last token may be on another rank, so the call takes the ``ids`` of
    all ranks.

    Args:
        ids: ``[num_tokens]`` int32 or int64, contiguous: all ranks' tokens, packed.
        cu_seqlens: ``[num_sequences + 1]``, int32 or int64; see :func:`sequence_logprob`.
        mask: ``[num_tokens]``, any mask (docs/tokens.md): a token whose mask is zero is not used as a label.
        cp_rank, cp_size: rank and size of context parallelism; ``num_tokens`` is a multiple of ``cp_size``.
        cp_layout: ``"zigzag"``, as in Megatron: each sequence has ``2 cp_size`` chunks, and a rank has chunks
            ``cp_rank`` and ``2 cp_size - 1 - cp_rank``. Offsets must then be multiples of ``2 cp_size``. Other offsets
            are a ValueError on the CPU; on a GPU, the sequence gets no labels. ``"contiguous"``, as in Ulysses: the
            packed array is cut into ``cp_size`` parts.
        ignore_index: the label of a token without a next token.
    Returns:
        ``[num_tokens / cp_size]``, of the dtype of ``ids``.
    Raises:
        TypeError for a wrong dtype; ValueError for a wrong shape, device or value, or on the CPU for invalid offsets;
        RuntimeError if this build has no kernel for the device.
    Source:
        the contract; chunks: Megatron-LM's ``get_batch_on_this_cp_rank``.

    Example:
        >>> rk.shift_labels_packed(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 5]))
        tensor([   2, -100,    4,    5, -100])
    """
    _check.one_of("cp_layout", cp_layout, ("zigzag", "contiguous"))
    how = (
        _check.integer64("cp_rank", cp_rank), _check.integer64("cp_size", cp_size), cp_layout == "zigzag",
        _check.integer64("ignore_index", ignore_index),
    )  # fmt: skip
    return call(_SHIFT_LABELS_PACKED, (ids, cu_seqlens, mask), how)[0]


def loss_mask_from_spans(
    spans: ArrayT, span_offsets: AnyArray, cu_seqlens: AnyArray | None = None, *, num_tokens: int
) -> ArrayT:
    """True for the tokens inside a sequence's spans, such as an assistant's turns.

    Args:
        spans: ``[num_spans, 2]`` int32 or int64: each span's first position and the position after its last, counted
            from the sequence's first token. Spans may overlap and have any order.
        span_offsets: ``[num_sequences + 1]``, int32 or int64: sequence ``i`` has spans ``[span_offsets[i],
            span_offsets[i + 1])``.
        cu_seqlens: offsets of packed sequences, ``[num_sequences + 1]``; None: the mask is padded.
        num_tokens: the number of tokens in a padded row, or in the packed array.
    Returns:
        bool, ``[num_sequences, num_tokens]`` or ``[num_tokens]``.
    Raises:
        As :func:`shift_labels_packed`, and on the CPU a ValueError for a span that leaves its sequence. A GPU uses the
        part of the span that is inside.
    Source: the contract.
    Example:
        >>> spans, span_offsets = torch.tensor([[1, 3], [4, 5]]), torch.tensor([0, 2])  # two spans of one sequence
        >>> rk.loss_mask_from_spans(spans, span_offsets, num_tokens=6).int()
        tensor([[0, 1, 1, 0, 1, 0]], dtype=torch.int32)
    """
    count = _check.integer64("num_tokens", num_tokens)
    if count < 0:
        raise ValueError(f"num_tokens: expected a number >= 0, got {count}")
    return call(_LOSS_MASK_FROM_SPANS, (spans, span_offsets, cu_seqlens), (count,))[0]


def tool_mask(
    ids: ArrayT,
    begin: Sequence[int],
    end: Sequence[int],
    cu_seqlens: AnyArray | None = None,
    *,
    include_end: bool = True,
    mask: AnyArray | None = None,
) -> ArrayT:
    """True for the tokens of an assistant's turns, which the function finds by the ids of the markers around a turn.
    With this mask, training skips prompts and tool results.

    A turn begins after the ids of ``begin``. The turn ends with the next ids of ``end`` or with its sequence. The model
    generates the ids of ``end``, so by default they belong to the turn. The same ids give the same mask in rollout and
    trainer, because nothing is tokenised again.

    Args:
        ids: ``[num_sequences, num_tokens]``, or ``[num_tokens]`` for one sequence or with ``cu_seqlens``; int32 or
            int64, last dimension contiguous. Padding after a turn without an ``end`` marker would belong to the turn:
            pass ``mask``, or pack the sequences.
        begin: 1 to 16 ids, such as those of ``<|im_start|>assistant\\n``.
        end: 1 to 16 ids, such as that of ``<|im_end|>``.
        cu_seqlens: ``[num_sequences + 1]``, int32 or int64.
        include_end: whether the mask includes the tokens of ``end``.
        mask: of the shape of ``ids`` or None; tokens whose mask is 0, such as padding, get False.
    Returns:
        bool, of the shape of ``ids``.
    Raises:
        As :func:`shift_labels_packed`.
    Source: the contract.
    Example:
        >>> ids = torch.tensor([5, 6, 1, 8, 9, 2, 5, 1, 7, 2])  # 1 begins an assistant's turn, 2 ends it
        >>> rk.tool_mask(ids, begin=[1], end=[2]).int()
        tensor([0, 0, 0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.int32)
    """
    include_end = _check.flag("include_end", include_end)
    markers: list[Any] = [_marker("begin", begin), _marker("end", end)]
    found = call(_TOOL_MASK, (ids, cu_seqlens), (*markers, include_end))[0]
    if mask is None:
        return found
    if _dispatch.is_tensor(mask) != _dispatch.is_tensor(ids) or not hasattr(mask, "dtype"):
        raise TypeError(f"mask: expected an array like ids, got {type(mask).__name__}")
    if _dispatch.is_tensor(mask):
        from .._torch import require_tensors

        require_tensors(ids=ids, mask=mask)
    else:
        _dispatch.device_type(mask, "mask")
    _check.mask_dtype("mask", str(mask.dtype).removeprefix("torch."))
    if tuple(mask.shape) != tuple(found.shape):
        raise ValueError(f"mask: expected shape {list(found.shape)}, got {list(mask.shape)}")
    return found & (mask != 0)


def _marker(name: str, ids: Any) -> list[int]:
    if not isinstance(ids, (list, tuple)):
        raise TypeError(f"{name}: expected a list or tuple of ids, got {type(ids).__name__}")
    if not 1 <= len(ids) <= MOST_MARKER_IDS:
        raise ValueError(f"{name}: expected 1 to {MOST_MARKER_IDS} ids, got {len(ids)}")
    return [_check.integer64(name, i) for i in ids]


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _contract_rows() -> Iterator[Row]:
    integers = OF_TOKENS | {"kind": "integers", "bound": BITWISE, "stem": "shift_labels_packed", "dtypes": ()}
    yield Row("shift_labels_packed", "labels", "forward", **integers)
    for operator in ("loss_mask_from_spans", "tool_mask"):
        yield Row(operator, "mask", "forward", **integers)


add_rows(_contract_rows())
