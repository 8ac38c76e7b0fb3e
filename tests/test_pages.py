"""Every code block of the documents runs, offline, and every command in them exists."""

from __future__ import annotations

import doctest
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOW = "in a clone of the repository: pip install"
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = {str(page.relative_to(ROOT)): page for page in PAGES}
# tests/test_docs.py runs these, with what their texts say of them; of docs/objectives.md the examples of a session.
ELSEWHERE = {"README.md", "docs/operators.md", "docs/linear.md", "docs/sampling.md"}
SESSIONS_ELSEWHERE = {"docs/objectives.md", *(name for name in NAMED if name.startswith("docs/objectives/"))}
HERE = [
    name
    for name, page in NAMED.items()
    if name not in ELSEWHERE
    and ("```python" in page.read_text() or ("```pycon" in page.read_text() and name not in SESSIONS_ELSEWHERE))
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


def test_languages_are_known() -> None:
    """A block in a language that no test collects would run nowhere."""
    found = {language for page in PAGES for language in re.findall(r"^```(\w*)\n(?!```)", page.read_text(), re.M)}
    assert found <= {"", "python", "pycon", "sh", "json", "text", "math"}, found


@pytest.mark.parametrize("name", HERE)
def test_the_code_of_a_page_runs(name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("jax")
    pytest.importorskip("trl")
    names: dict[str, Any] = {}
    for block in blocks(NAMED[name], "python"):
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


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of each `rlk ...` of a page, in blocks of a shell and in the text."""
    found = []
    for name, page in NAMED.items():
        text = page.read_text()
        lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"`(rlk [^`\n]*)`", text)
        for line in lines:
            words = shlex.split(line, comments=True)
            if words and words[0].removeprefix(".venv/bin/") == "rlk":
                found.append((name, words[1:]))
    return found


def test_the_commands_of_the_pages_exist() -> None:
    pytest.importorskip("typer")
    import typer.main

    from rl_kernel_native.consistency.cli import app

    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    given = commands()
    assert len(given) > 10
    for name, words in given:
        if not words or words[0].startswith("-"):
            continue
        assert words[0] in known, f"{name}: rlk {' '.join(words)}"
        options = {option for parameter in known[words[0]].params for option in parameter.opts} | {"--help", "--json"}
        options |= {"--no-self-test"} if words[0] == "doctor" else set()
        unknown = [word for word in words[1:] if word.startswith("--") and word not in options]
        assert not unknown or words[0] == "bench", f"{name}: rlk {' '.join(words)}"


def test_the_errors_that_are_explained_exist() -> None:
    """A message that changed leaves its row behind."""
    sources = [*(ROOT / "python").rglob("*.py"), *(ROOT / "cpp").rglob("*.cpp"), *(ROOT / "cpp").rglob("*.h")]
    code = re.sub(r'["\']\s*\n\s*f?["\']', "", "\n".join(path.read_text() for path in sources))
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.M)
    assert len(rows) > 8
    assert not [row for row in rows if row not in code.replace("{_variants.how_to_install('compare')}", HOW)]


def test_no_page_lets_an_index_answer_for_a_local_wheel() -> None:
    """`--find-links` alone takes a name from the index, where anyone may have put it."""
    found = [name for name, page in NAMED.items() for line in page.read_text().splitlines()
             if "--find-links" in line and "--no-index" not in line]  # fmt: skip
    assert not found
