"""float64 reference of linear_logprob in NumPy, written from the formulas alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from .linear import linear_reference
from .logprob import logprob_reference, scaled_logits


def linear_logprob_reference(
    hidden: Any,
    weight: Any,
    target: Any,
    *,
    bias: Any = None,
    ignore_index: int = -100,
    loss_mask: Any = None,
    lora_a: Any = None,
    lora_b: Any = None,
    lora_scale: float = 1.0,
    **options: Any,
) -> dict[str, np.ndarray]:
    """:func:`logprob_reference` applied to the unrounded logits of :func:`linear_reference`.

    Args: hidden: ``[..., in_features]``; weight: ``[vocab_size, in_features]``; loss_mask: ``[...]``, zero where
        a row is ignored; lora_a, lora_b: ``[rank, in_features]`` and ``[vocab_size, rank]``, or None; target,
        ``options``: as for :func:`logprob_reference`; NumPy arrays in any float dtype. With LoRA the weight is
        ``weight + lora_scale * lora_b @ lora_a``. Ignored rows of ``hidden`` are not read.
    Returns: as :func:`logprob_reference`.
    """
    if loss_mask is not None:
        target = np.where(np.asarray(loss_mask) != 0, target, ignore_index)
    logits = _logits(hidden, weight, target, bias, ignore_index, lora_a, lora_b, lora_scale)
    return logprob_reference(logits, target, ignore_index=ignore_index, **options)


def _logits(
    hidden: Any, weight: Any, target: Any, bias: Any, ignore_index: int, lora_a: Any, lora_b: Any, lora_scale: float
) -> np.ndarray:
    rows = np.where((np.asarray(target) == ignore_index)[..., None], 0.0, np.asarray(hidden).astype(np.float64))
    if (lora_a is None) != (lora_b is None):
        raise ValueError("lora_a, lora_b: expected both or neither")
    if lora_a is not None:
        a, b = (np.asarray(factor).astype(np.float64) for factor in (lora_a, lora_b))
        weight = np.asarray(weight).astype(np.float64) + lora_scale * (b @ a)
    logits: np.ndarray = linear_reference(rows, weight, bias)["y"]
    return logits


def linear_cross_entropy_reference(
    hidden: Any,
    weight: Any,
    target: Any,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    denominator: Any = None,
    ignore_index: int = -100,
    loss_mask: Any = None,
    token_weight: Any = None,
    bias: Any = None,
    lora_a: Any = None,
    lora_b: Any = None,
    lora_scale: float = 1.0,
    **options: Any,
) -> dict[str, np.ndarray]:
    """``z_loss * lse**2 - logprob``, times ``token_weight``, reduced over the scored rows of
    :func:`linear_logprob_reference`. Under ``label_smoothing`` e, -logprob is
    ``(1 - e) * (lse - z_target) + e * (lse - mean(z))``.

    Args: as for :func:`linear_cross_entropy` and :func:`linear_logprob_reference`.
    Returns: ``loss``, ``z_loss``, ``token_accuracy``, and the numbers for their error bounds. These numbers are
        ``scale`` (the reduction of absolute values), ``lse`` and ``max_abs_z`` of each row, ``scored``, and
        ``divisor``.
    """
    scored = np.asarray(target) != ignore_index
    if loss_mask is not None:
        scored = scored & (np.asarray(loss_mask) != 0)
    target = np.where(scored, target, ignore_index)
    logits = _logits(hidden, weight, target, bias, ignore_index, lora_a, lora_b, lora_scale)
    of = logprob_reference(logits, target, ignore_index=ignore_index, **options)
    valid = logits[..., : options.get("valid_vocab")]
    logprob = of["logprob"]
    if label_smoothing:
        temperature = np.asarray(options.get("temperature", 1.0), np.float64)[..., None]
        scale, softcap = options.get("logit_scale", 1.0), options.get("softcap")
        mean = scaled_logits(valid, scale, softcap, temperature).mean(-1)
        logprob = (1 - label_smoothing) * logprob + label_smoothing * (mean - of["lse"])
    hits = (valid.argmax(-1) == target) & np.isfinite(valid.max(-1))
    given = 1.0 if token_weight is None else np.asarray(token_weight, np.float64)
    squares, each = z_loss * of["lse"] ** 2, np.where(scored, given, 0.0)
    # A weight of 0 turns an infinite term into 0.
    terms = (np.where((each == 0) & np.isinf(x), 0.0, x) for x in (squares - logprob, squares, hits))
    losses, squares, hits = (np.where(scored, x * each, 0.0) for x in terms)
    divisor = 1.0
    if reduction == "mean":
        counted = max(scored.sum(), 1) if token_weight is None else each.sum() or 1.0
        divisor = float(counted if denominator is None else denominator)
    loss, z, accuracy = ((x if reduction == "none" else x.sum() / divisor) for x in (losses, squares, hits))
    scale = abs(losses) if reduction == "none" else abs(losses).sum() / divisor
    rows = {name: of[name] for name in ("lse", "max_abs_z")} | {"scored": scored}
    found = {"loss": loss, "z_loss": z, "token_accuracy": accuracy, "scale": scale}
    return {**found, "divisor": np.float64(divisor), **rows}
