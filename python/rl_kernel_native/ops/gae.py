"""Advantages and returns over the tokens of sequences: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/gae.h."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from .. import _check
from .._call import call
from .._native import functions
from .._operator import Operator
from .._types import AnyArray, ArrayT, Generic, NamedTuple, RolloutNan
from ..contract import OF_TOKENS, Bound, Row, U, add_rows
from ..reference.gae import discounted_returns_reference, gae_reference, vtrace_reference

__all__ = [
    "GaeResult",
    "discounted_returns",
    "discounted_returns_reference",
    "gae",
    "gae_reference",
    "vtrace",
    "vtrace_reference",
]

functions(discounted_returns="object*4, bool, object, int", gae="object*8, int", vtrace="object*11, bool, object, int")


class GaeResult(NamedTuple, Generic[ArrayT]):
    """The result of :func:`gae` and :func:`vtrace`. Each field is float32 with the shape of ``rewards``."""

    advantages: ArrayT
    returns: ArrayT


_GAE = Operator(
    "gae",
    "rewards, values, mask?, cu_seqlens?, bootstrap?",
    "float gamma, float lam",
    dtypes=("float32",) * 2,
)
_DISCOUNTED_RETURNS = Operator(
    "discounted_returns",
    "rewards, mask?, cu_seqlens?",
    "float gamma, bool reset",
    outputs=lambda arrays, how: (None, arrays[0].shape),
    dtypes=("float32",) * 2,
)
_VTRACE = Operator(
    "vtrace",
    "rewards, values, logprob, rollout_logprob, mask?, cu_seqlens?, bootstrap?",
    "float gamma, float lam, float rho_bar, float c_bar, bool rollout_neutral",
    dtypes=("float32",) * 2,
)


def gae(
    rewards: ArrayT,
    values: AnyArray,
    mask: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    bootstrap: AnyArray | None = None,
) -> GaeResult[ArrayT]:
    """Generalised advantage estimation, ``A_t = R_t + gamma V_{t+1} - V_t + gamma lam A_{t+1}``, as verl computes it.

    A token whose mask is 0 passes on the next value and advantage unchanged, so tokens of a tool or of the environment
    add no discount. A token with mask 0 is not read and may hold NaN. The scan works in chunks of 128 tokens. A
    sequence has the same bits padded or packed, in any batch, at any position and stride, and on every backend.
    Advantages are constants without a gradient; inputs that require a gradient are treated as detached.

    Args:
        rewards: ``[num_sequences, num_tokens]``, or ``[num_tokens]`` for one sequence or with ``cu_seqlens``; float32,
            last dimension contiguous.
        values: of the shape and dtype of ``rewards``.
        mask: with the shape of ``rewards``, any mask (docs/tokens.md): tokens with a nonzero mask count. None: all
            tokens count.
        cu_seqlens: ``[num_sequences + 1]``, int32 or int64, from 0 on and not descending (docs/tokens.md). Other
            offsets are a ValueError on the CPU; on a GPU the results of such sequences are NaN.
        gamma, lam: in ``[0, 1]``.
        bootstrap: ``[num_sequences]`` float32, the value of the state after each sequence's last token that counts (0
            if the episode ended there). None: 0.
    Returns:
        ``(advantages, returns)``, float32 of the shape of ``rewards``; ``returns = advantages + values``. verl then
        whitens the advantages with :func:`masked_whiten`. An empty or wholly masked sequence has advantages 0.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value; RuntimeError if this
        build has no kernel for the device.
    Source:
        docs/numerics.md, rules 3 and 10; Schulman et al. 2016, arXiv:1506.02438; verl's compute_gae_advantage_return.

    Example:
        >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.4, 0.8]])
        >>> rk.gae(rewards, values, torch.ones(1, 3), gamma=1.0, lam=1.0).advantages
        tensor([[0.8000, 0.6000, 0.2000]])
    """
    how = (_check.number("gamma", gamma), _check.number("lam", lam))
    return GaeResult(*call(_GAE, (rewards, _given("values", values), mask, cu_seqlens, bootstrap), how))


def discounted_returns(
    rewards: ArrayT,
    mask: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    gamma: float = 1.0,
    *,
    masked: Literal["reset", "carry"] = "carry",
) -> ArrayT:
    """``G_t = R_t + gamma G_{t+1}``: REINFORCE++'s returns, before they are whitened.

    Returns are constants without a gradient; inputs that require a gradient are treated as detached.

    Args:
        rewards, mask, cu_seqlens: as for :func:`gae`.
        gamma: in ``[0, 1]``.
        masked: the rule for a token whose mask is 0. ``"carry"``: the token gets the sum of the next token and passes
            it on without a discount. Turns before a tool's results then see the rewards after these results. verl does
            this since 0.9.1, but writes 0 at the token itself. ``"reset"``: the token gets 0, and the sum restarts
            before it (earlier verl).
    Returns: float32 of the shape of ``rewards``.
    Raises: as :func:`gae`.
    Source: docs/numerics.md, rules 3 and 10; Hu 2025, arXiv:2501.03262.

    Example:
        >>> rk.discounted_returns(torch.tensor([[0.0, 0.0, 1.0]]), torch.ones(1, 3), gamma=0.5)
        tensor([[0.2500, 0.5000, 1.0000]])
    """
    _check.one_of("masked", masked, ("reset", "carry"))
    how = (_check.number("gamma", gamma), masked == "reset")
    return call(_DISCOUNTED_RETURNS, (rewards, mask, cu_seqlens), how)[1]


def vtrace(
    rewards: ArrayT,
    values: AnyArray,
    logprob: AnyArray,
    rollout_logprob: AnyArray,
    mask: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    *,
    bootstrap: AnyArray | None = None,
    rollout_nan: RolloutNan = "nan",
) -> GaeResult[ArrayT]:
    """V-trace: value targets and policy-gradient advantages, for tokens that another policy sampled.

    With ``ratio = exp(logprob - rollout_logprob)``, ``rho = min(rho_bar, ratio)`` and ``c = lam min(c_bar, ratio)``:
    ``v_t = V_t + rho_t (R_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1})`` and ``A_t = rho_t (R_t + gamma
    v_{t+1} - V_t)``. Masks and sequences are as for :func:`gae`: token t+1 is the next token that counts. Both results
    are constants without a gradient; inputs that require a gradient are treated as detached.

    Args:
        rewards, values, mask, cu_seqlens, bootstrap: as for :func:`gae`.
        logprob, rollout_logprob: with the shape and dtype of ``rewards``, in nats: log-probabilities under the trained
            policy and the sampling policy.
        gamma, lam: in ``[0, 1]``.
        rho_bar, c_bar: finite, > 0.
        rollout_nan: ``"nan"`` passes on a NaN of ``rollout_logprob``; ``"neutral"`` takes the ratio 1 for such a token.
            :func:`mismatch_metrics` counts such tokens in ``nonfinite_fraction``.
    Returns:
        ``(advantages, returns)``, float32 of the shape of ``rewards``; ``returns`` are the targets ``v``. A token whose
        mask is 0 has advantage 0.
    Raises: as :func:`gae`.
    Source: docs/numerics.md, rules 3 and 10; Espeholt et al. 2018, arXiv:1802.01561.

    Example:
        >>> old, new = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -1.0]])
        >>> rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
        >>> rk.vtrace(rewards, values, new, old)
        GaeResult(advantages=tensor([[0.5000, 0.5000]]), returns=tensor([[1., 1.]]))
    """
    arrays = (
        rewards, _given("values", values), _given("logprob", logprob), _given("rollout_logprob", rollout_logprob), mask,
        cu_seqlens, bootstrap,
    )  # fmt: skip
    numbers = {"gamma": gamma, "lam": lam, "rho_bar": rho_bar, "c_bar": c_bar}
    how: tuple[Any, ...] = tuple(_check.number(name, value) for name, value in numbers.items())
    return GaeResult(*call(_VTRACE, arrays, (*how, _check.neutral_rollout(rollout_nan))))


def _given(name: str, array: Any) -> Any:
    if array is None:
        raise TypeError(f"{name}: expected an array that speaks DLPack, got NoneType")
    return array


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_SCAN = Bound(
    lambda scale: 12 * U * (scale + 1e-3),
    "12 * u * (scale + 1e-3)",
    "roundings of a token, of a chunk's tree and of the coefficients, of the sequence's largest sum behind the token; "
    "one that grows with the tokens is below it by what gamma * lam leaves",
)


def _contract_rows() -> Iterator[Row]:
    for operator, outputs in (
        ("gae", ("advantages", "returns")), ("discounted_returns", ("returns",)), ("vtrace", ("advantages", "returns"))
    ):  # fmt: skip
        for output in outputs:
            yield Row(operator, output, "forward", kind="scan", bound=_OFF_SCAN, stem="gae", **OF_TOKENS)


add_rows(_contract_rows())
