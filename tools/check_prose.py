#!/usr/bin/env python3
"""Refuses sentences that are hard to read in comments, docstrings and pages.

    python tools/check_prose.py [FOLDER...]          those of FOLDERS, and the pages beside them, where none is named
    python tools/check_prose.py --sample 300 --seed 1          prints 300 random sentences for a reader instead

A sentence begins with its subject, never with "Of", "What of" or "By whoever", and has at most 30 words. Formulas,
code, tables and lists of names are no sentences. A comment names its value first: "columns per row", never "of a row".
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import random
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs", "python", "bindings", "cpp", "cpu", "cuda", "hip", "kernels", "bench", "tests", "tools", "examples")
MOST_WORDS = 30
OPENING = re.compile(r"(Of|What of|By whoever)\b(?! course)")
FRAGMENT = re.compile(r"\s*of\b")
COMMENT = re.compile(r"//+ ?(.*)$")
SENTENCE_END = re.compile(
    r"(?:(?<=[A-Za-z0-9)\]/`'\"][.!?])|(?<=[.!?]\))|(?<=[.!?]\*\*))\s+(?=[A-Z`\"(*]|k[A-Z]|\w+[_\[(])"
)
LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yields blocks of comments and docstrings, each with its first line number."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                yield first.lineno, inspect.cleandoc(first.value.value)
    yield from _joined(
        (token.start[0], not token.line[: token.start[1]].strip(), token.string.lstrip("#").strip())
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    )


def page_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yields a page without code and headings, with links as their visible words."""
    text = re.sub(r"(?ms)^ *```.*?^ *```\s*?$", lambda code: "\n" * code[0].count("\n"), text)
    text = re.sub(r"(?m)^#.*$", "", text)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)):
        yield line + len(paragraph) - len(paragraph.lstrip("\n")), paragraph
        line += paragraph.count("\n")


def cpp_prose(text: str) -> Iterator[tuple[int, str]]:
    found = ((i, COMMENT.search(LITERAL.sub('""', line))) for i, line in enumerate(text.split("\n"), 1))
    yield from _joined((i, not m.string[: m.start()].strip(), m[1]) for i, m in found if m)


def _joined(comments: Iterable[tuple[int, bool, str]]) -> Iterator[tuple[int, str]]:
    """Joins comments on consecutive lines into blocks; a comment after code is its own block."""
    block: list[str] = []
    begins, last = 0, -1
    for i, is_alone, text in comments:
        if block and not (is_alone and i == last + 1):
            yield begins, "\n".join(block)
            block = []
        begins = begins if block else i
        block.append(text)
        last = i if is_alone else -1
    if block:
        yield begins, "\n".join(block)


def sentences(block: str) -> Iterator[str]:
    """Yields the sentences of a block. A listed line, or a row of a table, begins a new sentence. An indented line also
    does, unless it continues a listed line that is indented less."""
    for paragraph in re.split(r"\n\s*\n", block):
        text = ""
        item = None  # the indent of the listed line that a line may continue
        for line in paragraph.split("\n"):
            if re.match(r"\s*\S.*\S\s{3,}\S|\s{2,}\S.*\S\s{2,}\S|\s{16,}\S", line):  # a row of a table
                text += "\n"
                continue
            if re.search(r" = |\bfl\(", line):  # a formula
                text += "\n"
                continue
            indent = len(line) - len(line.lstrip())
            is_listed = re.match(r"\s*([-*] |\d+[.)] |[\w, .*`]+: )", line)
            continues = item is not None and indent > item and not is_listed
            is_new = not continues and re.match(r"\s*([-*|]|\d+[.)] |[\w, .*]+:( |$)|\.\. )|  ", line)
            if not continues:
                item = indent if is_listed else None
            text += ("\n" if is_new else " ") + line.strip()
        for part in text.split("\n"):
            if "|" in part or "::" in part:
                continue
            part = re.sub(r"^\s*([-*]|\d+[.)])\s+", "", part.strip())
            if not OPENING.match(part):
                part = re.sub(r"^[\w, .*`]+: ", "", part)
            yield from SENTENCE_END.split(part)


def words(sentence: str) -> int:
    """Number of words of prose; code and formulas count as one word each."""
    sentence = re.sub(r"``[^`]*``|`[^`]*`|\"[^\"]*\"", "x", sentence)
    sentence = re.sub(r"\S+( [-+*/=<>]+ \S+)+", "x", sentence)
    return len(re.findall(r"[A-Za-z][\w'-]*", sentence))


def blocks(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (file:line, text) for each block of a file."""
    prose = {".py": python_prose, ".md": page_prose}.get(path.suffix, cpp_prose)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for line, block in prose(path.read_text(encoding="utf-8")):
        yield f"{shown}:{line}", block


def located(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (file:line of the block, sentence) for each sentence of a file."""
    for where, block in blocks(path):
        for sentence in sentences(block):
            yield where, sentence


def faults(path: Path) -> Iterator[str]:
    for where, block in blocks(path):
        if FRAGMENT.match(block):
            yield f'{where}: begins with "of": {block.strip()[:70]}'
    for where, sentence in located(path):
        if OPENING.match(sentence):
            yield f'{where}: begins with "{sentence.split()[0]}": {sentence[:70]}'
        if words(sentence) > MOST_WORDS:
            yield f"{where}: {words(sentence)} words: {sentence[:70]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="folders to check")
    parser.add_argument("--sample", type=int, metavar="N", help="print N random sentences in place of faults")
    parser.add_argument("--seed", type=int, default=1, help="seed of --sample")
    options = parser.parse_args()
    paths = []
    for folder in options.folders or FOLDERS:
        suffixes = {".py", ".h", ".cpp", ".cu", ".cuh", ".hip", ".md"}
        paths += [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes]
    if not options.folders:
        paths += sorted(ROOT.glob("*.md"))
    if options.sample is not None:  # headings and lists of names have fewer than five words
        drawn = sorted({f"{where}: {text}" for path in paths for where, text in located(path) if words(text) > 4})
        print(*random.Random(options.seed).sample(drawn, options.sample), sep="\n")
        return
    found = [fault for path in paths for fault in faults(path)]
    for fault in found:
        print(fault)
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
