"""`rlk demo` keeps within the given time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rl_kernel_native.consistency import demo, demo_model
from rl_kernel_native.consistency.settings import CompareSettings


@pytest.mark.parametrize("minutes", [0.5, 1.0, 5.0])
@pytest.mark.parametrize("seconds_a_token", [0.0005, 0.005, 0.02])
def test_the_demo_keeps_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, seconds_a_token: float
) -> None:
    """Replaces the clock, and models machines of three speeds. On two busy cores a token takes 0.01 s."""
    now = [100.0]  # imports took this long
    done: list[int] = []

    def run(loaded: Any, prompts: Any, settings: CompareSettings, **_: Any) -> str:
        done.append(settings.max_new_tokens)
        # first for batch 1, then for batch 8
        now[0] += 0.2 + seconds_a_token * len(prompts) * settings.max_new_tokens * 1.3
        return settings.rollout_ops

    def trained(model: Any, data: Any, *, seconds: float, **_: Any) -> demo_model.TrainOutcome:
        now[0] += seconds
        return demo_model.TrainOutcome(1, 5.0, 3.0)

    monkeypatch.setattr(demo.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(demo, "run_compare", run)
    monkeypatch.setattr(demo, "train", trained)
    monkeypatch.setattr(demo, "write_report", lambda folder, comparisons: [folder / "report.html"])
    found = demo.run_demo(tmp_path, ops="both", minutes=minutes, device="cpu", seed=0, started=90.0)
    assert now[0] - 90 <= 60 * minutes
    assert found.comparisons == ["stock", "rk"]
    fits = done[-1] == demo._MAX_NEW_TOKENS
    assert fits == (not found.notes) == ("--max-new-tokens" not in found.command)
    assert fits or now[0] - 90 > 30 * minutes, "the time is used"
