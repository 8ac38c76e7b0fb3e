"""Runs every GPU test and writes tests/gpu_log.json: `python tests/run_gpu.py` on a machine with a GPU.

--ctest-dir DIR   a build with CUDA, whose ctest tests of label gpu (or gpu_* binaries) run, too
--fuzz N          N fuzz cases in place of 2,000; with 20,000 also the 200 at full vocabularies
--workers N       N processes at a time that share the cores (pytest-xdist); tests marked `alone` follow singly
anything else     goes to pytest (a run with a selection says so in the log)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu_log import LOG, ROOT, tree_hashes

SKIPPED_EXIT = 77  # exit status of a C++ test without a device to run on
NONE_COLLECTED = 5  # pytest's exit status if it finds no test


def gpu() -> dict[str, str]:
    """Name and driver, from the driver's own tool or else from torch."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        first = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        name, driver = (x.strip() for x in first.split(",", 1))
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        name, driver = "", ""
    import torch

    return {
        "gpu": name or (torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"),
        "driver": driver or "unknown",
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
    }


def versions() -> dict[str, Any]:
    import numpy

    import rl_kernel_native

    return {
        "python": sys.version.split()[0],
        "numpy": numpy.__version__,
        "rl_kernel_native": f"{rl_kernel_native.__version__} ({rl_kernel_native.variant})",
    }


def run_pytest(
    selected: str, arguments: list[str], environment: dict[str, str], may_be_empty: bool = False
) -> tuple[dict[str, int], list[str], list[str]]:
    """(counts, failures, reasons of skips) of `pytest -m selected`. Finding no test is a failure unless allowed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", selected, "-q", "--durations=30", f"--junit-xml={report}"]
        command += ["-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment)
        if not report.is_file():
            return {"passed": 0, "failed": 1, "skipped": 0}, [f"pytest ended with status {done.returncode}"], []
        cases = list(ElementTree.parse(report).iter("testcase"))
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures, skips = [], set()
    for case in cases:
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skip = case.find("skipped")
        if bad is not None:
            counts["failed"] += 1
            first_line = (bad.get("message") or "").strip().split("\n")[0]
            failures.append(f"{case.get('classname')}::{case.get('name')}: {first_line[:300]}")
        elif skip is not None:
            counts["skipped"] += 1
            skips.add(skip.get("message") or "")
        else:
            counts["passed"] += 1
    is_empty = may_be_empty and done.returncode == NONE_COLLECTED
    if (done.returncode not in (0, 1) or not cases) and not is_empty:
        counts["failed"] += 1
        failures.append(f"pytest ended with status {done.returncode} after {len(cases)} tests")
    return counts, failures, sorted(skips)


def sharing_cores(environment: dict[str, str], processes: int) -> dict[str, str]:
    """Divides the cores among the processes, so that no thread waits for another process's threads."""
    cores = len(os.sched_getaffinity(0))
    return {**environment, "OMP_NUM_THREADS": str(max(1, cores // processes))}


def files_with(mark: str) -> list[str]:
    """Test files that contain a mark, since pytest takes half a minute to collect all files."""
    return [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if mark in path.read_text()]


def run_tests(
    workers: int, arguments: list[str], environment: dict[str, str], programs: Future[Any] | None
) -> tuple[dict[str, int], list[str], list[str]]:
    """Like :func:`run_pytest`, for all GPU tests. Tests that measure time run after the parallel tests."""
    of_selection = bool(arguments)  # a selection may have tests of only one kind
    processes = ["-n", str(workers), "--dist", "loadgroup"] if workers > 1 else []
    shared = sharing_cores(environment, workers) if processes else environment
    many = run_pytest("gpu and not alone", [*processes, *arguments], shared, of_selection)
    if programs:
        wait([programs])
    alone = run_pytest("gpu and alone", arguments or files_with("pytest.mark.alone"), environment, of_selection)
    return {k: many[0][k] + alone[0][k] for k in many[0]}, many[1] + alone[1], sorted({*many[2], *alone[2]})


def run_binaries(folder: Path) -> tuple[dict[str, int], list[str]]:
    """The C++ GPU tests of a build: through ctest if ctest knows them, otherwise the gpu_* programs themselves."""
    counts, failures = {"passed": 0, "failed": 0, "skipped": 0}, []
    tests: dict[str, list[str]] = {}
    if (folder / "CTestTestfile.cmake").is_file() and shutil.which("ctest"):
        listed = subprocess.run(["ctest", "-N", "-L", "gpu"], cwd=folder, capture_output=True, text=True).stdout
        for name in re.findall(r"Test +#\d+: (\S+)", listed):
            tests[name] = ["ctest", "-R", f"^{re.escape(name)}$", "--output-on-failure", "--timeout", "300"]
    if not tests:
        for program in sorted(folder.glob("gpu_*")):
            if program.is_file() and os.access(program, os.X_OK):
                tests[program.name] = [str(program)]
    if not tests:
        counts["failed"] += 1
        failures.append(f"{folder.name}: no GPU test found; build with CUDA and RLK_BUILD_TESTS=ON")

    def run(command: list[str]) -> tuple[int, str, float]:
        start = time.time()
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        except subprocess.TimeoutExpired:
            return -1, "timeout", time.time() - start
        return done.returncode, done.stdout + done.stderr, time.time() - start

    results = [run(command) for command in tests.values()]
    for (name, command), (status, text, seconds) in zip(tests.items(), results, strict=True):
        skipped = status == SKIPPED_EXIT or (command[0] == "ctest" and "(Skipped)" in text)
        outcome = "skipped" if skipped else "passed" if status == 0 else "failed"
        counts[outcome] += 1
        print(f"{name}: {outcome} after {seconds:.1f} s")
        if outcome == "failed":
            failures.append(f"{name}: status {status}: {text.strip()[-500:]}")
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctest-dir", type=Path)
    parser.add_argument("--fuzz", type=int)
    parser.add_argument("--workers", type=int, default=1)
    options, rest = parser.parse_known_args()
    if options.workers > 1 and importlib.util.find_spec("xdist") is None:
        parser.error(f"--workers: got {options.workers}, but pytest-xdist is not installed: pip install pytest-xdist")
    environment = dict(os.environ)
    python_path = environment.get("PYTHONPATH", "")
    source_tree = str(ROOT / "python")
    if any((ROOT / "python" / "rl_kernel_native").glob("_C*.so")) and source_tree not in python_path.split(os.pathsep):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [python_path, source_tree]))
        sys.path.append(source_tree)
    if options.fuzz:
        environment["RLK_FUZZ_CASES"] = str(options.fuzz)
        if options.fuzz >= 20_000:
            environment["RLK_FUZZ_FULL"] = "1"
    trees = tree_hashes()  # hashed before the run, because the run does not include later changes
    start = time.time()
    with ThreadPoolExecutor(1) as pool:  # the C++ programs run beside the tests, one at a time
        programs = pool.submit(run_binaries, options.ctest_dir.resolve()) if options.ctest_dir else None
        counts, failures, skips = run_tests(options.workers, rest, environment, programs)
        if not any(counts.values()):
            counts["failed"] += 1
            failures.append("no GPU test was collected")
        if programs:
            more, bad = programs.result()
            counts = {k: counts[k] + more[k] for k in counts}
            failures += bad
    shown = ["tests/run_gpu.py", *(f"--fuzz {options.fuzz}" for _ in [0] if options.fuzz)]
    shown += [f"--workers {options.workers}"] if options.workers > 1 else []
    shown += ["--ctest-dir ..."] if options.ctest_dir else []
    record = {
        **gpu(),
        **versions(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python", *shown, *rest]),
        "selection": rest,
        "seconds": round(time.time() - start),
        "fuzz_cases": int(environment.get("RLK_FUZZ_CASES", "2000")),
        "counts": counts,
        "failures": failures,
        "skip_reasons": skips,
        "trees": trees,
    }
    if record["gpu"] == "none" or (counts["passed"] == 0 and not failures):
        print("nothing ran here; tests/gpu_log.json is left as it was:", "; ".join([*skips, *failures]))
        return 1
    LOG.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\n{record['gpu']}, driver {record['driver']}, CUDA {record['cuda']}, torch {record['torch']}")
    print(", ".join(f"{n} {name}" for name, n in counts.items()), f"in {record['seconds']} s; wrote tests/gpu_log.json")
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
