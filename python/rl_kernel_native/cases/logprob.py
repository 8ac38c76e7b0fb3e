"""Cases of logprob."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import rl_kernel_native as rk

from .._arithmetic import arithmetic
from .._types import Exp
from ..contract import row
from ..ops import logprob as op
from ._certificate import STATISTICS, TEMPERATURE, Call, Case, Rows, dtypes_of
from ._certificate import Arrays as Device
from ._tools import (
    IGNORED,
    Arrays,
    Bench,
    Cases,
    Check,
    round_to,
    same_bytes,
    same_results,
    timed,
    within_bound,
    worst_share,
)


class _Case(NamedTuple):
    dtype: str
    rows: int
    vocab: int
    logits: np.ndarray  # float32, values of `dtype`
    target: np.ndarray
    temperature: float


def _cases(dtypes: tuple[str, ...]) -> Iterator[_Case]:
    random = np.random.default_rng(2)
    # Sizes: one column; less than a 16-byte vector; an odd width of many leaves (128 columns); Llama 3's vocabulary.
    for rows, vocab in ((3, 1), (5, 7), (17, 4099), (3, 128256)):
        for dtype in dtypes:
            logits = round_to(random.normal(0, 4, (rows, vocab)).astype(np.float32), dtype)
            target = random.integers(0, vocab, rows)
            target[1] = IGNORED
            if vocab > 2:
                logits[:, 1] = -np.inf
                target[target == 1] = 0
            yield _Case(dtype, rows, vocab, logits, target, 0.75)


def _forward(arrays: Arrays, case: _Case, exp: Exp) -> tuple[np.ndarray, ...]:
    """logprob, lse, entropy, sum_p_sq."""
    result = op.logprob(
        arrays.put(case.logits, case.dtype),
        arrays.put(case.target),
        temperature=case.temperature,
        return_lse=True,
        return_entropy=True,
        return_sum_p_sq=True,
        exp=exp,
    )
    return tuple(arrays.get(r) for r in result[:4])


def _merged(arrays: Arrays, case: _Case, shards: int, exp: Exp) -> np.ndarray:
    """logprob through the vocabulary-parallel form."""
    cuts = [i * case.vocab // shards for i in range(shards + 1)]
    stats = [
        arrays.get(
            op.logprob_partial(
                arrays.put(case.logits[:, first:last], case.dtype),
                arrays.put(case.target),
                vocab_start=first,
                vocab_size=case.vocab,
                temperature=case.temperature,
                exp=exp,
            )
        )
        for first, last in itertools.pairwise(cuts)
    ]
    return arrays.get(op.logprob_merge(arrays.put(np.stack(stats)), temperature=case.temperature))


def _backward(arrays: Arrays, case: _Case, lse: np.ndarray, entropy: np.ndarray, exp: Exp) -> np.ndarray:
    """dlogits of sum(logprob) - 0.5 * sum(entropy)."""
    ones = np.ones(case.rows, np.float32)
    return arrays.get(
        op.logprob_backward(
            arrays.put(case.logits, case.dtype),
            arrays.put(case.target),
            arrays.put(lse),
            dlogprob=arrays.put(ones),
            dentropy=arrays.put(-0.5 * ones),
            entropy=arrays.put(entropy),
            temperature=case.temperature,
            exp=exp,
        )
    )


def _gradient(case: _Case) -> tuple[np.ndarray, dict[str, Any]]:
    """The float64 reference of _backward, and the facts for its error bound."""
    z = case.logits.astype(np.float64) / case.temperature
    log_p = z - z.max(axis=1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
    p = np.exp(log_p)
    finite_log_p = np.where(p > 0, log_p, 0.0)
    entropy = -(p * finite_log_p).sum(axis=1, keepdims=True)
    dz = 0.5 * p * (finite_log_p + entropy) - p
    rows = np.flatnonzero(case.target != IGNORED)
    onehot = np.zeros_like(p)
    onehot[rows, case.target[rows]] = 1.0
    dz += onehot
    dz[case.target == IGNORED] = 0.0
    return dz / case.temperature, {
        "p": p,
        "log_p": np.abs(finite_log_p),
        "spread": np.abs(finite_log_p + entropy),
        "given": 1.0,
        "given_entropy": 0.5,
        "given_target": onehot,
        "slope": 1.0 / case.temperature,
    }


def _against_float64(arrays: Arrays, exp: Exp) -> Iterator[tuple[str, float]]:
    """Yields (case, error as a share of its bound in contract.py)."""
    for case in _cases(arrays.dtypes):
        name = f"{case.dtype} [{case.rows}, {case.vocab}]"
        expected = op.logprob_reference(case.logits, case.target, temperature=case.temperature)
        size = expected["max_abs_z"]
        got = _forward(arrays, case, exp)
        for output, value in zip(("logprob", "lse", "entropy", "sum_p_sq"), got, strict=True):
            facts: dict[str, Any] = {"sum_p_sq": expected["sum_p_sq"]} if output == "sum_p_sq" else {}
            allowed = row("logprob", output).allowed(max_abs_z=size, **facts)
            yield f"{output} {name}", worst_share(value, expected[output], allowed)
        gradient, facts = _gradient(case)
        allowed = row("logprob", "dlogits").allowed(case.dtype, expected=gradient, max_abs_z=size[:, None], **facts)
        yield f"dlogits {name}", worst_share(_backward(arrays, case, got[1], got[2], exp), gradient, allowed)


def checks(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Compares forward, backward and shards with float64 and, on a GPU, with the CPU's bytes."""
    arrays = Arrays(torch, device)

    def float64() -> tuple[bool, str]:
        case, share = max(_against_float64(arrays, None), key=lambda item: item[1])
        return within_bound(share, case)

    yield timed("against float64", float64)

    def shards() -> tuple[bool, str]:
        case = next(c for c in _cases(("float32",)) if c.vocab == 128256)
        whole = _forward(arrays, case, None)[0]
        differ = sum(same_bytes(whole, _merged(arrays, case, n, None)) for n in (1, 2, 4, 8))
        return differ == 0, f"{differ} results differ between 1, 2, 4, 8 shards and the whole row"

    yield timed("same bytes for any shard count", shards)

    if device == "cpu":
        return
    cpu = Arrays(torch, "cpu")
    modes: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {"portable": contextlib.nullcontext}
    if torch.version.hip is None and capability == (9, 0):  # gfx90a also reports 9.0
        modes["hardware"] = lambda: arithmetic("sm_90")
    for mode, unit in modes.items():

        def results(to: Arrays, case: _Case, mode: Any) -> dict[str, np.ndarray]:
            outputs = _forward(to, case, mode)
            named = {str(i): output for i, output in enumerate(outputs)}
            return {**named, "dlogits": _backward(to, case, outputs[1], outputs[2], mode)}

        def bytes_of_cpu(mode: str = mode, unit: Any = unit) -> tuple[bool, str]:
            with unit():
                return same_results((results(arrays, c, mode), results(cpu, c, mode)) for c in _cases(arrays.dtypes))

        yield timed(f"same bytes as the CPU, {mode} exponential", bytes_of_cpu)


# ---- certificate ----------------------------------------------------------------------------------------------------


def _certified_statistics(a: Mapping[str, Any], exp: Any) -> Any:
    wanted: dict[str, Any] = {f"return_{name}": True for name in STATISTICS[1:]}
    return rk.logprob(a["logits"], a["target"], temperature=TEMPERATURE, exp=exp, **wanted)


def certified_logprob(arrays: Device, quick: bool) -> Iterator[Case]:
    # Sizes: an odd width; the vocabularies of Llama 2, Llama 3 and Qwen3.
    for vocab in (4099, 32000) if quick else (1, 4099, 32000, 128256, 151936):
        for dtype in dtypes_of(quick, vocab == 32000):
            for exp in arrays.exponentials:
                yield from _certified_logprob(vocab, dtype, exp)


def _certified_logprob(vocab: int, dtype: str, exp: Any) -> Iterator[Case]:
    rows: Rows = {"logits": ((vocab,), 4.0), "target": (None, vocab)}

    def forward(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
        return dict(zip(STATISTICS, _certified_statistics(a, exp), strict=False))

    def sharded(arrays: Device, a: Mapping[str, Any], shards: int) -> Mapping[str, Any]:
        logits, target = arrays.unwrap(a["logits"]), a["target"]
        options: dict[str, Any] = {"temperature": TEMPERATURE, "exp": exp}
        width = vocab // shards
        stats = [
            arrays.unwrap(
                rk.logprob_partial(
                    arrays.wrap(logits[:, i * width : (i + 1) * width]),
                    target,
                    vocab_start=i * width,
                    vocab_size=vocab,
                    **options,
                )
            )
            for i in range(shards)
        ]
        wanted = {f"return_{name}": True for name in STATISTICS[1:]}
        merged = rk.logprob_merge(arrays.wrap(arrays.torch.stack(stats)), temperature=TEMPERATURE, **wanted)
        return dict(zip(STATISTICS, merged, strict=False))

    def backward(arrays: Device, a: Mapping[str, Any]) -> Mapping[str, Any]:
        saved = _certified_statistics(a, exp)
        dlogits = rk.logprob_backward(
            a["logits"],
            a["target"],
            saved.lse,
            dlogprob=a["dlogprob"],
            dentropy=a["dentropy"],
            entropy=saved.entropy,
            temperature=TEMPERATURE,
            exp=exp,
        )
        return {"dlogits": dlogits}

    ways: dict[str, Call] = {}
    if vocab % 64 == 0:
        ways = {f"{n} shards": lambda arrays, a, n=n: sharded(arrays, a, n) for n in (2, 4, 8)}  # type: ignore[misc]
    yield Case("logprob", "forward", dtype, (vocab,), STATISTICS, rows, forward, ways=ways, exp=exp)
    given: Rows = {"dlogprob": ((), 1.0), "dentropy": ((), 0.5)}
    yield Case("logprob", "backward", dtype, (vocab,), ("dlogits",), rows | given, backward, exp=exp)


CASES = {
    "logprob": Cases(
        checks,
        Bench("selected log-probability from logits", "logprob", sizes={"vocab": (128256, None)}),
        certified_logprob,
    ),
}
