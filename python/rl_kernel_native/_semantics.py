"""The meaning of a log-probability, as data. In a comparison, the trainer and the engine each declare theirs."""

from __future__ import annotations

import math
import struct
from dataclasses import asdict, dataclass, fields
from typing import Any

from . import _check

LOGITS_DTYPES = ("float32", "bfloat16", "float16", "float64")
# Values of arguments that have no effect.
_NEUTRAL = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "logit_bias": False, "allowed": False,
}  # fmt: skip
_ORDERED = tuple(name for name in _NEUTRAL if name not in ("temperature", "allowed"))


@dataclass(frozen=True, kw_only=True)
class LogprobSemantics:
    """The distribution that a log-probability refers to. The fields have the names and defaults of :func:`sample`'s
    arguments, plus the logits' dtype.

    Two semantics are equal if they describe the same distribution. Floats are compared as float32, ``raw`` equals the
    defaults, and ``order`` does not matter if only a temperature is set. A comparison of log-probabilities
    (:func:`mismatch_metrics`, :func:`importance_weights`, :func:`policy_loss`, ``rlk compare``) takes the semantics of
    both sides, and raises an error if they differ.

    Attributes:
        logits_dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``.
        raw: True for the unprocessed logits at temperature 1. The arguments of the draw then have their defaults.
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, order: the
            values in the draw (:func:`sample`).
        logit_bias, allowed: whether the draw had a logit bias, or a mask of allowed tokens.
    Raises: TypeError for a wrong type; ValueError for a wrong value, or for an argument together with ``raw``.
    Example:
        >>> stamp = rk.LogprobSemantics(logits_dtype="bfloat16", temperature=0.7, top_p=0.9)
        >>> rk.LogprobSemantics.from_json(stamp.to_json()) == stamp
        True
    """

    logits_dtype: str
    raw: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: bool = False
    allowed: bool = False
    order: str = "vllm"

    def __post_init__(self) -> None:
        _one_of("logits_dtype", self.logits_dtype, LOGITS_DTYPES)
        _one_of("order", self.order, ("vllm", "hf", "sglang"))
        for name in ("raw", "logit_bias", "allowed"):
            if type(getattr(self, name)) is not bool:
                raise TypeError(f"{name}: expected a bool, got {type(getattr(self, name)).__name__}")
        if type(self.top_k) is not int:
            raise TypeError(f"top_k: expected an integer, got {type(self.top_k).__name__}")
        for name, allows, expected in (
            ("temperature", lambda x: 0 < x < math.inf, "a finite number > 0"),
            ("top_k", lambda x: x >= 0, "an integer >= 0"),
            ("top_p", lambda x: 0 < x <= 1, "a number in (0, 1]"),
            ("min_p", lambda x: 0 <= x <= 1, "a number in [0, 1]"),
            ("repetition_penalty", lambda x: 0 < x < math.inf, "a finite number > 0"),
            ("presence_penalty", math.isfinite, "a finite number"),
            ("frequency_penalty", math.isfinite, "a finite number"),
        ):
            value = getattr(self, name)
            if type(value) not in (int, float):
                raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
            if name != "top_k":
                value = _check.single(name, value, allows, expected)  # checks the number and its float32 value
                object.__setattr__(self, name, struct.unpack("f", struct.pack("f", value))[0])
            elif not allows(_check.integer64(name, value)):
                raise ValueError(f"{name}: expected {expected}, got {_check.shown(value)}")
        changed = [name for name, neutral in _NEUTRAL.items() if getattr(self, name) != neutral]
        if self.raw and changed:
            got = _check.shown(getattr(self, changed[0]))
            raise ValueError(f"{changed[0]}: expected its default beside raw=True, got {got}")
        object.__setattr__(self, "raw", not changed)
        if not set(changed) & set(_ORDERED):
            object.__setattr__(self, "order", "vllm")

    def to_json(self) -> dict[str, Any]:
        """The fields in a form that ``json.dumps`` accepts."""
        return asdict(self)

    @classmethod
    def from_json(cls, stamp: Any) -> LogprobSemantics:
        """The semantics from the result of :meth:`to_json`; a missing field has its default."""
        if not isinstance(stamp, dict):
            raise TypeError(f"semantics: expected an object of LogprobSemantics' fields, got {type(stamp).__name__}")
        names = [field.name for field in fields(cls)]
        for name in stamp:
            if name not in names:
                raise ValueError(f"semantics: expected fields of {', '.join(names)}, got {_check.shown(name)}")
        if "logits_dtype" not in stamp:
            raise ValueError("semantics: expected a logits_dtype, got none")
        return cls(**stamp)


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not _check.is_choice(value, choices):
        raise ValueError(f"{name}: expected {', '.join(map(repr, choices))}, got {_check.shown(value)}")


def require_same_semantics(semantics: Any) -> None:
    """Raises an error if the trainer's and the engine's semantics, given as a pair, differ. ``semantics`` may be None
    if the caller declares no semantics."""
    if semantics is None:
        return
    if not isinstance(semantics, (tuple, list)) or len(semantics) != 2:
        raise TypeError(f"semantics: expected None or (the trainer's, the engine's), got {type(semantics).__name__}")
    for stamp in semantics:
        if not isinstance(stamp, LogprobSemantics):
            raise TypeError(f"semantics: expected two LogprobSemantics, got {type(stamp).__name__}")
    train, rollout = semantics
    if train != rollout:
        differ = [field.name for field in fields(train) if getattr(train, field.name) != getattr(rollout, field.name)]
        raise ValueError(
            f"semantics: expected log-probabilities of the same kind, got different {', '.join(differ)}: the trainer's "
            f"{train}, the engine's {rollout}"
        )
