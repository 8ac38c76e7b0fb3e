"""The parts of tools/build_wheels.py that need no compiler. The tool tries the wheels themselves."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> Any:
    return load_script(ROOT / "tools" / "build_wheels.py")


def test_a_renamed_wheel_is_a_whole_wheel_of_the_new_name(tool: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "rl_kernel_native-0.1.0-cp312-abi3-linux_x86_64.whl"
    info = "rl_kernel_native-0.1.0.dist-info"
    metadata = (
        "Metadata-Version: 2.1\nName: rl-kernel-native\nVersion: 0.1.0\nRequires-Dist: rl-kernel-native[compare]; x\n"
    )
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("rl_kernel_native/__init__.py", "x = 1\n")
        z.writestr(f"{info}/METADATA", metadata)
        z.writestr(f"{info}/RECORD", "")
    made = tool.renamed(wheel, "rl-kernel-cu130")
    assert made.name == "rl_kernel_cu130-0.1.0-cp312-abi3-linux_x86_64.whl"
    assert not wheel.exists()
    with zipfile.ZipFile(made) as z:
        new = "rl_kernel_cu130-0.1.0.dist-info"
        assert set(z.namelist()) == {"rl_kernel_native/__init__.py", f"{new}/METADATA", f"{new}/RECORD"}
        text = z.read(f"{new}/METADATA").decode()
        assert "Name: rl-kernel-cu130\n" in text
        assert "Requires-Dist: rl-kernel-cu130[compare]; x" in text
        rows = {row[0]: row[1:] for row in csv.reader(z.read(f"{new}/RECORD").decode().splitlines())}
        assert set(rows) == set(z.namelist())
        for name, (digest, size) in rows.items():
            if name.endswith("RECORD"):
                continue
            data = z.read(name)
            assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert int(size) == len(data)


METADATA = (
    "Metadata-Version: 2.1\nName: x\nVersion: 0.1.0\n\n# x\n\n![Ratio](docs/front.svg)\n\n"
    "[numerics](docs/numerics.md), [paper](https://arxiv.org/abs/1805.02867), [below](#speed)\n"
)
KEPT = "[paper](https://arxiv.org/abs/1805.02867), [below](#speed)\n"


def test_links_of_the_description_come_from_one_setting(tool: Any) -> None:
    """Without a given address, the tool invents none."""
    bare = tool.with_links(METADATA, "")
    assert "Project-URL" not in bare
    assert bare.endswith(f"# x\n\n\n\nnumerics, {KEPT}")
    url = "https://example.org/group/name"
    linked = tool.with_links(METADATA, f"{url}/")
    assert f"Version: 0.1.0\nProject-URL: Source, {url}\n\n" in linked
    assert linked.endswith(
        f"![Ratio]({url}/raw/HEAD/docs/front.svg)\n\n[numerics]({url}/blob/HEAD/docs/numerics.md), {KEPT}"
    )


def test_sizes_and_hashes_are_written_and_checked(tool: Any, tmp_path: Path) -> None:
    assert tool.check(tmp_path, None) == [
        f"{tmp_path / 'wheels.md'}: expected a table that this tool wrote, found none"
    ]
    wheel = tmp_path / "rl_kernel_cpu-0.1.0-cp312-abi3-manylinux_2_17_x86_64.whl"
    wheel.write_bytes(b"wheel")
    tool.write_table(tmp_path, [wheel.name], "abc1234")
    row = f"| {wheel.name} | 5 | {hashlib.sha256(b'wheel').hexdigest()} | abc1234 |"
    assert row in (tmp_path / "wheels.md").read_text()
    assert tool.check(tmp_path, None) == []
    wheel.write_bytes(b"other")
    assert "sizes and hashes" in tool.check(tmp_path, None)[0]
    wheel.unlink()
    tool.write_table(tmp_path, [], "abc1234")
    assert tool.check(tmp_path, None) == [f"{tmp_path}: expected wheels, found none"]


def test_a_wheel_of_an_earlier_build_keeps_its_commit(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another wheel of the folder would otherwise pass for one of the last build's commit."""
    for variant in ("cpu", "cu130"):
        (tmp_path / f"rl_kernel_{variant}-0.1.0-cp312-abi3-linux_x86_64.whl").write_bytes(variant.encode())
        tool.write_table(tmp_path, [f"rl_kernel_{variant}-0.1.0-cp312-abi3-linux_x86_64.whl"], f"abc{variant}")
    assert [commit for _, commit in tool.recorded(tmp_path).values()] == ["abccpu", "abccu130"]
    monkeypatch.setattr(tool, "run", lambda command: "abccu130\n")
    old = [said for said in tool.check(tmp_path, "v0.1.0") if "expected a wheel of commit" in said]
    assert len(old) == 1
    assert "rl_kernel_cpu" in old[0]
    (tmp_path / "rl_kernel_cpu-0.1.0-cp312-abi3-linux_x86_64.whl").write_bytes(b"other")
    tool.write_table(tmp_path, [], "fed4321")
    assert [commit for _, commit in tool.recorded(tmp_path).values()] == ["unknown", "abccu130"]


def test_a_release_is_whole_and_of_its_tag(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four distributions, each for Python 3.10, for 3.11, and for 3.12 and later, built from the tag's commit."""
    monkeypatch.setattr(tool, "run", lambda command: "abc1234def\n")
    for variant in ("cpu", "cu124", "cu130", "rocm6"):
        for python in ("cp310-cp310", "cp311-cp311", "cp312-abi3"):
            (tmp_path / f"rl_kernel_{variant}-0.1.0-{python}-manylinux_2_17_x86_64.whl").write_bytes(b"wheel")

    def written(commit: str) -> None:
        tool.write_table(tmp_path, [wheel.name for wheel in tmp_path.glob("*.whl")], commit)

    written("abc1234")
    assert tool.check(tmp_path, "v0.1.0") == []
    others = tool.check(tmp_path, "v0.2.0")
    assert len(others) == 12
    assert all(said.endswith("expected the version of tag v0.2.0") for said in others)
    written("abc1234, with changes")
    assert ["with changes" in said for said in tool.check(tmp_path, "v0.1.0")] == [True] * 12
    written("fed4321")
    old = tool.check(tmp_path, "v0.1.0")
    assert len(old) == 12
    assert all(said.endswith("expected a wheel of commit abc1234def, got one of fed4321") for said in old)
    (tmp_path / "rl_kernel_cu124-0.1.0-cp311-cp311-manylinux_2_17_x86_64.whl").unlink()
    written("abc1234")
    (said,) = tool.check(tmp_path, "v0.1.0")
    assert said.endswith(": expected a wheel of rl-kernel-cu124 for cp311-cp311, found none")
    assert tool.check(tmp_path, None) == [], "a machine that cannot build all is none that releases"


@pytest.mark.parametrize("given", ["--variant cu130 cu124", "--variant cu130 --variant cu124 --variant cu130"])
def test_variants_are_named_in_one_option_or_in_several(tool: Any, given: str) -> None:
    """A repeated option kept only its last name, so a build lacked wheels without a message."""
    assert tool.arguments(given.split()).variant == ["cu130", "cu124"]
    assert tool.arguments(given.split()).python == ["3.10", "3.11", "3.12"]
    assert tool.arguments([]).variant == ["cpu", "cu124", "cu130", "rocm6"]


def test_a_python_that_is_not_there_is_said_so(tool: Any) -> None:
    with pytest.raises(tool.Unavailable, match=r"no Python 3\.99"):
        tool.find_python("3.99")
    assert tool.find_python(f"{sys.version_info.major}.{sys.version_info.minor}") == Path(sys.executable)


def test_a_missing_compiler_is_a_reason_and_not_an_error(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    monkeypatch.setattr(tool, "CUDA_124", Path("/nowhere"))
    with pytest.raises(tool.Unavailable, match=r"fetch_cuda124\.sh"):
        tool.options_of("cu124")
    with pytest.raises(tool.Unavailable, match=r"clang\+\+-19"):
        tool.options_of("rocm6")
    assert "RLK_VARIANT=cpu" in tool.options_of("cpu")


def test_device_code_comes_from_a_finished_build(tool: Any, tmp_path: Path) -> None:
    """Device code is the same for every Python, and takes minutes to compile."""
    build = tmp_path / "build" / "rocm6-3.10"
    (build / "hip").mkdir(parents=True)
    (build / "hip" / "kl.gfx942.hsaco").write_bytes(b"code")
    assert tool.device_code_of("rocm6", tmp_path) == [], "a build that stopped may lack files"
    (build / "_C.cpython-310-x86_64-linux-gnu.so").write_bytes(b"")
    assert tool.device_code_of("rocm6", tmp_path) == [f"RLK_HIP_DEVICE_CODE={build / 'hip'}"]
    assert tool.device_code_of("cu130", tmp_path) == []


def test_only_files_that_git_knows_get_into_a_wheel(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    (tree / "python").mkdir(parents=True)
    (tree / "python" / "known.py").write_text("x = 1\n")
    git = ["git", "-C", str(tree), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "c"]):
        subprocess.run([*git, *command], check=True)
    (tree / "python" / "private.txt").write_text("not for others\n")
    monkeypatch.setattr(tool, "ROOT", tree)
    assert "changes" not in tool.sources(tmp_path / "a")
    assert [p.name for p in (tmp_path / "a").rglob("*") if p.is_file()] == ["known.py"]
    (tree / "python" / "known.py").write_text("x = 2\n")
    assert tool.sources(tmp_path / "b").endswith(", with changes")
    assert (tmp_path / "b" / "python" / "known.py").read_text() == "x = 2\n"


# What g++ 10 lacks, which compiles the wheels for old systems. Sources test for a builtin before they use it.
BUILTINS = r"__builtin_(?:shufflevector|bit_cast)"
LATER_THAN_GCC_10 = rf"{BUILTINS}|std::(?:bit_cast|source_location|format|to_underlying)\b|using enum"


def test_host_code_uses_nothing_that_the_compiler_of_wheels_lacks() -> None:
    """Device code has compilers of its own. A wheel compiles a header of the emulations only if other code
    includes it."""
    trees = ("bindings", "cpp/*.h", "cpp/*.cpp", "cpu", "kernels", "cuda/*.cpp", "hip/*.cpp", "hip/emulation/*.h")
    others = (":!hip/emulation/*.cpp", ":!hip/emulation/isa")
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", *trees, *others], capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(names) > 200
    for name in names:
        text = re.sub(r"//.*", "", (ROOT / name).read_text())
        asked = set(re.findall(rf"__has_builtin\(({BUILTINS})\)", text))
        asked |= {f"std::{name}" for name in re.findall(r"__has_include\(<(\w+)>\)", text)}
        assert set(re.findall(LATER_THAN_GCC_10, text)) <= asked, name
