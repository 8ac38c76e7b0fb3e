"""examples/grpo.py runs offline, in both ways. The example's comparison shows the ratio, passes, and can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import framework_sources
import rl_kernel_native as rk
from scripts import load_script

for package in ("trl", "datasets", "typer", "rich", "matplotlib"):
    framework_sources.imported(package, package)

import torch  # noqa: E402
import typer  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo.py"


@pytest.fixture(scope="module")
def example() -> Iterator[typer.Typer]:
    """Runs the example's command in this process, since importing TRL takes most of a run."""
    try:
        with rk.integrations.trl.enabled():
            pass
    except ImportError as error:
        pytest.skip(str(error))
    threads, columns = torch.get_num_threads(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "140"
    module = load_script(EXAMPLE)
    app = typer.Typer()
    app.command()(module.main)
    yield app
    torch.set_num_threads(threads)
    os.environ.pop("COLUMNS")
    if columns is not None:
        os.environ["COLUMNS"] = columns


def run(app: typer.Typer, folder: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "--plot", str(folder / "grpo.png")])


def test_it_is_a_program_that_needs_no_network(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--ops", "rk", "--steps", "2", "--plot", str(tmp_path / "grpo.png")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "reward" in done.stdout


@pytest.mark.parametrize(("ops", "steps"), [("stock", 4), ("rk", 60)])
def test_a_run_prints_rewards_and_times_and_plots_them(
    example: typer.Typer, tmp_path: Path, ops: str, steps: int
) -> None:
    done = run(example, tmp_path, "--ops", ops, "--steps", str(steps))
    assert done.exit_code == 0, done.output
    for part in ("reward", "rollout", "ratio/KL", "logprob", "loss", "backward", "update"):
        assert part in done.output
    assert (tmp_path / "grpo.png").stat().st_size > 10_000
    rewards = [float(found) for found in re.findall(r"^│ +\d+ │ ([01]\.\d{4}) │$", done.output, re.M)]
    assert rewards[0] < 0.2
    assert (max(rewards) == 1.0) == (steps == 60), "it learns"


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_every_step_agrees_and_the_ratio_is_1(example: typer.Typer, tmp_path: Path, loss_type: str) -> None:
    done = run(example, tmp_path, "--compare", "--steps", "2", "--loss-type", loss_type)
    assert done.exit_code == 0, done.output
    assert "within the contract: 2 of 2 steps" in done.output
    rows = re.findall(r"^│ +(stock|rk) │ +(\d+) of 768 │ +(\S+) │ +(\S+) │$", done.output, re.M)
    assert [row[0] for row in rows] == ["stock", "rk"]  # the processor decides how many differ with torch's operators
    assert rows[1][1:] == ("0", "0", "0")


def test_the_comparison_can_fail(example: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head whose logits are off by one percent gives status 1."""
    linear = rk.linear
    monkeypatch.setattr(rk, "linear", lambda x, w, b=None: linear(x, w, b) * 1.01)
    done = run(example, tmp_path, "--compare", "--steps", "1")
    assert done.exit_code == 1, done.output
    assert "within the contract: 0 of 1 steps" in done.output
