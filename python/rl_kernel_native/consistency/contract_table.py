"""`rlk contract`: prints the table of contract.py, at most 100 columns wide, or as JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from .. import contract
from .errors import BadInput

WIDTH = 100


def chosen_operators(names: Iterable[str]) -> tuple[str, ...]:
    """The selected operators of the table, or all operators if none is selected. Raises BadInput for an unknown
    name."""
    chosen = tuple(names)
    for name in chosen:
        if name not in contract.operators():
            raise BadInput(f"--operator {name}: want one of {', '.join(contract.operators())}")
    return chosen or contract.operators()


def kept(row: contract.Row) -> str:
    """The variations that do not change the bits, in words."""
    missing = [name for name in contract.VARIATIONS if name not in row.keeps]
    if not missing:
        return "any"
    return f"any but {', '.join(missing)}" if len(missing) == 1 else ", ".join(row.keeps)


def bound(row: contract.Row) -> str:
    """The bound against float64, in a formula."""
    text = row.bound.text
    if row.unit_bound is not None:
        text += f"; by a matrix unit {row.unit_bound.text}"
    return f"{text}; then rounded" if row.rounded else text


def print_table_of(operators: Iterable[str], as_json: bool) -> None:
    """Prints the table, or JSON, on stdout."""
    if as_json:
        print(json.dumps(contract.as_json(operators), indent=1))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, width=min(Console().width, WIDTH) if sys.stdout.isatty() else WIDTH)
    used: set[str] = set()
    for operator in operators:
        table = Table(title=operator, title_justify="left", show_lines=True, width=console.width)
        table.add_column("output", width=18)
        table.add_column("same bits for", width=13)
        table.add_column("equal on", width=16)
        table.add_column("off float64 by at most", ratio=1)
        for row in contract.rows_of(operator):
            if row.operator == operator:
                used.update((*row.bound.facts, *(row.unit_bound.facts if row.unit_bound else ())))
                cells = (f"{row.output} ({row.kind})", kept(row), row.backends, bound(row))
                table.add_row(*(escape(cell) for cell in cells))
        console.print(table)
    _print_words(console, "any of", contract.VARIATIONS.items())
    _print_words(console, "facts", ((name, text) for name, text in contract.FACTS.items() if name in used))
    _print_words(console, "shorthand", contract.SHORTHAND.items())
    rounded = ((name, f"{r.relative:.3g} * |value| + {r.least:.3g}") for name, r in contract.ROUNDING.items())
    _print_words(console, "a rounding to", rounded)


def _print_words(console: object, title: str, words: Iterable[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    assert isinstance(console, Console)
    table = Table(title=title, title_justify="left", show_header=False, width=console.width)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for name, text in words:
        table.add_row(escape(name), escape(text))
    console.print(table)
