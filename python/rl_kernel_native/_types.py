"""Types of public signatures, for type checkers and readers: arrays of any framework, and results that contain them.

For a type checker, results have the type of the arguments if these are torch's, NumPy's or JAX's arrays. For other
arrays that support DLPack, results have the type :class:`AnyArray`.
"""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar


class AnyArray(Protocol):
    """An array that supports DLPack, from torch, NumPy, JAX, CuPy or any other framework."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...
    def __dlpack__(self, *, stream: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...


Exp: TypeAlias = Literal["hardware", "portable"] | None
Engine: TypeAlias = Literal["auto", "native"]
OnBadId: TypeAlias = Literal["nan", "raise"]
RolloutNan: TypeAlias = Literal["nan", "neutral"]
Estimator: TypeAlias = Literal["k1", "k2", "k3", "abs"]
Aggregation: TypeAlias = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "constant"
]
GroupKind: TypeAlias = Literal[
    "grpo",
    "grpo_trl",
    "dr_grpo",
    "rloo",
    "remax",
    "opo",
    "passk",
    "gpg",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "areal",
]
PreferenceKind: TypeAlias = Literal[
    "dpo",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "kto",
    "apo_zero_unpaired",
    "cpo",
    "simpo",
    "alphapo",
    "orpo",
]

if TYPE_CHECKING:
    from typing import Generic as Generic
    from typing import NamedTuple as NamedTuple

    import jax
    import numpy as np
    import torch
    import torch.distributed
    from numpy.typing import NDArray

    Group: TypeAlias = torch.distributed.ProcessGroup | None
    DType: TypeAlias = torch.dtype | np.dtype[Any] | type[Any] | str | None  # a framework's dtype, or its name
    ArrayT = TypeVar("ArrayT", torch.Tensor, NDArray[Any], jax.Array, AnyArray)
else:
    Group = typing.NewType("Group", object)
    DType = typing.NewType("DType", object)
    ArrayT = TypeVar("ArrayT")

    class _Bases:
        """Replaces itself by `bases` in a class statement."""

        def __init__(self, *bases: Any) -> None:
            self.bases = bases

        def __mro_entries__(self, _: Any) -> tuple[Any, ...]:
            return self.bases

    class Generic:
        """Adds no base to a named tuple, because Python 3.10 refuses other bases beside NamedTuple."""

        def __class_getitem__(cls, _: Any) -> _Bases:
            return _Bases()

    NamedTuple = _Bases(*typing.NamedTuple.__mro_entries__((typing.NamedTuple,)))
