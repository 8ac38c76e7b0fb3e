"""Selects the hardware whose arithmetic the CPU backend reproduces."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Any

from ._check import one_of, shown

UNITS = ("ieee", "sm_90", "sm_80", "gfx942", "gfx90a")

_current: ContextVar[str] = ContextVar("rl_kernel_native.arithmetic", default="ieee")


def arithmetic(unit: str) -> Computing:
    """Makes the CPU backend compute as the hardware ``unit`` computes, in operators that model this hardware. The
    choice applies to this context (thread or task).

    Args:
        unit: ``"ieee"``, the default, is portable: matrix products are chains of fused multiply-adds. ``"sm_90"``:
            matrix products and the exponential are computed as on an H200, and tests on an H200 verified them; this
            includes the bfloat16 and float16 products of attention's forward. ``"sm_80"``, ``"gfx942"`` and
            ``"gfx90a"``: matrix products follow the published rules of this hardware. Nothing verified them on the
            hardware, and its exponential is not modelled. All units except ``"ieee"`` multiply only bfloat16 and
            float16, so float32 operands of a product are a ValueError. Only attention accepts float32 operands under
            every unit, and computes them with chains of fused multiply-adds. GPUs always compute with their own units.
            A compiled call (torch.compile) computes in ieee arithmetic, and raises an error if the context selects
            another unit.
    A backward computes in the unit of its forward, in any thread. Activation checkpointing repeats the forward in
    the thread that runs backward: pass ``context_fn=rk.checkpoint_contexts`` to ``torch.utils.checkpoint.checkpoint``
    (for ``use_reentrant=False``), or open the context inside the checkpointed function (for any ``use_reentrant``).
    Returns: an object that serves as a context manager for one ``with``, or as a decorator of a function.
    Raises: ValueError for another name, at the call; TypeError if the decorated object (a class, a generator or a
        coroutine) would run after the context.
    Source: docs/numerics.md, fact 2 and rules 1 and 3.

    Example:
        >>> with rk.arithmetic("sm_90"):  # as an H100 multiplies
        ...     y = rk.linear(torch.ones(1, 16, dtype=torch.bfloat16), torch.ones(1, 16, dtype=torch.bfloat16))
    """
    one_of("unit", unit, UNITS)
    return Computing(unit)


class Computing:
    """The context manager and decorator that :func:`arithmetic` returns."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._token: Token[str] | None = None

    def __enter__(self) -> None:
        if self._token is not None:
            raise RuntimeError("arithmetic: a context manager is for one `with`; call rk.arithmetic again for another")
        self._token = _current.set(self._unit)

    def __exit__(self, *_: object) -> None:
        if self._token is None:
            raise RuntimeError("arithmetic: a context manager that was not entered")
        _current.reset(self._token)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        late = (inspect.isclass, inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_late(function) for is_late in late):
            name = getattr(function, "__name__", function)
            raise TypeError(
                f"arithmetic: {name} runs after its call returned; open `with rk.arithmetic(...)` inside of it instead"
            )

        @functools.wraps(function)
        def computing(*arguments: Any, **options: Any) -> Any:
            with Computing(self._unit):
                return function(*arguments, **options)

        return computing


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=rk.checkpoint_contexts)``: what
    backward recomputes uses the arithmetic of the forward, in any thread.

    Example:
        >>> from torch.utils.checkpoint import checkpoint
        >>> x, weight = torch.ones(2, 32).bfloat16().requires_grad_(), torch.randn(8, 32).bfloat16()
        >>> with rk.arithmetic("sm_90"):
        ...     y = checkpoint(rk.linear, x, weight, use_reentrant=False, context_fn=rk.checkpoint_contexts)
        >>> y.sum().backward()  # computes y again, by the arithmetic of sm_90
        >>> torch.equal(x.grad[0], x.grad[1])
        True
    """
    return nullcontext(), arithmetic(_current.get())


def current_arithmetic() -> str:
    """The unit that :func:`arithmetic` selects in this context; ``"ieee"`` outside such a context.

    Example:
        >>> with rk.arithmetic("sm_90"):
        ...     rk.current_arithmetic()
        'sm_90'
        >>> rk.current_arithmetic()
        'ieee'
    """
    return _current.get()


PORTABLE, HARDWARE, AS_CALLED = 0, 1, -1
IEEE = 0
_PRODUCTS = {"ieee": IEEE, "sm_80": 1, "sm_90": 2, "gfx90a": 3, "gfx942": 4}  # as `Arithmetic` in C++


def product_unit() -> int:
    """The extension's number for the unit whose matrix products the CPU computes in this context."""
    return _PRODUCTS[_current.get()]


def resolve_traced_unit(unit: int, device_type: str) -> int:
    """The unit of a traced product when it runs. ``AS_CALLED`` means that tracing could not read the context; the unit
    is then ieee."""
    if unit != AS_CALLED:
        return unit
    if device_type == "cpu" and _current.get() != "ieee":
        raise ValueError(
            f'arithmetic: a compiled call computes in ieee arithmetic and cannot follow rk.arithmetic("'
            f'{_current.get()}"), since its backward may run outside of it; call it without torch.compile'
        )
    return IEEE


def unresolved_exp(exp: str | None) -> int:
    """The number that stands for the option ``exp`` in a trace. A trace cannot read the context of :func:`arithmetic`,
    so :func:`resolve_traced` chooses the exponential when the call runs."""
    _require_mode(exp)
    return AS_CALLED if exp is None else int(exp == "hardware")


def resolve_traced(mode: int, device_type: str) -> int:
    """The exponential of a traced call when it runs. On the CPU, the default is the portable exponential, in forward
    and backward."""
    if device_type != "cpu":
        return resolve_exp(None, device_type) if mode == AS_CALLED else mode
    if mode == AS_CALLED and _current.get() == "sm_90":
        raise ValueError('exp: a compiled call under rk.arithmetic("sm_90") cannot choose; give exp explicitly')
    if mode == HARDWARE and _current.get() != "sm_90":
        return resolve_exp("hardware", device_type)
    return PORTABLE if mode == AS_CALLED else mode


def _require_mode(exp: str | None) -> None:
    if exp is not None and not (isinstance(exp, str) and exp in ("hardware", "portable")):
        raise ValueError(f'exp: expected None, "hardware" or "portable", got {shown(exp)}')


def resolve_exp(exp: str | None, device_type: str) -> int:
    """The extension's number for the exponential of softmax statistics (docs/numerics.md, rule 3).

    ``device_type``: ``"cpu"``, ``"cuda"`` or ``"rocm"``. Raises a ValueError if the requested mode does not exist.
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


def arithmetic_of(device: Any) -> str:
    """The unit that computes matrix products on a device of torch: a GPU's own unit, or, on the CPU, the unit that
    :func:`arithmetic` selects."""
    if device.type == "cpu":
        return current_arithmetic()
    torch: Any = importlib.import_module("torch")
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
