"""The charts of a report. The charts are drawn without a display, and refer to no other file."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .result import BatchRun, Comparison

_COLORS = ("#0b6bcb", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be123c")
_FAULT_COLOR = "#be123c"
_MARKED_FAULTS = 3
_BESIDE: Any = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "frameon": False}  # a legend that covers no line
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "rlk", "font.size": 9.0, "axes.grid": True, "grid.alpha": 0.25}


def overview_chart(comparisons: Sequence[Comparison]) -> Figure:
    """The main result in one chart: differing tokens and the ratio's distance from 1, with one bar per comparison and
    batch size."""
    with rc_context(_STYLE):
        rows = [(comparison, run) for comparison in comparisons for run in comparison.runs]
        figure = Figure(figsize=(11, 0.9 + 0.42 * len(rows)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        names = [f"{comparison.settings.label}, batch {run.batch_size}" for comparison, run in rows]
        places = range(len(rows))
        order = list(dict.fromkeys(comparison.settings.label for comparison, _ in rows))
        colors = [_COLORS[order.index(comparison.settings.label) % len(_COLORS)] for comparison, _ in rows]
        left.barh(places, [run.metrics.differing_tokens for _, run in rows], color=colors, height=0.6)
        left.set_xlim(0, 1.25 * max(run.metrics.tokens for _, run in rows))
        left.set_yticks(places, names)
        left.invert_yaxis()
        left.set_xlabel("tokens whose log-probability differs")
        ratios = [run.metrics.max_abs_ratio for _, run in rows]
        shown = [min(ratio, 1e3) for ratio in ratios]
        right.barh(places, shown, color=colors, height=0.6)
        right.set_xlim(0, 1.25 * max(shown) or 1.0)
        right.set_xlabel("max |ratio - 1|")
        for place, (_, run) in enumerate(rows):
            metrics = run.metrics
            beside = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            text = f"{metrics.differing_tokens} of {metrics.tokens}"
            left.annotate(text, (metrics.differing_tokens, place), **beside)
            right.annotate(f"{ratios[place]:.3g}", (shown[place], place), **beside)
        return figure


def drift_chart(comparison: Comparison) -> Figure | None:
    """Relative error and share of differing tokens per operator in execution order, with one line per batch size. The
    axis names the first divergent operator and the faults. None if no operator differs.
    """
    if not any(run.first_divergent for run in comparison.runs):
        return None
    with rc_context(_STYLE):
        figure = Figure(figsize=(11, 5.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        marks: dict[int, str] = {}
        for index, run in enumerate(comparison.runs):
            # Lines that are drawn earlier are wider, so they stay visible under later lines.
            width = 1.2 + 2.2 * (len(comparison.runs) - 1 - index)
            style: Any = {
                "color": _COLORS[index % len(_COLORS)],
                "linewidth": width,
                "alpha": 0.5 if width > 1.2 else 1,
            }
            orders = [drift.order for drift in run.operators]
            error = [drift.mean_relative or float("nan") for drift in run.operators]
            share = [100 * drift.differing_tokens / drift.tokens for drift in run.operators]
            top.plot(orders, error, label=f"batch {run.batch_size}", marker=".", markersize=3, **style)
            bottom.plot(orders, share, **style)
            first = run.first_divergent
            if first is not None:
                marks.setdefault(first.order, f"first divergent: {first.name}")
        order_of = {drift.name: drift.order for run in comparison.runs for drift in run.operators}
        for fault in comparison.faults[:_MARKED_FAULTS]:
            marks[order_of[fault.name]] = f"FAULT: {fault.name}"
        for order, text in marks.items():
            color = _FAULT_COLOR if text.startswith("FAULT") else "#57606a"
            for axes in (top, bottom):
                axes.axvline(order, color=color, linestyle=":", linewidth=1.2)
        _mark_layers(top, bottom, comparison.runs[0])
        top.set_yscale("log")
        top.set_ylabel("mean relative error\nof a token's vector")
        bottom.set_ylabel("tokens that\ndiffer (%)")
        bottom.set_ylim(-3, 103)
        bottom.set_xticks(list(marks), list(marks.values()), rotation=12, ha="right")
        bottom.set_xlabel("operators in execution order, numbers as in the tables below")
        top.legend(**_BESIDE)
        top.set_title(f"Drift per operator: {comparison.settings.label}")
        return figure


def _mark_layers(top: Axes, bottom: Axes, run: BatchRun) -> None:
    spans: dict[int, list[int]] = {}
    for drift in run.operators:
        if drift.layer is not None:
            spans.setdefault(drift.layer, []).append(drift.order)
    every = max(1, len(spans) // 12)
    for layer, orders in spans.items():
        low, high = min(orders) - 0.5, max(orders) + 0.5
        if layer % 2 == 0:
            for axes in (top, bottom):
                axes.axvspan(low, high, color="#808080", alpha=0.08, linewidth=0)
        if layer % every == 0:
            top.text(
                (low + high) / 2, 0.985, f"layer {layer}", transform=top.get_xaxis_transform(), ha="center", va="top"
            )


def histogram_chart(comparison: Comparison) -> Figure | None:
    """Histogram of the log-ratio training - rollout by half decade of its size, with negative values on the left.

    None if every log-ratio is 0.
    """
    if not any(run.metrics.differing_tokens for run in comparison.runs):
        return None
    with rc_context(_STYLE):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(comparison.runs)
        low, high = _used_bins(comparison)
        # Bin i of a side ends at edge i + 1; the last bin has no end.
        edges = [f"{edge:.0e}" for edge in comparison.runs[0].metrics.histogram_edges[1:]] + ["inf"]
        names = edges[low:high]
        for index, run in enumerate(comparison.runs):
            below, above = run.metrics.histogram_negative[low:high], run.metrics.histogram_positive[low:high]
            counts = [*reversed(below), run.metrics.zero_tokens, *above]
            places = [place - 0.4 + width * (index + 0.5) for place in range(len(counts))]
            color = _COLORS[index % len(_COLORS)]
            axes.bar(places, counts, width=width, color=color, label=f"batch {run.batch_size}")
        ticks = ["-" + name for name in reversed(names)] + ["0"] + names
        shown = [place for place in range(len(ticks)) if (place - len(ticks) // 2) % 2 == 0]
        axes.set_xticks(shown, [ticks[place] for place in shown])
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("tokens")
        axes.set_xlabel("log-ratio training - rollout (nats), by half decade; a label is the bin's outer end")
        axes.legend(**_BESIDE)
        axes.set_title(f"Log-ratio: {comparison.settings.label}")
        return figure


def _used_bins(comparison: Comparison) -> tuple[int, int]:
    """The range of bins that are not empty in at least one run, on either side. The range has at least one bin."""
    counts = [
        sum(pair)
        for pair in zip(
            *(run.metrics.histogram_negative for run in comparison.runs),
            *(run.metrics.histogram_positive for run in comparison.runs),
            strict=True,
        )
    ]
    used = [index for index, count in enumerate(counts) if count]
    return (used[0], used[-1] + 1) if used else (0, 1)


def to_svg(figure: Figure) -> str:
    """A standalone SVG document. The document has no date, so equal runs give equal files."""
    buffer = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def to_png(figure: Figure) -> bytes:
    """A PNG at 150 dots per inch."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": ""})
    return buffer.getvalue()


def inline_svg(document: str, prefix: str) -> str:
    """An SVG element for an HTML page: no prolog, metadata or namespace addresses; ids start with `prefix`.

    HTML needs no prolog, metadata or namespaces. The prefix keeps the ids of two charts on one page apart.
    """
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\sxmlns(:\w+)?=\"[^\"]*\"", "", svg)
    svg = re.sub(r"\bid=\"", f'id="{prefix}', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}", svg)
    svg = re.sub(r"href=\"#", f'href="#{prefix}', svg)
    return svg.strip()
