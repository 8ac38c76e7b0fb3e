"""Quick self-tests of the operators for the doctor: seconds, not coverage. The tests proper are in tests/."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from . import _selftest_sequences as sequences
from ._arithmetic import arithmetic, current_arithmetic
from .contract import ROUNDING, row
from .ops import linear as linear_op
from .ops import logprob as op
from .ops import rms_norm as rms_norm_op
from .ops import rope as rope_op
from .ops import silu_mul as silu_mul_op

IGNORED = -100


class Check(NamedTuple):
    check: str
    passed: bool | None
    detail: str
    seconds: float


class _Case(NamedTuple):
    dtype: str
    rows: int
    vocab: int
    logits: np.ndarray  # float32, values of `dtype`
    target: np.ndarray
    temperature: float


def _round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 array of the nearest values of ``dtype``."""
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":  # to nearest even in the integer view
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return x


def _cases(dtypes: tuple[str, ...]) -> Iterator[_Case]:
    random = np.random.default_rng(2)
    # One column; less than a 16-byte vector; an odd width over a leaf; Llama 3's vocabulary.
    for rows, vocab in ((3, 1), (5, 7), (17, 4099), (3, 128256)):
        for dtype in dtypes:
            logits = _round_to(random.normal(0, 4, (rows, vocab)).astype(np.float32), dtype)
            target = random.integers(0, vocab, rows)
            target[1] = IGNORED
            if vocab > 2:
                logits[:, 1] = -np.inf
                target[target == 1] = 0
            yield _Case(dtype, rows, vocab, logits, target, 0.75)


class _Arrays:
    """NumPy's or torch's arrays of a case on a device, and results back as NumPy."""

    def __init__(self, torch: Any, device: str) -> None:
        self.torch, self.device = torch, device
        self.dtypes = ("float32", "float16", "bfloat16") if torch is not None else ("float32", "float16")

    def put(self, array: np.ndarray, dtype: str | None = None) -> Any:
        if self.torch is None:
            return array if dtype is None else array.astype(dtype)
        tensor = self.torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        return tensor if dtype is None else tensor.to(getattr(self.torch, dtype))

    def get(self, array: Any) -> np.ndarray:
        if self.torch is None:
            return np.asarray(array).astype(np.float32)
        return np.asarray(array.float().cpu().numpy())

    def forward(self, case: _Case, exp: str | None) -> tuple[np.ndarray, ...]:
        """logprob, lse, entropy, sum_p_sq."""
        result = op.logprob(
            self.put(case.logits, case.dtype),
            self.put(case.target),
            temperature=case.temperature,
            return_lse=True,
            return_entropy=True,
            return_sum_p_sq=True,
            exp=exp,
        )
        return tuple(self.get(r) for r in result[:4])

    def merged(self, case: _Case, shards: int, exp: str | None) -> np.ndarray:
        """logprob through the vocabulary-parallel form."""
        cuts = [i * case.vocab // shards for i in range(shards + 1)]
        stats = [
            self.get(
                op.logprob_partial(
                    self.put(case.logits[:, first:last], case.dtype),
                    self.put(case.target),
                    vocab_start=first,
                    vocab_size=case.vocab,
                    temperature=case.temperature,
                    exp=exp,
                )
            )
            for first, last in itertools.pairwise(cuts)
        ]
        return self.get(op.logprob_merge(self.put(np.stack(stats)), temperature=case.temperature))

    def backward(self, case: _Case, lse: np.ndarray, entropy: np.ndarray, exp: str | None) -> np.ndarray:
        """dlogits of sum(logprob) - 0.5 * sum(entropy)."""
        ones = np.ones(case.rows, np.float32)
        return self.get(
            op.logprob_backward(
                self.put(case.logits, case.dtype),
                self.put(case.target),
                self.put(lse),
                dlogprob=self.put(ones),
                dentropy=self.put(-0.5 * ones),
                entropy=self.put(entropy),
                temperature=case.temperature,
                exp=exp,
            )
        )


def _gradient(case: _Case) -> tuple[np.ndarray, dict[str, Any]]:
    """float64 reference of _Arrays.backward, and the facts of its bound."""
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


def _against_float64(arrays: _Arrays, exp: str | None) -> Iterator[tuple[str, float]]:
    """(case, error as a share of its bound in contract.py)."""
    for case in _cases(arrays.dtypes):
        name = f"{case.dtype} [{case.rows}, {case.vocab}]"
        expected = op.logprob_reference(case.logits, case.target, temperature=case.temperature)
        size = expected["max_abs_z"]
        got = arrays.forward(case, exp)
        for output, value in zip(("logprob", "lse", "entropy", "sum_p_sq"), got, strict=True):
            facts: dict[str, Any] = {"sum_p_sq": expected["sum_p_sq"]} if output == "sum_p_sq" else {}
            allowed = row("logprob", output).allowed(max_abs_z=size, **facts)
            yield f"{output} {name}", _worst(value, expected[output], allowed)
        gradient, facts = _gradient(case)
        allowed = row("logprob", "dlogits").allowed(case.dtype, expected=gradient, max_abs_z=size[:, None], **facts)
        yield f"dlogits {name}", _worst(arrays.backward(case, got[1], got[2], exp), gradient, allowed)


def _worst(got: np.ndarray, expected: np.ndarray, allowed: np.ndarray) -> float:
    share = np.abs(got - expected) / allowed
    return float("inf") if np.isnan(share).any() else float(share.max())


def _same_bytes(a: np.ndarray, b: np.ndarray) -> int:
    """Elements whose bytes differ."""
    return int((a.view(np.uint32) != b.view(np.uint32)).sum())


def _timed(check: str, run: Callable[[], tuple[bool, str]]) -> Check:
    start = time.perf_counter()
    passed, detail = run()
    return Check(check, passed, detail, round(time.perf_counter() - start, 3))


def logprob(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Forward, backward and shards against float64 and, on a GPU, against the CPU's bytes."""
    arrays = _Arrays(torch, device)

    def float64() -> tuple[bool, str]:
        case, share = max(_against_float64(arrays, None), key=lambda item: item[1])
        return share <= 1.0, f"worst error {share:.2f} of its bound, {case}"

    yield _timed("against float64", float64)

    def shards() -> tuple[bool, str]:
        case = next(c for c in _cases(("float32",)) if c.vocab == 128256)
        whole = arrays.forward(case, None)[0]
        differ = sum(_same_bytes(whole, arrays.merged(case, n, None)) for n in (1, 2, 4, 8))
        return differ == 0, f"{differ} results differ between 1, 2, 4, 8 shards and the whole row"

    yield _timed("same bytes for any shard count", shards)

    if device == "cpu":
        return
    cpu = _Arrays(torch, "cpu")
    modes: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {"portable": contextlib.nullcontext}
    if torch.version.hip is None and capability == (9, 0):  # gfx90a calls itself 9.0 too
        modes["hardware"] = lambda: arithmetic("sm_90")
    for mode, unit in modes.items():

        def bytes_of_cpu(mode: str = mode, unit: Any = unit) -> tuple[bool, str]:
            differ = total = 0
            for case in _cases(arrays.dtypes):
                here = arrays.forward(case, mode)
                with unit():
                    there = cpu.forward(case, mode)
                    gradients = cpu.backward(case, there[1], there[2], mode)
                pairs = [*zip(here, there, strict=True), (arrays.backward(case, here[1], here[2], mode), gradients)]
                differ += sum(_same_bytes(a, b) for a, b in pairs)
                total += sum(a.size for a, _ in pairs)
            return differ == 0, f"{differ} of {total} values differ"

        yield _timed(f"same bytes as the CPU, {mode} exponential", bytes_of_cpu)


class _Product(NamedTuple):
    """Operands of linear, float32 arrays with values of ``dtype``, and its functions on them."""

    dtype: str
    x: np.ndarray  # [rows, in_features]
    weight: np.ndarray  # [out_features, in_features]
    bias: np.ndarray  # [out_features]
    dy: np.ndarray  # [rows, out_features]

    def results(self, arrays: _Arrays, engine: str = "auto") -> dict[str, np.ndarray]:
        x, weight, bias, dy = (arrays.put(a, self.dtype) for a in self[1:])
        results = {
            "y": linear_op.linear(x, weight, bias, out_dtype="float32", engine=engine),
            "dx": linear_op.linear_input_grad(dy, weight, engine=engine),
            "dweight": linear_op.linear_weight_grad(dy, x, out_dtype="float32", engine=engine),
            "dbias": linear_op.linear_bias_grad(dy, out_dtype="float32"),
        }
        return {name: arrays.get(result) for name, result in results.items()}

    def over_ranks(self, arrays: _Arrays, ranks: int) -> np.ndarray:
        """y through the row-parallel form, of a layer of eight segments."""
        shard = self.x.shape[1] // ranks
        parts = [
            linear_op.linear_partial(
                arrays.put(self.x[:, i * shard : (i + 1) * shard], self.dtype),
                arrays.put(self.weight[:, i * shard : (i + 1) * shard], self.dtype),
                k_segments=8,
                first_segment=i * 8 // ranks,
                num_segments=8 // ranks,
            )
            for i in range(ranks)
        ]
        return arrays.get(linear_op.tree_sum(parts, bias=arrays.put(self.bias, self.dtype)))


def _products(dtypes: tuple[str, ...]) -> Iterator[_Product]:
    random = np.random.default_rng(3)
    # One of everything; odd sizes within one step and tile; whole tiles with eight segments; rows that are two blocks.
    for rows, ins, outs in ((1, 1, 1), (5, 13, 7), (33, 1024, 130), (8200, 24, 17)):
        for dtype in dtypes:
            shapes = ((rows, ins), (outs, ins), (outs,), (rows, outs))
            yield _Product(dtype, *(_round_to(random.normal(0, 1, s).astype(np.float32), dtype) for s in shapes))


def _products_against_float64(arrays: _Arrays, dtypes: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    """(case, error as a share of its bound in contract.py)."""
    unit = current_arithmetic() if arrays.device == "cpu" else "the device's"
    for case in _products(dtypes):
        expected = linear_op.linear_reference(case.x, case.weight, case.bias, dy=case.dy)
        rows = len(case.x)
        facts = {
            "y": {"terms": case.x.shape[1]},
            "dx": {"terms": case.dy.shape[1]},
            "dweight": {"terms": rows},
            "dbias": {"rows": rows},
        }
        for name, got in case.results(arrays).items():
            dtype = case.dtype if name == "dx" else "float32"
            allowed = row("linear", name).allowed(
                dtype, unit=unit, expected=expected[name], scale=expected[f"{name}_scale"], **facts[name]
            )
            yield f"{name} {case.dtype} {list(case.x.shape)}", _worst(got, expected[name], allowed)


def linear(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Products against float64, against themselves in other batches and on more ranks, and on a GPU against the CPU."""
    arrays = _Arrays(torch, device)
    dtypes = arrays.dtypes if device == "cpu" else arrays.dtypes[1:]  # float32 products are the CPU's alone

    def float64() -> tuple[bool, str]:
        case, share = max(_products_against_float64(arrays, dtypes), key=lambda item: item[1])
        return share <= 1.0, f"worst error {share:.2f} of its bound, {case}"

    yield _timed("against float64", float64)
    wide = next(case for case in _products(dtypes[-1:]) if case.x.shape[1] == 1024)

    def rows() -> tuple[bool, str]:
        whole = wide.results(arrays)
        differ = 0
        for first, last in ((0, 1), (7, 9), (16, 33)):
            part = wide._replace(x=wide.x[first:last], dy=wide.dy[first:last]).results(arrays)
            differ += sum(_same_bytes(part[name], whole[name][first:last]) for name in ("y", "dx"))
        return differ == 0, f"{differ} values differ between a batch and its rows"

    yield _timed("same bytes for any number of rows", rows)

    def ranks() -> tuple[bool, str]:
        x, weight, bias = (arrays.put(a, wide.dtype) for a in wide[1:4])
        whole = arrays.get(linear_op.linear(x, weight, bias, k_segments=8, out_dtype="float32"))
        differ = sum(_same_bytes(whole, wide.over_ranks(arrays, n)) for n in (1, 2, 4, 8))
        return differ == 0, f"{differ} values differ between 1, 2, 4, 8 ranks and the whole layer"

    yield _timed("same bytes on any number of ranks", ranks)
    if capability != (9, 0):
        return
    cpu = _Arrays(torch, "cpu")
    for engine in ("auto", "native"):

        def bytes_of_cpu(engine: str = engine) -> tuple[bool, str]:
            differ = total = 0
            for case in _products(dtypes):
                here = case.results(arrays, engine)
                with arithmetic("sm_90"):
                    there = case.results(cpu)
                differ += sum(_same_bytes(here[name], there[name]) for name in here)
                total += sum(value.size for value in here.values())
            return differ == 0, f"{differ} of {total} values differ"

        yield _timed(f"same bytes as the CPU as an sm_90, engine {engine}", bytes_of_cpu)


class _Norm(NamedTuple):
    """Operands of rms_norm, float32 arrays with values of ``dtype``, and its functions on them."""

    dtype: str
    options: dict[str, Any]
    x: np.ndarray  # [rows, columns]
    residual: np.ndarray
    dy: np.ndarray
    d_new_residual: np.ndarray
    weight: np.ndarray  # [columns]

    def results(self, arrays: _Arrays) -> dict[str, np.ndarray]:
        x, residual, dy, third, weight = (arrays.put(a, self.dtype) for a in self[2:])
        y, h, rstd = rms_norm_op.rms_norm(x, weight, _NORM_EPS, residual=residual, return_rstd=True, **self.options)
        dx, dweight = rms_norm_op.rms_norm_backward(
            dy, h, weight, _NORM_EPS, rstd=rstd, d_new_residual=third, dweight_dtype="float32", **self.options
        )
        found = {"y": y, "new_residual": h, "rstd": rstd, "dx": dx, "dweight": dweight}
        return {name: arrays.get(result) for name, result in found.items()}


_NORM_EPS = 1e-6


def _norms(dtypes: tuple[str, ...]) -> Iterator[_Norm]:
    random = np.random.default_rng(4)
    options: tuple[dict[str, Any], ...] = ({}, {"round_before_weight": True}, {"weight_offset": 1.0})
    # One column; odd; heads of 128; a hidden size; rows that are two blocks.
    for i, (rows, columns) in enumerate(((3, 1), (5, 37), (200, 128), (33, 4096), (8200, 24))):
        for j, dtype in enumerate(dtypes):
            shapes = ((rows, columns),) * 4 + ((columns,),)
            values = (_round_to(random.normal(0, 1, s).astype(np.float32), dtype) for s in shapes)
            yield _Norm(dtype, options[(i + j) % 3], *values)


def _norms_against_float64(arrays: _Arrays) -> Iterator[tuple[str, float]]:
    """(case, error as a share of its bound in contract.py)."""
    for case in _norms(arrays.dtypes):
        got = case.results(arrays)
        offset = case.options.get("weight_offset", 0.0)
        expected = rms_norm_op.rms_norm_reference(
            got["new_residual"], case.weight, _NORM_EPS, weight_offset=offset, dy=case.dy,
            d_new_residual=case.d_new_residual,
        )  # fmt: skip
        rows, columns = case.x.shape
        inner: dict[str, Any] = {}
        if case.options.get("round_before_weight"):
            inner = {"inner": ROUNDING[case.dtype].inner, "inner_least": ROUNDING[case.dtype].least}
        facts: dict[str, dict[str, Any]] = {
            "y": {"other_scale": expected["y_other_scale"], **inner},
            "rstd": {},
            "dx": {"scale": expected["dx_scale"]},
            "dweight": {
                "rows": rows,
                "scale": expected["dweight_scale"],
                "other_scale": expected["dweight_other_scale"],
                **inner,
            },
        }
        for name, of in facts.items():
            dtype = case.dtype if name in ("y", "dx") else "float32"
            bound = row("rms_norm", name).allowed(dtype, expected=expected[name], columns=columns, **of)
            yield f"{name} {case.dtype} {list(case.x.shape)}", _worst(got[name], expected[name], bound)


def rms_norm(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Norms and gradients against float64, against themselves in other batches, and on a GPU against the CPU."""
    arrays = _Arrays(torch, device)

    def float64() -> tuple[bool, str]:
        case, share = max(_norms_against_float64(arrays), key=lambda item: item[1])
        return share <= 1.0, f"worst error {share:.2f} of its bound, {case}"

    yield _timed("against float64", float64)

    def rows() -> tuple[bool, str]:
        differ = 0
        for case in _norms(arrays.dtypes[-1:]):
            whole = case.results(arrays)
            part = case._replace(**{name: getattr(case, name)[1:3] for name in _Norm._fields[2:6]}).results(arrays)
            differ += sum(_same_bytes(part[n], whole[n][1:3]) for n in ("y", "new_residual", "rstd", "dx"))
        return differ == 0, f"{differ} values differ between a batch and its rows"

    yield _timed("same bytes for any number of rows", rows)
    if device == "cpu":
        return
    cpu = _Arrays(torch, "cpu")

    def bytes_of_cpu() -> tuple[bool, str]:
        differ = total = 0
        for case in _norms(arrays.dtypes):
            here, there = case.results(arrays), case.results(cpu)
            differ += sum(_same_bytes(here[name], there[name]) for name in here)
            total += sum(value.size for value in here.values())
        return differ == 0, f"{differ} of {total} values differ"

    yield _timed("same bytes as the CPU", bytes_of_cpu)


def embedding(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Rows of tables and their gradients: see :mod:`rl_kernel_native._selftest_embedding`, which takes its helpers from
    here."""
    from . import _selftest_embedding

    return _selftest_embedding.checks(torch, device)


class _Rotation(NamedTuple):
    """Operands of rope, float32 arrays with values of ``dtype``, and its functions on them."""

    dtype: str
    options: dict[str, Any]
    q: np.ndarray  # [tokens, num_q_heads, head_dim]
    k: np.ndarray
    cos: np.ndarray  # [max_position, rotary_dim / 2]
    sin: np.ndarray
    position_ids: np.ndarray  # [tokens]

    def results(self, arrays: _Arrays) -> dict[str, np.ndarray]:
        q, k = arrays.put(self.q, self.dtype), arrays.put(self.k, self.dtype)
        constants = (arrays.put(self.cos), arrays.put(self.sin))
        options = {"position_ids": arrays.put(self.position_ids), **self.options}
        found = dict(zip(("q", "k"), rope_op.rope(q, k, *constants, **options), strict=True))
        found |= dict(zip(("dq", "dk"), rope_op.rope_backward(q, k, *constants, **options), strict=True))
        return {name: arrays.get(result) for name, result in found.items()}


def _rotations(dtypes: tuple[str, ...], device: str) -> Iterator[_Rotation]:
    random = np.random.default_rng(5)
    # A pair; odd widths, which take no vector; heads of 128; half of a head, enough for every thread or plan of a GPU.
    most = 250 if device == "cpu" else 2500
    for i, (tokens, heads, dim, rest) in enumerate(((3, 1, 2, 0), (5, 3, 18, 1), (33, 8, 128, 0), (most, 40, 64, 64))):
        for j, dtype in enumerate(dtypes):
            options: dict[str, Any] = {"interleaved": (i + j) % 2 == 0, "partial_dim": dim}
            if (i + j) % 3 == 0:
                options["intermediate"] = "input"
            angles = np.arange(700)[:, None] / 100.0 ** (np.arange(dim // 2) / (dim // 2))
            q, k = (
                _round_to(random.normal(0, 1, (tokens, n, dim + rest)).astype(np.float32), dtype) for n in (heads, 1)
            )
            cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
            yield _Rotation(dtype, options, q, k, cos, sin, random.integers(0, 700, tokens))


def _rotations_against_float64(arrays: _Arrays) -> Iterator[tuple[str, float]]:
    """(case, error as a share of its bound in contract.py)."""
    for case in _rotations(arrays.dtypes, arrays.device):
        got = case.results(arrays)
        options = {name: value for name, value in case.options.items() if name != "intermediate"}
        rounding = ROUNDING[case.dtype]
        rounds = "intermediate" in case.options
        facts: dict[str, Any] = {"inner": rounding.inner, "inner_least": rounding.least} if rounds else {}
        for transposed, names in ((False, ("q", "k")), (True, ("dq", "dk"))):
            expected = rope_op.rope_reference(
                case.q, case.k, case.cos, case.sin, position_ids=case.position_ids, transposed=transposed, **options
            )
            for name, of in zip(names, ("q", "k"), strict=True):
                scale = expected[f"{of}_scale"]
                bound = row("rope", name).allowed(case.dtype, expected=expected[of], scale=scale, **facts)
                yield f"{name} {case.dtype} {list(case.q.shape)}", _worst(got[name], expected[of], bound)


def rope(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Rotations and their gradients against float64, against themselves in other batches, and on a GPU against the
    CPU."""
    arrays = _Arrays(torch, device)

    def float64() -> tuple[bool, str]:
        case, share = max(_rotations_against_float64(arrays), key=lambda item: item[1])
        return share <= 1.0, f"worst error {share:.2f} of its bound, {case}"

    yield _timed("against float64", float64)

    def tokens() -> tuple[bool, str]:
        differ = 0
        for case in _rotations(arrays.dtypes[-1:], device):
            whole = case.results(arrays)
            part = case._replace(**{name: getattr(case, name)[1:3] for name in ("q", "k", "position_ids")})
            differ += sum(_same_bytes(a, whole[name][1:3]) for name, a in part.results(arrays).items())
        return differ == 0, f"{differ} values differ between a batch and its tokens"

    yield _timed("same bytes for any number of tokens", tokens)
    if device == "cpu":
        return
    cpu = _Arrays(torch, "cpu")

    def bytes_of_cpu() -> tuple[bool, str]:
        differ = total = 0
        for case in _rotations(arrays.dtypes, arrays.device):
            here, there = case.results(arrays), case.results(cpu)
            differ += sum(_same_bytes(here[name], there[name]) for name in here)
            total += sum(value.size for value in here.values())
        return differ == 0, f"{differ} of {total} values differ"

    yield _timed("same bytes as the CPU", bytes_of_cpu)


def attention(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """In a file of its own, which needs what is above."""
    from ._selftest_attention import attention as checks

    return checks(torch, device, capability)


class _Gates(NamedTuple):
    """Operands of silu_mul and gelu_mul, float32 arrays with values of ``dtype``, and these functions on them."""

    dtype: str
    activation: str
    gate: np.ndarray  # [rows, columns]
    up: np.ndarray
    dy: np.ndarray

    def _functions(self) -> tuple[Any, Any, dict[str, Any]]:
        if self.activation == "silu":
            return silu_mul_op.silu_mul, silu_mul_op.silu_mul_backward, {}
        return silu_mul_op.gelu_mul, silu_mul_op.gelu_mul_backward, {"approximate": self.activation}

    def results(self, arrays: _Arrays) -> dict[str, np.ndarray]:
        gate, up, dy = (arrays.put(a, self.dtype) for a in self[2:])
        gate_up = arrays.put(np.concatenate((self.gate, self.up), -1), self.dtype)
        forward, backward, options = self._functions()
        d_gate, d_up = backward(dy, gate, up, **options)
        found = {
            "y": forward(gate, up, **options),
            "d_gate": d_gate,
            "d_up": d_up,
            "packed": forward(gate_up, round_before_mul=True, **options),
            "d_packed": backward(dy, gate_up, round_before_mul=True, **options),
        }
        return {name: arrays.get(result) for name, result in found.items()}

    def expected(self) -> dict[str, np.ndarray]:
        if self.activation == "silu":
            return silu_mul_op.silu_mul_reference(self.gate, self.up, dy=self.dy)
        return silu_mul_op.gelu_mul_reference(self.gate, self.up, approximate=self.activation, dy=self.dy)


def _gates(dtypes: tuple[str, ...]) -> Iterator[_Gates]:
    random = np.random.default_rng(5)
    # One column; odd; a block's share of a row and an octet; an intermediate size.
    for rows, columns in ((3, 1), (5, 37), (7, 1032), (3, 12288)):
        for dtype, activation in itertools.product(dtypes, ("silu", "tanh", "none")):
            values = (_round_to(random.normal(0, d, (rows, columns)).astype(np.float32), dtype) for d in (3, 1, 1))
            yield _Gates(dtype, activation, *values)


def _gates_against_float64(arrays: _Arrays) -> Iterator[tuple[str, float]]:
    """(case, error as a share of its bound in contract.py)."""
    for case in _gates(arrays.dtypes):
        got, expected = case.results(arrays), case.expected()
        got["packed d_gate"], got["packed d_up"] = np.split(got["d_packed"], 2, -1)
        rounding = ROUNDING[case.dtype]
        operator = "silu_mul" if case.activation == "silu" else "gelu_mul"
        gate, up, dy = (np.abs(a.astype(np.float64)) for a in (case.gate, case.up, case.dy))
        value = {"act": np.abs(expected["act"]), "gate": gate}
        rounded = value | {"inner": rounding.inner, "inner_least": rounding.least}  # before the product
        facts = {
            ("y", "y"): value | {"other": up},
            ("d_gate", "d_gate"): {"gate": gate, "other": up * dy},
            ("d_up", "d_up"): value | {"other": dy},
            ("packed", "y"): rounded | {"other": up},
            ("packed d_gate", "d_gate"): {"gate": gate, "other": up * dy},
            ("packed d_up", "d_up"): rounded | {"other": dy},
        }
        for (name, output), of in facts.items():
            bound = row(operator, output).allowed(case.dtype, expected=expected[output], **of)
            yield (
                f"{name} {case.activation} {case.dtype} {list(case.gate.shape)}",
                _worst(got[name], expected[output], bound),
            )


def silu_mul(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    """Gated activations and gradients against float64, against themselves elsewhere, and on a GPU against the CPU."""
    arrays = _Arrays(torch, device)

    def float64() -> tuple[bool, str]:
        case, share = max(_gates_against_float64(arrays), key=lambda item: item[1])
        return share <= 1.0, f"worst error {share:.2f} of its bound, {case}"

    yield _timed("against float64", float64)

    def rows() -> tuple[bool, str]:
        differ = 0
        for case in _gates(arrays.dtypes[-1:]):
            whole = case.results(arrays)
            part = case._replace(gate=case.gate[1:3], up=case.up[1:3], dy=case.dy[1:3]).results(arrays)
            differ += sum(_same_bytes(part[name], whole[name][1:3]) for name in whole)
        return differ == 0, f"{differ} values differ between a batch and its rows"

    yield _timed("same bytes for any number of rows", rows)
    if device == "cpu":
        return
    cpu = _Arrays(torch, "cpu")

    def bytes_of_cpu() -> tuple[bool, str]:
        differ = total = 0
        for case in _gates(arrays.dtypes):
            here, there = case.results(arrays), case.results(cpu)
            differ += sum(_same_bytes(here[name], there[name]) for name in here)
            total += sum(value.size for value in here.values())
        return differ == 0, f"{differ} of {total} values differ"

    yield _timed("same bytes as the CPU", bytes_of_cpu)


def linear_logprob(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
    from . import _selftest_head  # which is written with what this module defines

    return _selftest_head.checks(torch, device, capability)


def _advantages(name: str) -> Callable[[Any, str, tuple[int, int] | None], Iterator[Check]]:
    def self_test(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
        from . import _selftest_advantages  # which is written with what this module defines

        return _selftest_advantages.self_test(name, torch, device)

    return self_test


def _tokens(name: str) -> Callable[[Any, str, tuple[int, int] | None], Iterator[Check]]:
    def self_test(torch: Any, device: str, capability: tuple[int, int] | None) -> Iterator[Check]:
        from . import _selftest_policy  # which is written with what this module defines

        return _selftest_policy.self_test(name, torch, device)

    return self_test


# Name of each operator and its self-test.
OPERATORS: dict[str, Callable[[Any, str, tuple[int, int] | None], Iterator[Check]]] = {
    "logprob": logprob,
    "linear": linear,
    "linear_logprob": linear_logprob,
    "rms_norm": rms_norm,
    "attention": attention,
    "embedding": embedding,
    "pack": sequences.pack,
    "preference_loss": sequences.preference_loss,
    "policy_loss": _tokens("policy_loss"),
    "kl": _tokens("kl"),
    "value_loss": _tokens("value_loss"),
    "importance_weights": _tokens("importance_weights"),
    "mismatch_metrics": _tokens("mismatch_metrics"),
    "scatter_rewards": _tokens("scatter_rewards"),
    "covariance_mask": _tokens("covariance_mask"),
    "rope": rope,
    "gae": _advantages("gae"),
    "group_advantage": _advantages("group_advantage"),
    "masked_whiten": _advantages("masked_whiten"),
    "optimal_token_baseline": _advantages("optimal_token_baseline"),
    "sequence_logprob": sequences.sequence_logprob,
    "shift_labels_packed": sequences.shift_labels_packed,
    "silu_mul": silu_mul,
}
