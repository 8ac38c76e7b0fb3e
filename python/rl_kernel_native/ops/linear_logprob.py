"""Log-probability from hidden states: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/linear_logprob.h."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any, Literal, overload

from .. import _call, _check, _cures, _dispatch
from .._arithmetic import product_unit, resolve_exp
from .._dispatch import code_or_same
from .._lost import refuse_gradients
from .._native import functions
from .._types import AnyArray, ArrayT, DType, Exp, Generic, Group, NamedTuple, OnBadId
from ..contract import (
    FMA,
    GROUPS,
    NO_SHARDS,
    OF_HEAD,
    OFF_HEAD_LOGPROB,
    ONE_ARCHITECTURE,
    TOKEN_SUM,
    UNIT,
    Bound,
    Row,
    add_rows,
    of_head,
    off_dlogits,
    smaller,
)
from ..reference.linear_logprob import linear_logprob_reference
from .linear_logprob_traced import FORWARD, LARGEST
from .logprob import LOGPROB, STATUS, LogprobResult, _exported, _selected, wanted_bits
from .logprob_traced import array_or_number

__all__ = [
    "LinearLogprobPair",
    "linear_logprob",
    "linear_logprob_pair",
    "linear_logprob_partial",
    "linear_logprob_reference",
]

_C = functions(
    linear_logprob="object*3, int, object, int",
    linear_logprob_backward="object*5, int, object*2, int",
    linear_logprob_partial="object*5, int",
)

_torch_path: Any = None


def _torch() -> Any:
    """Returns the module linear_logprob_torch. It is imported at the first call with a torch tensor."""
    global _torch_path
    if _torch_path is None:
        _dispatch.require_torch()
        _call.load()
        from . import linear_logprob_torch

        _torch_path = linear_logprob_torch
    return _torch_path


@overload
def linear_logprob(
    hidden: ArrayT, weight: AnyArray, target: AnyArray, *, bias: AnyArray | None = None,
    temperature: float | AnyArray = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    logits_dtype: DType = "float32", ignore_index: int = -100, valid_vocab: int | None = None,
    canonical_vocab: int | None = None, kept: tuple[AnyArray, AnyArray] | None = None,
    return_lse: Literal[False] = False, return_entropy: Literal[False] = False,
    return_sum_p_sq: Literal[False] = False, return_status: Literal[False] = False, check: bool = False,
    on_bad_id: OnBadId = "nan", exp: Exp = None, loss_mask: AnyArray | None = None, lora_a: AnyArray | None = None,
    lora_b: AnyArray | None = None, lora_scale: float = 1.0, weight_grad: bool = True,
    main_grad: AnyArray | None = None, workspace_bytes: int | None = None, process_group: Group = None,
    vocab_start: int = 0, vocab_size: int | None = None, dh_segments: int = 1
) -> ArrayT: ...  # fmt: skip


@overload
def linear_logprob(
    hidden: ArrayT, weight: AnyArray, target: AnyArray, *, bias: AnyArray | None = None,
    temperature: float | AnyArray = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    logits_dtype: DType = "float32", ignore_index: int = -100, valid_vocab: int | None = None,
    canonical_vocab: int | None = None, kept: tuple[AnyArray, AnyArray] | None = None, return_lse: bool = False,
    return_entropy: bool = False, return_sum_p_sq: bool = False, return_status: bool = False, check: bool = False,
    on_bad_id: OnBadId = "nan", exp: Exp = None, loss_mask: AnyArray | None = None, lora_a: AnyArray | None = None,
    lora_b: AnyArray | None = None, lora_scale: float = 1.0, weight_grad: bool = True,
    main_grad: AnyArray | None = None, workspace_bytes: int | None = None, process_group: Group = None,
    vocab_start: int = 0, vocab_size: int | None = None, dh_segments: int = 1
) -> LogprobResult[ArrayT]: ...  # fmt: skip
def linear_logprob(
    hidden: Any,
    weight: Any,
    target: Any,
    *,
    bias: Any = None,
    temperature: Any = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: Any = "float32",
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    canonical_vocab: int | None = None,
    kept: tuple[Any, Any] | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_sum_p_sq: bool = False,
    return_status: bool = False,
    check: bool = False,
    on_bad_id: str = "nan",
    exp: str | None = None,
    loss_mask: Any = None,
    lora_a: Any = None,
    lora_b: Any = None,
    lora_scale: float = 1.0,
    weight_grad: bool = True,
    main_grad: Any = None,
    workspace_bytes: int | None = None,
    process_group: Group = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    dh_segments: int = 1,
) -> Any:
    """Log-probability of one token per row from hidden states and the LM head, with only some rows of the logits in
    memory at a time. The result equals ``logprob(linear(hidden, weight, bias, out_dtype=logits_dtype), target, ...)``
    bit for bit.

    A row has the same bits for any batch, position and workspace. In torch, gradients flow to ``hidden``, ``weight``,
    ``bias``, ``lora_a`` and ``lora_b`` through ``logprob``, ``lse`` and ``entropy``; backward recomputes the logits.
    For second derivatives and forward mode, apply ``logprob`` to ``linear`` instead. Under ``torch.autocast``, operands
    are cast as for :func:`linear`.

    Args:
        hidden: ``[..., in_features]``, bfloat16 or float16, on the CPU also float32; last dimension contiguous. Rows
            with ``target == ignore_index``, and rows that ``loss_mask`` excludes, are never read.
        weight: ``[vocab_size, in_features]``, with the dtype of ``hidden``; each row is contiguous, with any stride
            between rows. If gradients are wanted, all numbers of ``weight`` must be finite, even those of padding rows,
            because backward multiplies these numbers by zero.
        target: ``[...]``, int32 or int64, in ``[0, valid_vocab)`` or ``ignore_index``.
        bias: ``[vocab_size]``, with the dtype of ``hidden`` or float32.
        logits_dtype: float32, or the dtype of ``hidden``: each logit, with its bias, is rounded once to this dtype.
        temperature, softcap, logit_scale, ignore_index, valid_vocab, canonical_vocab, kept, check, on_bad_id, exp: as
            for :func:`logprob`. The flags that begin with ``return`` are also as for :func:`logprob`.
        loss_mask: ``[...]``, any mask (docs/tokens.md) in the framework of ``target``. If a row's mask is zero, its
            outputs and gradients are 0, as for a target of ``ignore_index``.
        lora_a, lora_b: both or neither: ``[rank, in_features]`` and ``[vocab_size, rank]``, with the dtype of
            ``hidden``; each row is contiguous, with any stride between rows. First, ``u = lora_scale * hidden @
            lora_a.T`` is rounded to the dtype of ``hidden``. The products of ``u`` and ``lora_b`` are then added to the
            sum of ``hidden @ weight.T``, one by one, before bias and rounding. On sm_90, a LoRA rank that is a multiple
            of 8 is fastest, with rows of ``lora_b`` at multiples of 16 bytes.
        lora_scale: a finite number, not a tensor: usually alpha / rank.
        weight_grad: with False, ``weight`` gets no gradient even if it requires one, and backward computes one product
            less. Use it to train only ``lora_a`` and ``lora_b``.
        main_grad: float32 ``[vocab_size, in_features]``; backward adds the gradient of ``weight`` to this array in
            place, as in :func:`linear`.
        workspace_bytes: the most memory that a call takes in addition to its inputs, outputs and gradients. A larger
            workspace is faster, up to a point, and changes no bit of the results. Default: 256 MiB, or more if the call
            needs more (docs/linear.md). :func:`workspace_stats` says how much memory calls took. A gradient of
            ``weight`` in its own dtype over more than 8192 rows needs float32 sums. These sums take 4 ``in_features``
            bytes times the smaller of rows and vocabulary. With ``main_grad``, backward needs no such sums. Forward
            raises an error if backward would need more than the given number. On sm_90, hidden states are copied, 8192
            rows at a time, if their rows have two strides, as in ``hidden[:, :-1]``, or are not aligned to 16 bytes.
            The CPU backend allocates its own memory, 64 MiB if possible.
        process_group: a group of torch.distributed with 1, 2, 4 or 8 ranks, over which the vocabulary is split in rank
            order. Every rank passes the same ``hidden``, ``target`` and ``lora_a``, and its own rows of ``weight``,
            ``bias`` and ``lora_b``. Ranks exchange five numbers per row, and every rank gets the result, with the bits
            of one rank that has the whole vocabulary. For any ``dh_segments``, each rank gets only its share of
            ``lora_a``'s gradient: add the shares by an all-reduce. Not supported under torch.compile or torch.func.
        vocab_start: global id of the weight's first row. The vocabulary has eight parts (docs/numerics.md, rule 5), and
            a shard consists of whole parts, so the id must be the beginning of a part. Equal shards are valid if the
            vocabulary is a multiple of 64.
        vocab_size: number of columns on all ranks together. Default, without a group: the rows of ``weight``.
        dh_segments: with 1, the gradient of ``hidden`` is one sum over the vocabulary. With a group, each rank then
            gets its own share, as in a column-parallel layer: add the shares by an all-reduce. The bits of the total
            depend on the number of ranks. With 8, the gradient is a tree sum over the vocabulary's eight parts, with
            the same bits on 1, 2, 4 or 8 ranks. Every rank already gets the whole gradient, so do not add the ranks'
            gradients. With a group, backward is then a collective, like forward. A value of 8 takes float32 copies of
            ``hidden`` from the workspace: 4 copies on one rank, 2 on 2 ranks, 1 on 4 ranks and none on 8 ranks. With
            LoRA, the gradient of ``u`` is rounded once per part.
    Returns: as :func:`logprob`.
    Raises: as :func:`logprob` and :func:`linear`; ValueError for a ``workspace_bytes`` that is too small. The error
        names the number of bytes needed.
    Source: docs/numerics.md, rules 1, 3 to 5, 8 and 9.

    Example:
        >>> hidden, head, target = torch.eye(2, 4), torch.arange(12.0).view(3, 4) / 4, torch.tensor([2, 0])
        >>> rk.linear_logprob(hidden, head, target)
        tensor([-0.4076, -2.4076])
        >>> torch.equal(rk.linear_logprob(hidden, head, target), rk.logprob(rk.linear(hidden, head), target))
        True
    """
    wanted = wanted_bits(return_lse, return_entropy, return_sum_p_sq, return_status)
    return head_rows(
        hidden, weight, target, wanted, bias, temperature, softcap, logit_scale, logits_dtype, ignore_index,
        valid_vocab, canonical_vocab, kept, check, on_bad_id, exp, loss_mask, lora_a, lora_b, lora_scale, weight_grad,
        main_grad, workspace_bytes, process_group, vocab_start, vocab_size, dh_segments,
    )  # fmt: skip


def head_rows(
    hidden: Any, weight: Any, target: Any, wanted: int, bias: Any, temperature: Any, softcap: Any, logit_scale: Any,
    logits_dtype: Any, ignore_index: Any, valid_vocab: Any, canonical_vocab: Any, kept: Any, check: Any, on_bad_id: Any,
    exp: Any, loss_mask: Any, lora_a: Any, lora_b: Any, lora_scale: Any, weight_grad: Any, main_grad: Any,
    workspace_bytes: Any, process_group: Any, vocab_start: Any, vocab_size: Any, dh_segments: Any,
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Returns the outputs of :func:`linear_logprob` that the bits of ``wanted`` select. The bit ``LARGEST`` is valid
    only together with other bits, and adds an int64 output at the end: the lowest id among each row's largest logits.
    With ``label_smoothing``, log-probabilities are smoothed; ``wanted`` must then be ``LOGPROB`` and ``LSE``."""
    if type(on_bad_id) is not str or on_bad_id != "nan":
        _check.one_of("on_bad_id", on_bad_id, ("nan", "raise"))
    if _check.integer("dh_segments", dh_segments) not in (1, 8):
        raise ValueError(f"dh_segments: expected 1 or 8, got {dh_segments}")
    scale = _check.number("lora_scale", lora_scale)
    kept_ids, kept_offsets = _check.kept_arrays(kept)
    ignore_index, vocab_start = _check.integer("ignore_index", ignore_index), _check.integer("vocab_start", vocab_start)
    if workspace_bytes is not None:
        workspace_bytes = _check.integer64("workspace_bytes", workspace_bytes)
    weight_grad = _check.flag("weight_grad", weight_grad)
    verify = _check.flag("check", check) or on_bad_id == "raise"
    returns = wanted | STATUS if verify else wanted
    arguments = (temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab, kept_ids, kept_offsets)
    logits = code_or_same(logits_dtype, "logits_dtype")
    if loss_mask is not None:
        target = scored_target(target, loss_mask, ignore_index)
    shard = None
    if process_group is not None or vocab_start != 0 or vocab_size is not None:
        if not _dispatch.is_tensor(hidden):
            raise ValueError("process_group, vocab_start, vocab_size: for torch tensors; see linear_logprob_partial")
        head = (hidden, weight, bias, lora_a, lora_b, target)
        shard = _torch().shard_of(head, arguments, process_group, vocab_start, vocab_size)
    if main_grad is not None and not _dispatch.is_tensor(hidden):
        raise ValueError("main_grad: only torch has an autograd that could use it")
    if main_grad is not None and not weight_grad:
        raise ValueError("main_grad: weight_grad is False, so nothing would be added to it")
    if not weight_grad and _dispatch.is_tensor(weight):
        weight = weight.detach()
    if _dispatch.is_tensor(target):
        target = _torch().contiguous(target)
    given, value = array_or_number(temperature)
    numbers = (value, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab, exp)
    how = (*numbers, logits, workspace_bytes, None, dh_segments, scale, label_smoothing, returns, shard)
    arrays = (hidden, weight, bias, lora_a, lora_b, target, given, kept_ids, kept_offsets)
    if main_grad is None:
        result = _call.call(FORWARD, arrays, (*how, None, None))
    else:
        result = _call.call_with_main_grad(FORWARD, arrays, how, main_grad, -1)
    if wanted & LARGEST:
        return _selected(result[:5], wanted, verify, check, target), result[5]
    return result[0] if returns == LOGPROB else _selected(result[:5], wanted, verify, check, target)


class LinearLogprobPair(NamedTuple, Generic[ArrayT]):
    """The result of :func:`linear_logprob_pair`: the outputs of the policy, and with the prefix ``ref_`` those of the
    reference. Outputs that the caller did not ask for are None."""

    logprob: ArrayT
    ref_logprob: ArrayT
    lse: ArrayT | Any = None
    ref_lse: ArrayT | Any = None
    entropy: ArrayT | Any = None
    ref_entropy: ArrayT | Any = None
    sum_p_sq: ArrayT | Any = None
    ref_sum_p_sq: ArrayT | Any = None
    status: ArrayT | Any = None
    ref_status: ArrayT | Any = None


# The option names are read at import, because a trace that reads __kwdefaults__ takes the default numbers for arrays.
_OPTIONS = frozenset(linear_logprob.__kwdefaults__ or {})


def linear_logprob_pair(
    hidden: ArrayT,
    weight: AnyArray,
    ref_hidden: AnyArray,
    ref_weight: AnyArray,
    target: AnyArray,
    *,
    bias: AnyArray | None = None,
    ref_bias: AnyArray | None = None,
    ref_grad: bool = False,
    loss_mask: AnyArray | None = None,
    lora_a: AnyArray | None = None,
    lora_b: AnyArray | None = None,
    lora_scale: float = 1.0,
    ref_lora_a: AnyArray | None = None,
    ref_lora_b: AnyArray | None = None,
    ref_lora_scale: float = 1.0,
    ignore_index: int = -100,
    weight_grad: bool = True,
    main_grad: AnyArray | None = None,
    **options: Any,
) -> LinearLogprobPair[ArrayT]:
    """:func:`linear_logprob` of a policy and of its reference model, with the same targets and options.

    Args:
        hidden, weight, bias, lora_a, lora_b, lora_scale: the policy's operands, as for :func:`linear_logprob`.
        ref_hidden, ref_weight, ref_bias, ref_lora_a, ref_lora_b, ref_lora_scale: the reference's operands. Their
            ``in_features``, LoRA rank and dtype may differ from the policy's; with ``valid_vocab``, the padding of the
            vocabulary may also differ. If the policy has LoRA and the reference is its base model, both may use the
            same ``weight``.
        target, loss_mask, ignore_index: shared by policy and reference.
        ref_grad: whether the reference's operands get gradients. With False they are constants, even if they require
            gradients.
        weight_grad, main_grad: the options of the policy's weight. With ``ref_grad``, the reference's weight gets its
            gradient separately.
        options: the other options of :func:`linear_logprob`, for both heads.
    Returns: :class:`LinearLogprobPair`, with the bits of two separate calls.
    Raises: as :func:`linear_logprob`; an error about the reference names its arguments with the prefix ``ref_``.
    Source: as :func:`linear_logprob`.
    Example:
        >>> hidden, ref_hidden, head = torch.randn(2, 16), torch.randn(2, 16), torch.randn(100, 16)
        >>> found = rk.linear_logprob_pair(hidden, head, ref_hidden, head, torch.tensor([3, 7]))
        >>> torch.equal(found.ref_logprob, rk.linear_logprob(ref_hidden, head, torch.tensor([3, 7])))
        True
    """
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"linear_logprob_pair() got an unexpected keyword argument {min(unknown)!r}")
    ref_grad = _check.flag("ref_grad", ref_grad)
    if loss_mask is not None:
        target = scored_target(target, loss_mask, ignore_index)
    shapes = [_check.shape_of(w)[:1] for w in (weight, ref_weight)]
    if all(shapes) and shapes[0] != shapes[1] and options.get("valid_vocab") is None:
        raise ValueError(f"ref_weight: expected {list(shapes[0])} rows (those of weight), got {list(shapes[1])}")
    of_both = {"ignore_index": ignore_index, **options}
    found = linear_logprob(
        hidden, weight, target, bias=bias, lora_a=lora_a, lora_b=lora_b, lora_scale=lora_scale, weight_grad=weight_grad,
        main_grad=main_grad, **of_both,
    )  # fmt: skip
    given: tuple[Any, ...] = (ref_hidden, ref_weight, ref_bias, ref_lora_a, ref_lora_b)
    ref = [a.detach() if not ref_grad and _dispatch.is_tensor(a) else a for a in given]
    try:
        ref_found = linear_logprob(
            ref[0], ref[1], target, bias=ref[2], lora_a=ref[3], lora_b=ref[4], lora_scale=ref_lora_scale, **of_both
        )
    except (TypeError, ValueError, BufferError) as error:
        names = r"(?<!\.)\b(hidden|weight|bias|lora_a|lora_b|lora_scale)\b"
        of_reference = re.sub(names, r"ref_\1", str(error))
        if of_reference == str(error):  # the error is about values and names no argument
            of_reference = f"ref_hidden, ref_weight: {error}"
        raise type(error)(of_reference) from None
    policy, reference = (r if isinstance(r, LogprobResult) else LogprobResult(r) for r in (found, ref_found))
    return LinearLogprobPair(*itertools.chain(*zip(policy, reference, strict=True)))


def linear_logprob_partial(
    hidden: ArrayT,
    weight_shard: AnyArray,
    target: AnyArray,
    *,
    vocab_start: int,
    vocab_size: int,
    bias: AnyArray | None = None,
    temperature: float | AnyArray = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: DType = "float32",
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    canonical_vocab: int | None = None,
    kept: tuple[AnyArray, AnyArray] | None = None,
    exp: Exp = None,
    loss_mask: AnyArray | None = None,
    lora_a: AnyArray | None = None,
    lora_b: AnyArray | None = None,
    lora_scale: float = 1.0,
    workspace_bytes: int | None = None,
) -> ArrayT:
    """:func:`logprob_partial` for one shard of an LM head. ``weight_shard`` holds rows of a weight with ``vocab_size``
    rows, from row ``vocab_start`` on. ``bias`` and ``lora_b`` have the same rows, and ``lora_a`` is whole. From the
    statistics of all shards, :func:`logprob_merge` then computes results with the bits of :func:`linear_logprob` on the
    whole weight. With ``torch.distributed``, or if you need gradients, use ``process_group`` of :func:`linear_logprob`
    instead: it computes and merges the shards.

    Args: as for :func:`linear_logprob` and :func:`logprob_partial`.
    Returns: ``[..., 5]`` float32, as :func:`logprob_partial`.
    Raises: as :func:`linear_logprob`; ValueError if a shard does not consist of whole parts of the vocabulary.
    Source: docs/numerics.md, rules 1, 4 and 5.
    Example:
        >>> hidden, head, target = torch.randn(2, 32), torch.randn(512, 32), torch.tensor([3, 300])
        >>> halves = [
        ...     rk.linear_logprob_partial(hidden, head[start : start + 256], target, vocab_start=start, vocab_size=512)
        ...     for start in (0, 256)
        ... ]
        >>> torch.equal(rk.logprob_merge(torch.stack(halves)), rk.linear_logprob(hidden, head, target))
        True
    """
    scale = _check.number("lora_scale", lora_scale)
    kept_ids, kept_offsets = _check.kept_arrays(kept)
    ignore_index = _check.integer64("ignore_index", ignore_index)
    if workspace_bytes is not None:
        workspace_bytes = _check.integer64("workspace_bytes", workspace_bytes)
    arguments = (temperature, logit_scale, softcap, ignore_index, valid_vocab, canonical_vocab, kept_ids, kept_offsets)
    logits = code_or_same(logits_dtype, "logits_dtype")
    if loss_mask is not None:
        target = scored_target(target, loss_mask, ignore_index)
    if not _dispatch.is_array(weight_shard):
        raise _cures.type_error("weight_shard", weight_shard, _cures.NO_ARRAY + type(weight_shard).__name__)
    arrays: tuple[Any, ...] = (hidden, weight_shard, bias, lora_a, lora_b, target)
    if _dispatch.is_tensor(hidden) and _call.engine().is_autocasting():
        arrays = (*_call.engine().autocast(*arrays[:5]), target)
    names = ("hidden", "weight_shard", "bias", "lora_a", "lora_b", "target")
    frame = _call.frame_of(names, arrays, cures=FORWARD.cures)
    if frame.wanted:
        raise ValueError(
            "hidden: linear_logprob_partial has no autograd, its ranks exchange statistics in between; call it under "
            "torch.no_grad(), or linear_logprob with process_group"
        )
    refuse_gradients("linear_logprob_partial gives none; pass {name}.detach()", temperature=temperature)
    exported = frame.exports(arrays, names), _exported(frame, arguments)
    how = (resolve_exp(exp, frame.device), logits, workspace_bytes, product_unit(), 1, scale, 0.0)
    stats = _C.linear_logprob_partial(*exported, how, (vocab_start, vocab_size), frame.allocate, frame.stream)
    return frame.result(stats)


def scored_target(target: Any, loss_mask: Any, ignore_index: Any) -> Any:
    """Returns the target, in its own framework and dtype, with ``ignore_index`` where ``loss_mask`` is zero."""
    ignored = _check.integer("ignore_index", ignore_index)
    is_torch = _dispatch.is_tensor(target)
    if is_torch:
        _torch().require_tensors(target=target, loss_mask=loss_mask)
        refuse_gradients("a mask gets none; pass {name}.detach()", loss_mask=loss_mask)
        xp: Any = _dispatch.torch_module()
    else:
        for name, array in (("target", target), ("loss_mask", loss_mask)):
            _dispatch.require_array(array, name)
        if type(loss_mask).__module__.partition(".")[0] != type(target).__module__.partition(".")[0]:
            kinds = (type(target).__name__, type(loss_mask).__name__)
            raise TypeError("loss_mask: expected an array of the framework of target, {}, got {}".format(*kinds))
        xp = _dispatch.namespace(target, "target")
    _check.mask_dtype("loss_mask", str(loss_mask.dtype).removeprefix("torch."))
    if tuple(loss_mask.shape) != tuple(target.shape):
        wanted = list(target.shape)
        raise ValueError(f"loss_mask: expected shape {wanted} (that of target), got {list(loss_mask.shape)}")
    dtype = str(target.dtype).removeprefix("torch.")
    if dtype not in ("int32", "int64"):
        raise TypeError(f"target: expected dtype int32 or int64, got {dtype}")
    _check.held_by("target", ignored, "ignore_index", dtype)
    return xp.where(loss_mask != 0, target, ignored if is_torch else xp.full_like(target, ignored))


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_HEAD_ENTROPY = Bound(
    lambda max_abs_z: 2 * of_head(max_abs_z), f"2 * {OF_HEAD}", "lse and the mean of z, each off like a log-probability"
)
_OFF_HEAD_SUM_P_SQ = Bound(
    lambda max_abs_z, sum_p_sq: of_head(max_abs_z) * smaller(1.0, 2 * sum_p_sq) + 1e-37,
    f"{OF_HEAD} * min(1, 2 * sum_p_sq) + 1e-37",
    "as that of logprob, from a head's log-probabilities",
)


def _head_dlogits(
    max_abs_z: Any,
    p: Any,
    log_p: Any,
    spread: Any,
    given: Any,
    given_entropy: Any,
    given_target: Any,
    uncapped: Any = 0.0,
    cap_slope: Any = 1.0,
    slope: Any = 1.0,
) -> Any:
    of_logprob = of_head(max_abs_z)
    of_log_p = of_logprob + 4e-7 * max_abs_z
    return off_dlogits(
        of_log_p, 2 * of_logprob, 6e-7 + of_logprob, p, log_p, spread, given, given_entropy, given_target, uncapped,
        cap_slope, slope,
    )  # fmt: skip


_OFF_LN_P = f"({OF_HEAD} + 4e-7 * max_abs_z)"
_OFF_HEAD_DLOGITS = Bound(
    _head_dlogits,
    f"slope * (cap_slope * (p * (given * {_OFF_LN_P} "
    f"+ given_entropy * (spread * {_OFF_LN_P} + {_OFF_LN_P} + 2 * {OF_HEAD})) "
    "+ p * (given + given_entropy * (log_p + spread)) * 5e-7 + given_target * 3e-7) "
    f"+ uncapped * (6e-7 + {OF_HEAD}) + (given + given_entropy) * 1e-35)",
    "as that of logprob, with a head's log-probability and entropy; a softcap of two temperatures or more, whose slope "
    "is off by no more than a log-probability; rounded to the operands' dtype (dbias of one row shows it)",
)


def _carried(of: Bound) -> Bound:
    """Returns the error bound of a sum of products that have a logit gradient as a factor. ``of`` bounds the error of
    the sum alone; ``carried`` is the part that comes from errors of the logit gradients."""
    first, *_ = of.facts
    if first == "rows":
        return Bound(
            lambda rows, scale, carried: of.of(rows=rows, scale=scale) + carried,
            f"{of.text} + carried",
            f"the errors of logit gradients, summed; {of.why}",
        )
    return Bound(
        lambda terms, scale, carried: of.of(terms=terms, scale=scale) + carried,
        f"{of.text} + carried",
        f"the errors of logit gradients, by the other operand; {of.why}",
    )


def _contract_rows() -> Iterator[Row]:
    head: dict[str, Any] = {"stem": "linear_logprob", "backends": ONE_ARCHITECTURE}
    statistics = head | {"kind": "softmax statistics", "rounded": False}
    yield Row("linear_logprob", "logprob", "forward", bound=OFF_HEAD_LOGPROB, **statistics)
    yield Row("linear_logprob", "lse", "forward", bound=OFF_HEAD_LOGPROB, **statistics)
    yield Row("linear_logprob", "entropy", "forward", bound=_OFF_HEAD_ENTROPY, **statistics)
    yield Row("linear_logprob", "sum_p_sq", "forward", bound=_OFF_HEAD_SUM_P_SQ, **statistics)
    yield Row("linear_logprob", "dlogits of one row", "backward", "softmax statistics", bound=_OFF_HEAD_DLOGITS, **head)
    by_units = head | {"bound": _carried(FMA), "unit_bound": _carried(UNIT)}
    yield Row("linear_logprob", "dhidden", "backward", "matrix product", keeps=NO_SHARDS, **by_units)
    yield Row("linear_logprob", "dweight", "backward", "token sum", keeps=TOKEN_SUM, **by_units)
    in_one_call = tuple(name for name in TOKEN_SUM if name != "chunks")
    yield Row("linear_logprob", "dlora_b", "backward", "token sum", keeps=in_one_call, **by_units)
    yield Row("linear_logprob", "dlora_a", "backward", "token sum", keeps=("layout", "padding", "runs"), **by_units)
    yield Row("linear_logprob", "dbias", "backward", "token sum", bound=_carried(GROUPS), keeps=TOKEN_SUM, **head)


add_rows(_contract_rows())
