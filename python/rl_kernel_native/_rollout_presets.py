"""Corrections for an engine whose log-probabilities differ from the trainer's: the corrections of RL frameworks, under
the frameworks' configuration names. This module is a part of ``presets``."""

from __future__ import annotations

import math
from typing import Any

from . import _check
from .ops.importance_weights import CRITERIA

__all__ = ["slime_mis", "verl_rollout_correction"]


def _positive(name: str, value: Any) -> float:
    x = _check.number(name, value)
    if not 0 < x < math.inf:
        raise ValueError(f"{name}: expected a finite number > 0, got {_check.shown(value)}")
    return x


def _numbers(name: str, text: Any, most: int) -> list[float]:
    """The positive numbers in a text "lower_upper", or one number."""
    try:
        parts = [float(x) for x in str(text).split("_")]
    except ValueError:
        parts = []
    if isinstance(text, (bool, list, tuple)) or not 1 <= len(parts) <= most:
        expected = 'a number or "lower_upper"' if most == 2 else "a number"
        raise ValueError(f"{name}: expected {expected}, got {_check.shown(text)}")
    if not (all(0 < x < math.inf for x in parts) and parts == sorted(parts)):
        raise ValueError(f"{name}: expected finite numbers > 0{', ascending' * (most == 2)}, got {_check.shown(text)}")
    return parts


def is_threshold(value: Any) -> list[float]:
    """verl's ``rollout_is_threshold``: the upper bound, or the lower and the upper bound."""
    return _numbers("rollout_is_threshold", value, 2)


def is_bounds(value: Any) -> tuple[float, float]:
    """OpenRLHF's ``is_correction_threshold``."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"is_correction_threshold: expected two numbers, got {_check.shown(value)}")
    low, high = (_check.number("is_correction_threshold", x) for x in value)
    if not low <= high:
        raise ValueError(f"is_correction_threshold: expected ascending numbers, got {_check.shown(value)}")
    return low, high


def verl_rollout_correction(
    *,
    rollout_is: str | None = "sequence",
    rollout_is_threshold: float | str | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> dict[str, Any]:
    """verl's ``algorithm.rollout_correction`` as arguments of :func:`importance_weights` (verl 0.9.1:
    verl/trainer/ppo/rollout_corr_helper.py).

    Pass the weights as ``policy_loss(importance_weight=...)`` with ``presets.verl(rollout_is="given")``, and the
    returned mask as the loss's ``mask``. If ``rollout_is`` or ``rollout_is_threshold`` is None, verl has no weights:
    use only the mask, and a spec without ``rollout_is``. In verl's bypass mode, the rollout policy takes the place of
    the old policy, so weights and ratio use the current policy's ``logprob``. Then use
    ``presets.verl(loss_mode="reinforce")``, or the clipped loss with ``old_logprob=rollout_logprob``.
    ``rollout_is_batch_normalize`` divides by the mean over this call; verl takes the mean over all ranks.

    Args: named as in verl's configuration. ``rollout_rs`` may list several criteria, ``"token_k1,seq_mean_k3"``;
        ``rollout_rs_threshold`` then has one value for each criterion, as in ``"0.5_2.0,0.01"``, or one value for all.
    Returns: keyword arguments.
    Raises: ValueError for a value that verl does not know.
    Source: docs/objectives/rollout_correction.md.
    Example:
        >>> rk.presets.verl_rollout_correction(rollout_is="token")
        {'level': 'token', 'upper': 2.0, 'normalize': False}
    """
    if not _check.is_choice(rollout_is, (None, "token", "sequence")):
        raise ValueError(f"rollout_is: expected 'token', 'sequence' or None, got {_check.shown(rollout_is)}")
    if not isinstance(rollout_is_batch_normalize, bool):
        raise TypeError(f"rollout_is_batch_normalize: expected a bool, got {type(rollout_is_batch_normalize).__name__}")
    options: dict[str, Any] = {"upper": math.inf}
    if rollout_is is not None and rollout_is_threshold is not None:
        *low, high = is_threshold(rollout_is_threshold)
        options = {"level": rollout_is, "upper": high, "normalize": rollout_is_batch_normalize}
        if low:
            options |= {"mode": "mask", "lower": low[0]}
    if rollout_rs is None:
        return options
    if not isinstance(rollout_rs, str):
        raise TypeError(f"rollout_rs: expected a str of criteria, got {type(rollout_rs).__name__}")
    names = list(dict.fromkeys(part.strip() for part in rollout_rs.split(",") if part.strip()))
    unknown = [name for name in names if name not in CRITERIA]
    if unknown or not names:
        raise ValueError(f"rollout_rs: expected one or more of {', '.join(CRITERIA)}, got {_check.shown(rollout_rs)}")
    if rollout_rs_threshold is None:
        raise ValueError("rollout_rs_threshold: expected a threshold beside rollout_rs, got None")
    if isinstance(rollout_rs_threshold, (bool, list, tuple)):
        got = _check.shown(rollout_rs_threshold)
        raise TypeError(f'rollout_rs_threshold: expected a number or "first,second", got {got}')
    texts = [part.strip() for part in str(rollout_rs_threshold).split(",") if part.strip()]
    if len(texts) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs_threshold: expected one threshold, or one for each of {len(names)} criteria, got {len(texts)}"
        )
    texts = texts * (len(names) // len(texts))
    rejection = {}
    for name, text in zip(names, texts, strict=True):
        found = _numbers("rollout_rs_threshold", text, 2 if name.endswith("k1") else 1)
        rejection[name] = tuple(found) if len(found) == 2 else found[0]
    return options | {"rejection": rejection}


def slime_mis(
    *,
    mis_level: str = "token",
    mis_mode: str = "truncate",
    mis_upper_bound: float = 2.0,
    mis_lower_bound: float | None = None,
    mis_veto_threshold: float | None = None,
    mis_batch_normalize: bool = False,
) -> dict[str, Any]:
    """MIS (masked importance sampling) of slime and vime as arguments of :func:`importance_weights` (slime 2026-08:
    examples/train_infer_mismatch_helper/mis.py).

    Pass the weights as ``policy_loss(importance_weight=...)`` with ``importance="given"``, and the returned mask as the
    loss's ``mask``. Mode ``"mask"`` removes tokens from the loss and leaves the weights unchanged.

    Args: named as in slime's mis.yaml; a ``mis_lower_bound`` of None means ``1 / mis_upper_bound``, as slime intends.
    Returns: keyword arguments.
    Raises: ValueError for a value that slime does not know.
    Source: docs/objectives/rollout_correction.md.
    Example:
        >>> logprob, rollout = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -2.5]])
        >>> rk.importance_weights(logprob, rollout, **rk.presets.slime_mis()).weights
        tensor([[1.0000, 1.6487]])
    """
    criteria = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
    if not _check.is_choice(mis_level, criteria):
        raise ValueError(f"mis_level: expected {', '.join(map(repr, criteria))}, got {_check.shown(mis_level)}")
    if not _check.is_choice(mis_mode, ("truncate", "clip", "mask")):
        raise ValueError(f"mis_mode: expected 'truncate', 'clip', 'mask', got {_check.shown(mis_mode)}")
    high = _positive("mis_upper_bound", mis_upper_bound)
    low = 1.0 / high if mis_lower_bound is None else _positive("mis_lower_bound", mis_lower_bound)
    if mis_mode != "truncate" and not low < high:
        raise ValueError(f"mis_lower_bound: expected a number below mis_upper_bound = {high:g}, got {low:g}")
    options: dict[str, Any] = {"level": mis_level, "normalize": mis_batch_normalize, "veto": mis_veto_threshold}
    if mis_mode == "mask":  # k1 is minus the log-ratio
        return options | {"upper": math.inf, "rejection": {criteria[mis_level]: (1.0 / high, 1.0 / low)}}
    return options | {"mode": mis_mode, "upper": high} | ({"lower": low} if mis_mode == "clip" else {})
