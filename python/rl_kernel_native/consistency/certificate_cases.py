"""What a certificate runs: seeded operands, and each operator's calls on them.

Operands are integers of a counter's hash, scaled exactly: the same bits with any version of any library, anywhere.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import rl_kernel_native as rk

from .environment import arithmetic_of

DTYPES = ("bfloat16", "float16", "float32")
LAYOUTS = ("contiguous", "strided", "misaligned")
MOST_NEIGHBOURS = 129  # distinct rows around the one that is certified; larger batches repeat them


def noise(name: str, seed: int, shape: tuple[int, ...], deviation: float = 1.0) -> np.ndarray:
    """float32 values of nearly normal distribution: sums of four 16-bit integers of a hashed counter (SplitMix64)."""
    key = int.from_bytes(hashlib.sha256(f"{name} {seed}".encode()).digest()[:8], "little")
    z = np.arange(int(np.prod(shape)), dtype=np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
    z ^= z >> np.uint64(31)
    total = z.view(np.uint16).reshape(-1, 4).sum(-1, dtype=np.int32) - 131_070
    return (total * (deviation / 37837.0)).astype(np.float32).reshape(shape)


def indices(name: str, seed: int, count: int, below: int) -> np.ndarray:
    """int64 ids in [0, below)."""
    return (noise(name, seed, (count,)).view(np.uint32) % np.uint32(below)).astype(np.int64)


class Arrays:
    """Tensors of torch on a device. A subclass may say `wrap` and `unwrap`, for arrays that are not torch's."""

    has_autograd = True  # without it gradients that only an autograd gives are left out

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    def wrap(self, tensor: torch.Tensor) -> Any:
        """What operators are given of a tensor, which may have any strides."""
        return tensor

    def unwrap(self, array: Any) -> torch.Tensor:
        """A tensor of what an operator gave."""
        result: torch.Tensor = array
        return result

    @property
    def exponentials(self) -> tuple[str, ...]:
        """Modes of rule 3 that exist on the device."""
        return ("portable", "hardware") if self.arithmetic.startswith("sm_") and self._has_ex2 else ("portable",)

    @property
    def _has_ex2(self) -> bool:
        return self.device.type != "cpu" or self.arithmetic == "sm_90"  # the CPU models that of an sm_90

    @property
    def product_dtypes(self) -> tuple[str, ...]:
        """What matrices are multiplied in: float32 by the CPU in ieee arithmetic alone."""
        return DTYPES if self.arithmetic == "ieee" else DTYPES[:2]

    @property
    def arithmetic(self) -> str:
        """Whose matrix products the device computes."""
        return arithmetic_of(self.device)

    def laid_out(self, values: torch.Tensor, layout: str) -> torch.Tensor:
        """`values` [rows, ...] on the device as a view into memory of NaN (or of -1)."""
        values = values.to(self.device)
        rows, row = (values.shape[0], values[0].numel()) if values.dim() > 1 else (1, values.numel())
        gap, offset = {"contiguous": (0, 0), "strided": (16, 32), "misaligned": (3, 1)}[layout]
        filler = float("nan") if values.is_floating_point() else -1
        memory = torch.full((offset + rows * (row + gap),), filler, dtype=values.dtype, device=self.device)
        inner = values[0].contiguous().stride() if values.dim() > 1 else ()
        strides = (row + gap, *inner) if values.dim() > 1 else (1,)
        view = memory.as_strided(values.shape, strides, offset)
        view.copy_(values)
        return view

    def bytes_of(self, array: Any, row: int | None = None) -> bytes:
        """Those of one row of a result, or of all."""
        tensor = self.unwrap(array)
        part = (tensor if row is None else tensor[row : row + 1]).detach().contiguous().cpu()
        data: bytes = part.view(torch.uint8).numpy().tobytes()
        return data


Call = Callable[[Arrays, Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """One pass of an operator, in one dtype, of one shape.

    Attributes:
        direction: "forward" or "backward".
        rows: operands of each row: name to (shape of a row, deviation), or to (None, below) for ids in [0, below).
        fixed: operands that all rows share, by name: (shape, deviation, dtype).
        call: from the operands, as arrays of the device, to results with the rows as their first dimension.
        token_sum: None, or the number of rows that the operator sums over; results then have no rows.
        ways: other calls that must give the same results, by description.
        exp: exponential of softmax statistics; "" for operators without one.
        options: of the call, in words.
    """

    operator: str
    direction: str
    dtype: str
    shape: tuple[int, ...]
    outputs: tuple[str, ...]
    rows: Mapping[str, tuple[tuple[int, ...] | None, float]]
    call: Call
    fixed: Mapping[str, tuple[tuple[int, ...], float, str]] = field(default_factory=dict)
    token_sum: int | None = None
    ways: Mapping[str, Call] = field(default_factory=dict)
    exp: str = ""
    options: str = ""

    @property
    def key(self) -> str:
        """Name under which digests of machines are compared."""
        words = (
            self.operator,
            "/".join(self.outputs),
            self.dtype,
            "x".join(map(str, self.shape)),
            self.exp,
            self.options,
        )
        return " ".join(word for word in words if word)

    def values(self, seed: int, count: int) -> dict[str, torch.Tensor]:
        """Operands of `count` rows, on the CPU."""
        return {name: self._tensor(name, seed, count, *of) for name, of in self.rows.items()}

    def shared(self) -> dict[str, torch.Tensor]:
        """The operands that rows share, on the CPU."""
        return {
            name: torch.from_numpy(noise(name, 0, shape, deviation)).to(getattr(torch, dtype))
            for name, (shape, deviation, dtype) in self.fixed.items()
        }

    def _tensor(
        self, name: str, seed: int, count: int, shape: tuple[int, ...] | None, parameter: float
    ) -> torch.Tensor:
        name = f"{self.operator} {name}"
        if shape is None:
            return torch.from_numpy(indices(name, seed, count, int(parameter)))
        wide = torch.from_numpy(noise(name, seed, (count, *shape), parameter))
        return wide if shape == () else wide.to(getattr(torch, self.dtype))  # numbers of a row are float32


def cases(arrays: Arrays, quick: bool) -> Iterator[Case]:
    """Every operator's, as far as the device serves them."""
    for operator, make in CASES.items():
        if hasattr(rk, operator):
            yield from make(arrays, quick)


def _dtypes(quick: bool, large: bool) -> tuple[str, ...]:
    """A quick certificate has the large shapes in bfloat16 alone."""
    return DTYPES[:1] if quick and large else DTYPES


# ---- operators ------------------------------------------------------------------------------------------------------

TEMPERATURE = 0.75
STATISTICS = ("logprob", "lse", "entropy", "sum_p_sq")


def _statistics(a: Mapping[str, Any], exp: Any) -> Any:
    wanted: dict[str, Any] = {f"return_{name}": True for name in STATISTICS[1:]}
    return rk.logprob(a["logits"], a["target"], temperature=TEMPERATURE, exp=exp, **wanted)


def logprob(arrays: Arrays, quick: bool) -> Iterator[Case]:
    # Odd; Llama 2's, Llama 3's and Qwen3's vocabularies.
    for vocab in (4099, 32000) if quick else (1, 4099, 32000, 128256, 151936):
        for dtype in _dtypes(quick, vocab == 32000):
            for exp in arrays.exponentials:
                yield from _logprob(vocab, dtype, exp)


def _logprob(vocab: int, dtype: str, exp: Any) -> Iterator[Case]:
    rows: dict[str, tuple[tuple[int, ...] | None, float]] = {"logits": ((vocab,), 4.0), "target": (None, vocab)}

    def forward(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
        return dict(zip(STATISTICS, _statistics(a, exp), strict=False))

    def sharded(arrays: Arrays, a: Mapping[str, Any], shards: int) -> Mapping[str, Any]:
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
        merged = rk.logprob_merge(arrays.wrap(torch.stack(stats)), temperature=TEMPERATURE, **wanted)
        return dict(zip(STATISTICS, merged, strict=False))

    def backward(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
        saved = _statistics(a, exp)
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
    given: dict[str, tuple[tuple[int, ...] | None, float]] = {"dlogprob": ((), 1.0), "dentropy": ((), 0.5)}
    yield Case("logprob", "backward", dtype, (vocab,), ("dlogits",), rows | given, backward, exp=exp)


def linear(arrays: Arrays, quick: bool) -> Iterator[Case]:
    # Odd, within one tile; a projection of Qwen3-8B to its key heads; a down projection of Qwen3-0.6B.
    shapes = ((13, 7), (4096, 1024)) if quick else ((13, 7), (1000, 130), (4096, 1024), (3072, 1024))
    for ins, outs in shapes:
        for dtype in arrays.product_dtypes if not quick or ins < 100 else arrays.product_dtypes[:1]:
            weight = {"weight": ((outs, ins), 1.0, dtype)}
            yield Case(
                "linear", "forward", dtype, (ins, outs), ("y",), {"x": ((ins,), 1.0)},
                lambda arrays, a: {"y": rk.linear(a["x"], a["weight"], a["bias"])},
                weight | {"bias": ((outs,), 1.0, dtype)},
            )  # fmt: skip
            yield Case(
                "linear", "backward", dtype, (ins, outs), ("dx",), {"dy": ((outs,), 1.0)},
                lambda arrays, a: {"dx": rk.linear_input_grad(a["dy"], a["weight"])}, weight,
            )  # fmt: skip
    for dtype in arrays.product_dtypes:
        rows: dict[str, tuple[tuple[int, ...] | None, float]] = {"x": ((24,), 1.0), "dy": ((17,), 1.0)}
        yield Case(
            "linear", "backward", dtype, (TOKENS, 24, 17), ("dweight",), rows,
            lambda arrays, a: {"dweight": rk.linear_weight_grad(a["dy"], a["x"], out_dtype="float32")},
            token_sum=TOKENS, ways={CHUNKS: _linear_chunks},
        )  # fmt: skip
    for dtype in DTYPES:
        yield Case(
            "linear", "backward", dtype, (TOKENS, 17), ("dbias",), {"dy": ((17,), 1.0)},
            lambda arrays, a: {"dbias": rk.linear_bias_grad(a["dy"], out_dtype="float32")}, token_sum=TOKENS,
        )  # fmt: skip


def linear_logprob(arrays: Arrays, quick: bool) -> Iterator[Case]:
    # Odd, over some leaves; whole tiles, whose eighths are shards.
    for ins, vocab in ((40, 1031), (128, 2048)):
        for dtype in arrays.product_dtypes if not quick or ins < 100 else arrays.product_dtypes[:1]:
            for exp in arrays.exponentials:
                yield from _linear_logprob(ins, vocab, dtype, exp, arrays.has_autograd)
    if not arrays.has_autograd:
        return
    for dtype in arrays.product_dtypes:
        given: dict[str, tuple[tuple[int, ...] | None, float]] = {
            "hidden": ((24,), 1.0), "target": (None, 17), "dy": ((), 1.0),
        }  # fmt: skip
        fixed = {"weight": ((17, 24), 0.2, dtype), "bias": ((17,), 1.0, dtype)}
        shape = (TOKENS, 24, 17)
        for name, ways in (("dweight", {CHUNKS: _head_chunks}), ("dbias", {})):
            yield Case(
                "linear_logprob", "backward", dtype, shape, (name,), given, functools.partial(_head_sums, name=name),
                fixed, TOKENS, ways, "portable",
            )  # fmt: skip
        factors = {"lora_a": ((8, 24), 0.2, dtype), "lora_b": ((17, 8), 0.5, dtype)}
        yield Case(
            "linear_logprob", "backward", dtype, (*shape, 8), ("dlora_a", "dlora_b"), given, _head_factors,
            fixed | factors, TOKENS, {}, "portable", options="lora",
        )  # fmt: skip


def _linear_logprob(ins: int, vocab: int, dtype: str, exp: Any, gradients: bool) -> Iterator[Case]:
    how: dict[str, Any] = {"temperature": TEMPERATURE, "exp": exp}
    wanted: dict[str, Any] = {f"return_{name}": True for name in STATISTICS[1:]}

    def forward(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
        found = rk.linear_logprob(a["hidden"], a["weight"], a["target"], bias=a["bias"], **wanted, **how)
        return dict(zip(STATISTICS, found, strict=False))

    def sharded(arrays: Arrays, a: Mapping[str, Any], shards: int) -> Mapping[str, Any]:
        weight, bias, stats = arrays.unwrap(a["weight"]), arrays.unwrap(a["bias"]), []
        for first in range(0, vocab, vocab // shards):
            own = slice(first, first + vocab // shards)
            shard = {"bias": arrays.wrap(bias[own]), "vocab_start": first, "vocab_size": vocab}
            part = rk.linear_logprob_partial(a["hidden"], arrays.wrap(weight[own]), a["target"], **shard, **how)
            stats.append(arrays.unwrap(part))
        merged = rk.logprob_merge(arrays.wrap(torch.stack(stats)), temperature=TEMPERATURE, **wanted)
        return dict(zip(STATISTICS, merged, strict=False))

    def backward(arrays: Arrays, a: Mapping[str, Any], dh_segments: int) -> Mapping[str, Any]:
        leaf = arrays.unwrap(a["hidden"]).detach().requires_grad_()
        rest = [arrays.unwrap(a[name]) for name in ("weight", "target")]
        found = rk.linear_logprob(
            leaf, *rest, bias=arrays.unwrap(a["bias"]), return_entropy=True, dh_segments=dh_segments, **how
        )
        dys = [arrays.unwrap(a[name]) for name in ("dlogprob", "dentropy")]
        return {"dhidden": torch.autograd.grad((found.logprob, found.entropy), leaf, dys)[0]}

    rows: dict[str, tuple[tuple[int, ...] | None, float]] = {"hidden": ((ins,), 1.0), "target": (None, vocab)}
    fixed = {"weight": ((vocab, ins), 2 / ins**0.5, dtype), "bias": ((vocab,), 1.0, dtype)}
    ways: dict[str, Call] = {}
    if vocab % 64 == 0:
        ways = {f"{n} shards": functools.partial(sharded, shards=n) for n in (2, 4, 8)}
    shape = (ins, vocab)
    yield Case("linear_logprob", "forward", dtype, shape, STATISTICS, rows, forward, fixed, ways=ways, exp=exp)
    given: dict[str, tuple[tuple[int, ...] | None, float]] = {"dlogprob": ((), 1.0), "dentropy": ((), 0.5)}
    for dh_segments in (1, 8) if gradients else ():
        yield Case(
            "linear_logprob", "backward", dtype, shape, ("dhidden",), rows | given,
            functools.partial(backward, dh_segments=dh_segments), fixed, exp=exp, options=f"dh_segments={dh_segments}",
        )  # fmt: skip


def _head_sums(arrays: Arrays, a: Mapping[str, Any], name: str, total: Any = None) -> Mapping[str, Any]:
    """dweight through main_grad, which is float32; dbias."""
    weight, bias = (arrays.unwrap(a[n]).detach().requires_grad_() for n in ("weight", "bias"))
    if total is None and name == "dweight":
        total = torch.zeros(weight.shape, device=weight.device)
    hidden, target, dlogprob = (arrays.unwrap(a[n]) for n in ("hidden", "target", "dy"))
    rk.linear_logprob(hidden, weight, target, bias=bias, exp="portable", main_grad=total).backward(dlogprob)
    return {name: bias.grad if total is None else total}


def _head_factors(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
    """Gradients of LoRA's factors."""
    lora: dict[str, Any] = {n: arrays.unwrap(a[n]).detach().requires_grad_() for n in ("lora_a", "lora_b")}
    hidden, weight, bias, target, dlogprob = (arrays.unwrap(a[n]) for n in ("hidden", "weight", "bias", "target", "dy"))
    found = rk.linear_logprob(hidden, weight, target, bias=bias, exp="portable", lora_scale=LORA_SCALE, **lora)
    found.backward(dlogprob)
    return {f"d{name}": leaf.grad for name, leaf in lora.items()}


def _head_chunks(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
    total = torch.zeros(17, 24, device=arrays.device)
    for part in _chunks(arrays, a):
        _head_sums(arrays, part, "dweight", total)
    return {"dweight": total}


TOKENS = 8203  # two blocks of rule 9
LORA_SCALE = 0.5
BLOCK = 8192
CHUNKS = "chunks of 8192 through main_grad"


def _chunks(arrays: Arrays, a: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a token sum in blocks."""
    tensors = {name: arrays.unwrap(array) for name, array in a.items()}
    count = next(iter(tensors.values())).shape[0]
    for first in range(0, count, BLOCK):
        yield {name: arrays.wrap(t[first : first + BLOCK] if t.shape[0] == count else t) for name, t in tensors.items()}


def _linear_chunks(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
    main_grad = arrays.wrap(torch.zeros(17, 24, device=arrays.device))
    for part in _chunks(arrays, a):
        rk.linear_weight_grad(part["dy"], part["x"], main_grad=main_grad)
    return {"dweight": main_grad}


EPS = 1e-6


def rms_norm(arrays: Arrays, quick: bool) -> Iterator[Case]:
    # Odd; a head; hidden sizes of Qwen3-8B and 14B. Roundings of Llama and Qwen, weights of Gemma.
    for columns in (1003, 4096) if quick else (1, 128, 1003, 4096, 5120):
        options: dict[str, Any] = {"weight_offset": 1.0} if columns == 1003 else {"round_before_weight": True}
        for dtype in _dtypes(quick, columns == 4096):
            yield from _rms_norm(columns, dtype, options)
    for dtype in DTYPES:
        rows: dict[str, tuple[tuple[int, ...] | None, float]] = {"dy": ((24,), 1.0), "h": ((24,), 1.0)}

        def dweight(arrays: Arrays, a: Mapping[str, Any], main_grad: Any = None) -> Mapping[str, Any]:
            kind: dict[str, Any] = {} if main_grad is not None else {"dweight_dtype": "float32"}
            found = rk.rms_norm_backward(
                a["dy"], a["h"], a["weight"], EPS, main_grad=main_grad, return_dx=False, **kind
            )
            return {"dweight": found[1] if main_grad is None else main_grad}

        def chunked(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
            main_grad = arrays.wrap(torch.zeros(24, device=arrays.device))
            for part in _chunks(arrays, a):
                dweight(arrays, part, main_grad)
            return {"dweight": main_grad}

        yield Case(
            "rms_norm", "backward", dtype, (TOKENS, 24), ("dweight",), rows, dweight,
            {"weight": ((24,), 1.0, dtype)}, TOKENS, {CHUNKS: chunked},
        )  # fmt: skip


def _rms_norm(columns: int, dtype: str, options: dict[str, Any]) -> Iterator[Case]:
    row = (columns,)
    weight = {"weight": (row, 1.0, dtype)}

    def forward(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
        found = rk.rms_norm(a["x"], a["weight"], EPS, residual=a["residual"], return_rstd=True, **options)
        return dict(zip(("y", "new_residual", "rstd"), found, strict=True))

    def backward(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
        more = {"d_new_residual": a["d_new_residual"], "return_dweight": False}
        return {"dx": rk.rms_norm_backward(a["dy"], a["h"], a["weight"], EPS, **more, **options)[0]}

    outputs, words = ("y", "new_residual", "rstd"), _in_words(options)
    rows: dict[str, tuple[tuple[int, ...] | None, float]] = {"x": (row, 1.0), "residual": (row, 1.0)}
    yield Case("rms_norm", "forward", dtype, row, outputs, rows, forward, weight, options=words)
    rows = dict.fromkeys(("dy", "h", "d_new_residual"), (row, 1.0))
    yield Case("rms_norm", "backward", dtype, row, ("dx",), rows, backward, weight, options=words)


def rope(arrays: Arrays, quick: bool) -> Iterator[Case]:
    # Odd, which no vector takes; heads of Qwen3-8B; half of a head.
    odd: tuple[Any, ...] = ((3, 1, 18), 16, {"interleaved": True, "intermediate": "input"})
    qwen: tuple[Any, ...] = ((32, 8, 128), 128, {})
    half: tuple[Any, ...] = ((5, 1, 64), 32, {})
    for (heads, kv_heads, dim), rotary, options in (odd, qwen) if quick else (odd, qwen, half):
        for dtype in _dtypes(quick, heads == 32):
            rows: dict[str, tuple[tuple[int, ...] | None, float]] = {
                "q": ((heads, dim), 1.0), "k": ((kv_heads, dim), 1.0), "position_ids": (None, 700),
            }  # fmt: skip
            table = ((700, rotary // 2), 0.5, "float32")
            given = {"partial_dim": rotary, **options}
            for direction, outputs in (("forward", ("q", "k")), ("backward", ("dq", "dk"))):

                def call(
                    arrays: Arrays,
                    a: Mapping[str, Any],
                    given: Any = given,
                    backward: bool = direction == "backward",
                    outputs: tuple[str, ...] = outputs,
                ) -> Mapping[str, Any]:
                    function = rk.rope_backward if backward else rk.rope
                    found = function(a["q"], a["k"], a["cos"], a["sin"], position_ids=a["position_ids"], **given)
                    return dict(zip(outputs, found, strict=True))

                shape = (heads, kv_heads, dim)
                tables = {"cos": table, "sin": table}
                words = _in_words(given)
                yield Case("rope", direction, dtype, shape, outputs, rows, call, tables, options=words)


def silu_mul(arrays: Arrays, quick: bool) -> Iterator[Case]:
    # Odd; the intermediate size of Qwen3-8B; that of Llama 3.1 8B.
    yield from _gates("silu_mul", {}, quick, (37, 12288) if quick else (37, 12288, 14336))


def gelu_mul(arrays: Arrays, quick: bool) -> Iterator[Case]:
    for approximate in ("tanh", "none"):
        yield from _gates("gelu_mul", {"approximate": approximate}, quick, (37, 10240))  # odd; of Gemma 3 4B


def _in_words(options: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


def _gates(operator: str, options: dict[str, Any], quick: bool, widths: tuple[int, ...]) -> Iterator[Case]:
    words = _in_words(options)
    for columns in widths:
        for dtype in _dtypes(quick, columns > 1000):
            row = ((columns,), 1.0)
            rows: dict[str, tuple[tuple[int, ...] | None, float]] = {"gate": ((columns,), 3.0), "up": row}

            def forward(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
                return {"y": getattr(rk, operator)(a["gate"], a["up"], round_before_mul=True, **options)}

            def backward(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
                function = getattr(rk, f"{operator}_backward")
                found = function(a["dy"], a["gate"], a["up"], round_before_mul=True, **options)
                return dict(zip(("d_gate", "d_up"), found, strict=True))

            yield Case(operator, "forward", dtype, (columns,), ("y",), rows, forward, options=words)
            outputs = ("d_gate", "d_up")
            rows = rows | {"dy": row}
            yield Case(operator, "backward", dtype, (columns,), outputs, rows, backward, options=words)


def embedding(arrays: Arrays, quick: bool) -> Iterator[Case]:
    # Odd; hidden sizes of Qwen3-0.6B and 8B. A table of 300 rows; its bits are copied.
    for columns in (37, 1024) if quick else (37, 1024, 4096):
        for dtype in _dtypes(quick, columns > 1000):
            yield Case(
                "embedding", "forward", dtype, (columns,), ("y",), {"ids": (None, 300)},
                lambda arrays, a: {"y": rk.embedding(a["ids"], a["weight"])},
                {"weight": ((300, columns), 1.0, dtype)},
            )  # fmt: skip
    for dtype in DTYPES:
        rows: dict[str, tuple[tuple[int, ...] | None, float]] = {"dy": ((24,), 1.0), "ids": (None, 7)}

        def dweight(arrays: Arrays, a: Mapping[str, Any], main_grad: Any = None) -> Mapping[str, Any]:
            if main_grad is not None:
                return {"dweight": rk.embedding_backward(a["dy"], a["ids"], 7, main_grad=main_grad)}
            return {"dweight": rk.embedding_backward(a["dy"], a["ids"], 7, dweight_dtype="float32")}

        def chunked(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
            main_grad = arrays.wrap(torch.zeros(7, 24, device=arrays.device))
            for part in _chunks(arrays, a):
                dweight(arrays, part, main_grad)
            return {"dweight": main_grad}

        yield Case(
            "embedding", "backward", dtype, (TOKENS, 7, 24), ("dweight",), rows, dweight,
            token_sum=TOKENS, ways={CHUNKS: chunked},
        )  # fmt: skip


def attention(arrays: Arrays, quick: bool) -> Iterator[Case]:
    # A sequence is a row. Within a block; just over a block of 128 keys; heads of Qwen3, which a quick run leaves out.
    shapes = ((37, 3, 1, 24), (130, 2, 1, 128), (150, 4, 2, 128))
    for tokens, heads, kv_heads, dim in shapes[: 2 if quick else 3]:
        for dtype in _dtypes(quick, tokens > 128):
            for exp in arrays.exponentials:
                yield from _attention((tokens, heads, kv_heads, dim), dtype, exp)
    for dtype in DTYPES:
        for exp in arrays.exponentials:
            rows: dict[str, tuple[tuple[int, ...] | None, float]] = dict.fromkeys(("q", "k", "v"), ((2, 16), 1.0))
            yield Case(
                "attention", "backward", dtype, (TOKENS, 2, 16), ("dsinks",), rows | {"dy": ((2, 16), 1.0)},
                functools.partial(_sinks, exp=exp), {"sinks": ((2,), 1.0, "float32")}, token_sum=TOKENS, exp=exp,
            )  # fmt: skip


def _sinks(arrays: Arrays, a: Mapping[str, Any], exp: Any) -> Mapping[str, Any]:
    """Tokens are packed sequences of 64."""
    count = arrays.unwrap(a["q"]).shape[0]
    offsets = torch.arange(0, count + 64, 64, dtype=torch.int32, device=arrays.device).clamp(max=count)
    how: dict[str, Any] = {"cu_seqlens_q": arrays.wrap(offsets), "cu_seqlens_k": arrays.wrap(offsets)}
    how |= {"sinks": a["sinks"], "exp": exp}
    out, lse = rk.attention(a["q"], a["k"], a["v"], return_lse=True, **how)
    return {"dsinks": rk.attention_backward(a["dy"], a["q"], a["k"], a["v"], out, lse, **how)[3]}


def _attention(shape: tuple[int, int, int, int], dtype: str, exp: Any) -> Iterator[Case]:
    tokens, heads, kv_heads, dim = shape
    of_q, of_k = ((tokens, heads, dim), 1.0), ((tokens, kv_heads, dim), 1.0)
    rows: dict[str, tuple[tuple[int, ...] | None, float]] = {"q": of_q, "k": of_k, "v": of_k}

    def forward(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
        found = rk.attention(a["q"], a["k"], a["v"], exp=exp, return_lse=True)
        return {"out": found[0], "lse": found[1]}

    def packed(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sequences one after the other."""
        count = arrays.unwrap(a["q"]).shape[0]
        offsets = arrays.wrap(torch.arange(count + 1, dtype=torch.int32, device=arrays.device) * tokens)
        q, k, v = (arrays.wrap(arrays.unwrap(a[name]).flatten(0, 1)) for name in "qkv")
        found = rk.attention(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, exp=exp, return_lse=True)
        out, lse = (arrays.unwrap(t) for t in found)
        return {"out": out.view(count, tokens, heads, dim), "lse": lse.view(heads, count, tokens).transpose(0, 1)}

    def chunked(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
        """17 queries at a time, as a prefill in chunks against a cache."""
        q, k, v = (arrays.unwrap(a[name]) for name in "qkv")
        parts = []
        for first in range(0, tokens, 17):
            last = min(first + 17, tokens)
            part = (arrays.wrap(t) for t in (q[:, first:last], k[:, :last], v[:, :last]))
            parts.append([arrays.unwrap(t) for t in rk.attention(*part, exp=exp, return_lse=True)])
        return {"out": torch.cat([p[0] for p in parts], 1), "lse": torch.cat([p[1] for p in parts], 2)}

    def padded(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
        """Five tokens of padding in front."""
        q, k, v = (torch.nn.functional.pad(arrays.unwrap(a[name]), (0, 0, 0, 0, 5, 0), value=7.0) for name in "qkv")
        pads = torch.full((q.shape[0],), 5, dtype=torch.int32, device=arrays.device)
        wrapped = (arrays.wrap(t) for t in (q, k, v))
        out, lse = rk.attention(*wrapped, leftpad_k=arrays.wrap(pads), exp=exp, return_lse=True)
        return {"out": arrays.unwrap(out)[:, 5:], "lse": arrays.unwrap(lse)[:, :, 5:]}

    def backward(arrays: Arrays, a: Mapping[str, Any]) -> Mapping[str, Any]:
        q, k, v = a["q"], a["k"], a["v"]
        out, lse = rk.attention(q, k, v, exp=exp, return_lse=True)
        found = rk.attention_backward(a["dout"], q, k, v, out, lse, exp=exp)
        return dict(zip(("dq", "dk", "dv"), found, strict=True))

    ways = {"packed": packed, "chunks of 17 queries": chunked, "5 tokens of padding": padded}
    yield Case("attention", "forward", dtype, shape, ("out", "lse"), rows, forward, ways=ways, exp=exp)
    yield Case("attention", "backward", dtype, shape, ("dq", "dk", "dv"), rows | {"dout": of_q}, backward, exp=exp)


def kl(arrays: Arrays, quick: bool) -> Iterator[Case]:
    for columns in (37, 2048):  # odd; whole vectors
        row = ((columns,), 0.5)
        rows: dict[str, tuple[tuple[int, ...] | None, float]] = {"logprob": row, "ref_logprob": row, "weight": row}
        for options in ({"estimator": "k3"}, {"estimator": "k2", "input_clamp": 0.5, "clamp": 0.1}):

            def forward(arrays: Arrays, a: Mapping[str, Any], options: Any = options) -> Mapping[str, Any]:
                return {"kl": rk.kl(a["logprob"], a["ref_logprob"], old_logprob=a["weight"], **options)}

            def backward(arrays: Arrays, a: Mapping[str, Any], options: Any = options) -> Mapping[str, Any]:
                operands = (a["dy"], a["logprob"], a["ref_logprob"])
                found = rk.kl_backward(*operands, importance_weight=a["weight"], **options)
                return found._asdict()

            words = _in_words(options)
            yield Case("kl", "forward", "float32", (columns,), ("kl",), rows, forward, options=words)
            yield Case(
                "kl", "backward", "float32", (columns,), ("d_logprob", "d_importance_weight"), rows | {"dy": row},
                backward, options=words,
            )  # fmt: skip


CASES: dict[str, Callable[[Arrays, bool], Iterator[Case]]] = {
    "logprob": logprob,
    "linear": linear,
    "linear_logprob": linear_logprob,
    "rms_norm": rms_norm,
    "rope": rope,
    "silu_mul": silu_mul,
    "gelu_mul": gelu_mul,
    "embedding": embedding,
    "attention": attention,
    "kl": kl,
}
