"""The record of the last run of the GPU tests, and the hashes of the sources that it ran."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "tests" / "gpu_log.json"
TREES = ("bindings", "cpp", "cpu", "cuda", "hip", "kernels", "python", "tests")

# Files count by their contents only, so that the hashes are the same with and without git, in a clone and in a copy.
# Documents are not hashed, since their figures are written after a run. Outputs of a build or a test run are not
# hashed, and neither is the log.
SOURCES = {
    ".c",
    ".cc",
    ".cpp",
    ".cu",
    ".cuh",
    ".h",
    ".hip",
    ".hpp",
    ".in",
    ".inc",
    ".json",
    ".py",
    ".pyi",
    ".safetensors",
    ".toml",
    ".txt",
}
LEFT_BEHIND = {"__pycache__", ".pytest_cache", ".hypothesis", ".ruff_cache", ".mypy_cache", "build", "report"}


def sources(tree: Path) -> list[Path]:
    found = (p for p in tree.rglob("*") if p.is_file() and (p.suffix in SOURCES or p.name == "py.typed"))
    return sorted(
        p for p in found if p != LOG and p.name != LOG.name and not LEFT_BEHIND & set(p.relative_to(tree).parts)
    )


# Comments of C++ cannot change a result, so they do not count. The pattern matches literals, since a literal may hold
# text that looks like a comment. A quote between digits separates them.
CPP = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hip", ".hpp", ".inc"}
LITERAL_OR_COMMENT = re.compile(
    rb'''R"(?P<delimiter>[^(\s"]*)\(.*?\)(?P=delimiter)"'''
    rb"""|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*'|(?P<comment>//[^\n]*|/\*.*?\*/)""",
    re.DOTALL,
)


def without_comments(code: bytes) -> bytes:
    code = LITERAL_OR_COMMENT.sub(lambda found: b" " if found["comment"] else found[0], code)
    return b"\n".join(line.strip() for line in code.splitlines() if line.strip())


def contents(path: Path) -> bytes:
    """What a file's hash covers. A checkout with other line ends counts as the same source."""
    found = path.read_bytes().replace(b"\r\n", b"\n")
    return without_comments(found) if path.suffix in CPP else found


def tree_hash(tree: Path) -> str:
    """sha256 over (path inside the tree, sha256 of the contents), sorted by path."""
    total = hashlib.sha256()
    for path in sorted(sources(tree), key=lambda p: p.relative_to(tree).as_posix()):
        digest = hashlib.sha256(contents(path)).hexdigest()
        total.update(f"{path.relative_to(tree).as_posix()}\0{digest}\n".encode())
    return total.hexdigest()


def tree_hashes(root: Path = ROOT) -> dict[str, str]:
    return {name: tree_hash(root / name) for name in TREES if (root / name).is_dir()}


def why_stale(log: Path = LOG, root: Path = ROOT) -> str:
    """Says why the log does not cover these sources; empty if it does."""
    if not log.is_file():
        return f"{log.relative_to(root)} is missing: run `python tests/run_gpu.py` on a machine with a GPU"
    try:
        record: dict[str, Any] = json.loads(log.read_text())
        then = dict(record["trees"])
        failed = int(record["counts"]["failed"])
    except (ValueError, KeyError, TypeError) as error:
        return f"{log.relative_to(root)} cannot be read ({type(error).__name__}: {error})"
    now = tree_hashes(root)
    changed = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    problems = []
    if changed:
        problems.append(f"changed since the run of {record.get('date', '?')}: {', '.join(changed)}")
    if failed:
        problems.append(f"that run had {failed} failures")
    return f"{log.relative_to(root)} is stale: {'; '.join(problems)}" if problems else ""
