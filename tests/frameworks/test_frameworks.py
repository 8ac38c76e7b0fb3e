"""The same bytes from every framework, results of the caller's own kind, and the right stream for the work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlpack
import rl_kernel_native as rk
from cases import ALL, OUTPUTS, mode, numpy_of, raw, truth
from framework_arrays import assert_prints_without_torch

ROWS, VOCAB = 13, 1003  # odd, with rows that are not 16-byte aligned

_random = np.random.default_rng(7)
LOGITS = (_random.standard_normal((ROWS, VOCAB)) * 4 - 1).astype(np.float32)
TARGET = _random.integers(0, VOCAB, ROWS).astype(np.int32)
TARGET[4] = -100
TEMPERATURE = _random.uniform(0.5, 2, ROWS).astype(np.float32)
KEPT = (np.arange(20, dtype=np.int32), np.array([0] * 6 + [20] * 8, dtype=np.int64))
DPROB = _random.standard_normal(ROWS).astype(np.float32)


def bfloat16(x: np.ndarray) -> np.ndarray:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy's bfloat16 comes from ml_dtypes")
    return x.astype(ml_dtypes.bfloat16)


def everything(
    make: Any, exp: str = "portable", logits: Any = None, kept: bool = True
) -> tuple[rk.LogprobResult, Any, Any]:
    """Forward with every output, backward, and a row merged from two shards, on arrays that ``make`` makes."""
    x = make(LOGITS if logits is None else logits)
    y, t = make(TARGET), make(TEMPERATURE)
    options: dict[str, Any] = {"temperature": t, "exp": exp}
    if kept:
        options["kept"] = tuple(make(k) for k in KEPT)
    result = rk.logprob(x, y, **options, **ALL)
    gradient = rk.logprob_backward(
        x, y, result.lse, entropy=result.entropy, dlogprob=make(DPROB), dentropy=make(DPROB), **options
    )
    stats = rk.logprob_partial(x, y, vocab_start=0, vocab_size=VOCAB, **options)
    return result, gradient, stats


def bytes_of(all_results: Any) -> Any:
    result, gradient, stats = all_results
    return raw(tuple(result)), raw(gradient), raw(stats)


def half_way(logits: np.ndarray, dtype: str) -> np.ndarray:
    return bfloat16(logits) if dtype == "bfloat16" else logits.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numpy_in_numpy_out(dtype: str, exp: str) -> None:
    x = half_way(LOGITS, dtype)
    with mode("cpu", exp):
        results = everything(lambda a: a, exp, x)
    assert all(type(o) is np.ndarray for o in (*results[0], *results[1:]))
    assert [o.dtype for o in results[0]] == [np.float32] * 4 + [np.int32]
    assert results[1].dtype == x.dtype
    assert not truth(x, TARGET, temperature=TEMPERATURE, kept=KEPT).failures(results[0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_has_the_bytes_of_numpy(dtype: str, exp: str) -> None:
    torch = pytest.importorskip("torch")

    def make(a: np.ndarray) -> Any:
        t = torch.from_numpy(a.astype(np.float32) if a.dtype.name == "bfloat16" else a)
        return t.to(torch.bfloat16) if a.dtype.name == "bfloat16" else t

    x = half_way(LOGITS, dtype)
    with mode("cpu", exp):
        got = everything(make, exp, x)
        want = everything(lambda a: a, exp, x)
    assert all(isinstance(o, torch.Tensor) for o in (*got[0], *got[1:]))
    assert bytes_of(got) == bytes_of(want)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax_in_jax_out_with_the_bytes_of_numpy(dtype: str, exp: str) -> None:
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]

    def make(a: np.ndarray) -> Any:
        return jax.device_put(a, cpu)

    x = half_way(LOGITS, dtype)
    with mode("cpu", exp):  # kept offsets are int64, which JAX has only with a flag
        got = everything(make, exp, x, kept=False)
        want = everything(lambda a: a, exp, x, kept=False)
    assert all(isinstance(o, jax.Array) for o in (*got[0], *got[1:]))
    assert bytes_of(got) == bytes_of(want)
    assert got[1].dtype == x.dtype


def test_jax_results_stay_on_the_device_of_their_operands() -> None:
    """The operands are on another device than JAX's default device, as on a machine whose default is a GPU."""
    code = """
import jax
x = jax.device_put(np.ones((2, 8), np.float32), jax.devices("cpu")[1])
y = rk.silu_mul(x, x)
z = rk.silu_mul(y, x)
print(*(a.devices() == x.devices() for a in (jax.numpy.ones(1), y, z)))
"""
    pytest.importorskip("jax")
    assert_prints_without_torch(code, "False True True", XLA_FLAGS="--xla_force_host_platform_device_count=2")


def test_jax_int64_under_its_flag() -> None:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        got = everything(lambda a: jax.device_put(a, jax.devices("cpu")[0]))
    assert bytes_of(got) == bytes_of(everything(lambda a: a))


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_a_jax_transformation_is_a_typed_error(transform: str) -> None:
    """A tracer has no memory, so without an error there would be wrong numbers or a crash."""
    jax = pytest.importorskip("jax")

    def function(x: Any) -> Any:
        value = rk.logprob(x, TARGET[0] if transform == "vmap" else TARGET)
        return value.sum() if transform == "grad" else value

    with pytest.raises(TypeError, match=r"logits: expected an array that speaks DLPack, got \w*Tracer"):
        getattr(jax, transform)(function)(jax.numpy.asarray(LOGITS))


@pytest.mark.parametrize("exporter", [dlpack.Exporter, dlpack.OldExporter])
def test_any_exporter_works_and_gets_numpy(exporter: Any) -> None:
    got = everything(exporter)
    assert all(type(o) is np.ndarray for o in (*got[0], *got[1:]))
    assert bytes_of(got) == bytes_of(everything(lambda a: a))


def test_an_exporter_on_the_cpu_is_asked_without_a_stream() -> None:
    """DLPack: a CPU exporter must be given stream=None."""
    x = dlpack.Exporter(LOGITS)
    rk.logprob(x, TARGET)
    assert x.arguments.get("stream") is None
    assert x.arguments["max_version"][0] == 1


def test_an_array_namespace_gets_its_own_arrays_back() -> None:
    """The array API's way to name a framework, here a framework that this library has never seen."""

    class Mine(dlpack.Exporter):
        def __array_namespace__(self) -> Any:
            return Namespace

    class Namespace:
        @staticmethod
        def from_dlpack(array: Any) -> Any:
            return Mine(np.from_dlpack(array))

    got = rk.logprob(Mine(LOGITS), Mine(TARGET))
    assert isinstance(got, Mine)
    assert raw(got.array) == raw(rk.logprob(LOGITS, TARGET))


def test_frameworks_may_be_mixed_on_the_cpu() -> None:
    """The result has the framework of the logits; target and temperature may have others."""
    torch = pytest.importorskip("torch")
    got = rk.logprob(LOGITS, torch.from_numpy(TARGET), temperature=torch.from_numpy(TEMPERATURE))
    assert type(got) is np.ndarray
    assert raw(got) == raw(rk.logprob(LOGITS, TARGET, temperature=TEMPERATURE))


def test_negative_row_strides_of_numpy() -> None:
    """Only NumPy has negative strides. Reversed rows and targets give reversed rows."""
    want = rk.logprob(LOGITS, TARGET, **ALL)
    got = rk.logprob(LOGITS[::-1], TARGET[::-1], **ALL)
    for name, a, b in zip(OUTPUTS, got, want, strict=True):
        assert raw(a[::-1]) == raw(b), name
    gradient = rk.logprob_backward(LOGITS[::-1], TARGET[::-1], got.lse, dlogprob=DPROB[::-1])
    assert raw(gradient[::-1]) == raw(rk.logprob_backward(LOGITS, TARGET, want.lse, dlogprob=DPROB))


def test_out_of_numpy_receives_the_results() -> None:
    out = np.empty(ROWS, np.float32), None, np.empty(ROWS, np.float32)
    got = rk.logprob(LOGITS, TARGET, return_lse=True, return_entropy=True, out=out)
    want = rk.logprob(LOGITS, TARGET, return_lse=True, return_entropy=True)
    assert got.logprob is out[0]
    assert got.entropy is out[2]
    assert raw(tuple(got)) == raw(tuple(want))
    dlogits = LOGITS.copy()
    assert rk.logprob_backward(dlogits, TARGET, want.lse, dlogprob=DPROB, out=dlogits) is dlogits
    assert raw(dlogits) == raw(rk.logprob_backward(LOGITS, TARGET, want.lse, dlogprob=DPROB))


def test_importing_the_package_imports_no_framework() -> None:
    code = "import sys, rl_kernel_native; print([m for m in ('torch', 'jax', 'cupy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_numpy_works_where_torch_is_not_loaded() -> None:
    code = """
x = np.arange(12, dtype=np.float32).reshape(3, 4)
print(rk.logprob(x, np.array([0, 1, 2]), return_entropy=True, check=True).entropy.shape)
"""
    assert_prints_without_torch(code, "(3,)")


def test_numpys_calls_of_every_operator_leave_torch_alone() -> None:
    code = """
import call_cases as cases
class NotOfNumpy(Exception): pass
def made(value):
    if isinstance(value, cases.Operand):
        if value.dtype == "bfloat16":
            raise NotOfNumpy
        return np.ascontiguousarray(value.values).astype(value.dtype)
    return type(value)(map(made, value)) if type(value) in (tuple, list) else value
called = set()
for name in cases.OPERATORS:
    for seed in range(12):
        draw = cases.Draw(np.random.default_rng(seed))
        draw.dtype = "float32"
        given = cases.CALLS[name](draw)
        try:
            given = {k: made(x) for k, x in given.items() if k != "main_grad" or name.endswith("_backward")}
        except NotOfNumpy:
            continue
        getattr(rk, name)(**given)
        called.add(name)
        assert "torch" not in sys.modules, name
print(called == set(cases.OPERATORS))
"""
    support = str(Path(__file__).parents[1] / "support")
    assert_prints_without_torch(code, "True", PYTHONPATH=os.pathsep.join([support, *sys.path]))


# ---- GPU ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jax_on_cuda() -> Any:
    jax = pytest.importorskip("jax")
    try:
        return jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX sees no CUDA device: {error}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_cupy_in_cupy_out_with_the_bytes_of_the_cpu(dtype: str, exp: str) -> None:
    cupy = pytest.importorskip("cupy")
    got = everything(cupy.asarray, exp, LOGITS.astype(dtype))
    assert all(isinstance(o, cupy.ndarray) for o in (*got[0], *got[1:]))
    with mode("cpu", exp):
        want = everything(lambda a: a, exp, LOGITS.astype(dtype))
    assert bytes_of(got) == bytes_of(want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax_on_cuda_has_the_bytes_of_the_cpu(dtype: str, exp: str, jax_on_cuda: Any) -> None:
    jax = pytest.importorskip("jax")
    x = half_way(LOGITS, dtype)
    got = everything(lambda a: jax.device_put(a, jax_on_cuda), exp, x, kept=False)
    assert all(isinstance(o, jax.Array) for o in (*got[0], *got[1:]))
    with mode("cpu", exp):
        want = everything(lambda a: a, exp, x, kept=False)
    assert bytes_of(got) == bytes_of(want)


BUSY = 200_000_000  # cycles: 0.1 s on an H200, far longer than any of the calls below


@pytest.mark.gpu
def test_torch_work_goes_to_the_current_stream_behind_its_producer() -> None:
    """The producer sleeps, then writes. A call on another stream would read the earlier contents."""
    torch = pytest.importorskip("torch")
    final, y = torch.from_numpy(LOGITS).cuda(), torch.from_numpy(TARGET).cuda()
    want = rk.logprob(final, y, **ALL)
    want_gradient = rk.logprob_backward(final, y, want.lse, dlogprob=want.lse)
    x = torch.full_like(final, float("nan"))
    torch.cuda.synchronize()  # every kernel is loaded, too
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY)
        x.copy_(final)
        got = rk.logprob(x, y, **ALL)
        gradient = rk.logprob_backward(x, y, got.lse, dlogprob=got.lse)
        assert not side.query(), "the calls waited for the stream, or the producer was too quick to tell"
    side.synchronize()
    assert raw(tuple(got)) == raw(tuple(want))
    assert raw(gradient) == raw(want_gradient)


@pytest.mark.gpu
def test_cupy_work_goes_to_the_current_stream_behind_its_producer() -> None:
    cupy = pytest.importorskip("cupy")
    torch = pytest.importorskip("torch")
    final, y = cupy.asarray(LOGITS), cupy.asarray(TARGET)
    want = rk.logprob(final, y)
    x = cupy.full_like(final, cupy.nan)
    cupy.cuda.Device().synchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        with torch.cuda.stream(torch.cuda.ExternalStream(side.ptr)):
            torch.cuda._sleep(BUSY)
        x[...] = final
        got = rk.logprob(x, y)
    side.synchronize()
    assert raw(got) == raw(want)


@pytest.mark.gpu
def test_jax_work_waits_for_its_producer(jax_on_cuda: Any) -> None:
    """JAX dispatches asynchronously on its own streams. JAX's export makes our stream wait, and JAX must wait for our
    stream."""
    jax = pytest.importorskip("jax")
    big = jax.device_put(_random.standard_normal((2048, 2048)).astype(np.float32), jax_on_cuda)
    y = jax.device_put(TARGET, jax_on_cuda)
    base = jax.device_put(LOGITS, jax_on_cuda)

    @jax.jit
    def slow(x: Any, m: Any) -> Any:
        for _ in range(50):
            m = m @ m
            m = m / jax.numpy.abs(m).max()  # keeps m finite and nonzero
        return x + 0 * m[0, 0]

    slow(base, big).block_until_ready()
    want = raw(rk.logprob(base, y))
    for _ in range(5):
        got = rk.logprob(slow(base, big), y)
        assert raw(got + 0) == want


@pytest.mark.gpu
def test_an_exporter_on_cuda_is_asked_for_the_callers_stream() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("cupy", reason="outputs for foreign CUDA arrays are CuPy's")
    asked = []

    class Foreign:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

        def __dlpack__(self, stream: Any = None, **arguments: Any) -> Any:
            asked.append(stream)
            return self.tensor.__dlpack__(stream=stream, **arguments)

    got = rk.logprob(Foreign(torch.from_numpy(LOGITS).cuda()), Foreign(torch.from_numpy(TARGET).cuda()), exp="portable")
    assert asked == [1, 1], "DLPack's number of the legacy default stream; 0 is forbidden"
    assert raw(numpy_of(got)) == raw(rk.logprob(LOGITS, TARGET))


def test_empty_arrays_of_numpy() -> None:
    """NumPy gives every dimension of an empty array the stride 0."""
    logits, target = np.zeros((0, 10), np.float32), np.zeros(0, np.int64)
    assert rk.logprob(logits, target).shape == (0,)
    gradient = rk.logprob_backward(logits, target, np.zeros(0, np.float32), dlogprob=np.zeros(0, np.float32))
    assert gradient.shape == (0, 10)
    assert rk.logprob_backward(logits, target, np.zeros(0, np.float32), out=logits) is logits
