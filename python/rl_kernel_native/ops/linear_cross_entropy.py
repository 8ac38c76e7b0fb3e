"""Cross-entropy from hidden states, for fine-tuning: linear_logprob's log-probabilities and sequence_logprob's sum."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, Literal, overload

import numpy as np

from .. import _check, _cures, _dispatch
from .._metrics import is_divisor
from .._token_weight import checked
from .._types import AnyArray, ArrayT, DType, Exp, Generic, Group, NamedTuple, OnBadId
from ..contract import ONE_ARCHITECTURE, Bound, Row, U, add_rows
from ..reference.linear_logprob import linear_cross_entropy_reference
from .linear import tree_sum
from .linear_logprob import LARGEST, _torch, head_rows, scored_target
from .logprob import LOGPROB, LSE
from .sequence_logprob import sequence_logprob

__all__ = ["CrossEntropy", "CrossEntropyAccuracy", "linear_cross_entropy", "linear_cross_entropy_reference"]


class CrossEntropy(NamedTuple, Generic[ArrayT]):
    """The ``loss``, and the part of it that is the ``z_loss``: ``z_loss * lse**2`` reduced like the loss, without a
    gradient."""

    loss: ArrayT
    z_loss: ArrayT


class CrossEntropyAccuracy(NamedTuple, Generic[ArrayT]):
    """The ``loss``, the ``token_accuracy``, and with ``return_z_loss`` the z-loss. A row counts 1 in ``token_accuracy``
    if its target has the largest logit and the lowest id among equal logits. Token accuracy and z-loss have no
    gradient."""

    loss: ArrayT
    token_accuracy: ArrayT
    z_loss: ArrayT | Any = None


@overload
def linear_cross_entropy(
    hidden: ArrayT, weight: AnyArray, target: AnyArray, *, reduction: Literal["mean", "sum", "none"] = ...,
    label_smoothing: float = ..., z_loss: float = ..., denominator: float | AnyArray | None = ...,
    cu_seqlens: AnyArray | None = ..., bias: AnyArray | None = ...,
    temperature: float | AnyArray = ..., softcap: float | None = ..., logit_scale: float
    = ..., logits_dtype: DType = ..., ignore_index: int = ..., valid_vocab: int | None = ..., canonical_vocab:
    int | None = ..., check: bool = ..., on_bad_id: OnBadId = ..., exp: Exp = ..., loss_mask: AnyArray | None =
    ..., token_weight: AnyArray | None = ..., lora_a: AnyArray | None = ..., lora_b: AnyArray | None = ...,
    lora_scale: float = ..., weight_grad: bool = ..., main_grad: AnyArray | None = ...,
    workspace_bytes: int | None = ..., process_group: Group = ..., vocab_start: int = ...,
    vocab_size: int | None = ..., dh_segments: int = ...,
    return_z_loss: Literal[False] = ..., return_token_accuracy: Literal[False] = ...,
) -> ArrayT: ...  # fmt: skip


@overload
def linear_cross_entropy(
    hidden: ArrayT, weight: AnyArray, target: AnyArray, *, reduction: Literal["mean", "sum", "none"] = ...,
    label_smoothing: float = ..., z_loss: float = ..., denominator: float | AnyArray | None = ...,
    cu_seqlens: AnyArray | None = ..., bias: AnyArray | None = ...,
    temperature: float | AnyArray = ..., softcap: float | None = ..., logit_scale: float
    = ..., logits_dtype: DType = ..., ignore_index: int = ..., valid_vocab: int | None = ..., canonical_vocab:
    int | None = ..., check: bool = ..., on_bad_id: OnBadId = ..., exp: Exp = ..., loss_mask: AnyArray | None =
    ..., token_weight: AnyArray | None = ..., lora_a: AnyArray | None = ..., lora_b: AnyArray | None = ...,
    lora_scale: float = ..., weight_grad: bool = ..., main_grad: AnyArray | None = ...,
    workspace_bytes: int | None = ..., process_group: Group = ..., vocab_start: int = ...,
    vocab_size: int | None = ..., dh_segments: int = ...,
    return_z_loss: Literal[True], return_token_accuracy: Literal[False] = ...,
) -> CrossEntropy[ArrayT]: ...  # fmt: skip


@overload
def linear_cross_entropy(
    hidden: ArrayT, weight: AnyArray, target: AnyArray, *, reduction: Literal["mean", "sum", "none"] = ...,
    label_smoothing: float = ..., z_loss: float = ..., denominator: float | AnyArray | None = ...,
    cu_seqlens: AnyArray | None = ..., bias: AnyArray | None = ...,
    temperature: float | AnyArray = ..., softcap: float | None = ..., logit_scale: float
    = ..., logits_dtype: DType = ..., ignore_index: int = ..., valid_vocab: int | None = ..., canonical_vocab:
    int | None = ..., check: bool = ..., on_bad_id: OnBadId = ..., exp: Exp = ..., loss_mask: AnyArray | None =
    ..., token_weight: AnyArray | None = ..., lora_a: AnyArray | None = ..., lora_b: AnyArray | None = ...,
    lora_scale: float = ..., weight_grad: bool = ..., main_grad: AnyArray | None = ...,
    workspace_bytes: int | None = ..., process_group: Group = ..., vocab_start: int = ...,
    vocab_size: int | None = ..., dh_segments: int = ...,
    return_z_loss: bool = ..., return_token_accuracy: Literal[True],
) -> CrossEntropyAccuracy[ArrayT]: ...  # fmt: skip


def linear_cross_entropy(
    hidden: ArrayT,
    weight: AnyArray,
    target: AnyArray,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    denominator: float | AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    bias: AnyArray | None = None,
    temperature: float | AnyArray = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: DType = "float32",
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    canonical_vocab: int | None = None,
    check: bool = False,
    on_bad_id: OnBadId = "nan",
    exp: Exp = None,
    loss_mask: AnyArray | None = None,
    token_weight: AnyArray | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    lora_a: AnyArray | None = None,
    lora_b: AnyArray | None = None,
    lora_scale: float = 1.0,
    weight_grad: bool = True,
    main_grad: AnyArray | None = None,
    workspace_bytes: int | None = None,
    process_group: Group = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    dh_segments: int = 1,
) -> Any:
    """Cross-entropy of an LM head, without all logits in memory at a time. The loss of a scored row is ``z_loss *
    lse**2 - logprob``. Rows are summed over each sequence as in :func:`sequence_logprob`, then over sequences; the sum
    is divided by ``denominator``. Differentiable (torch).

    The loss has the same bits padded and packed, and with any padding on the right. With a given ``denominator``, a
    row's gradients have the same bits for any split of the rows into micro-batches and ranks. ``main_grad`` has the
    same bits if every micro-batch except the last has a multiple of 8192 rows.

    With a ``token_weight`` w, a row's loss is multiplied by w, and the mean divides by the sum of w over the scored
    rows. Under ``label_smoothing`` e, a row's loss is ``(1 - e) * (lse - z_target) + e * (lse - mean(z)) + z_loss *
    lse**2``. Here z are the row's logits after scale, softcap and temperature, and the mean is over its ``valid_vocab``
    columns.

    Args:
        hidden, weight, target and the other options: as for :func:`linear_logprob`. The last dimension of ``target``
        counts positions; the dimensions before it count sequences.
        reduction: ``"mean"`` divides the sum by ``denominator``, or by the number of scored rows; ``"sum"`` returns the
            sum; ``"none"`` returns each row's loss. A row is scored if its target is not ``ignore_index`` and
            ``loss_mask`` includes it.
        label_smoothing: a number in [0, 1), as in ``torch.nn.functional.cross_entropy``. With smoothing, a logit of
            -Inf makes the loss of its row infinite, and forward keeps some rows of the logits in the workspace and
            reads them twice.
        z_loss: a number >= 0.
        denominator: the divisor of the sum for ``"mean"``, such as the number of scored rows of the whole batch. The
            divisor is a number > 0, or an array of one element on the device, float32, int32 or int64. An element of 0
            gives loss 0 and gradients 0; a negative, subnormal, infinite or NaN element gives NaN
            (:class:`DenominatorStatus`). None: the number of scored rows of this call, at least 1.
        cu_seqlens: int32 or int64 ``[num_sequences + 1]``, the offsets of packed sequences in a one-dimensional
            ``target``; tokens after the last sequence do not count, and their rows may hold any value.
        token_weight: float32, with the shape of ``target``; rows that are not scored may hold any value. No gradient.
            Use this argument for fractional masks, because ``loss_mask`` counts every nonzero value as 1. The default
            divisor is the sum of the weights. Like a ``denominator`` on the device, a sum of 0 gives loss 0, and a
            negative, subnormal, infinite or NaN sum gives NaN. A weight of 0 removes a row whose loss is infinite, but
            not a row whose loss is NaN.
        return_z_loss: return a :class:`CrossEntropy`, so that the z-loss can be logged; ``z_loss`` must not be 0.
        return_token_accuracy: return a :class:`CrossEntropyAccuracy`. A row counts 1 if its target has the largest
            logit (the lowest id among equal largest logits), else 0; a row with a NaN or an infinity counts 0.
            ``"mean"`` gives the share of the scored rows that count 1, with ``denominator`` and ``token_weight`` as for
            the loss. ``weight`` may have at most 2^19 rows, and no ``process_group`` is allowed. For the accuracy,
            forward keeps some rows of the logits in the workspace and reads them twice.
    Returns: float32, in nats: a scalar, or ``[...]`` with ``"none"``. Rows that are not scored have loss 0, and a call
        without scored rows has loss 0. A bad row (:class:`LogprobStatus`) makes the loss NaN.
    Raises: as :func:`linear_logprob`.
    Source: docs/numerics.md, rules 9 and 10; z-loss: Chowdhery et al. 2022, arXiv:2204.02311, section 5.

    Example:
        >>> hidden, head = torch.eye(2, 4), torch.arange(12.0).view(3, 4) / 4
        >>> rk.linear_cross_entropy(hidden, head, torch.tensor([2, 0]))
        tensor(1.4076)
    """
    _check.one_of("reduction", reduction, ("mean", "sum", "none"))
    ignore_index = _check.integer("ignore_index", ignore_index)  # checked here, because rows are compared with it below
    label_smoothing = _check.single("label_smoothing", label_smoothing, lambda x: 0 <= x < 1, "a number in [0, 1)")
    z_loss = _check.single("z_loss", z_loss, lambda x: 0 <= x < math.inf, "a finite number >= 0")
    if denominator is not None and reduction != "mean":
        raise ValueError(
            f'denominator: expected None with reduction="{reduction}", which divides by nothing, got '
            f"{_check.shown(denominator)}"
        )
    if cu_seqlens is not None and reduction == "none":
        raise ValueError('cu_seqlens: expected None with reduction="none", which sums nothing')
    if _check.flag("return_z_loss", return_z_loss) and not z_loss:
        raise ValueError("return_z_loss: expected False with z_loss=0, which there is nothing of, got True")
    wanted = LOGPROB | LSE
    if _check.flag("return_token_accuracy", return_token_accuracy):
        if process_group is not None:
            raise ValueError(
                "return_token_accuracy: expected False with a process_group, whose ranks exchange no ids, got True"
            )
        wanted |= LARGEST
    if _dispatch.is_array(target) and not _dispatch.is_tensor(target):
        _dispatch.namespace(target, "target")
    if loss_mask is not None:
        target = scored_target(target, loss_mask, ignore_index)
    if cu_seqlens is not None:
        target = _in_sequences(target, cu_seqlens, ignore_index)
    rows_meet = token_weight is not None or wanted & LARGEST
    if rows_meet and _dispatch.is_tensor(target) and _dispatch.is_array(hidden) and not _dispatch.is_tensor(hidden):
        raise TypeError(f"target: expected an array of the framework of hidden, {type(hidden).__name__}, got Tensor")
    scored = None if token_weight is None else _scored(token_weight, target, ignore_index)
    found: Any = head_rows(
        hidden, weight, target, wanted, bias, temperature, softcap, logit_scale, logits_dtype, ignore_index,
        valid_vocab, canonical_vocab, None, check, on_bad_id, exp, None, lora_a, lora_b, lora_scale, weight_grad,
        main_grad, workspace_bytes, process_group, vocab_start, vocab_size, dh_segments, label_smoothing,
    )  # fmt: skip
    hits: Any = None
    if wanted & LARGEST:
        found, largest = found
        # In a bad row, `largest` is -1. A bad target may also be -1, so equality alone is no hit.
        is_hit = (largest == target) & (largest >= 0) & (target != ignore_index)
        hits = is_hit.to(found.lse.dtype) if _dispatch.is_tensor(is_hit) else is_hit.astype("float32")
    shape = tuple(found.logprob.shape)
    if cu_seqlens is not None and len(shape) != 1:
        raise ValueError(f"target: expected shape [num_tokens] beside cu_seqlens, got {list(shape)}")
    if cu_seqlens is None:
        shape = (math.prod(shape[:-1]), shape[-1] if shape else 1)
    losses: Any = 0.0 - found.logprob
    squares: Any = None
    if z_loss:
        lse = found.lse
        # The operator `tree_sum` adds, because a compiler could fuse `+` with the product into one multiply-add.
        squares = (lse.square() if _dispatch.is_tensor(lse) else lse * lse) * z_loss
        losses = tree_sum([squares, losses])
    reduce = functools.partial(_reduced, reduction, shape, target != ignore_index, cu_seqlens)
    divisor = denominator
    if scored is not None:
        losses, squares, hits = (_weighted(rows, scored) for rows in (losses, squares, hits))
        if reduction == "mean" and denominator is None:
            divisor = _reduced("sum", shape, target != ignore_index, cu_seqlens, None, scored)
    loss = reduce(divisor, losses)
    z: Any = None
    if return_z_loss:
        assert squares is not None  # a nonzero z_loss was required above
        z = reduce(divisor, squares.detach() if _dispatch.is_tensor(squares) else squares)
    if hits is not None:
        return CrossEntropyAccuracy(loss, reduce(divisor, hits), z)
    return loss if z is None else CrossEntropy(loss, z)


def _reduced(reduction: str, shape: Any, scored: Any, cu_seqlens: Any, denominator: Any, rows: Any) -> Any:
    """Sums the rows over each sequence, then over sequences. With "mean", divides the total by ``denominator``, or by
    the number of scored rows. With "none", returns the rows themselves."""
    if reduction == "none":
        return rows
    sums, counts = sequence_logprob(rows.reshape(shape), scored.reshape(shape), cu_seqlens)
    # The code reads shape[0], because len() would turn the symbolic size of a trace into a number.
    total = _scalar(sums if sums.shape[0] == 1 else sequence_logprob(sums.reshape(1, -1)).sum)
    return total if reduction == "sum" else _mean(total, denominator, counts)


def _scored(token_weight: Any, target: Any, ignore_index: int) -> Any:
    """Returns the weights of rows, with 0 for a row that is not scored, because its weight may hold any value."""
    token_weight = checked(token_weight, target, "target")
    if not _dispatch.is_array(target):
        return None  # `head_rows` raises the error about target
    if not _dispatch.is_tensor(target):
        xp = _dispatch.namespace(target, "target")
        return xp.where(target != ignore_index, token_weight, xp.zeros_like(token_weight))
    _torch().require_tensors(target=target, token_weight=token_weight)
    return token_weight.masked_fill(target == ignore_index, 0.0)


def _in_sequences(target: Any, cu_seqlens: Any, ignore_index: Any) -> Any:
    """Returns the target with ``ignore_index`` after the last sequence, because rows there may hold any value. If such
    a row were scored, zero times its NaN would enter the gradient of the weight. Bad offsets pass here: later
    :func:`sequence_logprob` refuses them with an error that names them."""
    if type(cu_seqlens) is not type(target) or len(_check.shape_of(cu_seqlens)) != 1 or not cu_seqlens.shape[0]:
        return target
    if len(_check.shape_of(target)) != 1 or str(cu_seqlens.dtype).removeprefix("torch.") not in ("int32", "int64"):
        return target
    if _dispatch.is_tensor(target):
        counts = _torch().before(target, cu_seqlens)
    else:
        counts = _dispatch.namespace(target, "target").arange(target.shape[0]) < cu_seqlens[-1]
    return target if counts is None else scored_target(target, counts, ignore_index)


def _weighted(rows: Any, weights: Any) -> Any:
    """Multiplies rows by their weights. As in the other losses, a weight of 0 turns an infinite row into 0, but a NaN
    stays NaN."""
    if rows is None:
        return None
    if _dispatch.is_tensor(rows):
        return rows.masked_fill((weights == 0) & rows.isinf(), 0.0) * weights
    xp = _dispatch.namespace(rows, "token_weight")
    return xp.where((weights == 0) & xp.isinf(rows), xp.zeros_like(rows), rows) * weights


def _scalar(one: Any) -> Any:
    """Returns the element as a new array instead of a view of an operator's output. An in-place change of a view would
    drop the hooks that FSDP2 sets."""
    return one.sum() if _dispatch.is_tensor(one) else one.reshape(())


def _mean(total: Any, denominator: Any, counts: Any) -> Any:
    """Divides the sum by its divisor. The result is 0 if the divisor is 0, and NaN if the divisor is negative,
    subnormal, infinite or NaN. Nothing waits for a device."""
    divisor = _divisor(denominator, total, counts)
    if denominator is None or _check.is_number(denominator):
        return total / divisor
    nothing, sound = divisor == 0, is_divisor(divisor)
    # 0 and NaN replace operands before the division. A selection afterwards would let the gradient pass through the
    # quotient that is not chosen.
    if _dispatch.is_tensor(total):
        return total.masked_fill(nothing, 0.0) / divisor.masked_fill(~sound, math.nan).masked_fill(nothing, 1.0)
    xp = getattr(total, "__array_namespace__", lambda: np)()
    quotient = xp.where(nothing, 0.0, total) / xp.where(nothing, 1.0, xp.where(sound, divisor, math.nan))
    return quotient.astype("float32")


def _divisor(denominator: Any, total: Any, counts: Any) -> Any:
    """Returns the divisor in float32 on the device. If the divisor were on the host, torch on a GPU would multiply by
    its inverse, which gives other bits."""
    array, number = _check.denominator(denominator)
    if _dispatch.is_tensor(total):
        if denominator is None:
            return counts.sum().clamp(min=1).to(total.dtype)
        if array is None:
            return total.new_full((), number)
        return _of_device(array, total)
    if denominator is None:
        return counts.sum().clip(1).astype("float32")
    if array is None:
        return np.float32(number)
    return _one_element(array, "float32", "int32", "int64").reshape(()).astype("float32")


def _of_device(denominator: Any, like: Any) -> Any:
    if not _dispatch.is_tensor(denominator):
        raise TypeError(f"denominator: expected a number or a torch.Tensor, got {type(denominator).__name__}")
    _torch().require_tensors(denominator=denominator)
    if denominator.requires_grad:
        raise ValueError("denominator: has no gradient here; pass denominator.detach()")
    if denominator.device != like.device:
        raise ValueError(f"denominator: expected device {like.device}, got {denominator.device}")
    return _one_element(denominator, "torch.float32", "torch.int32", "torch.int64").reshape(()).to(like.dtype)


def _one_element(denominator: Any, *dtypes: str) -> Any:
    if not hasattr(denominator, "shape") or not hasattr(denominator, "dtype"):
        raise TypeError(f"denominator: expected a number or an array, got {type(denominator).__name__}")
    if str(denominator.dtype) not in dtypes:
        dtype = str(denominator.dtype).removeprefix("torch.")
        raise _cures.type_error("denominator", denominator, f"expected dtype float32, int32 or int64, got {dtype}")
    if tuple(denominator.shape) not in ((), (1,)):
        raise ValueError(f"denominator: expected one element, got shape {list(denominator.shape)}")
    return denominator


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_CROSS_ENTROPY = Bound(
    lambda terms, scale, carried: carried + (34 + terms / 1024) * U * scale + 1e-30,
    "carried + (34 + terms / 1024) * u * scale + 1e-30",
    "the errors of log-probabilities, summed; sums of a sequence and of sequences, two products, a sum and a quotient",
)


def _contract_rows() -> Iterator[Row]:
    loss: dict[str, Any] = {"kind": "composed", "rounded": False, "keeps": ("layout", "shards", "runs")}
    yield Row(  # one sum of all rows
        "linear_cross_entropy", "loss", "forward", backends=ONE_ARCHITECTURE, bound=_OFF_CROSS_ENTROPY,
        stem="linear_logprob", **loss,
    )  # fmt: skip


add_rows(_contract_rows())
