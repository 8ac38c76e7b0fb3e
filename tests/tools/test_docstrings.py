"""Every public call has a docstring with its sections in order, and an example whose output is right."""

from __future__ import annotations

import doctest
import inspect
import io
import re
import typing
from typing import Any

import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch")

CALLS = sorted(name for name in rk.__all__ if inspect.isfunction(getattr(rk, name)) and not name.endswith("_reference"))
# canonical_blas changes the environment of its process.
WITHOUT = {"canonical_blas"}


def has_example(name: str) -> bool:
    return ">>> " in (getattr(rk, name).__doc__ or "")


def test_calls_have_examples() -> None:
    assert not [name for name in CALLS if not has_example(name) and name not in WITHOUT]


@pytest.mark.parametrize("name", [name for name in CALLS if has_example(name)])
def test_the_example_of_a_call_gives_what_it_shows(name: str) -> None:
    """Examples begin after `import torch` and `import rl_kernel_native as rk`."""
    if name in ("compare", "patch_model", "status", "unpatch_model"):
        pytest.importorskip("transformers")
    said = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    text = inspect.getdoc(getattr(rk, name)) or ""
    runner.run(doctest.DocTestParser().get_doctest(text, {"torch": torch, "rk": rk}, name, name, 0), out=said.write)
    assert runner.tries > 0
    assert not said.getvalue()


@pytest.mark.parametrize("name", rk.presets.__all__)
def test_the_example_of_a_preset_gives_what_it_shows(name: str) -> None:
    said, runner = io.StringIO(), doctest.DocTestRunner(verbose=False)
    text = inspect.getdoc(getattr(rk.presets, name)) or ""
    runner.run(doctest.DocTestParser().get_doctest(text, {"torch": torch, "rk": rk}, name, name, 0), out=said.write)
    assert runner.tries > 0
    assert not said.getvalue()


CLASSES = {name: getattr(rk, name) for name in rk.__all__ if inspect.isclass(getattr(rk, name))}
IN_CLASSES = {
    test.name: test
    for name, kind in CLASSES.items()
    for test in doctest.DocTestFinder().find(kind, name, globs={"torch": torch, "rk": rk})
    if test.examples
}


def test_classes_with_examples_are_found() -> None:
    assert {"LogprobSemantics", "DenominatorStatus.of"} <= set(IN_CLASSES)


@pytest.mark.parametrize("name", IN_CLASSES)
def test_the_example_of_a_class_gives_what_it_shows(name: str) -> None:
    said = io.StringIO()
    doctest.DocTestRunner(verbose=False).run(IN_CLASSES[name], out=said.write)
    assert not said.getvalue()


@pytest.mark.parametrize("name", CALLS)
def test_sections_stand_in_order(name: str) -> None:
    sections = re.findall(r"^(Args|Returns|Raises|Source|Example):", inspect.getdoc(getattr(rk, name)) or "", re.M)
    order = ["Args", "Returns", "Raises", "Source", "Example"]
    assert sections == sorted(sections, key=order.index)


def parameters(call: Any) -> tuple[list[str], set[str]]:
    """Names of parameters that may be positional, in order, and names of the other parameters."""
    found = inspect.signature(call).parameters.values()
    return [p.name for p in found if p.kind != p.KEYWORD_ONLY], {p.name for p in found if p.kind == p.KEYWORD_ONLY}


@pytest.mark.skipif(not hasattr(typing, "get_overloads"), reason="Python 3.10 keeps no overloads")
@pytest.mark.parametrize("name", CALLS)
def test_overloads_name_every_parameter(name: str) -> None:
    call = getattr(rk, name)
    for overload in typing.get_overloads(call):
        assert parameters(overload) == parameters(call)
