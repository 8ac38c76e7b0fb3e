"""Bad input gives an error of the right type, whose message names the argument, the expected value and the given one.

An operator never gives a wrong number or a crash. test_bad_export.py has the bad inputs of other frameworks and bad
exporters.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import ALL, Status, raw

torch = pytest.importorskip("torch", reason="most bad inputs are torch's")

from tensor_kinds import DTensor, Wrapper, fake  # noqa: E402

X = torch.arange(30, dtype=torch.float32).reshape(3, 10) / 7
Y = torch.tensor([1, 2, 3])
LSE = rk.logprob(X, Y, return_lse=True).lse
IDS, OFFSETS = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 1, 2, 2])
NAN, INF = float("nan"), float("inf")


def sparse(tensor: Any) -> Any:
    return tensor.to_sparse()


# Maps a name to (call, error, pattern of its message). One entry stands for each row of the table and of the issue.
CASES: dict[str, tuple[Any, Any, str]] = {
    # Not arrays.
    "logits a list": (
        lambda: rk.logprob([[1.0]], Y),
        TypeError,
        "logits: expected an array that speaks DLPack, got list",
    ),
    "logits None": (
        lambda: rk.logprob(None, Y),
        TypeError,
        "logits: expected an array that speaks DLPack, got NoneType",
    ),
    "logits a number": (lambda: rk.logprob(np.float32(1), Y), TypeError, "logits: expected an array .* got float32"),
    "target a list": (
        lambda: rk.logprob(X, [1, 2, 3]),
        TypeError,
        "target: expected an array that speaks DLPack, got list",
    ),
    **{
        f"target a number, {name}": (
            call,
            TypeError,
            rf"target: expected an array that speaks DLPack, got {got}; .*torch.tensor\(3\) or np.array\(3\)",
        )
        for name, call, got in (
            ("torch", lambda: rk.logprob(X[0], 3), "int"),
            ("torch and NumPy", lambda: rk.logprob(X[0], np.int64(3)), "int64"),
            ("NumPy", lambda: rk.logprob(X[0].numpy(), np.int64(3)), "int64"),
            ("autograd", lambda: rk.logprob(X[0].clone().requires_grad_(), 3), "int"),
            ("shard", lambda: rk.logprob_partial(X[0], 3, vocab_start=0, vocab_size=10), "int"),
            ("backward", lambda: rk.logprob_backward(X[0], 3, LSE[0]), "int"),
        )
    },
    **{
        f"target a number, {name} traced": (
            lambda call=call: torch.func.vmap(call)(X),
            TypeError,
            r"target: expected a torch.Tensor, got int; for one row, torch.tensor\(3\)",
        )
        for name, call in (("logits", lambda x: rk.logprob(x, 3)), ("head", lambda x: rk.linear_logprob(x, X, 3)))
    },
    "target None": (lambda: rk.logprob(X, None), TypeError, "target: expected an array .* got NoneType"),
    "stats a list": (lambda: rk.logprob_merge([LSE]), TypeError, "stats: expected an array .* got list"),
    "lse None": (lambda: rk.logprob_backward(X, Y, None), TypeError, "lse: expected the lse .* got None"),
    # Dtypes.
    **{
        f"logits {d}": (
            lambda d=d: rk.logprob(X.to(d), Y),
            TypeError,
            f"logits: expected dtype float32, bfloat16 or float16, got {n}",
        )
        for d, n in (
            (torch.float64, "float64"),
            (torch.int32, "int32"),
            (torch.complex64, "complex64"),
            (torch.bool, "bool"),
        )
    },
    "logits float8": (lambda: rk.logprob(X.to(torch.float8_e4m3fn), Y), TypeError, "logits: expected dtype float32"),
    **{
        f"target {d}": (lambda d=d: rk.logprob(X, Y.to(d)), TypeError, "target: expected dtype int32 or int64, got ")
        for d in (torch.float32, torch.uint8, torch.int16, torch.bool)
    },
    "temperature float64": (
        lambda: rk.logprob(X, Y, temperature=torch.ones(3).double()),
        TypeError,
        "temperature: expected dtype float32, got float64",
    ),
    "lse float64": (
        lambda: rk.logprob_backward(X, Y, LSE.double()),
        TypeError,
        "lse: expected dtype float32, got float64",
    ),
    "dlogprob half": (
        lambda: rk.logprob_backward(X, Y, LSE, dlogprob=LSE.half()),
        TypeError,
        "dlogprob: expected dtype float32, got float16",
    ),
    "stats float64": (
        lambda: rk.logprob_merge(torch.zeros(1, 3, 5).double()),
        TypeError,
        "stats: expected dtype float32",
    ),
    # Shapes.
    "logits a scalar": (
        lambda: rk.logprob(X[0, 0], Y[0]),
        ValueError,
        r"logits: expected shape \[..., vocab_size\], got \[\]",
    ),
    "target short": (lambda: rk.logprob(X, Y[:2]), ValueError, r"target: expected shape \[3\] .*got \[2\]"),
    "target a column": (lambda: rk.logprob(X, Y[:, None]), ValueError, r"target: expected shape \[3\] .*got \[3, 1\]"),
    "temperature short": (
        lambda: rk.logprob(X, Y, temperature=torch.ones(2)),
        ValueError,
        r"temperature: expected shape \[3\] .*got \[2\]",
    ),
    "temperature 0-d": (
        lambda: rk.logprob(X, Y, temperature=torch.tensor(0.5)),
        ValueError,
        r"temperature: expected a number, or an array of shape \[3\], one for each row; got an array of shape \[\]",
    ),
    "lse short": (lambda: rk.logprob_backward(X, Y, LSE[:2]), ValueError, r"lse: expected shape \[3\] .*got \[2\]"),
    "nine dimensions": (
        lambda: rk.logprob(X[:1].view(1, 1, 1, 1, 1, 1, 1, 1, 10), Y[:1].view(1, 1, 1, 1, 1, 1, 1, 1)),
        ValueError,
        "logits: expected at most 8 dimensions, got 9",
    ),
    "no columns": (
        lambda: rk.logprob(X[:, :0], Y),
        ValueError,
        r"logits: expected at least one column, got shape \[3, 0\]",
    ),
    "stats of three shards": (
        lambda: rk.logprob_merge(torch.zeros(3, 4, 5)),
        ValueError,
        r"stats: expected 1, 2, 4 or 8 shards .*got \[3, 4, 5\]",
    ),
    "stats of four fields": (
        lambda: rk.logprob_merge(torch.zeros(2, 4, 4)),
        ValueError,
        r"stats: expected .* \[shards, ..., 5\], got \[2, 4, 4\]",
    ),
    # Layouts.
    "column stride": (
        lambda: rk.logprob(X.t(), Y.new_zeros(10)),
        ValueError,
        "logits: expected a contiguous last dimension .*; make it contiguous: .*torch",
    ),
    "row strides that do not collapse": (
        lambda: rk.logprob(torch.zeros(2, 3, 4, 10).transpose(0, 2), Y.new_zeros(4, 3, 2)),
        ValueError,
        "logits: expected leading dimensions .*; make it contiguous",
    ),
    "temperature strided": (
        lambda: rk.logprob(X, Y, temperature=torch.ones(6)[::2]),
        ValueError,
        "temperature: expected a contiguous array; make it contiguous",
    ),
    "stats strided": (
        lambda: rk.logprob_merge(torch.zeros(2, 4, 10)[..., ::2]),
        ValueError,
        "stats: expected a contiguous array",
    ),
    # Numbers.
    **{
        f"temperature {t}": (
            lambda t=t: rk.logprob(X, Y, temperature=t),
            ValueError,
            f"temperature: expected a finite number > 0.*got {re.escape(repr(float(t)))}",
        )
        for t in (0, 0.0, -1, NAN, INF, -INF, 1e-45, 1e300)
    },
    "merge temperature 0": (
        lambda: rk.logprob_merge(torch.zeros(1, 3, 5), temperature=0),
        ValueError,
        "temperature: expected a finite number > 0",
    ),
    "temperature text": (
        lambda: rk.logprob(X, Y, temperature="hot"),
        TypeError,
        "temperature: expected a number, got str",
    ),
    "temperature None": (
        lambda: rk.logprob(X, Y, temperature=None),
        TypeError,
        "temperature: expected a number, got NoneType",
    ),
    **{
        f"logit_scale {s}": (
            lambda s=s: rk.logprob(X, Y, logit_scale=s),
            ValueError,
            "logit_scale: expected a finite number > 0, got ",
        )
        for s in (0.0, -1.0, NAN, INF, 1e-60)
    },
    "logit_scale text": (
        lambda: rk.logprob(X, Y, logit_scale="1"),
        TypeError,
        "logit_scale: expected a number, got str",
    ),
    "logit_scale None": (
        lambda: rk.logprob(X, Y, logit_scale=None),
        TypeError,
        "logit_scale: expected a number, got NoneType",
    ),
    **{
        f"softcap {s}": (
            lambda s=s: rk.logprob(X, Y, softcap=s),
            ValueError,
            "softcap: expected None or a finite number > 0, got ",
        )
        for s in (0.0, -1.0, NAN, INF)
    },
    "softcap text": (lambda: rk.logprob(X, Y, softcap="x"), TypeError, "softcap: expected a number, got str"),
    "ignore_index float": (
        lambda: rk.logprob(X, Y, ignore_index=-100.0),
        TypeError,
        "ignore_index: expected an integer, got float",
    ),
    "ignore_index None": (
        lambda: rk.logprob(X, Y, ignore_index=None),
        TypeError,
        "ignore_index: expected an integer, got NoneType",
    ),
    "ignore_index 2^63": (
        lambda: rk.logprob(X, Y, ignore_index=2**63),
        ValueError,
        "ignore_index: expected .* 64 bits",
    ),
    **{
        f"valid_vocab {v}": (
            lambda v=v: rk.logprob(X, Y, valid_vocab=v),
            ValueError,
            f"valid_vocab: expected 1 <= valid_vocab <= 10, got {v}",
        )
        for v in (0, -1, 11)
    },
    "valid_vocab negative, no rows": (
        lambda: rk.logprob(X[:0], Y[:0], valid_vocab=-1),
        ValueError,
        "valid_vocab: expected .* got -1",
    ),
    "valid_vocab float": (
        lambda: rk.logprob(X, Y, valid_vocab=5.0),
        TypeError,
        "valid_vocab: expected an integer, got float",
    ),
    "valid_vocab bool": (
        lambda: rk.logprob(X, Y, valid_vocab=True),
        TypeError,
        "valid_vocab: expected an integer, got bool",
    ),
    "valid_vocab 2^70": (lambda: rk.logprob(X, Y, valid_vocab=2**70), ValueError, "valid_vocab: expected .* 64 bits"),
    **{
        f"canonical_vocab {v}": (
            lambda v=v: rk.logprob(X, Y, canonical_vocab=v),
            ValueError,
            f"canonical_vocab: .*got {v}",
        )
        for v in (0, 9, -8, 2**63 - 1)
    },
    "exp unknown": (
        lambda: rk.logprob(X, Y, exp="fast"),
        ValueError,
        'exp: expected None, "hardware" or "portable", got .fast',
    ),
    "exp hardware on a CPU": (
        lambda: rk.logprob(X, Y, exp="hardware"),
        ValueError,
        'exp: "hardware" is not available on the CPU',
    ),
    "exp unknown, compiled": (
        lambda: torch.compile(lambda a, b: rk.logprob(a, b, exp="fast"), backend="eager")(X, Y),
        ValueError,
        "exp: expected None",
    ),
    "exp hardware on a CPU, compiled": (
        lambda: torch.compile(lambda a, b: rk.logprob(a, b, exp="hardware"), backend="eager")(X, Y),
        ValueError,
        'exp: "hardware" is not available on the CPU',
    ),
    "on_bad_id unknown": (
        lambda: rk.logprob(X, Y, on_bad_id="zero"),
        ValueError,
        'on_bad_id: expected "nan", "raise", got .zero',
    ),
    "arithmetic unknown": (
        lambda: rk.arithmetic("sm_70"),  # the error comes at the call, not on entering
        ValueError,
        'unit: expected "ieee".* got .sm_70',
    ),
    # Kept sets.
    "kept a tensor": (
        lambda: rk.logprob(X, Y, kept=IDS),
        TypeError,
        r"kept: expected None or \(ids, offsets\), got Tensor",
    ),
    "kept of three": (
        lambda: rk.logprob(X, Y, kept=(IDS, OFFSETS, IDS)),
        TypeError,
        r"kept: expected None or \(ids, offsets\)",
    ),
    "kept without offsets": (lambda: rk.logprob(X, Y, kept=(IDS, None)), TypeError, "kept"),
    "kept without ids": (lambda: rk.logprob(X, Y, kept=(None, OFFSETS)), TypeError, "kept ids: expected an array"),
    "kept ids int64": (
        lambda: rk.logprob(X, Y, kept=(IDS.long(), OFFSETS)),
        TypeError,
        "kept ids: expected dtype int32, got int64",
    ),
    "kept offsets int32": (
        lambda: rk.logprob(X, Y, kept=(IDS, OFFSETS.int())),
        TypeError,
        "kept offsets: expected dtype int64, got int32",
    ),
    "kept offsets short": (
        lambda: rk.logprob(X, Y, kept=(IDS, OFFSETS[:3])),
        ValueError,
        r"kept offsets: expected .*\[4\] \(rows \+ 1\), got \[3\]",
    ),
    "kept ids 2-d": (
        lambda: rk.logprob(X, Y, kept=(IDS[None], OFFSETS)),
        ValueError,
        r"kept ids: expected .*got \[1, 2\]",
    ),
    # Shards.
    "shard off the cuts": (
        lambda: rk.logprob_partial(X, Y, vocab_start=3, vocab_size=100),
        ValueError,
        r"vocab_start: expected a shard of whole parts .* got \[3, 13\); pad the vocabulary to a multiple of 64 .*128",
    ),
    "shard of sixteen": (
        lambda: rk.logprob_partial(X[:, :8], Y, vocab_start=8, vocab_size=128),
        ValueError,
        r"vocab_start: .* 128 columns \(it has eight parts, so 1, 2, 4 or 8 equal shards\), got \[8, 16\)$",
    ),
    "shard before the row": (
        lambda: rk.logprob_partial(X, Y, vocab_start=-1, vocab_size=100),
        ValueError,
        "vocab_start, vocab_size: .*got vocab_start -1",
    ),
    "shard past the row": (
        lambda: rk.logprob_partial(X, Y, vocab_start=0, vocab_size=5),
        ValueError,
        "vocab_start, vocab_size: .*vocab_size 5",
    ),
    "vocab_start text": (
        lambda: rk.logprob_partial(X, Y, vocab_start="0", vocab_size=10),
        TypeError,
        "vocab_start: expected an integer, got str",
    ),
    # Outputs.
    "out of another shape": (
        lambda: rk.logprob(X, Y, out=torch.empty(4)),
        ValueError,
        r"out\.logprob: expected shape \[3\] .*got \[4\]",
    ),
    "out float64": (
        lambda: rk.logprob(X, Y, out=torch.empty(3).double()),
        TypeError,
        "logprob: expected dtype float32, got float64",
    ),
    "status out float32": (
        lambda: rk.logprob(X, Y, return_status=True, out=(None,) * 4 + (torch.empty(3),)),
        TypeError,
        "status: expected dtype int32, got float32",
    ),
    "out strided": (
        lambda: rk.logprob(X, Y, out=torch.empty(6)[::2]),
        ValueError,
        "logprob: expected a contiguous array",
    ),
    "out expanded": (
        lambda: rk.logprob(X, Y, out=torch.empty(1).expand(3)),
        ValueError,
        "logprob: expected a contiguous array",
    ),
    "out in logits": (
        lambda: (x := X.clone(), rk.logprob(x, Y, out=x[1, :3])),
        ValueError,
        "logprob: may share memory with logits",
    ),
    "out in target": (
        lambda: (y := Y.int(), rk.logprob(X, y, out=y.view(torch.float32))),
        ValueError,
        "logprob: may share memory with target",
    ),
    "out in temperature": (
        lambda: (t := torch.ones(3), rk.logprob(X, Y, temperature=t, out=t)),
        ValueError,
        "logprob: may share memory with temperature",
    ),
    "one out twice": (
        lambda: (o := torch.empty(3), rk.logprob(X, Y, return_lse=True, out=(o, o))),
        ValueError,
        r"out\.lse: may share memory with out\.logprob",
    ),
    "outs that overlap": (
        lambda: (o := torch.empty(5), rk.logprob(X, Y, return_lse=True, out=(o[:3], o[2:]))),
        ValueError,
        "lse: may share memory with",
    ),
    "out for what is not asked": (lambda: rk.logprob(X, Y, out=(LSE.clone(), LSE.clone())), ValueError, "out: .*lse"),
    "six outs": (lambda: rk.logprob(X, Y, out=(None,) * 6), ValueError, "out: expected at most 5"),
    "out a list of numbers": (
        lambda: rk.logprob(X, Y, out=[1.0]),
        TypeError,
        "logprob: expected an array .* got float",
    ),
    "out of NumPy for torch": (
        lambda: rk.logprob(X, Y, out=np.empty(3, np.float32)),
        TypeError,
        "logprob: expected .* got ndarray",
    ),
    "out that requires grad": (
        lambda: rk.logprob(X, Y, out=torch.empty(3, requires_grad=True)),
        ValueError,
        "out: cannot be given where a gradient",
    ),
    "out with a gradient wanted": (
        lambda: rk.logprob(X.clone().requires_grad_(), Y, out=torch.empty(3)),
        ValueError,
        "out: cannot be given where a gradient",
    ),
    "out with a negative bit": (
        lambda: rk.logprob(X, Y, out=torch._neg_view(torch.empty(3))),
        (TypeError, ValueError),
        "logprob|out",
    ),
    "dlogits float64": (
        lambda: rk.logprob_backward(X, Y, LSE, out=X.double()),
        TypeError,
        "out: expected dtype float32.*got float64",
    ),
    "dlogits of another shape": (
        lambda: rk.logprob_backward(X, Y, LSE, out=torch.empty(3, 9)),
        ValueError,
        r"out: expected shape \[3, 10\], got \[3, 9\]",
    ),
    "dlogits expanded": (
        lambda: rk.logprob_backward(X, Y, LSE, out=torch.empty(1, 10).expand(3, 10)),
        ValueError,
        "out: expected strides that do not",
    ),
    "dlogits by columns": (
        lambda: rk.logprob_backward(X, Y, LSE, out=torch.empty(10, 3).t()),
        ValueError,
        "out: expected a contiguous last dimension",
    ),
    "dlogits half over logits": (
        lambda: (m := torch.zeros(40), rk.logprob_backward(m[:30].view(3, 10), Y, LSE, out=m[5:35].view(3, 10))),
        ValueError,
        "out: overlaps logits without being logits itself",
    ),
    "dlogits over lse": (
        lambda: (m := torch.zeros(30), rk.logprob_backward(X, Y, m[:3], dlogprob=LSE, out=m.view(3, 10))),
        ValueError,
        "out: .*lse",
    ),
    "dlogits over dlogprob": (
        lambda: (m := torch.zeros(30), rk.logprob_backward(X, Y, LSE, dlogprob=m[:3], out=m.view(3, 10))),
        ValueError,
        "out: .*dlogprob",
    ),
    # Inputs that have no gradient.
    "gradient of temperature": (
        lambda: rk.logprob(X, Y, temperature=torch.ones(3, requires_grad=True)),
        ValueError,
        "temperature: has no gradient here",
    ),
    "gradient of a shard": (
        lambda: rk.logprob_partial(X.clone().requires_grad_(), Y, vocab_start=0, vocab_size=10),
        ValueError,
        "logits: logprob_partial has no autograd",
    ),
    "dentropy without entropy": (
        lambda: rk.logprob_backward(X, Y, LSE, dentropy=LSE),
        TypeError,
        "entropy: expected the entropy",
    ),
    # Tensors without memory of their own, and tensors whose memory does not hold their elements as a strided array.
    "logits a DTensor": (
        lambda: rk.logprob(DTensor(X), Y),
        TypeError,
        "logits: expected a local tensor, got a DTensor; pass .*to_local",
    ),
    "shard a DTensor": (
        lambda: rk.logprob_partial(DTensor(X), Y, vocab_start=0, vocab_size=10),
        TypeError,
        "expected a local tensor, got a DTensor",
    ),
    "logits a wrapper": (lambda: rk.logprob(Wrapper(X), Y), (TypeError, NotImplementedError), "Wrapper"),
    "logits freed": (
        lambda: (x := X.clone(), x.untyped_storage().resize_(0), rk.logprob(x, Y)),
        ValueError,
        "logits: has no memory",
    ),
    **{  # a subclass may refuse with its own message
        f"{what} {kind.__name__}": (call, (TypeError, ValueError, NotImplementedError), f"{name}: |does not do")
        for kind in (fake, Wrapper, DTensor, sparse)
        for what, name, call in (
            ("target", "target", lambda k=kind: rk.logprob(X, k(Y))),
            ("temperature", "temperature", lambda k=kind: rk.logprob(X, Y, temperature=k(torch.ones(3)))),
            ("out", "logprob", lambda k=kind: rk.logprob(X, Y, out=k(torch.empty(3)))),
            ("dlogprob", "dlogprob", lambda k=kind: rk.logprob_backward(X, Y, LSE, dlogprob=k(torch.ones(3)))),
        )
    },
    "logits sparse": (lambda: rk.logprob(sparse(X), Y), (TypeError, ValueError), "logits"),
    "logits mkldnn": (lambda: rk.logprob(X.to_mkldnn(), Y), (TypeError, ValueError), "logits"),
    "target meta": (lambda: rk.logprob(X, Y.to("meta")), (TypeError, ValueError), "target"),
    "temperature meta": (
        lambda: rk.logprob(X, Y, temperature=torch.ones(3, device="meta")),
        (TypeError, ValueError),
        "temperature",
    ),
    "out meta": (lambda: rk.logprob(X, Y, out=torch.empty(3, device="meta")), (TypeError, ValueError), "logprob|out"),
    "logits meta, float64": (
        lambda: rk.logprob(X.double().to("meta"), Y.to("meta")),
        TypeError,
        "logits: expected dtype",
    ),
    "logits meta, target short": (
        lambda: rk.logprob(X.to("meta"), Y[:2].to("meta")),
        ValueError,
        r"target: expected shape \[3\] \(logits without the last dimension\), got \[2\]",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_bad_argument_is_a_typed_error_that_names_it(case: str) -> None:
    call, error, words = CASES[case]
    with pytest.raises(error, match=words):
        call()


# ---- valid calls that look wrong ------------------------------------------------------------------------------------

NEGATED: dict[str, Any] = {
    "logits": lambda n: rk.logprob(n(-X), Y),
    "target": lambda n: rk.logprob(X, n(-Y)),
    "temperature": lambda n: rk.logprob(X, Y, temperature=n(torch.tensor([-0.5, -0.7, -0.9]))),
    "kept ids": lambda n: rk.logprob(X, Y, kept=(n(-IDS), OFFSETS)),
    "dlogprob": lambda n: rk.logprob_backward(X, Y, LSE, dlogprob=n(torch.tensor([-1.0, 2.0, 3.0]))),
    "lse": lambda n: rk.logprob_backward(X, Y, n(-LSE), dlogprob=torch.ones(3)),
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
        rk.logprob(x, Y).backward(make(torch.tensor([1.0, 2.0, 3.0])))
        grads.append(x.grad)
    assert raw(grads[0]) == raw(grads[1])


def test_numbers_of_numpy_are_numbers() -> None:
    want = rk.logprob(X, Y, temperature=0.5)
    for logits, target in ((X, Y), (X.numpy(), Y.numpy())):
        for number in (np.float32(0.5), np.float64(0.5)):
            assert raw(rk.logprob(logits, target, temperature=number, logit_scale=np.float32(1))) == raw(want)


def test_read_only_inputs_are_fine() -> None:
    x, y = X.numpy().copy(), Y.numpy().copy()
    x.flags.writeable = y.flags.writeable = False
    assert raw(rk.logprob(x, y)) == raw(rk.logprob(X, Y))


# ---- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad_id", [-1, -99, -101, 10, 11, 2**31 - 1, -(2**31), 2**62, -(2**63)])
def test_an_id_out_of_range_is_nan_and_a_status_and_the_next_call_works(bad_id: int, device: str) -> None:
    x = X.to(device)
    for dtype in (torch.int32, torch.int64):
        if dtype == torch.int32 and abs(bad_id) > 2**31:
            continue
        result = rk.logprob(x, torch.tensor([1, bad_id, 3], dtype=dtype, device=device), **ALL)
        assert result.status.tolist() == [0, Status.BAD_TARGET, 0]
        assert torch.isnan(result.logprob).tolist() == [False, True, False]
        assert not bool(torch.isnan(rk.logprob(x, Y.to(device))).any())


def test_an_id_in_the_padding_is_out_of_range(device: str) -> None:
    result = rk.logprob(X.to(device), torch.tensor([8, 7, 9], device=device), valid_vocab=8, **ALL)
    assert result.status.tolist() == [1, 0, 1]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_check_names_the_first_bad_row_and_why(requires_grad: bool, device: str) -> None:
    x = X.to(device).clone()
    y = torch.tensor([1, 10, -7], device=device)
    dirty = x.clone()
    dirty[2, 4] = NAN
    x.requires_grad_(requires_grad)
    wanted = r"row 1 \(the first of 2 bad rows\): target: expected an id in \[0, valid_vocab\) or ignore_index, got 10$"
    with pytest.raises(ValueError, match=wanted):
        rk.logprob(x, y, check=True)
    with pytest.raises(ValueError, match=r"row 1 .*first of 2"):
        rk.logprob(x, y, on_bad_id="raise")
    with pytest.raises(ValueError, match=r"row 2 .*first of 1 bad rows.*: logits: a NaN"):
        rk.logprob(dirty, Y.to(device), check=True)
    assert bool(torch.isnan(rk.logprob(dirty, Y.to(device), on_bad_id="raise")[2])), "that asks about ids alone"
    with pytest.raises(ValueError, match=r"row 1 .*: temperature: expected a finite number > 0"):
        rk.logprob(x, Y.to(device), temperature=torch.tensor([1.0, 0.0, 1.0], device=device), check=True)
    with pytest.raises(ValueError, match=r"row 0 .*: logits: .* / temperature \* log2\(e\) reached 2\^21.*tiny"):
        rk.logprob(x[:, 1:], Y.to(device), temperature=1e-9, check=True)
    with pytest.raises(ValueError, match=r"row 0 .*: logits: every valid column is -Inf, or its .* -2\^21 or less"):
        rk.logprob(-x[:, 1:], Y.to(device), temperature=1e-9, check=True)
    kept = (torch.tensor([99], dtype=torch.int32, device=device), torch.tensor([0, 0, 1, 1], device=device))
    with pytest.raises(ValueError, match=r"row 1 .*: kept: an id outside"):
        rk.logprob(x, Y.to(device), kept=kept, check=True)
    masked = x.detach().clone()
    masked[0, 1] = -INF
    assert float(rk.logprob(masked, Y.to(device), check=True)[0]) == -INF, "a masked label is no error"


SECOND_DERIVATIVES = """
import sys, torch, rl_kernel_native as rk
device = sys.argv[1]
x = torch.randn(3, 10, device=device).requires_grad_()
value = rk.logprob(x, torch.tensor([1, 99, -100], device=device))
(first,) = torch.autograd.grad(value.sum(), x, create_graph=True)
assert torch.isnan(first).any(1).tolist() == [False, True, False]
first[[0, 2]].square().sum().backward()
assert bool(torch.isfinite(x.grad[[0, 2]]).all())
bad = torch.tensor([1, 99, -7], device=device)
tangent = torch.func.jvp(lambda z: rk.logprob(z, bad), (x.detach(),), (torch.ones_like(x),))[1]
assert torch.isfinite(tangent).tolist() == [True, False, False]
"""


def test_a_bad_row_in_a_second_derivative_is_no_crash(device: str) -> None:
    """On a GPU, an index out of range inside torch's own operators kills the context, so this test runs in a separate
    process."""
    done = subprocess.run(
        [sys.executable, "-c", SECOND_DERIVATIVES, device], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["target", "temperature", "kept ids", "kept offsets", "out"])
def test_mixed_devices_are_an_error_that_names_both(argument: str) -> None:
    for here, there in (("cpu", "cuda:0"), ("cuda:0", "cpu")):
        at = dict.fromkeys(("target", "temperature", "kept ids", "kept offsets", "out"), here) | {argument: there}
        with pytest.raises(ValueError, match=rf"expected device {here} \(that of logits\), got {there}"):
            rk.logprob(
                X.to(here),
                Y.to(at["target"]),
                temperature=torch.ones(3, device=at["temperature"]),
                kept=(IDS.to(at["kept ids"]), OFFSETS.to(at["kept offsets"])),
                out=torch.empty(3, device=at["out"]),
            )


@pytest.mark.parametrize(
    ("flag", "call"),
    [
        ("causal", lambda value: rk.attention(*[torch.ones(1, 2, 1, 8)] * 3, causal=value)),
        (
            "interleaved",
            lambda value: rk.rope(*[torch.ones(1, 2, 1, 8)] * 2, *[torch.ones(1, 2, 4)] * 2, interleaved=value),
        ),
        ("round_before_weight", lambda value: rk.rms_norm(X, X[0], 1e-6, round_before_weight=value)),
        ("round_before_mul", lambda value: rk.silu_mul(X, round_before_mul=value)),
    ],
)
def test_a_flag_of_a_row_operator_is_a_bool(flag: str, call: Any) -> None:
    call(np.True_)
    with pytest.raises(TypeError, match=f"{flag}: expected a bool, got str"):
        call("False")
