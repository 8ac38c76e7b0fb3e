"""Which hardware's arithmetic the CPU backend computes with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

UNITS = ("ieee", "sm_90", "sm_80", "gfx942", "gfx90a")

_current: ContextVar[str] = ContextVar("rl_kernel_native.arithmetic", default="ieee")


def arithmetic(unit: str) -> AbstractContextManager[None]:
    """Makes the CPU backend compute as ``unit`` does where an operator models it, for this context (thread or task).

    Args:
        unit: ``"sm_90"``: the exponential is the model of an H200's ``ex2.approx``, verified against the hardware over
            every float32; inside ``torch.compile``, give the operator ``exp="hardware"`` explicitly. ``"ieee"``: the
            portable default. ``"sm_80"``, ``"gfx942"`` and ``"gfx90a"``: models of matrix units, which no operator so
            far has; the exponential stays the portable one.
    Returns: a context manager, for one ``with``.
    Raises: ValueError for another name, at the call.
    Source: docs/numerics.md, rule 3.
    """
    if unit not in UNITS:
        raise ValueError(f"unit: expected one of {', '.join(UNITS)}, got {unit!r}")
    return _computing_as(unit)


@contextmanager
def _computing_as(unit: str) -> Iterator[None]:
    token = _current.set(unit)
    try:
        yield
    finally:
        _current.reset(token)


def current_arithmetic() -> str:
    """The unit that :func:`arithmetic` chose for this context; ``"ieee"`` outside of it."""
    return _current.get()


PORTABLE, HARDWARE, AS_CALLED = 0, 1, -1


def unresolved_exp(exp: str | None) -> int:
    """``exp`` for a traced call, where the context of :func:`arithmetic` cannot be read; see :func:`resolve_traced`."""
    _require_mode(exp)
    return AS_CALLED if exp is None else int(exp == "hardware")


def resolve_traced(mode: int, device_type: str) -> int:
    """The mode of a traced call when it runs: its default on the CPU is portable, in forward and backward alike."""
    if device_type != "cpu":
        return resolve_exp(None, device_type) if mode == AS_CALLED else mode
    if mode == AS_CALLED and _current.get() == "sm_90":
        raise ValueError('exp: a compiled call under rk.arithmetic("sm_90") cannot choose; give exp explicitly')
    if mode == HARDWARE and _current.get() != "sm_90":
        return resolve_exp("hardware", device_type)
    return PORTABLE if mode == AS_CALLED else mode


def _require_mode(exp: str | None) -> None:
    if exp not in (None, "hardware", "portable"):
        raise ValueError(f'exp: expected None, "hardware" or "portable", got {exp!r}')


def resolve_exp(exp: str | None, device_type: str) -> int:
    """The exponential of softmax statistics (rule 3) as the extension's number.

    ``device_type``: ``"cpu"``, ``"cuda"`` or ``"rocm"``. Raises ValueError where the asked-for mode does not exist.
    """
    if exp is None:
        if device_type == "cuda" or (device_type == "cpu" and _current.get() == "sm_90"):
            return HARDWARE
        return PORTABLE
    _require_mode(exp)
    if exp == "portable":
        return PORTABLE
    if device_type == "cuda" or (device_type == "cpu" and _current.get() == "sm_90"):
        return HARDWARE
    where = 'the CPU outside `rk.arithmetic("sm_90")`' if device_type == "cpu" else "ROCm devices"
    raise ValueError(f'exp: "hardware" is not available on {where}; use exp="portable" or None')
