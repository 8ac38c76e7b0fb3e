"""The workflows call scripts that CI also runs elsewhere, with options that exist. No step has other commands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"].values()]
STEPS = [(name, step) for name, job in JOBS for step in job.get("steps", [])]
# Commands allowed beside scripts of the repository: tools of the machine.
TOOLS = (
    r"apt-get (update|install -y --no-install-recommends [\w+ .-]+)|rm dist/wheels\.md|git config .*safe\.directory.*"
)


def stages() -> set[str]:
    (found,) = re.findall(r"^readonly kStages=\((.*)\)", (ROOT / "scripts/test.sh").read_text(), re.M)
    return set(found.split())


def commands() -> list[tuple[str, str]]:
    """(workflow, command) of every step; a line that ends with a backslash continues."""
    found = []
    for name, step in STEPS:
        for line in re.sub(r"\\\n\s*", "", step.get("run", "")).splitlines():
            found += [(name, part.strip()) for part in line.split("&&")]
    return found


def test_every_stage_runs_in_a_job() -> None:
    jobs: dict[str, Any] = WORKFLOWS["tests"]["jobs"]
    assert {*jobs["checks"]["strategy"]["matrix"]["stage"], "cuda"} == stages()


@pytest.mark.parametrize(("workflow", "command"), commands())
def test_a_command_is_a_script_of_the_repository(workflow: str, command: str) -> None:
    if re.fullmatch(TOOLS, command):
        return
    words = [word for word in command.split() if not re.fullmatch(r"(\S*/)?python3?", word)]
    if words[:2] == ["-m", "venv"] or words[0].endswith("/pip"):
        assert workflow == "gpu", "a stage of scripts/test.sh has an environment"
        extras = re.findall(r"\[(\w+)\]", command)
        declared = (ROOT / "pyproject.toml").read_text()
        assert all(f"\n{extra} = [" in declared for extra in extras)
        return
    script = ROOT / words[0]
    assert script.is_file(), command
    text = script.read_text()
    assert all(f'"{option}"' in text for option in words if option.startswith("--"))
    if script.suffix == ".sh":
        assert set(words[1:]) <= stages() | {"${{", "matrix.stage", "}}"}
        subprocess.run(["bash", "-n", script], check=True)


def test_only_a_person_publishes() -> None:
    release = WORKFLOWS["release"]
    assert list(release[True]) == ["workflow_dispatch"], "yaml reads the key `on` as true"
    publish = release["jobs"]["publish"]
    assert publish["permissions"]["id-token"] == "write"
    assert publish["environment"] == "pypi"
    assert not any("password" in str(step) or "secrets" in str(step) for _, step in STEPS)
