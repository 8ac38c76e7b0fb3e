"""The log of GPU tests: a stale log is noticed and gives a warning."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.gpu_log import ROOT, TREES, sources, tree_hash, tree_hashes, why_stale, without_comments


def test_the_gpu_log_covers_these_sources() -> None:
    """A stale log gives a warning, not a failure, since whoever changes a line may have no GPU at hand. Work on GPU
    code is unfinished while it warns."""
    problem = why_stale()
    if problem:
        warnings.warn(pytest.PytestWarning(problem), stacklevel=1)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A small source tree with files of each hashed kind, without git."""
    for name in ("cpp", "cuda", "python", "tests"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "a.py").write_text(f"# {name}\n")
        (tmp_path / name / "b.cpp").write_text("int x;\n")
    return tmp_path


def write_log(root: Path, failed: int = 0) -> Path:
    log = root / "tests" / "gpu_log.json"
    log.write_text(json.dumps({"date": "today", "counts": {"failed": failed}, "trees": tree_hashes(root)}))
    return log


def test_a_fresh_log_is_good_and_does_not_hash_itself(copy: Path) -> None:
    log = write_log(copy)
    assert why_stale(log, copy) == ""


def test_what_a_build_leaves_behind_changes_nothing(copy: Path) -> None:
    log = write_log(copy)
    (copy / "python" / "__pycache__").mkdir()
    (copy / "python" / "__pycache__" / "a.py").write_text("left behind")
    (copy / "python" / "_C.so").write_bytes(b"\0")
    (copy / "cpp" / "b.cpp").write_bytes(b"int x;\r\n")  # line ends of another checkout
    assert why_stale(log, copy) == ""


@pytest.mark.parametrize("change", ["edit", "add", "remove", "rename"])
@pytest.mark.parametrize("tree", ["cpp", "cuda", "python", "tests"])
def test_each_change_of_a_source_is_named(tree: str, change: str, copy: Path) -> None:
    log = write_log(copy)
    path = copy / tree / "b.cpp"
    if change == "edit":
        path.write_text("int y;\n")
    elif change == "add":
        (copy / tree / "c.py").write_text("")
    elif change == "remove":
        path.unlink()
    else:
        path.rename(path.with_name("d.cpp"))
    assert why_stale(log, copy) == f"tests/gpu_log.json is stale: changed since the run of today: {tree}"


@pytest.mark.parametrize(
    ("code", "is_same"),
    [
        ("int x;  // a number\n", True),
        ("/* two\n   lines */\nint x;\n\n", True),
        ("int /* here */x;\n", False),  # spaces inside of a line count
        ("int x;  /* an end */ int y;\n", False),
        ("int x;\n#define Y 1\n", False),
    ],
)
def test_comments_of_cpp_do_not_count(code: str, is_same: bool, copy: Path) -> None:
    log = write_log(copy)
    (copy / "cuda" / "b.cpp").write_text(code)
    assert (why_stale(log, copy) == "") is is_same


@pytest.mark.parametrize(
    "literal",
    ['"http://a"', "'\"'", 'R"x(a // ")y" b)x"', r'"a\" // b"', "1'000'000", "'/'"],
)
def test_literals_count_whole(literal: str) -> None:
    assert without_comments(f"f({literal});  // end\n".encode()) == f"f({literal});".encode()


def test_a_new_tree_a_failed_run_and_no_log_are_named(copy: Path) -> None:
    assert "is missing: run `python tests/run_gpu.py`" in why_stale(copy / "tests" / "gpu_log.json", copy)
    assert "that run had 3 failures" in why_stale(write_log(copy, failed=3), copy)
    log = write_log(copy)
    (copy / "hip").mkdir()
    (copy / "hip" / "a.cpp").write_text("")
    assert "changed since the run of today: hip" in why_stale(log, copy)
    log.write_text("not json")
    assert "cannot be read" in why_stale(log, copy)


def test_every_tracked_source_is_hashed() -> None:
    """The hash selects files by suffix, so it needs no git. With git, the selection must be the tracked sources."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git here")
    done = subprocess.run(["git", "ls-files", *TREES], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(done.stderr.strip())
    tracked = {ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()}
    hashed = {p for name in TREES for p in sources(ROOT / name)}
    assert not {p for p in tracked - hashed if p.name != "gpu_log.json" and p.suffix != ".md"}


def test_the_check_prints_one_line_and_fails_only_when_strict() -> None:
    script = ROOT / "tests" / "check_gpu_log.py"
    soft = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=dict(os.environ))
    assert soft.returncode == 0
    assert soft.stdout.count("\n") == 1
    strict = subprocess.run([sys.executable, str(script), "--strict"], capture_output=True, text=True)
    assert strict.returncode == (1 if soft.stdout.startswith("warning") else 0)


def test_the_hash_is_a_known_number(tmp_path: Path) -> None:
    """A change of this recipe makes every old log stale: sha256 of "a.py", NUL, sha256("x"), newline."""
    (tmp_path / "a.py").write_text("x")
    assert tree_hash(tmp_path) == "447eac5bd97fe3d31b5fe74c8eb87da71f26285d8acf0a9ddf2cbc7ed330402f"
