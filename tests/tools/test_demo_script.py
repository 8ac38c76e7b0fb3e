"""scripts/demo.sh: a step prints its progress and its failure, and unchanged sources are not compiled again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = f"set -euo pipefail; source {ROOT}/scripts/environment.sh; "


def bash(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        ["bash", "-c", SOURCE + code], capture_output=True, text=True, cwd=folder, env=environment, timeout=60
    )


def test_a_step_says_how_far_it_is(tmp_path: Path) -> None:
    """Sets the shell's clock forward instead of waiting 15 seconds."""
    step = "work() { echo '[3/9] Building'; for i in 1 2 3 4; do sleep 0.2; done; }; "
    later = 'sleep() { command sleep "$1"; SECONDS=$((SECONDS + 20)); }; '
    done = bash(step + later + "with_progress '2. wheel' log work", tmp_path)
    assert done.returncode == 0, done.stderr
    assert ", files [3/9]\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("2. wheel: done in ")
    assert (tmp_path / "log").read_text() == "[3/9] Building\n"


def test_a_step_that_fails_shows_its_log(tmp_path: Path) -> None:
    done = bash("with_progress '1. torch' log bash -c 'echo no such wheel; exit 3'; echo after", tmp_path)
    assert done.returncode == 1
    assert done.stderr == "no such wheel\nerror: 1. torch failed; all of it is in log\n"
    assert done.stdout == ""


def test_a_wheel_is_built_once_for_its_sources(tmp_path: Path) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "pip").write_text(
        '#!/usr/bin/env bash\nwhile [[ $1 != -w ]]; do shift; done\nmkdir "$2"; touch "$2/a.whl"; echo built >>built\n'
    )
    (fake / "pip").chmod(0o755)
    git = "git -c user.name=n -c user.email=e "
    begin = f"git init -q . && echo 1 >source && git add source && {git}commit -qm c && mkdir -p build/wheels; "
    path = f"{fake}:{os.environ['PATH']}"
    twice = "wheel_of_tree cpu; wheel_of_tree cpu; ls build/wheels/newest/*.whl; "
    done = bash(begin + twice, tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "built").read_text() == "built\n"
    for change in ("echo 2 >source", "echo 3 >source && git add source"):
        assert bash(f"{change}; wheel_of_tree cpu", tmp_path, PATH=path).returncode == 0
    assert bash("wheel_of_tree cu130", tmp_path, PATH=path).returncode == 0
    assert (tmp_path / "built").read_text() == "built\n" * 4


def test_the_scripts_parse_and_the_plan_comes_first() -> None:
    for script in sorted((ROOT / "scripts").glob("*.sh")):
        subprocess.run(["bash", "-n", script], check=True)
    text = (ROOT / "scripts" / "demo.sh").read_text()
    assert text.index("What follows:") < text.index("with_progress ")
