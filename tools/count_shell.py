#!/usr/bin/env python3
"""Counts the shell: lines that carry an operator between Python and its kernels, but contain nothing of its formula.

    python tools/count_shell.py [--commit REVISION] [--files]

The tool counts four parts, with every line of each file:

- torch layer: engine, shared checks, and files of ``ops`` that end with ``_torch``, ``_traced``, ``_composed`` or
  ``_autograd``. Other files of ``ops`` add the statements that make an ``Operator``, and the private functions that
  these name.
- dispatch: its template and table, ``cpp/ops/<operator>.cpp``, and headers that declare an operator for one backend.
  ``linear_logprob.cpp`` is not dispatch, since it computes.
- architecture stubs: ``.cu`` files of fewer than 20 lines, and the ``kernels.h`` that declare them.
- bindings: ``bindings``, which older commits have in ``cpp``.

Commit 2c15b2e has 15,226 lines by this rule. The limit of 8,500 was set next to a figure of 15,202. That figure has 24
lines less in the torch layer, whose list of files was not recorded. The other three parts agree in every line.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "python/rl_kernel_native/"
ENGINE = (
    "_call", "_check", "_composed", "_constants", "_described", "_engine", "_in_graph", "_kept", "_main_grad",
    "_operator", "_register", "_run", "_schema", "_shapes", "_torch", "_transforms",
)  # fmt: skip
DISPATCH = ("cpp/ops/dispatch.cpp", "cpp/include/rlk/backends.h", "cpp/include/rlk/operators.inc")
STUB_LINES = 20


def is_torch_layer(name: str) -> bool:
    stem = name.removeprefix(PACKAGE).removesuffix(".py")
    by_hand = re.fullmatch(r"ops/\w+_(torch|traced|composed|autograd)", stem)
    return name.startswith(PACKAGE) and name.endswith(".py") and (bool(by_hand) or stem in ENGINE)


def is_dispatch(name: str, operators: set[str]) -> bool:
    if name in DISPATCH:
        return True
    if dispatch := re.fullmatch(r"cpp/ops/(\w+)\.cpp", name):
        return dispatch[1] in operators - {"linear_logprob"}
    header = re.fullmatch(r"(?:(?:cpp/)?(cpu)|cuda/(\w+)|hip/(\w+))/(\w+)\.h", name)
    return bool(header) and header[4] in operators and (header[2] or header[3] or header[4]) == header[4]


def is_stub(name: str, lines: int) -> bool:
    short = lines < STUB_LINES and re.fullmatch(r"cuda/\w+/\w+\.cu", name)
    return bool(short) or bool(
        re.fullmatch(r"cuda/(\w+/kernels|common/token_operators|tokens/operators)\.(h|inc)", name)
    )


def described(text: str) -> int:
    """Number of lines of a module of ``ops`` that describe an operator for the engine."""
    body = ast.parse(text).body
    makers = [node for node in body if isinstance(node, (ast.Assign, ast.AnnAssign)) and _makes_operator(node)]
    found = {node.lineno: node for node in makers}
    functions = {n.name: n for n in body if isinstance(n, ast.FunctionDef) and n.name.startswith("_")}
    left = list(makers)
    while left:
        for name in (n.id for n in ast.walk(left.pop()) if isinstance(n, ast.Name)):
            function = functions.pop(name, None)
            if function is not None:
                found[function.lineno] = function
                left.append(function)
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in found.values())


def _makes_operator(statement: ast.AST) -> bool:
    calls = (n.func for n in ast.walk(statement) if isinstance(n, ast.Call))
    return any(isinstance(f, ast.Name) and f.id == "Operator" for f in calls)


def count(names: list[str], read: Callable[[str], str]) -> dict[str, dict[str, int]]:
    """Counts lines by part, then by file."""
    operators = {Path(n).stem for n in names if re.fullmatch(r"cpp/include/rlk/ops/\w+\.h", n)}
    parts: dict[str, dict[str, int]] = {"torch layer": {}, "dispatch": {}, "architecture stubs": {}, "bindings": {}}
    for name in names:
        if not re.fullmatch(r"(bindings|cpp|cpu|cuda|hip|python)/.*\.(h|inc|cpp|cu|py)", name):
            continue
        text = read(name)
        lines = text.count("\n")
        if is_torch_layer(name):
            parts["torch layer"][name] = lines
        elif re.fullmatch(PACKAGE + r"ops/\w+\.py", name) and (of_engine := described(text)):
            parts["torch layer"][name] = of_engine
        elif is_dispatch(name, operators):
            parts["dispatch"][name] = lines
        elif is_stub(name, lines):
            parts["architecture stubs"][name] = lines
        elif name.removeprefix("cpp/").startswith("bindings/"):
            parts["bindings"][name] = lines
    return parts


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="count a revision instead of the working tree")
    parser.add_argument("--files", action="store_true", help="print every file")
    options = parser.parse_args()
    if options.commit:
        names = _git("ls-tree", "-r", "--name-only", options.commit).split("\n")
        parts = count(names, lambda name: _git("show", f"{options.commit}:{name}"))
    else:
        parts = count(_git("ls-files").split("\n"), lambda name: (ROOT / name).read_text(encoding="utf-8"))
    for part, files in parts.items():
        print(f"{sum(files.values()):7,}  {part} ({len(files)} files)")
        for name, lines in sorted(files.items(), key=lambda item: -item[1]) if options.files else ():
            print(f"         {lines:5,}  {name}")
    print(f"{sum(sum(files.values()) for files in parts.values()):7,}  in all")


if __name__ == "__main__":
    main()
