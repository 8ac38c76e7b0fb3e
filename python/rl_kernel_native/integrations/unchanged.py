"""Checks that a function of transformers or torch is the function in its source file: neither it nor a function that it
calls was replaced."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import types
from pathlib import Path
from typing import Any

import torch

from .families import CACHE_NAMES, PARAMETERS, Family, plain_type

# Methods that no forward calls, so they may be replaced. transformers and DeepSpeed wrap the methods that construct a
# module.
_OF_NO_FORWARD = ("__init__", "__repr__", "extra_repr", "reset_parameters", "_init_weights")
_TP_FORWARDS = ("distributed/tensor_parallel.py", "integrations/tensor_parallel.py")


@functools.cache
def _roots() -> tuple[str, ...]:
    import transformers

    return tuple(str(Path(str(module.__file__)).parent / "_")[:-1] for module in (transformers, torch))


@functools.cache
def _codes(file: str) -> dict[str, types.CodeType]:
    """The compiled functions of a source file by their qualified names; empty if the source is missing."""
    try:
        source = Path(file).read_text(encoding="utf-8")
    except OSError:
        return {}
    found: dict[str, types.CodeType] = {}

    def walk(code: types.CodeType, prefix: str) -> None:
        for each in code.co_consts:
            if isinstance(each, types.CodeType) and not each.co_name.startswith("<"):
                # Enters classes, but not functions: an inner function is part of its outer function.
                found.setdefault(prefix + each.co_name, each)
                if not each.co_flags & inspect.CO_OPTIMIZED:
                    walk(each, f"{prefix}{each.co_name}.")

    walk(compile(source, file, "exec", dont_inherit=True), "")
    return found


@functools.cache
def _imports(file: str) -> frozenset[str]:
    """The names that a source file imports from its own package or torch."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (
            node.level or str(node.module).split(".")[0] in ("torch", "transformers")
        ):
            found.update(each.asname or each.name for each in node.names)
    return frozenset(found)


def _same(code: types.CodeType, other: types.CodeType) -> bool:
    """Whether two code objects are equal, except for the path of their file."""
    facts = ("co_name", "co_code", "co_names", "co_varnames", "co_freevars", "co_firstlineno")
    return (
        all(getattr(code, fact) == getattr(other, fact) for fact in facts)
        and len(code.co_consts) == len(other.co_consts)
        and all(
            _same(a, b)
            if isinstance(a, types.CodeType) and isinstance(b, types.CodeType)
            else (type(a), a) == (type(b), b)
            for a, b in zip(code.co_consts, other.co_consts, strict=True)
        )
    )


def why_changed(function: Any, name: str, seen: set[int] | None = None) -> str | None:
    """The reason why a function differs from the function of the same qualified name in its file. None if the function,
    and all functions that it calls, are unchanged.

    Only decorators of transformers and torch may wrap the function.
    """
    seen = set() if seen is None else seen
    while True:
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is None:
            return f"{name} is a {type(function).__name__}, no function of its file"
        if id(code) in seen:
            return None
        seen.add(id(code))
        if not code.co_filename.startswith(_roots()):
            return f"{name} was replaced by {function.__module__}.{function.__qualname__}"
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    if code.co_filename.startswith(_roots()[1]) or "<locals>" in name:
        return None  # functions of torch and inner functions: only their file is checked
    codes = _codes(code.co_filename)
    if codes and (name not in codes or not _same(code, codes[name])):
        return f"{name} was replaced by {function.__module__}.{function.__qualname__}"
    return _why_callees_changed(function, codes, seen)


def _why_callees_changed(function: Any, codes: dict[str, types.CodeType], seen: set[int]) -> str | None:
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType):
            origin = inspect.unwrap(value)
            strange = not origin.__code__.co_filename.startswith(_roots())
            variable = name not in codes and name not in _imports(function.__code__.co_filename)
            if strange and variable:
                continue  # functions of other packages, such as flash-attn, are not checked
            # A function of this file is compared under `name`, an imported function under its qualified name.
            if name in codes and origin.__code__.co_filename != function.__code__.co_filename:
                return f"{name} was replaced by {value.__module__}.{value.__qualname__}"
            reason = why_changed(value, origin.__qualname__ if name not in codes else name, seen)
            if reason is None and origin.__name__ != name and not variable:  # a variable: _unpad_fn
                reason = f"{name} was replaced by {value.__module__}.{value.__qualname__}"
            if reason is not None:
                return reason
        elif value is None and name in codes:
            return f"{name} was taken away"
    return None


def callees(function: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """(globals, name, function) for each function that ``function`` calls through global names, directly or
    indirectly."""
    found: dict[str, Any] = {}
    function = inspect.unwrap(function)
    names, ahead = function.__globals__, [function]
    while ahead:
        for name in _names(ahead.pop().__code__):
            value = names.get(name)
            if isinstance(value, types.FunctionType) and name not in found:
                found[name] = value
                inner = inspect.unwrap(value)
                if inner.__globals__ is names:
                    ahead.append(inner)
    return [(names, name, value) for name, value in found.items()]


def _names(code: types.CodeType) -> set[str]:
    """The names that a function and its inner functions look up."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*(_names(each) for each in inner))


@functools.cache
def _signature(kind: Any, role: str) -> str | None:
    """The reason why the forward of a class has other parameters than expected, or None."""
    import transformers

    parameters = inspect.signature(kind.forward).parameters.values()
    given = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
    caches = [name for name in given if name in CACHE_NAMES]
    others = [name for name in given if name not in (*caches, *PARAMETERS[role].split())]
    if others or len(caches) != (role in ("Model", "DecoderLayer", "Attention")):
        return (
            f"{kind.__name__}.forward has the parameters {', '.join(given)} in transformers "
            f"{transformers.__version__}, which this version of rl_kernel_native does not know"
        )
    return None


def why_class_changed(kind: Any, role: str | None = None) -> str | None:
    """The reason why a class differs from its file: a function was replaced or added, or a forward has other
    parameters."""
    for name, value in vars(kind).items():
        if name in _OF_NO_FORWARD:
            continue
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(function, types.FunctionType):
            reason = why_changed(function, f"{kind.__name__}.{name}")
            if reason is not None:
                return reason
    return _signature(kind, role) if role is not None else None


def tensor_parallel_cell(module: Any) -> Any:
    """If transformers' tensor parallelism wrapped a module's forward, the closure cell that holds the original forward;
    else None."""
    forward = module.__dict__.get("forward")
    code = getattr(forward, "__code__", None)
    if code is None or code.co_name != "tp_forward" or not code.co_filename.endswith(_TP_FORWARDS):
        return None
    if not code.co_filename.startswith(_roots()) or "original_forward" not in code.co_freevars:
        return None
    cell = forward.__closure__[code.co_freevars.index("original_forward")]
    inner = cell.cell_contents
    return cell if getattr(inner, "__self__", None) is module else None


def why_module_changed(module: Any, role: str | None = None) -> str | None:
    """The reason why a module of a known class may compute something else than the class, or None."""
    kind = plain_type(module)
    for name in module.__dict__:
        if name in vars(kind) and callable(vars(kind)[name]) and name not in _OF_NO_FORWARD:
            if name == "forward" and tensor_parallel_cell(module) is not None:
                continue
            return f"its {name} is not that of {kind.__name__}"
    return why_class_changed(kind, role)


def why_attention_changed(module: Any, family: Family) -> str | None:
    """The reason why the configured attention and mask functions are not those of transformers, or None."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = module.config._attn_implementation
    if name == "eager":
        function = family.modeling.eager_attention_forward
    elif name in ALL_ATTENTION_FUNCTIONS:
        function = ALL_ATTENTION_FUNCTIONS[name]
    else:
        return f"its attention function {name!r} is not one of transformers'"
    while isinstance(function, functools.partial):  # a kernel of the Hub is a partial function
        function = function.func
    own = sys.modules[__name__.partition(".")[0]].__path__[0]
    file = getattr(inspect.unwrap(function), "__code__", None)
    if file is not None and file.co_filename.startswith(own):
        return None  # rlk compare's wrapper, which records torch's attention
    reason = why_changed(function, inspect.unwrap(function).__qualname__)
    if reason is None and name in ALL_MASK_ATTENTION_FUNCTIONS:
        mask = ALL_MASK_ATTENTION_FUNCTIONS[name]
        reason = why_changed(mask, inspect.unwrap(mask).__qualname__)
    return None if reason is None else f"its attention function {name!r}: {reason}"
