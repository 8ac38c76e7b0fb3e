"""Hostile calls of every public operator. Each call gives a result that stays the same in another layout and when
repeated, or a typed error that names an argument.

``python tests/support/fuzz_calls.py --calls 20000 --seed 1`` draws calls; ``--case N`` runs and prints that call. Calls
run in another process. If that process dies or hangs, its current call is at fault.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import inspect
import json
import math
import re
import select
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

import rl_kernel_native as rk
from call_cases import CALLS, Draw, Operand
from call_references import REFERENCES, found_of
from rl_kernel_native import _check

CANARY = 0xA5
SILENCE_S = 120  # longest silence during a call, which normally takes milliseconds
TYPED = (TypeError, ValueError, BufferError)
SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 3e38, -3e38, 1e-42, 1e30, 88.8, -1.0)
WRONG_IDS = (-1, -101, 2**31 - 1, -(2**31), 7, 10**6)
NUMBERS: tuple[Any, ...] = (
    math.nan, math.inf, -math.inf, 0, 0.0, -0.0, -1, -1.5, 1e-46, 1e-300, 1e39, 1e300, 10**400, 10**5000, 2**31, 2**63,
    -(2**63), 2**64, Fraction(10**400), Decimal("1e400"), True, "1", "", [1], (), {}, 1j, b"1", np.float64(0.5),
    np.float32(2), np.int64(1), np.bool_(True), np.float16(np.nan),
)  # fmt: skip
OBJECTS: dict[str, Callable[[Any], Any]] = {
    "None": lambda t: None,
    "an object": lambda t: object(),
    "a text": lambda t: "x",
    "a number": lambda t: 3,
    "a float": lambda t: 0.5,
    "a NumPy number": lambda t: np.float32(1.5),
    "a list": lambda t: [1.0, 2.0],
    "a module": lambda t: math,
    "a class": lambda t: np.ndarray,
    "complex numbers": lambda t: np.ones(3, np.complex64),
    "Python's objects": lambda t: np.array([None, "a"]),
    "a masked array": lambda t: np.ma.masked_array(np.ones(3, np.float32)),
    "big-endian numbers": lambda t: np.ones(3, ">f4"),
    "dates": lambda t: np.array(["2026-01-01"], "datetime64[D]"),
    "records": lambda t: np.zeros(2, [("a", "f4"), ("b", "i4")]),
    "float128": lambda t: np.ones(3, np.longdouble),
    "no dimension": lambda t: np.float32([[1]])[0, 0, ...],
    "a sparse tensor": lambda t: t.eye(3).to_sparse(),
    "a tensor without memory": lambda t: t.empty(3, device="meta"),
    "a complex tensor": lambda t: t.ones(3, dtype=t.complex64),
    "a quantised tensor": lambda t: t.quantize_per_tensor(t.ones(3), 0.1, 0, t.qint8),
    "a float8 tensor": lambda t: t.ones(3).to(t.float8_e4m3fn),
    "a nested tensor": lambda t: t.nested.nested_tensor([t.ones(2), t.ones(3)]),
    "a parameter": lambda t: t.nn.Parameter(t.ones(3)),
}
SIZES = ("num_tokens", "num_rows", "max_seqlen", "max_tokens", "kept_capacity")
LAYOUTS = ("contiguous", "shifted", "rows apart", "columns apart", "transposed", "negative", "expanded", "read-only")
DTYPES = (
    "float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool", "uint16", "uint32",
    "uint64",
)  # fmt: skip
try:
    import ml_dtypes

    NUMPY_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
except ImportError:  # then NumPy has no bfloat16
    NUMPY_BFLOAT16 = None
# Phrases of errors about a required gradient, and about an argument that must fit another argument.
RELATIONS = re.compile(
    "gradient|autograd|expected (shape|device|a torch.Tensor|an array of the framework|sequences of at most)"
    r"|at most \d+ \(the number of|a divisor of \d+ \(the number of|<= \d+ \(the length of sequence"
    r"|of a vocabulary of \d+ columns"
)
# Other names that errors may use for an argument.
ALSO = {
    "logits_shard": ("logits",), "weight_shard": ("weight",), "x_shard": ("x",), "overlong": ("max_length", "buffer"),
    "history": ("history ids", "history offsets", "history is_prompt"),
    "logit_bias": ("logit_bias ids", "logit_bias values", "logit_bias offsets"),
    "kept": ("kept ids", "kept offsets"), "gamma": ("gamma / beta",),
    "gate": ("gate_up",),
}  # fmt: skip


@dataclass
class Given:
    """An array argument: its numbers, its layout, and its framework."""

    operand: Operand
    layout: str = "contiguous"
    numpy: bool = False
    gradient: bool = False
    alias_of: str = ""  # the argument whose memory it shares
    shift: int = 0  # shift of an alias, in elements


@dataclass
class Wrong:
    """An argument that is not valid."""

    make: Callable[[Any], Any]
    what: str


@dataclass
class Plan:
    operator: str
    arguments: dict[str, Any] = field(default_factory=dict)
    numpy: bool = False
    mutated: dict[str, str] = field(default_factory=dict)  # the mutation of each argument
    hostile: set[str] = field(default_factory=set)  # arguments that an error must name

    def arrays(self) -> list[str]:
        return [name for name, value in self.arguments.items() if isinstance(value, Given)]


# ---- drawing --------------------------------------------------------------------------------------------------------


def plan_of(seed: int, number: int) -> Plan:
    rng = np.random.default_rng([seed, number])
    names = list(CALLS)
    d = Draw(rng)
    plan = Plan(names[number % len(names)], numpy=d.chance(0.3))
    plan.arguments = {name: _given(value) for name, value in CALLS[plan.operator](d).items()}
    if d.chance(0.15):
        return plan
    for _ in range(d.of(1, 1, 1, 2, 3)):
        name = d.of(*plan.arguments)
        value = plan.arguments[name]
        if isinstance(value, Given):
            _mutate_array(d, plan, name, value)
        elif not isinstance(value, Wrong) and name != "spec":
            _mutate_option(d, plan, name)
    if not plan.numpy and d.chance(0.3):
        for name in plan.arrays():
            given = plan.arguments[name]
            given.gradient = not given.numpy and not given.operand.written and given.operand.dtype in _FLOATS
    return plan


_FLOATS = ("float32", "float16", "bfloat16", "float64")


def _given(value: Any) -> Any:
    """Arrays as arguments, also in lists and tuples."""
    if isinstance(value, Operand):
        return Given(value)
    if isinstance(value, (list, tuple)) and any(isinstance(x, Operand) for x in value):
        return type(value)(_given(x) for x in value)
    return value


def _mutate_array(d: Draw, plan: Plan, name: str, given: Given) -> None:
    kind = d.of("layout", "layout", "values", "values", "dtype", "shape", "object", "framework", "alias", "None")
    values, operand = given.operand.values, given.operand
    if kind == "layout":
        given.layout = d.of(*LAYOUTS)
        kind = given.layout
    elif kind == "values" and values.size and not operand.written:
        special = SPECIAL if operand.dtype in _FLOATS else WRONG_IDS
        values = np.array(values, np.float64 if operand.dtype in _FLOATS else np.int64)
        some = d.rng.random(values.shape) < d.of(0.1, 0.5, 1.0)
        values[some] = d.rng.choice(special, int(some.sum()))
        given.operand = operand._replace(values=values)
    elif kind == "dtype":
        given.operand = operand._replace(dtype=d.of(*DTYPES))
    elif kind == "shape":
        given.operand = operand._replace(values=_other_shape(d, values))
    elif kind == "object":
        what = d.of(*OBJECTS)
        plan.arguments[name] = Wrong(OBJECTS[what], what)
        plan.hostile.add(name)
        kind = what
    elif kind == "framework":
        given.numpy = not plan.numpy
    elif kind == "alias":
        others = [n for n in plan.arrays() if n != name and not plan.arguments[n].alias_of]
        if others and not any(plan.arguments[n].alias_of == name for n in others):
            given.alias_of, given.shift = d.of(*others), d.of(0, 0, 1, -1, 2)
            kind = f"memory of {given.alias_of}, {given.shift:+d}"
    elif kind == "None":
        plan.arguments[name] = None
    plan.mutated[name] = f"{plan.mutated.get(name, '')} {kind}"


def _other_shape(d: Draw, values: np.ndarray) -> np.ndarray:
    way = d.of("longer", "shorter", "empty", "outer", "inner", "flat", "scalar")
    axis = d.size(*range(values.ndim)) if values.ndim else 0
    if way == "longer" and values.ndim:
        return np.concatenate((values, values.take([0], axis) if values.shape[axis] else np.ones_like(
            values, shape=(*values.shape[:axis], 1, *values.shape[axis + 1 :]))), axis)  # fmt: skip
    if way in ("shorter", "empty") and values.ndim:
        return values.take(range(0 if way == "empty" else max(values.shape[axis] - 1, 0)), axis)
    return {
        "outer": lambda: values[None], "inner": lambda: values[..., None], "flat": values.ravel,
        "scalar": lambda: np.ones_like(values, shape=()),
    }.get(way, lambda: values[None])()  # fmt: skip


def _mutate_option(d: Draw, plan: Plan, name: str) -> None:
    value = d.of(*NUMBERS) if d.chance(0.7) else d.of(*OBJECTS)
    if name in SIZES and type(value) is int and value == 2**31:  # the test cannot ask for that much memory
        value = -1
    if isinstance(value, str) and value in OBJECTS:
        plan.arguments[name] = Wrong(OBJECTS[value], value)
    else:
        plan.arguments[name] = copy.copy(value)
    if not (isinstance(value, (np.int64, int)) and value in (0, 1)):  # 0 and 1 are valid for many options
        plan.hostile.add(name)
    plan.mutated[name] = _check.shown(value)[:40]


# ---- memory ---------------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """Bytes of an array and around it; ``inside`` marks the array's own bytes."""

    base: np.ndarray
    inside: np.ndarray
    array: Any


def _stored(operand: Operand) -> np.ndarray:
    """The operand's numbers in its dtype; bfloat16 as bits."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if operand.dtype != "bfloat16":
            return np.asarray(operand.values).astype(operand.dtype)
        import torch

        values = np.asarray(operand.values, np.float32)
        return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.int16).numpy().reshape(values.shape)


def _strides(shape: tuple[int, ...], layout: str) -> tuple[list[int], int, int]:
    """Strides and the first element's offset, in elements, and the number of elements, guards excluded."""
    order = range(len(shape)) if layout == "transposed" else reversed(range(len(shape)))
    strides, step = [0] * len(shape), 2 if layout == "columns apart" else 1
    for axis in order:
        strides[axis] = step
        step *= max(shape[axis], 1)
        if layout == "rows apart" and axis == len(shape) - 1:
            step += 3
    first, count = 0, 1 + sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True))
    if layout == "negative" and shape:
        first, strides[0] = max(shape[0] - 1, 0) * strides[0], -strides[0]
    if layout == "expanded" and shape:
        strides[0] = 0
    return strides, first, count


def lay_out(given: Given, plain: bool) -> Memory:
    """``plain``: contiguous, whatever layout is given."""
    layout = "contiguous" if plain else given.layout
    if layout == "negative" and not given.numpy:
        layout = "rows apart"  # torch has no such layout
    operand = given.operand
    stored = _stored(operand)
    if given.layout == "expanded" and stored.ndim and len(stored):  # a plain array has the same numbers
        stored = np.broadcast_to(stored[:1], stored.shape)
    strides, first, count = _strides(stored.shape, layout)
    size, before = stored.itemsize, 16 + (1 if layout == "shifted" else 0)
    base = np.full((before + count + 16) * size, CANARY, np.uint8)
    places = base.view(stored.dtype) if stored.dtype != bool else base.view(np.bool_)
    view = np.lib.stride_tricks.as_strided(places[before + first :], stored.shape, [s * size for s in strides])
    view[...] = stored
    of_bytes = np.zeros(len(base), bool)
    marks = np.lib.stride_tricks.as_strided(
        of_bytes[(before + first) * size :], (*stored.shape, size), [*(s * size for s in strides), 1]
    )
    marks[...] = True
    return Memory(base, of_bytes, _array_of(given, base, stored, strides, before + first, layout))


def _array_of(given: Given, base: Any, stored: Any, strides: list[int], first: int, layout: str) -> Any:
    dtype, size = given.operand.dtype, stored.itemsize
    if given.numpy:
        kind = NUMPY_BFLOAT16 if dtype == "bfloat16" else stored.dtype
        places = base.view(kind)[first:]
        array = np.lib.stride_tricks.as_strided(
            places, stored.shape, [s * size for s in strides], writeable=layout != "read-only"
        )
        return array
    import torch

    array = torch.from_numpy(base).view(getattr(torch, dtype)).as_strided(stored.shape, strides, first)
    return array.detach().requires_grad_() if given.gradient else array


class Attempt:
    """One call of a plan: its arrays and its outcome."""

    def __init__(self, plan: Plan, plain: bool = False, other: bool = False) -> None:
        """
        Args:
            plain: every array is contiguous, in memory of its own.
            other: the arrays belong to the other framework.
        """
        self.memories: dict[str, Memory] = {}
        self.plan, self.plain, self.other = plan, plain, other
        self.result: list[Any] = []
        self.error: BaseException | None = None
        arguments = {name: self._made(name, value) for name, value in plan.arguments.items()}
        before = {name: memory.base.copy() for name, memory in self.memories.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = list(_parts(getattr(rk, plan.operator)(**arguments)))
                found += _gradients(found, self.memories)
            self.result = [_raw(x) for x in found]
        except Exception as error:
            self.error = error
        self.strays = [name for name, memory in self.memories.items() if self._strayed(name, memory, before[name])]
        self.result += [_raw(self.memories[name].array) for name in self._written()]

    def _written(self) -> list[str]:
        return [n for n in self.memories if n in self.plan.arguments and self.plan.arguments[n].operand.written]

    def _strayed(self, name: str, memory: Memory, before: np.ndarray) -> bool:
        changed = memory.base != before
        for other in self._written():
            if self.memories[other].base is memory.base:
                changed &= ~self.memories[other].inside
        return bool(changed.any())

    def _made(self, name: str, value: Any) -> Any:
        if isinstance(value, Wrong):
            import torch

            return value.make(torch)
        if isinstance(value, (list, tuple)) and any(isinstance(x, Given) for x in value):
            return type(value)(self._made(f"{name}[{i}]", x) for i, x in enumerate(value))
        if not isinstance(value, Given):
            return copy.deepcopy(value) if isinstance(value, (list, dict)) else value
        given = copy.copy(value)
        given.numpy = (self.plan.numpy != value.numpy) != self.other if name in self.plan.mutated else (
            self.plan.numpy != self.other
        )  # fmt: skip
        if "framework" in self.plan.mutated.get(name, ""):
            given.numpy = not self.plan.numpy
        memory = None
        if given.alias_of and not self.plain and given.alias_of in self.memories:
            memory = self._alias(given, self.memories[given.alias_of])
        self.memories[name] = memory or lay_out(given, self.plain)
        return self.memories[name].array

    def _alias(self, given: Given, of: Memory) -> Memory | None:
        """The same numbers, contiguous, at an offset of ``shift`` elements; None if the memory is too small. Later
        plain attempts need these numbers, so the operand takes them."""
        stored = _stored(given.operand)
        size = stored.itemsize
        inside = np.flatnonzero(of.inside)
        first = (int(inside[0]) if len(inside) else 16 * size) // size + given.shift
        if first < 0 or (first + stored.size) * size > len(of.base) or len(of.base) % size:
            return None
        strides, _, _ = _strides(stored.shape, "contiguous")
        marks = np.zeros(len(of.base), bool)
        marks[first * size : (first + stored.size) * size] = True
        return Memory(of.base, marks, _array_of(given, of.base, stored, strides, first, "contiguous"))


def _gradients(found: list[Any], memories: dict[str, Memory]) -> list[Any]:
    outputs = [x for x in found if getattr(x, "grad_fn", None) is not None]
    if not outputs:
        return []
    sum((x.double().sum() for x in outputs), start=0.0).backward()
    return [memory.array.grad for memory in memories.values() if getattr(memory.array, "grad", None) is not None]


def _parts(found: Any) -> Iterator[Any]:
    if found is None:
        return
    if hasattr(found, "vector"):
        yield found.vector
    # nothing is written after the last kept set
    elif isinstance(found, rk.SampleResult) and found.kept_ids is not None:
        yield from _parts(found._replace(kept_ids=None))
        yield found.kept_ids[: int(found.kept_offsets[-1])]
    elif isinstance(found, (tuple, list)):
        for part in found:
            yield from _parts(part)
    else:
        yield found


def _raw(x: Any) -> Any:
    if isinstance(x, int):  # an integer in a result is the number of a split
        return x
    if not isinstance(x, np.ndarray):
        import torch

        if isinstance(x, torch.Tensor):
            x = x.detach().contiguous()
            if x.is_meta:
                return tuple(x.shape), str(x.dtype)
            if not x.is_floating_point() or x.dtype != torch.bfloat16:
                return tuple(x.shape), str(x.dtype)[6:], x.numpy().tobytes()
            return tuple(x.shape), "bfloat16", x.view(torch.int16).numpy().tobytes()
    return x.shape, x.dtype.name, x.tobytes()


# ---- judging --------------------------------------------------------------------------------------------------------


def judge(plan: Plan) -> str:
    """Describes what is wrong with the call; empty if all is right."""
    first = Attempt(plan)
    if first.strays:
        return f"memory of {', '.join(first.strays)} was written outside of outputs"
    again = Attempt(plan)
    if type(first.error) is not type(again.error) or first.result != again.result:
        return f"the same call twice: {_of(first)}, then {_of(again)}"
    if first.error is not None:
        return _of_error(plan, first.error)
    if any(isinstance(v, Given) and v.alias_of for v in plan.arguments.values()):
        _take_numbers(plan, first)
    plain = Attempt(plan, plain=True)
    if plain.result != first.result:
        return f"{_of(first)}, of contiguous arrays {_of(plain)}"
    whole = not any(isinstance(v, Wrong) for v in plan.arguments.values())
    if whole and plan.operator in REFERENCES:
        arguments = {name: _of_reference(value) for name, value in plan.arguments.items()}
        if words := REFERENCES[plan.operator](arguments, [_read(x) for x in first.result]):
            return f"by the reference: {words}"
    one_kind = not any("framework" in how for how in plan.mutated.values())
    with_gradient = any(isinstance(v, Given) and v.gradient for v in plan.arguments.values())
    # torch accepts any dtype here, since a tensor of one number often is not float32
    converted = "denominator" in plan.mutated
    if (
        whole
        and one_kind
        and not with_gradient
        and not converted
        and (NUMPY_BFLOAT16 is not None or not _has_bfloat16(plan))
    ):
        other = Attempt(plan, plain=True, other=True)
        if other.result != first.result:
            return f"{_of(first)}, of the other framework {_of(other)}"
    return ""


def _of_reference(value: Any) -> Any:
    """An argument, with the numbers that the call read."""
    if isinstance(value, (list, tuple)):
        return [_of_reference(x) for x in value]
    if not isinstance(value, Given):
        return value
    stored = _stored(value.operand)
    if value.layout == "expanded" and stored.ndim and len(stored):
        stored = np.broadcast_to(stored[:1], stored.shape)
    return found_of(np.ascontiguousarray(stored).reshape(stored.shape), value.operand.dtype)


def _read(result: Any) -> Any:
    if isinstance(result, int):
        return result
    shape, dtype, data = result
    return found_of(np.frombuffer(data, "int16" if dtype == "bfloat16" else dtype).reshape(shape), dtype)


def _has_bfloat16(plan: Plan) -> bool:
    return any(isinstance(v, Given) and v.operand.dtype == "bfloat16" for v in plan.arguments.values()) or (
        plan.arguments.get("out_dtype") == "bfloat16"
    )


def _take_numbers(plan: Plan, attempt: Attempt) -> None:
    """Gives aliases the values that they had before the call. A new attempt draws the same values."""
    fresh = Attempt.__new__(Attempt)
    fresh.memories, fresh.plan, fresh.plain, fresh.other = {}, plan, False, attempt.other
    for name, value in plan.arguments.items():
        fresh._made(name, value)
    for name, value in plan.arguments.items():
        if isinstance(value, Given) and value.alias_of and name in fresh.memories:
            array = fresh.memories[name].array
            if not isinstance(array, np.ndarray):
                array = (array.detach().float() if value.operand.dtype == "bfloat16" else array.detach()).numpy()
            value.operand, value.layout = value.operand._replace(values=np.array(array)), "contiguous"


def _of(attempt: Attempt) -> str:
    if attempt.error is not None:
        return f"{type(attempt.error).__name__}: {str(attempt.error)[:200]}"
    return "a result" + "".join(f" {x[0]}" if isinstance(x, tuple) else "" for x in attempt.result[:3])


def names_of(operator: str) -> dict[str, tuple[str, ...]]:
    """Names that an error may use for each argument."""
    found = {name: (name, *ALSO.get(name, ())) for name in inspect.signature(getattr(rk, operator)).parameters}
    return found


def _of_error(plan: Plan, error: BaseException) -> str:
    words = str(error)
    if isinstance(error, RuntimeError) and "a second derivative is wanted, and there is none" in words:
        return ""
    if not isinstance(error, TYPED):
        return f"{type(error).__name__}: {words[:300]}"
    names = names_of(plan.operator)
    every = "|".join(re.escape(n) for of in names.values() for n in of)
    if not re.match(rf"({plan.operator}: .*|row \d+ .*: )?\b({every})\b", words, re.S):
        return f"an error that names no argument: {type(error).__name__}: {words[:300]}"
    if RELATIONS.search(words):
        return ""
    if len(plan.mutated) == 1 and plan.hostile:
        (name,) = plan.hostile
        if not any(re.search(rf"\b{re.escape(n)}\b", words) for n in names[name]):
            return f"an error that does not name {name}: {type(error).__name__}: {words[:300]}"
    if not plan.mutated and all(v.operand.values.size for v in plan.arguments.values() if isinstance(v, Given)):
        return f"a right call is refused: {type(error).__name__}: {words[:300]}"
    return ""


def described(plan: Plan) -> str:
    def of(value: Any) -> str:
        if isinstance(value, Given):
            alias = f" in {value.alias_of}{value.shift:+d}" if value.alias_of else ""
            text = f"{value.operand.dtype}{list(value.operand.values.shape)} {value.layout}{alias}"
            return text + (" with gradient" if value.gradient else "")
        return value.what if isinstance(value, Wrong) else _check.shown(value)[:60]

    arguments = ", ".join(f"{name}={of(value)}" for name, value in plan.arguments.items() if value is not None)
    return f"{plan.operator}({arguments}) of {'NumPy' if plan.numpy else 'torch'}; changed: {plan.mutated}"


# ---- processes ------------------------------------------------------------------------------------------------------


def work(seed: int, first: int, last: int) -> None:
    """Prints each call's number before it runs, and a line of JSON for each fault."""
    faulthandler.enable()
    for number in range(first, last):
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        plan = plan_of(seed, number)
        text = described(plan)
        fault = judge(plan)
        if fault:
            print(json.dumps({"case": number, "fault": fault, "call": text}), flush=True)


def faults(seed: int, calls: int, first: int = 0) -> Iterator[dict[str, Any]]:
    last = first + calls
    while first < last:
        command = [sys.executable, __file__, "--worker", "--seed", str(seed), "--first", str(first), "--calls"]
        with subprocess.Popen([*command, str(last - first)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
            at, why = first, ""
            assert worker.stdout is not None
            assert worker.stderr is not None
            while True:
                if not select.select([worker.stdout], [], [], SILENCE_S)[0]:
                    worker.kill()
                    why = f"no answer in {SILENCE_S} s"
                    break
                line = worker.stdout.readline()
                if not line:
                    break
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found
                else:
                    at = found
            tail = worker.stderr.read().decode()[-2000:]
            code = worker.wait()
        if why or code:
            yield {"case": at, "fault": why or f"exit status {code}\n{tail}", "call": described(plan_of(seed, at))}
        first = at + 1 if why or code else last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--worker", action="store_true")
    how = parser.parse_args()
    if how.case is not None:
        plan = plan_of(how.seed, how.case)
        print(described(plan))
        print(judge(plan) or "right")
        return 0
    if how.worker:
        work(how.seed, how.first, how.first + how.calls)
        return 0
    count = 0
    for found in faults(how.seed, how.calls, how.first):
        count += 1
        print(f"case {found['case']}: {found['fault']}\n  {found['call']}", flush=True)
    print(f"{how.calls} calls of seed {how.seed}: {count} faults")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
