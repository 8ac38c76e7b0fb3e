"""rl_kernel_native.integrations.trl: the functions of TRL that it replaces and restores, and its refusals."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import threading
from typing import Any

import pytest

import rl_kernel_native as rk
from trl_seams import NEWEST, OLDEST, SEAMS, STOCK, PlainHead, grpo_trainer, trl, utils


def in_place() -> list[Any]:
    return [vars(owner)[name] for owner, name in SEAMS]


def test_it_patches_and_restores() -> None:
    with rk.integrations.trl.enabled():
        patched = in_place()
        assert all(a is not b for a, b in zip(patched, STOCK, strict=True))
        assert all(x.__module__ == "rl_kernel_native.integrations.trl" for x in patched)
    assert in_place() == STOCK


def test_a_call_without_with_warns_that_nothing_is_replaced() -> None:
    with pytest.warns(RuntimeWarning, match="was called without `with`, so TRL is unchanged: write `with rk") as found:
        rk.integrations.trl.enabled()
    assert found[0].filename == __file__
    assert in_place() == STOCK


def test_contexts_and_decorated_functions_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    @rk.integrations.trl.enabled()  # type: ignore[operator]
    def swapped() -> bool:
        return in_place() != STOCK

    assert swapped()
    assert swapped()
    with rk.integrations.trl.enabled():
        pass
    del swapped
    gc.collect()
    assert not [w for w in recwarn if "without `with`" in str(w.message)]
    assert in_place() == STOCK


def test_it_restores_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), rk.integrations.trl.enabled():
        raise ZeroDivisionError
    assert in_place() == STOCK


def test_contexts_may_be_nested() -> None:
    with rk.integrations.trl.enabled():
        patched = in_place()
        with pytest.raises(ZeroDivisionError), rk.integrations.trl.enabled():
            raise ZeroDivisionError
        assert in_place() == patched
    assert in_place() == STOCK


def test_the_last_of_overlapping_contexts_restores() -> None:
    first_is_open, second_is_open = threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        assert first_is_open.wait(60)
        with rk.integrations.trl.enabled():
            second_is_open.set()
            thread_may_end.wait(60)
            seen.append(in_place())

    thread_may_end = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    with rk.integrations.trl.enabled():
        patched = in_place()
        first_is_open.set()
        assert second_is_open.wait(60)
    assert in_place() == patched
    thread_may_end.set()
    thread.join(60)
    assert seen == [patched]
    assert in_place() == STOCK


@pytest.mark.parametrize("found", ["0.29.1", "1.14.2", "1.2.0"])
def test_an_older_release_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(trl, "__version__", found)
    message = rf"trl: expected version {OLDEST} or newer, found {found}; pip install 'trl~={NEWEST}\.0'"
    with pytest.raises(ImportError, match=message), rk.integrations.trl.enabled():
        pass
    assert in_place() == STOCK


@pytest.mark.parametrize(("found", "lines"), [(f"{OLDEST}.0", 0), (f"{NEWEST}.3", 0), ("1.17.0", 1), ("2.0.0rc1", 1)])
def test_a_newer_release_is_served_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str, lines: int
) -> None:
    monkeypatch.setattr(trl, "__version__", found)
    with caplog.at_level("WARNING", logger="rl_kernel_native"), rk.integrations.trl.enabled():
        assert in_place() != STOCK
    assert [f"newer than {NEWEST}" in record.getMessage() for record in caplog.records] == [True] * lines


def test_no_trl_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        """Imitates an environment without the package: its name is not found."""

        def find_spec(self, name: str, *_: Any) -> None:
            if name == "trl":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.delitem(sys.modules, "trl")
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    message = rf"trl: expected version {OLDEST} or newer, found none installed; pip install 'trl~={NEWEST}\.0'"
    with pytest.raises(ModuleNotFoundError, match=message), rk.integrations.trl.enabled():
        pass


def without(function: Any, name: str) -> Any:
    """A function whose signature lacks the named parameter."""
    signature = inspect.signature(function)
    left = [p for p in signature.parameters.values() if p.name != name]

    def made(*_: Any, **__: Any) -> None:
        raise AssertionError

    made.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
    return made


TRAINER = grpo_trainer.GRPOTrainer


@pytest.mark.parametrize(
    ("owner", "name", "parameter", "words"),
    [
        (utils, "_ChunkedLogProbFunction", None, r"trl\.trainer\.utils\._ChunkedLogProbFunction"),
        (utils, "nanmin", None, r"trl\.trainer\.utils\.nanmin"),
        (TRAINER, "_compute_loss", None, r"GRPOTrainer\._compute_loss"),
        (TRAINER, "_compute_loss", "inputs", r"GRPOTrainer\._compute_loss with inputs"),
        (TRAINER, "get_off_policy_mask", "mask", r"GRPOTrainer\.get_off_policy_mask with mask"),
        (
            STOCK[0],
            "forward",
            "softcap" if STOCK[0] is PlainHead else "logit_scale",
            r"trl\.trainer\.utils\._ChunkedLogProbFunction of ctx",
        ),
    ],
)
def test_a_missing_seam_is_a_typed_error(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, parameter: str | None, words: str
) -> None:
    if parameter is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, without(getattr(owner, name), parameter))
    message = rf"trl: expected {words}.*, which version {trl.__version__} lacks; pip install"
    with pytest.raises(ImportError, match=message), rk.integrations.trl.enabled():
        pass
    monkeypatch.undo()
    assert in_place() == STOCK


def test_importing_the_package_imports_neither_torch_nor_trl() -> None:
    code = (
        "import sys, rl_kernel_native as rk; rk.integrations; "
        "print([m for m in ('torch', 'trl', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_its_torch_half_does_not_import_trl() -> None:
    code = "import sys, rl_kernel_native as rk; rk.integrations.trl.enabled; print('trl' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
