"""Two distributions of the package in one environment are named at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rl_kernel_native import _variants


def install(directory: Path, name: str) -> None:
    """Files by which importlib.metadata finds an installed distribution."""
    info = directory / f"{name.replace('-', '_')}-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")


def warnings_of_import(path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), *sys.path])}
    code = "import rl_kernel_native"
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_two_variants_are_named_with_what_was_loaded_and_what_to_do(tmp_path: Path) -> None:
    install(tmp_path, "rl-kernel-cpu")
    install(tmp_path, "rl-kernel-cu130")
    said = warnings_of_import(tmp_path)
    assert "RuntimeWarning" in said
    assert "rl-kernel-cpu 9.9" in said
    assert "rl-kernel-cu130 9.9" in said
    assert "uninstall all of them, then install the one you want" in said
    assert "pip uninstall -y" in said


def test_one_variant_imports_in_silence(tmp_path: Path) -> None:
    if not _variants.installed():
        install(tmp_path, "rl-kernel-rocm6")
    assert "installed together" not in warnings_of_import(tmp_path)
