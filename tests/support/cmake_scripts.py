"""Runs the scripts of ``cmake/`` that check compiled code, on the printed output of other tools."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "cmake"
CMAKE = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")

NEEDS_CMAKE = [
    pytest.mark.skipif(not FOLDER.is_dir(), reason="no source tree beside the tests"),
    pytest.mark.skipif(CMAKE is None, reason="no cmake"),
]


def make_tool(path: Path, argument: int) -> Path:
    """A program that prints the file of one of its arguments, in place of the tool that a script calls."""
    path.write_text(f'#!/bin/sh\ncat "${argument}"\n')
    path.chmod(0o755)
    return path


def run_script(name: str, **options: object) -> subprocess.CompletedProcess[str]:
    assert CMAKE is not None
    command = [CMAKE, *(f"-D{key}={value}" for key, value in options.items()), "-P", str(FOLDER / name)]
    return subprocess.run(command, capture_output=True, text=True)
