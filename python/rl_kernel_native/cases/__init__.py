"""Example inputs of every operator: the doctor's self-tests, certificates and the commands of the bench.

A module holds the :class:`Cases` of one operator, or of operators that share inputs, as ``CASES``. Every module of this
package is found automatically, so there is no list of modules. These self-tests take seconds; the full tests are in
tests/.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

from ._certificate import LAYOUTS, MOST_NEIGHBOURS, Arrays, Case
from ._tools import Bench, Buffers, Cases, Check, Pass

__all__ = [
    "CASES",
    "CERTIFIED",
    "LAYOUTS",
    "MOST_NEIGHBOURS",
    "SELF_TESTS",
    "Arrays",
    "Bench",
    "Buffers",
    "Case",
    "Cases",
    "Check",
    "Pass",
    "certified_cases",
]


def _found() -> dict[str, Cases]:
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return dict(sorted((name, of) for module in modules for name, of in module.CASES.items()))


# Operators by name.
CASES: dict[str, Cases] = _found()
# Self-tests, as functions of torch, a device and its compute capability.
SELF_TESTS: dict[str, Callable[[Any, str, tuple[int, int] | None], Iterator[Check]]] = {
    name: of.checks for name, of in CASES.items() if of.checks is not None
}
# The operators of certificates, and the functions that make their cases.
CERTIFIED: dict[str, Callable[[Arrays, bool], Iterator[Case]]] = {
    name: of.certificate for name, of in CASES.items() if not isinstance(of.certificate, str)
}


def certified_cases(arrays: Arrays, quick: bool) -> Iterator[Case]:
    """Every operator's certificate cases that the device supports."""
    for make in CERTIFIED.values():
        yield from make(arrays, quick)
