"""Selection of the tokens for Clip-Cov and KL-Cov: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/covariance_mask.h."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

from .. import _check
from .._call import call
from .._native import functions
from .._operator import Array, Operator
from .._types import AnyArray, ArrayT
from ..contract import BATCH_OF_TOKENS, BITWISE, OF_TOKENS, Row, add_rows
from ..reference.covariance_mask import covariance_mask_reference

__all__ = ["covariance_mask", "covariance_mask_reference"]

functions(covariance_mask="object*5, int, float*5, int, object, int")

_KINDS = {"clip": 0, "kl": 1}  # CovarianceKind of the contract
ENTROPY = 2  # a third kind, which `entropy_mask` uses


def _first_name(how: tuple[Any, ...], _: Any) -> str:
    return "entropy" if how[0] == ENTROPY else "logprob"


COVARIANCE_MASK = Operator(
    "covariance_mask",
    (Array("logprob", called=_first_name), "old_logprob?, advantage?, mask?, cu_seqlens?"),
    "int kind, float ratio, float lower, float upper, float clip_low, float clip_high, SymInt seed",
)


def _epsilon(name: str, value: Any, most: float) -> float:
    return _check.single(name, value, lambda x: 0 <= x <= most, f"a number in [0, {most:g}]")


def options_of(
    kind: str, ratio: Any, lower: Any, upper: Any, epsilon_low: Any, epsilon_high: Any, seed: Any
) -> tuple[Any, ...]:
    """Returns the options as numbers, in the order of the extension's arguments."""
    _check.one_of("kind", kind, tuple(_KINDS))
    share = _check.number("ratio", ratio)
    if not 0 < share <= 1:
        raise ValueError(f"ratio: expected a number in (0, 1], got {_check.shown(ratio)}")
    if kind == "kl":
        given = {"lower": lower, "upper": upper, "epsilon_low": epsilon_low, "epsilon_high": epsilon_high, "seed": seed}
        for name, value in given.items():
            if value is not None:
                got = _check.shown(value)
                raise ValueError(f'{name}: expected None with kind="kl", which takes the largest, got {got}')
        return _KINDS[kind], share, 0.0, 0.0, 0.0, 0.0, 0
    least = _check.single("lower", 1.0 if lower is None else lower, lambda x: x == x, "a number")
    low = _check.in_float32(least)
    most = _check.single(
        "upper", 5.0 if upper is None else upper, lambda x: low < x, lambda: f"a number > lower = {least:g}"
    )
    low = _epsilon("epsilon_low", 0.2 if epsilon_low is None else epsilon_low, 1.0)
    high = _epsilon("epsilon_high", 0.2 if epsilon_high is None else epsilon_high, math.inf)
    if seed is None:
        raise ValueError('seed: expected an integer, which kind="clip" draws by, got None')
    number = _check.integer64("seed", seed)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"seed: expected an integer in [0, 2^63), got {number}")
    return _KINDS[kind], share, least, most, 1.0 - low, 1.0 + high, number


def covariance_mask(
    logprob: ArrayT,
    old_logprob: AnyArray | None,
    advantage: AnyArray,
    mask: AnyArray | None = None,
    *,
    kind: Literal["clip", "kl"],
    ratio: float,
    seed: int | None = None,
    lower: float | None = None,
    upper: float | None = None,
    epsilon_low: float | None = None,
    epsilon_high: float | None = None,
    cu_seqlens: AnyArray | None = None,
) -> ArrayT:
    """Selects the tokens of Clip-Cov or KL-Cov by the covariance of log-probability and advantage, ``(A - mean(A)) (l -
    mean(l))`` over the tokens of the call. ``policy_loss`` takes the result as ``selected``.

    The selection runs on the device, and nothing waits for the host. The selection does not depend on padding, packing,
    strides or the backend. A draw depends only on the seed, the sequence's index in the call and the token's position.
    Means and token counts are taken over this call: a micro-batch selects among its own tokens, as in verl. The result
    has no gradient; inputs that require a gradient are treated as detached.

    Args:
        logprob: float32 ``[num_sequences, num_tokens]``, or ``[num_tokens]`` packed (or of one sequence); tokens
            contiguous, rows with any stride. Log-probabilities of the trained policy.
        old_logprob: as ``logprob``, for the policy in the ratio's denominator. Pass None with ``kind="kl"``; the array
            is required with ``kind="clip"``.
        advantage: as ``logprob``, or one per sequence: ``[num_sequences]`` or ``[num_sequences, 1]``. If there are as
            many packed tokens as sequences, an array of one dimension has one number per token. In this case use
            ``[num_sequences, 1]`` for one number per sequence.
        mask: of the shape of ``logprob``; any mask (docs/tokens.md). A token counts if its mask is not 0; other tokens
            may hold any value. None: all tokens count.
        kind: ``"clip"`` draws tokens at random from those whose covariance is in ``(lower, upper)`` and that PPO does
            not clip. ``"kl"`` takes the tokens with the largest covariance, and among equal covariances the first
            tokens.
        ratio: the share of the tokens that count, in (0, 1]: ``max(int(ratio * tokens), 1)`` tokens are selected, or
            fewer if there are fewer candidates.
        seed: for ``"clip"``; an integer in ``[0, 2^63)``, a new seed for every step.
        lower, upper: for ``"clip"``; None: 1 and 5.
        epsilon_low, epsilon_high: for ``"clip"``: PPO clips the ratio to ``[1 - epsilon_low, 1 + epsilon_high]``; None:
            0.2.
        cu_seqlens: int32 or int64 ``[num_sequences + 1]``: packed sequence s is ``[cu_seqlens[s], cu_seqlens[s + 1])``.
    Returns: float32 with the shape of ``logprob``: 1 for a selected token, else 0.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value, or for an argument
        that the kind does not use; RuntimeError if this build has no kernel for the device. On a CPU, bad cu_seqlens
        are a ValueError (docs/tokens.md); on a GPU the whole result is NaN.
    Source: docs/numerics.md, rules 3 and 10; docs/objectives.md; Cui et al. 2025, arXiv:2505.22617; verl's
        compute_policy_loss_clip_cov and compute_policy_loss_kl_cov; Philox after Salmon et al., SC 2011.
    Example:
        >>> logprob = torch.tensor([[-1.0, -2.0, -0.5, -3.0]])
        >>> advantage = torch.tensor([[1.0, -1.0, 2.0, -2.0]])
        >>> rk.covariance_mask(logprob, None, advantage, kind="kl", ratio=0.5)  # the half with the largest covariance
        tensor([[0., 0., 1., 1.]])
    """
    options = options_of(kind, ratio, lower, upper, epsilon_low, epsilon_high, seed)
    if kind == "kl" and old_logprob is not None:
        raise ValueError('old_logprob: expected None with kind="kl", which has no ratio, got an array')
    if kind == "clip" and old_logprob is None:
        raise ValueError('old_logprob: expected an array, which kind="clip" needs, got None')
    return call(COVARIANCE_MASK, (logprob, old_logprob, advantage, mask, cu_seqlens), options)[0]


# ---- error bounds relative to float64 --------------------------------------------------------------------------------


def _contract_rows() -> Iterator[Row]:
    drawn = OF_TOKENS | {"keeps": BATCH_OF_TOKENS, "kind": "integers", "stem": "covariance_mask"}
    yield Row("covariance_mask", "selected", "forward", bound=BITWISE, **drawn)


add_rows(_contract_rows())
