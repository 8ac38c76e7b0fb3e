"""Advantages and returns over the tokens of sequences: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/gae.h."""

from __future__ import annotations

from typing import Any, Literal

from .. import _check
from .._call import call
from .._native import functions
from .._operator import Array, Operator
from .._types import AnyArray, ArrayT, Generic, NamedTuple, RolloutNan
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

_C = functions(
    discounted_returns="object*4, bool, object, int",
    gae="object*8, int",
    vtrace="object*11, bool, object, int",
)


class GaeResult(NamedTuple, Generic[ArrayT]):
    """Each of the shape of ``rewards``, float32."""

    advantages: ArrayT
    returns: ArrayT


_MASK, _SEQUENCES = Array("mask", "mask", optional=True), Array("cu_seqlens", "cu_seqlens", optional=True)
_BOOTSTRAP = Array("bootstrap", "sequences", optional=True)


def _check_numbers(arrays: Any, how: tuple[Any, ...], sequences: Any) -> None:
    for name, share in zip(("gamma", "lam"), how[:2], strict=False):
        if not isinstance(share, bool):  # discounted_returns has a bool in place of lam
            _check.share(name, share)
    for name, bound in zip(("rho_bar", "c_bar"), how[2:4], strict=False):
        _check.positive(name, bound)


_GAE = Operator(
    "gae",
    (Array("rewards", "first tokens"), Array("values", "tokens"), _MASK, _SEQUENCES, _BOOTSTRAP),
    "float gamma, float lam",
    outputs=lambda arrays, how: (arrays[0].shape,) * 2,
    dtypes=("float32",) * 2,
    native=lambda arrays, how, *tail: _C.gae(*arrays, *how, *tail),
    check=_check_numbers,
)
_DISCOUNTED_RETURNS = Operator(
    "discounted_returns",
    (Array("rewards", "first tokens"), _MASK, _SEQUENCES),
    "float gamma, bool reset",
    outputs=lambda arrays, how: (None, arrays[0].shape),
    dtypes=("float32",) * 2,
    native=lambda arrays, how, *tail: _C.discounted_returns(*arrays, *how, *tail),
    check=_check_numbers,
)
_VTRACE = Operator(
    "vtrace",
    (
        Array("rewards", "first tokens"),
        *(Array(name, "tokens") for name in ("values", "logprob", "rollout_logprob")),
        _MASK,
        _SEQUENCES,
        _BOOTSTRAP,
    ),
    "float gamma, float lam, float rho_bar, float c_bar, bool rollout_neutral",
    outputs=lambda arrays, how: (arrays[0].shape,) * 2,
    dtypes=("float32",) * 2,
    native=lambda arrays, how, *tail: _C.vtrace(*arrays, *how, *tail),
    check=_check_numbers,
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

    At a token whose mask is 0 the next value and the advantage are carried on, not reset, so that tokens of a tool or
    of the environment cost no discount. Nothing of such a token is read: it may hold NaN. A scan in chunks of 128
    tokens with the same bits padded or packed, in any batch, at any position and stride, and on every backend. Nothing
    here is
    differentiated: advantages are constants, and inputs that require a gradient are taken as detached.

    Args:
        rewards: ``[num_sequences, num_tokens]``, or ``[num_tokens]`` of one sequence or beside ``cu_seqlens``; float32,
            last dimension contiguous.
        values: of the shape and dtype of ``rewards``.
        mask: of that shape, any mask (docs/tokens.md): tokens that are not 0 count. None: all do.
        cu_seqlens: ``[num_sequences + 1]``, int32 or int64, from 0 on and not descending (docs/tokens.md). Others are a
            ValueError on the CPU; on a GPU the results of such sequences are NaN.
        gamma, lam: in ``[0, 1]``.
        bootstrap: ``[num_sequences]`` float32, the value behind each sequence's last token that counts; None: 0. It
            counts.
    Returns:
        ``(advantages, returns)``, float32 of the shape of ``rewards``; ``returns = advantages + values``. verl whitens
        the advantages after that: :func:`masked_whiten`. An empty or wholly masked sequence has advantages 0.
    Raises:
        TypeError for a dtype or a type; ValueError for a shape, a layout, a device or a value; RuntimeError where no
        kernel of this build serves the device.
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

    Args:
        rewards, mask, cu_seqlens: as of :func:`gae`.
        gamma: in ``[0, 1]``.
        masked: what a token whose mask is 0 does. ``"carry"``: it gets and hands on the sum behind it, without a
            discount, so that turns before the results of a tool see the rewards behind them (verl since 0.9.1, which
            writes 0 there); ``"reset"``: the sum begins anew before it, and it gets 0 (verl before).
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
    """V-trace: targets of the value function and advantages of the policy gradient from tokens of another policy.

    With ``ratio = exp(logprob - rollout_logprob)``, ``rho = min(rho_bar, ratio)`` and ``c = lam min(c_bar, ratio)``:
    ``v_t = V_t + rho_t (R_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1})`` and
    ``A_t = rho_t (R_t + gamma v_{t+1} - V_t)``. Masks and sequences as of :func:`gae`: what follows a token is the next
    one that counts.

    Args:
        rewards, values, mask, cu_seqlens, bootstrap: as of :func:`gae`.
        logprob, rollout_logprob: of the shape and dtype of ``rewards``, in nats: the policy that is trained and the one
            that sampled.
        gamma, lam: in ``[0, 1]``.
        rho_bar, c_bar: finite, > 0.
        rollout_nan: ``"nan"`` passes on a NaN of ``rollout_logprob``; ``"neutral"`` takes the ratio 1 there.
            :func:`mismatch_metrics` counts such tokens in ``nonfinite_fraction``.
    Returns:
        ``(advantages, returns)``, float32 of the shape of ``rewards``; ``returns`` are the targets ``v``. At a token
        whose mask is 0 the advantage is 0.
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
