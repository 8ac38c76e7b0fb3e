"""tools/mutate.py: files that the tool draws have tests, and its verdicts are right."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import load_script

TOOL = Path(__file__).resolve().parents[2] / "tools" / "mutate.py"
if not TOOL.exists():
    pytest.skip("the source tree's tools are not here", allow_module_level=True)


@pytest.fixture(scope="module")
def tool() -> Any:
    return load_script(TOOL)


@pytest.fixture
def copy(tool: Any, tmp_path: Path) -> Any:
    """A Copy whose compiler and pytest will be replaced."""
    made = tool.Copy.__new__(tool.Copy)
    made.root, made.tree, made.jobs, made.of_tree = tmp_path, tmp_path / "tree", 1, {"a.o": b"1"}
    made.failing = []
    return made


def test_every_drawn_fault_has_tests_and_changes_its_line(tool: Any) -> None:
    faults = [f for layer in tool.LAYERS for f in tool.drawn(layer, tool.COUNT[layer], 1)]
    assert len(faults) >= 150
    assert len({f.name for f in faults}) == len(faults)
    for fault in faults:
        own, others, compiled = tool.tests_of(fault)
        assert others, fault.name
        of_file = own or compiled or Path(fault.path).stem in tool.SHARED
        assert of_file, f"{fault.name} has no tests of its own: name them in SHARED or OF_STEM"
        source = (tool.ROOT / fault.path).read_text()
        assert source[fault.begin : fault.end] != fault.text, fault.name


def test_an_operators_first_test_runs_first_and_fuzzing_last(tool: Any) -> None:
    own, _, _ = tool.tests_of(SimpleNamespace(path="python/rl_kernel_native/ops/rope.py"))
    assert own[:2] == ["tests/ops/test_rope.py", "tests/ops/test_rope_bad_input.py"]
    assert own[-1] == "tests/ops/test_rope_fuzz.py"


def test_a_changed_file_leaves_the_faults_of_others(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tool.drawn("python", 70, 2)
    path = whole[0].path
    every = [f for f in tool.faults_of("python") if f.path != path or f.kind == "bound"]
    monkeypatch.setattr(tool, "faults_of", lambda layer: every)
    assert [f for f in tool.drawn("python", 70, 2) if f.path != path] == [f for f in whole if f.path != path]


@pytest.mark.parametrize(
    ("path", "python", "compiled"),
    [
        ("python/rl_kernel_native/ops/rope.py", "tests/ops/test_rope.py", None),
        ("bindings/rope.cpp", "tests/ops/test_rope.py", None),
        ("cpp/include/rlk/math/philox.h", "tests/ops/test_random_bits.py", "test_models"),
        ("cpu/rope.cpp", "tests/ops/test_rope.py", "test_preconditions"),
        ("cpu/thread_pool.cpp", "tests/ops/test_gae.py", "test_thread_pool"),
        ("kernels/attention/tile.h", "tests/ops/test_attention.py", "test_attention_mma"),
        ("kernels/attention/cache_append.h", "tests/ops/test_kv_cache_append.py", "test_kv_cache_append"),
        ("kernels/sample/round.h", "tests/ops/test_sample.py", "test_sample"),
        ("kernels/tokens/terms.h", "tests/ops/test_kl.py", "test_policy_loss"),
    ],
)
def test_the_tests_of_a_file(tool: Any, path: str, python: str, compiled: str | None) -> None:
    own, _, in_cpp = tool.tests_of(SimpleNamespace(path=path))
    assert python in own
    assert compiled in in_cpp if compiled else not in_cpp


def test_a_test_that_is_named_runs_first(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "FIRST", ["tests/ops/test_strides.py::test_a"])
    own, _, _ = tool.tests_of(SimpleNamespace(path="bindings/rope.cpp"))
    assert own[:2] == ["tests/ops/test_strides.py::test_a", "tests/ops/test_rope.py"]


def test_faults_that_are_called_equivalent_are_ones_that_may_be_drawn(tool: Any) -> None:
    every = {tool.key_of(f) for layer in tool.LAYERS for f in tool.faults_of(layer)}
    assert set(tool.EQUIVALENT) <= every, "a line that changed is judged anew: take it out"
    assert all(tool.EQUIVALENT.values())
    calls = [f for f in tool.faults_of("bindings") if f.kind == "call" and f.path.endswith("/preference_loss.cpp")]
    assert len({tool.key_of(f) for f in calls}) == len(calls) > 1, "each call that may be gone has a key of its own"


def test_no_fault_lies_in_what_changes_no_code(tool: Any) -> None:
    source = "static_assert(a == b &&\n              c < d);\n// e == f\n#if G == h\n#endif\nint i = j + k;\n"
    assert [(kind, text) for kind, _, _, text in tool.cpp_faults(source)] == [("sum", "-")]


def test_files_are_drawn_by_pattern(tool: Any) -> None:
    found = tool.drawn("kernels", 5, 1, "cpu/k*.cpp")
    assert {f.path for f in found} <= {"cpu/kl.cpp", "cpu/kl_simd.cpp", "cpu/kv_cache_append.cpp"}
    assert found


def test_another_fault_is_of_the_file_and_not_one_that_was_drawn(tool: Any) -> None:
    (fault,) = tool.drawn("bindings", 1, 1)
    used = {fault.name}
    while another := tool.redrawn(fault, used):
        assert another.path == fault.path
        assert another.name not in used
        used.add(another.name)
    assert used == {f.name for f in tool.faults_of("bindings") if f.path == fault.path}


FAILED = "FAILED tests/ops/test_kl.py::test_a[1] - x\n"


@pytest.mark.parametrize(
    ("with_fault", "without", "judged"),
    [
        ((0, ""), None, ""),
        ((5, ""), None, ""),
        ((1, FAILED), 0, "tests/ops/test_kl.py::test_a[1]"),
        ((1, "FAILED tests/ops/test_kl.py::test_a[b - c] - x\n"), 0, "tests/ops/test_kl.py::test_a[b - c]"),
        ((1, "Timeout (0:02:00)!"), 0, "tests/ops/test_kl.py, which ends with 1"),
        ((1, "Timeout (0:02:00)!"), 1, "undecided: tests/ops/test_kl.py does not end"),
        ((2, "ERROR tests/ops/test_kl.py - ImportError\n"), 0, "tests/ops/test_kl.py"),
        ((-11, ""), 0, "tests/ops/test_kl.py, which ends with -11"),
        ((1000, ""), None, "undecided: tests/ops/test_kl.py does not end"),
    ],
)
def test_who_noticed(tool: Any, copy: Any, with_fault: Any, without: int | None, judged: str) -> None:
    asked: list[Path] = []

    def forked(package: Path, options: list[str], limit_s: float) -> tuple[int, str]:
        asked.append(package)
        return (without or 0, "") if package == copy.tree else with_fault

    copy.forked = forked
    by = copy.python_notices(["tests/ops/test_kl.py"])
    assert by.startswith(judged)
    assert bool(by) == bool(judged)
    assert asked == [copy.root / "python", *([] if without is None else [copy.tree])]


def test_what_fails_without_the_fault_is_left_out(tool: Any, copy: Any) -> None:
    left_out: list[list[str]] = []

    def forked(package: Path, options: list[str], limit_s: float) -> tuple[int, str]:
        if package == copy.tree:
            return (1, "")
        left_out.append([o for o in options if o.startswith("--deselect")])
        return (0, "") if left_out[-1] else (1, FAILED)

    copy.forked = forked
    assert copy.python_notices(["tests/ops/test_kl.py"]) == copy.python_notices(["tests/ops/test_kl.py"]) == ""
    assert left_out == [[], *[["--deselect=tests/ops/test_kl.py::test_a[1]"]] * 2]


def test_a_file_that_cannot_be_imported_without_the_fault_is_left_out(tool: Any, copy: Any) -> None:
    asked: list[str] = []

    def forked(package: Path, options: list[str], limit_s: float) -> tuple[int, str]:
        asked.append(next(o for o in options if o.endswith(".py")))
        return (2, "ERROR a.py - ImportError") if asked[-1] == "a.py" else (0, "")

    copy.forked = forked
    assert copy.python_notices(["a.py", "b.py"]) == copy.python_notices(["a.py"]) == ""
    assert asked == ["a.py", "a.py", "b.py"]


def test_a_test_that_cannot_be_left_out_decides_nothing(tool: Any, copy: Any) -> None:
    copy.forked = lambda package, options, limit_s: (1, FAILED)
    assert copy.python_notices(["tests/ops/test_kl.py"]).startswith(tool.UNDECIDED)


def test_files_run_one_after_the_other_up_to_the_first_that_notices(tool: Any, copy: Any) -> None:
    asked: list[str] = []

    def forked(package: Path, options: list[str], limit_s: float) -> tuple[int, str]:
        asked.append(options[-1])
        return (1, "FAILED b.py::x") if asked[-1] == "b.py" else (0, "")

    copy.forked = forked
    assert copy.python_notices(["a.py", "b.py", "c.py"]) == "b.py::x"
    assert asked == ["a.py", "b.py", "b.py::x"]


@pytest.mark.parametrize(
    ("body", "limit_s", "found"),
    [("assert True", 60.0, 0), ("assert False", 60.0, 1), ("import time; time.sleep(60)", 1.0, 1000)],
    ids=["passes", "fails", "does not end"],
)
def test_a_fork_runs_tests_with_the_package_of_its_tree(
    tool: Any, copy: Any, body: str, limit_s: float, found: int
) -> None:
    package = copy.root / "python"
    package.mkdir()
    (package / "planted.py").write_text("fault = True\n")
    (copy.root / "pyproject.toml").write_text((tool.ROOT / "pyproject.toml").read_text())
    (copy.root / "test_a.py").write_text(f"def test_a():\n    import planted\n    assert planted.fault\n    {body}\n")
    code, output = copy.forked(package, ["test_a.py"], limit_s)
    assert code == found, output
    assert ("FAILED test_a.py::test_a" in output) == (found == 1)


def test_a_record_is_read_again(tool: Any, tmp_path: Path) -> None:
    path, none = tmp_path / "mutants.jsonl", tmp_path / "none.json"
    faults = tool.drawn("python", 4, 1)
    noticed, gone = "tests/ops/test_kl.py::test_a", "tests/ops/test_gone.py::test_a"
    for fault, by in zip(faults, (noticed, "", f"{tool.UNDECIDED}: no end", gone), strict=True):
        tool.Record(path, none).add(fault, by, 1.0)
    record = tool.Record(path, none)
    assert [record.known(f, False) for f in faults] == [noticed, "", None, None]
    assert [record.known(f, True) for f in faults] == [noticed, None, None, None]
    record.add(faults[1], noticed, 1.0)
    table = tool.table(list(tool.judged(faults, tool.Record(path, none), None, False)))
    assert "| python | 4 | 0 | 0 | 2 | 2 (100.0 %) | 0 |" in table


def test_a_committed_record_comes_first_and_holds_decided_faults_alone(tool: Any, tmp_path: Path) -> None:
    path, committed = tmp_path / "mutants.jsonl", tmp_path / "mutants.json"
    first, second, third = tool.drawn("python", 3, 1)
    record = tool.Record(path, committed, at="abc")
    record.add(first, "", 1.0)
    record.add(second, "tests/ops/test_kl.py::test_a", 1.0)
    record.save([first, second, third], committed)
    assert len(committed.read_text().splitlines()) == 4
    path.unlink()
    again = tool.Record(path, committed)
    assert again.of == record.of
    assert again.of[tool.key_of(first)]["at"] == "abc"
    again.add(first, "tests/ops/test_kl.py::test_a", 1.0)
    assert tool.Record(path, committed).known(first, False) == "tests/ops/test_kl.py::test_a"


def test_a_stopped_run_repeats_no_file_of_tests_that_passed(tool: Any, copy: Any, tmp_path: Path) -> None:
    path, none = tmp_path / "mutants.jsonl", tmp_path / "none.json"
    (fault,) = tool.drawn("python", 1, 1)
    asked: list[str] = []

    def forked(package: Path, options: list[str], limit_s: float) -> tuple[int, str]:
        asked.append(options[-1])
        if options[-1] == "b.py" and "stopped" not in asked:
            asked.append("stopped")
            raise KeyboardInterrupt
        return 0, ""

    copy.forked = forked
    copy.plant = lambda fault: copy.python_notices(["a.py", "b.py"])
    with pytest.raises(KeyboardInterrupt):
        list(tool.judged([fault], tool.Record(path, none), copy, False))
    assert list(tool.judged([fault], tool.Record(path, none), copy, False)) == [(fault, "")]
    assert asked == ["a.py", "b.py", "stopped", "b.py"]
    assert not tool.Record(path, none).passed, "a verdict ends what was stopped"
    (copy.root / "a.py").write_text("changed")
    copy.done = {"alone: a.py -k 'not compile' e3b0c442", "alone: b.py -k 'not compile' e3b0c442"}
    copy.python_notices(["a.py", "b.py"])
    assert asked[4:] == ["a.py"]


def test_workers_share_works_and_one_that_fails_stops_no_other(
    tool: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepared: list[int] = []

    def work(number: int, worker: int) -> None:
        with tool.locked(tmp_path / "lock"), (tmp_path / "done").open("a") as file:
            file.write(f"{number}\n")
        assert worker in (0, 1)
        assert number != 1, "work 1 fails"

    def works() -> Any:
        for number in range(4):
            prepared.append(number)
            yield functools.partial(work, number)

    tool.in_parallel(works(), 2)
    assert sorted((tmp_path / "done").read_text().split()) == ["0", "1", "2", "3"]
    assert prepared == [0, 1, 2, 3]
    assert capfd.readouterr().err.count("AssertionError: work 1 fails") == 1


def test_the_committed_record_is_read(tool: Any, tmp_path: Path) -> None:
    record = tool.Record(tmp_path / "none.jsonl")
    assert record.of
    assert all(set(entry) == {"path", "planted", "by", "at"} for entry in record.of.values())


def test_the_first_seed_draws_what_the_record_has_decided(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of paths order the draw, so a folder that moves would draw other faults."""
    usual = tool.drawn("bindings", 5, 2)
    last = tool.faults_of("bindings")[-1]
    assert last not in usual
    monkeypatch.setattr(tool, "decided", lambda: {tool.key_of(last)})
    found = tool.drawn("bindings", 5, 1)
    assert last in found
    assert len(found) == 5
    assert tool.drawn("bindings", 5, 2) == usual


def test_the_committed_record_knows_most_of_the_draw(tool: Any, tmp_path: Path) -> None:
    """A file that moves takes its lines of the record along."""
    record = tool.Record(tmp_path / "none.jsonl")
    for layer in tool.LAYERS:
        drawn = [f for f in tool.drawn(layer, tool.COUNT[layer], 1) if tool.key_of(f) not in tool.EQUIVALENT]
        known = [f for f in drawn if record.known(f, False) is not None]
        assert 2 * len(known) > len(drawn), f"{layer}: the record knows {len(known)} of {len(drawn)} faults"


@pytest.mark.parametrize(
    ("compiles", "code", "judged"),
    [(False, b"2", "NO_BUILD"), (True, b"1", "SAME_CODE"), (True, b"2", "")],
)
def test_a_fault_of_cpp_is_judged_by_its_object_code(
    tool: Any, copy: Any, compiles: bool, code: bytes, judged: str
) -> None:
    (fault,) = tool.drawn("kernels", 1, 1, "cpu/kl.cpp")
    whole = (tool.ROOT / fault.path).read_text()
    path = copy.root / fault.path
    path.parent.mkdir(parents=True)
    path.write_text(whole)
    built: list[tuple[str, ...]] = []

    def build(*targets: str) -> bool:
        assert path.read_text() == whole[: fault.begin] + fault.text + whole[fault.end :] != whole
        built.append(targets)
        return compiles

    copy.build, copy.code, copy.compiled_from = build, lambda: {"a.o": code}, lambda path: []
    copy.python_notices = lambda tests: ""
    copy.compiled_notice = lambda tests: ""
    assert copy.plant(fault) == (getattr(tool, judged) if judged else "")
    assert built == [("rlk_core",), ("_C",)][: 2 if compiles else 1]
    assert path.read_text() == whole


@pytest.mark.parametrize(("path", "read_by"), [("kernels/rows/divisor.h", ["test_row_split"]), ("cpu/kl.cpp", [])])
def test_code_of_gpus_is_judged_by_the_cpp_tests_that_read_it(
    tool: Any, copy: Any, path: str, read_by: list[str]
) -> None:
    (fault,) = tool.drawn("kernels", 1, 1, path)
    (copy.root / path).parent.mkdir(parents=True)
    (copy.root / path).write_text((tool.ROOT / path).read_text())
    copy.build, copy.code, copy.compiled_from = lambda *targets: True, lambda: copy.of_tree, lambda path: []
    copy.compiled_notice = lambda tests: " ".join(tests)
    assert copy.plant(fault) == (" ".join(read_by) or tool.SAME_CODE)


def test_a_build_sees_the_objects_of_the_planted_file_alone(
    tool: Any, copy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object for an instruction set that the CPU lacks stays; an object that a fault compiled is removed."""
    (fault,) = tool.drawn("kernels", 1, 1, "cpu/rope_simd.cpp")
    whole = (tool.ROOT / fault.path).read_text()
    path, built = copy.root / fault.path, copy.root / "build" / "cpu"
    path.parent.mkdir(parents=True)
    path.write_text(whole)
    stamp = path.stat().st_mtime_ns
    names = "rlk_cpu_avx2.dir/rope.o", "rlk_cpu_avx512.dir/rope.o", "rlk_cpu_avx2.dir/gae.o", "test_rope.dir/rope.o"
    objects = [built / name for name in names]
    recorded = [f"{name}: #deps 1, (VALID)\n    ../../cpu/rope_simd.cpp" for name in names]
    recorded[2] = recorded[2].replace("rope_simd", "gae_simd")
    for made in objects[:3]:
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text("of the tree")
    (built / "librlk.a").write_text("with the fault")
    monkeypatch.setattr(tool, "lacking", lambda: ["avx512"])
    monkeypatch.setattr(tool.subprocess, "run", lambda *_, **how: SimpleNamespace(stdout="\n\n".join(recorded)))
    with copy.planted(fault):
        assert path.read_text() == whole[: fault.begin] + fault.text + whole[fault.end :]
        assert path.stat().st_mtime_ns == stamp
        assert [made.exists() for made in objects] == [False, True, True, False]
        for made in (objects[0], objects[3]):
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_text("with the fault")
    assert [made.exists() and made.read_text() for made in objects] == [*["of the tree"] * 3, False]
    assert not (built / "librlk.a").exists()
    assert (path.read_text(), path.stat().st_mtime_ns) == (whole, stamp)


def test_a_cpp_test_that_fails_or_does_not_end_has_noticed(
    tool: Any, copy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy.build = lambda *targets: targets[0] != "test_b"
    (copy.root / "build" / "cpu").mkdir(parents=True)

    def program(name: str, text: str) -> None:
        path = copy.root / "build" / "cpu" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    program("test_a", "exit 0")
    program("test_c", "echo '[  FAILED  ] Kl.Bits, where'; exit 1")
    program("test_d", "sleep 20")
    monkeypatch.setattr(tool, "TEST_LIMIT_S", 0.2)
    assert copy.compiled_notice(["test_a"]) == ""
    assert copy.compiled_notice(["test_a", "test_b"]) == "the compiler, in test_b"
    assert copy.compiled_notice(["test_a", "test_c"]) == "test_c: Kl.Bits"
    assert copy.compiled_notice(["test_d"]).startswith("test_d, without an end")


@pytest.mark.parametrize(
    ("source", "kind", "where", "text", "switched"),
    [
        ("int f() { return a + b * c; }", "sum", "+", "-", "return ({} ? (a - b * c) : (a + b * c));"),
        ("x += p[i] * q(i, j);", "sum", "*", "+", "x += ({} ? (p[i] + q(i, j)) : (p[i] * q(i, j)));"),
        ("for (int i = 0; i < n; ++i) f(i);", "bound", "<", "<=", "; ({} ? (i <= n) : (i < n)); ++i)"),
        ("if (a == 1 && b > 2 || c) f();", "bound", ">", ">=", "a == 1 && ({} ? (b >= 2) : (b > 2)) || c)"),
        ("if (a && b || c) f();", "logic", "&&", "||", "if (({} ? (a || b || c) : (a && b || c))) f();"),
        ("k = w ? a::b <= 1 : 2;", "bound", "<=", "<", "w ? ({} ? (a::b < 1) : (a::b <= 1)) : 2;"),
        ("if (!done(x) && y) f();", "not", "!", "", "if (({} ? !!(done(x)) : (!done(x))) && y) f();"),
        ("f(a, std::max(b, c) / 2);", "extremum", "max", "min", "f(a, ({} ? (std::min(b, c) / 2) : (std::max"),
        ("F one = of(1.0f, ')');", "constant", "1.0f", "0.0f", "of(({} ? (0.0f) : (1.0f)), ')')"),
        ("  check_it(p);", "call", "check_it(p)", "(void)0", "  ({} ? (void)0 : (void)(check_it(p)));"),
        ('f(") ;", a /* ; */ - b, 1);', "sum", "-", "+", 'f(") ;", ({} ? (a /* ; */ + b) : (a /* ; */ - b)), 1)'),
    ],
)
def test_a_fault_behind_a_switch(tool: Any, source: str, kind: str, where: str, text: str, switched: str) -> None:
    begin = source.index(where)
    fault = tool.Fault("kernels", "a.cpp", 1, kind, begin, begin + len(where), text)
    found, held = sys.modules["mutate_switches"].switched(source, {fault: 3})
    assert switched.replace("{}", "RLK_IS_MUTANT(3)") in found
    assert held == [fault]


def test_of_faults_in_one_expression_one_has_a_switch(tool: Any) -> None:
    first, second = (tool.Fault("kernels", "a.cpp", 1, "sum", at, at + 1, "-") for at in (6, 10))
    found, held = sys.modules["mutate_switches"].switched("x = a + b + c;", {second: 1, first: 2})
    assert len(held) == 1
    assert found.endswith("x = (RLK_IS_MUTANT(1) ? (a + b - c) : (a + b + c));")


@pytest.fixture
def switches(tool: Any, copy: Any) -> Any:
    """A copy with switches for three faults in three files."""
    made = tool.Switched.__new__(tool.Switched)
    made.__dict__ |= copy.__dict__
    made.numbers = {fault: number for number, fault in enumerate(tool.drawn("kernels", 3, 1), 1)}
    made.tests_of, made.current, made.said = tool.tests_of, 0, ""
    (made.root / "python").mkdir()
    return made


def test_a_copy_has_the_switches_of_its_files_and_what_reads_the_environment(tool: Any, switches: Any) -> None:
    for fault, number in switches.numbers.items():
        whole, found = (tool.ROOT / fault.path).read_text(), switches.content(tool.ROOT / fault.path).decode()
        assert f"RLK_IS_MUTANT({number}) ? " in found
        before = whole[: whole.rindex("\n", 0, fault.begin)].rpartition("\n")[0]
        assert found.partition("#endif\n")[2].startswith(before)
    pool = sys.modules["mutate_switches"].DEFINED_IN
    assert b"std::getenv" in switches.content(tool.ROOT / pool)
    assert switches.content(tool.ROOT / "README.md") == (tool.ROOT / "README.md").read_bytes()


def test_a_file_that_leaves_the_tree_leaves_its_copy(tool: Any, copy: Any) -> None:
    """If the copy kept a file that left the tree, a build of the copy would still compile that file."""
    left, made = copy.root / "cmake" / "left.cpp", copy.root / "cmake" / "_C.abi3.so"
    for path in (left, made):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    copy.copy(tool.ROOT / "cmake")
    assert not left.exists()
    assert made.exists()  # by a build
    assert (copy.root / "cmake" / "Python.cmake").exists()


def test_a_file_that_does_not_compile_loses_its_switches(tool: Any, switches: Any) -> None:
    bad, *good = switches.numbers
    refreshed: list[Path] = []

    def build(*targets: str) -> bool:
        switches.said = f"In file included from {good[0].path}:1:\n/a/{bad.path}:7:9: error: no operator\n"
        return bad not in switches.numbers

    switches.build, switches.refresh = build, refreshed.append
    assert switches.build_all()
    assert list(switches.numbers) == good
    assert refreshed == [tool.ROOT / bad.path]
    assert switches.tree.is_dir()


def test_a_build_that_fails_without_switches_is_an_error(switches: Any) -> None:
    switches.build = lambda *targets: False
    assert not switches.build_all()


def test_the_environment_plants_the_fault_and_the_tree_has_none(
    tool: Any, switches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def forked(copy: Any, package: Path, options: list[str], limit_s: float) -> tuple[int, str]:
        seen.append((package.name, os.environ["RLK_MUTANT"]))
        return (1, FAILED) if package == copy.root / "python" else (0, "")

    monkeypatch.setattr(tool.Copy, "forked", forked)
    switches.compiled_notice = lambda tests: seen.append(("compiled", os.environ["RLK_MUTANT"])) or ""
    fault = list(switches.numbers)[2]
    assert switches.plant(fault) == "tests/ops/test_kl.py::test_a[1]"
    assert seen == [("compiled", "3"), ("python", "3"), ("tree", "0")]
    assert "RLK_MUTANT" not in os.environ


def test_what_survives_behind_a_switch_is_planted_alone(tool: Any, tmp_path: Path) -> None:
    faults = tool.drawn("kernels", 3, 1)
    planted: list[str] = []

    class Planter:
        def __init__(self, name: str, verdicts: dict[Any, str]) -> None:
            self.name, self.numbers = name, verdicts

        def plant(self, fault: Any) -> str:
            planted.append(self.name)
            return self.numbers[fault]

    switches = Planter("switched", {faults[0]: "a", faults[1]: ""})
    alone = Planter("alone", {faults[1]: "", faults[2]: "b"})
    record = tool.Record(tmp_path / "r.jsonl", tmp_path / "none.json")
    found = list(tool.judged(faults, record, alone, False, switches))
    assert dict(found) == {faults[0]: "a", faults[1]: "", faults[2]: "b"}
    assert planted == ["switched", "switched", "alone", "alone"]


def test_a_build_judges_faults_without_a_compiler_and_leaves_survivors_undecided(
    tool: Any, switches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that got the extension and one C++ test from the machine that built them."""
    numbers = dict(switches.numbers)
    switches.build = lambda *targets: True
    assert switches.build_all()

    monkeypatch.setattr(tool.Copy, "__init__", lambda self, jobs, of="": self.__dict__.update(switches.__dict__))
    noticed, passed, other = *list(numbers)[:2], tool.drawn("kernels", 4, 1)[3]
    built = tool.Built([passed, noticed, other], tool.tests_of)
    assert built.numbers == {noticed: numbers[noticed], passed: numbers[passed]}
    assert built.build("_C")

    ran: list[str] = []
    (built.root / "build" / "cpu").mkdir(parents=True)
    (built.root / "build" / "cpu" / "test_preconditions").touch()
    monkeypatch.setattr(tool.Copy, "compiled_notice", lambda self, tests: ran.extend(tests) or "")
    monkeypatch.setattr(
        tool.Copy, "python_notices", lambda self, tests: "a test" if self.current == numbers[noticed] else ""
    )
    assert built.plant(noticed) == "a test"
    assert {built.plant(fault) for fault in (passed, other)} == {
        f"{tool.UNDECIDED}: passes behind a switch",
        f"{tool.UNDECIDED}: not behind a switch",
    }
    assert ran == ["test_preconditions"] * 2


def test_the_cpp_files_of_a_build_stay_and_its_tests_follow_the_tree(
    tool: Any, switches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tool.Built.__new__(tool.Built)
    built.__dict__ |= switches.__dict__
    fault = next(iter(switches.numbers))
    test = "tests/tools/test_mutate.py"
    for path in (fault.path, test):
        (built.root / path).parent.mkdir(parents=True, exist_ok=True)
        (built.root / path).write_text("as it was built")
        built.refresh(tool.ROOT / path)
    assert (built.root / fault.path).read_text() == "as it was built"
    assert (built.root / test).read_text() == (tool.ROOT / test).read_text()


def test_the_tests_that_an_undecided_fault_has_passed_count_later(tool: Any, tmp_path: Path) -> None:
    fault = tool.drawn("kernels", 1, 1)[0]
    record = tool.Record(tmp_path / "r.jsonl", tmp_path / "none.json")
    record.add_passed(fault, "behind a switch: tests/a.py")
    record.add(fault, f"{tool.UNDECIDED}: passes behind a switch", 1.0)
    later = tool.Record(tmp_path / "r.jsonl", tmp_path / "none.json")
    assert later.known(fault, False) is None
    assert later.passed[tool.key_of(fault)] == {"behind a switch: tests/a.py"}
