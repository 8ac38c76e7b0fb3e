"""No first call of an operator stalls: if the wheel has machine code for a GPU, the driver compiles nothing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from call_cases import OPERATORS
from first_calls import faults

LIMIT_S = 0.5  # loading a kernel takes milliseconds; compiling the smallest one from PTX took 0.37 s, others 4 to 13 s
# Losses and layers of a training step. No other operator calls the backward kernels of these.
TRAINED = {"attention", "kl", "linear", "linear_cross_entropy", "linear_logprob", "logprob", "policy_loss", "rms_norm",
           "rope", "sequence_logprob", "silu_mul", "value_loss", "preference_loss", "embedding"}  # fmt: skip


def first_calls(device: str, **environment: str) -> list[dict[str, Any]]:
    """Rows from a fresh process."""
    script = Path(__file__).parents[1] / "support" / "first_calls.py"
    done = subprocess.run(
        [sys.executable, str(script), "--device", device],
        capture_output=True, text=True, timeout=600, env={**os.environ, **environment},
    )  # fmt: skip
    assert not done.returncode, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_operator_is_called_with_every_dtype_and_those_of_training_backward() -> None:
    found = first_calls("cpu")
    assert not faults(found, math.inf)
    calls = [(row["operator"], row["dtype"], row["pass"]) for row in found]
    assert len(calls) == len(set(calls))
    forward = {(operator, dtype) for operator, dtype, way in calls if way == "forward"}
    assert forward == {(operator, dtype) for operator in OPERATORS for dtype in ("float32", "bfloat16", "float16")}
    assert {operator for operator, _, way in calls if way == "training"} >= TRAINED
    assert all(row["seconds"] > 0 for row in found)


TRACED_FIRST = """
import os
import rl_kernel_native as rk, torch

x = torch.ones(2, 2)
torch.compile(lambda x: x + 1, backend="eager")(x)  # Dynamo's imports take seconds, so both calls share them
for function in (lambda x: rk.kl(x, x, estimator="k1"), lambda x: rk.linear(x, x)):
    if os.fork():
        assert os.wait()[1] == 0
    else:
        got = torch.compile(function, backend="eager", fullgraph=True)(x)
        print(torch.equal(got, function(x)), flush=True)
        os._exit(0)
"""


def test_the_first_call_of_a_process_may_be_a_traced_one() -> None:
    """The call registers the operators, and the graph does not contain this."""
    done = subprocess.run([sys.executable, "-c", TRACED_FIRST], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"], done.stderr


def row(operator: str, seconds: float, error: str = "") -> dict[str, Any]:
    return {"operator": operator, "dtype": "float32", "pass": "forward", "seconds": seconds, "error": error}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (None, []),
        (row("kl", 0.5), ["kl float32 forward: 0.50 s, of at most 0.5 s"]),
        (row("kl", math.nan), ["kl float32 forward: nan s, of at most 0.5 s"]),
        (row("kl", 0.0, "ValueError: x"), ["kl float32 forward: ValueError: x"]),
        (row("gae", 0.1), ["kl: not called"]),
    ],
)
def test_a_call_that_stalls_is_refused_or_is_missing_is_a_fault(changed: Any, words: list[str]) -> None:
    found = [row(operator, 0.4999) for operator in OPERATORS if operator != "kl"]
    assert faults([*found, changed or row("kl", 0.4999)], LIMIT_S) == words


@pytest.mark.gpu
@pytest.mark.alone
def test_first_calls_on_a_gpu_take_less_than_half_a_second() -> None:
    assert not faults(first_calls("cuda", CUDA_CACHE_DISABLE="1"), LIMIT_S)
