"""A compiled extension that was built from other sources is refused at import, and the message names the remedy."""

from __future__ import annotations

import re
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
DECLARED = dict(_native._declared)


def extension(functions: dict[str, str]) -> SimpleNamespace:
    """An extension whose functions have the given docstrings."""
    made = {name: SimpleNamespace(__nb_signature__=((text, None, None),)) for name, text in functions.items()}
    return SimpleNamespace(**made, __file__="/somewhere/_C.so", version="0.1.0")


def require(functions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the import's check on an extension."""
    monkeypatch.setattr(_native, "module", extension(functions))
    _native.functions(**DECLARED)
    _native.require_no_others()


def changed(name: str, change: Callable[[str], str]) -> dict[str, str]:
    text = change(FUNCTIONS[name])
    assert text != FUNCTIONS[name]
    return {**FUNCTIONS, name: text}


OTHERS = {
    "a function is missing": ({n: text for n, text in FUNCTIONS.items() if n != "gae"}, "gae(object*8, int)", "none"),
    "a function has come": ({**FUNCTIONS, "another": FUNCTIONS["gae"]}, "declared functions", "another(object*8, int)"),
    "an array has come": (
        changed("gae", lambda text: text.replace("arg0:", "arg: object | None, arg0:")),
        "gae(object*8, int)",
        "gae(object*9, int)",
    ),
    "an array has gone": (
        changed("gae", lambda text: text.replace("arg0: object | None, ", "")),
        "gae(object*8, int)",
        "gae(object*7, int)",
    ),
    "a flag became a number": (
        changed("kl", lambda text: text.replace("bool", "int", 1)), "int, bool, int", "kl(object*5, int*3, float"
    ),
    "two options changed places": (
        changed("kl", lambda text: text.replace("int", "x").replace("bool", "int", 1)), "kl(object*5, int, bool", "kl("
    ),
}  # fmt: skip


def test_the_extension_of_this_build_is_the_one_that_the_sources_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(FUNCTIONS) > 50
    assert FUNCTIONS.keys() == DECLARED.keys()
    require(FUNCTIONS, monkeypatch)


def test_words_of_another_nanobind_for_the_same_types_are_no_other_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    require({n: text.replace("object | None", "typing.Optional[object]") for n, text in FUNCTIONS.items()}, monkeypatch)


@pytest.mark.parametrize("other", OTHERS)
def test_another_interface_is_refused(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    functions, wanted, found = OTHERS[other]
    words = f"expected .* with .*{re.escape(wanted)}.*, got {re.escape(found)}.* of /somewhere/_C.so.*rebuild it"
    with pytest.raises(ImportError, match=f"^rl_kernel_native: {words}"):
        require(functions, monkeypatch)


def test_the_import_refuses_an_older_extension(tmp_path: Path) -> None:
    """This package, with an operator's sources that require another interface."""
    package = tmp_path / "rl_kernel_native"
    (package / "ops").mkdir(parents=True)
    here = Path(rk.__file__).parent
    for path in (*here.iterdir(), *(here / "ops").glob("*.py")):
        if path.name not in ("ops", "gae.py", "__pycache__"):
            (package / path.relative_to(here)).symlink_to(path)
    for path in Path(_native.module.__file__).parent.glob("_C*"):
        if not (package / path.name).exists():
            (package / path.name).symlink_to(path)
    source, declared = (here / "ops" / "gae.py").read_text(), f'gae="{DECLARED["gae"]}"'
    assert declared in source
    (package / "ops" / "gae.py").write_text(source.replace(declared, 'gae="object, str"'))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rl_kernel_native"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().split("\n")[-1]
    words = "ImportError: rl_kernel_native: expected a compiled extension with gae(object, str), got gae("
    assert last.startswith(words), last
    assert "pip install ." in last
