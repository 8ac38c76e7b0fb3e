"""attention in torch: autograd, the registered operators, torch.compile, export, torch.func, second derivatives."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from rl_kernel_native.contract import row

torch = pytest.importorskip("torch")
forward_ad = torch.autograd.forward_ad

from attention_cases import DTYPES, FORMS, Sequences, moved, results  # noqa: E402

LENGTHS = [(5, 5), (2, 2), (9, 9)]


def assert_same(a: Any, b: Any, what: Any = "") -> None:
    found = differing(tuple(a), tuple(b)) if isinstance(a, (tuple, list)) else differing(a, b)
    assert not found, f"{what}: {found}"


def assert_close(got: Any, want: Any, terms: int = 1) -> None:
    """Compares with float64, or with the same composition of other calls."""
    allowed = row("attention", "derivatives").allowed(largest=float(want.abs().max()), terms=terms)
    off = float((got.double() - want).detach().abs().max())
    assert off <= allowed, f"off by {off:.3g}, allowed {allowed:.3g}"


def leaves_of(arrays: Any) -> list[Any]:
    return [t.clone().requires_grad_() for t in arrays[:3]]


@pytest.fixture
def s(rng: np.random.Generator, device: str) -> Sequences:
    return Sequences(rng, LENGTHS, (4, 2), 16, "bfloat16", device)


@pytest.fixture
def dense(rng: np.random.Generator) -> tuple[Any, Any, Any, Any]:
    """float32, so that finite differences and float64 compositions may be compared."""
    q, dout = (torch.from_numpy(rng.standard_normal((2, 5, 4, 8), dtype=np.float32)) for _ in range(2))
    k, v = (torch.from_numpy(rng.standard_normal((2, 6, 2, 8), dtype=np.float32)) for _ in range(2))
    return q, k, v, dout


# ---- autograd -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS[:4])
def test_autograd_has_the_bytes_of_backward(form: str, dtype: str, device: str, rng: np.random.Generator) -> None:
    arrays, lists = Sequences(rng, LENGTHS, (4, 2), 16, dtype, device).call(form)
    leaves = leaves_of(arrays)
    got = rk.attention(*leaves, **lists, exp="portable", return_lse=True)
    dout, slope = torch.nan_to_num(arrays[3]), torch.rand_like(got.lse)
    want = results(((*arrays[:3], dout), lists), dlse=slope)
    assert_same(got.out.detach(), want["out"])
    assert_same(
        torch.autograd.grad(got, leaves, (dout, slope), retain_graph=True), [want[n] for n in ("dq", "dk", "dv")]
    )
    plain = results(((*arrays[:3], dout), lists))
    assert_same(torch.autograd.grad(got.out, leaves, dout, retain_graph=True), [plain[n] for n in ("dq", "dk", "dv")])
    zero = results(((*arrays[:3], torch.zeros_like(dout)), lists), dlse=slope)
    assert_same(torch.autograd.grad(got.lse, leaves, slope), [zero[n] for n in ("dq", "dk", "dv")])


def test_a_gradient_that_nobody_asks_for_is_not_computed(s: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernel_native.ops import attention_traced

    arrays, lists = s.call("packed")
    leaves = [leaf * 1 for leaf in leaves_of(arrays)]  # torch.autograd.grad cannot handle these leaves directly
    leaves.append(torch.zeros(4, device=leaves[0].device).requires_grad_() * 1)
    out = rk.attention(*leaves[:3], sinks=leaves[3], **lists)
    asked: list[Any] = []

    class Recording:
        def attention_backward(self, *arguments: Any) -> Any:
            asked.append(arguments[-5:-2])
            return native.attention_backward(*arguments)

    native = attention_traced._C
    monkeypatch.setattr(attention_traced, "_C", Recording())
    for wanted, expected in (
        (leaves, (True, True, True)), (leaves[:1], (True, False, False)), (leaves[2:3], (False, True, False)),
        (leaves[3:], (False, False, True)),
    ):  # fmt: skip
        asked.clear()
        torch.autograd.grad(out, wanted, arrays[3], retain_graph=True)
        assert asked == [expected]


def test_lists_that_change_before_backward_are_noticed(s: Sequences) -> None:
    arrays, lists = s.call("packed")
    leaves = leaves_of(arrays)
    out = rk.attention(*leaves, **lists)
    lists["cu_seqlens_q"].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, leaves, arrays[3])


# ---- the registered operators ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form: str, s: Sequences) -> None:
    rk._call.load()

    (q, k, v, dout), lists = s.call(form)
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "parents", "block_table")
    given = [*(lists.get(n) for n in names), *lists.get("shared_prefix", (None,) * 3)]
    paged = "block_table" in lists
    check = torch.library.opcheck
    finite = [torch.nan_to_num(t) for t in (q, k, v)]  # opcheck compares values, so NaNs must go
    if not paged:
        finite = [t.requires_grad_() for t in finite]
    sinks = torch.linspace(-1, 2, 4, device=q.device).requires_grad_(not paged)
    check(torch.ops.rl_kernel_native.attention, (*finite, sinks, *given, True, 4, None, 3.0, 0, 0))
    if paged:
        return
    out, lse = rk.attention(q, k, v, **lists, return_lse=True)
    check(
        torch.ops.rl_kernel_native.attention_backward,
        (
            torch.nan_to_num(dout),
            None,
            *(t.detach() for t in finite),
            out,
            lse,
            sinks.detach(),
            *given[:6],
            True,
            None,
            0.5,
            None,
            0,
            0,
            True,
            True,
            True,
        ),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("form", ["right", "packed", "left"])
def test_compiled_has_the_bytes_of_eager(form: str, backend: str, s: Sequences) -> None:
    """fullgraph=True forbids a graph break. Inductor runs only where it has a compiler for the device."""
    if backend == "inductor" and (form != "packed" or shutil.which("g++") is None):
        pytest.skip("inductor takes seconds a graph and a C++ compiler; one case shows it")
    torch.compiler.reset()
    arrays, lists = s.call(form)
    dout = torch.nan_to_num(arrays[3])

    sinks = torch.linspace(-1, 2, 4, device=dout.device)

    def function(q: Any, k: Any, v: Any, sinks: Any, lists: dict[str, Any]) -> Any:
        out, lse = rk.attention(q, k, v, window_size=4, softcap=2.0, sinks=sinks, return_lse=True, **lists)
        return out, torch.where(torch.isinf(lse), 0, lse)

    outcomes = []
    for f in (function, torch.compile(function, fullgraph=True, backend=backend)):
        leaves = [*leaves_of(arrays), sinks.clone().requires_grad_()]
        out, lse = f(*leaves, lists)
        outcomes.append(
            (out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse))))
        )
    assert_same(outcomes[1], outcomes[0])


@pytest.mark.parametrize("form", ["paged", "shared"])
def test_compiled_pages_have_the_bytes_of_eager(form: str, s: Sequences) -> None:
    torch.compiler.reset()
    arrays, lists = s.call(form)
    compiled = torch.compile(lambda q, k, v, lists: rk.attention(q, k, v, **lists), fullgraph=True, backend="aot_eager")
    assert_same(compiled(*arrays[:3], lists), rk.attention(*arrays[:3], **lists))


def test_a_compiled_graph_has_chains_and_says_so_where_a_context_asks_for_a_unit() -> None:
    """As with linear, a compiled graph refuses the arithmetic of a matrix unit. In float32, attention always computes
    by chains."""
    torch.compiler.reset()
    q = torch.linspace(-2, 2, 40 * 16).view(1, 20, 2, 16)
    for dtype in (torch.float32, torch.bfloat16):
        x = q.to(dtype)
        compiled = torch.compile(lambda x: rk.attention(x, x, x, exp="portable"), fullgraph=True, backend="aot_eager")
        want = rk.attention(x, x, x)
        assert_same(compiled(x), want)
        with rk.arithmetic("sm_90"):
            if dtype == torch.float32:
                assert_same(compiled(x), want)
                continue
            with pytest.raises(ValueError, match=r"arithmetic: a compiled call .*rk.arithmetic\("):
                compiled(x)


def test_compiled_with_a_length_that_varies_compiles_once(rng: np.random.Generator) -> None:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda q, k, v: rk.attention(q, k, v), fullgraph=True, dynamic=True, backend=counter)
    for n in (3, 8, 130):
        s = Sequences(rng, [(n, n)], (4, 2), 16)
        q, k, v = (t[0][None] for t in (s.q, s.k, s.v))
        assert_same(function(q, k, v), rk.attention(q, k, v))
    assert counter.frame_count == 1


def test_exported_has_the_bytes_of_eager(s: Sequences) -> None:
    arrays, lists = s.call("packed")

    class Module(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, a: Any, b: Any) -> Any:
            return rk.attention(q, k, v, cu_seqlens_q=a, cu_seqlens_k=b)

    given = (*arrays[:3], lists["cu_seqlens_q"], lists["cu_seqlens_k"])
    exported = torch.export.export(Module(), given)
    assert_same(exported.module()(*given), Module()(*given))


def test_a_fake_tensor_says_the_shapes(s: Sequences) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for form in FORMS:
        arrays, lists = s.call(form)
        real = rk.attention(*arrays[:3], **lists, return_lse=True)
        with FakeTensorMode() as mode:
            q, k, v = map(mode.from_tensor, arrays[:3])
            fake = rk.attention(q, k, v, **moved(mode.from_tensor, lists), return_lse=True)
        for f, r in zip(fake, real, strict=True):
            assert (f.shape, f.dtype, f.stride()) == (r.shape, r.dtype, r.stride())


# ---- torch.func and derivatives of derivatives ----------------------------------------------------------------------


def test_vmap_has_the_bytes_of_a_loop(s: Sequences) -> None:
    arrays, lists = s.call("right")
    finite = [torch.nan_to_num(t) for t in arrays]
    stacks = [torch.stack([t, t * 2, t - 1]) for t in finite[:3]]
    counts = torch.stack([lists["seqused_k"] - i for i in range(3)])
    want = [rk.attention(*(t[i] for t in stacks), **{**lists, "seqused_k": counts[i]}) for i in range(3)]
    got = torch.func.vmap(
        lambda q, k, v, n: rk.attention(q, k, v, seqused_q=lists["seqused_q"], seqused_k=n), in_dims=(0, 0, 0, 0)
    )(*stacks, counts)
    assert_same(got, torch.stack(want))
    packed, offsets = s.call("packed")
    got = torch.func.vmap(lambda q: rk.attention(q, *packed[1:3], **offsets))(torch.stack([packed[0], packed[0] * 2]))
    assert_same(got[1], rk.attention(packed[0] * 2, *packed[1:3], **offsets))


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": 3, "softmax_scale": 0.7},
    "not causal": {"causal": False},
    "softcap": {"softcap": 0.8, "softmax_scale": 0.7},
    "padded": {"seqused_q": torch.tensor([3, 5]).int(), "seqused_k": torch.tensor([6, 4]).int()},
    "left": {"leftpad_k": torch.tensor([0, 3]).int()},
}


def in_float64(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """attention by torch's operators, of padded sequences."""
    used_q = options.get("seqused_q", torch.full((2,), q.shape[1]))
    left = options.get("leftpad_k", torch.zeros(2).long())
    used_k = options.get("seqused_k", k.shape[1] - left)
    outs, lses = [], []
    for b in range(2):
        n, m = int(used_q[b]), int(used_k[b])
        x = q[b, :n].double().transpose(0, 1)
        y, z = (t[b, int(left[b]) : int(left[b]) + m].double().repeat_interleave(2, 1).transpose(0, 1) for t in (k, v))
        scores = x @ y.transpose(1, 2) * options.get("softmax_scale", q.shape[-1] ** -0.5)
        if "softcap" in options:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        behind = m - n + torch.arange(n)[:, None] - torch.arange(m)
        sees = (
            (behind >= 0) & (behind < options.get("window_size", 1000))
            if options.get("causal", True)
            else behind > -999
        )
        p = torch.exp(scores - scores.amax().detach()) * sees
        total = p.sum(-1, keepdim=True)
        safe = torch.where(total > 0, total, 1.0)
        outs.append(torch.nn.functional.pad((p / safe @ z).transpose(0, 1), (0, 0, 0, 0, 0, q.shape[1] - n)))
        lse = torch.where(total > 0, torch.log(safe) + scores.amax().detach(), 0)[..., 0]
        lses.append(torch.nn.functional.pad(lse, (0, q.shape[1] - n)))
    return torch.stack(outs), torch.stack(lses)


def ours(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    out, lse = rk.attention(q, k, v, **options, return_lse=True)
    return out, torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)


@pytest.mark.parametrize("case", CALLS)
def test_gradients_tangents_and_second_derivatives_are_those_of_float64(case: str, dense: Any) -> None:
    options, (*inputs, dout) = CALLS[case], dense

    def loss(f: Any) -> Any:
        def of(*tensors: Any) -> Any:
            out, lse = f(*tensors, options)
            return (out * dout).sum() + (out.square().sum() + lse.sin().sum()).to(out.dtype)

        return of

    wide = [t.double() for t in inputs]
    for argnums in (0, 1, 2):
        first = torch.func.grad(loss(ours), argnums)(*inputs)
        assert_close(first, torch.func.grad(loss(in_float64), argnums)(*wide))
    tangents = tuple(torch.randn_like(t) for t in inputs)
    got = torch.func.jvp(lambda *t: ours(*t, options), tuple(inputs), tangents)[1]
    want = torch.func.jvp(lambda *t: in_float64(*t, options), tuple(wide), tuple(t.double() for t in tangents))[1]
    for g, w in zip(got, want, strict=True):
        assert_close(g, w)

    def second(f: Any, tensors: Any) -> Any:
        leaves = leaves_of(tensors)
        grads = torch.autograd.grad(loss(f)(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    for g, w in zip(second(ours, inputs), second(in_float64, wide), strict=True):
        assert_close(g, w, 8)


def test_sinks_are_one_more_score_without_a_value(dense: Any) -> None:
    """Values, gradients (of sinks too), tangents and second derivatives are compared with a softmax over one more
    column."""
    (*inputs, dout), used = dense, torch.tensor([3, 5]).int()
    inputs.append(torch.tensor([0.5, -2.0, 3.0, 0.0]))

    def ours(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out, lse = rk.attention(q, k, v, sinks=sinks, softcap=1.5, seqused_q=used, return_lse=True)
        return out, torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)

    def wider(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        x = q.transpose(1, 2)
        y, z = (t.repeat_interleave(2, 1 + 1).transpose(1, 2) for t in (k, v))
        scores = 1.5 * torch.tanh(x @ y.transpose(2, 3) * 8**-0.5 / 1.5)
        n = torch.arange(5)[None, :, None] + 6 - used[:, None, None]
        hidden = torch.arange(6) > n
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        scores = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 5, 1)], -1)
        real = (torch.arange(5) < used[:, None])[:, None, :, None]
        out = torch.where(real, torch.softmax(scores, -1)[..., :-1] @ z, 0.0).transpose(1, 2)
        return out, torch.where(real[..., 0], torch.logsumexp(scores, -1), 0.0)

    def loss(f: Any) -> Any:
        def of(*tensors: Any) -> Any:
            out, lse = f(*tensors)
            return (out * dout).sum() + (out.square().sum() + lse.sin().sum()).to(out.dtype)

        return of

    wide = [t.double() for t in inputs]
    for got, want in zip(ours(*inputs), wider(*wide), strict=True):
        assert_close(got, want)
    for argnums in range(4):
        first = torch.func.grad(loss(ours), argnums)(*inputs)
        assert_close(first, torch.func.grad(loss(wider), argnums)(*wide))
    tangents = tuple(torch.randn_like(t) for t in inputs)
    got = torch.func.jvp(ours, tuple(inputs), tangents)[1]
    for g, w in zip(got, torch.func.jvp(wider, tuple(wide), tuple(t.double() for t in tangents))[1], strict=True):
        assert_close(g, w)

    def second(f: Any, tensors: Any) -> Any:
        leaves = [t.clone().requires_grad_() for t in tensors]
        grads = torch.autograd.grad(loss(f)(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    for g, w in zip(second(ours, inputs), second(wider, wide), strict=True):
        assert_close(g, w, 8)
    stacked = torch.stack([inputs[3], inputs[3] + 1])
    several = [torch.stack([inputs[0], 2 * inputs[0]]), *inputs[1:]]
    for dims, given in (((None, None, None, 0), (*inputs[:3], stacked)), ((0, None, None, None), several)):
        batched = torch.func.vmap(ours, in_dims=dims)(*given)
        for i in range(2):
            alone = ours(*(t if d is None else t[i] for t, d in zip(given, dims, strict=True)))
            assert_same([b[i] for b in batched], alone)


def test_second_derivatives_of_packed_sequences_are_those_of_each_alone(rng: np.random.Generator) -> None:
    s = Sequences(rng, [(3, 5), (4, 4)], (2, 1), 8, "float32")
    arrays, lists = s.call("packed")

    def penalty(out: Any, leaves: Any, dout: Any) -> Any:
        return sum(g.square().sum() for g in torch.autograd.grad(out, leaves, dout, create_graph=True))

    leaves = leaves_of(arrays)
    got = torch.autograd.grad(penalty(rk.attention(*leaves, **lists), leaves, arrays[3]), leaves)
    alone = []
    for q, k, v, dout in zip(s.q, s.k, s.v, s.dout, strict=True):
        parts = leaves_of((q[None], k[None], v[None]))
        alone.append(torch.autograd.grad(penalty(rk.attention(*parts), parts, dout[None]), parts))
    for i, g in enumerate(got):
        assert_close(g, torch.cat([a[i][0] for a in alone]))


@pytest.mark.parametrize("form", ["paged", "shared"])
def test_a_tangent_of_lse_and_of_pages(form: str, rng: np.random.Generator) -> None:
    arrays, lists = Sequences(rng, [(2, 9), (3, 20), (1, 12), (2, 18)], (2, 1), 8, "float32").call(form)
    finite = [torch.nan_to_num(t) for t in arrays[:3]]
    with forward_ad.dual_level():
        q = forward_ad.make_dual(finite[0], torch.ones_like(finite[0]))
        out, lse = rk.attention(q, *finite[1:], **lists, return_lse=True)
        got = [forward_ad.unpack_dual(t).tangent for t in (out, lse)]
    step = 1e-2
    ahead, behind = (rk.attention(finite[0] + d, *finite[1:], **lists, return_lse=True) for d in (step, -step))
    for tangent, a, b in zip(got, ahead, behind, strict=True):
        torch.testing.assert_close(tangent, (a - b) / (2 * step), rtol=2e-2, atol=2e-3)


# ---- memory and graphs ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["paged", "shared"])
def test_a_cuda_graph_replays_with_new_lists(form: str, rng: np.random.Generator) -> None:
    s = Sequences(rng, [(1, 300), (1, 40)], (8, 2), 64, "bfloat16", "cuda")
    arrays, lists = s.call(form)
    rk.attention(*arrays[:3], **lists)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rk.attention(*arrays[:3], **lists)
    for used in ([300, 40], [7, 39], [128, 0]):
        lists["seqused_k"].copy_(torch.tensor(used))
        graph.replay()
        assert_same(out, rk.attention(*arrays[:3], **lists), used)


@pytest.mark.gpu
def test_lists_that_contradict_the_arrays_on_a_gpu_reach_no_other_sequence(rng: np.random.Generator) -> None:
    s = Sequences(rng, [(20, 50), (30, 30)], (4, 2), 32, "bfloat16", "cuda")
    arrays, lists = s.call("paged")
    want = rk.attention(*arrays[:3], **lists)
    for page in (-1, 10**9, -(2**31)):
        table = lists["block_table"].clone()
        table[0, 1] = page
        got = rk.attention(*arrays[:3], **{**lists, "block_table": table})
        assert_same(got[20:], want[20:])
        assert torch.isnan(got[:20]).all()
    packed, offsets = s.call("packed")
    for last in (-5, 10**9, 0):
        bad = offsets["cu_seqlens_k"].clone()
        bad[2] = last
        got = rk.attention(*packed[:3], **{**offsets, "cu_seqlens_k": bad})
        assert_same(got[:20], rk.attention(*packed[:3], **offsets)[:20])
