"""tools/check_prose.py: the tool refuses the listed faults and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import load_script

TOOL = Path(__file__).resolve().parents[2] / "tools" / "check_prose.py"
if not TOOL.exists():
    pytest.skip("the source tree's tools are not here", allow_module_level=True)

LONG = "The row " + "has a column and " * 10 + "an end."  # 44 words
OF = "of a row"
REFUSED = {
    "fragment, C++": ("x.h", f"int columns;  // {OF}\n", 'x.h:1: begins with "of"'),
    "fragment in a line with a literal": ("x.cu", f'asm("a // b");  // {OF}\n', 'x.cu:1: begins with "of"'),
    "fragment in a line of its own": ("x.cpp", f"int a;\n// {OF}\n// and more\n", 'x.cpp:2: begins with "of"'),
    "fragment, Python": ("x.py", f"columns = 1  # {OF}\n", 'x.py:1: begins with "of"'),
    "opening": ("x.py", "# Of rows it takes one.\n", 'x.py:1: begins with "Of"'),
    "length, C++": ("x.h", f"// {LONG}\n", "x.h:1: 44 words"),
    "length, docstring": ("x.py", f'"""{LONG}"""\n', "x.py:1: 44 words"),
    "length, page": ("x.md", f"# Rows\n\n{LONG}\n", "x.md:3: 44 words"),
}
ALLOWED = {
    "noun first": ("x.h", "int columns;  // columns per row, of floats\n"),
    "offset": ("x.py", "columns = 1  # offsets of a row\n"),
    "continued": ("x.h", "// The columns\n// of a row.\n"),
    "comment inside of a literal": ("x.cpp", f'const char* text = "// {OF}";\n'),
    "code in a page": ("x.md", f"```python\ncolumns = 1  # {OF}\n```\n"),
}


@pytest.fixture(scope="module")
def tool() -> Any:
    return load_script(TOOL)


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(tool: Any, case: str, tmp_path: Path) -> None:
    name, text, fault = REFUSED[case]
    (tmp_path / name).write_text(text)
    (found,) = tool.faults(tmp_path / name)
    assert found.startswith(str(tmp_path / fault)), found


@pytest.mark.parametrize("case", ALLOWED)
def test_allows(tool: Any, case: str, tmp_path: Path) -> None:
    name, text = ALLOWED[case]
    (tmp_path / name).write_text(text)
    assert not list(tool.faults(tmp_path / name))


SPLIT = {
    "a listed line that the next line continues": (
        "- A row\n  has columns.\n- A column.",
        ["A row has columns.", "A column."],
    ),
    "an argument that the next line continues": (
        "Args:\n    x: a row\n        of floats.\n    y: a row.",
        ["a row of floats.", "a row."],
    ),
    "an indented line without a listed one": (
        "A row has columns:\n    rlk bench rows",
        ["A row has columns:", "rlk bench rows"],
    ),
    "a sentence in bold": ("**A row is short.** A column is not.", ["**A row is short.**", "A column is not."]),
    "a sentence in parentheses": (
        "A row is short. (A column is not.) A tile is.",
        ["A row is short.", "(A column is not.)", "A tile is."],
    ),
}


@pytest.mark.parametrize("case", SPLIT)
def test_splits_a_block_into_sentences(tool: Any, case: str) -> None:
    block, want = SPLIT[case]
    assert [found for found in tool.sentences(block) if len(found.split()) > 1] == want
