"""Errors name the cure, and results print with their names."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk

L = np.full((2, 3), -1.0, np.float32)
A, M = np.array([1.0, -1.0], np.float32), np.ones((2, 3), np.float32)
S = np.zeros(2, np.float32)

CURES = {
    "no spec": (
        lambda: rk.policy_loss(L, L, A, M),
        TypeError,
        r"spec: expected a PolicySpec, got NoneType; .*rk\.presets\.trl\(loss_type=\"grpo\"\)",
    ),
    "a spec by name": (
        lambda: rk.policy_loss(L, L, A, M, spec="grpo"),
        TypeError,
        r"spec: expected a PolicySpec, got 'grpo'; .*presets",
    ),
    "TRL's dapo": (
        lambda: rk.policy_loss(L, L, A, M, spec=rk.presets.trl(loss_type="dapo")),
        ValueError,
        "denominator: expected a number .*the global number of scored tokens, num_items_in_batch / num_processes",
    ),
    "TRL's sigmoid": (
        lambda: rk.preference_loss(S, S, S, S, kind="sigmoid"),
        ValueError,
        "kind: expected .*got 'sigmoid', which is \"dpo\" here",
    ),
}


@pytest.mark.parametrize("case", CURES)
def test_an_error_names_its_cure(case: str) -> None:
    call, error, words = CURES[case]
    with pytest.raises(error, match=words):
        call()


def test_patch_model_without_transformers_names_what_to_install() -> None:
    code = (
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "import rl_kernel_native as rk\n"
        "try:\n"
        "    rk.patch_model(None)\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    pattern = r"patch_model: needs torch .* and transformers .*pip install "
    assert re.match(pattern, done.stdout), done.stdout + done.stderr


def results() -> dict[str, Any]:
    return {
        "PolicyMetrics": rk.policy_loss(L, L, A, M, spec=rk.PolicySpec()).metrics,
        "MismatchMetrics": rk.mismatch_metrics(L, L - np.float32(0.05)),
        "ValueMetrics": rk.value_loss(L, None, L, M).metrics,
        "ImportanceMetrics": rk.importance_weights(L, L, M, upper=2.0, return_metrics=True).metrics,
        "PreferenceMetrics": rk.preference_loss(S, S, S, S, kind="dpo").metrics,
    }


def test_metrics_print_with_their_names() -> None:
    for kind, metrics in results().items():
        shown = repr(metrics)
        assert re.fullmatch(rf"{kind}\(\w+=.*\)", shown), shown
        first = metrics.names[0]
        assert f"{first}={metrics.asdict()[first]:.6g}" in shown
    assert "histogram={0.01..0.1: 1}" in repr(results()["MismatchMetrics"]), "bins by their edges"


def test_metrics_without_values_print_all_the_same() -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert repr(rk.MismatchMetrics(torch.zeros(31))).startswith("MismatchMetrics(FakeTensor")


def test_what_is_served_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=16, num_key_value_heads=1, **size)
    model = transformers.LlamaForCausalLM(config)
    with caplog.at_level(logging.INFO, logger="rl_kernel_native"):
        rk.patch_model(model)
    lines = [record.getMessage() for record in caplog.records if record.name == "rl_kernel_native"]
    assert lines == [
        "patch_model: modules of LlamaForCausalLM that each operator serves: "
        "embedding 1, linear 8, rms_norm 3, rope 1, attention 1, silu_mul 1"
    ]


def test_trl_says_once_what_it_serves(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("trl")
    enabled = rk.integrations.trl.enabled
    with caplog.at_level(logging.INFO, logger="rl_kernel_native"), enabled(), enabled():
        pass
    lines = [record.getMessage() for record in caplog.records if record.name == "rl_kernel_native"]
    assert len(lines) == 1
    assert "GRPOTrainer's loss by policy_loss" in lines[0]
