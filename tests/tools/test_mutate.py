"""tools/mutate.py: files that it draws have tests, and its verdicts are right."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "mutate.py"
if not TOOL.exists():
    pytest.skip("the source tree's tools are not here", allow_module_level=True)


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("mutate", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tool: Any, tmp_path: Path) -> Any:
    """A Copy whose compiler and pytest will be replaced."""
    made = tool.Copy.__new__(tool.Copy)
    made.root, made.tree, made.jobs, made.of_tree = tmp_path, tmp_path / "tree", 1, {"a.o": b"1"}
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


def test_refusals_are_tried_first_and_fuzzing_last(tool: Any) -> None:
    own, _, _ = tool.tests_of(SimpleNamespace(path="python/rl_kernel_native/ops/rope.py"))
    assert (own[0], own[-1]) == ("tests/ops/test_rope_bad_input.py", "tests/ops/test_rope_fuzz.py")
    assert "tests/ops/test_rope.py" in own


def test_faults_that_are_called_equivalent_are_ones_that_may_be_drawn(tool: Any) -> None:
    every = {(f.path, tool.planted_line(f)) for layer in tool.LAYERS for f in tool.faults_of(layer)}
    assert set(tool.EQUIVALENT) <= every, "a line that changed is judged anew: take it out"
    assert all(tool.EQUIVALENT.values())


def test_files_are_drawn_by_pattern(tool: Any) -> None:
    found = tool.drawn("kernels", 5, 1, "cpp/cpu/k*.cpp")
    assert {f.path for f in found} <= {"cpp/cpu/kl.cpp", "cpp/cpu/kl_simd.cpp", "cpp/cpu/kv_cache_append.cpp"}
    assert found


def test_another_fault_is_of_the_file_and_not_one_that_was_drawn(tool: Any) -> None:
    (fault,) = tool.drawn("bindings", 1, 1)
    used = {fault.name}
    while another := tool.redrawn(fault, used):
        assert another.path == fault.path
        assert another.name not in used
        used.add(another.name)
    assert used == {f.name for f in tool.faults_of("bindings") if f.path == fault.path}


def ended(code: int, words: str = "") -> Any:
    return subprocess.CompletedProcess([], code, words, "")


@pytest.mark.parametrize(
    ("with_fault", "without", "judged"),
    [
        (ended(0), None, ""),
        (ended(5), None, ""),
        (ended(1, "FAILED tests/ops/test_kl.py::test_a[1] - x\n"), ended(0), "tests/ops/test_kl.py::test_a[1]"),
        (
            ended(1, "FAILED tests/ops/test_kl.py::test_a[1] - x\n"),
            ended(1),
            "undecided: tests/ops/test_kl.py::test_a[1] fails",
        ),
        (ended(1, "+++ Timeout +++"), None, "a test that takes more than"),
        (ended(2, "ERROR tests/ops/test_kl.py - ImportError\n"), ended(0), "tests/ops/test_kl.py"),
        (ended(-11), None, "pytest ended with -11"),
        (subprocess.TimeoutExpired("x", 1), None, "undecided: no end"),
    ],
)
def test_who_noticed(tool: Any, copy: Any, with_fault: Any, without: Any, judged: str) -> None:
    asked: list[Path] = []

    def pytest_of(package: Path, options: list[str], limit_s: float) -> Any:
        asked.append(package)
        found = without if package == copy.tree else with_fault
        if isinstance(found, Exception):
            raise found
        return found

    copy.pytest = pytest_of
    fault = SimpleNamespace(path="cpp/cpu/kl.cpp", layer="kernels")
    by = copy.python_notices(fault, ["tests/ops/test_kl.py"], 1.0)
    assert by.startswith(judged)
    assert bool(by) == bool(judged)
    assert asked == [copy.root / "python", *([] if without is None else [copy.tree])]


@pytest.mark.parametrize(
    ("compiles", "code", "judged"),
    [(False, b"2", "NO_BUILD"), (True, b"1", "SAME_CODE"), (True, b"2", "")],
)
def test_a_fault_of_cpp_is_judged_by_its_object_code(
    tool: Any, copy: Any, compiles: bool, code: bytes, judged: str
) -> None:
    (fault,) = tool.drawn("kernels", 1, 1, "cpp/cpu/kl.cpp")
    whole = (tool.ROOT / fault.path).read_text()
    path = copy.root / fault.path
    path.parent.mkdir(parents=True)
    path.write_text(whole)
    built: list[tuple[str, ...]] = []

    def build(*targets: str) -> bool:
        assert path.read_text() == whole[: fault.begin] + fault.text + whole[fault.end :] != whole
        built.append(targets)
        return compiles

    copy.build, copy.code = build, lambda: {"a.o": code}
    copy.python_notices = lambda *given: ""
    copy.compiled_notice = lambda tests: ""
    assert copy.plant(fault, 1.0) == (getattr(tool, judged) if judged else "")
    assert built == [("rlk_core",), ("_C",)][: 1 if judged else 2]
    assert path.read_text() == whole


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
