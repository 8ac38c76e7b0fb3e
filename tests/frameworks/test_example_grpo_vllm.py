"""examples/grpo_vllm.py: TRL's colocated mode on vLLM's real engine, on a CPU, by the example's own functions."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ports import free_port
from scripts import load_script

torch = pytest.importorskip("torch")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_vllm.py"
STEPS = 3  # the running engine gets two updates
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and "RLK_REQUIRE_ENGINES" not in os.environ,
    reason="vllm is not on PYTHONPATH: tools/fetch_vllm.sh",
)


@pytest.fixture(scope="module")
def example() -> Any:
    return load_script(EXAMPLE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Exit status, output and log of the program for each --ops, as one process each, at the same time."""
    folder = tmp_path_factory.mktemp("runs")

    def run(ops: str) -> tuple[int, str, list[dict[str, float]]]:
        command = [sys.executable, str(EXAMPLE), "--ops", ops, "--steps", str(STEPS), "--log", str(folder / ops)]
        port = str(free_port())  # TRL looks for a free port, too, and both programs would find the same port
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MASTER_PORT": port}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, cwd=folder)
        assert (folder / ops).exists(), done.stderr[-4000:]
        return done.returncode, done.stdout.splitlines()[-1], json.loads((folder / ops).read_text())

    with ThreadPoolExecutor() as pool:
        return dict(zip(("stock", "rk"), pool.map(run, ("stock", "rk")), strict=True))


@needs_vllm
def test_the_ratio_is_exactly_1_at_every_step(runs: dict[str, Any]) -> None:
    status, said, log = runs["rk"]
    assert status == 0
    assert len(log) == STEPS
    for step in log:
        for name in ("ratio_at_step0/differing", "ratio_at_step0/max_off", "mismatch/k3", "mismatch/chi2"):
            assert step[name] == 0, name
        assert step["sampling/sampling_logp_difference/max"] == 0, "TRL's own metric"
        assert step["tokens_per_second"] > 0
    assert log[0]["grad_norm"] > 0, "it trains"
    assert "ratio other than 1 at 0 tokens of 3 steps" in said


@needs_vllm
def test_stock_operators_part(runs: dict[str, Any]) -> None:
    """The control: the metrics find differences without this library."""
    _, said, log = runs["stock"]
    assert all(step["ratio_at_step0/differing"] > 0 and step["mismatch/k3"] > 0 for step in log)
    assert said.startswith("stock: ")


def test_a_ratio_that_is_not_1_is_counted(example: Any) -> None:
    """Without an engine: one of two tokens differs, and so does a masked token, which must not count."""
    one = torch.tensor([[-1.0, -1.0, -1.0]])
    batch = {
        "old_per_token_logps": one,
        "sampling_per_token_logps": torch.tensor([[-1.0, -1.5, -9.0]]),
        "completion_mask": torch.tensor([[1, 1, 0]]),
    }
    found = example.mismatch(batch)
    assert found["ratio_at_step0/differing"] == 1
    assert found["ratio_at_step0/max_off"] == pytest.approx(torch.tensor(0.5).exp().item() - 1)
    assert found["mismatch/k3"] > 0
    steps = [{"reward": 0.1, "tokens_per_second": 1.0, **found}]
    assert example.show({"stock": steps}), "stock may differ"
    assert not example.show({"stock": steps, "rk": steps})


def test_the_plot_has_both(example: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    steps = [{"reward": 0.1 * i, "tokens_per_second": 9.0, **dict.fromkeys(example.METRICS[:4], 0.0)} for i in range(3)]
    example.plot({"stock": steps, "rk": steps}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
