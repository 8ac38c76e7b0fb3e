"""Bad input of rms_norm gives an error of the right type, whose message names the argument, the expected value and the
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
W = torch.randn(32, generator=_generator).bfloat16()
R = torch.randn(3, 32, generator=_generator).bfloat16()
RSTD = torch.rand(3, generator=_generator)
MAIN = torch.zeros(32)  # only read, since calls that would write to it are refused


def meta(tensor: Any) -> Any:
    return tensor.to("meta")


def norm(x: Any = X, weight: Any = W, eps: Any = 1e-6, **options: Any) -> Any:
    return lambda: rk.rms_norm(x, weight, eps, **options)


def graded(x: Any = X, weight: Any = W, eps: Any = 1e-6, **options: Any) -> Any:
    """The forward of a training step."""
    return lambda: rk.rms_norm(x.clone().requires_grad_(), weight, eps, **options)


def traced(x: Any = X, weight: Any = W, eps: Any = 1e-6, **options: Any) -> Any:
    return lambda: torch.func.vmap(lambda a: rk.rms_norm(a, weight, eps, **options))(x[None])


def back(dy: Any = X, h: Any = R, weight: Any = W, eps: Any = 1e-6, **options: Any) -> Any:
    return lambda: rk.rms_norm_backward(dy, h, weight, eps, **options)


def trained(**options: Any) -> Any:
    return lambda: rk.rms_norm(X, W.clone().requires_grad_(), 1e-6, **options)


def twice_with_main_grad() -> None:
    x = X.float().requires_grad_()
    y = rk.rms_norm(x, W.float().requires_grad_(), 1e-6, main_grad=MAIN)
    y.sum().backward(create_graph=True)


def once_twice_differentiated() -> None:
    """Asks only for the gradient of x. A gradient of weight through this graph would not be added to main_grad."""
    x = X.float().requires_grad_()
    y = rk.rms_norm(x, W.float().requires_grad_(), 1e-6, main_grad=MAIN)
    torch.autograd.grad(y.sum(), x, create_graph=True)


# Maps a name to (call, error, pattern of its message).
CASES: dict[str, tuple[Any, Any, str]] = {
    # Not arrays.
    "x a list": (norm([[1.0]]), TypeError, "x: expected an array that speaks DLPack, got list"),
    "x None": (norm(None), TypeError, "x: expected an array that speaks DLPack, got NoneType"),
    **{
        f"{what} {kind}, {name}": (call(**{what: value}), TypeError, f"{what}: expected .*, got {kind}")
        for what in ("weight", "residual")
        for kind, value in (("list", [1.0]), ("float", 1.0), ("ndarray", np.zeros(32, np.float32)))
        for name, call in (("eager", norm), ("autograd", graded), ("traced", traced))
    },
    "dy None": (back(None), TypeError, "dy: expected an array .* got NoneType"),
    "h None": (back(h=None), TypeError, "h: expected an array .* got NoneType"),
    "rstd a number": (back(rstd=1.0), TypeError, "rstd: expected an array .* got float"),
    # Dtypes.
    **{
        f"x {d}": (norm(X.to(d), None), TypeError, f"x: expected dtype float32, bfloat16 .* got {n}")
        for d, n in ((torch.float64, "float64"), (torch.int32, "int32"), (torch.complex64, "complex64"))
    },
    "weight float16": (norm(weight=W.half()), TypeError, r"weight: .* float32 or bfloat16 .*that of x.*got float16"),
    "weight int32": (norm(weight=W.int()), TypeError, "weight: expected dtype .*got int32"),
    "weight bfloat16 of float32": (norm(X.float()), TypeError, "weight: expected dtype float32, got bfloat16"),
    "residual float32": (norm(residual=R.float()), TypeError, r"residual: .*bfloat16 \(that of x\), got float32"),
    "h float32": (back(h=R.float()), TypeError, r"h: .*bfloat16 \(that of dy\), got float32"),
    "gradient of the residual float32": (
        back(d_new_residual=R.float()),
        TypeError,
        r"d_new_residual: .*bfloat16 \(that of dy\), got float32",
    ),
    "rstd bfloat16": (back(rstd=RSTD.bfloat16()), TypeError, "rstd: expected dtype float32, got bfloat16"),
    "dweight_dtype float16": (
        back(dweight_dtype="float16"),
        TypeError,
        r"dweight_dtype: expected float32 or bfloat16 \(that of dy\), got float16",
    ),
    "dweight_dtype float64": (
        back(dweight_dtype=torch.float64),
        TypeError,
        "dweight_dtype: expected float32, .*float64",
    ),
    "dweight_dtype beside main_grad": (
        back(dweight_dtype="bfloat16", main_grad=MAIN),
        TypeError,
        "dweight_dtype: expected float32, that of main_grad",
    ),
    # Shapes.
    "x a scalar": (norm(X[0, 0], None), ValueError, r"x: expected shape \[..., features\], got \[\]"),
    "weight short": (norm(weight=W[:7]), ValueError, r"weight: expected shape \[32\] .*last dimension of x.*got \[7\]"),
    "weight a matrix": (norm(weight=W[None]), ValueError, r"weight: expected shape \[32\] .*got \[1, 32\]"),
    "residual broadcast": (norm(residual=R[:1]), ValueError, r"residual: expected shape \[3, 32\].*got \[1, 32\]"),
    "h of other rows": (back(h=R[:2]), ValueError, r"h: expected shape \[3, 32\] \(that of dy\), got \[2, 32\]"),
    "rstd short": (back(rstd=RSTD[:2]), ValueError, r"rstd: expected a contiguous array of shape \[3\] .*got \[2\]"),
    "nine dimensions": (norm(X.view(3, *(1,) * 7, 32)), ValueError, "x: expected at most 8 dimensions"),
    # Layouts.
    "x by columns": (
        norm(torch.zeros(3, 3).t().contiguous().t(), None),
        ValueError,
        "x: expected a contiguous last dimension .*make it contiguous: .*torch",
    ),
    # Arrays without rows have no elements.
    **{
        f"columns of {name}, {how}": (
            call(torch.empty(1, 0, 2**31)),
            ValueError,
            rf"{name}: expected fewer than 2\^31 columns, got 2147483648",
        )
        for name, how, call in (
            ("x", "eager", norm),
            ("x", "autograd", graded),
            ("x", "traced", traced),
            ("dy", "", back),
        )
    },
    "dy expanded": (back(X[:, :1].expand(3, 32)), ValueError, "dy: expected a contiguous last dimension .*stride 0"),
    "weight strided": (norm(weight=torch.ones(64).bfloat16()[::2]), ValueError, "weight: expected contiguous elements"),
    "rstd strided": (back(rstd=torch.ones(6)[::2]), ValueError, "rstd: expected a contiguous array"),
    "row strides that do not collapse": (
        norm(torch.zeros(2, 3, 4, 32).transpose(0, 2), None),
        ValueError,
        "x: expected leading dimensions .*make it contiguous",
    ),
    # Numbers.
    **{
        f"eps {value}, {name}": (call(eps=value), ValueError, "eps: expected a finite number > 0")
        for value in (0.0, -1e-6, float("inf"), float("nan"))
        for name, call in (("eager", norm), ("autograd", graded), ("traced", traced), ("backward", back))
    },
    "eps too small for float32": (norm(eps=1e-60), ValueError, "eps: expected a finite number > 0 in float32"),
    "eps too large for float32": (norm(eps=1e60), ValueError, "eps: expected a finite number > 0 in float32"),
    **{
        f"eps {kind}, {name}": (call(eps=value), TypeError, f"eps: expected a number, got {kind}")
        for kind, value in (("str", "1e-6"), ("NoneType", None), ("bool", True))
        for name, call in (("eager", norm), ("autograd", graded), ("traced", traced), ("backward", back))
    },
    "weight_offset infinite": (norm(weight_offset=float("inf")), ValueError, "weight_offset: expected a finite number"),
    "weight_offset a list": (norm(weight_offset=[1.0]), TypeError, "weight_offset: expected a number, got list"),
    **{
        f"weight_offset a flag, {name}, weight {weight is not None}": (
            call(weight=weight, weight_offset=False),
            TypeError,
            "weight_offset: expected a number, got bool",
        )
        for name, call in (("eager", norm), ("autograd", graded), ("traced", traced), ("backward", back))
        for weight in (W, None)
    },
    "weight_offset without a weight": (norm(weight=None, weight_offset=1.0), ValueError, "weight_offset: expected 0"),
    # main_grad.
    "main_grad a list": (trained(main_grad=[0.0]), TypeError, "main_grad: expected a torch.Tensor, got list"),
    "main_grad bfloat16": (trained(main_grad=MAIN.bfloat16()), TypeError, "main_grad: expected dtype float32"),
    "main_grad short": (trained(main_grad=MAIN[:5]), ValueError, r"main_grad: expected shape \[32\] .*got \[5\]"),
    "main_grad strided": (trained(main_grad=torch.zeros(64)[::2]), ValueError, "main_grad: expected a contiguous"),
    "main_grad the weight's memory": (
        lambda: (w := W.float().requires_grad_(), rk.rms_norm(X, w, 1e-6, main_grad=w.detach())),
        ValueError,
        "main_grad: may share memory with weight",
    ),
    "main_grad negated": (
        trained(main_grad=torch._neg_view(torch.zeros(32))),
        ValueError,
        "main_grad: has torch's negative bit",
    ),
    "main_grad a DTensor": (trained(main_grad=DTensor(MAIN)), TypeError, "main_grad: expected a local tensor"),
    "main_grad elsewhere": (
        trained(main_grad=MAIN.to("meta")),
        ValueError,
        "main_grad: expected device cpu .*got meta",
    ),
    "main_grad that requires grad": (
        trained(main_grad=MAIN.clone().requires_grad_()),
        ValueError,
        "main_grad: .*has no gradient; pass main_grad.detach",
    ),
    "main_grad of a frozen weight": (graded(main_grad=MAIN), ValueError, "main_grad: weight requires no gradient"),
    "main_grad without a weight": (graded(weight=None, main_grad=MAIN), ValueError, "main_grad: expected None"),
    "main_grad twice differentiated": (twice_with_main_grad, ValueError, "main_grad: .*without create_graph"),
    "main_grad, x twice differentiated": (once_twice_differentiated, ValueError, "main_grad: .*without create_graph"),
    "main_grad in torch.func": (
        lambda: torch.func.grad(lambda w: rk.rms_norm(X, w, 1e-6, main_grad=MAIN).float().sum())(W),
        ValueError,
        "main_grad: cannot be given under .*torch.func",
    ),
    "main_grad for NumPy": (
        lambda: rk.rms_norm(X.float().numpy(), W.float().numpy(), 1e-6, main_grad=MAIN.numpy()),
        ValueError,
        "main_grad: only torch has an autograd",
    ),
    "backward's main_grad bfloat16": (back(main_grad=MAIN.bfloat16()), TypeError, "main_grad: expected dtype float32"),
    "backward's main_grad short": (
        back(main_grad=MAIN[:5]),
        ValueError,
        r"main_grad: expected shape \[32\].*got \[5\]",
    ),
    "backward's main_grad without a weight": (
        back(weight=None, main_grad=MAIN),
        ValueError,
        "main_grad: expected None",
    ),
    "backward's main_grad that requires grad": (
        back(main_grad=MAIN.clone().requires_grad_()),
        ValueError,
        "main_grad: cannot be given where a gradient is wanted",
    ),
    "main_grad that is an input": (
        lambda: (h := torch.zeros(1, 32), rk.rms_norm_backward(h, h.clone(), MAIN, 1e-6, main_grad=h[0])),
        ValueError,
        "main_grad: may share memory with dy: their addresses overlap",
    ),
    # Tensors without memory, and tensors whose memory holds other values than their elements.
    "x a DTensor": (norm(DTensor(X)), TypeError, "x: expected a local tensor, got a DTensor; .*to_local"),
    "weight a DTensor": (norm(weight=DTensor(W)), TypeError, "weight: expected a local tensor, got a DTensor"),
    "weight freed": (  # FSDP frees the memory between its gathers
        lambda: (w := W.clone(), w.untyped_storage().resize_(0), rk.rms_norm(X, w, 1e-6)),
        ValueError,
        "weight: has no memory",
    ),
    **{  # a subclass may refuse with its own message, and torch with its messages for mixed devices or modes
        f"{what} {kind.__name__}": (call, Exception, rf"{what}: |does not do|Fake|fake")
        for kind in (fake, Wrapper)
        for what, call in (
            ("x", lambda k=kind: rk.rms_norm(k(X), W, 1e-6)),
            ("weight", lambda k=kind: rk.rms_norm(X, k(W), 1e-6)),
            ("residual", lambda k=kind: rk.rms_norm(X, W, 1e-6, residual=k(R))),
            ("rstd", lambda k=kind: rk.rms_norm_backward(X, R, W, 1e-6, rstd=k(RSTD))),
            ("main_grad", lambda k=kind: rk.rms_norm_backward(X, R, W, 1e-6, main_grad=k(MAIN))),
        )
    },
    "x sparse": (norm(X.to_sparse()), (TypeError, ValueError, NotImplementedError), "x|rms_norm"),
    "x nested": (
        norm(torch.nested.nested_tensor([X, X], layout=torch.jagged)),
        TypeError,
        "x: expected a dense tensor, got a nested one",
    ),
    **{
        f"{name}, meta": (call, error, words)
        for name, call, error, words in (
            ("x by columns", norm(meta(torch.zeros(3, 3).t()), None), ValueError, "x: .*got stride 3; make it"),
            ("weight strided", norm(meta(X), meta(torch.ones(64).bfloat16())[::2]), ValueError, "weight: .*stride 2"),
            ("weight int32", norm(meta(X), meta(W.int())), TypeError, r"weight: .*bfloat16 \(that of x\), got int32"),
            ("residual float32", norm(meta(X), None, residual=meta(R.float())), TypeError, "residual: .*got float32"),
            ("eps too small", norm(meta(X), None, 1e-60), ValueError, "eps: expected a finite number > 0 in float32"),
            ("offset alone", norm(meta(X), None, weight_offset=1.0), ValueError, "weight_offset: expected 0"),
            (
                "rstd strided",
                back(meta(X), meta(R), meta(W), rstd=meta(torch.ones(6))[::2]),
                ValueError,
                r"rstd: expected a contiguous array of shape \[3\]",
            ),
        )
    },
    "weight meta": (norm(weight=W.to("meta")), (TypeError, ValueError), "weight"),
    "x meta, float64": (norm(X.double().to("meta"), None), TypeError, "x: expected dtype"),
    "x meta, weight short": (
        norm(X.to("meta"), W[:5].to("meta")),
        ValueError,
        r"weight: expected shape \[32\] \(the last dimension of x\), got \[5\]",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_bad_argument_is_a_typed_error_that_names_it(case: str) -> None:
    call, error, words = CASES[case]
    with pytest.raises(error, match=words):
        call()
    assert rk.rms_norm(X, W, 1e-6).shape == (3, 32)
    assert not bool(MAIN.any()), "nothing was written"


NEGATED: dict[str, Any] = {
    "x": lambda n: rk.rms_norm(n(-X), W, 1e-6),
    "weight": lambda n: rk.rms_norm(X, n(-W), 1e-6),
    "residual": lambda n: rk.rms_norm(X, W, 1e-6, residual=n(-R)),
    "dy": lambda n: rk.rms_norm_backward(n(-X), R, W, 1e-6),
}


@pytest.mark.parametrize("argument", NEGATED)
def test_a_negative_bit_is_honoured_or_refused(argument: str) -> None:
    """torch's lazy negation (the imaginary part of a conjugate) leaves numbers of the opposite sign in memory."""
    call = NEGATED[argument]
    want = call(lambda x: (-x).contiguous())
    with contextlib.suppress(TypeError, ValueError):
        assert raw(call(torch._neg_view)) == raw(want)


def test_a_read_only_array_is_no_main_grad_and_a_fine_input() -> None:
    x, dy = X.float().numpy().copy(), R.float().numpy().copy()
    x.flags.writeable = dy.flags.writeable = False
    weight, memory = np.ones(32, np.float32), np.zeros(32, np.float32)
    want = rk.rms_norm_backward(dy, x, weight, 1e-6)[1]
    memory.flags.writeable = False
    with pytest.raises((BufferError, TypeError), match=r"read-?only"):
        rk.rms_norm_backward(dy, x, weight, 1e-6, main_grad=memory)
    assert not memory.any()
    assert want.any()


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["weight", "residual", "h", "rstd", "main_grad"])
def test_mixed_devices_are_an_error_that_names_both(argument: str) -> None:
    for here, there in (("cpu", "cuda:0"), ("cuda:0", "cpu")):
        calls = {
            "weight": lambda a=here, b=there: rk.rms_norm(X.to(a), W.to(b), 1e-6),
            "residual": lambda a=here, b=there: rk.rms_norm(X.to(a), None, 1e-6, residual=R.to(b)),
            "h": lambda a=here, b=there: rk.rms_norm_backward(X.to(a), R.to(b), W.to(a), 1e-6),
            "rstd": lambda a=here, b=there: rk.rms_norm_backward(X.to(a), R.to(a), W.to(a), 1e-6, rstd=RSTD.to(b)),
            "main_grad": lambda a=here, b=there: rk.rms_norm_backward(
                X.to(a), R.to(a), W.to(a), 1e-6, main_grad=MAIN.to(b)
            ),
        }
        with pytest.raises(ValueError, match=rf"{argument}: expected device {here}, got {there}"):
            calls[argument]()
