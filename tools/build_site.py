"""Builds the documentation site from docs/, docstrings, contract.py and the kernels' notes; a warning is an error.

    python tools/build_site.py [--out build/site]

Needs the package, torch, JAX and scripts/requirements-site.txt, and no network. Every operator gets a page: its
functions, which bits it keeps, its bounds against float64, the contract, and the notes of its CUDA kernels.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import rl_kernel_native as rk
from rl_kernel_native import contract, ops
from rl_kernel_native.consistency.contract_table import bound, kept

ROOT = Path(__file__).resolve().parent.parent
# Pages in menu order, by heading; other pages of docs/ come last.
MENU = {
    "Begin": ["quickstart", "which_operator", "build", "wheels", "hf_kernels", "examples"],
    "Use": [
        "models", "vllm", "objectives", "linear", "sampling", "shared_prompts", "tokens", "errors", "faq", "glossary",
    ],
    "Trust": ["positioning", "contract", "numerics", "math"],
    "Reference": ["operators", "api/index", "api/tools"],
    "Project": ["architecture", "contributing", "changelog"],
}  # fmt: skip
# Pages outside docs/: their path in the repository and on the site.
PAGES = {"examples/README.md": "examples.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
TOOLS = (
    "compare", "patch_model", "unpatch_model", "status", "arithmetic", "current_arithmetic", "checkpoint_contexts",
    "canonical_blas", "trace", "workspace_stats",
)  # fmt: skip
# Pages are as wide as the tables, and never wider than the window; the headings beside them keep their words whole.
# Names of modules and classes do not look like links. Pictures without a dark form stand on white.
STYLE = """\
.sidebar-drawer { width: calc(50% - 36em); }
.main { min-width: 0; }
.content { box-sizing: border-box; width: 66em; min-width: 0; max-width: 100%; }
.toc-drawer { flex: 0 1000 15em; min-width: 12em; }
.toc-tree a code { background: none; border: 0; padding: 0; }
.header-right { gap: 0.75rem; }
.indextable { table-layout: fixed; overflow-wrap: anywhere; }
div.math { font-size: 1.15em; overflow-x: auto; overflow-y: hidden; }
@media (max-width: 30em) { h1 { font-size: 1.8em; } table.docutils td:last-child { min-width: 12em; } }
.highlight .nn { color: inherit !important; text-decoration: none !important; }
.highlight .nc { text-decoration: none !important; }
img[src$=".png"] { background: #fff; border-radius: 4px; padding: 4px; }
"""
ABOUT_TYPES = """\
Each operator has a page. In its signatures, `ArrayT` is an array of torch, JAX, NumPy or CuPy, and results have the
same type. `AnyArray` is any array of the same framework. `DType` is a framework's dtype, or its name;
`Group` is a process group of torch.distributed."""
# Operators without a contract header, and the operator whose header is theirs.
CONTRACT_OF = {
    "attention_merge": "attention", "entropy_mask": "covariance_mask", "linear_cross_entropy": "linear_logprob",
    "process_logits": "sample", "verify_draft": "sample",
}  # fmt: skip
# Operators without a folder of CUDA kernels, and the folder whose notes are theirs.
NOTES_OF = {**CONTRACT_OF, "linear_sample": "sample", "silu_mul": "elementwise"}
ELSEWHERE = '="(?:https?:)?//'
FETCHED = re.compile(rf'<(?:script|img|iframe)[^>]* src{ELSEWHERE}|<link[^>]* rel="stylesheet"[^>]* href{ELSEWHERE}')
RAW = re.compile(r"\.\. rubric::|\$[^$<]*\\[a-z]")  # reStructuredText, TeX
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^)\s]+)\)")


def operator_modules() -> dict[str, ModuleType]:
    """Modules of ops/ that describe operators, by file stem, which is an operator's name."""
    stems = [info.name for info in pkgutil.iter_modules(ops.__path__) if callable(getattr(rk, info.name, None))]
    return {stem: importlib.import_module(f"{ops.__name__}.{stem}") for stem in stems}


def relinked(text: str, source: Path, place: Path, pages: dict[Path, Path]) -> str:
    """Rewrites a page's links for its place in the site. A link to a file that is not a page becomes the file's
    name."""

    def link(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        file = (source.parent / path).resolve()
        if file in pages:
            if words.endswith(".md"):  # here the name of a page would say nothing
                words = title(file)
            there = Path(*[".."] * len(place.parent.parts), pages[file])
            return f"{mark}[{words}]({there}{'#' + anchor if anchor else ''})"
        if mark and file.exists():
            return f"![{words}]({Path(*['..'] * len(place.parent.parts), file.name)})"
        name = str(file.relative_to(ROOT))
        return words if words.startswith("`") else f"`{name}`" if words in (name, file.name) else f"{words} (`{name}`)"

    return LINK.sub(link, text)


def title(page: Path) -> str:
    """The heading of a page."""
    return next(line for line in page.read_text().splitlines() if line.startswith("# ")).removeprefix("# ")


def first_sentence(function: Any) -> str:
    """The first sentence of a docstring, as MyST."""
    paragraph = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split()).replace("``", "`")
    return re.split(r"(?<=\.) (?=[A-Z`])", re.sub(r":\w+:`([^`]*)`", r"`\1`", paragraph))[0].rstrip(":")


def operator_page(stem: str, module: Any) -> str:
    """The page of one operator, as MyST."""
    names = [name for name in module.__all__ if name in rk.__all__]
    functions = [name for name in names if inspect.isfunction(getattr(rk, name)) and not name.endswith("_reference")]
    classes = [name for name in names if inspect.isclass(getattr(rk, name))]
    parts = [f"# {stem}\n"]
    parts += [f"```{{eval-rst}}\n.. autofunction:: rl_kernel_native.{name}\n```\n" for name in functions]
    if classes:
        parts.append("## Results\n")
        parts += [f"```{{eval-rst}}\n.. autoclass:: rl_kernel_native.{name}\n```\n" for name in classes]
    rows = [
        row
        for name in dict.fromkeys([stem, *functions])
        if name in contract.operators()
        for row in contract.rows_of(name)
    ]
    if rows:
        parts.append("## Bits and bounds\n")
        parts.append("| output | same bits for | equal on | off float64 by at most |\n|---|---|---|---|")
        for row in dict.fromkeys(rows):
            cells = (f"{row.operator}: {row.output} ({row.kind})", kept(row), row.backends, bound(row))
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n[The contract](../contract.md) says what these words mean.\n")
    else:
        base = CONTRACT_OF[stem]
        parts.append(f"## Bits and bounds\n\nThey follow from those of [{base}]({base}.md#bits-and-bounds).\n")
    notes = NOTES_OF.get(stem, stem)
    parts.append(
        f"## Speed\n\nMeasured figures, with commands: [the notes of the CUDA kernels](../kernels/{notes}.md).\n"
    )
    header = ROOT / "cpp" / "include" / "rlk" / "ops" / f"{stem}.h"
    if stem in CONTRACT_OF:
        base = CONTRACT_OF[stem]
        parts.append(f"## Contract\n\nThis operator follows the contract of [{base}]({base}.md#contract).\n")
    else:
        parts.append(
            f"## Contract\n\nFrom `{header.relative_to(ROOT)}`:\n\n```cpp\n{header.read_text().strip()}\n```\n"
        )
    return "\n".join(parts)


def write_sources(folder: Path) -> None:
    """Writes all files that Sphinx reads."""
    modules = operator_modules()
    pages = {page: page.relative_to(ROOT / "docs") for page in sorted((ROOT / "docs").rglob("*.md"))}
    pages |= {ROOT / name: Path(place) for name, place in PAGES.items()}
    pages[ROOT / "README.md"] = Path("index.md")
    for vendor, prefix in (("cuda", ""), ("hip", "hip_")):
        for notes in sorted((ROOT / vendor).glob("*/*.md")):
            more = "" if notes.name == "README.md" else f"_{notes.stem}"
            pages[notes] = Path("kernels") / f"{prefix}{notes.parent.name}{more}.md"
    # An operator's page holds its contract, so a link to the header leads there.
    headers = {ROOT / "cpp" / "include" / "rlk" / "ops" / f"{stem}.h": Path("api") / f"{stem}.md" for stem in modules}
    for page, place in pages.items():
        text = relinked(page.read_text(), page, place, pages | headers)
        if place.parts[0] in ("kernels", "objectives"):
            text = "---\norphan: true\n---\n\n" + text
        write(folder / place, text + (menu(pages) if place == Path("index.md") else ""))
    write(folder / "static" / "wide.css", STYLE)
    for picture in (ROOT / "docs").iterdir():
        if picture.suffix in (".png", ".svg"):
            shutil.copy(picture, folder)
    listed = "\n".join(f"- [{stem}]({stem}.md): {first_sentence(getattr(rk, stem))}" for stem in modules)
    tree = "\n".join(modules)
    write(
        folder / "api" / "index.md",
        f"# API\n\n{ABOUT_TYPES}\n\n{listed}\n\n```{{toctree}}\n:hidden:\n{tree}\n```\n",
    )
    for stem, module in modules.items():
        write(folder / "api" / f"{stem}.md", operator_page(stem, module))
    tools = "\n".join(f"```{{eval-rst}}\n.. autofunction:: rl_kernel_native.{name}\n```\n" for name in TOOLS)
    modules_of = "".join(
        f"## rk.{name}\n\n```{{eval-rst}}\n.. automodule:: rl_kernel_native.{name}\n   :members:\n```\n\n"
        for name in ("nn", "jax")
    )
    presets = "```{eval-rst}\n.. automodule:: rl_kernel_native.presets\n   :members:\n```\n"
    write(
        folder / "api" / "tools.md", f"# Models, machines and presets\n\n{tools}\n{modules_of}## Presets\n\n{presets}"
    )


def menu(pages: dict[Path, Path]) -> str:
    """The menu at the end of the front page."""
    named = {name for names in MENU.values() for name in names}
    top = [place.stem for place in pages.values() if len(place.parts) == 1 and place.stem != "index"]
    sections = {**MENU, "More": [stem for stem in top if stem not in named]}
    known = {*top, "api/index", "api/tools"}
    found = {title: [name for name in names if name in known] for title, names in sections.items()}
    return "".join(
        "\n```{toctree}\n:hidden:\n:caption: " + title + "\n\n" + "\n".join(names) + "\n```\n"
        for title, names in found.items()
        if names
    )


def without_code(page: str) -> str:
    """A page's HTML without the parts shown as code."""
    return re.sub(r"<(pre|code)\b.*?</\1>", "", page, flags=re.S)


def write(path: Path, text: str) -> None:
    """Writes one source file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def lay_out(_app: Any, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    """Turns names of pages into links, and the sections of a docstring other than Args into paragraphs, since Sphinx
    has no form for them that fits sentences."""
    lines[:] = [re.sub(r"(?<![`/\w])docs/([\w/]+)\.md", r":doc:`/\1`", line) for line in lines]
    made: list[str] = []
    inside = False
    for line in lines:
        section = re.match(r"(Args|Returns|Raises|Source):\s*(.*)$", line)
        if section and (section[1] != "Args" or section[2]):
            made += ["", f"**{section[1]}:** {section[2]}".rstrip()]
            inside = True
        elif inside and (line.startswith("    ") or not line.strip()):
            made.append(line[4:])
        else:
            inside = False
            if line.rstrip() == "Example:":  # begins a paragraph, whatever stands before it
                made.append("")
            made.append(line)
    lines[:] = made


def joined(overloads: list[inspect.Signature], function: Any) -> inspect.Signature:
    """Gives one signature in place of a function's overloads: each parameter and the result have the union of their
    types."""

    def union(types: list[Any]) -> str:
        parts = dict.fromkeys(part for one in types for part in str(one).split(" | "))
        if "bool" in parts or {"Literal[True]", "Literal[False]"} <= set(parts):
            parts = {"bool": None} | {part: None for part in parts if part not in ("Literal[True]", "Literal[False]")}
        return " | ".join(parts)

    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        of_overloads = [one.parameters[name] for one in overloads if name in one.parameters]
        written = [one.default for one in of_overloads if one.default is not one.empty and str(one.default) != "..."]
        parameters.append(
            parameter.replace(
                annotation=union([one.annotation for one in of_overloads]),
                default=written[0] if written else parameter.default,
            )
        )
    return inspect.Signature(parameters, return_annotation=union([one.return_annotation for one in overloads]))


def join_overloads() -> None:
    """Makes autodoc show one signature of each function; overloads are for type checkers."""
    from sphinx.pycode import ModuleAnalyzer

    functions = [function for name in rk.__all__ if inspect.isfunction(function := getattr(rk, name))]
    for name in {function.__module__ for function in functions}:
        module, analyzer = sys.modules[name], ModuleAnalyzer.for_module(name)
        analyzer.analyze()
        for overloaded, overloads in analyzer.overloads.items():
            analyzer.overloads[overloaded] = [joined(overloads, getattr(module, overloaded))]


SETTINGS: dict[str, Any] = {
    "project": "rl_kernel_native",
    "html_title": "rl_kernel_native",
    "html_theme": "furo",
    "extensions": ["myst_parser", "site_math", "sphinx.ext.autodoc", "sphinx.ext.napoleon"],
    "myst_enable_extensions": ["dollarmath"],
    "myst_dmath_allow_space": False,  # between two formulas are words
    "html_math_renderer": "mathml",
    "myst_heading_anchors": 4,
    "myst_fence_as_directive": ["math"],
    "autodoc_typehints": "signature",
    "autodoc_typehints_format": "short",
    "napoleon_google_docstring": True,
    "napoleon_use_param": False,  # names that share a description share a line
    "napoleon_attr_annotations": False,  # the signature has the types
    "python_maximum_signature_line_length": 90,
    "toc_object_entries_show_parents": "hide",  # a method under its class needs no longer name
    "html_copy_source": False,
    "html_css_files": ["wide.css"],
    "html_show_sourcelink": False,
    "html_show_copyright": False,
    "nitpicky": False,
}


def build(out: Path) -> int:
    """Writes the site to `out`. Returns Sphinx's status, which is not 0 after a warning, or 1 if a page shows
    raw markup as text or fetches files from elsewhere."""
    from sphinx.application import Sphinx

    sources = out / "sources"
    shutil.rmtree(out, ignore_errors=True)
    write_sources(sources)
    settings = {**SETTINGS, "html_static_path": [str(sources / "static")]}
    places = (sources, None, out / "html", out / "trees", "html")
    app = Sphinx(*places, confoverrides=settings, warningiserror=True, exception_on_warning=False, status=None)
    app.connect("autodoc-process-docstring", lay_out, priority=400)  # runs before napoleon, which reads Args
    join_overloads()
    app.build()
    pages = sorted((out / "html").rglob("*.html"))
    unread = [str(page.relative_to(out)) for page in pages if RAW.search(without_code(page.read_text()))]
    if unread:
        print(f"markup that is shown as text: {', '.join(unread)}", file=sys.stderr)
    remote = [str(page.relative_to(out)) for page in pages if FETCHED.search(page.read_text())]
    if remote:
        print(f"pages that fetch files from elsewhere: {', '.join(remote)}", file=sys.stderr)
    return int(app.statuscode) or int(bool(unread or remote))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    return build(parser.parse_args().out.resolve())  # Sphinx reads a relative path from the sources


if __name__ == "__main__":
    sys.exit(main())
