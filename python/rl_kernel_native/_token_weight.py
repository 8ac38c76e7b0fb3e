"""``token_weight`` of losses: the factor of each token's terms, and the divisor of their mean."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _check, _cures, _dispatch
from ._metrics import is_divisor


def checked(token_weight: Any, like: Any, name: str) -> Any:
    """Checks that token_weight is a constant with the shape, framework and device of ``like``. ``name`` is the name of
    ``like`` in errors."""
    if not _dispatch.is_array(like):
        return token_weight  # the caller raises an error about `like`
    if _dispatch.is_tensor(like) != _dispatch.is_tensor(token_weight) or not _dispatch.is_array(token_weight):
        raise TypeError(
            f"token_weight: expected an array of the framework of {name}, got {type(token_weight).__name__}"
        )
    if not _dispatch.is_tensor(like):
        _dispatch.namespace(like, name)
        _dispatch.namespace(token_weight, "token_weight")
    if str(token_weight.dtype).removeprefix("torch.") != "float32":
        dtype = str(token_weight.dtype).removeprefix("torch.")
        raise _cures.type_error("token_weight", token_weight, f"expected dtype float32, got {dtype}")
    shape, wanted = _check.shape_of(token_weight), _check.shape_of(like)
    if tuple(shape) != tuple(wanted):
        raise ValueError(f"token_weight: expected shape {list(wanted)} (that of {name}), got {list(shape)}")
    if _dispatch.is_tensor(like) and token_weight.requires_grad:
        raise ValueError("token_weight: has no gradient here; pass token_weight.detach()")
    if _dispatch.is_tensor(like) and token_weight.device != like.device:
        raise ValueError(f"token_weight: expected device {like.device}, got {token_weight.device}")
    return token_weight


def weighed(
    token_weight: Any, like: Any, name: str, mask: Any, cu_seqlens: Any, counts_tokens: bool, mean: bool
) -> tuple[Any, Any]:
    """The weights, and the sum of the batch's weights in the order of rule 10 (docs/numerics.md) if
    ``counts_tokens``, else None. With
    ``mean``, each weight is multiplied by the number of tokens of its sequence and divided by the sum of the sequence's
    weights."""
    from .ops.sequence_logprob import sequence_logprob

    weight = checked(token_weight, like, name)
    if not (counts_tokens or mean) or not _dispatch.is_array(like) or len(weight.shape) not in (1, 2):
        return weight, None
    fits = mask is None or not _dispatch.is_array(mask) or _check.shape_of(mask) == tuple(weight.shape)
    if not fits or (cu_seqlens is not None and len(weight.shape) != 1):
        return weight, None  # the loss itself refuses such a weight
    dense: Any = weight  # if the layout is bad, the loss raises an error that names the argument
    if _dispatch.is_tensor(weight):
        dense = weight.contiguous()
    elif isinstance(weight, np.ndarray):
        dense = np.ascontiguousarray(weight)
    sums, counts = sequence_logprob(dense, mask, cu_seqlens)
    if not mean:
        return weight, sequence_logprob(sums.reshape(1, -1)).sum
    xp: Any = _dispatch.torch_module() if _dispatch.is_tensor(weight) else _dispatch.namespace(weight, "token_weight")
    sound = is_divisor(sums)
    share = xp.where(sound, counts / xp.where(sound, sums, 1.0), xp.where(sums == 0, 0.0, xp.nan))
    # xp.asarray would move a tensor to torch's default device.
    share = share.to(xp.float32) if _dispatch.is_tensor(weight) else share.astype(xp.float32)
    if len(weight.shape) == 2:
        return weight * share[:, None], None
    if cu_seqlens is None:
        return weight * share, None
    if _dispatch.is_tensor(cu_seqlens) != _dispatch.is_tensor(weight):
        raise TypeError(
            f"cu_seqlens: expected an array of the framework of token_weight, got {type(cu_seqlens).__name__}"
        )
    if not _dispatch.is_tensor(cu_seqlens):
        _dispatch.namespace(cu_seqlens, "cu_seqlens")
    device = {"device": weight.device} if xp is _dispatch.torch_module() else {}
    places = xp.arange(weight.shape[0], dtype=cu_seqlens.dtype, **device)
    of = xp.searchsorted(cu_seqlens[1:], places, side="right")
    if not share.shape[0]:
        return weight, None
    # Tokens after the last sequence are never read, so they may have any weight.
    return weight * share[xp.where(of < share.shape[0], of, 0)], None
