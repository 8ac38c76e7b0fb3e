"""Every code block of the documents runs offline, and every command in them exists."""

from __future__ import annotations

import ast
import doctest
import io
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOW = "in a clone of the repository: pip install"
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = {str(page.relative_to(ROOT)): page for page in PAGES}
# test_docs.py runs these, and compares them with their texts. For docs/objectives.md test_docs.py runs the examples of
# a session.
ELSEWHERE = {"README.md", "docs/operators.md", "docs/linear.md", "docs/sampling.md"}
SESSIONS_ELSEWHERE = {"docs/objectives.md", *(name for name in NAMED if name.startswith("docs/objectives/"))}
# pages whose blocks are separate programs; the blocks of other pages share their names
PROGRAMS = {"docs/quickstart.md"}
HERE = [
    name
    for name, page in NAMED.items()
    if name not in ELSEWHERE
    and ("```python" in page.read_text() or ("```pycon" in page.read_text() and name not in SESSIONS_ELSEWHERE))
]


def blocks(page: Path, language: str) -> list[str]:
    """Blocks of one language; blocks inside a list are indented."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", page.read_text(), re.S | re.M)
    return [textwrap.dedent(block) for _, block in found]


def test_a_block_inside_a_list_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("1. Build:\n\n   ```sh\n   cmake --preset cpu\n   ```\n\n```sh\nrlk doctor\n```\n")
    assert blocks(page, "sh") == ["cmake --preset cpu\n", "rlk doctor\n"]


def test_languages_are_known() -> None:
    """A block in a language that no test collects would never run."""
    found = {language for page in PAGES for language in re.findall(r"^ *```(\w*)\n(?! *```)", page.read_text(), re.M)}
    assert found <= {"", "python", "pycon", "sh", "json", "text", "math"}, found


FOLDERS = ("bench", "cuda", "hip")  # folders with pages beside the code
BESIDE_CODE = [page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))]
MARKDOWN = {str(page.relative_to(ROOT)): page for page in (*ROOT.glob("*.md"), *PAGES, *BESIDE_CODE)}


def tables(text: str) -> list[list[str]]:
    """Lines of each table, outside fenced blocks."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M)
    return [block.split("\n") for block in re.findall(r"(?:^ *\|.*\n?)+", prose, re.M)]


def cells(line: str) -> int:
    return len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) - 1


def faults_of(table: list[str]) -> list[str]:
    """Lines that keep a table from being one: a second line that separates nothing, a row of other width."""
    rows = [line.strip() for line in table if line.strip()]
    if len(rows) < 2 or not re.fullmatch(r"\|(?: *:?-+:? *\|)+", rows[1]):
        return rows[:2]
    return [row for row in rows if cells(row) != cells(rows[0]) or not row.endswith("|")]


@pytest.mark.parametrize("name", sorted(MARKDOWN))
def test_the_tables_of_a_page_are_tables(name: str) -> None:
    assert [fault for table in tables(MARKDOWN[name].read_text()) for fault in faults_of(table)] == []


BROKEN = ("| a | b | |---|---|\n| 1 | 2 |\n", "| a |\n|---|\n| 1 | 2 |\n", "| a |\n|---|\n| 1\n")


@pytest.mark.parametrize("table", BROKEN)
def test_a_broken_table_is_noticed(table: str) -> None:
    assert [faults_of(found) for found in tables(table)] != [[]]


@pytest.mark.parametrize("name", HERE)
def test_the_code_of_a_page_runs(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("jax")
    pytest.importorskip("trl")
    names: dict[str, Any] = {}
    for block in blocks(NAMED[name], "python"):
        names = {} if name in PROGRAMS else names
        exec(compile(block, name, "exec"), names)
    if name in SESSIONS_ELSEWHERE:
        return
    said = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    for i, block in enumerate(blocks(NAMED[name], "pycon")):
        test = doctest.DocTestParser().get_doctest(block, names, f"{name}, example {i}", name, 0)
        runner.run(test, out=said.write, clear_globs=False)
        names = test.globs
    assert not said.getvalue()


def lines(pages: dict[str, Path]) -> list[tuple[str, str]]:
    """(page, command) for each line of a shell block."""
    found = []
    for name, page in pages.items():
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                bare = re.sub(r"(^|\s)#.*$", "", line).strip()
                found += [(name, part.strip()) for part in bare.split("&&") if part.strip()]
    return found


def in_text() -> list[tuple[str, str]]:
    """(page, command) for each `rlk ...` in a sentence."""
    return [(name, line) for name, page in NAMED.items() for line in re.findall(r"`(rlk [^`\n]*)`", page.read_text())]


def options_exist(words: list[str], file: Path) -> bool:
    text = file.read_text()
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    return all(f'"{option}"' in text or option == "--help" for option in options)


def rlk(words: list[str]) -> None:
    """Parses a command as `rlk` does: its name, its options and their values."""
    import typer.main

    from rl_kernel_native import doctor
    from rl_kernel_native.consistency.cli import app

    if not words or words[0] == "--version":
        return
    if words[0] == "bench":
        bench(words[1:])
        return
    if words[0] == "doctor":
        assert options_exist(words, Path(doctor.__file__))
        return
    group = typer.main.get_command(app)
    command = group.commands[words[0]]  # type: ignore[attr-defined]
    given = [word.replace("...", "1") for word in words[1:]]
    if "--help" not in given:
        # In a sentence a command may have only a part of its options.
        command.make_context(words[0], given, resilient_parsing=len(given) < 2)


def bench(words: list[str]) -> None:
    from rl_kernel_native.bench.__main__ import make_parser

    if words:
        make_parser("bench").parse_args(words)


def plugin(words: list[str]) -> None:
    """A program of the reader's, under the plugin's variable."""
    from rl_kernel_native.integrations import vllm

    source = "".join(file.read_text() for file in Path(vllm.__file__).parent.glob("*.py"))
    assert '"RLK_VLLM"' in source
    assert f'"{words[0]}"' in source


def setting(words: list[str]) -> None:
    """A shell's own command; the pattern already matches all of it."""
    assert not words


def pip(words: list[str]) -> None:
    from rl_kernel_native import _variants  # the names of the distributions

    declared = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
        assert f"\n{extra} = [" in declared, extra
    for variant in re.findall(r"RLK_VARIANT=(\w+)", " ".join(words)):
        assert f"rl-kernel-{variant}" in Path(_variants.__file__).read_text() or variant == "cpu", variant
    for pinned in (word for word in words if "==" in word):
        (vllm,) = re.findall(r"^readonly kVersion=(.*)$", (ROOT / "tools/fetch_vllm.sh").read_text(), re.M)
        scripts = (ROOT / "scripts/test.sh").read_text() + f" vllm=={vllm} "
        assert f"{pinned} " in scripts or pinned.startswith(("trl==1.16", "torch==")), pinned


def script(words: list[str]) -> None:
    file = ROOT / words[0]
    assert file.is_file(), words
    assert options_exist(words, file) or file.parent.name == "examples"
    if words[0] == "scripts/test.sh":
        (stages,) = re.findall(r"^readonly kStages=\((.*)\)", file.read_text(), re.M)
        assert set(words[1:]) <= set(stages.split())


def pytest_files(words: list[str]) -> None:
    files = [word for word in words if word.startswith("tests/")]
    assert files
    assert all((ROOT / word.replace("<op>", "kl")).is_file() for word in files)


def preset(words: list[str]) -> None:
    assert f'"{words[0]}"' in (ROOT / "CMakePresets.json").read_text()
    for target in (word for word in words if word.startswith("test_")):
        cpp_test([target])


def cpp_test(words: list[str]) -> None:
    assert (ROOT / "tests" / "cpp" / f"{words[0].replace('<op>', 'kl')}.cpp").is_file(), words


# The begin of a command, and its check here. CI runs them: stage package (`pip install .`), python (`rlk`, pytest, the
# examples), cpp and cuda (presets), lint, wheel. run_gpu.py runs on machines with a GPU.
CHECKS: dict[str, Any] = {
    r"(\.venv/bin/)?rlk ": rlk,
    r"python -m rl_kernel_native\.bench": bench,
    r"(\.venv/bin/)?pip (un)?install ": pip,
    r"python3 -m venv \.venv$|\. \.venv/bin/activate$": setting,
    r"wheel=\$\(ls dist/rl_kernel_(cpu|cu130)-\*-cp312-abi3-\*\.whl\)$": setting,
    r"python -m pytest ": pytest_files,
    r"(python3? )?(\./)?(?=(scripts|tools|tests|examples)/)": script,
    r"cmake --preset |cmake --build build/|ctest --test-dir build/": preset,
    r"build/cpu/(?=test_)": cpp_test,
    r"RLK_VLLM=(?=\w+ python rollout\.py$)": plugin,
}


def check_command(checks: dict[str, Any], page: str, command: str) -> None:
    """Calls the check of the first pattern that the command begins with."""
    pytest.importorskip("typer")
    for pattern, check in checks.items():
        match = re.match(pattern, command)
        if match:
            check(shlex.split(command[match.end() :]))
            return
    pytest.fail(f"{page}: nothing checks `{command}`")


@pytest.mark.parametrize(
    ("page", "command"), dict.fromkeys([*lines({**NAMED, "CONTRIBUTING.md": ROOT / "CONTRIBUTING.md"}), *in_text()])
)
def test_a_command_of_a_page_exists_with_its_options(page: str, command: str) -> None:
    check_command(CHECKS, page, command)


@pytest.mark.parametrize(
    "command",
    [
        "rlk compare --no-such-option 1", "rlk nothing --help", "rlk doctor --no-such",
        "python -m rl_kernel_native.bench nothing", 'pip install ".[nothing]"', "scripts/test.sh nothing",
        "python tests/run_gpu.py --no-such", "cmake --preset nothing", "build/cpu/test_nothing",
        "cmake --build build/cpu --target test_nothing", "python -m pytest tests/ops/test_nothing.py",
        "python tools/nothing.py", "make install",
    ],
)  # fmt: skip
def test_a_command_that_does_not_exist_is_noticed(command: str) -> None:
    pytest.importorskip("typer")
    with pytest.raises(BaseException, match=r"."):
        test_a_command_of_a_page_exists_with_its_options("page", command)


def built(words: list[str]) -> None:
    """A program that CMake builds from a source of the same name, or the prefix of such programs."""
    name = words[0].replace("gpu_test_", "test_").replace("<op>", "kl")
    folders = ("bench", "tests/cpp", "tests/gpu", "tests/hip", "cuda", "hip")
    assert any(list((ROOT / folder).rglob(f"{name}.c*")) for folder in folders), words


def targets(words: list[str]) -> None:
    preset(words[:1])
    for word in words[words.index("--target") + 1 :] if "--target" in words else ():
        built([word])


BESIDE_CHECKS: dict[str, Any] = {
    r"(compute-sanitizer --tool \w+ )?build/(cuda|cpu|hip)/(hip/)?": built,
    r"cmake --build build/": targets,
    r"python (?=bench/)": script,
    **CHECKS,
}


@pytest.mark.parametrize(("page", "command"), dict.fromkeys(lines({str(p.relative_to(ROOT)): p for p in BESIDE_CODE})))
def test_a_command_of_the_notes_names_programs_that_exist(page: str, command: str) -> None:
    """They need a GPU. A figure can be measured again only while its program exists."""
    check_command(BESIDE_CHECKS, page, command)


@pytest.mark.parametrize(
    "command",
    ["build/cuda/bench_nothing", "python bench/nothing.py", "cmake --build build/cuda --target bench_nothing", "ncu"],
)
def test_a_program_that_does_not_exist_is_noticed(command: str) -> None:
    with pytest.raises(BaseException, match=r"."):
        test_a_command_of_the_notes_names_programs_that_exist("page", command)


def test_python_that_needs_an_engine_is_that_of_its_example() -> None:
    """The example cannot run without the engine; CI runs examples/grpo_vllm.py beside an engine, in stage engines."""
    (block,) = [b for b in blocks(ROOT / "docs" / "vllm.md", "text") if "rk." in b]
    example = (ROOT / "examples" / "grpo_vllm.py").read_text()
    found = [node for node in ast.walk(ast.parse(block.replace(", ...)", ")"))) if isinstance(node, ast.Call)]
    options = [ast.unparse(x).replace("'", '"') for call in found for x in call.keywords]
    assert len(options) > 5
    assert [x for x in options if not x.startswith(("model=", "args=")) and x not in example] == []
    assert not [
        b
        for page in PAGES
        for b in blocks(page, "text")
        if "rk." in b and page.name not in ("vllm.md", "architecture.md")
    ]


def test_the_errors_that_are_explained_exist() -> None:
    """If a message changes, its row must change, too."""
    sources = [*(ROOT / "python").rglob("*.py")]
    sources += [
        p
        for tree in ("bindings", "cpp", "cpu", "kernels")
        for p in (ROOT / tree).rglob("*")
        if p.suffix in (".cpp", ".h")
    ]
    code = re.sub(r'["\']\s*\n\s*f?["\']', "", "\n".join(path.read_text() for path in sources))
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.M)
    assert len(rows) > 8
    assert not [row for row in rows if row not in code.replace("{_variants.how_to_install('compare')}", HOW)]


def test_no_page_lets_an_index_answer_for_a_local_wheel() -> None:
    """With `--find-links` alone, pip also takes the name from the index, where anyone may have put it."""
    found = [name for name, page in NAMED.items() for line in page.read_text().splitlines()
             if "--find-links" in line and "--no-index" not in line]  # fmt: skip
    assert not found
