"""The record of CUDA objects that compile without spills. The tests need neither nvcc nor CUDA."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import load_script
from tests.gpu_log import ROOT

TOOL = ROOT / "tools" / "cuda_objects.py"
if not TOOL.exists():
    pytest.skip("the source tree's tools are not here", allow_module_level=True)

cuda_objects = load_script(TOOL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path / "here")


def write_project(root: Path) -> Path:
    """A project of two objects. Both include common.h, and sums alone includes tree.h, through a header."""
    texts = {
        "cuda/common.h": "int common;  // shared\n",
        "cuda/sums/sums.cu": '#include "sums.h"\n#include <vector>\n',
        "cuda/sums/sums.h": '#include "../common.h"\n#include "rlk/tree.h"\n',
        "cpp/include/rlk/tree.h": "int tree;\n",
        "cuda/rope/rope.cu": '#include "cuda/common.h"\n',
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    build = root / "build/cuda"
    build.mkdir(parents=True)
    commands = [
        {
            "file": str(root / f"cuda/{name}/{name}.cu"),
            "output": str(build / f"{name}.o"),
            "command": f"nvcc -I{root} -isystem {root.parent}/toolkit -O3 -c {root}/cuda/{name}/{name}.cu",
        }
        for name in ("sums", "rope")
    ]
    (build / "compile_commands.json").write_text(
        json.dumps([*commands, {**commands[0], "file": str(root / "cpu/rope.cpp")}])
    )
    return root


def hashes(root: Path) -> dict[str, str]:
    build = root / "build/cuda"
    cuda_objects.includes_of.cache_clear()
    cuda_objects.digest_of.cache_clear()
    return {name: cuda_objects.hash_of(e, build, root) for name, e in cuda_objects.objects(build, root).items()}


def test_an_objects_hash_covers_what_it_includes_and_no_comment(project: Path) -> None:
    before = hashes(project)
    assert before.keys() == {"sums.o", "rope.o"}
    (project / "cuda/common.h").write_text("int common;  // said otherwise\n")
    assert hashes(project) == before
    (project / "cpp/include/rlk/tree.h").write_text("long tree;\n")
    after = hashes(project)
    assert after["rope.o"] == before["rope.o"]
    assert after["sums.o"] != before["sums.o"]
    (project / "cuda/common.h").write_text("long common;\n")
    assert hashes(project)["rope.o"] != before["rope.o"]


def test_a_checkout_elsewhere_has_the_same_hashes(project: Path, tmp_path: Path) -> None:
    assert hashes(write_project(tmp_path / "else/where")) == hashes(project)


def test_another_option_is_another_object(project: Path) -> None:
    before = hashes(project)
    commands = project / "build/cuda/compile_commands.json"
    commands.write_text(commands.read_text().replace("-O3", "-O1"))
    assert all(hash_ != before[name] for name, hash_ in hashes(project).items())


@pytest.mark.parametrize(
    ("nvcc", "change", "expected"),
    [("13.0", False, []), ("13.0", True, ["sums.o"]), ("13.1", False, ["sums.o", "rope.o"])],
)
def test_changed_objects_are_those_that_the_record_does_not_cover(
    project: Path, monkeypatch: pytest.MonkeyPatch, nvcc: str, change: bool, expected: list[str]
) -> None:
    record = project / "record.json"
    record.write_text(json.dumps({"nvcc": "13.0", "date": "2026-11-30", "objects": hashes(project)}))
    monkeypatch.setattr(cuda_objects, "RECORD", record)
    monkeypatch.setattr(cuda_objects, "ROOT", project)
    monkeypatch.setattr(cuda_objects, "compiler", lambda: nvcc)
    if change:
        (project / "cpp/include/rlk/tree.h").write_text("long tree;\n")
    hashes(project)  # forgets the files as they were
    assert cuda_objects.changed(project / "build/cuda") == expected


def test_objects_that_were_not_compiled_are_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = project / "record.json"
    record.write_text(json.dumps({"nvcc": "13.0", "date": "2026-11-30", "objects": {}}))
    monkeypatch.setattr(cuda_objects, "RECORD", record)
    monkeypatch.setattr(cuda_objects, "ROOT", project)
    build = project / "build/cuda"
    (build / "rope.o").touch()
    said = cuda_objects.missing(build)
    assert "1 of 2 objects" in said
    assert "2026-11-30" in said
    assert said.endswith("sums.o")
    (build / "sums.o").touch()
    assert cuda_objects.missing(build) == ""


def test_the_record_names_objects_of_both_architectures() -> None:
    record = json.loads((ROOT / "cmake/cuda_objects.json").read_text())
    assert any("rlk_cuda_sm80.dir" in name for name in record["objects"])
    assert any("rlk_cuda_sm90.dir" in name for name in record["objects"])
