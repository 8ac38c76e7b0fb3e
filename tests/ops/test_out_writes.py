"""Every write to a caller's array is counted: autograd must refuse a saved tensor that a call overwrote.

One table has all calls that write to an array of the caller, from torch and from other frameworks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from call_arrays import valid_calls
from call_cases import CALLS, OPERATORS

torch = pytest.importorskip("torch")

LOGITS = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
TARGET, ONES = np.array([1, 2, 3]), np.ones(3, np.float32)
X, DY = np.ones((3, 32), np.float32), np.ones((3, 8), np.float32)
CACHE, NEW, SLOTS = (2, 4, 1, 8), np.ones((3, 1, 8), np.float32), np.array([0, 5, 2])

Call = Callable[[Callable[[Any], Any], Any], Any]
# Maps a name to (shape of the written array, call(given, written)). ``given`` makes a tensor, or leaves NumPy's array.
WRITES: dict[str, tuple[tuple[int, ...], Call]] = {
    "logprob(out=)": ((3,), lambda g, out: rk.logprob(g(LOGITS), g(TARGET), out=out)),
    "logprob(out=) of two": (
        (3,),
        lambda g, out: rk.logprob(g(LOGITS), g(TARGET), return_lse=True, out=(torch.empty(3), out)),
    ),
    "logprob_backward(out=)": (
        (3, 8),
        lambda g, out: rk.logprob_backward(g(LOGITS), g(TARGET), g(ONES), dlogprob=g(ONES), out=out),
    ),
    "linear_weight_grad(out=)": ((8, 32), lambda g, out: rk.linear_weight_grad(g(DY), g(X), out=out)),
    "linear_weight_grad(main_grad=)": ((8, 32), lambda g, out: rk.linear_weight_grad(g(DY), g(X), main_grad=out)),
    "rms_norm_backward(main_grad=)": (
        (32,),
        lambda g, out: rk.rms_norm_backward(g(X), g(X), g(X[0]), 1e-6, main_grad=out),
    ),
    "embedding_backward(main_grad=)": (
        (8, 32),
        lambda g, out: rk.embedding_backward(g(X), g(TARGET), 8, main_grad=out),
    ),
    "kv_cache_append's keys": (
        CACHE,
        lambda g, out: rk.kv_cache_append(g(NEW), g(NEW), out, torch.zeros(CACHE), g(SLOTS)),
    ),
    "kv_cache_append's values": (
        CACHE,
        lambda g, out: rk.kv_cache_append(g(NEW), g(NEW), torch.zeros(CACHE), out, g(SLOTS)),
    ),
}


@pytest.mark.parametrize("given", [torch.from_numpy, np.asarray], ids=["torch", "numpy"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_counted(name: str, given: Any) -> None:
    shape, call = WRITES[name]
    written = torch.zeros(shape)
    call(given, written)
    assert written._version == 1
    assert written.any(), "it was written"


@pytest.mark.parametrize("given", [torch.from_numpy, np.asarray], ids=["torch", "numpy"])
@pytest.mark.parametrize("name", WRITES)
def test_an_array_of_another_shape_is_refused_before_a_write(name: str, given: Any) -> None:
    """A cache has any number of pages and of slots in a page."""
    shape, call = WRITES[name]
    free = 2 if name.startswith("kv_cache_append") else 0
    others = [(*shape[:i], shape[i] + off, *shape[i + 1 :]) for i in range(free, len(shape)) for off in (-1, 1)]
    for other in [*others, (*shape, 1), shape[1:]]:
        written = torch.zeros(other)
        with pytest.raises(ValueError, match=r"^(out|main_grad|k_cache|v_cache)[^:]*: expected"):
            call(given, written)
        assert written._version == 0
        assert not written.any()


@pytest.mark.parametrize("name", WRITES)
def test_a_saved_tensor_that_was_written_stops_backward(name: str) -> None:
    shape, call = WRITES[name]
    saved = torch.zeros(shape)
    x = torch.ones(shape, requires_grad=True)
    loss = (x * saved).sum()
    call(torch.from_numpy, saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


WITHOUT_OUTPUTS = {"kv_cache_append"}  # operators that allocate no output, because they only write the caller's arrays
GUARD, FILL = 4096, 0xA5  # bytes before and behind each output, and their content


@pytest.mark.parametrize("operator", sorted(set(OPERATORS) & set(CALLS)))
def test_no_byte_around_an_output_is_written(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernel_native import _dispatch

    made: list[np.ndarray] = []

    def allocate(frame: Any, shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
        kind = _dispatch._numpy_dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        made.append(np.full(size + 2 * GUARD, FILL, np.uint8))
        array = made[-1][GUARD : GUARD + size].view(kind).reshape(shape)
        return array, _dispatch._numpy_capsule(array)

    monkeypatch.setattr(_dispatch.Frame, "allocate", allocate)
    for _, arguments in valid_calls(operator, lambda o: np.ascontiguousarray(o.values).astype(o.dtype)):
        getattr(rk, operator)(**arguments)
        for bytes_ in made:
            assert (bytes_[:GUARD] == FILL).all()
            assert (bytes_[len(bytes_) - GUARD :] == FILL).all()
    assert made or operator in WITHOUT_OUTPUTS
