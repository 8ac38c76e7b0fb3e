"""Losses of preference pairs: arguments, dispatch, results. The contract is cpp/include/rlk/ops/preference_loss.h."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

from .. import _call, _check
from .._metrics import MetricVector
from .._native import functions
from .._operator import Loss, Operator, kept, linear
from .._types import AnyArray, ArrayT, Generic, NamedTuple, PreferenceKind
from ..contract import OF_TOKENS, Bound, Row, add_rows
from ..reference.preference_loss import preference_loss_reference
from .preference_kinds import (
    ALPHA_DIVERGENCE,
    ALPHA_PO,
    AOT_UNPAIRED,
    DIVERGENCES,
    KINDS,
    KNOWN_AS,
    KTO,
    LOG_RATIO,
    NAMES,
    NO_AVERAGE,
    UNSORTED,
)

__all__ = ["METRICS", "PreferenceLoss", "PreferenceMetrics", "preference_loss", "preference_loss_reference"]

_C = functions(preference_loss="object*9, int*4, object*2, int", preference_loss_backward="object*4, int, object, int")

OPTIONS = (
    "label_smoothing", "f_divergence", "f_alpha", "tau", "gamma", "alpha", "kl", "chosen_weight", "rejected_weight",
)  # fmt: skip
METRICS = ("loss", "chosen_reward", "rejected_reward", "margin", "accuracy")


class PreferenceMetrics(MetricVector):
    """Means of one call in one float32 vector on the call's device. ``metrics.margin`` is one element, which stays on
    the device; ``metrics.asdict()`` copies all elements to the host once. ``accuracy`` is NaN for unpaired kinds."""

    names: tuple[str, ...] = METRICS


class PreferenceLoss(NamedTuple, Generic[ArrayT]):
    """The result of :func:`preference_loss`, float32."""

    losses: ArrayT  # [num_pairs]; for unpaired kinds, losses of the chosen answers, then of the rejected answers
    chosen_rewards: ArrayT  # [num_pairs]
    rejected_rewards: ArrayT
    metrics: PreferenceMetrics


def _shapes_of(arrays: Any, how: tuple[Any, ...]) -> tuple[Any, ...]:
    w, l = (a.shape[0] for a in arrays[:2])  # noqa: E741
    ranks = (2, w) if how[1] != UNSORTED else None
    return (w + l if how[0] == KTO else w,), (w,), (l,), (len(METRICS),), (w,), (l,), ranks


def _scale(call: Any, dlosses: Any, kept: Any, how: tuple[Any, ...]) -> Any:
    return call(_BACKWARD, (dlosses, *kept), how[1:])


def _along_backward(call: Any, given: Any, arrays: Any, how: Any, wanted: Any) -> Any:
    """The derivative rule of the backward, which is linear in the gradient of the losses. Unpaired kinds have one loss
    for each chosen and each rejected answer."""
    dlosses, *kept = arrays
    if wanted is None:
        return call(_BACKWARD, (given[0], *kept), how)
    return (_along(given, kept, (KTO if dlosses.shape != kept[0].shape else None, *how)),)


def _along(tangents: Any, kept: Any, how: tuple[Any, ...]) -> Any:
    """Returns the tangents of the losses. For each side (chosen and rejected), gradient times tangent is added to the
    losses to which the side contributes."""
    (d_chosen, d_rejected, ranks), (kind, sort) = kept, how
    unpaired = kind == KTO
    w, l = d_chosen.shape[0], d_rejected.shape[0]  # noqa: E741
    found = d_chosen.new_zeros(w + l if unpaired else w)
    for i, (d, t) in enumerate(zip((d_chosen, d_rejected), tangents, strict=True)):
        if t is None:
            continue
        if sort != UNSORTED:
            found = found.scatter_add(0, ranks[i if sort == AOT_UNPAIRED else 0].long(), d * t)
        else:
            first = w * i if unpaired else 0
            found = found.slice_scatter(found[first : first + len(t)] + d * t, 0, first, first + len(t))
    return found


_FORWARD = Operator(
    "preference_loss",
    (*NAMES[:2], *(f"{name}?" for name in NAMES[2:])),
    "int kind, int sort, int score, int average, float[] numbers",
    outputs=_shapes_of,
    dtypes=("float32",) * 6 + ("int32",),
    native=lambda arrays, how, *tail: _C.preference_loss(*arrays, *how[:5], *tail),
    gradient=kept(
        (0, 1),
        Loss(outputs=4, incoming="dlosses", reads=2, scale=_scale, along=_along),
        constants="is a constant of the loss and gets no gradient",
    ),
)
_BACKWARD = Operator(
    "preference_loss_backward",
    "dlosses, d_chosen, d_rejected, ranks?",
    "int sort",
    outputs=lambda arrays, how: (arrays[1].shape, arrays[2].shape),
    dtypes=("float32",) * 2,
    gradient=linear(of=(0,), reads=(1, 2, 3), incoming=("dd_chosen", "dd_rejected"), along=_along_backward),
)


def preference_loss(
    policy_chosen: ArrayT,
    policy_rejected: AnyArray,
    ref_chosen: AnyArray | None = None,
    ref_rejected: AnyArray | None = None,
    *,
    kind: PreferenceKind = "dpo",
    beta: float = 0.1,
    chosen_count: AnyArray | None = None,
    rejected_count: AnyArray | None = None,
    label_smoothing: float | None = None,
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] | None = None,
    f_alpha: float | None = None,
    tau: float | None = None,
    gamma: float | None = None,
    alpha: float | None = None,
    kl: AnyArray | None = None,
    chosen_weight: float | None = None,
    rejected_weight: float | None = None,
    chosen_aligned: AnyArray | None = None,
    rejected_aligned: AnyArray | None = None,
    nll_weight: float = 0.0,
) -> PreferenceLoss[ArrayT]:
    """Losses, rewards and means for pairs of a chosen and a rejected sequence, computed from log-probabilities of
    sequences.

    Arrays may be left out in two cases. Without ``ref_chosen`` and ``ref_rejected``, ``dpo`` (the default kind) and
    related kinds take 0 for the reference: a loss without a reference model. ``simpo`` and the other kinds "on
    averages" below divide a log-probability by its number of tokens. Without counts, they use the sums, so longer
    answers weigh more.

    The forward launch also computes the gradient, so the backward is one product. A pair has the same bits in any batch
    and on every backend, except for the sorted kinds (``aot``, ``aot_unpaired``), whose losses depend on the batch.
    Differentiable (torch) once, in ``policy_chosen`` and ``policy_rejected``; a second derivative is an error.

    Below, ``w = policy_chosen - ref_chosen`` and ``l = policy_rejected - ref_rejected`` are log-ratios, ``d = w - l``
    and ``z = beta d``:

    - ``dpo``: ``-log sigmoid(z)``; with ``label_smoothing``, conservative DPO. ``robust``: the unbiased form of
      conservative DPO.
    - ``hinge``: ``relu(1 - z)``. ``ipo``: ``(d - 1 / (2 beta))^2``, on averages if counts are given, as in TRL, else on
      sums, as in OpenRLHF. ``sigmoid_norm``: ``dpo`` on averages, which needs counts.
    - ``exo_pair`` (needs ``label_smoothing``), ``nca_pair``, ``bco_pair``, ``sppo_hard``, ``apo_zero``, ``apo_down``,
      ``discopop`` (``tau``, 0.05): as TRL's DPO trainer and the contract define them.
    - ``aot``, ``aot_unpaired``: the loss of ``dpo`` between log-ratios that are sorted over the batch; losses are in
      sorted order.
    - ``kto``, an unpaired kind, which has one loss per answer: ``1 - sigmoid(beta (w - KL))`` and ``1 - sigmoid(beta
      (KL - l))`` times ``chosen_weight`` and ``rejected_weight`` (default 1), with ``KL = max(kl, 0)``.
      ``apo_zero_unpaired``: the same with ``KL = 0``.
    - without a reference, on averages: ``orpo``: ``-beta log sigmoid(log odds ratio)``; ``simpo``: ``dpo`` minus the
      margin ``gamma`` (0.5); ``alphapo``: ``simpo`` with ``(1 - p^-alpha) / alpha``. On sums: ``cpo``.

    Args:
        policy_chosen, policy_rejected: ``[num_pairs]`` float32, any strides: sums of log-probabilities
            (:func:`sequence_logprob`). The two arrays may differ in length for unpaired kinds.
        ref_chosen, ref_rejected: the same sums of the reference model; both or neither. ``aot`` and ``aot_unpaired``
            need them, kinds without a reference refuse them, and the others use 0 if they are absent.
        kind: one of the above.
        beta: a number > 0.
        chosen_count, rejected_count: ``[num_pairs]`` int64, the number of tokens that count; both or neither. ``ipo``,
            ``sigmoid_norm``, ``orpo``, ``simpo`` and ``alphapo`` then divide by the counts (by 1 if a count is 0). The
            ``nll_weight`` term and the aligned sums also divide by them. Without counts, sums are used as given.
        label_smoothing: in [0, 1); below 0.5 for ``robust``, above 0 for ``exo_pair``.
        f_divergence: for ``dpo`` and related kinds: ``"reverse_kl"``, ``"forward_kl"``, ``"js_divergence"`` or
            ``"alpha_divergence"`` with ``f_alpha``, as in TRL.
        kl: ``[1]`` float32, the mean log-ratio of mismatched pairs over all ranks; None: 0.
        chosen_aligned, rejected_aligned: ``[num_pairs]`` float32, for the weights of WPO: sums over tokens of ``log
            p(token) - log sum_v p(v)^2``, from :func:`logprob` (``sum_p_sq``). Losses are multiplied by ``exp(chosen)
            exp(rejected)``, where ``chosen`` and ``rejected`` are these sums divided by the token counts. The factors
            have no gradient. Not for sorted or unpaired kinds.
        nll_weight: adds this factor times ``-policy_chosen / chosen_count`` (``cpo_alpha`` in CPO, RPO's weight, 1 in
            ORPO). The term is an average per sequence, while TRL averages over all tokens of a batch. Not for sorted or
            unpaired kinds.
    Returns:
        ``PreferenceLoss(losses, chosen_rewards, rejected_rewards, metrics)``, where ``metrics`` is a
        :class:`PreferenceMetrics`. Rewards (``beta`` times log-ratios) and metrics have no gradient.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, device or value, or for an option that
        ``kind`` does not take; RuntimeError if this build has no kernel for the device.
    Source:
        docs/numerics.md, rules 3 and 10; DPO arXiv:2305.18290, IPO 2310.12036, KTO 2402.01306, ORPO 2403.07691, SimPO
        2405.14734, CPO 2401.08417, WPO 2406.11827, AOT 2406.05882, APO 2408.06266, DiscoPOP 2406.08414.

    Example:
        >>> chosen, rejected = torch.tensor([-4.0]), torch.tensor([-6.0])
        >>> rk.preference_loss(chosen, rejected, torch.tensor([-5.0]), torch.tensor([-5.0]), beta=0.1).losses
        tensor([0.5981])
    """
    _check.one_of("kind", kind, tuple(KINDS), KNOWN_AS)
    of_kind = KINDS[kind]
    options = (label_smoothing, f_divergence, f_alpha, tau, gamma, alpha, kl, chosen_weight, rejected_weight)
    if not all(value is None for value in options):
        _refuse_others(kind, options)
    beta = _number("beta", beta, above=0)
    smoothing = 0.0
    if label_smoothing is not None or kind == "exo_pair":  # exo_pair requires it
        smoothing = _smoothing(kind, 0.0 if label_smoothing is None else label_smoothing)
    score, of_alpha = _score(kind, f_divergence, f_alpha, alpha)
    margin = 0.0
    if "gamma" in of_kind.options:
        margin = _number("gamma / beta", (0.5 if gamma is None else _number("gamma", gamma)) / beta)
    nll = 0.0 if type(nll_weight) is float and nll_weight == 0 else _number("nll_weight", nll_weight)
    _both("ref_chosen", ref_chosen, "ref_rejected", ref_rejected)
    _both("chosen_count", chosen_count, "rejected_count", rejected_count)
    _both("chosen_aligned", chosen_aligned, "rejected_aligned", rejected_aligned)
    if of_kind.reference is True and ref_chosen is None:
        raise ValueError(f"ref_chosen: expected an array for kind {kind!r}, got None")
    if of_kind.reference is False and ref_chosen is not None:
        got = type(ref_chosen).__name__
        raise ValueError(f"ref_chosen: expected None for kind {kind!r}, which has no reference, got {got}")
    if kind == "sigmoid_norm" and chosen_count is None:
        raise ValueError("chosen_count: expected an array for kind 'sigmoid_norm', got None")
    if of_kind.sort != UNSORTED or of_kind.number == KTO:
        if chosen_aligned is not None:
            got = type(chosen_aligned).__name__
            raise ValueError(f"chosen_aligned: expected None for kind {kind!r}, which has no pairs, got {got}")
        if nll != 0:
            got = _check.shown(nll_weight)
            raise ValueError(f"nll_weight: expected 0 for kind {kind!r}, which has no pairs, got {got}")
    numbers = [
        beta,
        smoothing,
        margin,
        0.05 if tau is None else _number("tau", tau, above=0),
        of_alpha,
        nll,
        1 / (2 * beta),
        math.log1p(-smoothing),
        math.log(smoothing) if smoothing > 0 else 0.0,
        1 - 2 * smoothing,
        1.0 if chosen_weight is None else _number("chosen_weight", chosen_weight),
        1.0 if rejected_weight is None else _number("rejected_weight", rejected_weight),
    ]
    average = NO_AVERAGE if chosen_count is None else of_kind.average
    how = (of_kind.number, of_kind.sort, score, average, numbers)
    arrays = (
        policy_chosen, policy_rejected, ref_chosen, ref_rejected, chosen_count, rejected_count, chosen_aligned,
        rejected_aligned, kl,
    )  # fmt: skip
    losses, chosen, rejected, vector = _call.call(_FORWARD, arrays, how)[:4]
    return PreferenceLoss(losses, chosen, rejected, PreferenceMetrics(vector))


def _refuse_others(kind: str, options: tuple[Any, ...]) -> None:
    for name, value in zip(OPTIONS, options, strict=True):
        if value is not None and name not in KINDS[kind].options:
            got = value if isinstance(value, (int, float, str)) else type(value).__name__
            words = _check.shown(got)
            raise ValueError(f"{name}: expected None for kind {kind!r}, which has no such option, got {words}")


def _number(name: str, value: Any, above: float = -math.inf) -> float:
    wanted = "a finite number" + ("" if above == -math.inf else f" > {above:g}")
    return _check.single(name, value, lambda x: above < x < math.inf, wanted)


def _smoothing(kind: str, value: Any) -> float:
    high, is_open = 0.5 if kind == "robust" else 1.0, kind == "exo_pair"
    interval = f"{'(' if is_open else '['}0, {high:g})"

    def allows(x: float) -> bool:
        return 0 <= x < high and not (is_open and x == 0)

    return _check.single("label_smoothing", value, allows, f"a number in {interval}")


def _both(first: str, a: Any, second: str, b: Any) -> None:
    if (a is None) != (b is None):
        missing, present = (first, second) if a is None else (second, first)
        raise ValueError(f"{missing}: expected an array beside {present}, got None")


def _score(kind: str, f_divergence: str | None, f_alpha: float | None, alpha: float | None) -> tuple[int, float]:
    """Returns the number of the score function in the contract, and its alpha."""
    if kind == "alphapo":
        if alpha is None:
            raise ValueError("alpha: expected a number for kind 'alphapo', got None")
        value = _number("alpha", alpha)
        return (LOG_RATIO, 1.0) if _check.in_float32(value) == 0 else (ALPHA_PO, value)  # the limit at 0
    name = "reverse_kl" if f_divergence is None else f_divergence
    _check.one_of("f_divergence", name, tuple(DIVERGENCES))
    if (name == "alpha_divergence") != (f_alpha is not None):
        wanted = "a number for" if f_alpha is None else "None beside"
        raise ValueError(f"f_alpha: expected {wanted} f_divergence={name!r}, got {_check.shown(f_alpha)}")
    if f_alpha is None:
        return DIVERGENCES[name], 1.0
    value = _number("f_alpha", f_alpha)
    return (LOG_RATIO, 1.0) if abs(value - 1) < 1e-6 else (ALPHA_DIVERGENCE, value)


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _largest(each: float) -> Callable[..., Any]:
    return lambda expected, largest: each * (expected + (1 + largest + abs(largest - 1)) / 2)


_OFF_PREFERENCE = Bound(
    _largest(4e-6),
    "4e-6 * (expected + max(1, largest))",
    "differences of sums of log-probabilities, an exponential to 2.9e-6 where it counts, and some products",
)
_OFF_PREFERENCE_SLOPE = Bound(
    _largest(2e-5), "2e-5 * (expected + max(1, largest))", "products of as many sigmoids and exponentials as there are"
)


def _contract_rows() -> Iterator[Row]:
    pairs = OF_TOKENS | {"kind": "elementwise", "stem": "preference_loss"}
    for output in ("losses", "chosen_rewards", "rejected_rewards"):
        yield Row("preference_loss", output, "forward", bound=_OFF_PREFERENCE, **pairs)
    means = pairs | {"kind": "scan", "keeps": ("layout", "runs")}  # means over all pairs
    yield Row("preference_loss", "metrics", "forward", bound=_OFF_PREFERENCE, **means)
    yield Row("preference_loss", "d_policy", "backward", bound=_OFF_PREFERENCE_SLOPE, **pairs)


add_rows(_contract_rows())
