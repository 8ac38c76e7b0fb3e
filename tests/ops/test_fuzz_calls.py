"""Runs 500 hostile calls of all operators, and checks that fuzz_calls.py notices each kind of fault. RLK_FUZZ_SEED
draws other calls."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
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


def _partials() -> fuzz_calls.Plan:
    """Three splits in the order 2, 0, 1; row 1 sees no key, and row 2 fails."""
    stats = np.ones((3, 3, 2, 2), np.float32) * np.float32([3, 0.75])
    stats[:, 1], stats[1, 2] = (-np.inf, 0), (np.nan, 0)
    sums = np.linspace(-2, 2, 3 * 3 * 2 * 8, dtype=np.float32).reshape(3, 3, 2, 8)
    given = (fuzz_calls.Given(call_cases.Operand(x, "float32")) for x in (stats, sums))
    how = {"out_dtype": "float32", "return_lse": True, "exp": "portable"}
    return fuzz_calls.Plan("attention_merge", {"partials": (*given, (2, 0, 1)), **how})


def _whole() -> fuzz_calls.Plan:
    """Keys of two splits, and a row that sees none: five queries of four keys in use."""
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((2, t, 2, 8), np.float32) for n, t in (("q", 5), ("k", 1100), ("v", 1100))}
    given = {n: fuzz_calls.Given(call_cases.Operand(x, "float32")) for n, x in arrays.items()}
    used = fuzz_calls.Given(call_cases.Operand(np.array([1100, 4]), "int32"))
    return fuzz_calls.Plan("attention", {**given, "seqused_k": used})


@pytest.mark.parametrize("return_partials", [False, True])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("softmax_scale", 0.36),  # 2 % larger
        ("window_size", 1099),  # the first key is left out
        ("causal", False),
    ],
)
def test_a_reference_notices_other_numbers_of_attention(
    monkeypatch: pytest.MonkeyPatch, return_partials: bool, name: str, change: Any
) -> None:
    plan, attention = _whole(), rk.attention
    plan.arguments["return_partials"] = return_partials
    assert fuzz_calls.judge(plan) == ""
    monkeypatch.setattr(rk, "attention", lambda *a, **how: attention(*a, **{**how, name: change}))
    assert "by the reference: " in fuzz_calls.judge(plan)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m, n, o: (m, n, o * 1.0001), "out"),
        (lambda m, n, o: (m, n * 1.0001, o), "out"),
        (lambda m, n, o: (m, n * 1.0001, o * 1.0001), "lse"),
        (lambda m, n, o: (m, n, -o), "out"),
        (lambda m, n, o: (np.where(m == 3, 4, m), n, o), "lse"),
        (lambda m, n, o: (np.where(np.isnan(m), -np.inf, m), n, o), "a row that fails"),
        (lambda m, n, o: (m, np.where(m == -np.inf, 1, n), o), "a row that sees nothing"),
    ],
)
def test_the_reference_notices_other_numbers_of_a_merge(
    monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any], words: str
) -> None:
    plan, merge = _partials(), rk.attention_merge
    assert fuzz_calls.judge(plan) == ""

    def wrong(partials: Any, **how: Any) -> Any:
        stats, sums, splits = partials
        xp = torch if isinstance(stats, torch.Tensor) else np
        m, l, o = change(*(np.asarray(x) for x in (stats[..., 0], stats[..., 1], sums)))  # noqa: E741
        found = [np.stack([m, l], -1).astype(np.float32), np.ascontiguousarray(o, np.float32)]
        return merge((*(found if xp is np else map(torch.from_numpy, found)), splits), **how)

    monkeypatch.setattr(rk, "attention_merge", wrong)
    assert re.search(f"by the reference: .*{words}", fuzz_calls.judge(plan), re.S)


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
