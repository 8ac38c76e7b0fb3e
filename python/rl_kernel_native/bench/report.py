"""The output of a bench run: a table, JSON, a chart."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

HEADER = ("pass", "peer", "median ms", "p10 - p90", "GB/s", "of copy", "TFLOP/s", "time / rk", "max error")


def _title(run: dict[str, Any]) -> str:
    threads = f", {run['threads']} threads" if run["threads"] else ""
    shape = f"{run['operator']} {run['shape']} {run['dtype']}"
    return f"{shape}; {run['device']}{threads}; copy {run['copy_gb_per_s']:.0f} GB/s"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["pass"],
        row["peer"],
        f"{row['median_ms']:.4g}",
        f"{row['p10_ms']:.4g} - {row['p90_ms']:.4g}",
        f"{row['gb_per_s']:.1f}",
        f"{row['share_of_copy']:.0%}",
        f"{row['tflops']:.3g}" if "tflops" in row else "",
        f"{row['times_rk']:.2f}",
        "" if row["max_error"] is None else f"{row['max_error']:.1e}",
    )


def print_table(run: dict[str, Any]) -> None:
    """Prints the table. A value above 1 in the column ``time / rk`` means that the peer takes longer than this
    library."""
    rows = [_cells(row) for row in run["results"]]
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table(*HEADER, title=_title(run), title_justify="left")
        for cells in rows:
            table.add_row(*cells)
        Console(highlight=False).print(table)
    else:
        widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
        print(_title(run))
        for cells in (HEADER, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    for line in run["absent"]:
        print(f"absent: {line}")
    for line in run.get("notes", ()):
        print(f"note: {line}")


def write_json(run: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def write_plot(run: dict[str, Any], path: Path) -> None:
    """Draws one panel per pass, with one bar per peer. A dotted line shows the time of a copy of the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    passes = list(dict.fromkeys(row["pass"] for row in run["results"]))
    groups = [[row for row in run["results"] if row["pass"] == which] for which in passes]
    figure, panels = plt.subplots(
        len(passes),
        1,
        figsize=(9, 0.8 + sum(0.7 + 0.32 * len(group) for group in groups)),
        height_ratios=[1 + len(group) for group in groups],
        squeeze=False,
        layout="constrained",
    )
    for panel, which, group in zip(panels[:, 0], passes, groups, strict=True):
        names = [row["peer"] for row in group]
        colours = ["#1f6f8b" if name.startswith("rk") else "#b8bec4" for name in names]
        bars = panel.barh(names, [row["median_ms"] for row in group], color=colours)
        panel.bar_label(bars, [f" {row['median_ms']:.3g} ms, {row['times_rk']:.2f}x" for row in group], fontsize=8)
        panel.axvline(group[0]["median_ms"] * group[0]["share_of_copy"], color="#c0392b", linewidth=1, linestyle=":")
        panel.set_title(which, loc="left", fontsize=10)
        panel.invert_yaxis()
        panel.margins(x=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("median, ms; dotted: a copy of the same bytes")
    figure.suptitle(_title(run), fontsize=10, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
