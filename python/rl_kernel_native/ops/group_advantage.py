"""Advantages of sequences in their groups: arguments, dispatch, results. The contract is
cpp/include/rlk/ops/group_advantage.h."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

from .. import _check, _rewards
from .._call import call
from .._native import functions
from .._operator import Operator
from .._types import AnyArray, ArrayT, Generic, Group, GroupKind, NamedTuple
from ..contract import OF_TOKENS, Bound, Row, U, add_rows
from ..reference.group_advantage import group_advantage_reference

__all__ = ["GroupAdvantageResult", "GroupAdvantageStatus", "group_advantage", "group_advantage_reference"]

functions(group_advantage="object*5, int*4, bool*4, object*2, bool*2, object, int")


class GroupAdvantageStatus(enum.IntFlag):
    """Bits of the result's ``status``."""

    CONSTANT = 1  # all rewards of the group that count are equal, so the group gives no gradient
    ALONE = 2  # only one reward of the group counts
    EXCLUDED = 4  # a NaN reward that does not count
    NOT_FINITE = 8  # the advantage is NaN or infinite


class GroupAdvantageResult(NamedTuple, Generic[ArrayT]):
    """Each field is ``[num_sequences]``, or None if it was not asked for."""

    advantage: ArrayT  # float32
    mean: ArrayT | Any = None  # float32: the value that was subtracted
    std: ArrayT | Any = None  # float32: standard deviation of the group; of the batch with scale="batch"
    status: ArrayT | Any = None  # int32, bits of GroupAdvantageStatus


_BASELINES = {"none": 0, "mean": 1, "length_mean": 2, "given": 3, "batch_mean": 4}
_NOT_OF_GROUPS = ("none", "given", "batch_mean")
_SCALES = {"none": 0, "group": 1, "batch": 2}
_ALONE = {"score": 0, "zero": 1}


class _Kind(NamedTuple):
    """The formula of one ``kind``: its options in the contract, and its defaults for arguments that the caller leaves
    None."""

    baseline: str = "mean"
    scale: str = "none"
    eps: float = 1e-6
    alone: str = "score"
    exclude_nan: bool = False
    leave_one_out: bool = False
    best_only: bool = False
    by_nonzero: bool = False


_KINDS = {
    "grpo": _Kind(scale="group"),
    "grpo_trl": _Kind(scale="group", eps=1e-4, alone="zero", exclude_nan=True),
    "dr_grpo": _Kind(),
    "rloo": _Kind(leave_one_out=True),
    "remax": _Kind(baseline="given"),
    "opo": _Kind(baseline="length_mean"),
    "passk": _Kind(scale="group", best_only=True),
    "gpg": _Kind(by_nonzero=True),
    "reinforce_pp": _Kind(baseline="none"),
    "reinforce_pp_baseline": _Kind(),
    "areal": _Kind(baseline="batch_mean", scale="group", eps=1e-5),
}


def _outputs(arrays: Any, how: tuple[Any, ...]) -> Any:
    """Returns the shapes of advantage, mean, std and status."""
    shape, (stats, status) = arrays[0].shape, how[-2:]
    return shape, shape if stats else None, shape if stats else None, shape if status else None


# baseline_kind, scale and alone are enum values of the contract.
_GROUP_ADVANTAGE = Operator(
    "group_advantage",
    "rewards, group_offsets?, group_ids?, lengths?, baseline?",
    "SymInt group_size, int baseline_kind, int scale, int alone, bool leave_one_out, bool best_only, bool by_nonzero, "
    "bool exclude_nan, float eps, float f_norm, bool return_stats, bool return_status",
    outputs=_outputs,
    dtypes=("float32", "float32", "float32", "int32"),
)


@overload
def group_advantage(
    rewards: ArrayT, group_offsets: AnyArray | None = None, *, group_ids: AnyArray | None = None,
    group_size: int | None = None, kind: GroupKind = "grpo", eps: float | None = None,
    scale: Literal["none", "group", "batch"] | None = None, lengths: AnyArray | None = None,
    baseline: AnyArray | None = None, f_norm: float = 1.0, exclude_nan: bool | None = None,
    alone: Literal["score", "zero"] | None = None, process_group: Group = None, return_stats: Literal[False] = False,
    return_status: Literal[False] = False
) -> ArrayT: ...  # fmt: skip


@overload
def group_advantage(
    rewards: ArrayT, group_offsets: AnyArray | None = None, *, group_ids: AnyArray | None = None,
    group_size: int | None = None, kind: GroupKind = "grpo", eps: float | None = None,
    scale: Literal["none", "group", "batch"] | None = None, lengths: AnyArray | None = None,
    baseline: AnyArray | None = None, f_norm: float = 1.0, exclude_nan: bool | None = None,
    alone: Literal["score", "zero"] | None = None, process_group: Group = None, return_stats: bool = False,
    return_status: bool = False
) -> GroupAdvantageResult[ArrayT]: ...  # fmt: skip


@overload
def group_advantage(
    rewards: Sequence[float], group_offsets: AnyArray | None = None, *, group_ids: AnyArray | None = None,
    group_size: int | None = None, kind: GroupKind = "grpo", eps: float | None = None,
    scale: Literal["none", "group", "batch"] | None = None, lengths: AnyArray | None = None,
    baseline: AnyArray | None = None, f_norm: float = 1.0, exclude_nan: bool | None = None,
    alone: Literal["score", "zero"] | None = None, process_group: Group = None, return_stats: bool = False,
    return_status: bool = False
) -> Any: ...  # fmt: skip
def group_advantage(
    rewards: Any,
    group_offsets: Any = None,
    *,
    group_ids: Any = None,
    group_size: int | None = None,
    kind: str = "grpo",
    eps: float | None = None,
    scale: str | None = None,
    lengths: Any = None,
    baseline: Any = None,
    f_norm: float = 1.0,
    exclude_nan: bool | None = None,
    alone: str | None = None,
    process_group: Group = None,
    return_stats: bool = False,
    return_status: bool = False,
) -> Any:
    """Gives each sequence an advantage from its reward ``s`` and the rewards of its group (the answers to one prompt).

    ======================= ======================================================== ========================
    kind                    advantage                                                of
    ======================= ======================================================== ========================
    grpo                    ``(s - mean) / (std + eps)``, eps 1e-6                   verl
    grpo_trl                the same, eps 1e-4; one alone gets 0; NaN is excluded    TRL
    dr_grpo                 ``s - mean``                                             arXiv:2503.20783
    rloo                    ``n / (n - 1) (s - mean)``                               arXiv:2402.14740
    remax                   ``s - baseline`` (the reward of the greedy answer)       verl
    opo                     ``s - sum(lengths s) / sum(lengths)``                    verl
    passk                   the best alone: ``(max - second) / (std + eps)``         verl, GRPO pass@k
    gpg                     ``N / count_nonzero(rewards) (s - mean) / f_norm``       verl
    reinforce_pp            ``s``; whitened over tokens afterwards                   arXiv:2501.03262
    reinforce_pp_baseline   ``s - mean``; whitened over tokens afterwards            verl
    areal                   ``(s - M) / (sqrt(sum((s - M)**2) / (n - 1)) + eps)``,   AReaL
                            M the mean of the batch, the sum over the group
    ======================= ======================================================== ========================

    Standard deviations use Bessel's correction and two passes. A group of equal rewards gives exactly 0. An advantage
    has the same bits for any place of its group in the batch and on every backend. The kinds gpg and areal, and
    ``scale="batch"``, use statistics of the whole batch. Advantages are constants without a gradient; inputs that
    require a gradient are treated as detached.

    Args:
        rewards: ``[num_sequences]``, any stride: float32, or other floats, integers, bools and lists, which are rounded
            to float32 once. A list gives NumPy arrays.
        group_offsets: ``[num_groups + 1]``, int32 or int64, from 0 to ``num_sequences`` and not decreasing: group g is
            sequences ``[group_offsets[g], group_offsets[g + 1])``. Offsets that break this rule are a ValueError on the
            CPU; a GPU cuts the groups short and accesses no memory outside the arrays.
        group_ids: ``[num_sequences]``, int32 or int64: sequences with equal ids form a group, in any order.
        group_size: the size of consecutive groups. Pass exactly one of ``group_offsets``, ``group_ids`` and
            ``group_size``. Pass none of them for remax and reinforce_pp, which have no groups, and for areal with a
            ``scale`` other than ``"group"``.
        kind: a name from the table above.
        eps: >= 0, added to a standard deviation before the division; None: the default of ``kind``.
        scale: ``"group"``, ``"batch"`` or ``"none"``: the standard deviation to divide by, as TRL's ``scale_rewards``;
            None: the default of ``kind``.
        lengths: ``[num_sequences]``, int32, int64 or float32; only for opo.
        baseline: ``[num_sequences]``, as ``rewards``; only for remax.
        f_norm: > 0; only for gpg, otherwise 1.
        exclude_nan: True: a NaN reward does not count in its group and gets advantage 0, as in TRL. False: a NaN reward
            makes the advantages of its group NaN. None: the default of ``kind``.
        alone: the advantage in a group with a single reward. ``"score"`` computes it with mean 0 and standard deviation
            1, as verl does; ``"zero"`` makes it 0. None: the default of ``kind``. Kinds that use no statistic of the
            group refuse this argument. areal always subtracts the mean of the batch.
        process_group: a group of torch.distributed. The batch then holds the sequences of all ranks in rank order.
            Results have the same bits as on one rank with all sequences. Reward groups may span ranks. A rank may have
            no sequence, but all ranks must call. Give reward groups by ``group_ids`` or ``group_size``. The host waits
            for the device once.
        return_stats: also return ``mean``, the subtracted value, and ``std``.
        return_status: also return ``status``, bits of :class:`GroupAdvantageStatus`, for dynamic sampling.
    Returns:
        advantage ``[num_sequences]`` float32, or a :class:`GroupAdvantageResult` if more is asked for.
    Raises:
        TypeError for a wrong dtype or type; ValueError for a wrong shape, layout, device or value, or for an option
        without effect; RuntimeError if this build has no kernel for the device.
    Source:
        docs/numerics.md, rules 3 and 10; Shao et al. 2024, arXiv:2402.03300, and the table.

    Example:
        >>> rk.group_advantage([1.0, 0.0, 0.0, 1.0], group_size=4, kind="rloo")
        array([ 0.6666667, -0.6666667, -0.6666667,  0.6666667], dtype=float32)
        >>> rk.group_advantage(torch.tensor([1, 0, 5, 5]), group_size=2)
        tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    _check.one_of("kind", kind, tuple(_KINDS))
    of = _KINDS[kind]
    scale = of.scale if scale is None else scale
    given_alone = alone is not None
    alone = of.alone if alone is None else alone
    _check.one_of("scale", scale, tuple(_SCALES))
    _check.one_of("alone", alone, tuple(_ALONE))
    size = _group_size(of, kind, group_offsets, group_ids, group_size, scale)
    for name, array, wanted in (
        ("lengths", lengths, of.baseline == "length_mean"),
        ("baseline", baseline, of.baseline == "given"),
    ):
        if wanted and array is None:
            raise TypeError(f"{name}: expected an array that speaks DLPack (of kind {kind!r}), got NoneType")
        if not wanted and array is not None:
            raise ValueError(f"{name}: expected None for kind {kind!r}, got an array")
    rewards = _rewards.as_float32(rewards, "rewards")
    group_offsets, group_ids, lengths = (
        _rewards.as_integers(array, name, like=rewards)
        for name, array in (("group_offsets", group_offsets), ("group_ids", group_ids), ("lengths", lengths))
    )
    if baseline is not None:
        baseline = _rewards.as_float32(baseline, "baseline", like=rewards)
    norm = _check.number("f_norm", f_norm)
    if norm != 1 and not of.by_nonzero:
        got = _check.shown(f_norm)
        raise ValueError(f"f_norm: expected 1 for kind {kind!r}, which does not divide by it, got {got}")
    if given_alone and of.baseline in _NOT_OF_GROUPS and scale != "group":
        got = _check.shown(alone)
        raise ValueError(f"alone: expected None for kind {kind!r}, which uses no statistic of its group, got {got}")
    how = (
        size,
        _BASELINES[of.baseline],
        _SCALES[scale],
        _ALONE[alone],
        of.leave_one_out,
        of.best_only,
        of.by_nonzero,
        of.exclude_nan if exclude_nan is None else _check.flag("exclude_nan", exclude_nan),
        of.eps if eps is None else _check.number("eps", eps),
        norm,
        _check.flag("return_stats", return_stats),
        _check.flag("return_status", return_status),
    )
    arrays = (rewards, group_offsets, group_ids, lengths, baseline)
    found = call(_GROUP_ADVANTAGE, arrays, how) if process_group is None else _over_ranks(process_group, arrays, how)
    result = GroupAdvantageResult(*found)
    return result if return_stats or return_status else result.advantage


def _over_ranks(group: Any, arrays: tuple[Any, ...], how: tuple[Any, ...]) -> tuple[Any, ...]:
    """Computes the advantages of all ranks' sequences, and returns this rank's rows."""
    from .. import _ranks

    rewards, offsets, ids, lengths, baseline = arrays
    if offsets is not None:
        raise ValueError("group_offsets: expected group_ids or group_size beside process_group, got an array")
    named = {"rewards": rewards, "group_ids": ids, "lengths": lengths, "baseline": baseline}
    _ranks.require_shares(group, **named)
    for name, array in named.items():
        if array is not None and (array.dim() != 1 or array.shape != rewards.shape):
            expected = "[num_sequences]" if name == "rewards" else f"{list(rewards.shape)} (that of rewards)"
            raise ValueError(f"{name}: expected shape {expected}, got {list(array.shape)}")
    counts = [of_rank[0] for of_rank in _ranks.sizes(group, rewards.shape[0], like=rewards)]
    whole = (None if a is None else _ranks.gathered(group, a.detach(), counts) for a in arrays)
    rows = _ranks.place(group, counts)
    return tuple(None if a is None else a[rows].clone() for a in call(_GROUP_ADVANTAGE, tuple(whole), how))


def _group_size(of: _Kind, kind: str, offsets: Any, ids: Any, size: Any, scale: str) -> int:
    given = [
        name
        for name, value in (("group_offsets", offsets), ("group_ids", ids), ("group_size", size))
        if value is not None
    ]
    if len(given) == 1:
        count = 0 if size is None else _check.integer64("group_size", size)
        if size is not None and count < 1:
            raise ValueError(f"group_size: expected a number >= 1, got {count}")
        return count
    if not given and of.baseline in _NOT_OF_GROUPS and scale != "group":
        return 1
    got = " and ".join(given) or "none of them"
    raise ValueError(
        f"group_offsets: expected one of group_offsets, group_ids and group_size for kind {kind!r}, got {got}"
    )


# ---- error bounds relative to float64 --------------------------------------------------------------------------------

_OFF_ADVANTAGE = Bound(
    lambda scale, expected: 8 * U * (scale + expected + 1e-6),
    "8 * u * (scale + expected + 1e-6)",
    "trees over rewards, a difference, a standard deviation in two passes and a quotient",
)


def _contract_rows() -> Iterator[Row]:
    # In this contract row, the unit whose bits are fixed is a group: its sequences stay together.
    grouped = OF_TOKENS | {"kind": "scan", "stem": "group_advantage"}
    yield Row("group_advantage", "advantage", "forward", bound=_OFF_ADVANTAGE, **grouped)


add_rows(_contract_rows())
