"""Finds, for each array argument of an operator, a valid call that uses it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import rl_kernel_native as rk
from call_cases import CALLS, Draw, Operand

DRAWS = 24  # enough draws for every operator to use all of its arrays


def mapped(value: Any, make: Callable[[Operand], Any]) -> Any:
    if isinstance(value, Operand):
        return make(value)
    return type(value)(mapped(v, make) for v in value) if type(value) in (tuple, list) else value


def valid_calls(operator: str, make: Callable[[Operand], Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Calls as they were drawn, and their arguments, without optional arrays that the call would write."""
    optional = {k for k, v in inspect.signature(getattr(rk, operator)).parameters.items() if v.default is not v.empty}
    for seed in range(DRAWS):
        d = Draw(np.random.default_rng(seed))
        d.dtype = "float32"
        drawn = CALLS[operator](d)
        if any(isinstance(v, Operand) and v.dtype == "bfloat16" for v in drawn.values()):
            continue
        written = {k for k, v in drawn.items() if isinstance(v, Operand) and v.written}
        yield drawn, {k: mapped(v, make) for k, v in drawn.items() if k not in written & optional}


def by_array(operator: str, make: Callable[[Operand], Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each array argument of the operator once, with the arguments of a valid call that uses it."""
    seen: set[str] = set()
    for drawn, arguments in valid_calls(operator, make):
        names = {k for k, v in drawn.items() if isinstance(v, Operand) and not v.written and v.values.size} - seen
        seen |= names
        for name in sorted(names):
            yield name, arguments
