"""The distributions that install this package, one per variant. Two such distributions overwrite each other's files."""

from __future__ import annotations

import contextlib
import importlib.metadata
import warnings
from collections.abc import Iterator

# Uninstalling one variant removes files of the others, so all must be uninstalled.
REMEDY = "uninstall all of them, then install the one you want"

NAMES = ("rl-kernel-native", "rl-kernel-cpu", "rl-kernel-cu124", "rl-kernel-cu130", "rl-kernel-rocm6")


def installed() -> list[str]:
    """The installed distributions, such as ``["rl-kernel-cpu 0.1.0"]``; empty in a source tree."""
    found = []
    for name in NAMES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def how_to_install(extra: str) -> str:
    """The command that installs an extra for the installed distribution, or, in a source tree, for a clone."""
    found = [name.split()[0] for name in installed()]
    if found and found[0] != NAMES[0]:
        return f'pip install "{found[0]}[{extra}]"'
    return f'in a clone of the repository: pip install ".[{extra}]"'


def how_to_build(variant: str) -> str:
    """The remedy for a build without a certain backend. It builds from source, because no package index has wheels."""
    return (
        "uninstall it, and in a clone of the repository run: "
        f"pip install . --config-settings=cmake.define.RLK_VARIANT={variant} (docs/build.md)"
    )


@contextlib.contextmanager
def needed(expected: str, cure: str, *modules: str) -> Iterator[None]:
    """A context around imports of other packages. If a package is missing, the error names it and says how to install
    it.

    Args:
        expected: the expected package, such as ``"rk.nn: expected torch 2.10 or newer"``.
        cure: the command that installs it.
        modules: names of the modules that may be missing.
    Raises: ModuleNotFoundError.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = missing_module(error)
        if name not in modules:
            raise
        found = "none" if len({module.partition(".")[0] for module in modules}) == 1 else f"no {name}"
        raise ModuleNotFoundError(f"{expected}, found {found} installed; {cure}", name=name) from None


def missing_module(error: BaseException) -> str | None:
    """The name of the module that an import did not find. Lazy packages, such as transformers, raise an error without
    the name, whose cause has the name."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            return cause.name
        cause = cause.__cause__
    return None


INSTALL_TORCH = "pip install 'torch>=2.10'"


def warn_of_conflict(loaded: str) -> None:
    """Issues a RuntimeWarning if several distributions are installed. ``loaded`` is the variant of the imported
    extension."""
    found = installed()
    if len(found) > 1:
        warnings.warn(
            f"{' and '.join(found)} are installed together and overwrite each other's files; the extension loaded is "
            f"of variant {loaded}. To mend it, {REMEDY}: pip uninstall -y {' '.join(f.split()[0] for f in found)}",
            RuntimeWarning,
            stacklevel=3,
        )
