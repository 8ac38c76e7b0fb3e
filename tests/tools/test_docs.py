"""The code in README.md, docs/linear.md, docs/sampling.md, docs/objectives.md and its pages runs. Its results agree
with the surrounding text, and the names on the pages exist."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import io
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rl_kernel_native as rk
from cases import differing
from ports import free_port
from rl_kernel_native.ops.policy_spec import CLIPS
from scripts import load_script

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


def run_code_of(page: str) -> dict[str, Any]:
    """Runs a page's Python and returns the names it defines."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S):
        exec(compile(block, page, "exec"), names)
    return names


def test_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed results of this library are the same on every machine; how far stock torch is off depends on the
    CPU."""
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    example = (ROOT / "examples" / "rollout_and_training.py").read_text()
    assert example.endswith(code), "examples/rollout_and_training.py is the same program"
    run_code_of("README.md")
    stock, ours = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"stock: [1-9]\d* of 192 tokens differ, max \|ratio - 1\| 0\.\d+", stock)
    assert ours in readme
    assert "rl_kernel_native: 0 of 192 tokens differ, max |ratio - 1| 0" in ours


def tool(name: str) -> Any:
    """A module of tools/."""
    return load_script(ROOT / "tools" / f"{name}.py")


def test_the_page_of_an_operator_has_signature_bits_speed_and_contract() -> None:
    """Composed operators, too: their sections lead to the operator that has the contract and the kernels."""
    site = tool("build_site")
    modules = site.operator_modules()
    assert len(modules) > 30
    for stem, module in modules.items():
        page = site.operator_page(stem, module)
        assert f"autofunction:: rl_kernel_native.{stem}\n" in page
        assert [*re.findall("^## (Bits and bounds|Speed|Contract)$", page, re.M)] == [
            "Bits and bounds", "Speed", "Contract",
        ], stem  # fmt: skip
        for folder in re.findall(r"\.\./kernels/(\w+)\.md", page):
            assert stem in (ROOT / "cuda" / folder / "README.md").read_text() or stem in site.CONTRACT_OF, stem
        for base in re.findall(r"\]\((\w+)\.md#contract\)", page):
            assert (ROOT / "cpp" / "include" / "rlk" / "ops" / f"{base}.h").is_file(), stem


def test_an_example_is_no_part_of_the_section_before_it() -> None:
    """Sphinx showed its markup as text where no empty line stood between the example and the section."""
    lines = ["Sums.", "", "Source: a page.", "Example:", "    >>> 1 + 1", "    2"]
    tool("build_site").lay_out(None, "", "", None, None, lines)
    assert lines == ["Sums.", "", "", "**Source:** a page.", "", "Example:", "    >>> 1 + 1", "    2"]


def test_a_page_that_shows_markup_or_fetches_files_is_noticed() -> None:
    """A formula between dollars was shown as text, and others needed a script from elsewhere."""
    site = tool("build_site")
    for shown in (r"<p>the clip $1 + \epsilon_h$</p>", ".. rubric:: Example"):
        assert site.RAW.search(site.without_code(shown))
    for kept in (r"<p><code>$OUT \n</code> costs $5</p>", "<pre>\n$a\n\\n</pre>", "<math><mi>l</mi></math>"):
        assert not site.RAW.search(site.without_code(kept))
    for fetched in ('<script src="https://a.org/b.js">', '<link rel="stylesheet" href="//a.org/b.css">'):
        assert site.FETCHED.search(fetched)
    assert not site.FETCHED.search('<a href="https://a.org"><img src="front.svg"><script src="_static/a.js">')


@pytest.mark.parametrize("name", ["build_site", "build_wheels"])
def test_a_bracket_before_a_link_is_no_part_of_it(name: str) -> None:
    assert re.findall(tool(name).LINK, "in `[0, 2^32)`. [`a`](b.md) and ![c](d.png)") == [
        ("", "`a`", "b.md"),
        ("!", "c", "d.png"),
    ]


def test_the_readme_is_read_in_a_minute() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 700
    assert readme.index("pip install") < readme.index("```python"), "install before code"


def test_the_speeds_of_the_front_page_stand_in_the_notes() -> None:
    """A row repeats figures of the page that it links to; a row without a link repeats figures of the previous row's
    page."""
    (section,) = re.findall(r"^## Speed\n(.*?)^## ", (ROOT / "README.md").read_text(), re.S | re.M)
    figures = re.compile(r"\d+\.\d+|\d\d+")
    page, rows = "", re.findall(r"^\| (.*?\w.*?) \| (.*\d.*?) \| (.*?) \|$", section, re.M)
    assert len(rows) >= 10
    for what, here, peer in rows:
        page = next(iter(re.findall(r"\]\(([^)]+)\)", what)), page)
        assert figures.search(here), what
        missing = set(figures.findall(f"{here} {peer}")) - set(figures.findall((ROOT / page).read_text()))
        assert not missing, f"{page} does not have {missing} of the row {what}"


def test_the_table_of_tasks_names_functions_and_their_arguments() -> None:
    """The page is for readers who look for a task: each call is of a public function and gives it arguments it has."""
    pytest.importorskip("jax")
    text = (ROOT / "docs" / "which_operator.md").read_text()
    calls = re.findall(r"\brk((?:\.[a-zA-Z_]+)+)(?:\(([^`]*)\))?", text)
    assert len(calls) > 40
    for path, arguments in calls:
        found: Any = importlib.import_module("rl_kernel_native")
        for name in path[1:].split("."):
            if isinstance(found, ModuleType) and not hasattr(found, name):
                found = importlib.import_module(f"{found.__name__}.{name}")
            else:
                found = getattr(found, name)
        known = inspect.signature(found).parameters if callable(found) else {}
        given = re.findall(r"(?<!\w)(\w+)=", re.sub(r"\([^()]*\)", "", arguments))
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        assert takes_any or set(given) <= set(known), f"rk{path} has no argument {set(given) - set(known)}"


def test_the_operators_page_runs() -> None:
    assert "rk" in run_code_of("docs/operators.md")


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text())
    assert not [link for link in links if not (path.parent / link).exists()]


# ---- docs/objectives.md and its pages -------------------------------------------------------------------------------

INDEX = ROOT / "docs" / "objectives.md"
PAGES = sorted((ROOT / "docs" / "objectives").glob("*.md"))
NAMED = {page.stem: page for page in (INDEX, *PAGES)}
LINK = re.compile(r"\[([^]]+)\]\(([^)#:]+)\)")


def run_examples_of(page: Path, names: dict[str, Any]) -> str:
    """Runs the page's examples in one session, and returns how their output differs from the page."""
    said = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    for i, block in enumerate(re.findall(r"```pycon\n(.*?)```", page.read_text(), re.S)):
        test = doctest.DocTestParser().get_doctest(block, names, f"{page.name}, example {i}", str(page), 0)
        runner.run(test, out=said.write, clear_globs=False)
        names = test.globs
    assert runner.tries > 0, f"{page.name} has no example"
    return said.getvalue()


@pytest.fixture(scope="module")
def begun() -> dict[str, Any]:
    """Names that the examples of pages begin with."""
    names: dict[str, Any] = {}
    block = re.search(r"```pycon\n(.*?)```", INDEX.read_text(), re.S)
    assert block is not None
    exec(compile("".join(e.source for e in doctest.DocTestParser().get_examples(block[1])), "index", "exec"), names)
    return names


@pytest.mark.parametrize("name", NAMED)
def test_the_examples_of_an_objective_give_what_its_page_shows(name: str, begun: dict[str, Any]) -> None:
    begun["logprob"].grad = None
    difference = run_examples_of(NAMED[name], dict(begun))
    assert not difference, difference


def test_an_example_that_shows_something_else_is_noticed(tmp_path: Path, begun: dict[str, Any]) -> None:
    page = tmp_path / "page.md"
    page.write_text("```pycon\n>>> ref - old\ntensor(0.)\n```\n")
    assert "Expected" in run_examples_of(page, dict(begun))


@pytest.mark.parametrize("name", NAMED)
def test_a_preset_is_the_spec_beside_it(name: str) -> None:
    known = {"presets": rk.presets, "PolicySpec": rk.PolicySpec}
    for preset, spec in re.findall(
        r"^\|.*?`(presets\..*?\))` \| `(PolicySpec\(.*?\))` \|$", NAMED[name].read_text(), re.M
    ):
        found = eval(preset, known)
        assert found.lenient, preset
        assert dataclasses.replace(found, lenient=False) == eval(spec, known), preset


def test_every_preset_and_every_clip_has_a_row() -> None:
    rows = "".join(page.read_text() for page in PAGES)
    specs = [eval(s, {"PolicySpec": rk.PolicySpec}) for s in re.findall(r"`(PolicySpec\(.*?\))` \|$", rows, re.M)]
    assert {spec.clip for spec in specs} == set(CLIPS)
    assert {spec.kl for spec in specs} >= {None, "k1", "k2", "k3"}
    assert all(f"presets.{name}(" in rows for name in set(rk.presets.__all__) - {"vime"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_its_source_and_tests_that_exist(page: Path) -> None:
    text = page.read_text()
    assert "\nSource: " in text
    named = [(name, path) for name, path in LINK.findall(text[text.index("\nTests: ") :]) if path.endswith(".py")]
    assert named
    for name, path in named:
        source = (page.parent / path).resolve()
        assert source.parent.parent == ROOT / "tests", path
        assert f"\ndef {name.strip('`')}(" in source.read_text(), f"{path} has no {name}"


def test_the_index_has_every_page_and_links_lead_somewhere() -> None:
    listed = [path for _, path in LINK.findall(INDEX.read_text()) if path.startswith("objectives/")]
    assert sorted(listed) == [f"objectives/{page.name}" for page in PAGES]
    for page in NAMED.values():
        for _, path in LINK.findall(page.read_text()):
            assert (page.parent / path).exists(), f"{page.name}: {path}"


def test_the_examples_of_sampling_give_what_its_page_shows() -> None:
    page = ROOT / "docs" / "sampling.md"
    assert run_examples_of(page, {}) == ""
    for _, target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_examples_of_shared_prompts_give_what_the_page_shows() -> None:
    assert run_examples_of(ROOT / "docs" / "shared_prompts.md", {}) == ""


# ---- layers of docs/linear.md ---------------------------------------------------------------------------------------


def test_a_layer_of_the_docs_takes_main_grad() -> None:
    layer = run_code_of("docs/linear.md")["Linear"](64, 8)
    x = torch.randn(5, 64)
    layer.weight.main_grad = torch.zeros(8, 64)
    y = layer(x)
    y.backward(torch.ones_like(y))
    assert layer.weight.grad is None
    assert not differing(layer.weight.main_grad, rk.linear_weight_grad(torch.ones(5, 8), x))
    with torch.no_grad():
        layer.weight.requires_grad_(False)
        assert not differing(layer(x), y)


def test_a_head_of_the_docs_has_gradients_that_no_split_changes() -> None:
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(6, 32, generator=generator), torch.randint(0, 40, (6,), generator=generator)
    mask, found = torch.arange(6) != 4, []
    layer = run_code_of("docs/linear.md")["Head"](32, 40)
    for cuts in ((slice(0, 6),), (slice(0, 2), slice(2, 6))):
        leaf = x.clone().requires_grad_()
        for rows in cuts:
            layer(leaf[rows], target[rows], mask[rows], 5).backward()
        found.append(leaf.grad)
    assert not differing(*found)
    assert found[0].any(-1).tolist() == mask.tolist()


def test_a_head_with_lora_of_the_docs_trains_its_factors_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(40, 32, generator=generator))
    x, target = torch.randn(6, 32, generator=generator), torch.randint(0, 40, (6,), generator=generator)
    layer = run_code_of("docs/linear.md")["LoraHead"](weight, 4, 8)
    assert not differing(layer(x, target), rk.linear_logprob(x, weight, target)), "lora_b is zero at first"
    layer(x, target).sum().backward()
    assert weight.grad is None
    assert bool(layer.lora_b.grad.any())
    torch.nn.init.ones_(layer.lora_b)
    layer(x, target).sum().backward()
    assert bool(layer.lora_a.grad.any())


def on_a_rank(rank: int, ranks: int, port: int, k_segments: int) -> None:
    """A row-parallel layer of the docs, compared with the same layer on one rank."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, dy = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((7, 128), (24, 128), (24,), (7, 24))
    )
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    want = rk.linear(*whole, k_segments=k_segments)
    want.backward(dy)
    width = 128 // ranks
    columns = slice(rank * width, (rank + 1) * width)
    for main_grad in (None, torch.zeros(24, width)):
        layer = run_code_of("docs/linear.md")["RowParallelLinear"](weight[:, columns].clone(), bias.clone(), k_segments)
        if main_grad is not None:
            layer.weight.main_grad = main_grad
        shard = x[:, columns].clone().requires_grad_()
        y = layer(shard)
        y.backward(dy)
        assert not differing(y, want)
        assert not differing(shard.grad, whole[0].grad[:, columns])
        assert not differing(layer.bias.grad, whole[2].grad)
        if main_grad is None:
            assert not differing(layer.weight.grad, whole[1].grad[:, columns])
        else:
            assert layer.weight.grad is None
            assert not differing(main_grad.bfloat16(), whole[1].grad[:, columns])
    dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "k_segments"), [(2, 2), (2, 8)])
def test_a_row_parallel_layer_of_the_docs_has_the_bytes_of_one_rank(ranks: int, k_segments: int) -> None:
    port = free_port()
    torch.multiprocessing.spawn(on_a_rank, (ranks, port, k_segments), nprocs=ranks)
