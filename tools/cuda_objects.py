#!/usr/bin/env python3
"""Records which objects of CUDA builds compile without spills, and names those whose sources changed since.

    python tools/cuda_objects.py record [BUILD]    compiles what changed, then writes cmake/cuda_objects.json
    python tools/cuda_objects.py changed [BUILD]   prints the ninja targets that the record does not cover
    python tools/cuda_objects.py missing [BUILD]   says which objects BUILD lacks, and when they compiled

A build folder (by default ``build/cuda``) is configured with ``cmake --preset cuda``. An object is recorded as a hash
of its command line and of every project file that it includes, without their comments. ``scripts/test.sh cuda``
compiles the changed objects first, and all others as long as its time lasts.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from gpu_log import contents  # noqa: E402 - the tests' folder is no package

RECORD = ROOT / "cmake" / "cuda_objects.json"
# Their files are a CUDA build's own, but for bench/math_error.cpp.
FOLDERS = ("cuda", "tests/gpu", "bench")
INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def objects(build: Path, root: Path) -> dict[str, dict[str, str]]:
    """The compile commands of a CUDA build's own objects, by ninja target."""
    commands = json.loads((build / "compile_commands.json").read_text())
    places = (*(root / folder for folder in FOLDERS), build)
    own = (entry for entry in commands if any(Path(entry["file"]).is_relative_to(place) for place in places))
    return {Path(entry["output"]).relative_to(build).as_posix(): entry for entry in own}


def included(source: Path, folders: tuple[Path, ...]) -> set[Path]:
    """The files of the project that a source includes, itself among them, on any branch of the preprocessor."""
    found: set[Path] = set()
    left = [source]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += includes_of(path, folders)
    return found


@cache
def includes_of(path: Path, folders: tuple[Path, ...]) -> list[Path]:
    names = [name.decode() for name in INCLUDE.findall(path.read_bytes())]
    places = [[(folder / name).resolve() for folder in (path.parent, *folders)] for name in names]
    return [found[0] for candidates in places if (found := [p for p in candidates if p.is_file()])]


@cache
def digest_of(path: Path) -> str:
    return hashlib.sha256(contents(path)).hexdigest()


def hash_of(entry: dict[str, str], build: Path, root: Path) -> str:
    """The hash of an object's command line and sources. Checkouts in other places have the same hash."""

    def portable(text: str) -> str:
        return text.replace(str(build), "BUILD").replace(str(root), "ROOT")

    options = re.sub(r"-isystem \S+ ", "", entry["command"].split(" ", 1)[1])  # where the toolkit is
    total = hashlib.sha256(portable(options).encode())
    folders = (root, root / "cpp/include", build / "include")
    for path in sorted(included(Path(entry["file"]), folders), key=lambda p: portable(str(p))):
        total.update(f"\n{portable(str(path))} {digest_of(path)}".encode())
    return total.hexdigest()[:16]


def compiler() -> str:
    return subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout.split()[-1]


def changed(build: Path) -> list[str]:
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    known = record.get("objects", {}) if record.get("nvcc") == compiler() else {}
    return [name for name, entry in objects(build, ROOT).items() if known.get(name) != hash_of(entry, build, ROOT)]


def record(build: Path) -> None:
    own = objects(build, ROOT)
    if targets := changed(build):  # the others compiled from these sources when the record was made
        subprocess.run(["ninja", "-C", str(build), *targets], check=True)
    hashes = {name: hash_of(entry, build, ROOT) for name, entry in sorted(own.items())}
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    RECORD.write_text(json.dumps({"nvcc": compiler(), "date": now, "objects": hashes}, indent=2) + "\n")


def missing(build: Path) -> str:
    own = objects(build, ROOT)
    names = [name for name in own if not (build / name).is_file()]
    if not names:
        return ""
    date = json.loads(RECORD.read_text())["date"]
    head = f"{len(names)} of {len(own)} objects were not compiled here; by cmake/cuda_objects.json they compiled "
    return head + f"without spills on {date}, from the same sources:\n  " + "\n  ".join(names)


def main(arguments: list[str]) -> int:
    commands: dict[str, Callable[[Path], None]] = {
        "record": record,
        "changed": lambda b: print("\n".join(changed(b))),
        "missing": lambda b: print(missing(b)),
    }
    if not 1 <= len(arguments) <= 2 or arguments[0] not in commands:
        print(__doc__, file=sys.stderr)
        return 2
    commands[arguments[0]](Path(arguments[1] if len(arguments) > 1 else ROOT / "build/cuda").resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
