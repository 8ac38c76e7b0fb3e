"""The specification of a policy objective. A :class:`PolicySpec` is checked once and becomes a row of numbers for the
extension."""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

from .. import _check
from .._types import RolloutNan

INF = math.inf

LEVELS = ("token", "sequence", "geometric")
CLIPS = ("ppo", "cispo", "none", "sapo", "gmpo", "vespo", "dro", "clip_cov", "kl_cov", "dppo")
SELECTING = ("clip_cov", "kl_cov", "dppo")  # values of `clip` that need the array `selected`
ESTIMATORS = (None, "k1", "k2", "k3", "abs")
IMPORTANCE = (None, "token", "sequence", "geometric", "given")
# By name: what divides the sum (0: one, 1: tokens, 2: sequences, 3: sequences with tokens), and whether a sequence
# contributes its mean instead of its sum.
AGGREGATIONS = {
    "token-mean": (1, False),
    "token-sum": (0, False),
    "seq-mean-token-sum": (3, False),
    "seq-mean-token-mean": (3, True),
    "seq-mean-token-sum-norm": (3, False),
    "constant": (0, False),
}
FLAGS = (
    "straight_through", "epsilon_absolute", "kl_straight_through", "kl_times_ratio", "kl_ratio_of_token",
    "drop_selected", "count_empty", "lenient",
)  # fmt: skip
_SURROGATES = {
    "ppo": 0, "cispo": 1, "none": 2, "sapo": 3, "gmpo": 4, "vespo": 5, "dro": 6, "clip_cov": 0, "kl_cov": 0, "dppo": 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PolicySpec:
    """A policy objective: a choice of ratio level, clip form, importance correction, KL, entropy and aggregation.

    Formulas: cpp/include/rlk/ops/policy_loss.h; names in papers and frameworks: docs/objectives.md. Ready-made specs:
    ``rl_kernel_native.presets``. A spec is frozen and hashable; ``dataclasses.replace`` makes a changed copy.

    Args:
        level: the level of the ratio: ``"token"``; ``"sequence"``, the product over a sequence; ``"geometric"``, the
            geometric mean over a sequence (GSPO).
        straight_through: True: the gradient treats a sequence's ratio as each token's own ratio (verl's GSPO). False:
            the gradient passes through the sequence's sum or mean, as in TRL.
        clip: ``"ppo"``; ``"cispo"``, a clipped ratio as a constant weight of the log-probability; ``"none"``, the
            log-probability itself (REINFORCE, GPG); ``"sapo"``; ``"gmpo"``; ``"vespo"``; ``"dro"``; ``"clip_cov"``, PPO
            without the policy term of ``selected`` tokens; ``"kl_cov"``, no clip, but a penalty of ``selected_kl_coef``
            times ``|logprob - old_logprob|`` on selected tokens; ``"dppo"``, CISPO without the policy term of
            ``selected`` tokens, here the tokens outside the trust region.
        epsilon_low, epsilon_high: the ratio's range is ``[1 - epsilon_low, 1 + epsilon_high]``; None: no bound.
            ``"gmpo"`` bounds the log-ratio, ``[-epsilon_low, epsilon_high]``.
        epsilon_absolute: the range is ``[epsilon_low, epsilon_high]`` itself (TRL's CISPO).
        dual_clip: the loss of a token with a negative advantage is at most ``-A * dual_clip``; > 1, or None.
        delta: the ratio is limited to this value before it is compared with the clipped ratio (INTELLECT-2); > 0, or
            None.
        tau_positive, tau_negative: SAPO's temperatures, > 0.
        k_positive, lambda_positive, k_negative, lambda_negative: VESPO's parameters, by the advantage's sign.
        dro_beta: for ``"dro"``; > 0.
        log_ratio_clamp: a limit of ``|log ratio|``, or the pair ``(lowest, highest)``, or None. Beyond a limit there is
            no gradient.
        kl: ``"k1"``, ``"k2"``, ``"k3"``, ``"abs"``, or None.
        kl_coef: factor of the KL term in the loss, any finite number. The default of 0 only measures the KL.
        kl_straight_through: the KL term has the estimator's value, but the gradient of k2.
        kl_gradient_ratio_max: with ``kl_straight_through``, the gradient of k2 is multiplied by the token's ratio. This
            ratio is treated as a constant and limited to this number (OpenRLHF's unbiased gradient). > 0, or None: no
            factor.
        kl_input_clamp, kl_clamp: limits of ``|ref_logprob - logprob|`` and of ``|kl|``; > 0, or None.
        kl_times_ratio: the estimator is multiplied by the ratio, and the gradient passes through both factors
            (DeepSeek-V3.2).
        kl_ratio_of_token: with ``kl_times_ratio`` and a sequence ratio, the factor is the token's own ratio
            ``exp(logprob - old_logprob)`` without a limit, as in :func:`kl` with ``old_logprob``.
        selected_kl_coef: for ``"kl_cov"``; >= 0.
        drop_selected: drops the policy term of ``selected`` tokens for any ``clip``; these tokens still count in
            lengths (TRL's entropy quantile).
        entropy_coef: factor of the entropy's mean, which is subtracted from the loss.
        entropy_aggregation: ``"loss"`` aggregates the entropy like the loss. ``"token-mean"`` is ``entropy_scale``
            times the mean over this call's tokens, for any ``denominator``. The entropy term and its gradient then
            depend on how the batch is split into micro-batches.
        importance: level of the rollout correction: ``"token"``, ``"sequence"``, ``"geometric"``, None, or ``"given"``,
            which multiplies by the call's ``importance_weight`` unchanged.
        importance_mode: ``"truncate"`` limits the weight to ``[importance_low, importance_high]`` (TIS); ``"mask"``
            sets it to 0 outside that range (IcePop, MIS).
        importance_low, importance_high: the bounds of ``importance_mode``; None: no bound.
        importance_clamp: a limit of the weight's ``|log|``, or None.
        importance_of: ``"old"`` or ``"current"``: the weight is the ratio of this policy to the rollout policy.
        gate: ``(low, high)``, or None. A sequence has no policy term if the geometric mean of its ratio to the rollout
            policy lies outside this range.
        drop_above: limit of a sequence's mean of ``log pi_x - logprob``. Above it, tokens with a negative advantage
            lose their policy terms (OPSM). ``drop_of`` chooses x: ``"old"`` or ``"rollout"``. None: off.
        aggregation: ``"token-mean"``, ``"token-sum"``, ``"seq-mean-token-sum"``, ``"seq-mean-token-mean"``,
            ``"seq-mean-token-sum-norm"`` (also divided by ``horizon``), ``"constant"`` (the sum divided by the call's
            ``denominator``).
        count_empty: means over sequences also count sequences without a token.
        horizon: for ``"seq-mean-token-sum-norm"``; > 0.
        scale, dp_size: the loss is multiplied by both numbers. (Ranks that average their gradients need ``dp_size``.)
        lenient: True: a call with this spec ignores arrays that the spec does not use. Without ``rollout_logprob`` (or
            ``importance_weight``) the call applies no correction and uses ``drop_of="old"``. Presets of frameworks with
            these rules set this option. False: an unused array and a missing array are errors.
        rollout_nan: ``"nan"``: a NaN of ``rollout_logprob`` makes the weight NaN. ``"neutral"``: differences between a
            NaN of ``rollout_logprob`` and any log-probability are taken as 0, so the token's ratio to the rollout
            policy is 1.
    Raises: ValueError for a meaningless value or combination, with the reason; TypeError for a wrong type.
    Source: docs/objectives.md.
    """

    level: str = "token"
    straight_through: bool = False
    clip: str = "ppo"
    epsilon_low: float | None = 0.2
    epsilon_high: float | None = 0.2
    epsilon_absolute: bool = False
    dual_clip: float | None = None
    delta: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0
    dro_beta: float | None = None
    log_ratio_clamp: float | tuple[float, float] | None = None
    kl: str | None = None
    kl_coef: float = 0.0
    kl_straight_through: bool = False
    kl_gradient_ratio_max: float | None = None
    kl_input_clamp: float | None = None
    kl_clamp: float | None = None
    kl_times_ratio: bool = False
    kl_ratio_of_token: bool = False
    selected_kl_coef: float = 1.0
    drop_selected: bool = False
    entropy_coef: float = 0.0
    entropy_aggregation: str = "loss"
    entropy_scale: float = 1.0
    importance: str | None = None
    importance_mode: str = "truncate"
    importance_low: float | None = None
    importance_high: float | None = 2.0
    importance_clamp: float | None = None
    importance_of: str = "old"
    gate: tuple[float, float] | None = None
    drop_above: float | None = None
    drop_of: str = "old"
    aggregation: str = "token-mean"
    count_empty: bool = False
    horizon: float | None = None
    scale: float = 1.0
    dp_size: int = 1
    lenient: bool = False
    rollout_nan: RolloutNan = "nan"

    def __post_init__(self) -> None:
        for name in ("log_ratio_clamp", "gate"):  # in a settings file, these two options are lists
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _validate(self)
        numbers = _numbers(self)
        object.__setattr__(self, "_numbers", numbers)
        object.__setattr__(self, "_packed", None)  # set at first use, which is never inside a trace
        corrects = self.needs_rollout or self.importance == "given"
        plain = dataclasses.replace(
            self, importance=None, importance_low=None, gate=None, drop_of="old"
        ) if self.lenient and corrects else self  # fmt: skip
        object.__setattr__(self, "_uncorrected", plain)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The spec's options as numbers, in the order of the extension's spec."""
        return self._numbers  # type: ignore[attr-defined]

    @property
    def packed(self) -> bytes:
        """:attr:`numbers` as the bytes that the extension reads."""
        packed: bytes | None = self._packed  # type: ignore[attr-defined]
        if packed is None:
            packed = struct.pack(f"{len(self.numbers)}d", *self.numbers)
            object.__setattr__(self, "_packed", packed)
        return packed

    @property
    def uncorrected(self) -> PolicySpec:
        """For a lenient spec, the spec without the parts that need ``rollout_logprob`` or ``importance_weight``; else
        the spec itself."""
        return self._uncorrected  # type: ignore[attr-defined]

    @property
    def needs_ref(self) -> bool:
        return self.kl is not None

    @property
    def needs_selected(self) -> bool:
        return self.clip in SELECTING or self.drop_selected

    @property
    def needs_rollout(self) -> bool:
        rollout = self.importance not in (None, "given") or self.gate is not None
        return rollout or (self.drop_above is not None and self.drop_of == "rollout")


def one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if not _check.is_choice(value, choices):
        expected = ", ".join("None" if c is None else f'"{c}"' for c in choices)
        raise ValueError(f"{name}: expected {expected}, got {_check.shown(value)}")


def number(name: str, value: Any, least: float = -INF, open_end: bool = False, optional: bool = False) -> None:
    if value is None and optional:
        return
    bound = "" if least == -INF else f" {'>' if open_end else '>='} {least:g}"

    def allows(x: float) -> bool:
        return -INF < x < INF and x >= least and not (open_end and x == least)  # isfinite refuses symbols

    _check.single(name, value, allows, f"a finite number{bound}{' or None' if optional else ''}")


def checked_denominator(denominator: Any, aggregation: str, name: str) -> tuple[Any, float]:
    """Checks the denominator, and returns it as a pair: the array or None, and the number or 0. ``name`` is the name of
    the aggregation's argument in error messages."""
    if denominator is None:
        if aggregation == "constant":
            raise ValueError(
                f'denominator: expected a number or an array with {name}="constant", got None; give what divides the '
                "sum: for TRL's dapo the global number of scored tokens, num_items_in_batch / num_processes, for its "
                "dr_grpo sequences times max_completion_length"
            )
    elif aggregation == "token-sum":
        got = denominator if _check.is_number(denominator) else type(denominator).__name__
        raise ValueError(f'denominator: expected None with {name}="token-sum", which divides by nothing, got {got}')
    return _check.denominator(denominator)


def check_scale(scale: Any, dp_size: Any) -> None:
    number("scale", scale)
    if _check.integer64("dp_size", dp_size) < 1:
        raise ValueError(f"dp_size: expected a positive integer, got {dp_size}")
    number("scale * dp_size", scale * dp_size)


def _pair(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name}: expected two numbers, got {_check.shown(value)}")
    low, high = (_check.single(name, v, lambda x: x == x, "two numbers in ascending order") for v in value)
    if not low <= high:
        raise ValueError(f"{name}: expected two numbers in ascending order, got {_check.shown(value)}")
    return low, high


def _validate(s: PolicySpec) -> None:
    for name in FLAGS:
        _check.flag(name, getattr(s, name))
    one_of("level", s.level, LEVELS)
    one_of("clip", s.clip, CLIPS)
    one_of("kl", s.kl, ESTIMATORS)
    one_of("importance", s.importance, IMPORTANCE)
    one_of("importance_mode", s.importance_mode, ("truncate", "mask"))
    one_of("importance_of", s.importance_of, ("old", "current"))
    one_of("drop_of", s.drop_of, ("old", "rollout"))
    _check.neutral_rollout(s.rollout_nan)
    one_of("entropy_aggregation", s.entropy_aggregation, ("loss", "token-mean"))
    one_of("aggregation", s.aggregation, tuple(AGGREGATIONS))
    for name in ("epsilon_low", "epsilon_high", "importance_low", "importance_high"):
        number(name, getattr(s, name), 0.0, optional=True)
    for name in (
        "delta",
        "dro_beta",
        "kl_input_clamp",
        "kl_clamp",
        "kl_gradient_ratio_max",
        "importance_clamp",
        "horizon",
    ):
        number(name, getattr(s, name), 0.0, open_end=True, optional=True)
    for name in ("tau_positive", "tau_negative"):
        number(name, getattr(s, name), 0.0, open_end=True)
    for name in ("kl_coef", "entropy_coef", "entropy_scale", "k_positive", "k_negative"):
        number(name, getattr(s, name))
    for name in ("lambda_positive", "lambda_negative", "selected_kl_coef"):
        number(name, getattr(s, name), 0.0)
    number("dual_clip", s.dual_clip, 1.0, open_end=True, optional=True)
    number("drop_above", s.drop_above, optional=True)
    if isinstance(s.log_ratio_clamp, tuple):
        _pair("log_ratio_clamp", s.log_ratio_clamp)
    else:
        number("log_ratio_clamp", s.log_ratio_clamp, 0.0, open_end=True, optional=True)
    if s.gate is not None:
        _pair("gate", s.gate)
    check_scale(s.scale, s.dp_size)
    _validate_combination(s)


def _validate_combination(s: PolicySpec) -> None:
    """Refuses combinations in which an option would be silently ignored or have no meaning."""

    def refuse(name: str, expected: str, why: str) -> None:
        raise ValueError(f"{name}: expected {expected}, got {_check.shown(getattr(s, name))}: {why}")

    if s.rollout_nan == "neutral" and s.importance == "given":
        refuse("rollout_nan", '"nan" with importance="given"', "weights are multiplied in as they are")
    ratio = s.clip in ("ppo", "clip_cov")
    if ratio and not s.epsilon_absolute and s.epsilon_low is not None and s.epsilon_low > 1:
        refuse("epsilon_low", "at most 1 for PPO's clip", "a ratio is never below 0, so the lower bound would be none")
    low, high = _bounds(s)
    if low > high:
        refuse("epsilon_high", "a range that is not empty", f"it would be [{low:g}, {high:g}]")
    if s.dual_clip is not None and not (ratio and s.clip != "clip_cov"):
        refuse("dual_clip", f'None with clip="{s.clip}"', "it bounds the clipped surrogate of PPO alone")
    if s.delta is not None and not ratio:
        refuse("delta", f'None with clip="{s.clip}"', "it caps the unclipped ratio of PPO alone")
    if s.clip in ("kl_cov", "dppo") and s.level != "token":
        refuse("level", f'"token" with clip="{s.clip}"', "tokens are selected, not sequences")
    if s.drop_selected and s.clip in (*SELECTING, "gmpo"):
        why = "its loss has one term per sequence" if s.clip == "gmpo" else "it takes selected tokens itself"
        refuse("drop_selected", f'False with clip="{s.clip}"', why)
    of_sequence = s.kl_times_ratio and not s.kl_ratio_of_token
    if s.clip in ("none", "dro") and s.level != "token" and not of_sequence:
        refuse("level", f'"token" with clip="{s.clip}"', "no ratio enters its loss")
    if s.clip == "dro" and (s.level != "token" or s.dro_beta is None):
        refuse("dro_beta", 'a number, and level="token", with clip="dro"', "it is the weight of the squared log-ratio")
    if s.clip != "dro" and s.dro_beta is not None:
        refuse("dro_beta", f'None with clip="{s.clip}"', 'only "dro" has a squared log-ratio')
    if s.clip == "gmpo" and (s.level != "geometric" or s.aggregation != "seq-mean-token-mean" or s.straight_through):
        raise ValueError(
            'clip: expected level="geometric", aggregation="seq-mean-token-mean" and no straight_through with "gmpo", '
            f'got level="{s.level}", aggregation="{s.aggregation}": its loss has one term per sequence'
        )
    if s.clip == "gmpo" and s.importance in ("sequence", "geometric"):
        refuse("importance", 'None, "token" or "given" with clip="gmpo"', "it takes the weights' geometric mean itself")
    if s.clip == "gmpo" and s.drop_above is not None:
        refuse("drop_above", 'None with clip="gmpo"', "its loss has one term per sequence, and no tokens to drop")
    if s.clip == "gmpo" and s.log_ratio_clamp is not None:
        refuse("log_ratio_clamp", 'None with clip="gmpo"', "it limits the log-ratios itself")
    if s.kl_ratio_of_token and (s.level == "token" or not s.kl_times_ratio):
        why = "a token's ratio is what the estimator is multiplied by already" if s.kl_times_ratio else "nothing is"
        refuse("kl_ratio_of_token", 'False without kl_times_ratio or with level="token"', why)
    if s.clip == "gmpo" and of_sequence:
        refuse("kl_times_ratio", 'False with clip="gmpo"', "its ratio is of clipped tokens")
    if s.clip == "vespo":
        if s.level != "sequence":
            refuse("level", '"sequence" with clip="vespo"', "its weight is one per sequence")
        if s.importance in ("sequence", "geometric"):
            refuse("importance", 'None, "token" or "given" with clip="vespo"', "the weights go into the sequence's own")
        if of_sequence:
            refuse("kl_times_ratio", 'False with clip="vespo"', "its ratio has no gradient")
        if s.log_ratio_clamp is not None:
            refuse("log_ratio_clamp", 'None with clip="vespo"', "it has limits of its own")
    if s.straight_through and s.level == "token":
        refuse("straight_through", 'False with level="token"', "a token's ratio is its own already")
    if s.kl is None and (s.kl_straight_through or s.kl_times_ratio or s.kl_coef != 0):
        refuse("kl", "an estimator", "kl_coef, kl_straight_through and kl_times_ratio need one")
    if s.kl_gradient_ratio_max is not None and (s.level != "token" or not s.kl_straight_through):
        refuse("kl_gradient_ratio_max", 'None without kl_straight_through and level="token"', "it weighs that gradient")
    if s.kl_times_ratio and s.kl_straight_through:
        refuse("kl_times_ratio", "False with kl_straight_through", "two different corrections of the same gradient")
    if of_sequence and s.kl_clamp is not None and s.level != "token" and not s.straight_through:
        refuse("kl_clamp", "None with kl_times_ratio and a sequence's ratio", "its gradient would not be a sum's")
    if s.importance is None and s.importance_low is not None:
        refuse("importance_low", "None without importance", "there is no weight to bound")
    if s.importance_low is not None and s.importance_high is not None and s.importance_low > s.importance_high:
        refuse("importance_low", f"at most importance_high = {s.importance_high}", "the range would be empty")
    if s.gate is not None and s.importance == "given":
        refuse("gate", 'None with importance="given"', "a given weight says nothing of the rollout's log-probabilities")
    if s.drop_above is not None and s.drop_of == "rollout" and s.importance == "given":
        refuse("drop_of", '"old" with importance="given"', "rollout_logprob is not given then")
    check_aggregation(s.aggregation, s.horizon, s.count_empty)


def check_aggregation(aggregation: str, horizon: Any, count_empty: bool) -> None:
    if (horizon is not None) != (aggregation == "seq-mean-token-sum-norm"):
        got = _check.shown(horizon)
        raise ValueError(
            f'horizon: expected a number exactly with aggregation="seq-mean-token-sum-norm", got {got}: nothing '
            "else divides by it"
        )
    if count_empty and AGGREGATIONS[aggregation][0] != 3:
        raise ValueError(
            f'count_empty: expected False with aggregation="{aggregation}", got {count_empty!r}: it counts no sequences'
        )


def denominator_kind(aggregation: str, count_empty: bool) -> int:
    """Returns the contract's DenominatorKind of an aggregation."""
    kind = AGGREGATIONS[aggregation][0]
    return 2 if kind == 3 and count_empty else kind


def _bounds(s: PolicySpec) -> tuple[float, float]:
    """Returns the bounds of the ratio, or with "gmpo" those of the log-ratio."""
    low, high = s.epsilon_low, s.epsilon_high
    if s.clip == "kl_cov":
        return -INF, INF
    if s.epsilon_absolute:
        return -INF if low is None else low, INF if high is None else high
    center = 0.0 if s.clip == "gmpo" else 1.0
    return -INF if low is None else center - low, INF if high is None else center + high


def _drops(s: PolicySpec) -> int:
    """Returns the contract's field ``selected_drops``."""
    return 1 if s.clip in ("clip_cov", "dppo") else 2 if s.drop_selected else 0


def or_inf(x: float | None) -> float:
    return INF if x is None else x


def _numbers(s: PolicySpec) -> tuple[float, ...]:
    clamp = s.log_ratio_clamp
    limits = clamp if isinstance(clamp, (tuple, list)) else (-or_inf(clamp), or_inf(clamp))
    gate = s.gate if s.gate is not None else (0.0, INF)
    numbers = (
        LEVELS.index(s.level),
        _SURROGATES[s.clip],
        s.straight_through,
        *limits,
        *_bounds(s),
        or_inf(s.delta),
        or_inf(s.dual_clip),
        s.tau_positive,
        s.tau_negative,
        s.k_positive,
        s.lambda_positive,
        s.k_negative,
        s.lambda_negative,
        s.dro_beta or 0.0,
        ESTIMATORS.index(s.kl),
        s.kl_straight_through,
        s.kl_times_ratio + s.kl_ratio_of_token,
        s.kl_coef,
        or_inf(s.kl_input_clamp),
        or_inf(s.kl_clamp),
        s.selected_kl_coef,
        _drops(s),
        s.entropy_coef,
        s.entropy_scale,
        s.entropy_aggregation == "token-mean",
        IMPORTANCE.index(s.importance),
        s.importance_of == "current",
        s.importance_mode == "mask",
        s.gate is not None,
        -INF if s.importance_low is None else s.importance_low,
        or_inf(s.importance_high),
        or_inf(s.importance_clamp),
        *gate,
        or_inf(s.drop_above),
        s.drop_of == "rollout",
        denominator_kind(s.aggregation, s.count_empty),
        AGGREGATIONS[s.aggregation][1],
        s.horizon or 0.0,
        s.scale * s.dp_size,
        s.kl_gradient_ratio_max or 0.0,
        _check.neutral_rollout(s.rollout_nan),
    )
    return tuple(float(x) for x in numbers)
