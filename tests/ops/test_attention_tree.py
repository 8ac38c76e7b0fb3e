"""attention over trees of segments: the bytes of each path as its own sequence, the rule for keys that several
segments see, torch, and bad input."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing, mode
from rl_kernel_native.contract import row

torch = pytest.importorskip("torch", reason="calls are made with torch")

from attention_cases import DTYPES, moved, results  # noqa: E402

OPTIONS: list[dict[str, Any]] = [{}, {"window_size": 40}, {"softcap": 1.5, "softmax_scale": 0.3}]


class Tree:
    """Random operands of segments with the given numbers of tokens; each segment lies after its parent."""

    def __init__(
        self, rng: np.random.Generator, lengths: list[int], parents: list[int], heads: tuple[int, int] = (4, 2),
        head_dim: int = 32, dtype: str = "bfloat16", device: str = "cpu",
    ) -> None:  # fmt: skip
        def normal(count: int) -> Any:
            values = rng.standard_normal((sum(lengths), count, head_dim), dtype=np.float32)
            return torch.from_numpy(values).to(getattr(torch, dtype)).to(device)

        self.lengths, self.of, self.device = lengths, parents, device
        self.q, self.k, self.v, self.dout = (normal(heads[i]) for i in (0, 1, 1, 0))
        self.cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
        self.parents = torch.tensor(parents, dtype=torch.int32, device=device)

    @property
    def arrays(self) -> tuple[Any, Any, Any, Any]:
        return self.q, self.k, self.v, self.dout

    @property
    def lists(self) -> dict[str, Any]:
        return {"tree": (self.cu, self.parents)}

    def path(self, segment: int) -> list[int]:
        above = [] if self.of[segment] < 0 else self.path(self.of[segment])
        return [*above, segment]

    def tokens(self, segment: int) -> Any:
        """The tokens of a path, in order."""
        cu = self.cu.tolist()
        return torch.cat([torch.arange(cu[s], cu[s + 1], device=self.device) for s in self.path(segment)])

    def own(self, segment: int) -> slice:
        return slice(*self.cu[segment : segment + 2].tolist())

    def is_leaf(self, segment: int) -> bool:
        return segment not in self.of


def random_tree(rng: np.random.Generator, segments: int = 14, **options: Any) -> Tree:
    """Several roots; segments that are empty, of one token, and longer than a block; branch points inside blocks."""
    lengths = [int(n) for n in rng.choice([0, 1, 1, 7, 30, 61, 129, 150], segments)]
    parents = [-1, *(int(rng.integers(-1 if s % 5 == 4 else 0, s)) for s in range(1, segments))]
    return Tree(rng, lengths, parents, **options)


def offsets_of(count: int, device: str) -> Any:
    return torch.tensor([0, count], dtype=torch.int32, device=device)


def path_results(
    tree: Tree, segment: int, got: dict[str, Any], device: str, exp: str, **options: Any
) -> dict[str, Any]:
    """The unshared call: a path as one packed sequence, whose gradients use the tree's out and lse."""
    at = tree.tokens(segment)
    cu = offsets_of(len(at), device)
    lists = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    q, k, v, dout = (t[at] for t in tree.arrays)
    with mode(device, exp):
        out, lse = rk.attention(q, k, v, **lists, **options, exp=exp, return_lse=True)
        given = (dout, q, k, v, got["out"][at], got["lse"][:, at].contiguous())
        grads = rk.attention_backward(*given, **lists, **options, exp=exp)
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=False))}


def assert_rows_of_paths(tree: Tree, device: str, exp: str, **options: Any) -> None:
    got = results((tree.arrays, tree.lists), device=device, exp=exp, **options)
    seen = 0
    for segment, length in enumerate(tree.lengths):
        if length == 0:
            continue
        want = path_results(tree, segment, got, device, exp, **options)
        own, here = tree.own(segment), slice(len(want["out"]) - length, None)
        names = ("out", "lse", "dq", "dk", "dv") if tree.is_leaf(segment) else ("out", "lse", "dq")
        for name in names:
            mine, theirs = (
                (got[name][:, own], want[name][:, here]) if name == "lse" else (got[name][own], want[name][here])
            )
            found = differing(mine.contiguous(), theirs.contiguous())
            assert not found, f"segment {segment} of {tree.lengths}, {tree.of}, {name}: {found}"
        seen += length
    assert seen == len(tree.q)


# ---- the same bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_leaves_have_the_bytes_of_the_path_alone(
    dtype: str, options: dict[str, Any], device: str, exp: str, rng: np.random.Generator
) -> None:
    for _ in range(3 if exp == "portable" else 1):  # the matrix unit's model is slow
        assert_rows_of_paths(random_tree(rng, dtype=dtype, device=device), device, exp, **options)


@pytest.mark.parametrize(("heads", "head_dim"), [((3, 3), 8), ((6, 1), 72), ((2, 2), 256)])
def test_other_heads(heads: tuple[int, int], head_dim: int, device: str, exp: str, rng: np.random.Generator) -> None:
    """Ungrouped heads, one key head, and blocks of 64 keys; sinks join every row."""
    tree = random_tree(rng, 8, heads=heads, head_dim=head_dim, device=device)
    sinks = torch.linspace(-2, 3, heads[0], device=device)
    assert_rows_of_paths(tree, device, exp, sinks=sinks)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_segments(head_dim: int, device: str, exp: str, rng: np.random.Generator) -> None:
    """Four segments have more than 64 tokens, enough for wgmma on a GPU. Paths branch inside and at the end of blocks
    of 128 keys, and inside and at the end of eight keys."""
    tree = Tree(rng, [203, 149, 0, 128, 61, 65, 53], [-1, 0, 0, 1, 0, -1, 5], (2, 1), head_dim, device=device)
    assert_rows_of_paths(tree, device, exp)


@pytest.mark.parametrize("window", [None, 1100])
def test_paths_of_several_splits(window: int | None, device: str, exp: str, rng: np.random.Generator) -> None:
    """Splits end at keys 1024 and 2048 of a path: inside a segment, at a branch point, and before a single token."""
    lengths, parents = [1000, 24, 30, 1100, 1, 130], [-1, 0, 0, 1, 3, 2]
    tree = Tree(rng, lengths, parents, (2, 1), 16, "bfloat16", device)
    assert_rows_of_paths(tree, device, exp, window_size=window)


def test_siblings_and_their_order_move_no_row(device: str, exp: str, rng: np.random.Generator) -> None:
    """The answers of a group, each alone with its prompt, or all after the prompt in any order."""
    tree = Tree(rng, [70, 50, 90, 20], [-1, 0, 0, 0], device=device)
    got = results((tree.arrays, tree.lists), device=device, exp=exp)
    order = [0, 3, 1, 2]
    cu = torch.tensor([0, *np.cumsum([tree.lengths[s] for s in order])], dtype=torch.int32, device=device)
    at = torch.cat([torch.arange(len(tree.q), device=device)[tree.own(s)] for s in order])
    moved_call = tuple(t[at] for t in tree.arrays), {"tree": (cu, tree.parents)}
    other = results(moved_call, device=device, exp=exp)
    for name in ("out", "dq"):
        assert not differing(other[name], got[name][at]), name
    assert not differing(other["lse"], got["lse"][:, at].contiguous())


def test_roots_alone_are_packed_sequences(device: str, exp: str, rng: np.random.Generator) -> None:
    """Compares every output, the gradients of keys and of sinks included."""
    tree = Tree(rng, [70, 0, 129, 1], [-1] * 4, device=device)
    sinks = torch.linspace(-2, 3, 4, device=device)
    got = results((tree.arrays, tree.lists), device=device, exp=exp, sinks=sinks)
    packed = {"cu_seqlens_q": tree.cu, "cu_seqlens_k": tree.cu}
    want = results((tree.arrays, packed), device=device, exp=exp, sinks=sinks)
    for name in want:
        assert not differing(got[name], want[name]), name


@pytest.mark.parametrize(("lengths", "head_dim"), [([20, 33, 50, 40], 32), ([90, 133, 70, 60], 64)])
def test_a_row_reads_nothing_of_siblings(
    lengths: list[int], head_dim: int, device: str, exp: str, rng: np.random.Generator
) -> None:
    tree = Tree(rng, lengths, [-1, 0, 0, 2], head_dim=head_dim, device=device)
    want = results((tree.arrays, tree.lists), device=device, exp=exp)
    for t in tree.arrays:
        t[tree.own(1)] = float("nan")
    got = results((tree.arrays, tree.lists), device=device, exp=exp)
    for name in ("out", "dq", "dk", "dv"):
        for s in (2, 3):
            assert not differing(got[name][tree.own(s)], want[name][tree.own(s)]), (name, s)
    assert not differing(got["out"][tree.own(0)], want["out"][tree.own(0)])
    assert torch.isnan(got["out"][tree.own(1)]).all()


# ---- keys that several segments see ---------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 60])
def test_keys_of_ancestors_add_one_chain_a_segment(
    window: int | None, device: str, exp: str, rng: np.random.Generator
) -> None:
    """A call with the queries of one segment alone gives that segment's chain, in float32 with a scale that is a power
    of two. The rule adds these chains, segments ascending."""
    for _ in range(2):
        tree = random_tree(rng, 10, dtype="float32", device=device)
        options = {"softmax_scale": 0.25, "window_size": window}
        got = results((tree.arrays, tree.lists), device=device, exp=exp, **options)
        want = {name: torch.zeros_like(tree.k) for name in ("dk", "dv")}
        terms = torch.zeros(len(tree.k), dtype=torch.int64)
        for segment, length in enumerate(tree.lengths):
            if length == 0:
                continue
            at, own = tree.tokens(segment), tree.own(segment)
            lists = {"cu_seqlens_q": offsets_of(length, device), "cu_seqlens_k": offsets_of(len(at), device)}
            given = (tree.dout[own], tree.q[own], tree.k[at], tree.v[at], got["out"][own])
            with mode(device, exp):
                lse = got["lse"][:, own].contiguous()
                chains = rk.attention_backward(*given, lse, **lists, **options, exp=exp)[1:]
            for name, chain in zip(("dk", "dv"), chains, strict=True):
                want[name][at] = want[name][at] + chain
            terms[at.cpu()] += 1
        assert terms.max() > 2, "no key that three segments see"
        for name in want:
            assert not differing(got[name], want[name]), name


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_float64(
    dtype: str, options: dict[str, Any], device: str, exp: str, rng: np.random.Generator
) -> None:
    """Errors are at most an ulp plus twice the errors of separate calls for each path in the same dtype. Keys that
    several paths share get the sum of those calls' gradients in float64."""
    tree = random_tree(rng, 9, dtype=dtype, device=device)
    sinks = torch.linspace(-2, 3, 4, device=device)
    options = {**options, "sinks": sinks}
    got = results((tree.arrays, tree.lists), device=device, exp=exp, **options)
    wide = [t.double().cpu().numpy() for t in tree.arrays]
    numpy_lists = {"tree": tuple(t.cpu().numpy() for t in tree.lists["tree"])}
    want = rk.attention_reference(
        *wide[:3], dout=wide[3], **numpy_lists, **{**options, "sinks": sinks.cpu().numpy()}
    )  # fmt: skip
    others = {name: np.zeros(want[name].shape) for name in ("out", "dq", "dk", "dv")}
    dsinks = np.zeros(4)
    for segment, length in enumerate(tree.lengths):
        if length == 0:
            continue
        at, own = tree.tokens(segment), tree.own(segment)
        lists = {"cu_seqlens_q": offsets_of(length, device), "cu_seqlens_k": offsets_of(len(at), device)}
        alone = results(
            ((tree.q[own], tree.k[at], tree.v[at], tree.dout[own]), lists), device=device, exp=exp, **options
        )
        for name in others:
            where = own if name in ("out", "dq") else at.cpu().numpy()
            others[name][where] += alone[name].double().cpu().numpy()
        dsinks += alone["dsinks"].double().cpu().numpy()
    others["dsinks"] = dsinks
    ulp = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]

    def rms(x: np.ndarray) -> float:
        return float(np.sqrt(np.mean(np.square(x))))

    for name, other in others.items():
        error, theirs = (rms(x - want[name]) for x in (got[name].double().cpu().numpy(), other))
        assert error <= 2 * theirs + ulp * max(1.0, rms(want[name])), name


# ---- torch ----------------------------------------------------------------------------------------------------------


def leaves_of(tree: Tree) -> list[Any]:
    return [t.clone().requires_grad_() for t in tree.arrays[:3]]


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
def test_autograd_and_compiled_have_the_bytes_of_backward(
    backend: str | None, device: str, rng: np.random.Generator
) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor takes a C++ compiler")
    tree = Tree(rng, [9, 5, 7], [-1, 0, 0], head_dim=16, device=device)
    sinks = torch.linspace(-1, 2, 4, device=device)

    def function(q: Any, k: Any, v: Any, sinks: Any, cu: Any, parents: Any) -> Any:
        return rk.attention(q, k, v, tree=(cu, parents), window_size=8, sinks=sinks, exp="portable", return_lse=True)

    want = results(
        (tree.arrays, tree.lists), device=device, window_size=8, sinks=sinks, dlse=torch.ones(4, 21, device=device)
    )
    torch.compiler.reset()
    call = function if backend is None else torch.compile(function, fullgraph=True, backend=backend)
    leaves = [*leaves_of(tree), sinks.clone().requires_grad_()]
    out, lse = call(*leaves, *tree.lists["tree"])
    grads = torch.autograd.grad((out, lse), leaves, (tree.dout, torch.ones_like(lse)))
    for name, got in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), (out, lse, *grads), strict=True):
        assert not differing(got.detach(), want[name]), name


def test_opcheck_and_fakes(device: str, rng: np.random.Generator) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    rk._call.load()

    tree = Tree(rng, [9, 5, 7], [-1, 0, 0], head_dim=16, device=device)
    lists = (tree.cu, tree.cu, None, None, None, tree.parents)
    check, ops = torch.library.opcheck, torch.ops.rl_kernel_native
    check(ops.attention, (*leaves_of(tree), None, *lists, *(None,) * 4, True, None, None, None, 0, 0))
    real = rk.attention(*tree.arrays[:3], **tree.lists, return_lse=True)
    given = (tree.dout, None, *tree.arrays[:3], *real, None, *lists, True, None, 0.5, None, 0, 0, True, True, False)
    check(ops.attention_backward, given)
    with FakeTensorMode() as fakes:
        arrays, others = moved(fakes.from_tensor, (tree.arrays[:3], tree.lists))
        found = rk.attention(*arrays, **others, return_lse=True)
    for f, r in zip(found, real, strict=True):
        assert (f.shape, f.dtype, f.stride()) == (r.shape, r.dtype, r.stride())


def test_tangents_and_second_derivatives_are_those_of_the_paths(rng: np.random.Generator) -> None:
    """A function of the whole tree is compared with the same function of its paths as sequences, whose gradients torch
    adds."""
    tree = Tree(rng, [4, 3, 0, 2, 3], [-1, 0, 1, 2, -1], head_dim=8, dtype="float32")

    def shared(q: Any, k: Any, v: Any) -> Any:
        return rk.attention(q, k, v, window_size=6, softmax_scale=0.7, **tree.lists)

    def paths(q: Any, k: Any, v: Any) -> Any:
        parts = []
        for segment, length in enumerate(tree.lengths):
            if length == 0:
                continue
            at, own = tree.tokens(segment), tree.own(segment)
            lists = {"cu_seqlens_q": offsets_of(length, "cpu"), "cu_seqlens_k": offsets_of(len(at), "cpu")}
            parts.append(rk.attention(q[own], k[at], v[at], window_size=6, softmax_scale=0.7, **lists))
        return torch.cat(parts)

    tangents = tuple(torch.randn_like(t) for t in tree.arrays[:3])
    found = []
    for f in (shared, paths):
        jvp = torch.func.jvp(f, tree.arrays[:3], tangents)[1]
        leaves = leaves_of(tree)
        loss = (f(*leaves) * tree.dout).square().sum()
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        found.append([jvp, *grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)])
    for a, b in zip(*found, strict=True):
        off, allowed = (
            float((a - b).detach().abs().max()),
            row("attention", "derivatives").allowed(largest=float(b.detach().abs().max()), terms=8),
        )
        assert off <= allowed, (off, allowed)
    stacked = torch.stack([tree.q, tree.q * 2])
    got = torch.func.vmap(lambda q: shared(q, tree.k, tree.v))(stacked)
    assert not differing(got[1], shared(tree.q * 2, tree.k, tree.v))


@pytest.mark.parametrize("kind", ["numpy", "int64"])
def test_other_arrays_and_offsets(kind: str, rng: np.random.Generator) -> None:
    tree = Tree(rng, [9, 5, 7], [-1, 0, 0], head_dim=16, dtype="float32")
    want = results((tree.arrays, tree.lists))
    if kind == "int64":
        lists = {"tree": [tree.cu.long(), tree.parents]}
        assert not differing(rk.attention(*tree.arrays[:3], **lists), want["out"])
        return
    q, k, v, dout = (t.numpy() for t in tree.arrays)
    lists = {"tree": (tree.cu.numpy().astype(np.int64), tree.parents.numpy())}
    out, lse = rk.attention(q, k, v, **lists, return_lse=True)
    got = (out, lse, *rk.attention_backward(dout, q, k, v, out, lse, **lists))
    for name, mine in zip(("out", "lse", "dq", "dk", "dv"), got, strict=True):
        assert not differing(mine, want[name]), name


# ---- bad input ------------------------------------------------------------------------------------------------------


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


CU, PARENTS = ints(0, 4, 6, 9), ints(-1, 0, 0)
BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no tuple": (CU, {}, TypeError, r"tree: expected None or \(cu_segments, parents\), got Tensor"),
    "one array": ((CU,), {}, ValueError, r"tree: expected None or \(cu_segments, parents\), got 1 arrays"),
    "no offsets": ((None, PARENTS), {}, TypeError, r"cu_segments: expected an array in tree, got None"),
    "no parents": ((CU, None), {}, TypeError, r"parents: expected an array in tree, got None"),
    "dtype of parents": (
        (CU, PARENTS.long()), {}, TypeError, r"parents: expected dtype int32, got int64",
    ),
    "dtype of offsets": (
        (CU.float(), PARENTS), {}, TypeError, r"cu_segments: expected dtype int32 or int64, got float32",
    ),
    "number of parents": (
        (CU, PARENTS[:2]), {}, ValueError, r"parents: expected shape \[3\] \(the segments\), got \[2\]",
    ),
    "padded q": (
        (CU, PARENTS), {"q": torch.zeros(1, 9, 4, 16)}, ValueError,
        r"q: expected shape \[tokens, heads, head_dim\] beside cu_segments, got \[1, 9",
    ),
    "padded k": (
        (CU, PARENTS), {"k": torch.zeros(1, 9, 2, 16), "v": torch.zeros(1, 9, 2, 16)}, ValueError,
        r"k: expected shape \[tokens, heads, head_dim\] beside cu_segments, got \[1, 9",
    ),
    "more keys than queries": (
        (CU, PARENTS), {"k": torch.zeros(10, 2, 16), "v": torch.zeros(10, 2, 16)}, ValueError,
        r"k: expected a first dimension of 9 \(the tokens of q\) beside cu_segments, got shape \[10, 2, 16\]",
    ),
    "not causal": ((CU, PARENTS), {"causal": False}, ValueError, r"tree: expected None beside causal=False"),
    **{
        f"beside {name}": ((CU, PARENTS), {name: CU}, ValueError, rf"tree: expected None beside {name}: ")
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "block_table",
                     "shared_prefix")
    },
}  # fmt: skip
BAD_VALUES = {
    "a later parent": ((CU, ints(-1, 2, 0)), r"parents: expected -1 or a segment before its child, got 2 at index 1"),
    "its own parent": ((CU, ints(-1, 0, 2)), r"parents: expected -1 or a segment before its child, got 2 at index 2"),
    "parent -2": ((CU, ints(-2, 0, 0)), r"parents: expected -1 or a segment before its child, got -2 at index 0"),
    "descending": ((ints(0, 6, 4, 9), PARENTS), r"cu_segments: expected ascending offsets, got 4 after 6 at index 2"),
    "not from 0": ((ints(1, 4, 6, 9), PARENTS), r"cu_segments: expected 0 first, got 1 at index 0"),
    "short": ((ints(0, 4, 6, 8), PARENTS), r"cu_segments: expected 9 \(the number of tokens\) last, got 8 at index 3"),
    "long": ((ints(0, 4, 6, 10), PARENTS), r"cu_segments: expected at most 9 \(the number of tokens\), got 10"),
}


def bad_call(tree: Any, changed: dict[str, Any]) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    given = {"q": torch.zeros(9, 4, 16), "k": torch.zeros(9, 2, 16), "v": torch.zeros(9, 2, 16), **changed}
    arrays = given.pop("q"), given.pop("k"), given.pop("v")
    return arrays, {"tree": tree, **given}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_an_error_names_the_argument(case: str, traced: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    tree, changed, error, words = BAD[case]
    arrays, options = bad_call(tree, changed)
    fakes = FakeTensorMode()
    if traced:
        arrays, options = moved(fakes.from_tensor, (arrays, options))
        words = words.replace("got Tensor", "got FakeTensor")
        with fakes, pytest.raises(error, match=words):
            rk.attention(*arrays, **options)
        return
    with pytest.raises(error, match=words):
        rk.attention(*arrays, **options)
    if not set(changed) & {"block_table", "shared_prefix"}:
        q, k, v = arrays
        with pytest.raises(error, match=words):
            rk.attention_backward(q, q, k, v, q, torch.zeros(4, 9), **options)


@pytest.mark.parametrize("case", BAD_VALUES)
def test_lists_are_read_on_the_cpu(case: str) -> None:
    tree, words = BAD_VALUES[case]
    (q, k, v), options = bad_call(tree, {})
    with pytest.raises(ValueError, match=words):
        rk.attention(q, k, v, **options)
    with pytest.raises(ValueError, match=words):
        rk.attention_backward(q, q, k, v, q, torch.zeros(4, 9), **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "head_dim"), [([40, 30, 20, 10], 32), ([140, 130, 70, 60], 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_clamps_lists_and_marks_parents_that_are_none(
    dtype: str, lengths: list[int], head_dim: int, rng: np.random.Generator
) -> None:
    """Rows below an invalid parent are NaN, and no other row changes; a token in no segment is +0."""
    tree = Tree(rng, lengths, [-1, 0, 1, 0], head_dim=head_dim, dtype=dtype, device="cuda")
    want = results((tree.arrays, tree.lists), device="cuda")
    got = results(
        (tree.arrays, {"tree": (tree.cu, torch.tensor([-1, 7, 1, 0], dtype=torch.int32, device="cuda"))}), device="cuda"
    )
    for name in ("out", "dq"):
        assert torch.isnan(got[name][tree.own(1).start : tree.own(2).stop]).all(), name
        for s in (0, 3):
            assert not differing(got[name][tree.own(s)], want[name][tree.own(s)]), (name, s)
    short = tree.cu.clone()
    short[-1] -= 5
    end = int(short[-1])
    got = results((tree.arrays, {"tree": (short, tree.parents)}), device="cuda")
    assert not differing(got["out"][:end], want["out"][:end])
    for name in ("out", "dq", "dk", "dv"):
        assert not got[name][end:].count_nonzero(), name
        assert not torch.signbit(got[name][end:]).any(), name


def test_nothing_to_attend_to() -> None:
    """No tokens, no segments, empty segments."""
    for cu, parents in ((ints(0), ints()), (ints(0, 0, 0), ints(-1, 0))):
        q, k = torch.zeros(0, 4, 16), torch.zeros(0, 2, 16)
        out, lse = rk.attention(q, k, k, tree=(cu, parents), return_lse=True)
        assert out.shape == q.shape
        assert [tuple(g.shape) for g in rk.attention_backward(q, q, k, k, out, lse, tree=(cu, parents))] == [
            (0, 4, 16), (0, 2, 16), (0, 2, 16)
        ]  # fmt: skip
