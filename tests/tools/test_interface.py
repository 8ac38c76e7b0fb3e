"""A compiled extension that was built from other sources is refused at import, in words that name the cure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import rl_kernel_native as rk
from rl_kernel_native import _native

FUNCTIONS = {
    name: function.__nb_signature__[0][0]
    for name, function in vars(_native.module).items()
    if hasattr(function, "__nb_signature__")
}


def extension(functions: dict[str, str]) -> SimpleNamespace:
    """One whose functions say that they take what the texts say."""
    made = {name: SimpleNamespace(__nb_signature__=((text, None, None),)) for name, text in functions.items()}
    return SimpleNamespace(**made, __file__="/somewhere/_C.so", version="0.1.0")


def changed(name: str, change: Callable[[str], str]) -> dict[str, str]:
    text = change(FUNCTIONS[name])
    assert text != FUNCTIONS[name]
    return {**FUNCTIONS, name: text}


OTHERS = {
    "a function is missing": {n: text for n, text in FUNCTIONS.items() if n != "gae"},
    "a function has come": {**FUNCTIONS, "another": FUNCTIONS["gae"]},
    "an array has come": changed("gae", lambda text: text.replace("arg0:", "arg: object | None, arg0:")),
    "an array has gone": changed("gae", lambda text: text.replace("arg0: object | None, ", "")),
    "a flag became a number": changed("kl", lambda text: text.replace("bool", "int", 1)),
    "two options changed places": changed("kl", lambda text: text.replace("int", "x").replace("bool", "int", 1)),
}


def test_the_extension_of_this_build_is_the_one_that_the_sources_call() -> None:
    assert len(FUNCTIONS) > 50
    assert _native.interface_of(extension(FUNCTIONS)) == _native.INTERFACE == _native.interface_of(_native.module)


def test_words_of_another_nanobind_for_the_same_types_are_no_other_interface() -> None:
    texts = {name: text.replace("object | None", "typing.Optional[object]") for name, text in FUNCTIONS.items()}
    assert _native.interface_of(extension(texts)) == _native.INTERFACE


@pytest.mark.parametrize("other", OTHERS)
def test_another_interface_is_refused(other: str) -> None:
    words = rf"^rl_kernel_native: expected .* interface {_native.INTERFACE}, got \w+ of /somewhere/_C.so.*rebuild it"
    with pytest.raises(ImportError, match=words):
        _native.require_interface(extension(OTHERS[other]))


def test_the_import_refuses_an_older_extension(tmp_path: Path) -> None:
    """The package as it lies here, with sources that ask for another interface."""
    package = tmp_path / "rl_kernel_native"
    package.mkdir()
    for path in Path(rk.__file__).parent.iterdir():
        if path.name not in ("_native.py", "__pycache__"):
            (package / path.name).symlink_to(path)
    for path in Path(_native.module.__file__).parent.glob("_C*"):
        if not (package / path.name).exists():
            (package / path.name).symlink_to(path)
    source = Path(_native.__file__).read_text()
    (package / "_native.py").write_text(source.replace(f'"{_native.INTERFACE}"', '"12345678"'))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rl_kernel_native"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().split("\n")[-1]
    assert last.startswith("ImportError: rl_kernel_native: expected a compiled extension with interface 12345678"), last
    assert "pip install ." in last
