#!/usr/bin/env python3
"""Plants faults one at a time, runs the tests that should notice, and prints the faults that no test noticed.

    python tools/mutate.py --list                        # the faults that would be planted
    python tools/mutate.py --layer python                # the drawn faults of one layer
    python tools/mutate.py --only python/rl_kernel_native/ops/pack.py:41:bound
    python tools/mutate.py --switches --workers 8 --jobs 8   # one build for all faults, another for each survivor
    python tools/mutate.py --table       # what the record has decided
    python tools/mutate.py --again       # plants the survivors anew, after tests were added
    python tools/mutate.py --save        # writes the verdicts of this machine into tools/mutants.json

Faults are drawn by a rule: every file and every kind of fault in turn, at a place that a hash of the seed and the line
picks. A change of one file therefore leaves the faults of all other files unchanged. With the first seed, the tool
draws faults that the record has already decided before other faults, because hashes of paths change when a file moves.
The work happens in a copy of the tree, ``build/mutate``. The extension and the C++ tests concerned are built there
incrementally; a fault in Python needs no build. A fault that does not compile is drawn again. The tool also redraws a
fault that neither changes the object code nor fails a C++ test of its header. Either the compiler shows that such a
fault changes nothing, or the fault lies in device code. A test that does not end counts as having noticed the fault.
mutate_tables.EQUIVALENT lists faults that change nothing observable, with the reason; these count neither way.

This process imports torch once and forks for each file of tests; the fork imports the package with the fault. A test
that fails or does not end is run without the fault, too.

With --build, a machine with a compiler builds all faults of C++ at once, each behind a switch, in
``build/mutate_switched``. With --built, a machine without a compiler judges faults by files of that folder:
switches.json, the extension, and those C++ tests that were copied. A fault that survives such tests stays undecided
until it is built alone.

The record is tools/mutants.json, which is committed, and after it the lines of build/mutants.jsonl. A run judges only
what both lack. A line is a verdict, or a file of tests that passed with a fault, so a stopped run repeats little.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mutate_faults import cpp_faults, python_faults
from mutate_switches import BuiltSwitches, Switches
from mutate_tables import ANY, EQUIVALENT, OF_FOLDER, OF_STEM, SHARED, UNDECIDED
from mutate_workers import in_parallel, locked

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "python/rl_kernel_native"
COMMITTED = ROOT / "tools" / "mutants.json"
# Files of each layer. Headers of contracts are left out, since a pure declaration of shapes and types has no place for
# a fault.
LAYERS = {
    "python": [f"{PACKAGE}/ops/*.py", f"{PACKAGE}/_*.py"],
    "bindings": ["bindings/*.cpp", "bindings/*.h"],
    "kernels": [
        "cpu/*.cpp",
        "cpu/*.h",
        "cpu/tokens/*.h",
        "kernels/*/*.h",
        "cpp/include/rlk/elementwise/*.h",
        "cpp/include/rlk/math/*.h",
    ],
}
COPIED = (
    "bindings", "cpp", "cpu", "cuda", "hip", "kernels", "python", "tests",
    "cmake", "bench", "tools", "examples", "docs",
)  # fmt: skip
LEFT_OUT = {"_trace.py", "_types.py", "_machine.py", "_variants.py", "_blas.py", "__init__.py", "module.cpp"}
FIRST: list[str] = []  # tests that --first names
COUNT = {"python": 76, "bindings": 34, "kernels": 64}

# Compiled calls run the same formulas, so their tests are left out for a file that is not part of the way to torch.
OF_TORCH = re.compile(r"python/rl_kernel_native/(_\w+|ops/\w+_(torch|traced|composed|autograd))\.py")

NO_BUILD, SAME_CODE, EQUAL = "does not compile", "same object code", "equivalent"
TEST_LIMIT_S = 120  # limit of a test, which normally takes seconds
FILE_LIMIT_S = 900
ENDLESS = 1000  # in place of an exit status
PYTEST = [
    *("-q", "--tb=no", "-pno:cacheprovider", "-pno:xdist", "-m", "not gpu and not slow and not alone", "--timeout=0"),
    *("-o", f"faulthandler_timeout={TEST_LIMIT_S}", "-o", "faulthandler_exit_on_timeout=true"),
]


class Fault(NamedTuple):
    layer: str
    path: str
    line: int
    kind: str
    begin: int  # place of the replaced text in the file
    end: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.kind}"


def read_by_the_cpu() -> set[Path]:
    """Files that the CPU's extension is compiled from. Tests on GPUs cover the headers that only GPU code includes."""
    return compiled_with([p for folder in ("cpu", "cpp/ops", "bindings") for p in (ROOT / folder).glob("*.cpp")])


def compiled_with(left: list[Path]) -> set[Path]:
    """The given files, and the headers that they include."""
    found = set(left)
    while left:
        path = left.pop()
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.M):
            for folder in (path.parent, ROOT, ROOT / "cpp" / "include"):
                header = (folder / name).resolve()
                if header.is_file() and header not in found:
                    found.add(header)
                    left.append(header)
    return found


@functools.cache
def faults_of(layer: str) -> list[Fault]:
    found = []
    paths = sorted({p for pattern in LAYERS[layer] for p in ROOT.glob(pattern)})
    compiled = read_by_the_cpu()
    for path in paths:
        if path.name in LEFT_OUT or (path.suffix == ".h" and path not in compiled):
            continue
        source, name = path.read_text(), str(path.relative_to(ROOT))
        of_file = python_faults(source) if path.suffix == ".py" else cpp_faults(source)
        for kind, begin, end, text in of_file:
            found.append(Fault(layer, name, source.count("\n", 0, begin) + 1, kind, begin, end, text))
    return found


@functools.cache
def decided() -> set[tuple[str, str]]:
    """What the committed record and the table of equivalents say, apart from faults that were drawn again."""
    entries = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else []
    no_code = NO_BUILD, SAME_CODE
    return {(entry["path"], entry["planted"]) for entry in entries if entry["by"] not in no_code} | set(EQUIVALENT)


def drawn(layer: str, count: int, seed: int, of: str = "*") -> list[Fault]:
    """Takes files in turn, and from each file a kind of fault that it has not given yet. Hashes order them, so a run
    that was stopped has judged a sample."""

    def place(*of_draw: str) -> str:
        return hashlib.sha256(" ".join((str(seed), *of_draw)).encode()).hexdigest()

    files: dict[str, dict[str, list[Fault]]] = {}
    for fault in faults_of(layer):
        if fnmatch.fnmatch(fault.path, of):
            files.setdefault(fault.path, {}).setdefault(fault.kind, []).append(fault)
    ranked = []
    for path, kinds in files.items():
        known = {fault for of_kind in kinds.values() for fault in of_kind if seed == 1 and key_of(fault) in decided()}
        turns = []
        for kind, faults in kinds.items():
            faults.sort(key=lambda f: place(f.path, f.kind, planted_line(f)))
            turns += [(fault not in known, turn, place(path, kind), fault) for turn, fault in enumerate(faults)]
        ranked += [(new, rank, place(path), fault) for rank, (new, *_, fault) in enumerate(sorted(turns))]
    chosen: dict[tuple[str, int], Fault] = {}
    for *_, fault in sorted(ranked):
        if len(chosen) < count:
            chosen.setdefault((fault.path, fault.line), fault)
    return list(chosen.values())


def redrawn(fault: Fault, used: set[str]) -> Fault | None:
    """Another fault of the same file, and if possible of the same kind."""
    left = [f for f in faults_of(fault.layer) if f.path == fault.path and f.name not in used]
    left.sort(key=lambda f: (f.kind != fault.kind, abs(f.line - fault.line)))
    return left[0] if left else None


def tests_of(fault: Fault) -> tuple[list[str], list[str], list[str]]:
    """The operator's own tests, its C++ tests, and the tests of shared files and of all operators."""
    stem = Path(fault.path).stem.lstrip("_")
    for suffix in ("_torch", "_traced", "_composed", "_autograd", "_backward", "_kernels", "_fill", "_lists"):
        stem = stem.removesuffix(suffix)
    stem = {"policy_spec": "policy_loss", "preference_kinds": "preference_loss"}.get(stem, stem)
    parts = [stem]
    files = {p.stem: str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py")}
    of_python = fault.path.endswith(".py")
    own = sorted(name for name in files if name.startswith(f"test_{stem}") and (of_python or f"test_{stem}" in files))
    shared = SHARED.get(Path(fault.path).stem, [])
    if not own and not of_python:
        operators = [p.stem for p in (ROOT / "cpp/include/rlk/ops").glob("*.h") if stem.startswith(p.stem)]
        longest = [max(operators, key=len)] if operators else []
        of_folder = OF_FOLDER.get(str(Path(fault.path).parent), [])
        parts = longest or next((OF_STEM[k] for k in sorted(OF_STEM, key=len)[::-1] if stem.startswith(k)), of_folder)
        own = sorted(name for part in parts for name in files if name.startswith(f"test_{part}"))
    compiled: set[str] = set()
    if not fault.path.startswith((PACKAGE, "bindings")):  # C++ tests contain neither
        compiled = {p.stem for part in (*parts, stem) for p in (ROOT / "tests/cpp").glob(f"test_{part}*.cpp")}
        includes = f'{"/".join(Path(fault.path).parts[-2:])}"'
        compiled |= {p.stem for p in (ROOT / "tests/cpp").glob("test_*.cpp") if includes in p.read_text()}
        compiled.add("test_preconditions")
    first = [f"test_{part}" for part in parts]
    own.sort(key=lambda name: (name.endswith("_fuzz"), name not in first, not name.endswith("_bad_input")))
    described = ["test_engine", "test_words", "test_frameworks"] if fault.path.startswith(PACKAGE) else []
    described += ["test_contract"] if f"{PACKAGE}/ops" in fault.path else []
    others = [name for name in dict.fromkeys([*shared, *ANY, *described]) if name not in own]
    of_fault = [*FIRST, *(files[name] for name in own)]
    return of_fault, [files[name] for name in others if name in files], sorted(compiled)


@functools.cache
def lacking() -> list[str]:
    """The instruction sets of the build that this CPU lacks."""
    listed = Path("/proc/cpuinfo")
    flags = listed.read_text().split() if listed.exists() else ["avx2", "avx512f"]
    return [isa for isa, flag in (("avx2", "avx2"), ("avx512", "avx512f")) if flag not in flags]


class Copy:
    """A copy of the tree in build/mutate, in which faults are planted."""

    way = "alone"
    done: Container[str] = ()  # files of tests that passed with the present fault, and how they were run
    note: Callable[[str], None] = staticmethod(lambda run: None)  # told of each further file

    def __init__(self, jobs: int, of: str = "") -> None:
        self.root, self.jobs = ROOT / "build" / f"mutate{of}", jobs
        self.of_tree: dict[str, bytes] = {}
        self.said = ""  # by the last build
        self.failing: list[str] = []  # tests that fail without a fault
        self.tree = ROOT / "build" / f"mutate_tree{of}"  # the Python files without a fault
        self.root.mkdir(parents=True, exist_ok=True)
        for name in COPIED:
            self.copy(ROOT / name)
        for path in ROOT.glob("*.*"):
            if path.is_file():
                self.refresh(path)

    def copy(self, folder: Path) -> None:
        """Files that have left the tree leave the copy, since a build takes all files of a folder."""
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                self.refresh(path)
        for path in (self.root / folder.relative_to(ROOT)).rglob("*.*"):
            if path.is_file() and not path.match("_C*.so") and not (ROOT / path.relative_to(self.root)).exists():
                path.unlink()

    def refresh(self, path: Path) -> None:
        """Unchanged files keep their time stamps, so that a build is incremental."""
        to, content = self.root / path.relative_to(ROOT), self.content(path)
        if to.exists() and to.read_bytes() == content:
            return
        to.parent.mkdir(parents=True, exist_ok=True)
        to.unlink(missing_ok=True)
        to.write_bytes(content)

    def content(self, path: Path) -> bytes:
        return path.read_bytes()

    def build(self, *targets: str) -> bool:
        """Whether the targets compile. The extension lies next to the copy's Python files."""
        commands = [["cmake", "--build", "build/cpu", "--parallel", str(self.jobs), "--target", *targets]]
        if not (self.root / "build" / "cpu" / "build.ninja").exists():
            options = ["-DRLK_BUILD_PYTHON=ON", "-DRLK_BUILD_BENCH=OFF", "-Wno-dev"]
            commands.insert(0, ["cmake", "--preset", "cpu", *options, f"-DPython_EXECUTABLE={sys.executable}"])
        for command in commands:
            done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
            self.said = done.stdout + done.stderr
            if done.returncode:
                return False
        for made in (self.root / "build" / "cpu").glob("_C*.so"):
            to = self.root / PACKAGE / made.name
            to.unlink(missing_ok=True)
            shutil.copyfile(made, to)
        return True

    def code(self) -> dict[str, bytes]:
        """The code of each object file of the extension."""
        built = self.root / "build" / "cpu" / "CMakeFiles"
        objects = [p for of in built.glob("*.dir") if not of.name.startswith("test_") for p in of.rglob("*.o")]
        return {str(p): hashlib.sha256(p.read_bytes()).digest() for p in objects}

    def forked(self, package: Path, options: list[str], limit_s: float) -> tuple[int, str]:
        """Pytest's exit status and output. A fork of this process has torch, but not yet the package."""
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if not child:
                os.setsid()
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
                os.chdir(self.root)
                others = os.environ.get("PYTHONPATH", "")
                os.environ |= {"PYTHONPATH": f"{package}:{others}", "PYTHONDONTWRITEBYTECODE": "1"}
                sys.path.insert(0, str(package))
                sys.dont_write_bytecode = package != self.tree
                import pytest

                code = pytest.main([*PYTEST, *options])
                sys.stdout.flush()
                os._exit(code)
            ends = time.monotonic() + limit_s
            while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < ends:
                time.sleep(0.02)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # with what its tests started
            if not done[0]:
                os.waitpid(child, 0)
            output.seek(0)
            return (os.waitstatus_to_exitcode(done[1]) if done[0] else ENDLESS), output.read()

    def python_notices(self, tests: list[str], chosen: str = "not compile") -> str:
        """The test that fails, or "" if all tests pass. Each file has its own fork, so the first one starts at once."""
        for test in tests:
            file = self.root / test.partition("::")[0]
            content = file.read_bytes() if file.exists() else b""
            run = f"{self.way}: {test} -k '{chosen}' {hashlib.sha256(content).hexdigest()[:8]}"
            while run not in self.done and f"--deselect={test}" not in self.failing:
                options = ["-x", "-k", chosen, test, *self.failing]
                code, output = self.forked(self.root / "python", options, FILE_LIMIT_S)
                if code in (0, 5):  # 5: pytest found no test
                    self.note(run)
                    break
                failed = re.search(r"^(?:FAILED|ERROR) ([^\s[]+(?:\[.*?\](?= - |$))?)", output, re.M)
                name = failed[1] if failed else test  # a crash, or a test without an end: any of the file
                again = ["-k", chosen, name.partition("[")[0], *self.failing]
                if code != ENDLESS and self.forked(self.tree, again, FILE_LIMIT_S)[0] == 0:
                    return name if failed else f"{test}, which ends with {code}"
                if not failed or f"--deselect={name}" in self.failing:
                    return f"{UNDECIDED}: {test} does not end without the fault either"
                self.failing.append(f"--deselect={name}")
        return ""

    def compiled_notice(self, tests: list[str]) -> str:
        """The same for C++ tests. A test that does not compile has noticed the fault, since static_asserts check
        constants."""
        for name in tests:
            if not self.build(name):
                return f"the compiler, in {name}"
            command = [f"build/cpu/{name}", "--gtest_brief=1", "--gtest_fail_fast"]
            try:
                done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, timeout=2 * TEST_LIMIT_S)
            except subprocess.TimeoutExpired:
                return f"{name}, without an end in {2 * TEST_LIMIT_S} s"
            if done.returncode:
                failed = re.search(r"^\[  FAILED  \] (\S+)", done.stdout, re.M)
                return f"{name}: {failed[1].rstrip(',') if failed else done.returncode}"
        return ""

    def compiled_from(self, path: str) -> list[Path]:
        """The object files compiled from a file, as the build has recorded it; without those that no test can run here,
        since this CPU lacks their instructions."""
        command = ["cmake", "--build", "build/cpu", "--", "-t", "deps"]
        recorded = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True).stdout
        found = []
        for of_object in recorded.split("\n\n"):
            name, *read = of_object.split("\n")
            name = name.partition(": #deps")[0]
            if any(line.endswith(f"/{path}") for line in read) and not any(f"_{isa}.dir/" in name for isa in lacking()):
                found.append(self.root / "build" / "cpu" / name)
        return found

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The file keeps its time stamp and the objects compiled from it are put aside. So the build compiles only
        these objects, and nothing once they are back."""
        path = self.root / fault.path
        whole, stamp = path.read_text(), path.stat()

        def write(text: str) -> None:
            path.write_text(text)
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))

        objects = [] if fault.layer == "python" else self.compiled_from(fault.path)
        aside = {made: made.with_suffix(".whole") for made in objects if made.exists()}
        write(whole[: fault.begin] + fault.text + whole[fault.end :])
        for made, kept in aside.items():
            made.rename(kept)
        try:
            yield
        finally:
            write(whole)
            if fault.layer != "python":
                built = self.root / "build" / "cpu"
                for made in (*self.compiled_from(fault.path), *built.glob("*.a"), *built.glob("_C*.so")):
                    made.unlink(missing_ok=True)
                for made, kept in aside.items():
                    kept.rename(made)

    def is_same_code(self) -> bool:
        return all(self.of_tree.get(name) == code for name, code in self.code().items())

    def plant(self, fault: Fault) -> str:
        own, others, compiled = tests_of(fault)
        with locked(self.root / "planted"), self.planted(fault):
            if fault.layer == "python":
                by = self.python_notices(own) or self.python_notices(others)
                if OF_TORCH.fullmatch(fault.path):  # they take the longest
                    by = by or self.python_notices([*own, *others], "compile")
                return by
            if not self.build("rlk_core") or (fault.layer == "bindings" and not self.build("_C")):
                return NO_BUILD
            if self.is_same_code():
                if not self.build("_C"):
                    return NO_BUILD
                if self.is_same_code():  # but C++ tests may contain the code
                    tests = {name: ROOT / "tests/cpp" / f"{name}.cpp" for name in compiled}
                    reading = [name for name, of in tests.items() if ROOT / fault.path in compiled_with([of])]
                    return self.compiled_notice(reading) or SAME_CODE
            first = fault.path.endswith(".cpp") and fault.layer == "kernels"  # C++ tests are then only linked
            by = self.compiled_notice(compiled) if first else ""
            if by:
                return by
            if not self.build("_C"):
                return NO_BUILD
            by = self.python_notices(own) or ("" if first else self.compiled_notice(compiled))
            return by or self.python_notices(others)


class Switched(Switches, Copy):
    """A copy that holds many faults."""


class Built(BuiltSwitches, Switched):
    """A copy that holds the faults of an earlier build."""


def planted_line(fault: Fault) -> str:
    source = (ROOT / fault.path).read_text()
    begin, end = source.rfind("\n", 0, fault.begin) + 1, source.find("\n", fault.end)
    return (source[begin : fault.begin] + fault.text + source[fault.end : end]).strip()


def key_of(fault: Fault) -> tuple[str, str]:
    """The record and the table of equivalents know a fault by its file and its line with the fault. A removed call or
    condition leaves no line of its own, so the original text stands for it."""
    source = (ROOT / fault.path).read_text()
    gone = source[fault.begin : fault.end].splitlines()[0]
    if fault.kind in ("call", "branch"):
        return fault.path, f"without {gone}"
    return fault.path, planted_line(fault)


def shown(fault: Fault) -> str:
    source = (ROOT / fault.path).read_text()
    line = source.split("\n")[fault.line - 1].strip()
    return f"{line}   [{source[fault.begin : fault.end]} -> {fault.text or 'nothing'}]"


def commit() -> str:
    """The commit of the tree, or "" outside a repository or without git."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


class Record:
    """Verdicts, one a line of JSON: the committed verdicts, then the later verdicts of this machine. A fault is known
    by its file and its line with the fault, so it outlives other changes."""

    def __init__(self, path: Path, committed: Path = COMMITTED, at: str = "") -> None:
        self.path, self.at = path, at
        self.of: dict[tuple[str, str], dict[str, Any]] = {}
        self.passed: dict[tuple[str, str], set[str]] = {}
        entries = json.loads(committed.read_text()) if committed.exists() else []
        for entry in [*entries, *map(json.loads, path.read_text().splitlines() if path.exists() else ())]:
            key = entry["path"], entry["planted"]
            if "passed" in entry:
                self.passed.setdefault(key, set()).add(entry["passed"])
            else:
                self.of[key] = entry
                if not entry["by"].startswith(UNDECIDED):
                    self.passed.pop(key, None)

    def known(self, fault: Fault, again: bool) -> str | None:
        entry = self.of.get(key_of(fault))
        if entry is None or entry["by"].startswith(UNDECIDED) or (again and not entry["by"]):
            return None
        named = re.match(r"(tests/[\w/]+\.py)|(?:the compiler, in )?(test_\w+)", entry["by"])
        if named and not (ROOT / (named[1] or f"tests/cpp/{named[2]}.cpp")).exists():
            return None  # the tests that noticed are gone
        return entry["by"]

    def add(self, fault: Fault, by: str, seconds: float) -> None:
        key = key_of(fault)
        self.of[key] = {"path": key[0], "planted": key[1], "by": by, "at": self.at}
        self.append(self.of[key] | {"seconds": round(seconds, 1)})

    def add_passed(self, fault: Fault, run: str) -> None:
        path, planted = key_of(fault)
        self.append({"path": path, "planted": planted, "passed": run})

    def append(self, entry: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def save(self, faults: list[Fault], committed: Path) -> None:
        """Commits the verdicts on the faults, a line each."""
        kept = {key_of(fault): self.of[key_of(fault)] for fault in faults if self.known(fault, False) is not None}
        names = "path", "planted", "by", "at"
        lines = [json.dumps({name: entry[name] for name in names}) for _, entry in sorted(kept.items())]
        committed.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def judged(
    faults: list[Fault], record: Record, copy: Copy | None, again: bool, switches: Switched | None = None
) -> Iterator[tuple[Fault, str | None]]:
    """Each fault, and those drawn in place of others, with who notices it. Without a copy: None for faults that the
    record lacks. A fault that survives behind a switch is planted alone."""
    used = {fault.name for fault in faults}
    left = faults[::-1]
    while left:
        fault = left.pop()
        if key_of(fault) in EQUIVALENT:
            yield fault, EQUAL
            continue
        by = record.known(fault, again)
        if by is None and copy:
            began = time.monotonic()
            for planter in (copy, switches) if switches else (copy,):
                planter.done = record.passed.get(key_of(fault), ())
                planter.note = functools.partial(record.add_passed, fault)
            by = (switches.plant(fault) if switches and fault in switches.numbers else "") or copy.plant(fault)
            record.add(fault, by, time.monotonic() - began)
            is_noticed = by not in (NO_BUILD, SAME_CODE) and not by.startswith(UNDECIDED)
            found = (f"noticed by {by}" if is_noticed else by) if by else "SURVIVES"
            print(f"{time.monotonic() - began:6.1f} s  {fault.name} {found}", flush=True)
        yield fault, by
        if by in (NO_BUILD, SAME_CODE) and (another := redrawn(fault, used)):
            used.add(another.name)
            left.append(another)


def build_switches(faults: list[Fault], record: Record, arguments: argparse.Namespace) -> Switched | None:
    """A copy that holds the faults of C++ without a verdict, if there are any."""
    new = [f for f in faults if f.layer != "python" and key_of(f) not in EQUIVALENT]
    new = [f for f in new if record.known(f, arguments.again) is None]
    switches = Switched(arguments.jobs, "_switched", new, tests_of) if new else None
    if switches and not switches.build_all():
        print(switches.said)
        raise SystemExit(2)
    return switches


def judge(faults: list[Fault], arguments: argparse.Namespace) -> bool:
    """Judges faults in forks of this process, all faults of a file in one fork. False if the tree does not build."""
    record = Record(arguments.record, at=arguments.at)
    switches: Switched | None = None
    alone = Built(faults, tests_of) if arguments.built else Copy(arguments.jobs)
    if not alone.build("_C"):
        print(f"the tree itself does not build:\n{alone.said}")
        return False
    shutil.copytree(alone.root / "python", alone.tree, dirs_exist_ok=True)
    for name in ("torch", "torch._dynamo", "hypothesis", "pytest"):
        importlib.import_module(name)
    failing = alone.root / "failing.txt"
    failing.unlink(missing_ok=True)

    def judge_file(of_file: list[Fault], worker: int) -> None:
        copy = alone
        if of_file[0].layer == "python":
            copy = Copy(1, f"_{worker}")
            copy.tree = alone.tree
            for made in (alone.root / PACKAGE).glob("_C*.so"):
                shutil.copyfile(made, copy.root / PACKAGE / made.name)
        known = failing.read_text().splitlines() if failing.exists() else []
        for planter in (copy, switches) if switches else (copy,):
            planter.failing = list(known)
        for _ in judged(of_file, record, copy, arguments.again, switches):
            found = {*copy.failing, *(switches.failing if switches else ())} - set(known)
            known += found
            with failing.open("a") as file:
                file.writelines(f"{name}\n" for name in found)

    def of_files(chosen: list[Fault]) -> Iterator[Callable[[int], None]]:
        works: dict[str, list[Fault]] = {}
        for fault in chosen:
            works.setdefault(fault.name if arguments.built else fault.path, []).append(fault)
        yield from (functools.partial(judge_file, of_file) for of_file in works.values())

    def works() -> Iterator[Callable[[int], None]]:
        nonlocal switches
        yield from of_files([fault for fault in faults if fault.layer == "python"])
        compiled = [fault for fault in faults if fault.layer != "python"]
        if compiled:
            alone.of_tree = alone.code()
        if arguments.switches:  # other workers go on meanwhile
            switches = build_switches(compiled, record, arguments)
        yield from of_files(compiled)

    in_parallel(works(), arguments.workers)
    return True


def table(found: list[tuple[Fault, str | None]]) -> str:
    """The verdicts on the faults as a table in Markdown, and the faults that survived."""
    columns = "layer", "drawn", "no code of its own", "equivalent", "undecided", "noticed", "survive"
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for layer in LAYERS:
        by = [by for fault, by in found if fault.layer == layer]
        none, equal = sum(x in (NO_BUILD, SAME_CODE) for x in by), by.count(EQUAL)
        undecided = sum(x is None or x.startswith(UNDECIDED) for x in by)
        noticed = len(by) - none - equal - undecided - by.count("")
        share = f" ({100 * noticed / (noticed + by.count('')):.1f} %)" if noticed else ""
        rows.append(f"| {layer} | {len(by)} | {none} | {equal} | {undecided} | {noticed}{share} | {by.count('')} |")
    return "\n".join([*rows, "", *(f"{fault.name}   {shown(fault)}" for fault, by in found if by == "")])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=LAYERS, action="append", help="one or more; all by default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, help="faults of each layer")
    parser.add_argument("--files", default="*", help="a pattern of the paths to draw from")
    parser.add_argument("--only", action="append", help="the name of a fault, as --list prints it; or part of one")
    parser.add_argument("--first", action="append", default=[], help="a Python test to run before others, or its file")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true", help="print what the record has, and plant nothing")
    parser.add_argument("--again", action="store_true", help="plant the record's survivors again")
    parser.add_argument("--record", type=Path, default=ROOT / "build" / "mutants.jsonl")
    parser.add_argument("--switches", action="store_true", help="build the C++ faults together, each behind a switch")
    parser.add_argument("--build", action="store_true", help="build the C++ faults behind switches; judge none")
    parser.add_argument("--built", action="store_true", help="judge by what --build has left, without a compiler")
    parser.add_argument("--workers", type=int, default=1, help="how many faults are judged at once")
    parser.add_argument("--save", action="store_true", help="commit the record to tools/mutants.json; plant nothing")
    parser.add_argument("--at", default=commit(), help="the commit that new verdicts name; by default HEAD")
    parser.add_argument("--jobs", type=int, default=1, help="of the compiler at once")
    arguments = parser.parse_args()
    FIRST[:] = arguments.first
    layers = arguments.layer or list(LAYERS)
    faults = [
        f for layer in layers for f in drawn(layer, arguments.count or COUNT[layer], arguments.seed, arguments.files)
    ]
    if arguments.only:
        everything = [f for layer in layers for f in faults_of(layer)]
        faults = [f for f in everything if any(part in f.name for part in arguments.only)]
    if arguments.list:
        for fault in faults:
            print(fault.name, "  ", shown(fault))
        print(
            f"{len(faults)} faults: {dict(Counter(f.layer for f in faults))}, {dict(Counter(f.kind for f in faults))}"
        )
        return 0
    arguments.record.parent.mkdir(parents=True, exist_ok=True)
    if arguments.build:
        build_switches(faults, Record(arguments.record), arguments)
        return 0
    if not (arguments.table or arguments.save) and not judge(faults, arguments):
        return 2
    record = Record(arguments.record)
    found = list(judged(faults, record, None, False))
    if arguments.save:
        record.save([fault for layer in LAYERS for fault in faults_of(layer)], COMMITTED)
    print(table(found))
    return int(sum(by == "" for _, by in found) > 0.05 * sum(bool(by) or by == "" for _, by in found))


if __name__ == "__main__":
    sys.exit(main())
