"""Bad input of rope gives an error of the right type, whose message names the argument, the expected value and the
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
Q = torch.randn(3, 4, 32, generator=_generator).bfloat16()
K = torch.randn(3, 2, 32, generator=_generator).bfloat16()
COS = torch.rand(50, 16, generator=_generator)
SIN = torch.rand(50, 16, generator=_generator)
IDS = torch.tensor([3, 0, 49])
PER_TOKEN = torch.rand(3, 16, generator=_generator)
NAMES = {"q": Q, "k": K, "cos": COS, "sin": SIN, "position_ids": IDS}


def split(changed: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Splits arguments into positional and keyword arguments."""
    given = {**NAMES, **changed}
    return [given.pop(name) for name in ("q", "k", "cos", "sin")], given


def rope(**changed: Any) -> Any:
    arguments, options = split(changed)
    return lambda: rk.rope(*arguments, **options)


def graded(**changed: Any) -> Any:
    """The forward of a training step."""
    return lambda: rope(**{"q": Q.clone().requires_grad_(), **changed})()


def traced(**changed: Any) -> Any:
    (q, *others), options = split(changed)
    return lambda: torch.func.vmap(lambda a: rk.rope(a, *others, **options))(q[None])


def back(**changed: Any) -> Any:
    arguments, options = split(changed)
    return lambda: rk.rope_backward(*arguments, **options)


WAYS = (("eager", rope), ("autograd", graded), ("traced", traced), ("backward", back))

# name: (call, error, pattern of its message).
CASES: dict[str, tuple[Any, Any, str]] = {
    # Not arrays.
    "q a list": (rope(q=[[1.0]]), TypeError, "q: expected an array that speaks DLPack, got list"),
    "q None": (rope(q=None), TypeError, "q: expected an array that speaks DLPack, got NoneType"),
    **{
        f"{what} {kind}, {name}": (call(**{what: value}), TypeError, f"{what}: expected .*, got {kind}")
        for what in ("cos", "sin", "position_ids")
        for kind, value in (("list", [1.0]), ("float", 1.0), ("ndarray", np.zeros(3, np.float32)))
        for name, call in WAYS
    },
    **{
        f"{what} None, {name}": (call(**{what: None}), TypeError, f"{what}: expected .*, got NoneType")
        for what in ("cos", "sin")
        for name, call in WAYS
    },
    "k a list": (rope(k=[1.0]), TypeError, "k: expected an array .*, got list"),
    "dk_out a list": (back(k=[1.0]), TypeError, "dk_out: expected an array .*, got list"),
    "dq_out None": (back(q=None), TypeError, "dq_out: expected an array .*, got NoneType"),
    # Dtypes.
    **{
        f"q {d}": (rope(q=Q.to(d), k=None), TypeError, f"q: expected dtype float32, bfloat16 .* got {n}")
        for d, n in ((torch.float64, "float64"), (torch.int32, "int32"), (torch.complex64, "complex64"))
    },
    "k float32": (rope(k=K.float()), TypeError, r"k: .*bfloat16 \(that of q\), got float32"),
    "dk_out float32": (back(k=K.float()), TypeError, r"dk_out: .*bfloat16 \(that of dq_out\), got float32"),
    "cos float16": (rope(cos=COS.half()), TypeError, r"cos: .*float32 or bfloat16 \(that of q\), got float16"),
    "cos bfloat16 of float32": (
        rope(q=Q.float(), k=None, cos=COS.bfloat16()),
        TypeError,
        "cos: expected dtype float32, got bfloat16",
    ),
    "sin unlike cos": (rope(sin=SIN.bfloat16()), TypeError, r"sin: .*float32 \(that of cos\), got bfloat16"),
    "sin float64": (rope(sin=SIN.double()), TypeError, "sin: expected dtype .*got float64"),
    "position_ids float32": (rope(position_ids=IDS.float()), TypeError, "position_ids: .*int32 or int64, got float32"),
    "position_ids int16": (rope(position_ids=IDS.short()), TypeError, "position_ids: .*int32 or int64, got int16"),
    # Shapes.
    "q a vector": (rope(q=Q[0, 0], k=None), ValueError, r"q: expected shape \[..., num_heads, head_dim\], got \[32\]"),
    "q odd": (rope(q=Q[..., :31], k=None), ValueError, r"q: expected an even last dimension.*got shape \[3, 4, 31\]"),
    "k of other tokens": (
        rope(k=K[:2]),
        ValueError,
        r"k: expected shape \[3, num_kv_heads, 32\] \(that of q .*got \[2, 2, 32\]",
    ),
    "k narrow": (rope(k=K[..., :16]), ValueError, r"k: expected shape \[3, num_kv_heads, 32\].*got \[3, 2, 16\]"),
    "k without heads": (rope(k=K[:, 0]), ValueError, r"k: expected shape|head_axis: expected"),
    "dk_out of other tokens": (back(k=K[:2]), ValueError, r"dk_out: expected shape .*that of dq_out"),
    "cos narrow": (
        rope(cos=COS[:, :7]),
        ValueError,
        r"cos: expected a last dimension of 32 or 16 .*got shape \[50, 7\]",
    ),
    "cos a scalar": (rope(cos=COS[0, 0]), ValueError, r"cos: expected .*got shape \[\]"),
    "sin short": (rope(sin=SIN[:7]), ValueError, r"sin: expected shape \[50, 16\] \(that of cos\), got \[7, 16\]"),
    "sin half": (rope(sin=SIN[:, :8]), ValueError, r"sin: expected shape \[50, 16\]"),
    "cos no table": (
        rope(cos=PER_TOKEN[None], sin=PER_TOKEN[None]),
        ValueError,
        r"cos: expected a table \[max_position, 32 or 16\] beside position_ids, got shape \[1, 3, 16\]",
    ),
    "cos of other tokens": (
        rope(cos=PER_TOKEN[:2], sin=PER_TOKEN[:2], position_ids=None),
        ValueError,
        r"cos: expected shape \[3, 16\] .*got \[2, 16\]",
    ),
    "cos of the heads": (
        rope(cos=PER_TOKEN[:, None], sin=PER_TOKEN[:, None], position_ids=None),
        ValueError,
        r"cos: expected shape \[3, 16\] .*got \[3, 1, 16\]",
    ),
    "position_ids short": (
        rope(position_ids=IDS[:2]),
        ValueError,
        r"position_ids: expected shape \[3\] .*each of which may be 1.*got \[2\]",
    ),
    "position_ids a matrix": (rope(position_ids=IDS[None]), ValueError, r"position_ids: .*\[3\] .*got \[1, 3\]"),
    "nine dimensions": (rope(q=Q.view(3, *(1,) * 6, 4, 32), k=None), ValueError, "q: expected at most 8 dimensions"),
    # Positions.
    **{
        f"position {bad}, {name}": (
            call(position_ids=torch.tensor([0, bad, 1])),
            ValueError,
            rf"position_ids: expected ids in \[0, 50\) .*got {bad} for token 1",
        )
        for bad in (-1, 50, 2**40, -(2**40))
        for name, call in WAYS
    },
    "positions of no table": (
        rope(cos=COS[:0], sin=SIN[:0]),
        ValueError,
        r"position_ids: expected ids in \[0, 0\) .*got 3 for token 0",
    ),
    "position of a section": (
        rope(position_ids=torch.tensor([[0, 1, 2], [0, 1, 99], [0, 1, 2]]), mrope_sections=(8, 4, 4)),
        ValueError,
        "position_ids: .*got 99 for token 2, section 1",
    ),
    # Layouts.
    "q by columns": (
        rope(q=Q.transpose(1, 2).contiguous().transpose(1, 2), k=None),
        ValueError,
        "q: expected a contiguous last dimension .*make it contiguous: .*torch",
    ),
    "k expanded": (
        rope(k=K[..., :1].expand(3, 2, 32)),
        ValueError,
        "k: expected a contiguous last dimension .*stride 0",
    ),
    "cos strided": (rope(cos=COS.t().contiguous().t()), ValueError, "cos: expected a contiguous last dimension"),
    "sin strided": (rope(sin=SIN.t().contiguous().t()), ValueError, "sin: expected a contiguous last dimension"),
    "strides that do not merge": (
        lambda: rk.rope(
            torch.zeros(4, 3, 2, 1, 8).transpose(0, 2), None, torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 4)
        ),
        ValueError,
        "q: expected dimensions of tokens that merge, .*make it contiguous",
    ),
    # Numbers and names.
    **{
        f"head_axis {value}, {name}": (call(head_axis=value), ValueError, f"head_axis: expected an axis .*got {value}")
        for value in (-1, 2, 3, -4, 100)
        for name, call in (("eager", rope), ("autograd", graded), ("backward", back))
    },
    **{
        f"head_axis {kind}, {name}": (call(head_axis=value), TypeError, f"head_axis: expected an integer, got {kind}")
        for kind, value in (("float", 1.0), ("NoneType", None), ("bool", True), ("str", "1"))
        for name, call in WAYS
    },
    **{
        f"partial_dim {value}, {name}": (
            call(partial_dim=value),
            ValueError,
            rf"partial_dim: expected an even number in \[2, 32\].*got {value}",
        )
        for value in (0, -2, 15, 34)
        for name, call in WAYS
    },
    **{
        f"partial_dim {kind}, {name}": (call(partial_dim=value), TypeError, f"partial_dim: expected an integer.*{kind}")
        for kind, value in (("float", 16.0), ("bool", True), ("str", "16"))
        for name, call in WAYS
    },
    **{
        f"intermediate {value!r}": (rope(intermediate=value), ValueError, f"intermediate: expected .*got {value!r}")
        for value in ("bfloat16", None, 1, "")
    },
    **{
        f"mrope_sections {value}, {name}": (
            call(mrope_sections=value),
            ValueError,
            r"mrope_sections: expected None or three sizes of sections, .* sum to 16 .*got",
        )
        for value in ((8, 8), (8, 4, 5), (20, -2, -2), (4, 4, 4, 4), ())
        for name, call in WAYS
    },
    **{
        f"mrope_sections {kind}, {name}": (call(mrope_sections=value), TypeError, "mrope_sections: expected")
        for kind, value in (("int", 3), ("str", "844"), ("floats", (8.0, 4.0, 4.0)))
        for name, call in WAYS
    },
    "sections without their dimension": (
        rope(mrope_sections=(8, 4, 4)),
        ValueError,
        r"position_ids: expected shape \[3, 3\] .*after one of the sections.*got \[3\]",
    ),
    "sections of cos without their dimension": (
        rope(cos=PER_TOKEN, sin=PER_TOKEN, position_ids=None, mrope_sections=(8, 4, 4)),
        ValueError,
        r"cos: expected shape \[3, 3, 16\] .*got \[3, 16\]",
    ),
    # cos and sin are constants.
    **{
        f"{what} that requires grad": (
            lambda what=what: rope(**{what: NAMES[what].clone().requires_grad_()})(),
            ValueError,
            rf"{what}: is a constant of the rotation and gets no gradient; pass {what}.detach\(\)",
        )
        for what in ("cos", "sin")
    },
    "cos that requires grad, of backward": (
        lambda: back(cos=COS.clone().requires_grad_())(),
        ValueError,
        "cos: is a constant",
    ),
    "gradient of cos in torch.func": (
        lambda: torch.func.grad(lambda c: rk.rope(Q, K, c, SIN, position_ids=IDS)[0].float().sum())(COS),
        ValueError,
        "cos: is a constant",
    ),
    "tangent of sin": (
        lambda: torch.func.jvp(lambda s: rk.rope(Q, K, COS, s, position_ids=IDS)[0], (SIN,), (SIN,)),
        ValueError,
        "sin: is a constant",
    ),
    # Tensors without memory, and tensors whose memory holds other values than their elements.
    "q a DTensor": (rope(q=DTensor(Q)), TypeError, "q: expected a local tensor, got a DTensor; .*to_local"),
    "cos a DTensor": (rope(cos=DTensor(COS)), TypeError, "cos: expected a local tensor, got a DTensor"),
    "cos freed": (
        lambda: (c := COS.clone(), c.untyped_storage().resize_(0), rope(cos=c)()),
        ValueError,
        "cos: has no memory",
    ),
    **{  # a subclass may refuse with its own message, and torch with its messages for mixed devices or modes
        f"{what} {kind.__name__}": (
            lambda what=what, kind=kind: rope(**{what: kind(NAMES[what])})(),
            Exception,
            rf"{what}: |does not do|Fake|fake",
        )
        for kind in (fake, Wrapper)
        for what in NAMES
    },
    "q sparse": (rope(q=Q.to_sparse()), (TypeError, ValueError, NotImplementedError), "q|rope"),
    "cos meta": (rope(cos=COS.to("meta")), (TypeError, ValueError), "cos"),
    "q meta, float64": (
        rope(**{n: (t.double() if n == "q" else t).to("meta") for n, t in NAMES.items()}),
        TypeError,
        "q: expected dtype",
    ),
    "q meta, ids short": (
        rope(**{n: (t[:2] if n == "position_ids" else t).to("meta") for n, t in NAMES.items()}),
        ValueError,
        r"position_ids: expected shape \[3\] .*got \[2\]",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_bad_argument_is_a_typed_error_that_names_it(case: str) -> None:
    call, error, words = CASES[case]
    with pytest.raises(error, match=words):
        call()
    assert rope()()[0].shape == Q.shape


@pytest.mark.parametrize("argument", ["q", "k", "cos", "sin"])
def test_a_negative_bit_is_honoured_or_refused(argument: str) -> None:
    """torch's lazy negation (the imaginary part of a conjugate) leaves numbers of the opposite sign in memory."""
    want = rope(**{argument: (-NAMES[argument]).neg()})()
    with contextlib.suppress(TypeError, ValueError):
        got = rope(**{argument: torch._neg_view(-NAMES[argument])})()
        assert [raw(g) for g in got] == [raw(w) for w in want]


def test_constants_may_require_grad_where_none_is_wanted() -> None:
    with torch.no_grad():
        rope(cos=COS.clone().requires_grad_())()


def test_strides_of_an_empty_array_mean_nothing() -> None:
    """NumPy and other frameworks give strides of zero."""
    empty = torch.empty_strided((0, 2, 32), (0, 0, 0))
    out = rk.rope(empty, empty, COS, SIN, position_ids=IDS[:0])
    assert [t.shape for t in out] == [empty.shape] * 2


def test_a_read_only_array_is_a_fine_input() -> None:
    arrays = {n: t.float().numpy().copy() if t.is_floating_point() else t.numpy().copy() for n, t in NAMES.items()}
    want = rope(**arrays)()
    for a in arrays.values():
        a.flags.writeable = False
    assert [raw(g) for g in rope(**arrays)()] == [raw(w) for w in want]


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["k", "cos", "sin", "position_ids"])
def test_mixed_devices_are_an_error_that_names_both(argument: str) -> None:
    for here, there in (("cpu", "cuda:0"), ("cuda:0", "cpu")):
        given = {n: t.to(there if n == argument else here) for n, t in NAMES.items()}
        with pytest.raises(ValueError, match=rf"{argument}: expected device {here}, got {there}"):
            rope(**given)()
