"""Tests bad exports: DLPack capsules that lie, break the protocol or come from elsewhere. None may crash.

Tests that might crash run in a separate process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlpack
import rl_kernel_native as rk
from cases import raw

XN, YN = np.arange(30, dtype=np.float32).reshape(3, 10) / 7, np.array([1, 2, 3])
LSE = rk.logprob(XN, YN, return_lse=True).lse
NAN = np.nan


def packed_field() -> np.ndarray:
    return np.zeros((3, 10), np.dtype([("a", "f4"), ("b", "i1")]))["a"]


def off_by_a_byte() -> np.ndarray:
    return np.zeros(121, np.uint8)[1:].view(np.float32).reshape(3, 10)


def read_only() -> np.ndarray:
    out = np.empty(3, np.float32)
    out.flags.writeable = False
    return out


def export(**fields: Any) -> dlpack.Exporter:
    return dlpack.Exporter(XN, **fields)


def reused() -> Any:
    shared = dlpack.SameCapsule(XN)
    rk.logprob(shared, YN)
    return rk.logprob(shared, YN)


EXPORTED: dict[str, tuple[Any, Any, str]] = {
    "big endian": (lambda: rk.logprob(XN.astype(">f4"), YN), (BufferError, TypeError), "logits|byte order"),
    "objects": (lambda: rk.logprob(XN.astype(object), YN), TypeError, r"logits: expected .* got dtype\('O'\)"),
    "fortran order": (
        lambda: rk.logprob(np.asfortranarray(XN), YN),
        ValueError,
        "logits: expected a contiguous last dimension .*; make it contiguous: np.ascontiguousarray",
    ),
    "columns backwards": (
        lambda: rk.logprob(XN[:, ::-1], YN),
        ValueError,
        "logits: expected a contiguous last .*got stride -1",
    ),
    "address off by a byte": (
        lambda: rk.logprob(off_by_a_byte(), YN),
        ValueError,
        "logits: expected an address that is a multiple",
    ),
    "stride off by a byte": (lambda: rk.logprob(packed_field(), YN), (BufferError, ValueError), "strides|logits"),
    "read-only out": (lambda: rk.logprob(XN, YN, out=read_only()), BufferError, "logprob: is read-only"),
    "read-only dlogits": (
        lambda: rk.logprob_backward(XN, YN, LSE, out=export(flags=dlpack.READ_ONLY)),
        BufferError,
        "out: is read-only",
    ),
    "consumed capsule": (
        reused,
        BufferError,
        "logits: expected an unconsumed DLPack capsule, got one named 'used_dltensor",
    ),
    "renamed capsule": (
        lambda: rk.logprob(export(name=b"dlmanaged"), YN),
        BufferError,
        "logits: expected .*named 'dlmanaged'",
    ),
    "unnamed capsule": (
        lambda: rk.logprob(export(name=None), YN),
        BufferError,
        "logits: expected an unconsumed DLPack capsule",
    ),
    "version 2": (
        lambda: rk.logprob(export(version=(2, 0)), YN),
        BufferError,
        "logits: expected DLPack version 1.x, got 2.0",
    ),
    "version 0": (
        lambda: rk.logprob(export(version=(0, 8)), YN),
        BufferError,
        "logits: expected DLPack version 1.x, got 0.8",
    ),
    "two lanes": (lambda: rk.logprob(export(lanes=2), YN), TypeError, "logits: expected dtype .*got float32x2"),
    "eight bits": (lambda: rk.logprob(export(bits=8), YN), TypeError, "logits: expected dtype .*got float8"),
    "unknown code": (lambda: rk.logprob(export(code=77), YN), TypeError, "logits: expected dtype .*got "),
    "an unknown device": (
        lambda: rk.logprob(export(device=dlpack.METAL), YN),
        TypeError,
        "logits: expected an array on a CPU.*DLPack device type 8",
    ),
    "negative size": (
        lambda: rk.logprob(export(shape=(3, -10)), YN),
        ValueError,
        r"logits: shape \[3, -10\] is negative",
    ),
    "sizes that overflow": (
        lambda: rk.logprob(export(shape=(2**40, 2**40)), YN),
        ValueError,
        "logits: shape .* overflows",
    ),
    "sizes whose bytes overflow": (
        lambda: rk.logprob(export(shape=(3, 2**61), strides=(2**61, 1)), YN),
        ValueError,
        "logits",
    ),
    "negative dimensions": (
        lambda: rk.logprob(export(ndim=-1), YN),
        ValueError,
        "logits: expected at most 8 dimensions, got -1",
    ),
    "many dimensions": (
        lambda: rk.logprob(export(ndim=2**30), YN),
        ValueError,
        "logits: expected at most 8 dimensions",
    ),
    "null data": (lambda: rk.logprob(export(data=None), YN), ValueError, "logits: has no memory"),
    "byte offset off alignment": (
        lambda: rk.logprob(export(byte_offset=2), YN),
        ValueError,
        "logits: expected an address",
    ),
    "out with overlapping strides": (
        lambda: rk.logprob(XN, YN, out=dlpack.Exporter(XN[0], shape=(3,), strides=(0,))),
        ValueError,
        "logprob: expected a contiguous",
    ),
    "dlogits with overlapping strides": (
        lambda: rk.logprob_backward(
            XN, YN, LSE, out=dlpack.Exporter(np.empty(99, "f4"), shape=(3, 10), strides=(9, 1))
        ),
        ValueError,
        "out: expected strides that do not overlap",
    ),
    "dlogits with strides that overflow": (
        lambda: rk.logprob_backward(
            XN, YN, LSE, out=dlpack.Exporter(np.empty(99, "f4"), shape=(3, 10), strides=(2**62, 1))
        ),
        ValueError,
        "out",
    ),
    "no capsule at all": (
        lambda: rk.logprob(type("E", (dlpack.Exporter,), {"__dlpack__": lambda self, **_: 5})(XN), YN),
        (TypeError, BufferError),
        "logits: expected",
    ),
    "an exporter that fails": (
        lambda: rk.logprob(type("E", (dlpack.Exporter,), {"__dlpack__": lambda self, **_: 1 / 0})(XN), YN),
        TypeError,
        "logits: expected an array in memory, got E, whose export fails: division by zero",
    ),
}


@pytest.mark.parametrize("case", EXPORTED)
def test_a_bad_export_is_a_typed_error_that_names_it(case: str) -> None:
    call, error, words = EXPORTED[case]
    with pytest.raises(error, match=words):
        call()


def test_byte_offset_is_honoured() -> None:
    memory = np.full(64, NAN, np.float32)
    memory[7:37] = XN.reshape(-1)
    shifted = dlpack.Exporter(memory, shape=(3, 10), strides=(10, 1), byte_offset=28)
    assert raw(rk.logprob(shifted, YN)) == raw(rk.logprob(XN, YN))


def test_missing_strides_mean_contiguous() -> None:
    assert raw(rk.logprob(export(strides=None), dlpack.Exporter(YN, strides=None))) == raw(rk.logprob(XN, YN))


@pytest.mark.parametrize("versioned", [True, False])
def test_every_capsule_is_released_once_also_after_an_error(versioned: bool) -> None:
    good = dlpack.Exporter(XN, versioned=versioned)
    wrong = dlpack.Exporter(YN[:2], versioned=versioned)
    rk.logprob(good, YN)
    assert (good.exported, good.deleted) == (1, 1)
    with pytest.raises(ValueError, match="target"):
        rk.logprob(good, wrong)
    assert (good.exported, good.deleted) == (2, 2)
    assert (wrong.exported, wrong.deleted) == (1, 1)
    with pytest.raises(TypeError, match="logits"):
        rk.logprob(odd := dlpack.Exporter(XN, versioned=versioned, lanes=3), YN)
    assert (odd.exported, odd.deleted) == (1, 1)


def test_an_array_of_a_device_without_kernels_is_an_error_that_says_what_to_install() -> None:
    """No other path may be taken instead. The memory is the CPU's, so the error must come before any read."""
    kind = dlpack.ROCM if not rk.variant.startswith("rocm") else dlpack.CUDA
    on_gpu = [dlpack.Exporter(a, device=kind) for a in (XN, YN, np.empty(3, np.float32))]
    with pytest.raises(RuntimeError, match=r"(?i)this build .*has no (CUDA|HIP) kernels.*install"):
        rk.logprob(on_gpu[0], on_gpu[1], out=on_gpu[2])
    with pytest.raises(RuntimeError, match=r"(?i)this build .*has no (CUDA|HIP) kernels.*install"):
        rk.logprob(on_gpu[0], on_gpu[1])


def test_a_jax_array_is_no_output() -> None:
    """JAX arrays are immutable and may be shared, but their exports do not say so."""
    jnp = pytest.importorskip("jax.numpy")
    out = jnp.zeros(3)
    with pytest.raises((TypeError, ValueError, BufferError), match=r"out|logprob"):
        rk.logprob(jnp.asarray(XN), jnp.asarray(YN.astype(np.int32)), out=out)
    assert not np.asarray(out).any()


# ---- in a separate process ---------------------------------------------------------------------------------------

HARD = {
    "huge ids and offsets": """
import numpy as np
x, y = np.zeros((4, 10), np.float32), np.array([2**62, -2**63, 2**31, 10])
for ids in ([2**31 - 1] * 4, [-2**31] * 4):
    for offsets in ([0, 2**62, -2**62, 2**63 - 1, 4], [-2**63] * 5, [4, 3, 2, 1, 0]):
        kept = np.array(ids, np.int32), np.array(offsets)
        assert np.isnan(rk.logprob(x, y, kept=kept)).all()
""",
    "gradient with bad ids and offsets": """
import numpy as np
x, y, one = np.zeros((4, 10), np.float32), np.array([2**62, -2**63, 2**31, 10]), np.ones(4, np.float32)
for offsets in ([0, 2**62, -2**62, 2**63 - 1, 4], [-2**63] * 5, [4, 3, 2, 1, 0], [0, 1, 2, 3, 4]):
    kept = np.array([2**31 - 1, -2**31, 10, -1], np.int32), np.array(offsets)
    rk.logprob_backward(x, y, one, entropy=one, dlogprob=one, dentropy=one, kept=kept)
""",
    "mutated descriptions": """
import dlpack, random
import numpy as np
random.seed(1)
x, y = np.zeros((3, 10), np.float32), np.zeros(3, np.int64)
odd = [0, 1, 2, 3, 7, 10, -1, -10, 2**31, 2**32, 2**62, 2**63 - 1, -2**63]
errors = 0
for _ in range(20000):
    fields = {}
    if random.random() < 0.5:
        n = random.randint(0, 9)
        fields["shape"] = tuple(random.choice(odd) for _ in range(n))
        fields["strides"] = tuple(random.choice(odd) for _ in range(n)) if random.random() < 0.7 else None
        if np.prod([float(s) for s in fields["shape"]]) > 0 and all(s > 0 for s in fields["shape"]):
            fields["code"] = 9  # an honest size of what is there cannot be checked: never let it be read
    else:
        fields["strides"] = tuple(random.choice(odd) for _ in range(2))
        fields["code"] = 9
    for key in ("ndim", "lanes", "bits", "device"):
        if random.random() < 0.1:
            fields[key] = random.choice(odd) % (256 if key in ("bits", "code") else 2**15)
    if fields.get("device", 1) != 1:
        fields["device"] = 8
    if random.random() < 0.1:
        fields["version"] = (random.choice([0, 2, 2**31]), 0)
    if fields.get("ndim", 0) and fields["ndim"] <= 8:
        fields.pop("ndim")
    bad = dlpack.Exporter(x, **fields)
    try:
        rk.logprob(*((bad, y) if random.random() < 0.5 else (x, bad)))
    except (TypeError, ValueError, BufferError):
        errors += 1
    dlpack._alive.clear() if errors % 1000 == 0 else None
assert errors > 15000, errors
""",
    "raw capsules": """
import numpy as np
from rl_kernel_native._native import module as C
for junk in (None, 5, "x", object(), [], np.zeros(3)):
    for call in (C.bfloat16_capsule, C.has_exchange_api):
        try:
            call(junk)
        except (TypeError, BufferError):
            pass
""",
    "a canonical vocabulary near 2^63": """
import numpy as np
x, y = np.zeros((3, 10), np.float32), np.zeros(3, np.int64)
for size in (2**31 - 1, 2**31, 2**40, 2**60, 2**62, 2**63 - 8, 2**63 - 1):
    try:
        assert np.isfinite(rk.logprob(x, y, canonical_vocab=size)).all(), size
    except ValueError as error:
        assert "canonical_vocab" in str(error), error
""",
    "interpreter exit while results live": """
import torch
keep = [rk.logprob(torch.zeros(3, 10), torch.zeros(3, dtype=torch.int64), return_lse=True) for _ in range(10)]
rk.keep = keep
""",
}


@pytest.mark.parametrize("script", HARD)
def test_never_a_crash(script: str) -> None:
    support = Path(__file__).parents[1] / "support"
    header = f"import faulthandler, sys; faulthandler.enable(); sys.path.insert(0, {str(support)!r})\n"
    header += "import rl_kernel_native as rk\n"
    done = subprocess.run([sys.executable, "-c", header + HARD[script]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("device", [dlpack.CPU, dlpack.CUDA_HOST, dlpack.ROCM_HOST])
def test_pinned_memory_of_a_host_is_read_as_any_other(device: int) -> None:
    """DLPack has its own device types for pinned memory, and its exporter gets no stream."""
    x = dlpack.Exporter(XN, device=device)
    assert raw(np.from_dlpack(rk.logprob(x, YN))) == raw(rk.logprob(XN, YN))
    assert x.arguments.get("stream") is None
