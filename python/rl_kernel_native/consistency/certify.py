"""An invariance certificate: the result of a row with fixed content has the same sha256 in every variation of its
computation.

The operators of a model's forward, and kl, are computed forward and backward in every dtype. A row is computed alone,
and at the beginning, in the middle and at the end of batches. A row is also computed with other neighbours, in other
layouts, over shards, and repeatedly. A token sum (a gradient that is summed over all tokens) is computed in other
layouts, with padding after its tokens, and in chunks. To check a certificate, compute it on another machine: the
content is the same on every machine, and contract.py says on which machines the digests must be equal.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import rl_kernel_native as rk

from .. import contract
from .._native import module as native
from ..cases import CERTIFIED, LAYOUTS, MOST_NEIGHBOURS, Arrays, Case, certified_cases
from .environment import computing_as
from .errors import BadInput
from .progress import Progress

BATCHES = (1, 2, 7, 32, 129)
GPU_BATCHES = (*BATCHES, 8192)
POSITIONS = ("first", "middle", "last")
RUNS = 3
PADDING = 300  # padding rows after a token sum
FORMAT = 1


@dataclass(frozen=True)
class Variation:
    """One variation of the row's computation.

    Attributes:
        neighbours: seed of the other rows' content.
        way: the name of another call that must give the same results (Case.ways), or "".
    """

    batch: int = 1
    position: int = 0
    layout: str = "contiguous"
    neighbours: int = 1
    run: int = 0
    way: str = ""

    def __str__(self) -> str:
        words = [f"position {self.position} of a batch of {self.batch}", self.layout, f"neighbours {self.neighbours}"]
        return ", ".join(words + [f"run {self.run}"] * (self.run > 0) + [self.way] * bool(self.way))


@dataclass(frozen=True)
class Entry:
    """A certificate's entry for one pass of one operator in one dtype and shape.

    Attributes:
        operator, direction, outputs: the names in contract.py.
        exp: mode of the exponential, or "" without an exponential.
        options: the call's options, in words.
        backends: the backends whose digests must be equal, a name in contract.BACKENDS. With the hardware exponential,
            these backends have one architecture.
        batches, positions, layouts, ways, runs, padding: the tested variations.
        variations: number of compared computations.
        sha256: hash of the outputs' bytes when the row is computed alone.
        differs: the first variation that gave other bytes, in words; empty if no variation did.
    """

    key: str
    operator: str
    direction: str
    dtype: str
    shape: tuple[int, ...]
    outputs: tuple[str, ...]
    exp: str
    options: str
    backends: str
    batches: tuple[int, ...]
    positions: tuple[str, ...]
    layouts: tuple[str, ...]
    ways: tuple[str, ...]
    runs: int
    padding: bool
    variations: int
    sha256: str
    differs: str = ""

    @property
    def invariant(self) -> bool:
        return not self.differs

    def as_json(self) -> dict[str, Any]:
        fields = {"operator": self.operator, "pass": self.direction}
        said = ("dtype", "shape", "outputs", "exp", "options", "backends")
        varied = ("batches", "positions", "layouts", "ways", "runs", "padding", "variations")
        fields |= {name: getattr(self, name) for name in (*said, *varied, "sha256")}
        return fields | {"invariant": self.invariant} | ({"differs": self.differs} if self.differs else {})


@dataclass(frozen=True)
class Certificate:
    """A certificate: all entries, and a description of the machine."""

    environment: Mapping[str, Any]
    entries: tuple[Entry, ...] = field(repr=False)

    @property
    def invariant(self) -> bool:
        return all(entry.invariant for entry in self.entries)

    @property
    def first_failure(self) -> str:
        """The first entry that is not invariant, and the variation that shows it; "" if all entries are invariant."""
        return next((f"{entry.key}: {entry.differs}" for entry in self.entries if entry.differs), "")

    def as_json(self) -> dict[str, Any]:
        entries = [entry.as_json() for entry in self.entries]
        return {"format": FORMAT, **self.environment, "invariant": self.invariant, "entries": entries}


def certify(
    device: str = "auto",
    operators: Iterable[str] = (),
    quick: bool = False,
    *,
    arithmetic: str | None = None,
    arrays: Arrays | None = None,
    progress: Progress | None = None,
) -> Certificate:
    """Computes a certificate.

    Args:
        device: "auto" (a CUDA device if there is one), "cpu", "cuda" or "cuda:N".
        operators: names in CERTIFIED; empty: all of them.
        quick: only two shapes of each operator, as in continuous integration.
        arithmetic: the CPU's arithmetic, as for `rk.arithmetic`; None: the current arithmetic. A GPU always uses its
            own arithmetic.
        arrays: the arrays of another framework than torch, on `device`.
        progress: shows the number of computed entries.
    Raises: BadInput for a missing device or operator.
    """
    chosen = tuple(operators)
    for name in chosen:
        if name not in CERTIFIED:
            raise BadInput(f"--operator {name}: want one of {', '.join(CERTIFIED)}")
        if not hasattr(rk, name):
            raise BadInput(f"--operator {name}: this build does not have it")
    arrays = arrays or Arrays(resolve_device(device))
    with computing_as(arithmetic, arrays.device):
        found = [case for case in certified_cases(arrays, quick) if not chosen or case.operator in chosen]
        entries = []
        with (progress or Progress()).task("certify", len(found)) as advance:
            for case in found:
                entries.append(certify_case(case, arrays))
                advance(1)
        return Certificate(environment_of(arrays) | {"quick": quick}, tuple(entries))


def resolve_device(device: str) -> torch.device:
    """The torch device of an option. Raises BadInput."""
    has_kernels = rk.variant != "cpu" and torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if has_kernels else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise BadInput(f"--device {device}: want auto, cpu, cuda or cuda:N") from None
    if found.type not in ("cpu", "cuda"):
        raise BadInput(f"--device {device}: want auto, cpu, cuda or cuda:N")
    if found.type == "cuda" and not has_kernels:
        raise BadInput(f"--device {device}: torch sees no GPU, or this build ({rk.variant}) has no kernels for one")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"--device {device}: there are {torch.cuda.device_count()} GPUs")
    return found


# ---- one entry ------------------------------------------------------------------------------------------------------


def certify_case(case: Case, arrays: Arrays) -> Entry:
    """Computes a case in every variation, and stops at the first variation that differs."""
    rows = case.token_sum
    variations = list(_of_token_sum(case) if rows else _of_row(case, _batches(arrays)))
    computed = _Computed(case, arrays)
    alone = computed.outputs(variations[0])
    digest = hashlib.sha256(b"".join(alone.values())).hexdigest()
    differs = ""
    for variation in variations[1:]:
        found = computed.outputs(variation)
        wrong = [name for name in alone if found[name] != alone[name]]
        if wrong:
            differs = f"{' and '.join(wrong)} differ: {variation}, against {variations[0]}"
            break
    return Entry(
        key=case.key,
        operator=case.operator,
        direction=case.direction,
        dtype=case.dtype,
        shape=case.shape,
        outputs=case.outputs,
        exp=case.exp,
        options=case.options,
        backends=_backends(case),
        batches=tuple(dict.fromkeys(v.batch for v in variations)),
        positions=() if rows else POSITIONS,
        layouts=LAYOUTS,
        ways=tuple(case.ways),
        runs=RUNS,
        padding=rows is not None,
        variations=len(variations),
        sha256=digest,
        differs=differs,
    )


def _batches(arrays: Arrays) -> tuple[int, ...]:
    return GPU_BATCHES if arrays.device.type == "cuda" else BATCHES


def _backends(case: Case) -> str:
    if case.exp == "hardware":
        return contract.ONE_ARCHITECTURE
    found = {contract.row(case.operator, output).backends for output in case.outputs}
    if found <= {contract.EVERY_BACKEND, contract.BY_EXPONENTIAL}:
        return contract.EVERY_BACKEND  # these outputs use the portable exponential, or none
    if found == {contract.BY_PRODUCT} and case.dtype == "float32":
        return contract.EVERY_BACKEND
    return contract.ONE_ARCHITECTURE


def _of_row(case: Case, batches: tuple[int, ...]) -> Iterator[Variation]:
    for run in range(RUNS):
        yield Variation(run=run)
    for layout in LAYOUTS[1:]:
        yield Variation(layout=layout)
    for batch in batches[1:]:
        for position in dict.fromkeys((0, batch // 2, batch - 1)):
            yield Variation(batch, position)
        yield Variation(batch, batch // 2, neighbours=2)
    for layout in LAYOUTS[1:]:
        for position in (0, 3, 6):
            yield Variation(7, position, layout, neighbours=2)
    for run in range(1, RUNS):
        yield Variation(32, 31, run=run)
    for way in case.ways:
        yield Variation(7, 3, way=way)


def _of_token_sum(case: Case) -> Iterator[Variation]:
    assert case.token_sum is not None
    for run in range(RUNS):
        yield Variation(case.token_sum, run=run)
    for layout in LAYOUTS[1:]:
        yield Variation(case.token_sum, layout=layout)
    for way in case.ways:
        yield Variation(case.token_sum, way=way)
    yield Variation(case.token_sum + PADDING)


class _Computed:
    """Computes a case's outputs in any variation."""

    def __init__(self, case: Case, arrays: Arrays) -> None:
        self.case, self.arrays = case, arrays
        self.shared = case.shared()
        self.content = self._on_device(case.values(0, case.token_sum or 1))
        self.neighbours: dict[int, dict[str, torch.Tensor]] = {}

    def _on_device(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: t.to(self.arrays.device) for name, t in tensors.items()}

    def outputs(self, v: Variation) -> dict[str, bytes]:
        """The bytes of the row or of the token sum, for each output."""
        operands = self._padded(v) if self.case.token_sum else self._batch(v)
        operands |= self.shared
        given = {name: self.arrays.wrap(self.arrays.laid_out(t, v.layout)) for name, t in operands.items()}
        found = (self.case.ways[v.way] if v.way else self.case.call)(self.arrays, given)
        row = None if self.case.token_sum else v.position
        return {name: self.arrays.bytes_of(found[name], row) for name in self.case.outputs}

    def _batch(self, v: Variation) -> dict[str, torch.Tensor]:
        if v.batch == 1:
            return dict(self.content)
        if v.neighbours not in self.neighbours:
            self.neighbours[v.neighbours] = self._on_device(self.case.values(v.neighbours, MOST_NEIGHBOURS))
        order = torch.arange(v.batch, device=self.arrays.device) % MOST_NEIGHBOURS
        found = {}
        for name, t in self.neighbours[v.neighbours].items():
            found[name] = t[order]
            found[name][v.position] = self.content[name][0]
        return found

    def _padded(self, v: Variation) -> dict[str, torch.Tensor]:
        """The rows of a token sum, followed by padding rows whose gradient dy is zero."""
        more = v.batch - (self.case.token_sum or 0)
        if not more:
            return dict(self.content)
        found = {}
        for name, t in self.content.items():
            tail = torch.zeros_like(t[:more]) if name == "dy" else t[:more]
            found[name] = torch.cat([t, tail])
        return found


# ---- what computed it -----------------------------------------------------------------------------------------------


def environment_of(arrays: Arrays) -> dict[str, Any]:
    """Library, device, arithmetic and the code's digests. Names no host, no user, no date and no path."""
    from ..doctor import nvidia_driver

    found: dict[str, Any] = {"library": rk.__version__, "variant": rk.variant, "torch": str(torch.__version__)}
    if arrays.device.type == "cuda":
        properties = torch.cuda.get_device_properties(arrays.device)
        found |= {"device": properties.name, "driver": nvidia_driver(), "cuda": torch.version.cuda or torch.version.hip}
    else:
        found |= {"device": str(arrays.device), "instruction_set": native.cpu_isa()}
    return found | {
        "arithmetic": arrays.arithmetic,
        "exponentials": list(arrays.exponentials),
        "extension_sha256": _sha256_of([Path(native.__file__)]),
        "code_sha256": _sha256_of(sorted(Path(rk.__file__).parent.rglob("*.py"))),
    }


def _sha256_of(files: Iterable[Path]) -> str:
    """The hash of the files' names, lengths and contents, in the given order."""
    root = Path(rk.__file__).parent
    digest = hashlib.sha256()
    for path in files:
        data = path.read_bytes()
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) and path.suffix == ".py" else "extension"
        digest.update(f"{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def digests(arrays: Arrays, quick: bool = False) -> dict[str, dict[str, str]]:
    """The sha256 of every case's row, computed alone, by the case's key. Digests are under "every" if all backends have
    the same bits, else under the name of the arithmetic."""
    found: dict[str, dict[str, str]] = {}
    for case in certified_cases(arrays, quick):
        first = next(_of_token_sum(case) if case.token_sum else _of_row(case, BATCHES))
        data = b"".join(_Computed(case, arrays).outputs(first).values())
        found.setdefault(_group(_backends(case), arrays.arithmetic), {})[case.key] = hashlib.sha256(data).hexdigest()
    return found


def _group(backends: str, arithmetic: str) -> str:
    return "every" if backends == contract.EVERY_BACKEND else arithmetic


def compare_digests(certificate: Certificate, recorded: Mapping[str, Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """Keys whose digest equals the recorded digest, and keys whose digest differs. ``recorded`` has one
    mapping for each arithmetic, and one under "every"."""
    same: list[str] = []
    other: list[str] = []
    for entry in certificate.entries:
        expected = recorded.get(_group(entry.backends, str(certificate.environment["arithmetic"])), {}).get(entry.key)
        if expected is not None:
            (same if expected == entry.sha256 else other).append(entry.key)
    return same, other


def text_of(certificate: Certificate, date: bool = False) -> str:
    """The certificate as JSON. Without a date, equal runs give equal text."""
    found = certificate.as_json()
    if date:
        found = {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")} | found
    return json.dumps(found, indent=1) + "\n"


def write_certificate(certificate: Certificate, path: Path, date: bool = False) -> None:
    """Writes the certificate. Raises BadInput if the file cannot be written."""
    try:
        path.write_text(text_of(certificate, date), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--out {path}: {error.strerror}") from None


def print_certificate(certificate: Certificate, as_json: bool = False, date: bool = False) -> None:
    """Prints JSON, or a table and a verdict that names the first variation that differs."""
    if as_json:
        print(text_of(certificate, date), end="")
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    table = Table("operator", "outputs", "dtype", "shape", "options", "computed", "sha256", "")
    for entry in certificate.entries:
        shape = "x".join(map(str, entry.shape))
        options = " ".join(filter(None, (entry.exp, entry.options)))
        cells = (entry.operator, ", ".join(entry.outputs), entry.dtype, shape, options, f"{entry.variations} ways")
        verdict = "invariant" if entry.invariant else "NOT INVARIANT"
        table.add_row(*(escape(cell) for cell in cells), entry.sha256[:16], verdict)
    console.print(table)
    told = certificate.environment
    print(f"{told['device']}, {told['arithmetic']} arithmetic, {len(certificate.entries)} entries")
    print(f"NOT INVARIANT: {certificate.first_failure}" if not certificate.invariant else "invariant")
