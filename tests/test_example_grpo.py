"""examples/grpo.py: it runs offline, both ways, and its comparison holds and can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import framework_sources
import rl_kernel_native as rk

for package in ("trl", "datasets", "typer", "rich", "matplotlib"):
    framework_sources.imported(package, package)

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "grpo.py"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    offline = {"HF_HUB_OFFLINE": "1", "COLUMNS": "140"}
    command = [sys.executable, str(EXAMPLE), *arguments, "--plot", str(folder / "grpo.png")]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **offline}, cwd=folder)


@pytest.fixture(scope="module", autouse=True)
def supported() -> None:
    try:
        with rk.integrations.trl.enabled():
            pass
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("ops", ["stock", "rk"])
def test_a_run_prints_rewards_and_times_and_plots_them(tmp_path: Path, ops: str) -> None:
    done = run(tmp_path, "--ops", ops, "--steps", "4")
    assert done.returncode == 0, done.stderr
    for part in ("reward", "rollout", "ratio/KL", "logprob", "loss", "backward", "update"):
        assert part in done.stdout
    assert (tmp_path / "grpo.png").stat().st_size > 10_000


def test_the_reward_reaches_its_maximum(tmp_path: Path) -> None:
    done = run(tmp_path, "--ops", "rk")
    assert done.returncode == 0, done.stderr
    rewards = [float(found) for found in re.findall(r"^│ +\d+ │ ([01]\.\d{4}) │$", done.stdout, re.M)]
    assert rewards[0] < 0.2
    assert max(rewards) == 1.0


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_every_step_agrees_within_the_contract(tmp_path: Path, loss_type: str) -> None:
    done = run(tmp_path, "--compare", "--steps", "4", "--loss-type", loss_type)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within the contract: 4 of 4 steps" in done.stdout


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """With a head whose logits are off by a hundredth part, status 1."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        EXAMPLE.read_text().replace(
            'if __name__ == "__main__":',
            'linear = rk.linear\nrk.linear = lambda x, w, b=None: linear(x, w, b) * 1.01\nif __name__ == "__main__":',
        )
    )
    command = [sys.executable, str(broken), "--compare", "--steps", "2", "--plot", str(tmp_path / "grpo.png")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "within the contract: 0 of 2 steps" in done.stdout
