"""Shared by the tests of logprob: a batched float64 truth with the bounds of docs/numerics.md, and raw bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import rl_kernel_native as rk
from rl_kernel_native.contract import ROUNDING, row

OUTPUTS = ("logprob", "lse", "entropy", "sum_p_sq", "status")
ALL = {f"return_{name}": True for name in OUTPUTS[1:]}
DTYPES = ("float32", "bfloat16", "float16")
Status = rk.LogprobStatus


def part_cut(vocab: int, i: int) -> int:
    """A second implementation of rule 5's cut i."""
    return vocab if i == 8 else min(8 * (i * -(-vocab // 8) // 8), vocab)


def tree_sum(terms: Any) -> np.float32:
    """A second implementation of rule 10's sum of float32 terms."""
    level = np.asarray(terms, np.float32)
    while len(level) > 1:
        if len(level) % 2:
            level = np.append(level, np.float32(0))
        level = level[::2] + level[1::2]
    return np.float32(level[0] if len(level) else 0) + np.float32(0)


@contextmanager
def mode(device: str, exp: str) -> Iterator[None]:
    """Makes exp="hardware" available: CUDA has this mode, and the CPU has it under the arithmetic of sm_90. Otherwise
    changes nothing."""
    with rk.arithmetic("sm_90" if device == "cpu" and exp == "hardware" else rk.current_arithmetic()):
        yield


def numpy_of(x: Any) -> np.ndarray:
    """The array's bytes in NumPy; torch's bfloat16 as uint16."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().contiguous()
        if str(x.dtype) == "torch.bfloat16":
            import torch

            x = x.view(torch.int16)
        return x.numpy()
    if hasattr(x, "get"):  # CuPy
        return x.get()
    return np.ascontiguousarray(np.asarray(x))


def raw(x: Any) -> Any:
    """Bytes to compare; for a result, the bytes of each output."""
    if isinstance(x, tuple):
        return tuple(None if y is None else numpy_of(y).tobytes() for y in x)
    return numpy_of(x).tobytes()


def differing(a: Any, b: Any) -> str:
    """Describes where two results differ; empty if they agree."""
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
    found = []
    for i, (x, y) in enumerate(pairs):
        if x is None or y is None:
            if (x is None) != (y is None):
                found.append(f"output {i} is None on one side")
            continue
        x, y = numpy_of(x), numpy_of(y)
        if x.tobytes() != y.tobytes():
            integers = np.dtype(f"u{x.dtype.itemsize}")
            where = np.flatnonzero(x.reshape(-1).view(integers) != y.reshape(-1).view(integers))
            first = int(where[0])
            found.append(
                f"output {i}: {len(where)} of {x.size} elements, first at {first}: "
                f"{x.reshape(-1)[first]!r} against {y.reshape(-1)[first]!r}"
            )
    return "; ".join(found)


def beyond(
    operator: str, output: str, got: Any, expected: Any, dtype: str = "float32", unit: str = "ieee", **facts: Any
) -> str:
    """Describes where an output is further from float64 than its row of contract.py allows; empty if nowhere."""
    found, expected = float64(got), float64(expected)
    allowed = np.broadcast_to(
        row(operator, output).allowed(dtype, expected=expected, unit=unit, **facts), expected.shape
    )
    assert found.shape == expected.shape, (output, found.shape, expected.shape)
    with np.errstate(invalid="ignore"):  # infinities are equal
        off = np.where(found == expected, 0.0, np.abs(found - expected))
    if not found.size or (off <= allowed).all():
        return ""
    i = np.unravel_index(int(np.argmax(np.nan_to_num(off - allowed, nan=np.inf))), off.shape)
    return f"{output}{list(map(int, i))}: off by {off[i]:.3g}, allowed {allowed[i]:.3g}"


def torch_logits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32", spread: float = 4.0) -> Any:
    """Normal logits around -1. As with a model, the largest logit of a row is then positive, and most are negative."""
    import torch

    values = rng.standard_normal(shape, dtype=np.float32) * np.float32(spread) - np.float32(1)
    return torch.from_numpy(values).to(getattr(torch, dtype))


def torch_targets(rng: np.random.Generator, shape: tuple[int, ...], vocab: int, dtype: str = "int64") -> Any:
    import torch

    return torch.from_numpy(rng.integers(0, vocab, shape)).to(getattr(torch, dtype))


def float64(x: Any) -> np.ndarray:
    """The values of an array of any framework and dtype."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()
    return np.asarray(x).astype(np.float64)


def wide(x: Any) -> np.ndarray:
    """Logits of any framework and dtype as float64 [rows, vocab]."""
    array = float64(x)
    return array.reshape(-1, array.shape[-1])


@dataclass
class Truth:
    """float64 values, the status that each row must have, and error bounds."""

    logprob: np.ndarray
    lse: np.ndarray
    entropy: np.ndarray
    sum_p_sq: np.ndarray
    status: np.ndarray
    size: np.ndarray  # max |z| after temperature over the columns that count; the bounds scale with it
    z: np.ndarray
    p: np.ndarray
    present: np.ndarray  # columns that are neither padding nor outside a kept set
    slope: np.ndarray  # d(z / T) / d logits
    softcap_slope: np.ndarray  # the softcap's factor in slope
    capped: bool
    target: np.ndarray
    counted: np.ndarray  # rows whose target is not ignore_index

    @property
    def bound(self) -> np.ndarray:
        """The bound of a log-probability."""
        return row("logprob", "logprob").allowed(max_abs_z=self.size)

    def failures(self, result: rk.LogprobResult) -> str:
        """Describes what is wrong with a result that has every output; empty if all is right."""
        wrong = []
        for name in OUTPUTS[:4]:
            facts = {"sum_p_sq": self.sum_p_sq} if name == "sum_p_sq" else {}
            bound = row("logprob", name).allowed(max_abs_z=self.size, **facts)
            got = numpy_of(getattr(result, name)).reshape(-1).astype(np.float64)
            want = getattr(self, name)
            with np.errstate(invalid="ignore", over="ignore"):
                good = (np.isnan(got) & np.isnan(want)) | (want.astype(np.float32) == got) | (abs(got - want) <= bound)
                # The row is computed in log2 units, in which a finite z may overflow.
                good |= np.isneginf(got) & (want * np.log2(np.e) < -3.4e38)
            if not good.all():
                i = int(np.flatnonzero(~good)[0])
                wrong.append(f"{name}: row {i} is {got[i]!r}, truth {want[i]!r}, allowed error {bound[i]:.3g}")
        got = numpy_of(result.status).reshape(-1)
        # The rest of a NaN's leaf is not read, so a row with a NaN may or may not report a +Inf elsewhere.
        unsure = np.where(self.status & Status.NAN_LOGIT, int(Status.INF_LOGIT), 0)
        if ((got ^ self.status) & ~unsure).any():
            i = int(np.flatnonzero((got ^ self.status) & ~unsure)[0])
            wrong.append(f"status: row {i} is {Status(int(got[i]))!r}, truth {Status(int(self.status[i]))!r}")
        return "; ".join(wrong)

    def gradient(
        self, dlogprob: Any = None, dlse: Any = None, dentropy: Any = None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(dlogits, facts for its bound)."""
        rows, columns = self.p.shape
        g, a, h = (
            np.broadcast_to(np.asarray(0.0 if d is None else d, dtype=np.float64).reshape(-1), (rows,))[:, None]
            for d in (dlogprob, dlse, dentropy)
        )
        onehot = np.zeros((rows, columns))
        usable = self.counted & (self.target >= 0) & (self.target < columns)
        onehot[usable, self.target[usable]] = self.present[usable, self.target[usable]]
        p = self.p
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            log_p = np.where(p > 0, self.z - self.lse[:, None], 0.0)
            spread = log_p + np.where(np.isnan(self.entropy), 0, self.entropy)[:, None]
            inner = g * (onehot - p) + a * p - np.where(h == 0, 0, h * p * spread)
            dx = np.where(inner == 0, 0.0, inner * self.slope)
        outside = np.where(np.isnan(self.entropy) | (self.status & ~int(Status.LABEL_MASKED) != 0), np.nan, 1.0)
        outside[(self.status == Status.BAD_TARGET) & (g[:, 0] == 0)] = 1.0  # only dlogprob needs the target
        silent = ~self.counted | ((g == 0) & (a == 0) & (h == 0))[:, 0]
        outside[silent] = 1.0
        dx = np.where(silent[:, None] | ~self.present, 0.0, dx * outside[:, None])
        dx[np.isneginf(self.z) & self.capped] = 0.0  # the contract's rule for -Inf under a softcap
        return dx, {
            "max_abs_z": self.size[:, None],
            "p": p,
            "log_p": np.abs(log_p),
            "spread": np.abs(spread),
            "given": np.abs(g) + np.abs(a),
            "given_entropy": np.abs(h),
            "given_target": onehot * np.abs(g),
            "uncapped": np.where(self.softcap_slope < 1, np.abs(inner), 0.0),
            "cap_slope": self.softcap_slope,
            "slope": np.abs(self.slope / np.maximum(self.softcap_slope, 1e-300)),
        }

    def gradient_failures(self, got: Any, dtype: str, **gradients: Any) -> str:
        want, facts = self.gradient(**gradients)
        got = wide(got)
        with np.errstate(invalid="ignore", over="ignore"):
            allowed = row("logprob", "dlogits").allowed(dtype, expected=want, **facts)
            good = (np.abs(got - want) <= allowed) | (np.isnan(got) & np.isnan(want)) | (got == want)
            limit = ROUNDING[dtype].limit
            good |= np.isinf(got) & (np.abs(want) + allowed >= limit) & (np.sign(got) == np.sign(want))
            good[(self.status & int(Status.BAD_KEPT)) != 0] = True  # any columns may be NaN
        if good.all():
            return ""
        i, j = (int(k[0]) for k in np.nonzero(~good))
        return (
            f"dlogits: {int((~good).sum())} wrong, first at row {i} (status {int(self.status[i])}, target "
            f"{int(self.target[i])}), column {j}: {got[i, j]!r}, truth {want[i, j]!r}, allowed {allowed[i, j]:.3g}"
        )


def truth(
    logits: Any,
    target: Any,
    *,
    temperature: Any = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    valid_vocab: int | None = None,
    canonical_vocab: int | None = None,
    kept: tuple[Any, Any] | None = None,
) -> Truth:
    """rk.logprob's arguments, evaluated in float64 for all rows at once. canonical_vocab changes no value."""
    del canonical_vocab
    x = wide(logits)
    rows, columns = x.shape
    y = numpy_of(target).reshape(-1).astype(np.int64)
    valid = columns if valid_vocab is None else valid_vocab
    # Numbers reach the operator as float32, so the truth uses the same values.
    t = np.broadcast_to(np.asarray(numpy_of(temperature), dtype=np.float32).reshape(-1), (rows,)).astype(np.float64)
    scale = float(np.float32(logit_scale))
    counted = y != ignore_index
    y_valid = (y >= 0) & (y < valid)
    status = np.zeros(rows, dtype=np.int64)
    good_t = np.isfinite(t) & (t >= 2.0**-126)
    status[~good_t] |= Status.BAD_TEMPERATURE
    present = np.zeros((rows, columns), dtype=bool)
    present[:, :valid] = True
    if kept is not None:
        status |= np.where(_apply_kept(present, kept, valid, y, y_valid), int(Status.BAD_KEPT), 0)
    with np.errstate(all="ignore"):
        z = np.array(x * scale)
        # values that overflow in float32 are infinities
        z[np.abs(z) > np.finfo(np.float32).max * (1 + 2**-25)] *= np.inf
        capped = np.ones_like(z)
        if softcap is not None:
            cap = float(np.float32(softcap))
            h = np.tanh(z / cap)
            capped = np.where(np.isinf(z), 0.0, 1 - h * h)
            z = np.where(np.isinf(z), z, cap * h)
        t_safe = np.where(good_t, t, 1.0)[:, None]
        z /= t_safe
        z[~present] = -np.inf
        z[~counted] = 0.0
        top = z.max(1, initial=-np.inf)
        nan = np.isnan(z).any(1)
        huge = np.where(nan, np.isposinf(np.where(np.isnan(z), 0, z)).any(1), top * np.log2(np.e) >= 2.0**21)
        empty = ~nan & (top * np.log2(np.e) <= -(2.0**21))
        failed = status != 0
        seen = ~failed & counted
        status[seen & nan] |= Status.NAN_LOGIT
        status[seen & huge] |= Status.INF_LOGIT
        status[seen & empty] |= Status.EMPTY_ROW
        status[seen & ~nan & ~y_valid] |= Status.BAD_TARGET
        z_y = (
            np.where(y_valid, z[np.arange(rows), np.where(y_valid, y, 0)], np.nan) if columns else np.full(rows, np.nan)
        )
        ok = seen & ~nan & ~huge & ~empty
        status[ok & y_valid & np.isneginf(z_y)] |= Status.LABEL_MASKED
        status[~counted] = 0
        e = np.exp(z - np.where(ok, top, 0.0)[:, None])
        total = e.sum(1)
        lse = np.where(ok, top + np.log(total), np.nan)
        p = np.where(ok[:, None], e / total[:, None], 0.0)
        entropy = np.where(ok, lse - np.where(p > 0, p * z, 0.0).sum(1), np.nan)
        near = np.abs(np.where(z > top[:, None] - 40, z, 0.0)).max(
            1, initial=0.0
        )  # smaller terms than e^-40 of the sum are below any bound
        size = np.maximum(near, np.where(np.isfinite(z_y), np.abs(z_y), 0.0))
        values = {
            "logprob": np.where(ok & y_valid, z_y - lse, np.nan),
            "lse": lse,
            "entropy": entropy,
            "sum_p_sq": np.where(ok, (p * p).sum(1), np.nan),
        }
    for value in values.values():
        value[~counted] = 0.0
    slope = scale / t_safe * capped
    size = np.where(np.isfinite(size), size, 0.0)
    return Truth(
        **values, status=status, size=size, z=z, p=p, present=present, slope=slope, softcap_slope=capped,
        capped=softcap is not None, target=y, counted=counted,
    )  # fmt: skip


def _apply_kept(
    present: np.ndarray, kept: tuple[Any, Any], valid: int, y: np.ndarray, y_valid: np.ndarray
) -> np.ndarray:
    """Narrows ``present`` to the kept columns; returns the rows whose kept set is malformed."""
    ids, offsets = (numpy_of(k) for k in kept)
    bad = np.zeros(len(present), dtype=bool)
    for i in range(len(present)):
        begin, end = int(offsets[i]), int(offsets[i + 1])
        if begin < 0 or end < begin or end > len(ids):
            bad[i] = True
            continue
        chosen = ids[begin:end]
        if len(chosen) == 0:
            continue
        if chosen.min() < 0 or chosen.max() >= valid:
            bad[i] = True
            continue
        present[i] = False
        present[i, chosen] = True
        if y_valid[i]:
            present[i, y[i]] = True
    return bad
