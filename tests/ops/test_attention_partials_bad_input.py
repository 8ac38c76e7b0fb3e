"""Bad input of attention's partials and merges gives an error of the right type, whose message names the argument, the
expected value and the given one. A traced call gives the same error."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch", reason="bad inputs are torch's")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from attention_cases import moved  # noqa: E402

SINKS = torch.zeros(4)

Q, K = torch.ones(2, 3, 4, 16), torch.ones(2, 3000, 2, 16)
USED = torch.tensor([3000, 20], dtype=torch.int32)
STATS, SUMS = torch.zeros(2, 3, 4, 2), torch.zeros(2, 3, 4, 16)
HALF = {"k": K[:, :1024], "v": K[:, :1024], "seqused_k": USED}
PAGES = {"k": K[:, :1024].reshape(2, 1024, 2, 16), "v": K[:, :1024].reshape(2, 1024, 2, 16)}
TABLE = torch.tensor([[0], [1]], dtype=torch.int32)

# Maps a name to (arguments besides q, k, v, return_partials; error; pattern of its message).
CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no integers": ({"splits": [0.5]}, TypeError, "splits: expected an integer, got float"),
    "a text": ({"splits": "01"}, TypeError, "splits: expected a sequence of integers, got str"),
    "a number": ({"splits": 1}, TypeError, "splits: expected a sequence of integers, got int"),
    "a tensor": ({"splits": TABLE[0]}, TypeError, "splits: expected a sequence of integers, got (Fake)?Tensor"),
    "a set": ({**HALF, "splits": {0}}, TypeError, "splits: expected a sequence of integers, got set"),
    "keys of a dict": ({**HALF, "splits": {0: 1}}, TypeError, "splits: expected a sequence of integers, got dict"),
    "a generator": (
        {**HALF, "splits": (i for i in (0,))},
        TypeError,
        "splits: expected a sequence of integers, got generator",
    ),
    "descending": (
        {**HALF, "splits": [1, 0]},
        ValueError,
        r"splits: expected ascending numbers in \[0, 524308\), got 0 at \[1\]",
    ),
    "twice": ({**HALF, "splits": [1, 1]}, ValueError, r"splits: expected ascending .* got 1 at \[1\]"),
    "below 0": ({**HALF, "splits": [-1]}, ValueError, r"splits: expected ascending .* got -1 at \[0\]"),
    "out of range": ({**HALF, "splits": [524308]}, ValueError, r"splits: .* in \[0, 524308\), got 524308 at \[0\]"),
    "no lengths": ({"splits": [0]}, ValueError, "seqused_k: expected the keys of each whole sequence beside splits"),
    "a shared prefix": (
        {
            **PAGES,
            "seqused_k": USED,
            "splits": [0],
            "block_table": TABLE,
            "shared_prefix": (TABLE[:1], USED[1:], torch.tensor([0, 2])),
        },
        ValueError,
        "shared_prefix: expected None beside splits",
    ),
    "places for fewer keys": (
        {**HALF, "splits": [0, 1]},
        ValueError,
        "seqused_k: expected numbers whose keys of splits up to 1 fit the 1024 places of k, got 3000 for sequence 0",
    ),
    "fewer keys behind a gap": (
        {**HALF, "splits": [0, 2]},
        ValueError,
        "seqused_k: expected numbers whose keys of splits up to 2 fit the 1024 places of k, got 3000 for sequence 0",
    ),
    "keys below 0": (
        {**HALF, "seqused_k": -USED, "splits": [0]},
        ValueError,
        r"seqused_k: expected numbers in \[0, 2147483647\]",
    ),
    "too few for a call of all": (
        {"seqused_k": 2 * USED},
        ValueError,
        "splits up to 2 fit the 3000 places of k, got 6000 for sequence 0",
    ),
    "sinks": (
        {"sinks": SINKS},
        ValueError,
        "sinks: expected None beside return_partials; give them to attention_merge",
    ),
    "a tree": (
        {
            "q": Q.flatten(0, 1),
            "k": Q.flatten(0, 1),
            "v": Q.flatten(0, 1),
            "tree": (torch.tensor([0, 6]), TABLE[0] - 1),
        },
        ValueError,
        "tree: expected None beside return_partials",
    ),
    "lse": ({"return_lse": True}, ValueError, "return_lse: expected False beside return_partials"),
    "no partials": (
        {"return_partials": False, "splits": [0]},
        ValueError,
        "splits: expected None without return_partials, got list",
    ),
    "a number, no partials": ({"return_partials": False, "splits": 0}, ValueError, "without return_partials, got int"),
    "a flag": ({"return_partials": 1}, TypeError, "return_partials: expected a bool, got int"),
    "a gradient": (
        {"q": Q.clone().requires_grad_()},
        ValueError,
        "q: requires a gradient, and partials have none; .*no_g",
    ),
    "of v": ({"v": K.clone().requires_grad_()}, ValueError, "v: requires a gradient"),
    "dtype of k": ({"k": K.half()}, TypeError, r"k: expected dtype float32 \(that of q\), got float16"),
    "rank of q": ({"q": Q[0]}, ValueError, r"q: expected shape \[batch, .*\], or packed"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "fake"])
def test_bad_input_of_partials(name: str, traced: bool) -> None:
    change, error, words = CALLS[name]
    given = {"q": Q, "k": K, "v": K, "return_partials": True, **change}
    of_lists = ("places", "keys b", "fewer keys", "too few")  # errors that need values, which a fake tensor lacks
    if traced and name.startswith(of_lists):
        pytest.skip("fake tensors have no values")
    with FakeTensorMode() if traced else contextlib.nullcontext() as fake:
        arrays = moved(fake.from_tensor, given) if traced else given
        with pytest.raises(error, match=words):
            rk.attention(**arrays)


def merge(stats: Any = STATS, sums: Any = SUMS, splits: Any = (0, 1), **more: Any) -> Any:
    return rk.attention_merge(rk.AttentionPartials(stats, sums, splits), **{"out_dtype": "float32", **more})


def approximate(outs: Any, lses: Any) -> Any:
    return rk.attention_merge_approximate(outs, lses)


MERGES: dict[str, tuple[Any, type[Exception], str]] = {
    "no partials": (
        lambda to: rk.attention_merge([to(STATS), to(SUMS)], out_dtype="float32"),
        TypeError,
        "partials: expected AttentionPartials, got list",
    ),
    "dtype of stats": (
        lambda to: merge(to(STATS).half(), to(SUMS)),
        TypeError,
        "stats: expected dtype float32, got float16",
    ),
    "dtype of sums": (
        lambda to: merge(to(STATS), to(SUMS).double()),
        TypeError,
        "sums: expected .*float32.*, got float64",
    ),
    "rank": (
        lambda to: merge(to(STATS)[0], to(SUMS)[0]),
        ValueError,
        r"sums: expected shape \[splits, batch, tokens, .*got \[3",
    ),
    "other rows": (
        lambda to: merge(to(STATS)[:, :2], to(SUMS)),
        ValueError,
        r"stats: expected shape \[2, 3, 4, 2\] \(m and l of each row of sums\), got \[2, 2, 4, 2\]",
    ),
    "other splits": (lambda to: merge(to(STATS)[:1], to(SUMS)), ValueError, r"stats: expected shape \[2, 3, 4, 2\]"),
    "head_dim": (
        lambda to: merge(to(STATS), to(SUMS)[..., :12].contiguous()),
        ValueError,
        r"sums: .*multiple of 8 in \[8, 256\]",
    ),
    "strides": (
        lambda to: merge(to(STATS), to(SUMS).transpose(1, 2).contiguous().transpose(1, 2)),
        ValueError,
        "sums: expected a contiguous array",
    ),
    "too many": (
        lambda to: merge(to(torch.zeros(1025, 1, 1, 2)), to(torch.zeros(1025, 1, 1, 8)), range(1025)),
        ValueError,
        "sums: expected at most 1024 splits",
    ),
    "fewer numbers": (lambda to: merge(to(STATS), to(SUMS), (0,)), ValueError, "splits: expected 2 numbers .* got 1"),
    "a number twice": (
        lambda to: merge(to(STATS), to(SUMS), (3, 3)),
        ValueError,
        "splits: expected each number once, got 3 twice",
    ),
    "a set": (
        lambda to: merge(to(STATS), to(SUMS), {1, 0}),
        TypeError,
        "splits: expected a sequence of integers, got set",
    ),
    "below 0": (
        lambda to: merge(to(STATS), to(SUMS), (-1, 0)),
        ValueError,
        r"splits: expected numbers in \[0, 524308\), got -1 at \[0\]",
    ),
    "out of range": (
        lambda to: merge(to(STATS), to(SUMS), (0, 524308)),
        ValueError,
        r"splits: expected numbers in \[0, 524308\), got 524308 at \[1\]",
    ),
    "a text": (
        lambda to: merge(to(STATS), to(SUMS), "01"),
        TypeError,
        "splits: expected a sequence of integers, got str",
    ),
    "no number": (
        lambda to: merge(to(STATS), to(SUMS), (0, None)),
        TypeError,
        "splits: expected an integer, got NoneType",
    ),
    "out_dtype": (
        lambda to: merge(to(STATS), to(SUMS), out_dtype="float64"),
        TypeError,
        "out_dtype: expected float32, bfloat16 or",
    ),
    "sinks": (
        lambda to: merge(to(STATS), to(SUMS), sinks=to(torch.zeros(3))),
        ValueError,
        r"sinks: expected shape \[4\] \(the heads of sums\), got \[3\]",
    ),
    "dtype of sinks": (
        lambda to: merge(to(STATS), to(SUMS), sinks=to(torch.zeros(4).half())),
        TypeError,
        "sinks: expected dtype float32",
    ),
    "a flag": (lambda to: merge(to(STATS), to(SUMS), return_lse=1), TypeError, "return_lse: expected a bool, got int"),
    "a mode": (
        lambda to: merge(to(STATS), to(SUMS), exp="fast"),
        ValueError,
        'exp: expected None, "hardware" or "portable"',
    ),
    "a gradient": (
        lambda to: merge(to(STATS), to(SUMS).requires_grad_()),
        ValueError,
        r"sums: requires a gradient.*sums.detach\(\)",
    ),
    "of sinks": (
        lambda to: merge(to(STATS), to(SUMS), sinks=to(SINKS).requires_grad_()),
        ValueError,
        "sinks: requires a gradient",
    ),
    "dtype of outs": (
        lambda to: approximate(to(SUMS).double(), to(torch.zeros(2, 4, 3))),
        TypeError,
        "outs: expected dtype float32, bfloat16 or float16",
    ),
    "lses as stats": (
        lambda to: approximate(to(SUMS), to(torch.zeros(2, 3, 4))),
        ValueError,
        r"lses: expected shape \[2, 4, 3\] \(a number for each row of outs, heads in front",
    ),
    "dtype of lses": (
        lambda to: approximate(to(SUMS), to(torch.zeros(2, 4, 3).half())),
        TypeError,
        "lses: expected dtype float32",
    ),
    "a gradient of outs": (
        lambda to: approximate(to(SUMS).requires_grad_(), to(torch.zeros(2, 4, 3))),
        ValueError,
        "outs: requires a gradient",
    ),
}


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "fake"])
def test_bad_input_of_merges(name: str, traced: bool) -> None:
    call, error, words = MERGES[name]
    with FakeTensorMode() if traced else contextlib.nullcontext() as fake:
        put = fake.from_tensor if traced else torch.clone
        with pytest.raises(error, match=words):
            call(put)


TANGENTS: dict[str, tuple[Any, Any, str]] = {
    "q": (lambda x: rk.attention(x, K, K, return_partials=True)[1], Q, "q: has a tangent, and partials have none"),
    "k": (lambda x: rk.attention(Q, x, K, return_partials=True)[1], K, "k: has a tangent, and partials have none"),
    "sums": (lambda x: merge(sums=x), SUMS, r"sums: has a tangent, and a merge has none; .* pass sums.detach\(\)"),
    "sinks": (lambda x: merge(sinks=x), SINKS, "sinks: has a tangent, and a merge has none"),
    "outs": (lambda x: approximate(x, torch.zeros(2, 4, 3)), SUMS, "outs: has a tangent, and a merge has none"),
}


@pytest.mark.parametrize("name", TANGENTS)
def test_tangents_are_refused_as_gradients_are(name: str) -> None:
    function, x, words = TANGENTS[name]
    with pytest.raises(ValueError, match=words):
        torch.func.jvp(function, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(ValueError, match=words):
            function(dual)


@pytest.mark.parametrize("name", TANGENTS)
def test_a_compiled_function_refuses_a_gradient_that_torch_func_asks_for(name: str) -> None:
    function, x, _ = TANGENTS[name]
    torch.compiler.reset()
    compiled = torch.compile(torch.func.grad(lambda given: function(given).sum()), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="requires a gradient"):
        compiled(x)
