"""Draws docs/front.svg: the ratio of training to rollout, token by token, in the front page's example."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "front.svg"
# On dark pages the picture is light on dark: the filter inverts lightness and keeps hues.
DARK = "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.93) hue-rotate(180deg) } }</style>"


def main() -> None:
    """Runs the example and writes the picture."""
    ratios: dict[str, Any] = runpy.run_path(str(ROOT / "examples" / "rollout_and_training.py"))["ratios"]
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "rlk", "font.size": 10, "axes.grid": True, "grid.alpha": 0.25}
    ):
        figure = Figure(figsize=(9, 2.8), layout="constrained")
        axes = figure.subplots()
        for (name, ratio), color in zip(ratios.items(), ("#c2410c", "#0b6bcb"), strict=True):
            values = ratio.flatten().tolist()
            differing = sum(value != 1 for value in values)
            label = f"{name}: {differing} of {len(values)} tokens differ"
            axes.plot(range(len(values)), values, ".", color=color, markersize=5, label=label)
        axes.set_xlabel("token")
        axes.set_ylabel("training / rollout\nprobability of the token")
        axes.set_title(
            "The same tokens, scored twice: generate with a cache, then a forward in micro-batches (bfloat16)"
        )
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2, frameon=False)
        figure.savefig(PICTURE, metadata={"Date": None}, facecolor="white")
    head, metadata, rest = PICTURE.read_text().partition(" <metadata>")
    PICTURE.write_text(f"{head} {DARK}\n{metadata}{rest}")


if __name__ == "__main__":
    main()
