"""Faults of C++ behind switches: one build holds them all, and RLK_MUTANT=3 in the environment plants fault 3.

A fault becomes ``(RLK_IS_MUTANT(3) ? (a <= b) : (a < b))``, with both forms of the longest expression around it that
can stand in parentheses. Expressions that the compiler evaluates keep their value, so a fault that only constants see
survives.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mutate_tables import UNDECIDED

ROOT = Path(__file__).resolve().parent.parent

DECLARATION = """extern int rlk_mutant;
#ifndef RLK_IS_MUTANT
#define RLK_IS_MUTANT(k) (!__builtin_is_constant_evaluated() && ::rlk_mutant == (k))
#endif
"""
HELD = "switches.json"  # the faults that the build of a copy holds, and their numbers
DEFINED_IN = "cpu/thread_pool.cpp"  # a part of every program
DEFINITION = """
#include <cstdlib>
int rlk_mutant = std::getenv("RLK_MUTANT") != nullptr ? std::atoi(std::getenv("RLK_MUTANT")) : 0;
"""
_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.S)
_END = r"[;,?]|(?<!:):(?!:)|(?<![=<>!])=(?!=)|\b(?:return|else|case)\b"


def expression(source: str, begin: int, end: int, joined: bool) -> tuple[int, int]:
    """Begin and end of the expression around a place; `joined`: with what && and || join to it."""
    text = _NO_CODE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), source)
    ends = {i for m in re.finditer(_END if joined else rf"{_END}|&&|\|\|", text) for i in range(*m.span())}

    def first(places: Iterable[int], enters: str, leaves: str) -> int:
        depth = 0
        for i in places:
            if text[i] in leaves and depth == 0:
                return i
            depth += (text[i] in enters) - (text[i] in leaves)
            if depth == 0 and i in ends:
                return i
        raise ValueError("no statement is around this place")

    left = first(range(begin - 1, -1, -1), ")]}", "([{") + 1
    right = first(range(end, len(text)), "([{", ")]}")
    while source[left].isspace():
        left += 1
    while source[right - 1].isspace():
        right -= 1
    return left, right


def behind_switch(source: str, fault: Any, number: int) -> tuple[int, int, str]:
    """The place in the source and what replaces it. The fault has the fields of mutate.Fault."""
    begin, end = fault.begin, fault.end
    if fault.kind not in ("call", "constant"):
        begin, end = expression(source, begin, end, fault.kind == "logic")
    whole = source[begin:end]
    planted = source[begin : fault.begin] + fault.text + source[fault.end : end]
    if fault.kind == "call":
        return begin, end, f"(RLK_IS_MUTANT({number}) ? (void)0 : (void)({whole}))"
    as_bool = "!!" if fault.kind == "not" else ""  # a pointer and its negation have no common type
    return begin, end, f"(RLK_IS_MUTANT({number}) ? {as_bool}({planted}) : ({whole}))"


def switched(source: str, numbers: Mapping[Any, int]) -> tuple[str, list[Any]]:
    """A file with faults behind switches, and those that it holds: of two overlapping faults, the first."""
    places = sorted((*behind_switch(source, fault, number), fault) for fault, number in numbers.items())
    held: list[tuple[int, int, str, Any]] = []
    for place in places:
        if not held or place[0] >= held[-1][1]:
            held.append(place)
    for begin, end, text, _ in reversed(held):
        source = source[:begin] + text + source[end:]
    return DECLARATION + source, [fault for *_, fault in held]


class Switches:
    """What a mutate.Copy needs to hold many faults."""

    way = "behind a switch"
    is_built = False

    def __init__(self, jobs: int, of: str, faults: Iterable[Any], tests_of: Callable[[Any], Any]) -> None:
        self.numbers = {fault: number for number, fault in enumerate(faults, 1)}
        self.tests_of, self.current = tests_of, 0
        super().__init__(jobs, of)

    def content(self, path: Path) -> bytes:
        name, source = str(path.relative_to(ROOT)), path.read_bytes()
        if of_file := {fault: number for fault, number in self.numbers.items() if fault.path == name}:
            text, held = switched(source.decode(), of_file)
            source = text.encode()
            for fault in set(of_file) - set(held):
                del self.numbers[fault]
        return source + DEFINITION.encode() if name == DEFINED_IN else source

    def build(self: Any, *targets: str) -> bool:
        return self.is_built or super().build(*targets)

    def build_all(self: Any) -> bool:
        """Builds the extension and the tests. A file with a fault that does not compile loses its switches."""
        tests = sorted({test for fault in self.numbers for test in self.tests_of(fault)[2]})
        while not self.build("_C", *tests):
            errors = re.findall(r"^\S*?(\w+/\S+):\d+:\d+: (?:fatal )?error", self.said, re.M)
            named = {fault.path for fault in self.numbers if any(at.endswith(fault.path) for at in errors)}
            for path in named or {fault.path for fault in self.numbers if f"{fault.path}:" in self.said}:
                self.numbers = {fault: number for fault, number in self.numbers.items() if fault.path != path}
                self.refresh(ROOT / path)
                break
            else:
                return False
        shutil.copytree(self.root / "python", self.tree, dirs_exist_ok=True)
        (self.root / HELD).write_text(json.dumps([[*fault, number] for fault, number in self.numbers.items()]))
        self.is_built = True
        return True

    def forked(self: Any, package: Path, options: list[str], limit_s: float) -> tuple[int, str]:
        os.environ["RLK_MUTANT"] = "0" if package == self.tree else str(self.current)
        return super().forked(package, options, limit_s)

    def plant(self: Any, fault: Any) -> str:
        own, others, compiled = self.tests_of(fault)
        self.current = self.numbers[fault]
        os.environ["RLK_MUTANT"] = str(self.current)
        try:
            return self.compiled_notice(compiled) or self.python_notices(own) or self.python_notices(others)
        finally:
            del os.environ["RLK_MUTANT"]


class BuiltSwitches:
    """What a Switched needs to judge by an earlier build. The data need no compiler, so the extension and C++ tests may
    come from another machine. A fault that all tests pass stays undecided, since the compiler may have lost it."""

    is_built = True

    def __init__(self: Any, faults: Iterable[Any], tests_of: Callable[[Any], Any]) -> None:
        super().__init__(1, "_switched", (), tests_of)
        held = {tuple(fault): number for *fault, number in json.loads((self.root / HELD).read_text())}
        self.numbers = {fault: held[fault] for fault in faults if fault in held}

    def refresh(self: Any, path: Path) -> None:
        """The C++ files of the copy stay as built."""
        if path.suffix not in (".cpp", ".h") or not (self.root / path.relative_to(ROOT)).exists():
            super().refresh(path)

    def compiled_notice(self: Any, tests: list[str]) -> str:
        return super().compiled_notice([name for name in tests if (self.root / "build" / "cpu" / name).exists()])

    def plant(self: Any, fault: Any) -> str:
        by = super().plant(fault) if fault in self.numbers else ""
        return by or f"{UNDECIDED}: {'passes' if fault in self.numbers else 'not'} behind a switch"
