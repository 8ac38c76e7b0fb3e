"""Charts: a legend lies outside its axes and covers nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path for folder in ("python", "examples", "bench", "tools") for path in sorted((ROOT / folder).rglob("*.py"))
]


def test_every_legend_has_a_place_outside() -> None:
    found = [(path.name, call) for path in SOURCES for call in re.findall(r"\.legend\((.*)\)", path.read_text())]
    assert len(found) >= 5
    assert not [each for each in found if not re.search(r"bbox_to_anchor|\*\*_BESIDE|\*\*beside", each[1])]


def test_a_legend_of_a_report_is_beside_its_axes() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from rl_kernel_native.consistency import charts

    figure = Figure(figsize=(11, 5.6), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], label="batch 1")
    legend = axes.legend(**charts._BESIDE)
    figure.canvas.draw()
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1
    assert legend.get_window_extent().x1 <= figure.bbox.x1


def test_no_line_of_a_report_ends_within_a_number() -> None:
    pytest.importorskip("transformers")
    from rl_kernel_native.consistency import page

    said = "max |ratio - 1| is < 3 and KL (k3) is 4.07e-05"
    seen = page._escaped(said)
    assert re.findall('<span class="number">(.*?)</span>', seen) == ["max |ratio - 1|", "4.07e-05"]
    assert re.sub("<[^>]*>", "", seen) == said.replace("<", "&lt;")
