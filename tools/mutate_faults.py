"""The possible faults of a source file, for tools/mutate.py: the kind, begin and end of the replaced text, and what
replaces it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
SUMS = {"+": "-", "-": "+", "*": "+", "//": "*", "<<": ">>", ">>": "<<"}


def python_faults(source: str) -> Iterator[tuple[str, int, int, str]]:
    """Each possible fault: its kind, begin and end of the replaced text, and the replacement."""
    encoded, starts = source.encode(), [0]
    for line in encoded.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)

    def at(line: int, column: int) -> int:
        place = starts[line - 1] + column
        return place if source.isascii() else len(encoded[:place].decode())

    def between(left: ast.expr, right: ast.expr, table: dict[str, str]) -> tuple[int, int, str] | None:
        begin = at(left.end_lineno or 0, left.end_col_offset or 0)
        gap = source[begin : at(right.lineno, right.col_offset)]
        found = re.search(r"is not|<<|>>|//|[<>=!]=|\bis\b|[<>+*-]", gap)
        if not found or found[0] not in table:
            return None
        return begin + found.start(), begin + found.end(), table[found[0]]

    tree = ast.parse(source)
    declared = {id(k.value) for k in ast.walk(tree) if isinstance(k, ast.keyword) and k.arg == "strict"}  # zip's check
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "overload" for d in node.decorator_list):
            declared |= {id(inner) for inner in ast.walk(node)}
    for node in (node for node in ast.walk(tree) if id(node) not in declared):
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                if place := between(left, right, COMPARISONS):
                    yield "bound", *place
        elif isinstance(node, ast.BinOp):
            if place := between(node.left, node.right, SUMS):
                yield "sum", *place
        elif isinstance(node, ast.BoolOp):
            begin = at(node.values[0].end_lineno or 0, node.values[0].end_col_offset or 0)
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            where = source.index(old, begin)
            yield "logic", where, where + len(old), new
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            begin = at(node.lineno, node.col_offset)
            yield "not", begin, begin + 4, ""
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            begin, end = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
            yield "constant", begin, end, str(node.value + 1)
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            begin, end = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
            yield "flag", begin, end, str(not node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            begin, end = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
            yield "call", begin, end, "None"
        elif isinstance(node, ast.If):
            begin = at(node.test.lineno, node.test.col_offset)
            end = at(node.test.end_lineno or 0, node.test.end_col_offset or 0)
            yield "branch", begin, end, "False"


CPP_KINDS: dict[str, list[tuple[str, dict[str, str]]]] = {
    "bound": [(r"(?<=[\w)\]]) (<|<=|>|>=) (?=[\w(-])", COMPARISONS)],
    "equality": [(r"(?<=[\w)\]]) (==|!=) (?=[\w(-])", COMPARISONS)],
    "sum": [(r"(?<=[\w)\]]) (\+|-|\*) (?=[\w(])", SUMS)],
    "logic": [(r" (&&|\|\|) ", {"&&": "||", "||": "&&"})],
    "extremum": [(r"\bstd::(max|min)\b", {"max": "min", "min": "max"})],
    "constant": [(r"(?<=[ (])(0\.0f|1\.0f|0\.5f)(?=[,;) ])", {"0.0f": "1.0f", "1.0f": "0.0f", "0.5f": "0.25f"})],
    "not": [(r"if \((!)", {"!": ""})],
    "call": [(r"(?m)^  +((?:check|require|refuse|note|count)\w*\([^;\n]*\));", {})],
}


def cpp_faults(source: str) -> Iterator[tuple[str, int, int, str]]:
    blank = re.sub(
        r'//[^\n]*|"(?:[^"\\\n]|\\.)*"|^#if defined\(__CUDA_ARCH__\)[\s\S]*?^#(?=else|endif)|^#[^\n]*|template <[^\n]*'
        r"|\boperator\S+|\bstatic_assert\([^;]*;",
        lambda m: re.sub(r"[^\n]", " ", m[0]), source, flags=re.M,
    )  # fmt: skip
    for kind, patterns in CPP_KINDS.items():
        for pattern, table in patterns:
            for found in re.finditer(pattern, blank):
                yield kind, found.start(1), found.end(1), table.get(found[1], "(void)0")
