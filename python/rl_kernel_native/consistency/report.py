"""Writes the findings: report.json, one self-contained report.html, and the charts as SVG and PNG."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import charts, environment
from .errors import BadInput, spelled
from .explain import explain
from .page import render_page, slug
from .result import Comparison

SCHEMA_VERSION = 2
# The JSON keeps this many steps of batch membership. Changes are counted over all steps.
_MEMBERSHIP_STEPS = 64


def exit_status(comparisons: Sequence[Comparison]) -> int:
    """0 when every comparison is aligned, else 1."""
    return 0 if all(comparison.aligned for comparison in comparisons) else 1


def prepare_directory(directory: Path) -> None:
    """Creates the report directory before the comparison runs. BadInput if it cannot be created."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{spelled('report', str(directory))}: {error.strerror or error}") from error


def report_object(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The report as JSON-ready values. NaN becomes null, and Inf becomes a string, so that every JSON reader accepts
    the report."""
    device = torch.device(str(comparisons[0].model["device"]))
    report = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command_line": environment.command_line(),
        "versions": environment.versions(),
        "hardware": environment.hardware(device),
        "aligned": exit_status(comparisons) == 0,
        "exit_status": exit_status(comparisons),
        "comparisons": [_comparison_object(comparison) for comparison in comparisons],
    }
    plain: dict[str, Any] = _plain(report)
    return plain


def write_report(directory: Path, comparisons: Sequence[Comparison]) -> list[Path]:
    """Writes all files of a report into an existing directory and returns their paths, report.html first.

    Raises:
        BadInput: a file cannot be written.
    """
    report = report_object(comparisons)
    figures: dict[str, str] = {}
    files: dict[str, bytes] = {}
    drawn: list[tuple[str, Any]] = [("overview", charts.overview_chart(comparisons))]
    for comparison in comparisons:
        for kind, draw in (("drift", charts.drift_chart), ("log_ratio", charts.histogram_chart)):
            drawn.append((f"{kind}_{slug(comparison)}", draw(comparison)))
    for name, figure in drawn:
        if figure is not None:
            document = charts.to_svg(figure)
            files[f"{name}.svg"] = document.encode()
            files[f"{name}.png"] = charts.to_png(figure)
            figures[name] = charts.inline_svg(document, prefix=f"{name}-")
    files["report.json"] = (json.dumps(report, indent=1, allow_nan=False) + "\n").encode()
    files["report.html"] = render_page(report, comparisons, figures).encode()
    try:
        for name, content in files.items():
            (directory / name).write_bytes(content)
    except OSError as error:
        raise BadInput(f"cannot write the report: {error}") from error
    return [directory / name for name in reversed(files)]


def _comparison_object(comparison: Comparison) -> dict[str, Any]:
    result = dataclasses.asdict(comparison)
    result["verdict"] = str(comparison)
    result["summary"] = explain(comparison)
    for run, source in zip(result["runs"], comparison.runs, strict=True):
        steps = source.membership
        run["membership_changes"] = sum(1 for a, b in itertools.pairwise(steps) if a != b)
        run["membership"] = [list(step) for step in steps[:_MEMBERSHIP_STEPS]]
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value
