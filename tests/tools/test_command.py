"""`rlk`: one command line for every tool, each with help. A tool without extra requirements works without them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rl_kernel_native as rk
from rl_kernel_native import _variants

COMMANDS = ("doctor", "bench", "compare", "demo", "digest", "certify", "contract")
WITHOUT_EXTRAS = (
    "import importlib.util, sys\n"
    "find = importlib.util.find_spec\n"
    "importlib.util.find_spec = lambda name, *more: None if name in ('typer', 'rich') else find(name, *more)\n"
    "from rl_kernel_native.consistency.main import main; main()"
)
PROGRAM = "from rl_kernel_native.consistency.main import main; main()"


def rlk(*arguments: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_help_lists_every_command() -> None:
    pytest.importorskip("typer")
    done = rlk("--help")
    assert done.returncode == 0, done.stderr
    assert not [name for name in COMMANDS if f" {name} " not in done.stdout]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    pytest.importorskip("typer")
    done = rlk(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout
    assert name in done.stdout


@pytest.mark.parametrize("name", ["compare", "demo", "digest", "align", "certify", "contract"])
def test_help_names_the_exit_statuses(name: str) -> None:
    pytest.importorskip("typer")
    words = " ".join(re.sub(r"[│|]", " ", rlk(name, "--help").stdout).split())
    found = re.search("Exit status: (.*?program itself)", words)
    assert found, words
    assert re.findall(r"(?:^|[,;] )(\d) ", found[1])[-1] == "3", "a failure of the program itself"


@pytest.mark.parametrize("name", ["main", "cli"])
def test_the_modules_run_as_the_command_does(name: str) -> None:
    pytest.importorskip("typer")
    command = [sys.executable, "-m", f"rl_kernel_native.consistency.{name}", "contract", "--operator", "kl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "kl" in done.stdout


@pytest.mark.parametrize("program", [PROGRAM, WITHOUT_EXTRAS])
def test_the_version_names_the_variant(program: str) -> None:
    assert rlk("--version", program=program).stdout == f"rl_kernel_native {rk.__version__} ({rk.variant})\n"


# A package that is not found, as if it were not installed.
WITHOUT = (
    "import importlib.machinery, sys\n"
    "missing = sys.argv.pop(1).split(',')\n"
    "find = importlib.machinery.PathFinder.find_spec\n"
    "importlib.machinery.PathFinder.find_spec = classmethod(\n"
    "    lambda cls, name, *more: None if name.split('.')[0] in missing else find(name, *more))\n" + PROGRAM
)
NEEDING = {
    "compare": ("torch", "transformers", "safetensors", "huggingface_hub", "matplotlib", "typer", "rich"),
    "demo": ("torch", "transformers", "safetensors", "matplotlib", "typer", "rich"),
    "digest": ("torch", "transformers", "safetensors", "typer", "rich"),
    "align": ("vllm", "torch,vllm", "transformers,vllm", "typer", "rich"),
    "certify": ("torch", "typer", "rich"),
    "contract": ("typer", "rich"),
    "bench": ("torch",),
}


@pytest.mark.parametrize(("name", "missing"), [(name, missing) for name in NEEDING for missing in NEEDING[name]])
def test_a_missing_package_is_one_line_with_its_cure(name: str, missing: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 100, "model_type": "llama"}')
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "prompts").write_text('{"prompt_ids": [1]}')
    arguments = {
        "compare": ("--model", str(tmp_path), "--prompts", str(tmp_path / "prompts")),
        "demo": ("--report", str(tmp_path), "--minutes", "0.5"),
        "align": ("--model", str(tmp_path)),
        "certify": ("--quick", "--operator", "kl"),
        "bench": ("logprob",),
    }
    done = rlk(missing, name, *arguments.get(name, ()), program=WITHOUT)
    package = missing.split(",")[-1]
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert re.search(f"error: .*{package}.*(is )?not installed", error), done.stderr
    assert name == "bench" or "pip install" in error
    assert name == "bench" or len(done.stderr.splitlines()) == 1


def test_another_vllm_is_named_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from rl_kernel_native.consistency import align

    monkeypatch.setattr(align.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(align.importlib.metadata, "version", lambda name: "0.1.0")
    with pytest.raises(align.BadInput, match=r"needs vllm 0\.26\.0 for .*, got 0\.1\.0; pip install vllm==0\.26\.0"):
        align.require_installed(["stock", "rk"], ["hf"])
    align.require_installed(["stock"], ["hf"])


def test_the_doctor_needs_no_extra() -> None:
    done = rlk("doctor", "--no-self-test", program=WITHOUT_EXTRAS)
    assert done.returncode == 0, done.stderr
    assert "healthy" in done.stdout
    lacking = rlk("compare", program=WITHOUT_EXTRAS)
    assert lacking.returncode == 2
    assert "typer and rich not installed; " in lacking.stderr
    assert "doctor, bench and --version need neither" in lacking.stderr


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], 'in a clone of the repository: pip install ".[demo]"'),
        (["rl-kernel-native 0.1.0"], 'in a clone of the repository: pip install ".[demo]"'),
        (["rl-kernel-cu130 0.1.0"], 'pip install "rl-kernel-cu130[demo]"'),
    ],
)
def test_a_missing_extra_names_the_distribution_that_is_here(
    monkeypatch: pytest.MonkeyPatch, found: list[str], words: str
) -> None:
    monkeypatch.setattr(_variants, "installed", lambda: found)
    assert _variants.how_to_install("demo") == words
