"""The table of contract.py: complete, said once, true to its own words and to the documents, and what tests go by."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from rl_kernel_native import _selftest, contract
from rl_kernel_native.contract import ROUNDING, ROWS, Row, row

torch = pytest.importorskip("torch", reason="the tests of operators make their operands with torch")

import linear_cases  # noqa: E402
import rms_norm_cases  # noqa: E402
import rope_cases  # noqa: E402
import silu_mul_cases  # noqa: E402
from attention_bounds import attention_failures  # noqa: E402
from cases import ALL, torch_logits, torch_targets, truth  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
STEMS = sorted(path.stem for path in (ROOT / "cpp" / "include" / "rlk" / "ops").glob("*.h"))
RNG = np.random.default_rng(0)


def names(rows: Any) -> set[tuple[str, str]]:
    return {(r.operator, r.output) for r in rows}


# ---- the table itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", STEMS)
def test_every_operator_has_rows_forward_and_backward(stem: str) -> None:
    rows = [r for r in ROWS if r.stem == stem]
    assert {r.direction for r in rows} == {"forward", "backward"}, f"contract.py lacks rows of {stem}"
    exported = {name for name in rk.__all__ if name == stem or f"{name}_backward" in rk.__all__}
    assert {r.operator for r in rows} >= {name for name in exported if callable(getattr(rk, name))} & {stem}


@pytest.mark.parametrize("found", ROWS, ids=lambda r: r.name)
def test_a_row_uses_the_words_of_the_table(found: Row) -> None:
    assert found.kind in contract.KINDS
    assert found.direction in ("forward", "backward")
    assert found.backends in contract.BACKENDS
    assert set(found.keeps) <= set(contract.VARIATIONS)
    assert "runs" in found.keeps, "nothing in this library depends on the run"
    assert set(found.dtypes) <= set(ROUNDING)
    assert set(found.bound.facts) <= set(contract.FACTS)
    assert row(found.operator, found.output) is found, "a row is there twice"
    assert found.bound.why


def test_every_word_of_the_table_is_used() -> None:
    facts = {name for r in ROWS for b in (r.bound, r.unit_bound) if b for name in b.facts}
    assert facts == set(contract.FACTS)
    assert {r.kind for r in ROWS} == set(contract.KINDS)
    assert {r.backends for r in ROWS} == set(contract.BACKENDS)


def shorthand(facts: dict[str, Any]) -> dict[str, Any]:
    found = {"min": np.minimum, "max": np.maximum}
    for name, text in contract.SHORTHAND.items():
        if all(word in facts for word in re.findall(r"[a-z_]{2,}", text)):
            found[name] = eval(text, {}, facts)
    return found


@pytest.mark.parametrize("found", ROWS, ids=lambda r: r.name)
def test_the_text_of_a_bound_says_what_its_function_computes(found: Row) -> None:
    for bound in filter(None, (found.bound, found.unit_bound)):
        for _ in range(20):
            integers = {"terms", "rows", "columns", "keys", "head_dim"}
            facts: dict[str, Any] = {
                name: int(RNG.integers(1, 20_000)) if name in integers else RNG.exponential(3.0, 5)
                for name in bound.facts
            }
            said = eval(bound.text, {}, facts | shorthand(facts))
            np.testing.assert_allclose(bound.of(**facts), said, rtol=1e-12)
        left_out = dict.fromkeys(bound.required, 0.5)
        defaults = {n: p.default for n, p in inspect.signature(bound.of).parameters.items() if n not in left_out}
        assert bound.of(**left_out) == bound.of(**left_out, **defaults)


def test_numbers_and_arrays_give_the_same_bound() -> None:
    found = row("linear", "y")
    expected, scale = RNG.standard_normal(7), RNG.exponential(3.0, 7)
    whole = found.allowed("bfloat16", expected=expected, terms=40, scale=scale)
    each = [found.allowed("bfloat16", expected=e, terms=40, scale=s) for e, s in zip(expected, scale, strict=True)]
    assert whole.tolist() == each


def test_missing_and_unknown_facts_are_errors() -> None:
    with pytest.raises(TypeError, match="max_abs_z"):
        row("logprob", "lse").allowed()
    with pytest.raises(TypeError, match="columns"):
        row("logprob", "lse").allowed(max_abs_z=1.0, columns=3)
    with pytest.raises(KeyError, match="no row for rope z"):
        row("rope", "z")
    assert contract.rows_of("nothing") == ()
    assert names(contract.rows_of("gelu_mul")) < names(contract.rows_of("silu_mul")) | names(ROWS)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rounding_is_what_torch_rounds(dtype: str) -> None:
    """Every value between neighbours is off by at most half their distance, and by that where it is a tie."""
    rounding, kind = ROUNDING[dtype], getattr(torch, dtype)
    info = torch.finfo(kind)
    assert rounding.relative == info.eps / 2
    assert rounding.least == info.smallest_normal * info.eps / 2
    wide = torch.from_numpy(RNG.standard_normal(100_000) * np.exp2(RNG.integers(-30, 10, 100_000)))
    off = (wide.to(kind).double() - wide).abs()
    assert bool((off <= rounding.inner * wide.abs() + rounding.least).all())
    source = np.float64 if dtype == "float32" else np.float32  # torch rounds float64 to the 16-bit types by way of it
    edge = source(rounding.limit)
    over = torch.from_numpy(np.array([edge, np.nextafter(edge, source(0))])).to(kind)
    assert over.isinf().tolist() == [True, False]


def test_the_module_needs_the_standard_library_alone() -> None:
    code = (
        "import sys, importlib.util as u; s = u.spec_from_file_location('contract', sys.argv[1]);"
        "m = u.module_from_spec(s); sys.modules['contract'] = m; s.loader.exec_module(m);"
        "print(len(m.ROWS), sorted({'numpy', 'torch', 'rl_kernel_native'} & set(sys.modules)))"
    )
    file = inspect.getsourcefile(contract)
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == f"{len(ROWS)} []"


# ---- what tests go by -----------------------------------------------------------------------------------------------


def of_logprob() -> str:
    logits, target = torch_logits(RNG, (5, 301)), torch_targets(RNG, (5,), 301)
    found = rk.logprob(logits, target, exp="portable", **ALL)
    one = np.ones(5, np.float32)
    dlogits = rk.logprob_backward(
        logits, target, found.lse, dlogprob=torch.from_numpy(one), dentropy=torch.from_numpy(one), entropy=found.entropy
    )
    of = truth(logits, target)
    return f"{of.failures(found)}; {of.gradient_failures(dlogits, 'float32', dlogprob=one, dentropy=one)}"


def of_linear() -> str:
    o = linear_cases.operands(RNG, (5,), 40, 9)
    found = linear_cases.failures(o, linear_cases.results(o), "ieee")
    with rk.arithmetic("sm_90"):
        return found + linear_cases.failures(o, linear_cases.results(o), "sm_90")


def of_rms_norm() -> str:
    o = rms_norm_cases.operands(RNG, (5,), 40)
    return rms_norm_cases.failures(o, rms_norm_cases.results(o))


def of_rope() -> str:
    o = rope_cases.operands(RNG, (5,))
    return "; ".join(rope_cases.failures(o, rope_cases.results(o, backward=b), b, "float32") for b in (False, True))


def of_silu_mul() -> str:
    o = silu_mul_cases.operands(RNG, (5,), 40)
    return "; ".join(silu_mul_cases.failures(o, silu_mul_cases.results(o, a), a) for a in silu_mul_cases.ACTIVATIONS)


def of_attention() -> str:
    values = RNG.standard_normal((4, 40, 2, 16))
    return attention_failures(*(torch.from_numpy(a).bfloat16() for a in values))


def of_embedding() -> str:
    ids = torch.from_numpy(RNG.integers(0, 5, 200))
    weight, dy = torch.randn(5, 9), torch.randn(200, 9)
    y, dweight = rk.embedding(ids, weight), rk.embedding_backward(dy, ids, 5)
    picked = np.eye(5)[ids.numpy()].T
    want, scale = picked @ dy.double().numpy(), picked @ np.abs(dy.double().numpy())
    allowed = row("embedding", "dweight").allowed("float32", expected=want, rows=200, scale=scale)
    wrong = [] if (np.abs(dweight.double().numpy() - want) <= allowed).all() else ["dweight: off by more"]
    off = float((y - weight[ids]).abs().max())
    return "; ".join(wrong + ([] if off <= row("embedding", "y").allowed() else ["y: off by more"]))


# How the tests of each operator compare with float64. A new operator's tests say theirs here.
CHECKS: dict[str, Callable[[], str]] = {
    "attention": of_attention,
    "embedding": of_embedding,
    "linear": of_linear,
    "logprob": of_logprob,
    "rms_norm": of_rms_norm,
    "rope": of_rope,
    "silu_mul": of_silu_mul,
}


@pytest.mark.parametrize("stem", STEMS)
def test_every_output_is_checked_through_the_table(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of one row at a time is made one that nothing keeps: the operator's own test must then fail. Rows that
    a test asks for by name, where it has a property of its own to compare, are found in its source."""
    assert stem in CHECKS, f"add to CHECKS how the tests of {stem} compare with float64"
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "tests").glob(f"test_{stem}*.py")))
    right, broken = Row.allowed, [("", "")]

    def allowed(self: Row, *arguments: Any, **facts: Any) -> Any:
        found = right(self, *arguments, **facts)
        return found * 0 - 1 if (self.operator, self.output) == broken[0] else found

    monkeypatch.setattr(Row, "allowed", allowed)
    assert not re.search(r"off by|truth|wrong", CHECKS[stem]()), "fails as it is"
    for found in (r for r in ROWS if r.stem == stem):
        broken[0] = (found.operator, found.output)
        if not re.search(rf"(^|[;\s]){found.output}(\[|:)", CHECKS[stem]()):
            asked = re.search(rf'row\((\w+|"{found.operator}"),\s*"{re.escape(found.output)}"\)', sources)
            assert asked, f"no test compares {found.name} with its bound"


@pytest.mark.parametrize("operator", _selftest.OPERATORS)
def test_the_doctor_goes_by_the_table(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing may be off, the rounding to the dtype alone fails."""
    monkeypatch.setattr(Row, "allowed", lambda self, *a, expected=0.0, **facts: np.abs(expected) * 0 + 1e-300)
    checks = {check.check: check for check in _selftest.OPERATORS[operator](None, "cpu", None)}
    assert checks["against float64"].passed is False


# Comparisons of an operator with float64 that a test may bound by a number of its own, and why.
OWN_NUMBERS = {
    "test_logprob.py": 1,  # two float64 writings of the reference
    "test_logprob_backward.py": 1,  # finite differences: steps and curvature
    "test_linear_engine.py": 2,  # two ways of torch to make a Hessian of the same operator
    "test_rms_norm_engine.py": 2,  # the same
}


def test_no_test_of_an_operator_has_a_tolerance_of_its_own() -> None:
    number = re.compile(r"(<=?[^#\n]*(\d[eE]-\d+|\b2(\.0)?\s?\*\*\s?-)|\b[ar]tol=\d*\.?\d*[eE]-\d)")
    files = [
        path
        for stem in STEMS
        for pattern in (f"test_{stem}*.py", f"{stem}_cases.py")
        for path in sorted((ROOT / "tests").glob(pattern))
    ]
    files += [ROOT / "tests" / name for name in ("cases.py", "test_fuzz.py", "test_frameworks.py", "test_torch.py")]
    found = {path.name: len(number.findall(path.read_text())) for path in files}
    assert {name: count for name, count in found.items() if count} == OWN_NUMBERS
    assert not number.findall(inspect.getsource(_selftest))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", silu_mul_cases.ACTIVATIONS)
def test_all_gates_of_16_bits_lie_within_the_bounds(activation: str, dtype: str) -> None:
    """The slope's bound is the tighter of two that there were: the doctor's by a rounding of float32."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(getattr(torch, dtype))
    gate = bits[torch.isfinite(bits)]
    gate = gate[gate.double().abs() < 10_000][None].expand(2, -1)  # products stay finite
    up, dy = (torch.from_numpy(RNG.standard_normal(gate.shape)).to(gate.dtype) for _ in range(2))
    for kind in (gate.dtype, torch.float32):
        o = silu_mul_cases.Operands(gate.to(kind).contiguous(), up.to(kind), dy.to(kind))
        for rounds in (False, True):
            got = silu_mul_cases.results(o, activation, round_before_mul=rounds)
            assert not silu_mul_cases.failures(o, got, activation, rounds), (kind, rounds)


# ---- documents and the command --------------------------------------------------------------------------------------


def test_documents_state_the_numbers_of_the_table() -> None:
    """docs/numerics.md and README.md say the bounds of a log-probability and of entropy in figures."""
    number = r"(\d+e-\d+) \+ (\d+e-\d+) ?\*? ?max\|z\|"
    for page, outputs in (("docs/numerics.md", ("logprob", "entropy")), ("README.md", ("logprob",))):
        text = (ROOT / page).read_text()
        found = re.findall(number, text)
        assert len(found) == len(outputs), page
        for (constant, slope), output in zip(found, outputs, strict=True):
            bound = row("logprob", output)
            assert bound.allowed(max_abs_z=0.0) == float(constant)
            assert bound.allowed(max_abs_z=1.0) - float(constant) == pytest.approx(float(slope))
    equal = (ROOT / "docs" / "numerics.md").read_text().partition('## What "equal" means')[2]
    assert "contract.py" in equal
    assert "rlk contract" in equal


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from rl_kernel_native.consistency.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_prints_the_table() -> None:
    pytest.importorskip("rich")
    pytest.importorskip("typer")
    done = run("contract")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    for operator in contract.OPERATORS:
        assert re.search(rf"(?m)^{operator} *$", done.stdout), operator
    one = run("contract", "--operator", "rope").stdout
    assert "rope" in one
    assert "logits" not in one
    table = json.loads(run("contract", "--json").stdout)
    assert {(r["operator"], r["output"]) for r in table["rows"]} == names(ROWS)
    done = run("contract", "--operator", "softmax")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --operator softmax: want one of logprob, linear")
