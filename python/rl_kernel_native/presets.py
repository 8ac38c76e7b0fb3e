"""Objectives of RL frameworks, under the frameworks' own configuration names. Each preset returns a :class:`PolicySpec`
that reproduces the framework's loss and gradients up to float32 rounding. ``verl_rollout_correction`` and ``slime_mis``
return the arguments of :func:`importance_weights`. As in the frameworks, a call ignores arrays that the spec does not
need, and applies no correction without ``rollout_logprob`` (:attr:`PolicySpec.lenient`). The tables are on the pages of
docs/objectives.md."""

from __future__ import annotations

import re
from typing import Any

from . import _check
from ._rollout_presets import is_bounds, is_threshold, slime_mis, verl_rollout_correction
from .ops.policy_spec import PolicySpec

__all__ = [
    "openrlhf",
    "slime",
    "slime_mis",
    "trl",
    "trl_gmpo",
    "trl_rloo",
    "verl",
    "verl_rollout_correction",
    "vime",
]


def _unknown(name: str, value: Any, choices: tuple[str, ...]) -> ValueError:
    return ValueError(f"{name}: expected {', '.join(f'{c!r}' for c in choices)}, got {_check.shown(value)}")


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not _check.is_choice(value, choices):
        raise _unknown(name, value, choices)


def _either(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _spec(names: dict[str, str], **fields: Any) -> PolicySpec:
    """A spec whose errors use the framework's configuration names; ``names`` maps fields to these names."""
    try:
        return PolicySpec(lenient=True, **fields)
    except (TypeError, ValueError) as error:
        text = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
        raise type(error)(text) from None


def _share(gradient_accumulation_steps: int) -> float:
    steps = _check.integer64("gradient_accumulation_steps", gradient_accumulation_steps)
    if steps < 1:
        raise ValueError(f"gradient_accumulation_steps: expected an integer > 0, got {steps}")
    return 1.0 / steps


_VERL_LOSSES = (
    "vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dro", "reinforce", "dppo_tv",
    "dppo_kl",
)  # fmt: skip
_VERL_AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_VERL_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def verl(
    *,
    loss_mode: str = "vanilla",
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    dp_size: int = 1,
    use_kl_loss: bool = False,
    kl_loss_coef: float = 0.001,
    kl_loss_type: str = "low_var_kl",
    entropy_coeff: float = 0.0,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    ppo_kl_coef: float = 0.1,
    dro_beta: float | None = None,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
) -> PolicySpec:
    """verl's actor loss (verl 0.9.1: verl/trainer/ppo/core_algos.py, rollout_corr_helper.py, workers/utils/losses.py).

    Pass verl's ``batch_num_tokens`` (for ``"token-mean"``) or ``global_batch_size`` (for the other aggregations) as
    ``policy_loss(denominator=...)``. With ``rollout_is`` ``"token"`` or ``"sequence"``, the loss computes the weights
    from ``rollout_logprob``. With ``"given"``, pass weights as ``importance_weight``: verl's own
    ``rollout_is_weights``, or weights by :func:`verl_rollout_correction`, which can also normalise over the batch and
    reject tokens. ``loss_mode="reinforce"`` is the loss of verl's bypass mode, whose weights compare the current policy
    with the rollout policy. For clip_cov and kl_cov, pass as ``selected`` the tokens that :func:`covariance_mask`
    selects. For dppo_tv and dppo_kl, pass as ``selected`` the tokens outside the trust region (docs/objectives.md).
    ``clip_ratio``, ``clip_ratio_low`` and ``clip_ratio_high`` are the bounds of this region.

    Args: named as in verl's configuration; ``"seq-mean-token-sum-norm"`` requires ``loss_scale_factor``. If
        ``clip_ratio_low`` or ``clip_ratio_high`` is None, ``clip_ratio`` applies. verl's default configuration sets
        both to 0.2, so in verl ``clip_ratio`` alone changes nothing.
    Returns: a :class:`PolicySpec`.
    Raises: ValueError for a value that verl does not know, or that this library does not support.
    Source: docs/objectives.md.
    Example:
        >>> spec = rk.presets.verl(clip_ratio_high=0.28, use_kl_loss=True, kl_loss_coef=0.01)
        >>> spec.epsilon_high, spec.kl, spec.kl_coef
        (0.28, 'k3', 0.01)
    """
    _choice("loss_mode", loss_mode, _VERL_LOSSES)
    _choice("loss_agg_mode", loss_agg_mode, _VERL_AGGREGATIONS)
    _check.flag("use_kl_loss", use_kl_loss)
    clip_ratio = _check.number("clip_ratio", clip_ratio)
    low, high = _either(clip_ratio_low, clip_ratio), _either(clip_ratio_high, clip_ratio)
    fields: dict[str, Any] = {"aggregation": loss_agg_mode, "dp_size": dp_size, "horizon": loss_scale_factor}
    if loss_agg_mode != "seq-mean-token-sum-norm":
        fields["horizon"] = None
    elif loss_scale_factor is None:
        raise ValueError('loss_scale_factor: expected a number with "seq-mean-token-sum-norm" (verl takes the width of '
                         "the padded responses where it has none), got None")  # fmt: skip
    forced = {"sapo": False, "geo_mean": True}
    if loss_mode in forced:
        if loss_agg_mode != "seq-mean-token-mean" and (use_kl_loss or _check.number("entropy_coeff", entropy_coeff)):
            raise ValueError(
                f'loss_agg_mode: expected "seq-mean-token-mean" with loss_mode="{loss_mode}" and a KL or entropy term: '
                f'the policy term always has it, and one loss has one aggregation, got "{loss_agg_mode}"'
            )
        fields |= {"aggregation": "seq-mean-token-mean", "count_empty": forced[loss_mode], "horizon": None}
        if loss_mode == "geo_mean":
            fields["dp_size"] = 1  # verl's geo_mean loss is a mean without this factor
    bounds = {"epsilon_low": low, "epsilon_high": high}
    # DPPO bounds the ratio only from above. clip_ratio_low and clip_ratio_high bound the divergence, which the caller
    # uses to choose `selected`.
    dppo = {
        "clip": "dppo", "log_ratio_clamp": 20.0, "epsilon_low": None, "epsilon_high": clip_ratio_c,
        "epsilon_absolute": True,
    }  # fmt: skip
    by_mode: dict[str, dict[str, Any]] = {
        "vanilla": {"log_ratio_clamp": 20.0, "dual_clip": clip_ratio_c, **bounds},
        "gspo": {"level": "geometric", "straight_through": True, "log_ratio_clamp": (-float("inf"), 10.0), **bounds},
        "sapo": {"clip": "sapo", "log_ratio_clamp": 20.0, "tau_positive": tau_pos, "tau_negative": tau_neg},
        "gpg": {"clip": "none"},
        "reinforce": {"clip": "none", "importance_of": "current"},
        "clip_cov": {"clip": "clip_cov", **bounds},
        "kl_cov": {"clip": "kl_cov", "selected_kl_coef": ppo_kl_coef},
        "geo_mean": {"clip": "gmpo", "level": "geometric", **bounds},
        "cispo": {"clip": "cispo", "log_ratio_clamp": 20.0, **bounds},
        "dro": {"clip": "dro", "dro_beta": dro_beta},
        **dict.fromkeys(("dppo_tv", "dppo_kl"), dppo),
    }
    fields |= by_mode[loss_mode]
    if rollout_is is not None:
        _choice("rollout_is", rollout_is, ("token", "sequence", "given"))
    if rollout_is == "given":
        fields["importance"] = "given"
    elif rollout_is is not None:
        fields |= {"importance": rollout_is, "importance_clamp": 20.0, **_threshold(rollout_is_threshold)}
    base = kl_loss_type.removesuffix("+") if isinstance(kl_loss_type, str) else kl_loss_type
    if not isinstance(base, str) or base not in _VERL_KL:
        raise _unknown("kl_loss_type", kl_loss_type, (*_VERL_KL, "k1+", "k3+"))
    if use_kl_loss:
        fields |= {"kl": _VERL_KL[base], "kl_coef": kl_loss_coef}
        fields["kl_straight_through"] = kl_loss_type.endswith("+") and fields["kl"] != "k2"
        if fields["kl"] == "k3":
            fields |= {"kl_input_clamp": 20.0, "kl_clamp": 10.0}
    names = {
        "epsilon_low": "clip_ratio" if clip_ratio_low is None else "clip_ratio_low",
        "epsilon_high": "clip_ratio_c" if fields.get("clip") == "dppo"
        else "clip_ratio" if clip_ratio_high is None else "clip_ratio_high",
        "dual_clip": "clip_ratio_c", "aggregation": "loss_agg_mode", "horizon": "loss_scale_factor",
        "tau_positive": "tau_pos", "tau_negative": "tau_neg", "selected_kl_coef": "ppo_kl_coef",
        "kl_coef": "kl_loss_coef", "entropy_coef": "entropy_coeff", "importance_low": "rollout_is_threshold",
        "importance_high": "rollout_is_threshold",
    }  # fmt: skip
    return _spec(names, entropy_coef=entropy_coeff, **fields)


def _threshold(threshold: float | str) -> dict[str, Any]:
    """The importance options for a threshold: a number truncates the weight, and "lower_upper" masks it."""
    *low, high = is_threshold(threshold)
    if not low:
        return {"importance_high": high}
    return {"importance_low": low[0], "importance_high": high, "importance_mode": "mask"}


_TRL_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
_TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def trl(
    *,
    loss_type: str = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    importance_sampling_level: str = "token",
    use_bias_correction_kl: bool = True,
    off_policy_mask_threshold: float | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    use_vllm: bool = False,
    vllm_importance_sampling_correction: bool = True,
    vllm_importance_sampling_mode: str = "sequence_mask",
    vllm_importance_sampling_clip_max: float | None = 3.0,
    vllm_importance_sampling_clip_min: float | None = None,
    entropy_coef: float = 0.0,
    top_entropy_quantile: float = 1.0,
    max_completion_length: int = 512,
    gradient_accumulation_steps: int = 1,
) -> PolicySpec:
    """TRL's GRPO loss (TRL 1.16: trl/trainer/grpo_trainer.py, ``_compute_loss``).

    With ``loss_type`` ``"dapo"``, ``"cispo"`` or ``"vespo"``, pass the divisor as ``policy_loss(denominator=...)``:
    ``num_items_in_batch.clamp(1) / num_processes``, times ``gradient_accumulation_steps / steps_per_generation`` in
    training. With ``use_vllm`` and its correction, the loss reads ``rollout_logprob``. A token that vLLM did not score
    has a NaN there: replace it with ``old_logprob``, as TRL does. A ``top_entropy_quantile`` below 1 needs ``selected=1
    - entropy_mask(entropy, mask, top_quantile=top_entropy_quantile)``, computed over the global batch. With
    ``use_adaptive_entropy``, make a new spec for each coefficient.

    Args: names and defaults are those of TRL's GRPOConfig. ``loss_type="dr_grpo"`` divides by
        ``max_completion_length``, whose default is 512 as in TRL: pass the length of your run.
    Returns: a :class:`PolicySpec`.
    Raises: ValueError for a value that TRL does not know, or that this library does not support.
    Source: docs/objectives.md.
    Example:
        >>> spec = rk.presets.trl(loss_type="dapo", epsilon_high=0.28)
        >>> spec.epsilon_high, spec.aggregation
        (0.28, 'constant')
    """
    _choice("loss_type", loss_type, _TRL_LOSSES)
    _choice("importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    for name, value in (
        ("use_bias_correction_kl", use_bias_correction_kl), ("use_vllm", use_vllm),
        ("vllm_importance_sampling_correction", vllm_importance_sampling_correction),
    ):  # fmt: skip
        _check.flag(name, value)
    high = _either(epsilon_high, _check.number("epsilon", epsilon))
    fields: dict[str, Any] = {"level": "token" if importance_sampling_level == "token" else "geometric"}
    if loss_type == "cispo":
        fields |= {"clip": "cispo", "epsilon_low": None, "epsilon_high": high, "epsilon_absolute": True}
    elif loss_type == "sapo":
        fields |= {"clip": "sapo", "tau_positive": sapo_temperature_pos, "tau_negative": sapo_temperature_neg}
    elif loss_type == "vespo":
        fields |= {
            "clip": "vespo", "level": "sequence", "k_positive": vespo_k_pos,
            "lambda_positive": max(_check.number("vespo_lambda_pos", vespo_lambda_pos), 1e-4),
            "k_negative": vespo_k_neg,
            "lambda_negative": max(_check.number("vespo_lambda_neg", vespo_lambda_neg), 1e-4),
        }  # fmt: skip
    else:
        fields |= {"epsilon_low": epsilon, "epsilon_high": high, "delta": delta}
    if loss_type in ("grpo", "sapo"):
        fields |= {"aggregation": "seq-mean-token-mean", "count_empty": True}
    elif loss_type == "dr_grpo":
        fields |= {
            "aggregation": "seq-mean-token-sum-norm",
            "count_empty": True,
            "horizon": _check.number("max_completion_length", max_completion_length),
        }
    elif loss_type == "luspo":
        fields |= {"aggregation": "seq-mean-token-sum", "count_empty": True}
    else:
        fields["aggregation"] = "token-mean" if loss_type == "bnpo" else "constant"
    share = _share(gradient_accumulation_steps)
    if fields["aggregation"] != "constant":
        fields["scale"] = share
    if _check.number("beta", beta) != 0:
        fields |= {"kl": "k3", "kl_coef": beta, "kl_times_ratio": use_bias_correction_kl}
    if use_vllm and vllm_importance_sampling_correction:
        _choice("vllm_importance_sampling_mode", vllm_importance_sampling_mode, _TRL_MODES)
        level, mode = vllm_importance_sampling_mode.split("_")
        fields |= {
            "importance": level, "importance_mode": mode, "importance_low": vllm_importance_sampling_clip_min,
            "importance_high": vllm_importance_sampling_clip_max,
        }  # fmt: skip
    if not 0 <= _check.number("top_entropy_quantile", top_entropy_quantile) <= 1:
        raise ValueError(f"top_entropy_quantile: expected a number in [0, 1], got {_check.shown(top_entropy_quantile)}")
    if top_entropy_quantile < 1:
        if _check.number("entropy_coef", entropy_coef) != 0:
            raise ValueError(
                f"entropy_coef: expected 0 with top_entropy_quantile={top_entropy_quantile:g}, got {entropy_coef!r}: "
                "TRL's bonus is a mean over the chosen tokens alone, and one call has one mask"
            )
        fields["drop_selected"] = True
    if off_policy_mask_threshold is not None:
        fields |= {"drop_above": off_policy_mask_threshold, "drop_of": "rollout" if use_vllm else "old"}
    names = {
        **_trl_bounds(epsilon_high),
        "tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg", "k_positive": "vespo_k_pos",
        "lambda_positive": "vespo_lambda_pos", "k_negative": "vespo_k_neg", "lambda_negative": "vespo_lambda_neg",
        "horizon": "max_completion_length", "kl_coef": "beta", "kl_times_ratio": "use_bias_correction_kl",
        "importance_low": "vllm_importance_sampling_clip_min", "importance_high": "vllm_importance_sampling_clip_max",
        "drop_above": "off_policy_mask_threshold",
    }  # fmt: skip
    return _spec(names, entropy_coef=entropy_coef, entropy_aggregation="token-mean", entropy_scale=share, **fields)


def _trl_bounds(epsilon_high: Any) -> dict[str, str]:
    return {"epsilon_low": "epsilon", "epsilon_high": "epsilon" if epsilon_high is None else "epsilon_high"}


def trl_rloo(*, epsilon: float = 0.2, epsilon_high: float | None = None) -> PolicySpec:
    """TRL's RLOO loss (TRL 1.16: trl/trainer/rloo_trainer.py, ``_compute_loss``): PPO with sequence ratios.

    TRL's ``beta`` is for a KL in the reward (:func:`scatter_rewards`), and ``normalize_advantages`` is for the
    advantages, so neither is an argument here. For a sequence without a token, the loss is 0 here and minus the
    advantage in TRL; in both cases, the gradient is 0.

    Args: named as in TRL's RLOOConfig.
    Returns: a :class:`PolicySpec`.
    Raises: ValueError for an invalid bound.
    Source: docs/objectives/rloo.md.
    Example:
        >>> rk.presets.trl_rloo(epsilon=0.1).level
        'sequence'
    """
    # All tokens of a sequence have the same loss, so the mean over its tokens is the sequence's loss.
    return _spec(
        _trl_bounds(epsilon_high), level="sequence", epsilon_low=_check.number("epsilon", epsilon),
        epsilon_high=_either(epsilon_high, epsilon), aggregation="seq-mean-token-mean", count_empty=True,
    )  # fmt: skip


def trl_gmpo(
    *,
    epsilon: float = 0.4,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    gradient_accumulation_steps: int = 1,
) -> PolicySpec:
    """TRL's GMPO loss (TRL 1.16: trl/experimental/gmpo/gmpo_trainer.py, ``_compute_loss``).

    Args: named as in TRL's GMPOConfig; ``epsilon`` and ``epsilon_high`` bound the log-ratio.
    Returns: a :class:`PolicySpec`.
    Raises: ValueError for an invalid bound.
    Source: docs/objectives/gmpo.md.
    Example:
        >>> spec = rk.presets.trl_gmpo()
        >>> spec.clip, spec.level
        ('gmpo', 'geometric')
    """
    fields: dict[str, Any] = {"kl": "k3", "kl_coef": beta} if _check.number("beta", beta) != 0 else {}
    return _spec(
        {"kl_coef": "beta"} | _trl_bounds(epsilon_high), clip="gmpo", level="geometric",
        epsilon_low=_check.number("epsilon", epsilon), epsilon_high=_either(epsilon_high, epsilon),
        aggregation="seq-mean-token-mean", count_empty=True, scale=_share(gradient_accumulation_steps), **fields,
    )  # fmt: skip


_SLIME_ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")


def slime(
    *,
    advantage_estimator: str = "grpo",
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    use_kl_loss: bool = False,
    kl_loss_coef: float = 0.0,
    kl_loss_type: str = "k1",
    use_unbiased_kl: bool = False,
    entropy_coef: float = 0.0,
    calculate_per_token_loss: bool = False,
    use_tis: bool = False,
    tis_clip: float = 2.0,
    tis_clip_low: float = 0.0,
    use_icepop: bool = False,
    use_opsm: bool = False,
    opsm_delta: float = 1e-4,
) -> PolicySpec:
    """slime's policy loss (slime 2026-08: slime/utils/ppo_utils.py, backends/megatron_utils/loss.py).

    A loss over samples needs ``policy_loss(denominator=global_batch_size)``. A loss over tokens is divided by the
    number of tokens. ``advantage_estimator="gspo"`` uses the ratio of a whole sequence, and ``"cispo"`` uses CISPO's
    loss. Any other value uses PPO's loss with token ratios.

    Args: named as on slime's command line. ``use_icepop`` means that slime's ``icepop_function`` replaces TIS.
    Returns: a :class:`PolicySpec`.
    Raises: ValueError for a value that slime does not know.
    Source: docs/objectives.md.
    Example:
        >>> rk.presets.slime(advantage_estimator="cispo").clip
        'cispo'
    """
    kinds = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
    _choice("kl_loss_type", kl_loss_type, tuple(kinds))
    _choice("advantage_estimator", advantage_estimator, _SLIME_ESTIMATORS)
    is_cispo = advantage_estimator == "cispo"
    for name, value in (
        ("use_kl_loss", use_kl_loss), ("use_unbiased_kl", use_unbiased_kl),
        ("calculate_per_token_loss", calculate_per_token_loss), ("use_tis", use_tis), ("use_icepop", use_icepop),
        ("use_opsm", use_opsm),
    ):  # fmt: skip
        _check.flag(name, value)
    fields: dict[str, Any] = {
        "level": "geometric" if advantage_estimator == "gspo" else "token",
        "clip": "cispo" if is_cispo else "ppo",
        "epsilon_low": _check.number("eps_clip", eps_clip),
        "epsilon_high": _either(eps_clip_high, eps_clip),
        "dual_clip": None if is_cispo else eps_clip_c,
        "entropy_coef": entropy_coef,
        "aggregation": "token-mean" if calculate_per_token_loss else "seq-mean-token-mean",
    }
    if not calculate_per_token_loss:
        fields["count_empty"] = True
    if use_kl_loss:
        fields |= {"kl": kinds[kl_loss_type], "kl_coef": kl_loss_coef, "kl_times_ratio": use_unbiased_kl}
        if kl_loss_type == "low_var_kl":
            fields["kl_clamp"] = 10.0
    if use_tis or use_icepop:
        mode = "mask" if use_icepop else "truncate"
        fields |= {
            "importance": "token", "importance_mode": mode, "importance_low": tis_clip_low, "importance_high": tis_clip,
        }  # fmt: skip
    if use_opsm:
        fields["drop_above"] = _check.number("opsm_delta", opsm_delta)
    names = {
        "epsilon_low": "eps_clip", "epsilon_high": "eps_clip" if eps_clip_high is None else "eps_clip_high",
        "dual_clip": "eps_clip_c", "kl_coef": "kl_loss_coef", "kl_times_ratio": "use_unbiased_kl",
        "importance_low": "tis_clip_low", "importance_high": "tis_clip", "drop_above": "opsm_delta",
    }  # fmt: skip
    return _spec(names, **fields)


vime = slime


def openrlhf(
    *,
    policy_loss_type: str = "ppo",
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    dual_clip: float | None = None,
    token_level_loss: bool = True,
    is_correction_level: str = "off",
    is_correction_mode: str = "mask",
    is_correction_gating: str = "ratio",
    is_correction_threshold: tuple[float, float] = (0.5, 5.0),
    use_kl_loss: bool = False,
    kl_coef: float = 0.0,
    kl_estimator: str = "k1",
    unbiased_gradient: bool = False,
    entropy_coef: float | None = None,
    dp_size: int = 1,
) -> PolicySpec:
    """OpenRLHF's actor loss (OpenRLHF 0.11.2: openrlhf/models/loss.py, models/utils.py, trainer/ray/ppo_actor.py).

    Pass ``batch_num_tokens`` or ``global_batch_size`` as ``policy_loss(denominator=...)``. With
    ``policy_loss_type="gspo"`` and the correction on, OpenRLHF's ratio is relative to the rollout policy: pass the
    rollout's log-probabilities as ``old_logprob``. With an ``is_correction_gating`` of ``"binary_kl"`` or ``"tv"``,
    pass as ``selected`` the tokens that OpenRLHF drops (docs/objectives/rollout_correction.md).
    ``is_correction_threshold`` is then used to select these tokens, and is not part of the spec. ``unbiased_gradient``
    of the KL is not supported with ``"gspo"``, because a ratio of GSPO belongs to a sequence, not to a token.

    Args: named as in OpenRLHF. ``kl_coef`` is the value of OpenRLHF's KL controller.
    Returns: a :class:`PolicySpec`.
    Raises: ValueError for a value that OpenRLHF does not know, or that this library does not support.
    Source: docs/objectives.md.
    Example:
        >>> rk.presets.openrlhf(policy_loss_type="gspo").level
        'geometric'
    """
    _choice("policy_loss_type", policy_loss_type, ("ppo", "gspo"))
    _choice("is_correction_level", is_correction_level, ("off", "token", "seq"))
    _choice("is_correction_mode", is_correction_mode, ("mask", "clip"))
    for name, value in (
        ("token_level_loss", token_level_loss), ("use_kl_loss", use_kl_loss), ("unbiased_gradient", unbiased_gradient),
    ):  # fmt: skip
        _check.flag(name, value)
    if is_correction_level == "seq" and is_correction_mode == "clip":
        raise ValueError('is_correction_mode: expected "mask" with is_correction_level="seq", got "clip"')
    _choice("is_correction_gating", is_correction_gating, ("ratio", "binary_kl", "tv"))
    low, high = is_bounds(is_correction_threshold)
    divergence = is_correction_gating != "ratio" and is_correction_level != "off"
    if divergence and low > 0:
        raise ValueError(
            f'is_correction_threshold: expected (0, delta) with is_correction_gating="{is_correction_gating}", got '
            f"{_check.shown(is_correction_threshold)}: a divergence has an upper bound alone"
        )
    if divergence and is_correction_mode == "clip":
        raise ValueError(
            f'is_correction_mode: expected "mask" with is_correction_gating="{is_correction_gating}", got "clip"'
        )
    _choice("kl_estimator", kl_estimator, ("k1", "k2", "k3"))
    gspo = policy_loss_type == "gspo"
    fields: dict[str, Any] = {
        "level": "geometric" if gspo else "token",
        "log_ratio_clamp": None if gspo else 20.0,
        "epsilon_low": clip_eps_low,
        "epsilon_high": clip_eps_high,
        "dual_clip": dual_clip,
        "aggregation": "token-mean" if token_level_loss and not gspo else "seq-mean-token-mean",
        "entropy_coef": _either(entropy_coef, 0.0),
        "dp_size": dp_size,
    }
    if divergence and not gspo:
        fields |= {"importance": "token", "importance_high": None, "drop_selected": True}
    elif is_correction_level != "off" and not gspo:
        mask = is_correction_mode == "mask"
        fields["importance"] = "token"
        if is_correction_level == "seq":
            fields |= {"importance_high": None, "gate": (low, high)}
        else:
            fields |= {
                "importance_low": low,
                "importance_high": high,
                "importance_mode": "mask" if mask else "truncate",
            }
    if use_kl_loss:
        fields |= {"kl": kl_estimator, "kl_coef": kl_coef, "kl_clamp": 10.0}
        if unbiased_gradient and gspo:
            raise ValueError(
                'unbiased_gradient: expected False with policy_loss_type="gspo", got True: it weighs the gradient by a '
                "token's ratio"
            )
        if unbiased_gradient:
            fields |= {"kl_straight_through": True, "kl_gradient_ratio_max": 10.0}
    threshold = "is_correction_threshold"
    names = {
        "epsilon_low": "clip_eps_low", "epsilon_high": "clip_eps_high", "importance_low": threshold,
        "importance_high": threshold, "gate": threshold,
    }  # fmt: skip
    return _spec(names, **fields)
