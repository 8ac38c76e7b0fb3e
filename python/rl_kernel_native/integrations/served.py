"""Gives a transformers module another forward: the module gets a new class, derived from its former class.

The module's former class and its functions stay as they are, and the new class stores no tensor. So copies, replicas
and pickles of a module compute with their own tensors. No module refers to itself, so its memory is freed with the last
reference to the module. The class keeps its name, module and other attributes, so isinstance checks and look-ups by
name find it.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from torch.nn.modules import module as torch_module

from . import unchanged

_OURS = "_rk_base"  # attribute of a class that this library makes: the module's former class
# For each former class: the forward that this library replaces, and the functions that this forward calls, as (globals,
# name, function).
_stands_for: dict[Any, tuple[Any, list[tuple[dict[str, Any], str, Any]]]] = {}


def note(base: Any) -> None:
    """Records a class's forward, and the functions that it calls, as functions that this library replaces."""
    _stands_for[base] = (base.forward, unchanged.callees(base.forward))


@functools.cache
def _class(base: Any, forward: Any, facts: tuple[tuple[str, Any], ...]) -> Any:
    note(base)

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *state = super(made, self).__reduce_ex__(protocol)
        return (_rebuild, (base, forward, facts), *state)

    def new(kind: Any, *arguments: Any, **options: Any) -> Any:
        """A module that is newly created, for example by `from_pretrained`, has no proof, so it gets the original
        class."""
        return base(*arguments, **options) if kind is made and (arguments or options) else object.__new__(kind)

    names = {
        "__new__": new,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce,
        "forward": forward,
        _OURS: base,
        **dict(facts),
    }
    made: Any = type(base.__name__, (base,), names)
    return made


def _rebuild(base: Any, forward: Any, facts: tuple[tuple[str, Any], ...]) -> Any:
    """A module without state, for a file, a copy or another process."""
    made = _class(base, forward, facts)
    return made.__new__(made)


def serve(module: Any, forward: Any, **facts: Any) -> None:
    """Replaces the forward of the module's class by `forward`, with `facts` as attributes of the class."""
    cell = unchanged.tensor_parallel_cell(module)
    base: Any = type(module)
    module.__class__ = _class(base, forward, tuple(sorted(facts.items())))
    if cell is not None:
        cell.cell_contents = types.MethodType(type(module).forward, module)


def is_served(module: Any) -> bool:
    """Whether a module computes with this library's forward, even under later wrappers."""
    return hasattr(type(module), _OURS)


def other_than_served(base: Any) -> str | None:
    """The name of what changed since a class was replaced: its forward, or a function that the forward calls. None if
    nothing changed."""
    found = _stands_for.get(base)
    if found is None:
        return None
    forward, callees = found
    if base.forward is not forward:
        return f"{base.__name__}.forward"
    return next((name for names, name, function in callees if names.get(name) is not function), None)


def base_of(module: Any) -> Any:
    """The former class of a replaced module."""
    return getattr(type(module), _OURS)


def withdraw(module: Any) -> None:
    """Removes this library's class from a module, even if another class, such as fully_shard's, was put in front of it
    later."""
    cell = unchanged.tensor_parallel_cell(module)
    kind = type(module)
    if _OURS in vars(kind):
        module.__class__ = base_of(module)
    else:
        bases = tuple(vars(base).get(_OURS, base) for base in kind.__bases__)
        names = {k: v for k, v in vars(kind).items() if k not in ("__dict__", "__weakref__")}
        ours = next(vars(base)["forward"] for base in kind.__mro__ if _OURS in vars(base))
        if inspect.unwrap(names.get("forward", module.forward)) is inspect.unwrap(ours):
            names.pop("forward", None)  # checkpointing wraps the inherited forward
        module.__class__ = type(kind.__name__, bases, names)
    if cell is not None:
        cell.cell_contents = types.MethodType(type(module).forward, module)
    else:
        module.__dict__.pop("forward", None)  # why_kept() has found that this is no other code's forward


def _forward_set(module: Any) -> Any:
    """The forward that was set on a module itself, except by tensor parallelism."""
    return None if unchanged.tensor_parallel_cell(module) is not None else module.__dict__.get("forward")


def why_kept(module: Any) -> str | None:
    """The reason why a replaced module cannot get its class back: its forward was wrapped after the patch."""
    forward = _forward_set(module)
    if forward is None:
        return None
    kind: Any = type(module)
    if getattr(forward, "__self__", None) is module and forward.__func__ is kind.forward:
        return None  # a wrapper was removed and has restored this forward
    return "the forward of {} was wrapped after the patch; undo that first"


def taken_over(module: Any) -> str | None:
    """The reason why torch now computes a replaced module, or None. The reason is a class or forward, set on the module
    after the patch, that does not call this library's forward."""
    kind: Any = type(module)
    if not is_served(module):
        return f"its class was set to {kind.__name__} after the patch"
    forward = _forward_set(module)
    if forward is None:
        return None
    inner = inspect.unwrap(forward)  # the forward below wrappers, such as accelerate's hooks
    is_ours = getattr(inner, "__func__", inner) is inspect.unwrap(kind.forward)
    return None if is_ours else "a forward of its own was set after the patch"


def observed(module: Any) -> bool:
    """Whether the module itself must be called, because it has a hook or a replaced forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or torch_module._has_any_global_hook()
    )
