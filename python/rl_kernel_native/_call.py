"""Calls of an operator that :mod:`_operator` describes, with arrays of any framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _check, _dispatch
from ._operator import OPERATORS, Operator

loaded: Any = None  # the module `_engine`, loaded by the first call with a torch tensor
plain: tuple[Any, ...] = ()  # torch.Tensor and torch.nn.Parameter, set together with `loaded`
_registered: list[bool] = []  # holds True once every operator is registered


def _unknown() -> bool:
    return True


# A function, set together with `loaded`. If the function returns False, a call may be eager.
is_read_by_dynamo: Any = _unknown


def call(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operator's outputs, with None for outputs that the call does not ask for."""
    if type(arrays[op.leads]) in plain or _dispatch.is_tensor(arrays[op.leads]):
        found: tuple[Any, ...] = (loaded or _engine()).call(op, arrays, how)
        return found
    frame, exported = _exported(op, arrays, how)
    how = op.resolved(how, frame.device)
    outputs = op.native(exported, how, frame.allocate, frame.stream)
    for i in op.written:
        _dispatch.count_write(arrays[i])
    return tuple(map(frame.result, outputs or ()))


def call_with_main_grad(
    op: Operator, arrays: Sequence[Any], how: tuple[Any, ...], main_grad: Any, dtype: int
) -> tuple[Any, ...]:
    """Outputs of an operator whose backward adds the weight's gradient to the caller's buffer ``main_grad``. Without
    this buffer, backward returns the gradient; ``dtype`` is the extension's number for its dtype."""
    if _dispatch.is_tensor(arrays[op.leads]):
        found: tuple[Any, ...] = engine().call_with_main_grad(op, arrays, how, main_grad, dtype)
        return found
    if main_grad is None and dtype < 0:
        return call(op, arrays, how)
    name = "main_grad" if main_grad is not None else "weight_grad_dtype"
    raise ValueError(f"{name}: only torch has an autograd that could use it; call {op.main_grad_call} instead")


def accumulate(op: Operator, main_grad: Any, arrays: Sequence[Any], how: tuple[Any, ...]) -> Any:
    """Returns the outputs of an operator that adds a gradient to main_grad. main_grad is the operator's first array."""
    if _dispatch.is_tensor(main_grad) and (main_grad.requires_grad or engine().wants_grad(*arrays)):
        raise ValueError("main_grad: cannot be given where a gradient is wanted; call under torch.no_grad()")
    return call(op, (main_grad, *arrays), how)


def call_with_gradients(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> tuple[Any, ...]:
    """Outputs and gradients of a loss, with None for the gradient of a missing array."""
    if _dispatch.is_tensor(arrays[0]):
        engine().refuse_gradients(op, arrays, how)
    return call(op, arrays, how)


def _exported(op: Operator, arrays: Sequence[Any], how: tuple[Any, ...]) -> tuple[_dispatch.Frame, tuple[Any, ...]]:
    for i in op.written:
        _check.writable(op.arrays[i].name, arrays[i])
    frame = _dispatch.Frame(arrays[op.leads], op.arrays[op.leads].label(how, arrays))
    _dispatch.match_torch_threads()
    found = []
    for a, x in zip(op.arrays, arrays, strict=True):
        export = frame.export_output if a.written else frame.export if a.number else frame.export_array
        found.append(export(x, a.label(how, arrays)))
    return frame, tuple(found)


def frame_of(names: Sequence[str], arrays: tuple[Any, ...], out: tuple[Any, ...] = (), cures: Any = None) -> Any:
    """The state of a call that has no autograd, with arrays of any framework. The first array decides framework and
    device. ``out`` holds arrays for results."""
    if type(arrays[0]) in plain or _dispatch.is_tensor(arrays[0]):
        return (loaded or _engine()).TensorFrame(names, arrays, out, cures)
    frame = _dispatch.Frame(arrays[0], names[0])
    _dispatch.match_torch_threads()
    return frame


def engine() -> Any:
    """The module :mod:`_engine`, which runs every call with torch tensors."""
    return loaded or _engine()


def _engine() -> Any:
    global loaded, plain, is_read_by_dynamo
    _dispatch.require_torch()
    load()
    from . import _engine as found
    from ._torch import PLAIN, is_compiling

    if not is_compiling():  # a trace is valid only while the globals that it read keep their values
        loaded, plain, is_read_by_dynamo = found, PLAIN, found.is_read_by_dynamo
    return found


def load() -> None:
    """Registers every operator with torch, once."""
    if not _registered:
        from . import _engine as found

        found.register(OPERATORS)
        _registered.append(True)


# A trace calls this function once and keeps only the result, because registration does not belong in a graph.
load._dynamo_marked_constant = True  # type: ignore[attr-defined]
