"""The invariance certificate is complete, the same on every machine, and not given to an operator with a fault.

`python tests/tools/test_certify.py` writes tests/certificate.json, the CPU's digests in every arithmetic.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from rl_kernel_native import contract
from rl_kernel_native._arithmetic import UNITS
from rl_kernel_native._native import module as native

torch = pytest.importorskip("torch")

from rl_kernel_native.cases import CASES, CERTIFIED, Arrays, certified_cases  # noqa: E402
from rl_kernel_native.cases._certificate import indices, noise  # noqa: E402
from rl_kernel_native.consistency import certify as module  # noqa: E402
from rl_kernel_native.consistency.certify import Certificate, certify, compare_digests, digests, text_of  # noqa: E402
from rl_kernel_native.consistency.errors import BadInput  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "certificate.json"
STEMS = sorted(path.stem for path in (ROOT / "cpp" / "include" / "rlk" / "ops").glob("*.h"))


def recorded() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(RECORDED.read_text())
    return found


@pytest.fixture(scope="module")
def quick() -> Certificate:
    return certify("cpu", quick=True)


def small(operator: str) -> Certificate:
    """Digests of an operator's narrow shapes."""
    arrays = Arrays()
    chosen = [
        case for case in certified_cases(arrays, True) if case.operator == operator and np.prod(case.shape[-2:]) < 5000
    ]
    return Certificate({}, tuple(module.certify_case(case, arrays) for case in chosen))


# ---- what is in it --------------------------------------------------------------------------------------------------


def test_every_operator_is_invariant_here_and_has_the_recorded_digests(quick: Certificate) -> None:
    assert quick.invariant, quick.first_failure
    same, other = compare_digests(quick, recorded())
    assert not other
    assert same == [entry.key for entry in quick.entries], (
        "python tests/tools/test_certify.py writes tests/certificate.json"
    )


# Operators without cases.
NOT_CERTIFIED = {name for name, of in CASES.items() if name in STEMS and isinstance(of.certificate, str)}


def test_operators_are_certified_or_it_is_said_why_not() -> None:
    stems = {row.operator: row.stem for row in contract.ROWS}
    assert {stems[operator] for operator in CERTIFIED} | NOT_CERTIFIED == set(STEMS)
    assert not {stems[operator] for operator in CERTIFIED} & NOT_CERTIFIED
    reasons = [of.certificate for of in CASES.values() if isinstance(of.certificate, str)]
    assert all(len(reason.split()) > 4 for reason in reasons)


def test_every_output_of_the_contract_is_certified_in_every_dtype(quick: Certificate) -> None:
    """All in one test, since processes that share the file would each compute a certificate."""
    certified = {(e.operator, e.direction, output, e.dtype) for e in quick.entries for output in e.outputs}
    missing = []
    for stem in (stem for stem in STEMS if stem not in NOT_CERTIFIED):
        single = [r for r in contract.ROWS if r.stem == stem and r.kind != "composed" and " of " not in r.output]
        assert single, stem
        missing += [
            (r.name, dtype)
            for r in single
            for dtype in r.dtypes
            if (r.operator, r.direction, r.output, dtype) not in certified
        ]
    assert not missing, "rl_kernel_native/cases"


def test_what_is_varied_is_what_the_contract_says(quick: Certificate) -> None:
    for entry in quick.entries:
        keeps = set.intersection(*({*contract.row(entry.operator, o).keeps} for o in entry.outputs))
        if "batch" in keeps:
            assert entry.batches == (1, 2, 7, 32, 129)
            assert entry.positions == ("first", "middle", "last")
        else:
            assert entry.padding
        assert entry.layouts == ("contiguous", "strided", "misaligned")
        assert entry.runs == 3
    assert all(e.ways for e in quick.entries if e.outputs == ("dweight",)), "chunks"
    assert any(e.ways == ("2 shards", "4 shards", "8 shards") for e in quick.entries)


def test_keys_are_of_one_case() -> None:
    for quickly in (True, False):
        keys = [case.key for case in certified_cases(Arrays(), quickly)]
        assert len(set(keys)) == len(keys)
    assert {case.key for case in certified_cases(Arrays(), True)} <= set(keys)


def test_the_text_is_the_same_every_time_and_names_nobody(quick: Certificate) -> None:
    one = certify("cpu", ["rope"], quick=True)
    assert text_of(one) == text_of(certify("cpu", ["rope"], quick=True))
    found = json.loads(text_of(one))
    assert found["format"] == module.FORMAT
    assert "date" not in found
    assert len(found["extension_sha256"]) == len(found["code_sha256"]) == 64
    assert found["device"] == "cpu"
    assert found["arithmetic"] == "ieee"
    entry = found["entries"][0]
    assert {"operator", "pass", "dtype", "shape", "batches", "positions", "layouts", "runs", "sha256"} < set(entry)
    assert entry["invariant"] is True
    assert str(Path.home()) not in text_of(one)
    assert "UTC" in json.loads(text_of(one, date=True))["date"]
    assert found["code_sha256"] == quick.environment["code_sha256"]


def test_content_is_that_of_its_definition() -> None:
    """SplitMix64 of a counter from a key, in Python's integers; four 16-bit parts are added."""
    import hashlib

    key = int.from_bytes(hashlib.sha256(b"name 3").digest()[:8], "little")
    want = []
    for i in range(50):
        z = (i * 0x9E3779B97F4A7C15 + key) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
        want.append((sum(z >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 131_070) * (2.0 / 37837.0))
    got = noise("name", 3, (5, 10), 2.0)
    assert got.reshape(-1).tolist() == np.array(want).astype(np.float32).tolist()
    wide = noise("name", 4, (100_000,))
    assert abs(float(wide.mean())) < 0.01
    assert abs(float(wide.std()) - 1) < 0.01
    ids = indices("name", 5, 10_000, 7)
    assert sorted(set(ids.tolist())) == list(range(7))


@pytest.mark.parametrize("unit", UNITS)
def test_the_recorded_digests_are_those_of_every_arithmetic(unit: str) -> None:
    """Digests of every shape's first row alone. Digests that all backends are said to share are equal in all
    records."""
    with rk.arithmetic(unit):
        found = digests(Arrays())
    assert set(found) == {"every", unit}
    for group, expected in found.items():
        assert recorded()[group] == expected


def test_every_instruction_set_has_the_recorded_digests(native_settings: None) -> None:
    for isa, threads in itertools.product(("baseline", "avx2", "avx512"), (1, 3)):
        try:
            native.set_cpu_isa(isa)
        except (RuntimeError, ValueError):
            continue  # this CPU lacks the instruction set
        torch_threads = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            found = digests(Arrays(), quick=True)
        finally:
            torch.set_num_threads(torch_threads)
        for group, of_group in found.items():
            assert {key: recorded()[group][key] for key in of_group} == of_group, (isa, threads, group)


@pytest.mark.gpu
def test_a_gpu_is_invariant_and_has_the_digests_of_the_cpu() -> None:
    """Row operators have the CPU's bits. Products and the hardware's exponential have the digests of
    `rk.arithmetic("sm_90")`."""
    found = certify("cuda")
    assert found.invariant, found.first_failure
    assert all(8192 in entry.batches for entry in found.entries if entry.positions)
    same, other = compare_digests(found, recorded())
    assert not other
    every = [entry.key for entry in found.entries if entry.backends == contract.EVERY_BACKEND]
    assert set(same) >= set(every)
    if found.environment["arithmetic"] == "sm_90":
        assert len(same) == len(found.entries)


# ---- faults ---------------------------------------------------------------------------------------------------------


def nudged(result: Any, rows: slice | int) -> Any:
    """A copy of a tensor with one bit flipped in one element of these rows."""
    found = result.clone()
    part = found[rows].view(-1)[-1:]
    part.copy_(part * (1 + torch.finfo(found.dtype).eps) + torch.finfo(found.dtype).tiny)
    return found


def in_last_row(result: Any, *_: Any) -> Any:
    return nudged(result, -1) if result.shape[0] > 7 else result


def in_large_batches(result: Any, *_: Any) -> Any:
    return nudged(result, result.shape[0] // 2) if result.shape[0] >= 129 else result


def off_alignment(result: Any, first: Any) -> Any:
    return nudged(result, 0) if first.data_ptr() % 16 else result


def by_neighbours(result: Any, first: Any) -> Any:
    """A fault in which a row depends on the next row, as if both shared scratch memory."""
    if result.shape[0] != 7 or first.dim() != 2:
        return result
    return nudged(result, 3) if float(first[4, 0]) > 0 else result


class Sometimes:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, result: Any, *_: Any) -> Any:
        self.calls += 1
        return nudged(result, 0) if self.calls == 3 else result


FAULTS: dict[str, tuple[Callable[[], Callable[..., Any]], str]] = {
    "position": (lambda: in_last_row, "position 31 of a batch of 32, contiguous, neighbours 1"),
    "batch": (lambda: in_large_batches, "position 64 of a batch of 129, contiguous, neighbours 1"),
    "alignment": (lambda: off_alignment, "position 0 of a batch of 1, misaligned"),
    "run": (Sometimes, "position 0 of a batch of 1, contiguous, neighbours 1, run 2"),
}


@pytest.mark.parametrize("function", ["rms_norm", "silu_mul", "rope", "linear", "linear_input_grad"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(fault: str, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(rk, function)
    make, where = FAULTS[fault]
    damage = make()

    def wrong(first: Any, *arguments: Any, **options: Any) -> Any:
        found = right(first, *arguments, **options)
        if isinstance(found, tuple):
            return (damage(found[0], first), *found[1:])
        return damage(found, first)

    monkeypatch.setattr(rk, function, wrong)
    operator = "linear" if function.startswith("linear") else function
    found = small(operator)
    assert not found.invariant
    bad = [entry for entry in found.entries if not entry.invariant]
    output = {"linear_input_grad": "dx", "rope": "q"}.get(function, "y")
    assert {entry.outputs[0] for entry in bad} == {output}, "entries of other functions are not to blame"
    assert all(entry.differs.startswith(f"{output} differ: {where}") for entry in bad), bad[0].differs
    assert found.first_failure.startswith(f"{operator} {output}")


def test_a_result_that_depends_on_its_neighbours_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rk.silu_mul
    monkeypatch.setattr(rk, "silu_mul", lambda gate, *a, **options: by_neighbours(right(gate, *a, **options), gate))
    assert "position 3 of a batch of 7" in small("silu_mul").first_failure


def test_a_statistic_that_depends_on_the_shards_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rk.logprob_merge

    def wrong(stats: Any, **options: Any) -> Any:
        found = right(stats, **options)
        return found._replace(entropy=nudged(found.entropy, 3)) if stats.shape[0] == 4 else found

    monkeypatch.setattr(rk, "logprob_merge", wrong)
    found = certify("cpu", ["logprob"], quick=True)
    assert found.first_failure.endswith("against position 0 of a batch of 1, contiguous, neighbours 1")
    assert "entropy differ: position 3 of a batch of 7, contiguous, neighbours 1, 4 shards" in found.first_failure


@pytest.mark.parametrize("fault", ["padding", "chunks"])
def test_a_token_sum_with_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = rk.linear_weight_grad

    def wrong(dy: Any, x: Any, **options: Any) -> Any:
        found = right(dy, x, **options)
        if fault == "padding":
            return nudged(found, 0) if dy.shape[0] % 8192 == 311 else found
        if "main_grad" in options:
            options["main_grad"][0, 0] *= 1 + 2**-20
        return found

    monkeypatch.setattr(rk, "linear_weight_grad", wrong)
    found = small("linear").first_failure
    assert ("dweight differ: position 0 of a batch of 8503" if fault == "padding" else "chunks of 8192") in found


def test_a_digest_of_another_machine_is_noticed(quick: Certificate) -> None:
    first = next(entry.key for entry in quick.entries if entry.backends == contract.EVERY_BACKEND)
    same, other = compare_digests(quick, recorded() | {"every": {first: "0" * 64}})
    assert other == [first]
    assert first not in same


# ---- the command ----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; sys.argv[0] = 'rlk'\nfrom rl_kernel_native.consistency.main import main; main()"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300)


def in_process(*arguments: str) -> Any:
    """Like `run`, but in this process, which saves the seconds of importing torch."""
    from typer.testing import CliRunner

    from rl_kernel_native.consistency.cli import app

    return CliRunner().invoke(app, [*arguments])


def test_the_exit_status_says_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    out = tmp_path / "certificate.json"
    chosen = ("certify", "--device", "cpu", "--quick", "--operator", "silu_mul")
    done = run(*chosen, "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout == out.read_text()
    assert json.loads(done.stdout)["invariant"] is True
    assert in_process(*chosen, "--arithmetic", "sm_90").stdout.splitlines()[-2:] == [
        "cpu, sm_90 arithmetic, 8 entries",
        "invariant",
    ]
    right = rk.silu_mul
    monkeypatch.setattr(rk, "silu_mul", lambda gate, up, **o: right(gate, up, **o) * (1 + (gate.shape[0] > 100)))
    done = in_process(*chosen)
    assert done.exit_code == 1, done.output
    assert "NOT INVARIANT: silu_mul y bfloat16 37: y differ: position 0 of a batch of 129" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--operator", "softmax"), "--operator softmax: want one of attention, embedding, "),
        (("--device", "gpu"), "--device gpu: want auto, cpu, cuda or cuda:N"),
        (("--device", "meta"), "--device meta: want auto, cpu, cuda or cuda:N"),
        (("--arithmetic", "sm_70", "--device", "cpu"), "--arithmetic sm_70: want one of ieee"),
        (("--out", "no/such/place.json"), "--out no/such/place.json: there is no directory no/such"),
    ],
)
def test_bad_input_is_one_message_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    pytest.importorskip("typer")
    done = in_process("certify", "--quick", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {message}")


def test_a_device_that_is_not_there_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module.resolve_device("auto") == torch.device("cpu")
    with pytest.raises(BadInput, match="--device cuda: torch sees no GPU"):
        certify("cuda")
    with pytest.raises(BadInput, match="--operator no_such_operator: want one of"):
        certify("cpu", ["no_such_operator"])
    assert {"logprob", "linear"} <= set(CERTIFIED)


def write() -> None:
    """Writes the CPU's digests in every arithmetic. Digests that all backends share must be the same in each record."""
    found: dict[str, dict[str, str]] = {}
    for unit in UNITS:
        with rk.arithmetic(unit):
            for group, of_group in digests(Arrays()).items():
                assert found.setdefault(group, of_group) == of_group, (unit, group)
    known = {group: list(of_group) for group, of_group in recorded().items()}  # keeps its place in the file
    for group, of_group in found.items():
        names = [*known.get(group, ()), *sorted(of_group)]
        found[group] = {name: of_group[name] for name in dict.fromkeys(names) if name in of_group}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write()
