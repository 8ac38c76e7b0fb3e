"""Runs 500 hostile calls of all operators, and checks that fuzz_calls.py notices each kind of fault. RLK_FUZZ_SEED
draws other calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import call_cases
import fuzz_calls
import rl_kernel_native as rk

torch = pytest.importorskip("torch")

SEED = int(os.environ.get("RLK_FUZZ_SEED", "0"))


def test_hostile_calls_give_right_results_or_errors_that_name_an_argument() -> None:
    found = list(fuzz_calls.faults(SEED, 500))
    assert not found, "\n".join(
        f"python tests/support/fuzz_calls.py --seed {SEED} --case {f['case']}: {f['fault']}\n  {f['call']}"
        for f in found
    )


def test_every_operator_is_called() -> None:
    assert sorted(call_cases.OPERATORS) == sorted(call_cases.CALLS)


def test_a_call_with_a_number_of_thousands_of_digits_is_described() -> None:
    assert "gamma=an integer of 16610 bits" in fuzz_calls.described(fuzz_calls.Plan("gae", {"gamma": 10**5000}))


def _writes_its_input(x: Any, *arguments: Any, **options: Any) -> Any:
    x.detach().add_(1.0)
    return x * 1.0


def _is_not_repeated(x: Any, *arguments: Any, **options: Any) -> Any:
    return x + torch.rand(())


def _forgets_the_argument(x: Any, *arguments: Any, **options: Any) -> Any:
    raise ValueError("a value is out of range")


def _raises_anything(x: Any, *arguments: Any, **options: Any) -> Any:
    raise IndexError("x: expected an index, got another")


def _refuses(x: Any, *arguments: Any, **options: Any) -> Any:
    raise ValueError("x: expected something else")


def _reads_by_layout(x: Any, *arguments: Any, **options: Any) -> Any:
    return torch.as_strided(x.detach(), (x.numel(),), (1,)).clone()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (_writes_its_input, "memory of x was written outside of outputs"),
        (_is_not_repeated, "the same call twice"),
        (_forgets_the_argument, "an error that names no argument"),
        (_raises_anything, "IndexError"),
        (_refuses, "a right call is refused"),
        (_reads_by_layout, "of contiguous arrays"),
    ],
)
def test_each_kind_of_fault_is_noticed(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any], words: str) -> None:
    def masked_whiten(x: Any, mask: Any = None, cu_seqlens: Any = None, **options: Any) -> Any:
        return wrong(x)

    monkeypatch.setattr(rk, "masked_whiten", masked_whiten)
    values = torch.arange(6.0).view(2, 3).numpy()
    of_x = fuzz_calls.Given(call_cases.Operand(values, "float32"))
    plan = fuzz_calls.Plan("masked_whiten", {"x": of_x})
    if wrong is _reads_by_layout:
        of_x.layout, plan.mutated = "rows apart", {"x": "rows apart"}
    assert words in fuzz_calls.judge(plan)


def test_a_call_that_ends_the_process_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Calls after the faulty one still run."""
    script = tmp_path / "dies.py"
    script.write_text(
        "import sys, json\nfirst, calls = int(sys.argv[5]), int(sys.argv[7])\n"
        "for i in range(first, first + calls):\n    print(i, flush=True)\n    if i == 1: sys.exit(3)\n"
        'print(json.dumps({"case": 2, "fault": "later", "call": ""}))\n'
    )
    monkeypatch.setattr(fuzz_calls, "__file__", str(script))
    assert [(f["case"], f["fault"].partition("\n")[0]) for f in fuzz_calls.faults(0, 3)] == [
        (1, "exit status 3"), (2, "later")
    ]  # fmt: skip
