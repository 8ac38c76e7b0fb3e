"""Another kind of object in place of an operand, next to each other operand and each option: one table over all
operators. Some calls compute with one array before they check another array. Errors of such calls must name the wrong
array, too."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from call_cases import CALLS, FLOATS, OPERATORS, Draw
from fuzz_calls import OBJECTS, Attempt, Given, Plan, Wrong, _given, _of_error, names_of

torch = pytest.importorskip("torch")

DRAWS = 40  # enough draws for each pair of operands that a call can have


class OnlyDlpack:
    """An array of a framework that has only DLPack's two functions."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **how: Any) -> Any:
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


OTHERS: dict[str, Any] = {
    "a module": lambda t: math,
    "a class": lambda t: np.ndarray,
    "None": lambda t: None,
    "a text": lambda t: "x",
    "a number": lambda t: 3,
    "a list": lambda t: [1.0, 2.0],
    "a sparse tensor": lambda t: t.eye(3).to_sparse(),
    "an array of DLPack alone": lambda t: OnlyDlpack(np.ones((2, 3), np.float32)),
    "framework": None,  # the same numbers in another framework
}


def plans(operator: str) -> Iterator[tuple[Plan, str]]:
    """Valid calls, each with the name of one operand. The call has an argument that no earlier call had together with
    this operand."""
    seen: set[tuple[str, str, bool]] = set()
    for number in range(DRAWS):
        d = Draw(np.random.default_rng([31, number]))
        plan = Plan(operator, numpy=number % 2 == 1)
        plan.arguments = {name: _given(value) for name, value in CALLS[operator](d).items()}
        if any(isinstance(v, Given) and not v.operand.values.size for v in plan.arguments.values()):
            continue
        names = [n for n, v in plan.arguments.items() if isinstance(v, Given) or n == "parts"]
        words = [f"{n}={v}" for n, v in plan.arguments.items() if isinstance(v, str)]
        for operand in names:
            pairs = {(operand, beside, plan.numpy) for beside in (*names, *words, "")} - seen
            seen |= pairs
            if pairs:
                yield plan, operand


@pytest.mark.parametrize("operator", OPERATORS)
def test_something_else_beside_each_operand_is_named(operator: str) -> None:
    tried = 0
    for right, operand in plans(operator):
        for what, make in OTHERS.items():
            plan = copy.deepcopy(right)
            plan.mutated[operand] = what
            given = plan.arguments[operand]
            if isinstance(given, list):  # one of several arrays
                given[-1].numpy = not plan.numpy
                given[-1] = given[-1] if make is None else Wrong(make, what)
            elif make is not None:
                plan.arguments[operand] = Wrong(make, what)
            error = Attempt(plan).error
            fault = "" if error is None else _of_error(plan, error)
            assert not fault, (operand, what, [n for n, v in plan.arguments.items() if v is not None], fault)
            tried += error is not None
    assert tried, operator  # the operator must refuse some entry of the table


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("operator", OPERATORS)
def test_each_kind_of_object_in_the_place_of_an_operand_is_named(operator: str, with_gradients: bool) -> None:
    """Includes arrays that are written, and arrays that a backward adds to."""
    seen: set[str] = set()
    for right, operand in plans(operator):
        if operand in seen or operand not in right.arrays() or (with_gradients and right.numpy):
            continue
        seen.add(operand)
        for what, make in OBJECTS.items():
            if what in ("None", "a parameter"):  # an operand may be such an object
                continue
            plan = copy.deepcopy(right)
            plan.arguments[operand] = Wrong(make, what)
            plan.mutated[operand] = what
            plan.hostile.add(operand)
            for name in plan.arrays() if with_gradients else ():
                given = plan.arguments[name]
                given.gradient = not given.operand.written and given.operand.dtype in FLOATS
            error = Attempt(plan).error
            fault = "" if error is None else _of_error(plan, error)
            assert not fault, (operand, what, [n for n, v in plan.arguments.items() if v is not None], fault)


# Kinds of objects that some option may be.
OPTIONS = ("None", "a text", "a number", "a float", "a NumPy number", "no dimension", "a parameter")
# Objects that give no bool, or an error, where they are compared with a text or a number.
RECORDS = np.zeros(2, [("a", "f4"), ("b", "i4")])
NO_OPTIONS: dict[str, Any] = {
    **{what: make for what, make in OBJECTS.items() if what not in OPTIONS},
    "a record": lambda t: RECORDS[0],
    "records without a dimension": lambda t: RECORDS[0, ...],
    "numbers": lambda t: np.ones(3),
    "texts": lambda t: np.array(["nan", "float32"]),
    "a tensor of numbers": lambda t: t.ones(3),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_kind_of_object_in_the_place_of_an_option_is_named(operator: str) -> None:
    """Includes options that the drawn call leaves at their defaults."""
    found = []
    right, _ = next(plans(operator))
    for option in names_of(operator).keys() - {*right.arrays(), "parts", "spec", "options"}:
        for what, make in NO_OPTIONS.items():
            plan = copy.deepcopy(right)
            plan.arguments[option] = Wrong(make, what)
            plan.mutated[option] = what
            plan.hostile.add(option)
            error = Attempt(plan).error
            fault = "" if error is None else _of_error(plan, error)
            found += [f"{option}={what}: {fault}"] if fault else []
    assert not found, "\n".join(found)


SETTINGS: list[Callable[..., Any]] = [
    rk.PolicySpec,
    rk.LogprobSemantics,
    *(vars(rk.presets)[n] for n in rk.presets.__all__),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda f: f.__name__)
def test_each_kind_of_object_in_the_place_of_a_setting_is_named(settings: Callable[..., Any]) -> None:
    found = []
    needed = {"logits_dtype": "float32"} if settings is rk.LogprobSemantics else {}
    for name in inspect.signature(settings).parameters:
        for what, make in NO_OPTIONS.items():
            try:
                settings(**(needed | {name: make(torch)}))
            except (TypeError, ValueError) as error:
                found += [] if re.match(rf"{name}\b", str(error)) else [f"{name}={what}: {error}"]
    assert not found, "\n".join(found)


def required_and_perhaps_none() -> list[tuple[str, str]]:
    return [
        (operator, name)
        for operator in OPERATORS
        for name, option in inspect.signature(getattr(rk, operator)).parameters.items()
        if "None" in str(option.annotation) and option.default is option.empty
    ]


@pytest.mark.parametrize(("operator", "name"), required_and_perhaps_none())
def test_a_none_of_an_annotation_is_one_that_some_call_may_have(operator: str, name: str) -> None:
    for number in range(DRAWS):
        plan = Plan(operator)
        plan.arguments = {n: _given(v) for n, v in CALLS[operator](Draw(np.random.default_rng([32, number]))).items()}
        plan.arguments[name] = None
        if Attempt(plan).error is None:
            return
    pytest.fail(f"{operator}: {name} is refused where it is None")
