"""Each bad input of silu_mul and gelu_mul yields a typed error, never a wrong number or a crash.

The error names the argument, the expected value and the given one.
"""

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
G, U, D = (torch.randn(3, 32, generator=_generator).bfloat16() for _ in range(3))


def silu(gate: Any = G, up: Any = U, **options: Any) -> Any:
    return lambda: rk.silu_mul(gate, up, **options)


def graded(gate: Any = G, up: Any = U, **options: Any) -> Any:
    """The forward of a training step."""
    return lambda: rk.silu_mul(gate.clone().requires_grad_(), up, **options)


def traced(gate: Any = G, up: Any = U, **options: Any) -> Any:
    return lambda: torch.func.vmap(lambda a: rk.silu_mul(a, up, **options))(gate[None])


def back(dy: Any = D, gate: Any = G, up: Any = U, **options: Any) -> Any:
    return lambda: rk.silu_mul_backward(dy, gate, up, **options)


FORMS = (("eager", silu), ("autograd", graded), ("traced", traced))

# name: (call, type of the error, pattern that its message must match)
CASES: dict[str, tuple[Any, Any, str]] = {
    # Not arrays.
    "gate a list": (silu([[1.0]]), TypeError, "gate: expected an array that speaks DLPack, got list"),
    "gate_up a list": (silu([[1.0]], None), TypeError, "gate_up: expected an array that speaks DLPack, got list"),
    "gate None": (silu(None), TypeError, "gate: expected an array that speaks DLPack, got NoneType"),
    **{
        f"up {kind}, {name}": (call(up=value), TypeError, f"up: expected .*, got {kind}")
        for kind, value in (("list", [1.0]), ("float", 1.0), ("ndarray", np.zeros((3, 32), np.float32)))
        for name, call in FORMS
    },
    "dy None": (back(None), TypeError, "dy: expected .* got NoneType"),
    "dy a list": (back([1.0]), TypeError, "dy: expected .* got list"),
    # Dtypes.
    **{
        f"gate {d}": (silu(G.to(d), U.to(d)), TypeError, f"gate: expected dtype float32, bfloat16 .* got {n}")
        for d, n in ((torch.float64, "float64"), (torch.int32, "int32"), (torch.complex64, "complex64"))
    },
    "gate_up float64": (silu(G.double(), None), TypeError, "gate_up: expected dtype float32, .* got float64"),
    **{
        f"up float32, {name}": (call(up=U.float()), TypeError, r"up: .*bfloat16 \(that of gate\), got .*float32")
        for name, call in FORMS
    },
    "dy float32": (back(D.float()), TypeError, r"dy: .*bfloat16 \(that of gate\), got float32"),
    "dy of gate_up float32": (back(D[:, :16].float(), G, None), TypeError, r"dy: .*\(that of gate_up\), got float32"),
    # Shapes.
    "gate a scalar": (silu(G[0, 0], U[0, 0]), ValueError, r"gate: expected shape \[..., features\], got \[\]"),
    **{
        f"gate_up odd, {name}": (call(G[:, :31], None), ValueError, r"gate_up: .*even last dimension.*got shape \[")
        for name, call in FORMS
    },
    **{
        f"up broadcast, {name}": (call(up=U[:1]), ValueError, r"up: expected shape \[.*3, 32\] .*got \[.*1, 32\]")
        for name, call in FORMS[:2]
    },
    "up short": (silu(up=U[:, :31]), ValueError, r"up: expected shape \[3, 32\] \(that of gate\), got \[3, 31\]"),
    "dy of the packed width": (
        back(D, G, None),
        ValueError,
        r"dy: expected shape \[3, 16\] \(that of the result\), got \[3, 32\]",
    ),
    "dy of other rows": (back(D[:2]), ValueError, r"dy: expected shape \[3, 32\] .*got \[2, 32\]"),
    "nine dimensions": (silu(G.view(3, *(1,) * 7, 32), None), ValueError, "gate_up: expected at most 8 dimensions"),
    # Layouts.
    "gate by columns": (
        silu(torch.zeros(3, 3).t().contiguous().t(), torch.zeros(3, 3)),
        ValueError,
        "gate: expected a contiguous last dimension .*make it contiguous: .*torch",
    ),
    "up expanded": (silu(up=U[:, :1].expand(3, 32)), ValueError, "up: expected a contiguous last dimension .*stride 0"),
    # Empty arrays: a huge number of columns in no rows.
    **{
        f"columns of {name}, {how}": (
            call(torch.empty(1, 0, columns), None if name == "gate_up" else torch.empty(1, 0, columns)),
            ValueError,
            rf"{name}: expected fewer than 2\^{bits} columns, got {columns}",
        )
        for name, columns, bits in (("gate", 2**30, 30), ("gate_up", 2**31, 31))
        for how, call in FORMS[:2]
    },
    "dy expanded": (back(D[:, :1].expand(3, 32)), ValueError, "dy: expected a contiguous last dimension .*stride 0"),
    "row strides that do not collapse": (
        silu(torch.zeros(2, 3, 4, 32).transpose(0, 2), None),
        ValueError,
        "gate_up: expected leading dimensions .*make it contiguous",
    ),
    # Names.
    **{
        f"approximate {value!r}": (
            lambda v=value: rk.gelu_mul(G, U, approximate=v),
            ValueError,
            'approximate: expected "tanh", "none", got',
        )
        for value in ("erf", None, True, "")
    },
    "backward's approximate": (
        lambda: rk.gelu_mul_backward(D, G, U, approximate="exact"),
        ValueError,
        'approximate: expected "tanh", "none", got',
    ),
    # Tensors without memory, and tensors whose memory does not hold their values.
    "gate a DTensor": (silu(DTensor(G)), TypeError, "gate: expected a local tensor, got a DTensor; .*to_local"),
    "gate_up a DTensor": (silu(DTensor(G), None), TypeError, "gate_up: expected a local tensor, got a DTensor"),
    "up a DTensor": (silu(up=DTensor(U)), TypeError, "up: expected a local tensor, got a DTensor"),
    "gate freed": (
        lambda: (g := G.clone(), g.untyped_storage().resize_(0), rk.silu_mul(g, U)),
        ValueError,
        "gate: has no memory",
    ),
    **{  # a subclass may raise its own error, and torch its errors of mixed devices or modes
        f"{what} {kind.__name__}": (call, Exception, rf"{what}: |does not do|Fake|fake")
        for kind in (fake, Wrapper)
        for what, call in (
            ("gate", lambda k=kind: rk.silu_mul(k(G), U)),
            ("up", lambda k=kind: rk.silu_mul(G, k(U))),
            ("dy", lambda k=kind: rk.silu_mul_backward(k(D), G, U)),
        )
    },
    "gate sparse": (silu(G.to_sparse()), (TypeError, ValueError, NotImplementedError), "gate|gated_mul"),
    "up meta": (silu(up=U.to("meta")), (TypeError, ValueError), "up"),
    "gate meta, float64": (silu(G.double().to("meta"), None), TypeError, "gate_up: expected dtype"),
    "gate_up meta, odd": (silu(G[:, :5].to("meta"), None), ValueError, "gate_up: expected an even last dimension"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_bad_argument_is_a_typed_error_that_names_it(case: str) -> None:
    call, error, words = CASES[case]
    with pytest.raises(error, match=words):
        call()
    assert rk.silu_mul(G, U).shape == (3, 32)


NEGATED: dict[str, Any] = {
    "gate": lambda n: rk.silu_mul(n(-G), U),
    "gate_up": lambda n: rk.silu_mul(n(-G)),
    "up": lambda n: rk.silu_mul(G, n(-U)),
    "dy": lambda n: rk.silu_mul_backward(n(-D), G, U)[0],
}


@pytest.mark.parametrize("argument", NEGATED)
def test_a_negative_bit_is_honoured_or_refused(argument: str) -> None:
    """torch's lazy negation (the imaginary part of a conjugate) leaves the opposite numbers in memory."""
    call = NEGATED[argument]
    want = call(lambda x: (-x).contiguous())
    with contextlib.suppress(TypeError, ValueError):
        assert raw(call(torch._neg_view)) == raw(want)


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["up", "dy"])
def test_mixed_devices_are_an_error_that_names_both(argument: str) -> None:
    for here, there in (("cpu", "cuda:0"), ("cuda:0", "cpu")):
        calls = {
            "up": lambda a=here, b=there: rk.silu_mul(G.to(a), U.to(b)),
            "dy": lambda a=here, b=there: rk.silu_mul_backward(D.to(b), G.to(a), U.to(a)),
        }
        with pytest.raises(ValueError, match=rf"{argument}: expected device {here}, got {there}"):
            calls[argument]()
