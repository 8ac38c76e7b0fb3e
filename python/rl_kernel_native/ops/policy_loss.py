"""Policy objectives: arguments, dispatch, results. The contract is cpp/include/rlk/ops/policy_loss.h."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from .._call import call, call_with_gradients
from .._metrics import MetricVector
from .._native import functions
from .._operator import Array, Loss, Operator, kept
from .._semantics import LogprobSemantics, require_same_semantics
from .._token_weight import weighed
from .._types import AnyArray, ArrayT, Generic, NamedTuple
from ..contract import LOSS, OF_TOKENS, SLOPE_OF_TOKEN, SUMMED_METRICS, Bound, Row, add_rows
from ..reference.policy_loss import policy_loss_reference
from .mismatch_metrics import MismatchMetrics
from .policy_spec import PolicySpec, checked_denominator

__all__ = [
    "PolicyGradients",
    "PolicyLoss",
    "PolicyMetrics",
    "PolicySpec",
    "policy_loss",
    "policy_loss_and_grad",
    "policy_loss_reference",
]

_C = functions(policy_loss="object*12, bool*3, object, int")

METRICS = (
    "loss",
    "policy_loss",
    "kl_loss",
    "entropy_loss",
    "num_tokens",
    "num_sequences",
    "denominator",
    "policy_sum",
    "kl_sum",
    "entropy_sum",
    "clip_fraction",
    "clip_fraction_dual",
    "clip_fraction_low",
    "clip_fraction_high",
    "ppo_kl",
    "kl",
    "entropy",
    "ratio_mean",
    "ratio_max",
    "importance_mean",
    "importance_max",
    "importance_clip_fraction",
    "importance_ess",
    "mismatch_mean",
    "mismatch_max",
)
_WITH_RATIO = (*METRICS, *(f"ratio_{name}" for name in MismatchMetrics.names))


class PolicyMetrics(MetricVector):
    """Scalars of one call in one float32 vector on the call's device. ``metrics.kl`` is one element, which stays on the
    device; ``metrics.asdict()`` copies all elements to the host once. PolicyMetric in the contract defines the scalars.

    With ``ratio_metrics``, the same vector also measures how far the trained policy is from the old policy.
    ``metrics.ratio`` is a :class:`MismatchMetrics` with a histogram of log-ratios. The names of its elements in this
    vector begin with ``ratio_``."""

    names: tuple[str, ...] = METRICS

    def __init__(self, vector: Any, ratio_metrics: bool = False) -> None:
        super().__init__(vector)
        if ratio_metrics:
            self.names = _WITH_RATIO

    @property
    def ratio(self) -> MismatchMetrics:
        if len(self.names) == len(METRICS):
            raise ValueError("ratio_metrics: expected True for metrics.ratio, got False")
        return MismatchMetrics(self.vector[len(METRICS) :])


class PolicyLoss(NamedTuple, Generic[ArrayT]):
    """``loss``, float32 and differentiable in torch, and its :class:`PolicyMetrics`."""

    loss: ArrayT
    metrics: PolicyMetrics


class PolicyGradients(NamedTuple, Generic[ArrayT]):
    """The result of :func:`policy_loss_and_grad`; ``d_entropy`` is None without an entropy."""

    loss: ArrayT
    metrics: PolicyMetrics
    d_logprob: ArrayT
    d_entropy: ArrayT | Any


_NO_GRADIENTS = (False, False)
_IMPORTANCE_FIELD, _GIVEN = 27, 4.0  # place of `importance` in a spec's numbers; the number of "given"


def _importance_name(how: tuple[Any, ...], _: Any) -> str:
    spec = how[0]
    gives = spec.importance == "given" if isinstance(spec, PolicySpec) else spec[_IMPORTANCE_FIELD] == _GIVEN
    return "importance_weight" if gives else "rollout_logprob"


def _native(arrays: Any, how: tuple[Any, ...], *tail: Any) -> Any:
    spec, value, ratio_metrics, *given = how
    wanted = given or [x is not None for x in arrays[:2]]
    packed = spec.packed if isinstance(spec, PolicySpec) else struct.pack(f"{len(spec)}d", *spec)
    logprob, entropy, *others, selected, token_weight, denominator = arrays
    operands = (logprob, *others, entropy, selected, token_weight)
    return _C.policy_loss(*operands, packed, value or denominator, ratio_metrics, *wanted, *tail)


def _shapes(arrays: Any, how: tuple[Any, ...]) -> tuple[Any, ...]:
    metrics = len(_WITH_RATIO if how[2] else METRICS)
    return (), (metrics,), *(None if x is None else x.shape for x in arrays[:2])


# The option `spec` is a PolicySpec; in a call by the schema, it is the list of the spec's numbers. `denominator_value`
# is 0 if no number was given.
_POLICY_LOSS = Operator(
    "policy_loss",
    (
        "logprob, entropy?, old_logprob?, advantage, mask, cu_seqlens?, ref_logprob?",
        Array("importance", optional=True, called=_importance_name),
        "selected?, token_weight?",
        Array("denominator", optional=True, is_float32=True),
    ),
    "float[] spec, float denominator_value, bool ratio_metrics",
    outputs=_shapes,
    dtypes=("float32",) * 4,
    native=_native,
    gradient=kept((0, 1), Loss(outputs=2)),
    schema_options=lambda how: (list(how[0].numbers), *how[1:]),
)  # fmt: skip


def policy_loss(
    logprob: ArrayT,
    old_logprob: AnyArray | None,
    advantage: AnyArray,
    mask: AnyArray | None = None,
    *,
    spec: PolicySpec | None = None,
    cu_seqlens: AnyArray | None = None,
    ref_logprob: AnyArray | None = None,
    rollout_logprob: AnyArray | None = None,
    importance_weight: AnyArray | None = None,
    entropy: AnyArray | None = None,
    selected: AnyArray | None = None,
    token_weight: AnyArray | None = None,
    denominator: float | AnyArray | None = None,
    ratio_metrics: bool = False,
    semantics: tuple[LogprobSemantics, LogprobSemantics] | None = None,
) -> PolicyLoss[ArrayT]:
    """A policy-gradient loss over per-token log-probabilities, with its metrics. The same pass computes the gradients,
    so ``backward()`` only multiplies them by an incoming gradient that is not 1.

    Results have the same bits on all backends, padded and packed. Given a ``denominator``, gradients have the same bits
    for any split of the batch into micro-batches and ranks. The only exception is the entropy's gradient under
    ``spec.entropy_aggregation="token-mean"``, a mean over the call's tokens. Masked slots may hold any value.
    Differentiable (torch) in ``logprob`` and ``entropy``, once; the other arrays are constants.

    Args:
        logprob: float32 ``[num_sequences, num_tokens]``, or ``[num_tokens]`` packed (or of one sequence); tokens
            contiguous, rows with any stride. Log-probabilities of the trained policy.
        old_logprob: as ``logprob``, for the policy in the ratio's denominator. None: ``logprob`` itself, which gives a
            ratio of 1.
        advantage: as ``logprob``, or one per sequence: ``[num_sequences]`` or ``[num_sequences, 1]``. If there are as
            many packed tokens as sequences, an array of one dimension has one number per token. In this case use
            ``[num_sequences, 1]`` for one number per sequence.
        mask: of the shape of ``logprob``; any mask (docs/tokens.md). A token counts if its mask is not 0. Required: the
            default None is a TypeError, because an absent mask would count padding.
        spec: the objective: a :class:`PolicySpec`, or one of ``rl_kernel_native.presets``. Required: the default None
            is a TypeError.
        cu_seqlens: int32 or int64 ``[num_sequences + 1]``: packed sequence s is ``[cu_seqlens[s], cu_seqlens[s + 1])``.
        ref_logprob: as ``logprob``; required if ``spec.kl`` is set, else refused.
        rollout_logprob: as ``logprob``, from the sampling engine; required if ``spec.needs_rollout``, else refused.
            With :attr:`PolicySpec.lenient`, a call may lack this array, and arrays that the spec does not use are
            ignored.
        importance_weight: as ``advantage``; required if ``spec.importance == "given"``, else refused.
        entropy: as ``logprob``; required if ``spec.entropy_coef`` is not 0.
        selected: as ``logprob``, nonzero for a selected token; required in three cases, else refused. For
            ``"clip_cov"`` and ``"kl_cov"``, :func:`covariance_mask` selects the tokens. For ``"dppo"``, pass the tokens
            outside the trust region. With ``spec.drop_selected``, pass the tokens to drop; :func:`entropy_mask` gives
            the tokens to keep. A NaN selects nothing, without an error.
        token_weight: as ``logprob``: factor of a token's terms. Use this argument for fractional masks, because
            ``mask`` counts every nonzero value as 1. The default divisor of ``"token-mean"`` is the sum of these
            weights, and a sequence's mean divides by the sum of its own weights. A sum of 0 gives loss 0; a negative,
            subnormal, infinite or NaN sum gives NaN. Sequence ratios and the metrics' means still count each token as
            1.
        denominator: the divisor of the sum over tokens or sequences, such as the number of tokens in the global batch.
            The divisor is a finite number > 0, or an array of one float32 element on the device. An element of 0 gives
            loss 0 and gradients 0; a negative, subnormal, infinite or NaN element gives NaN, and
            ``metrics.denominator`` shows it. None: the number of tokens or sequences in this call. ``spec.aggregation
            == "constant"`` requires a denominator.
        ratio_metrics: also compute ``metrics.ratio``, which reads ``logprob`` and ``old_logprob`` once more.
        semantics: None, or a pair of :class:`LogprobSemantics`: one for ``logprob`` (and the trainer's
            ``old_logprob``), one for the engine's arrays. It is an error if the two semantics differ.
    Returns: :class:`PolicyLoss`. If no token counts, the loss and its gradients are 0.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value, or for an array that
        the spec does not use; RuntimeError if this build has no kernel for the device. On a CPU, bad cu_seqlens are a
        ValueError (docs/tokens.md); on a GPU the loss is NaN.
    Source: docs/numerics.md, rules 3 and 10; docs/objectives.md.

    Example:
        >>> logprob = torch.tensor([[-1.0, -2.0], [-0.5, -1.5]], requires_grad=True)
        >>> advantage, mask = torch.tensor([1.0, -1.0]), torch.ones(2, 2)
        >>> found = rk.policy_loss(logprob, logprob.detach(), advantage, mask, spec=rk.PolicySpec())
        >>> found.loss.backward()
        >>> logprob.grad
        tensor([[-0.2500, -0.2500],
                [ 0.2500,  0.2500]])
        >>> float(found.metrics.ratio_max)
        1.0
    """
    require_same_semantics(semantics)
    operands, how = _operands(
        logprob, old_logprob, advantage, mask, spec, cu_seqlens, ref_logprob, rollout_logprob, importance_weight,
        entropy, selected, token_weight, denominator, ratio_metrics,
    )  # fmt: skip
    loss, vector, *_ = call(_POLICY_LOSS, operands, how + _NO_GRADIENTS)
    return PolicyLoss(loss, PolicyMetrics(vector, ratio_metrics))


def policy_loss_and_grad(
    logprob: ArrayT,
    old_logprob: AnyArray | None,
    advantage: AnyArray,
    mask: AnyArray | None = None,
    *,
    spec: PolicySpec | None = None,
    cu_seqlens: AnyArray | None = None,
    ref_logprob: AnyArray | None = None,
    rollout_logprob: AnyArray | None = None,
    importance_weight: AnyArray | None = None,
    entropy: AnyArray | None = None,
    selected: AnyArray | None = None,
    token_weight: AnyArray | None = None,
    denominator: float | AnyArray | None = None,
    ratio_metrics: bool = False,
    semantics: tuple[LogprobSemantics, LogprobSemantics] | None = None,
) -> PolicyGradients[ArrayT]:
    """:func:`policy_loss` and its gradients without autograd, for callers that run backward themselves.

    Args: as :func:`policy_loss`; torch tensors that require a gradient are an error while gradients are enabled.
    Returns: :class:`PolicyGradients`: the gradients have the shape of ``logprob``, float32; masked slots are 0.
    Raises: as :func:`policy_loss`.
    Source: docs/numerics.md, rules 3 and 10.

    Example:
        >>> logprob, advantage, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([1.0]), torch.ones(1, 2)
        >>> rk.policy_loss_and_grad(logprob, logprob, advantage, mask, spec=rk.PolicySpec()).d_logprob
        tensor([[-0.5000, -0.5000]])
    """
    require_same_semantics(semantics)
    operands, how = _operands(
        logprob, old_logprob, advantage, mask, spec, cu_seqlens, ref_logprob, rollout_logprob, importance_weight,
        entropy, selected, token_weight, denominator, ratio_metrics,
    )  # fmt: skip
    loss, vector, d_logprob, d_entropy = call_with_gradients(_POLICY_LOSS, operands, how)
    return PolicyGradients(loss, PolicyMetrics(vector, ratio_metrics), d_logprob, d_entropy)


def _operands(
    logprob: Any, old_logprob: Any, advantage: Any, mask: Any, spec: Any, cu_seqlens: Any, ref_logprob: Any,
    rollout_logprob: Any, importance_weight: Any, entropy: Any, selected: Any, token_weight: Any, denominator: Any,
    ratio_metrics: Any,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """Checks the arguments, and returns the arrays and the options of the operator."""
    if mask is None:
        raise TypeError(
            "mask: expected an array of the shape of logprob, got None; a token counts where it is not 0, so "
            "torch.ones_like(logprob) counts every token"
        )
    if type(spec) is not PolicySpec:
        got = repr(spec) if isinstance(spec, str) else type(spec).__name__
        raise TypeError(
            f"spec: expected a PolicySpec, got {got}; rk.PolicySpec() is PPO's clip, and presets such as "
            'rk.presets.trl(loss_type="grpo") make those of frameworks'
        )
    if not isinstance(ratio_metrics, bool):
        raise TypeError(f"ratio_metrics: expected a bool, got {type(ratio_metrics).__name__}")
    if spec.lenient:
        if (importance_weight if spec.importance == "given" else rollout_logprob) is None:
            spec = spec.uncorrected
        ref_logprob = ref_logprob if spec.needs_ref else None
        rollout_logprob = rollout_logprob if spec.needs_rollout else None
        importance_weight = importance_weight if spec.importance == "given" else None
        selected = selected if spec.needs_selected else None
    if (ref_logprob is not None) != (spec.kl is not None):
        _refuse("ref_logprob", ref_logprob, "spec.kl is None", "spec.kl")
    if (rollout_logprob is not None) != spec.needs_rollout:
        _refuse(
            "rollout_logprob", rollout_logprob, "the spec has no use for it", "the spec's importance weights or drop"
        )
    given = spec.importance == "given"
    if (importance_weight is not None) != given:
        _refuse("importance_weight", importance_weight, 'spec.importance is not "given"', 'spec.importance = "given"')
    if (selected is not None) != spec.needs_selected:
        _refuse("selected", selected, "the spec has no use for it", "the spec's clip or drop_selected")
    if entropy is None and spec.entropy_coef != 0:
        _refuse("entropy", entropy, "", "spec.entropy_coef")
    denominator, value = checked_denominator(denominator, spec.aggregation, "spec.aggregation")
    if token_weight is not None:
        token_weight, total = _weighed(token_weight, logprob, mask, cu_seqlens, spec, denominator is None and not value)
        denominator = total if denominator is None and not value else denominator
    weights = importance_weight if given else rollout_logprob
    arrays = (logprob, entropy, old_logprob, advantage, mask, cu_seqlens, ref_logprob, weights, selected)
    return (*arrays, token_weight, denominator), (spec, value, ratio_metrics)


def _weighed(token_weight: Any, logprob: Any, mask: Any, cu_seqlens: Any, spec: PolicySpec, counts: bool) -> Any:
    if spec.clip == "gmpo":
        raise ValueError(
            'token_weight: expected None with clip="gmpo", whose loss has one term per sequence, got an array'
        )
    if spec.entropy_aggregation == "token-mean":
        raise ValueError('token_weight: expected None with entropy_aggregation="token-mean", got an array')
    over_tokens, mean = counts and spec.aggregation == "token-mean", spec.aggregation == "seq-mean-token-mean"
    return weighed(token_weight, logprob, "logprob", mask, cu_seqlens, over_tokens, mean)


def _refuse(name: str, array: Any, unused: str, needed: str) -> None:
    if array is None:
        raise ValueError(f"{name}: expected an array, which {needed} needs, got None")
    raise ValueError(f"{name}: expected None where {unused}, got {type(array).__name__}")


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_POLICY_ENTROPY = Bound(lambda largest: 1e-6 * largest, "1e-6 * largest", "a coefficient and a token's share")


def _contract_rows() -> Iterator[Row]:
    policy = OF_TOKENS | {"kind": "scan", "stem": "policy_loss"}
    batch = policy | {"keeps": ("layout", "runs")}  # sums over all sequences
    yield Row("policy_loss", "loss", "forward", bound=LOSS, **batch)
    yield Row("policy_loss", "metrics", "forward", bound=SUMMED_METRICS, **batch)
    yield Row("policy_loss", "d_logprob", "backward", bound=SLOPE_OF_TOKEN, **policy)
    yield Row("policy_loss", "d_entropy", "backward", bound=_OFF_POLICY_ENTROPY, **policy)


add_rows(_contract_rows())
