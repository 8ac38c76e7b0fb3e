"""Bad input of embedding gives an error of the right type, whose message names the argument, the expected value and the
given one. An operator never gives a wrong number or a crash."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import raw

torch = pytest.importorskip("torch", reason="most bad inputs are torch's")

from tensor_kinds import DTensor  # noqa: E402

_generator = torch.Generator().manual_seed(0)
IDS = torch.tensor([[1, 0, 3], [2, 2, 4]])
W = torch.randn(6, 8, generator=_generator).bfloat16()
DY = torch.randn(2, 3, 8, generator=_generator).bfloat16()
MAIN = torch.zeros(6, 8)  # only read, since calls that would write to it are refused


def rows(ids: Any = IDS, weight: Any = W, **options: Any) -> Any:
    return lambda: rk.embedding(ids, weight, **options)


def trained(ids: Any = IDS, weight: Any = W, **options: Any) -> Any:
    return lambda: rk.embedding(ids, weight.clone().requires_grad_(), **options)


def transformed(ids: Any = IDS, weight: Any = W, **options: Any) -> Any:
    return lambda: torch.func.vmap(lambda i: rk.embedding(i, weight, **options))(ids)


def back(dy: Any = DY, ids: Any = IDS, num_rows: Any = 6, **options: Any) -> Any:
    return lambda: rk.embedding_backward(dy, ids, num_rows, **options)


# Maps a name to (call, error, pattern of its message).
CASES: dict[str, tuple[Any, Any, str]] = {
    # Not arrays.
    "ids a list": (rows([1, 2]), TypeError, "ids: expected an array"),
    "weight a list": (rows(IDS.numpy(), [[1.0]]), TypeError, "weight: expected an array that speaks DLPack, got list"),
    "ids None": (rows(None), TypeError, "ids: expected an array"),
    "a NumPy array beside a tensor": (rows(IDS.numpy()), TypeError, "ids: expected an array of the framework"),
    # Dtypes.
    "ids of float": (rows(IDS.float()), TypeError, "ids: expected dtype int32 or int64, got float32"),
    "ids of int16": (rows(IDS.short()), TypeError, "ids: "),
    "weight of float64": (rows(IDS, W.double()), TypeError, "weight: "),
    "weight of int64": (rows(IDS, IDS), TypeError, "weight: expected dtype float32, bfloat16 or float16, got int64"),
    "dy of int64": (back(IDS), TypeError, "dy: expected dtype float32, bfloat16 or float16, got int64"),
    "ids of float, backward": (back(ids=IDS.float()), TypeError, "ids: expected dtype int32 or int64, got float32"),
    # Shapes.
    "a vector of weights": (rows(IDS, W[0]), ValueError, "weight: expected shape [rows, columns], got [8]"),
    "a weight of three dimensions": (rows(IDS, W[None]), ValueError, "weight: expected shape [rows, columns], got [1"),
    "a scalar weight": (rows(IDS, W[0, 0]), ValueError, "weight: expected shape"),
    "ids of another shape": (
        back(ids=IDS[:1]),
        ValueError,
        "ids: expected shape [2, 3] (the leading dimensions of dy), got [1, 3]",
    ),
    "dy without columns": (back(dy=DY[0, 0, 0]), ValueError, "dy: expected shape [..., features], got []"),
    # Layouts.
    "columns apart": (rows(IDS, W.t()), ValueError, "weight: expected a contiguous last dimension (stride 1), got"),
    "columns of dy apart": (back(dy=DY.transpose(1, 2), ids=IDS.new_zeros(2, 8)), ValueError, "dy: expected a contig"),
    "ids of three strides": (
        rows(torch.zeros(4, 4, 4, dtype=torch.int64)[::2, ::2, ::2]),
        ValueError,
        "ids: expected dimensions that collapse to at most two strides, got shape [2, 2, 2]",
    ),
    # Numbers.
    "vocab_start a float": (rows(vocab_start=1.0), TypeError, "vocab_start: expected an integer, got float"),
    "vocab_start a bool": (rows(vocab_start=True), TypeError, "vocab_start: expected an integer, got bool"),
    "vocab_start negative": (rows(vocab_start=-1), ValueError, "vocab_start: expected an integer >= 0, got -1"),
    "vocab_start huge": (rows(vocab_start=2**63 - 2), ValueError, "vocab_start: expected vocab_start + rows in 64"),
    **{
        f"{name} of 2^63, {how}": (
            call(**{name: 2**63}),
            ValueError,
            f"{name}: expected an integer of 64 bits, got 9223",
        )
        for name in ("vocab_start", "vocab_size", "padding_idx")
        for how, call in (("eager", rows), ("autograd", trained), ("transformed", transformed))
    },
    "num_rows of 2^63": (back(num_rows=2**63), ValueError, "num_rows: expected an integer of 64 bits, got 9223"),
    "vocab_start of 100 bits": (
        rows(vocab_start=10**30),
        ValueError,
        "vocab_start: expected an integer of 64 bits, got one of 100 bits",
    ),
    "columns of weight": (
        rows(IDS[:0], torch.empty(0, 2**31)),  # it has no elements
        ValueError,
        "weight: expected fewer than 2^31 columns, got 2147483648",
    ),
    "columns of dy": (
        back(torch.empty(0, 3, 2**31), IDS[:0]),
        ValueError,
        "dy: expected fewer than 2^31 columns, got 2147483648",
    ),
    "vocab_start past the vocabulary": (
        rows(vocab_start=9, vocab_size=8),
        ValueError,
        "vocab_start: expected an id in [0, 8] (vocab_size), got 9",
    ),
    "vocab_size a string": (rows(vocab_size="8"), TypeError, "vocab_size: expected an integer, got str"),
    "vocab_size negative": (rows(vocab_size=-8), ValueError, "vocab_size: expected an integer >= 0, got -8"),
    "padding_idx negative": (
        rows(padding_idx=-1),
        ValueError,
        "padding_idx: expected None or an id in [0, 6) (vocab_size), got -1",
    ),
    "padding_idx past the vocabulary": (back(padding_idx=6), ValueError, "padding_idx: expected None or an id in [0"),
    "padding_idx a float": (rows(padding_idx=0.5), TypeError, "padding_idx: expected an integer or None, got float"),
    "num_rows negative": (back(num_rows=-1), ValueError, "num_rows: expected an integer >= 0, got -1"),
    "num_rows a float": (back(num_rows=6.0), TypeError, "num_rows: expected an integer, got float"),
    "num_rows huge": (back(num_rows=2**31), ValueError, "num_rows: expected fewer than 2^31 - 1 rows, got 2147483648"),
    "on_bad_id": (rows(on_bad_id="zero"), ValueError, 'on_bad_id: expected "nan", "raise", got \'zero\''),
    # Gradients.
    "dweight_dtype": (back(dweight_dtype="float16"), TypeError, "dweight_dtype: expected float32 or bfloat16 (that of"),
    "dweight_dtype beside main_grad": (
        back(main_grad=MAIN, dweight_dtype="bfloat16"),
        TypeError,
        "dweight_dtype: expected float32, that of main_grad",
    ),
    "main_grad of bfloat16": (back(main_grad=W.clone()), TypeError, "main_grad: expected dtype float32, got bfloat16"),
    "main_grad too short": (
        back(main_grad=MAIN[:5]),
        ValueError,
        "main_grad: expected shape [6, 8] (num_rows, columns of dy), got [5, 8]",
    ),
    "main_grad expanded": (
        back(main_grad=MAIN[:1].expand(6, 8)),
        ValueError,
        "main_grad: expected strides that do not overlap",
    ),
    "main_grad is dy": (
        lambda: (lambda g: rk.embedding_backward(g, IDS.view(-1), 6, main_grad=g))(torch.zeros(6, 8)),
        ValueError,
        "main_grad: may share memory with dy",
    ),
    "main_grad of NumPy's forward": (
        rows(IDS.numpy(), W.float().numpy(), main_grad=MAIN.numpy()),
        ValueError,
        "main_grad: only torch has an autograd",
    ),
    "main_grad of a frozen weight": (rows(main_grad=MAIN), ValueError, "main_grad: weight requires no gradient"),
    "main_grad of another shape": (trained(main_grad=MAIN[:5]), ValueError, "main_grad: expected shape [6, 8] (that"),
    "main_grad with a gradient": (
        trained(main_grad=MAIN.clone().requires_grad_()),
        ValueError,
        "main_grad: is memory that backward adds to",
    ),
    "main_grad and a second derivative": (
        lambda: rk.embedding_backward(DY.clone().requires_grad_(), IDS, 6, main_grad=MAIN),
        ValueError,
        "main_grad: cannot be given where a gradient is wanted",
    ),
    "weight_grad_dtype of NumPy": (
        rows(IDS.numpy(), W.float().numpy(), weight_grad_dtype="bfloat16"),
        ValueError,
        "weight_grad_dtype: only torch has an autograd",
    ),
    "weight_grad_dtype": (trained(weight_grad_dtype="float16"), TypeError, "weight_grad_dtype: expected float32 or"),
    # Subclasses and layouts of torch.
    "weight a DTensor": (rows(IDS, DTensor(W)), TypeError, "weight: expected a local tensor, got a DTensor; pass"),
    "ids a DTensor": (rows(DTensor(IDS)), TypeError, "ids: expected a local tensor, got a DTensor; pass"),
    "weight sparse": (rows(IDS, W.float().to_sparse()), TypeError, "weight: "),
    "weight on meta": (rows(IDS, W.to("meta")), ValueError, "ids: expected device meta, got cpu"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_names_what_is_wrong(name: str) -> None:
    call, error, words = CASES[name]
    before = [raw(t.clone()) for t in (IDS, W, DY, MAIN)]
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
    assert [raw(t.clone()) for t in (IDS, W, DY, MAIN)] == before, "nothing was written"
    assert rk.embedding(IDS, W).shape == (2, 3, 8), "the next call is right"


# Inputs that a trace refuses with the extension's own messages.
TRACED = [
    "ids of float", "a vector of weights", "a weight of three dimensions", "ids of another shape", "columns apart",
    "ids of three strides", "vocab_start negative", "vocab_start huge", "vocab_start past the vocabulary",
    "vocab_size negative", "columns of weight", "columns of dy",
    "padding_idx negative", "padding_idx past the vocabulary", "num_rows negative", "dweight_dtype",
]  # fmt: skip


@pytest.mark.parametrize("name", TRACED)
def test_a_fake_tensor_is_refused_in_the_same_words(name: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    call, error, words = CASES[name]
    inner = dict(zip(call.__code__.co_freevars, (c.cell_contents for c in call.__closure__), strict=True))
    with FakeTensorMode() as mode:
        moved = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in inner.items()}
        options = moved.pop("options")
        with pytest.raises(error) as caught:
            (rk.embedding_backward if "dy" in moved else rk.embedding)(**moved, **options)
    assert words in str(caught.value)


def test_a_read_only_main_grad_is_refused() -> None:
    main_grad = np.zeros((6, 8), np.float32)
    main_grad.flags.writeable = False
    with pytest.raises((BufferError, TypeError), match="main_grad"):
        rk.embedding_backward(DY.float().numpy(), IDS.numpy(), 6, main_grad=main_grad)
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="main_grad: expected an array that can be written, got a JAX array"):
        rk.embedding_backward(DY.float().numpy(), IDS.numpy(), 6, main_grad=jax.numpy.zeros((6, 8)))


@pytest.mark.gpu
def test_ids_and_tables_of_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="ids: expected device cuda:0, got cpu"):
        rk.embedding(IDS, W.cuda())
    with pytest.raises(ValueError, match="ids: expected device cpu, got cuda:0"):
        rk.embedding(IDS.cuda(), W)
    with pytest.raises(ValueError, match="main_grad: expected device cuda:0, got cpu"):
        rk.embedding_backward(DY.cuda(), IDS.cuda(), 6, main_grad=MAIN.clone())
