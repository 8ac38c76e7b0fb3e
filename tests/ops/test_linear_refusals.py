"""Every path of linear (eager, autograd, dispatcher, meta) refuses bad input with the same message, from every
framework. Valid inputs that look wrong: negative bits and empty arrays."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import dlpack
import rl_kernel_native as rk
from cases import raw
from test_linear_bad_input import DY, PART, B, W, X, partial

torch = pytest.importorskip("torch", reason="most bad inputs are torch's")

XN, WN, BN, PARTN = (t.float().numpy() for t in (X, W, B, PART))  # NumPy arrays


class NoIndex:
    """Like an array with several elements."""

    def __index__(self) -> int:
        raise TypeError("only integer scalar arrays can be converted to a scalar index")


class NoCapsule(dlpack.Exporter):
    def __dlpack__(self, **_: Any) -> Any:
        return None


def meta(tensor: Any) -> Any:
    return tensor.to("meta")


def by_columns(tensor: Any) -> Any:
    return tensor.t().contiguous().t()


def deleted_jax_array() -> Any:
    array = pytest.importorskip("jax").numpy.ones((8, 32))
    array.delete()
    return array


# Maps a name to (call, error, pattern of its message).
CASES: dict[str, tuple[Any, Any, str]] = {
    **{
        f"k_segments {words}, {path}": (lambda c=call, s=value: c(s), error, f"k_segments: expected {text}")
        for value, words, error, text in (
            (np.array([2, 2]), "an array", TypeError, "an integer, got ndarray"),
            (torch.tensor(2.0), "a float tensor", TypeError, "an integer, got Tensor"),
            (NoIndex(), "without an index", TypeError, "an integer, got NoIndex"),
            (True, "True", TypeError, "an integer, got bool"),
            (2.0, "2.0", TypeError, "an integer, got float"),
            ("2", "text", TypeError, "an integer, got str"),
            (None, "None", TypeError, "an integer, got NoneType"),
            (1 << 70, "enormous", ValueError, "an integer of 64 bits, got one of 71 bits"),
            (3, "3", ValueError, "1, 2, 4 or 8, got 3"),
        )
        for path, call in (
            ("eager", lambda s: rk.linear(X, W, k_segments=s)),
            ("autograd", lambda s: rk.linear(X.clone().requires_grad_(), W, k_segments=s)),
            ("vmap", lambda s: torch.func.vmap(lambda x: rk.linear(x, W, k_segments=s))(X[None])),
            ("meta", lambda s: rk.linear(meta(X), meta(W), k_segments=s)),
            ("NumPy", lambda s: rk.linear(XN, WN, k_segments=s)),
            ("a rank's", lambda s: partial(s)()),
        )
    },
    "engine an array": (lambda: rk.linear(X, W, engine=np.array(["auto", "auto"])), ValueError, "engine: expected"),
    # Layouts and shapes, eager and meta.
    **{
        f"{what}, {place.__name__}": (lambda c=call, p=place: c(p), ValueError, words)
        for place in (torch.clone, meta)
        for what, call, words in (
            (
                "a scalar dy",
                lambda p: rk.linear_bias_grad(p(DY[0, 0])),
                r"dy: expected shape \[..., features\], got \[\]",
            ),
            ("x by columns", lambda p: rk.linear(p(by_columns(X)), p(W)), "x: .*stride 1.*, got stride 3; make it"),
            ("weight by columns", lambda p: rk.linear(p(X), p(by_columns(W))), "weight: .*got stride 8; make it"),
            ("bias strided", lambda p: rk.linear(p(X), p(W), p(X[0])[::4]), "bias: .*got stride 4"),
            (
                "rows that do not collapse",
                lambda p: rk.linear(p(torch.zeros(2, 3, 4, 32)).transpose(0, 2), p(W.float())),
                r"x: expected leading dimensions that collapse to at most two strides, got shape \[4, 3, 2, 32\]; make",
            ),
            (
                "part by columns",
                lambda p: rk.tree_sum([p(by_columns(PART))]),
                r"parts\[0\]: expected a contiguous array, got shape \[3, 8\] with strides \[1, 3\]; make it",
            ),
            (
                "parts of other shapes",
                lambda p: rk.tree_sum([p(PART), p(PART[:2])]),
                r"parts\[1\]: expected shape \[3, 8\] \(that of parts\[0\]\), got \[2, 8\]",
            ),
            (
                "rows differ",
                lambda p: rk.linear_weight_grad(p(DY), p(X[:2])),
                r"x: expected shape \[3, features\] \(the leading dimensions of dy\), got \[2, 32\]",
            ),
            (
                "weight narrow",
                lambda p: rk.linear(p(X), p(W)[:, :5]),
                r"weight: expected shape \[out_features, 32\] \(32 is the last dimension of x\), got \[8, 5\]",
            ),
            (
                "segments off the edges",
                lambda p: rk.linear(p(X), p(W), k_segments=4),
                r"multiple of 64 \(16 \* k_segments\), got 32; pad x and weight with zero columns to 64",
            ),
            (
                "x of 2^32 rows",
                lambda p: rk.linear(p(torch.zeros(1, 32)).expand(1 << 32, 32), p(torch.zeros(0, 32))),
                r"x: expected fewer than 2\^32 rows, got 4294967296",
            ),
            (
                "dy of 2^32 rows",
                lambda p: rk.linear_bias_grad(p(torch.zeros(1, 0)).expand(1 << 32, 0)),
                r"dy: expected fewer than 2\^32 rows, got 4294967296",
            ),
        )
    },
    "a result beyond memory": (
        lambda: rk.linear(torch.zeros(1, 1).expand(1 << 31, 1), torch.zeros(1 << 14, 1)),
        MemoryError,
        r"out: [^\n]*\Z",  # torch's message without the allocator's stack trace
    ),
    # Dtypes of results.
    **{
        f"out_dtype {given!r}": (lambda g=given: rk.linear(X, W, out_dtype=g), TypeError, "out_dtype: expected float32")
        for given in (np.float32(3), 3.0, 0, 1, np.dtype(">f4"), b"float32", np.zeros(1, np.float32), np.dtype("V4"))
    },
    # Parts and shards.
    **{
        f"part None, {path}": (call, TypeError, r"parts\[1\]: expected an array that speaks DLPack, got NoneType")
        for path, call in (
            ("eager", lambda: rk.tree_sum([PART, None])),
            ("autograd", lambda: rk.tree_sum([PART.clone().requires_grad_(), None])),
            ("vmap", lambda: torch.func.vmap(lambda p: rk.tree_sum([p, None]))(PART)),
            ("meta", lambda: rk.tree_sum([meta(PART), None])),
            ("NumPy", lambda: rk.tree_sum([PARTN, None])),
        )
    },
    "x_shard a list": (
        lambda: rk.linear_partial([1.0], W, k_segments=1, first_segment=0, num_segments=1),
        TypeError,
        "x_shard: expected an array",
    ),
    "weight_shard wide": (
        lambda: rk.linear_partial(X[:, :16], W, k_segments=2, first_segment=0, num_segments=1),
        ValueError,
        r"weight_shard: expected shape \[out_features, 16\] \(16 is the last dimension of x_shard\), got \[8, 32\]",
    ),
    "weight_shard float16": (
        lambda: rk.linear_partial(X, W.half(), k_segments=1, first_segment=0, num_segments=1),
        TypeError,
        r"weight_shard: expected dtype bfloat16 \(that of x_shard\), got float16",
    ),
    # Other frameworks.
    **{
        f"weight {name}, beside NumPy": (lambda w=make: rk.linear(XN, w()), error, words)
        for name, make, error, words in (
            ("of objects", lambda: WN.astype(object), TypeError, r"weight: expected a dtype .*got dtype\('O'\)"),
            (
                "big-endian",
                lambda: WN.astype(">f4"),
                TypeError,
                "weight: expected a dtype .* native byte order, got .*>f4",
            ),
            ("structured", lambda: np.zeros((8, 32), "f4,f4"), TypeError, "weight: expected a dtype of numbers"),
            (
                "masked",
                lambda: np.ma.masked_array(WN),
                TypeError,
                r"weight: .*without a mask, got MaskedArray; .*filled",
            ),
            ("a leaf", lambda: W.float().requires_grad_(), TypeError, r"weight: requires a gradient.*weight.detach"),
            ("sparse", lambda: W.float().to_sparse(), (TypeError, BufferError), "weight: expected an array in memory"),
            ("meta", lambda: meta(W.float()), (TypeError, BufferError), "weight: expected an array in memory"),
            ("deleted", deleted_jax_array, TypeError, "weight: expected an array in memory, got ArrayImpl"),
            ("without a capsule", lambda: NoCapsule(WN), TypeError, "weight: expected a DLPack capsule of NoCapsule"),
        )
    },
    "bias without a capsule": (
        lambda: rk.linear(XN, WN, NoCapsule(BN)),
        TypeError,
        "bias: expected a DLPack capsule of NoCapsule.__dlpack__, got NoneType",
    ),
    "x masked": (lambda: rk.linear(np.ma.masked_array(XN), WN), TypeError, "x: expected an array without a mask"),
    "x deleted": (lambda: rk.linear(deleted_jax_array(), WN), TypeError, "x: expected an array in memory"),
    "x nested": (
        lambda: rk.linear(torch.nested.nested_tensor([X, X], layout=torch.jagged), W),
        TypeError,
        "x: expected a dense tensor, got a nested one",
    ),
    # main_grad, in forward.
    **{
        f"main_grad {name}": (
            lambda m=make: (w := W.float().requires_grad_(), rk.linear(X.float(), w, main_grad=m(w))),
            error,
            f"main_grad: {words}",
        )
        for name, make, error, words in (
            ("the weight's memory", lambda w: w.detach(), ValueError, "may share memory with weight"),
            ("inside of weight", lambda w: w.detach().view(16, 16).view(8, 32)[:8], ValueError, "may share memory"),
            (
                "expanded",
                lambda w: torch.zeros(1, 32).expand(8, 32),
                ValueError,
                "expected strides that do not overlap",
            ),
            ("negated", lambda w: torch._neg_view(torch.zeros(8, 32)), ValueError, "has torch's negative bit"),
            ("a DTensor", lambda w: dtensor(torch.zeros(8, 32)), TypeError, "expected a local tensor, got a DTensor"),
        )
    },
}


def dtensor(tensor: Any) -> Any:
    from test_linear_bad_input import DTensor

    return DTensor(tensor)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_refusal_names_the_argument(case: str) -> None:
    call, error, words = CASES[case]
    with pytest.raises(error, match=words):
        call()
    assert rk.linear(X, W, B).shape == (3, 8)


def test_a_negative_bit_beside_numpy_is_honoured_in_inputs_and_refused_in_outputs() -> None:
    assert raw(rk.linear(XN, torch._neg_view(W.float()))) == raw(rk.linear(XN, -WN))
    assert raw(rk.linear(XN, WN, torch._neg_view(B.float()))) == raw(rk.linear(XN, WN, -BN))
    assert raw(rk.tree_sum([PARTN, torch._neg_view(PART)])) == raw(rk.tree_sum([PARTN, -PARTN]))
    for name in ("main_grad", "out"):
        with pytest.raises(ValueError, match=rf"{name}: has torch's negative bit; call .resolve_neg"):
            rk.linear_weight_grad(PARTN, XN, **{name: torch._neg_view(torch.zeros(8, 32))})


def test_arrays_without_elements_may_have_any_strides() -> None:
    for place in (torch.clone, meta):
        x, weight = place(torch.zeros(4, 64))[:0, ::2], place(torch.zeros(8, 32))
        assert rk.linear(x, weight).shape == (0, 8)


def test_only_dtypes_are_remembered() -> None:
    from rl_kernel_native import _dispatch

    for dtype in (torch.float32, "float32", np.float32, np.dtype("float32")):
        assert rk.linear(X, W, out_dtype=dtype).dtype == torch.float32
    known = len(_dispatch._DTYPE_CODES)
    for value in (np.float32(1), np.float32(2), 3.0, b"float32"):
        with pytest.raises(TypeError, match="out_dtype"):
            rk.linear(X, W, out_dtype=value)
    assert len(_dispatch._DTYPE_CODES) == known


def test_jax_transformations_are_refused_by_name_and_a_callback_works() -> None:
    jax = pytest.importorskip("jax")
    for transform in (jax.jit, lambda f: jax.grad(lambda a: f(a).sum()), jax.vmap):
        cure = "inside JAX's transformations .* call rl_kernel_native.jax, .*jax.pure_callback"
        with pytest.raises(TypeError, match=rf"x: expected .* got \w*Tracer; {cure}"):
            transform(lambda a: rk.linear(a, WN))(jax.numpy.asarray(XN))
    shape = jax.ShapeDtypeStruct((3, 8), np.float32)
    called = jax.jit(lambda a: jax.pure_callback(lambda b: rk.linear(np.asarray(b), WN), shape, a))
    assert raw(called(XN)) == raw(rk.linear(XN, WN))


def run(code: str, **environment: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout


def test_a_bfloat16_result_for_numpy_names_the_package_that_is_missing() -> None:
    code = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np, rl_kernel_native as rk
x = np.ones((3, 32), np.float16)
try:
    rk.linear(x, x, out_dtype="bfloat16")
except RuntimeError as error:
    print(error)
"""
    assert run(code).startswith("out_dtype: a bfloat16 result for NumPy needs the package ml_dtypes, which is missing")


def test_threads_follow_torch_up_to_the_most_there_can_be(native_settings: None) -> None:
    from rl_kernel_native import _native

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1500)
        want = rk.linear(X, W)
        assert _native.module.num_threads() == 1024
    finally:
        torch.set_num_threads(before)
    assert raw(rk.linear(X, W)) == raw(want)
    assert _native.module.num_threads() == before


@pytest.mark.parametrize(("value", "threads"), [("3", "3"), ("2,1", "2"), ("99999", "1024"), ("x", None), ("0", None)])
def test_threads_without_torch_follow_omp_num_threads(value: str, threads: str | None) -> None:
    code = "import rl_kernel_native._native as n, rl_kernel_native; print(n.module.num_threads())"
    plain = run(code, OMP_NUM_THREADS="")
    assert run(code, OMP_NUM_THREADS=value) == (plain if threads is None else f"{threads}\n")
