"""Bad input of linear gives an error of the right type, whose message names the argument, the expected value and the
given one. An operator never gives a wrong number or a crash."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import raw

torch = pytest.importorskip("torch", reason="most bad inputs are torch's")

from tensor_kinds import DTensor, Wrapper, fake  # noqa: E402

_generator = torch.Generator().manual_seed(0)
X = torch.randn(3, 32, generator=_generator).bfloat16()
W = torch.randn(8, 32, generator=_generator).bfloat16()
B = torch.randn(8, generator=_generator).bfloat16()
DY = torch.randn(3, 8, generator=_generator).bfloat16()
PART = torch.randn(3, 8, generator=_generator)
MAIN = torch.zeros(8, 32)  # only read, since calls that would write to it are refused


def partial(k_segments: Any = 2, first_segment: Any = 0, num_segments: Any = 1, columns: int = 16) -> Any:
    return lambda: rk.linear_partial(
        X[:, :columns], W[:, :columns], k_segments=k_segments, first_segment=first_segment, num_segments=num_segments
    )


# Maps a name to (call, error, pattern of its message).
CASES: dict[str, tuple[Any, Any, str]] = {
    # Not arrays.
    "x a list": (lambda: rk.linear([[1.0]], W), TypeError, "x: expected an array that speaks DLPack, got list"),
    "x None": (lambda: rk.linear(None, W), TypeError, "x: expected an array that speaks DLPack, got NoneType"),
    **{
        f"weight {kind}, {name}": (call, TypeError, f"weight: expected .*, got {kind}")
        for kind, weight in (("list", [[1.0]]), ("NoneType", None), ("float", 1.0), ("ndarray", np.zeros((8, 32))))
        for name, call in (
            ("eager", lambda w=weight: rk.linear(X, w)),
            ("autograd", lambda w=weight: rk.linear(X.clone().requires_grad_(), w)),
            ("traced", lambda w=weight: torch.func.vmap(lambda x: rk.linear(x, w))(X[None])),
            ("input grad", lambda w=weight: rk.linear_input_grad(DY, w)),
        )
    },
    "bias a number": (lambda: rk.linear(X, W, 1.0), TypeError, "bias: expected an array .* got float"),
    "dy None": (lambda: rk.linear_input_grad(None, W), TypeError, "dy: expected an array .* got NoneType"),
    "x None of a weight gradient": (lambda: rk.linear_weight_grad(DY, None), TypeError, "x: expected an array"),
    "parts a number": (lambda: rk.tree_sum(3), TypeError, "parts: expected a sequence of arrays, got int"),
    "parts of numbers": (lambda: rk.tree_sum([1.0, 2.0]), TypeError, r"parts\[0\]: expected an array .* got float"),
    # Dtypes.
    **{
        f"x {d}": (
            lambda d=d: rk.linear(X.to(d), W.to(d)),
            TypeError,
            f"x: expected dtype float32, bfloat16 .* got {n}",
        )
        for d, n in ((torch.float64, "float64"), (torch.int32, "int32"), (torch.complex64, "complex64"))
    },
    "weight float16": (lambda: rk.linear(X, W.half()), TypeError, r"weight: .* bfloat16 \(that of x\), got float16"),
    "bias float16": (lambda: rk.linear(X, W, B.half()), TypeError, r"bias: .* float32 or bfloat16 .*got float16"),
    "bias int32": (lambda: rk.linear(X, W, B.int()), TypeError, "bias: expected dtype .*got int32"),
    "bias bfloat16 of float32": (
        lambda: rk.linear(X.float(), W.float(), B),
        TypeError,
        "bias: .*float32, got bfloat16",
    ),
    "x float16 of dy": (lambda: rk.linear_weight_grad(DY, X.half()), TypeError, r"x: .*bfloat16 \(that of dy\), got"),
    "out_dtype float64": (lambda: rk.linear(X, W, out_dtype=torch.float64), TypeError, "out_dtype: expected float32"),
    "out_dtype text": (lambda: rk.linear(X, W, out_dtype="half"), TypeError, "out_dtype: expected .* got 'half'"),
    "out_dtype a number": (lambda: rk.linear(X, W, out_dtype=16), TypeError, "out_dtype: expected .* got 16"),
    "out_dtype a list": (lambda: rk.linear(X, W, out_dtype=[1]), TypeError, r"out_dtype: expected .* got \[1\]"),
    "out_dtype float": (lambda: rk.linear(X, W, out_dtype=float), TypeError, "out_dtype: expected .* got .*float"),
    "float32 in, bfloat16 out": (
        lambda: rk.linear(X.float(), W.float(), out_dtype="bfloat16"),
        TypeError,
        r"out_dtype: expected float32 \(that of x\), got bfloat16",
    ),
    "dweight float16 of bfloat16": (
        lambda: rk.linear_weight_grad(DY, X, out_dtype="float16"),
        TypeError,
        r"out_dtype: expected float32 or bfloat16 \(that of dy\), got float16",
    ),
    "dbias float16 of bfloat16": (
        lambda: rk.linear_bias_grad(DY, out_dtype="float16"),
        TypeError,
        "out_dtype: expected float32 or bfloat16",
    ),
    "part bfloat16": (lambda: rk.tree_sum([PART, PART.bfloat16()]), TypeError, r"parts\[1\]: .*float32, got bfloat16"),
    # Shapes.
    "x a scalar": (lambda: rk.linear(X[0, 0], W), ValueError, r"x: expected shape \[..., features\], got \[\]"),
    "weight of other in_features": (
        lambda: rk.linear(X, W[:, :31]),
        ValueError,
        r"weight: expected shape \[out_features, 32\] .*x\), got \[8, 31\]",
    ),
    "weight transposed": (lambda: rk.linear(X, W.t().contiguous()), ValueError, r"weight: .* got \[32, 8\]"),
    "weight 3-d": (lambda: rk.linear(X, W[None]), ValueError, r"weight: expected shape .* got \[1, 8, 32\]"),
    "weight of other out_features": (
        lambda: rk.linear_input_grad(DY, W[:7]),
        ValueError,
        r"weight: expected shape \[8, in_features\] .*dy\), got \[7, 32\]",
    ),
    "bias short": (lambda: rk.linear(X, W, B[:7]), ValueError, r"bias: expected shape \[8\] .*got \[7\]"),
    "bias a row": (lambda: rk.linear(X, W, B[None]), ValueError, r"bias: expected shape \[8\] .*got \[1, 8\]"),
    "rows differ": (
        lambda: rk.linear_weight_grad(DY, X[:2]),
        ValueError,
        r"x: expected shape \[3, features\] \(the leading dimensions of dy\), got \[2, 32\]",
    ),
    "nine dimensions": (lambda: rk.linear(X.view(3, *(1,) * 7, 32), W), ValueError, "x: expected at most 8 dimensions"),
    **{
        f"{n} parts": (lambda n=n: rk.tree_sum([PART] * n), ValueError, f"parts: expected 1, 2, 4 or 8 arrays, got {n}")
        for n in (0, 3, 5, 9)
    },
    "parts of other shapes": (
        lambda: rk.tree_sum([PART, PART[:2]]),
        ValueError,
        r"parts\[1\]: expected shape \[3, 8\] \(that of parts\[0\]\), got \[2, 8\]",
    ),
    "parts with a short bias": (lambda: rk.tree_sum([PART], bias=B[:7]), ValueError, r"bias: expected shape \[8\]"),
    "a scalar part with a bias": (
        lambda: rk.tree_sum([PART[0, 0]], bias=B),
        ValueError,
        r"parts\[0\]: expected shape \[..., features\]",
    ),
    # Layouts.
    "x by columns": (
        lambda: rk.linear(X.t().contiguous().t(), W),
        ValueError,
        "x: expected a contiguous last dimension .*make it contiguous: .*torch",
    ),
    "weight by columns": (
        lambda: rk.linear(X, W.t().contiguous().t()),
        ValueError,
        "weight: expected a contiguous last dimension .*make it contiguous",
    ),
    "dy expanded": (
        lambda: rk.linear_input_grad(DY[:, :1].expand(3, 8), W),
        ValueError,
        "dy: expected a contiguous last dimension .*got stride 0",
    ),
    "bias strided": (lambda: rk.linear(X, W, torch.ones(16).bfloat16()[::2]), ValueError, "bias: .*contiguous"),
    "row strides that do not collapse": (
        lambda: rk.linear(torch.zeros(2, 3, 4, 32).transpose(0, 2).float(), W.float()),
        ValueError,
        "x: expected leading dimensions .*make it contiguous",
    ),
    "part strided": (lambda: rk.tree_sum([PART.t()]), ValueError, r"parts\[0\]: expected a contiguous array"),
    # Numbers.
    **{
        f"k_segments {s}": (
            lambda s=s: rk.linear(X, W, k_segments=s),
            ValueError,
            f"k_segments: expected 1, 2.* got {s}",
        )
        for s in (0, 3, 16, -1)
    },
    "k_segments float": (
        lambda: rk.linear(X, W, k_segments=2.0),
        TypeError,
        "k_segments: expected an integer, got float",
    ),
    "k_segments bool": (
        lambda: rk.linear(X, W, k_segments=True),
        TypeError,
        "k_segments: expected an integer, got bool",
    ),
    "k_segments off the edges": (
        lambda: rk.linear(X, W, k_segments=4),
        ValueError,
        r"k_segments: expected in_features to be a multiple of 64 .*got 32; pad .* to 64",
    ),
    "engine unknown": (lambda: rk.linear(X, W, engine="cublas"), ValueError, 'engine: expected "auto", "native", got'),
    "engine None": (lambda: rk.linear_input_grad(DY, W, engine=None), ValueError, "engine: expected"),
    "layer of three segments": (partial(3), ValueError, "k_segments: expected 1, 2, 4 or 8, got 3"),
    "three segments": (partial(4, 0, 3), ValueError, "num_segments: expected a power of two up to 4 .*got 3"),
    "more than the layer": (partial(2, 0, 4), ValueError, "num_segments: expected a power of two up to 2 .*got 4"),
    "unaligned": (partial(4, 1, 2), ValueError, r"first_segment: expected a multiple of 2 .* in \[0, 4\), got 1"),
    "before the layer": (partial(4, -1, 1), ValueError, r"first_segment: .*\[0, 4\), got -1"),
    "past the layer": (partial(4, 4, 1), ValueError, r"first_segment: .*\[0, 4\), got 4"),
    "segments a float": (partial(4.0), TypeError, "k_segments: expected an integer, got float"),
    "shard off the edges": (
        partial(2, 0, 1, 20),
        ValueError,
        r"x_shard: expected a last dimension that is a multiple of 16 .*got 20; pad .*multiple of 32",
    ),
    # Arithmetic.
    **{
        f"float32 under sm_90, {name}": (call, ValueError, "arithmetic: expected ieee for float32 operands")
        for name, call in (
            ("forward", lambda: rk.linear(X.float(), W.float())),
            ("autograd", lambda: rk.linear(X.float().requires_grad_(), W.float())),
            ("input grad", lambda: rk.linear_input_grad(DY.float(), W.float())),
            ("weight grad", lambda: rk.linear_weight_grad(DY.float(), X.float())),
        )
    },
    # Tensors without memory, and tensors whose memory holds other values than their elements.
    "x a DTensor": (
        lambda: rk.linear(DTensor(X), W),
        TypeError,
        "x: expected a local tensor, got a DTensor; .*to_local",
    ),
    "weight a DTensor": (lambda: rk.linear(X, DTensor(W)), TypeError, "weight: expected a local tensor, got a DTensor"),
    "x freed": (
        lambda: (x := X.clone(), x.untyped_storage().resize_(0), rk.linear(x, W)),
        ValueError,
        "x: has no memory",
    ),
    "weight freed": (  # FSDP frees the memory between its gathers
        lambda: (w := W.clone(), w.untyped_storage().resize_(0), rk.linear(X, w)),
        ValueError,
        "weight: has no memory",
    ),
    **{  # a subclass or torch may refuse with its own message
        f"{what} {kind.__name__}": (call, Exception, rf"{what}: |does not do|Fake|fake")
        for kind in (fake, Wrapper)
        for what, call in (
            ("x", lambda k=kind: rk.linear(k(X), W)),
            ("weight", lambda k=kind: rk.linear(X, k(W))),
            ("bias", lambda k=kind: rk.linear(X, W, k(B))),
            ("main_grad", lambda k=kind: rk.linear_weight_grad(DY, X, main_grad=k(MAIN))),
            ("out", lambda k=kind: rk.linear_weight_grad(DY, X, out=k(MAIN))),
        )
    },
    "x sparse": (lambda: rk.linear(X.to_sparse(), W), (TypeError, ValueError, NotImplementedError), "x|linear"),
    "weight meta": (lambda: rk.linear(X, W.to("meta")), (TypeError, ValueError), "weight"),
    "x meta, float64": (lambda: rk.linear(X.double().to("meta"), W.to("meta")), TypeError, "x: expected dtype"),
    "x meta, weight short": (
        lambda: rk.linear(X.to("meta"), W[:, :5].to("meta")),
        ValueError,
        r"weight: expected shape \[out_features, 32\] \(32 is the last dimension of x\), got \[8, 5\]",
    ),
    "x meta, odd segments": (
        lambda: rk.linear(X.to("meta"), W.to("meta"), k_segments=4),
        ValueError,
        "k_segments: expected in_features to be a multiple of 64",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_bad_argument_is_a_typed_error_that_names_it(case: str) -> None:
    call, error, words = CASES[case]
    with rk.arithmetic("sm_90" if "under sm_90" in case else "ieee"), pytest.raises(error, match=words):
        call()
    assert rk.linear(X, W, B).shape == (3, 8)
    assert not bool(MAIN.any()), "nothing was written"


NEGATED: dict[str, Any] = {
    "x": lambda n: rk.linear(n(-X), W),
    "weight": lambda n: rk.linear(X, n(-W)),
    "bias": lambda n: rk.linear(X, W, n(-B)),
    "dy": lambda n: rk.linear_weight_grad(n(-DY), X),
    "part": lambda n: rk.tree_sum([n(-PART), PART]),
}


@pytest.mark.parametrize("argument", NEGATED)
def test_a_negative_bit_is_honoured_or_refused(argument: str) -> None:
    """torch's lazy negation (the imaginary part of a conjugate) leaves numbers of the opposite sign in memory."""
    call = NEGATED[argument]
    want = call(lambda x: (-x).contiguous())
    with contextlib.suppress(TypeError, ValueError):
        assert raw(call(torch._neg_view)) == raw(want)


def test_a_negative_bit_on_autograds_gradient_is_honoured() -> None:
    grads = []
    for make in (torch._neg_view, lambda g: (-g).contiguous()):
        x = X.clone().requires_grad_()
        rk.linear(x, W).backward(make(DY.clone()))
        grads.append(x.grad)
    assert raw(grads[0]) == raw(grads[1])


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["weight", "bias", "x", "main_grad", "parts"])
def test_mixed_devices_are_an_error_that_names_both(argument: str) -> None:
    for here, there in (("cpu", "cuda:0"), ("cuda:0", "cpu")):
        calls = {
            "weight": lambda a=here, b=there: rk.linear(X.to(a), W.to(b)),
            "bias": lambda a=here, b=there: rk.linear(X.to(a), W.to(a), B.to(b)),
            "x": lambda a=here, b=there: rk.linear_weight_grad(DY.to(a), X.to(b)),
            "main_grad": lambda a=here, b=there: rk.linear_weight_grad(DY.to(a), X.to(a), main_grad=MAIN.to(b)),
            "parts": lambda a=here, b=there: rk.tree_sum([PART.to(a), PART.to(b)]),
        }
        name = r"parts\[1\]" if argument == "parts" else argument
        with pytest.raises(ValueError, match=rf"{name}: expected device {here}, got {there}"):
            calls[argument]()


@pytest.mark.parametrize("argument", ["dy", "x"])
def test_a_tensor_without_memory_is_named_beside_out(argument: str) -> None:
    arrays = {"dy": torch.ones(2, 3, dtype=torch.float16), "x": torch.ones(2, 5, dtype=torch.float16)}
    arrays[argument] = arrays[argument].to("meta")
    with pytest.raises(ValueError, match=r"x: expected device (cpu|meta), got (cpu|meta)"):
        rk.linear_weight_grad(**arrays, out=torch.zeros(3, 5, dtype=torch.float16))


@pytest.mark.gpu
def test_float32_is_the_cpus_alone() -> None:
    x, w, dy = X.float().cuda(), W.float().cuda(), DY.float().cuda()
    for call in (lambda: rk.linear(x, w), lambda: rk.linear_input_grad(dy, w), lambda: rk.linear_weight_grad(dy, x)):
        with pytest.raises(TypeError, match=r"expected dtype bfloat16 or float16 on cuda:0 .*CPU's alone.*got float32"):
            call()
