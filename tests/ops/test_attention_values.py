"""attention with values narrower than keys: the bytes equal the bytes for values padded with zeros, in every form and
way to call it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing, mode
from rl_kernel_native.contract import row

torch = pytest.importorskip("torch")

from attention_bounds import attention_failures  # noqa: E402
from attention_cases import DTYPES, FORMS, Sequences, moved, results  # noqa: E402

LENGTHS = [(5, 5), (40, 150), (2, 9)]
SELF = [(n, n) for n in (5, 150, 9)]
SINKS = torch.tensor([0.5, -1.0, 0.0, 3.0])


def narrowed(s: Sequences, columns: int) -> Sequences:
    found = copy.copy(s)
    found.v, found.dout = ([t[..., :columns].contiguous() for t in parts] for parts in (s.v, s.dout))
    return found


def padded(s: Sequences, columns: int) -> Sequences:
    found, rest = copy.copy(s), (0, s.q[0].shape[-1] - columns)
    found.v, found.dout = ([torch.nn.functional.pad(t[..., :columns], rest) for t in parts] for parts in (s.v, s.dout))
    return found


def assert_those_of_padded(got: Any, want: Any, what: Any) -> None:
    """Compares results by name. `got` has fewer columns in out, dv and partials."""
    assert got.keys() == want.keys()
    for name, narrow in got.items():
        wide = want[name]
        if name in ("out", "dv", "sums"):
            assert narrow.shape[-1] < wide.shape[-1]
            wide = wide[..., : narrow.shape[-1]]
        assert narrow.is_contiguous(), (what, name)
        found = differing(narrow, wide.contiguous())
        assert not found, f"{what}, {name}: {found}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (128, 64), (80, 8), (256, 248)])
def test_every_form_has_the_bytes_of_padded_values(
    head_dim: int, value_dim: int, form: str, dtype: str, device: str, exp: str, rng: np.random.Generator
) -> None:
    s = Sequences(rng, SELF if form == "left" else LENGTHS, (4, 2), head_dim, dtype, device)
    options: Any
    for options in ({}, {"softcap": 3.0, "sinks": SINKS.to(device)}, {"window_size": 20}):
        got, want = (results(t.call(form), device=device, exp=exp, **options)
                     for t in (narrowed(s, value_dim), padded(s, value_dim)))  # fmt: skip
        assert_those_of_padded(got, want, options)


def test_trees_have_the_bytes_of_padded_values(device: str, exp: str, rng: np.random.Generator) -> None:
    s = Sequences(rng, [(40, 40)], (4, 2), 40, "bfloat16", device)
    lists = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 9, 20, 33, 40], [-1, 0, 0, 1])]
    got, want = (
        results((tuple(x[0] for x in (t.q, t.k, t.v, t.dout)), {"tree": tuple(lists)}), device=device, exp=exp)
        for t in (narrowed(s, 24), padded(s, 24))
    )
    assert_those_of_padded(got, want, "tree")


@pytest.mark.parametrize("dtype", DTYPES)
def test_partials_have_the_bytes_of_padded_values_and_merge_to_one_call(
    dtype: str, device: str, exp: str, rng: np.random.Generator
) -> None:
    s = Sequences(rng, [(3, 1500)], (4, 2), 192, dtype, device)

    def partials(t: Sequences, **options: Any) -> Any:
        return rk.attention(t.q[0][None], t.k[0][None], t.v[0][None], exp=exp, return_partials=True, **options)

    t = narrowed(s, 128)
    with mode(device, exp):
        narrow, wide = partials(t), partials(padded(s, 128))
        merged = rk.attention_merge(narrow, out_dtype=s.q[0].dtype, exp=exp, return_lse=True)
        whole = rk.attention(t.q[0][None], t.k[0][None], t.v[0][None], exp=exp, return_lse=True)
    assert_those_of_padded(*({"stats": p.stats, "sums": p.sums} for p in (narrow, wide)), "partials")
    assert not differing(tuple(merged), tuple(whole))
    reference = rk.attention_partials_reference(*(x[0][None].double().cpu() for x in (t.q, t.k, t.v)))
    assert reference["sums"].shape == tuple(narrow.sums.shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_float64(dtype: str, exp: str, rng: np.random.Generator) -> None:
    for head_dim, value_dim in ((192, 128), (24, 16)):
        s = narrowed(Sequences(rng, [(20, 150)], (4, 2), head_dim, dtype), value_dim)
        arrays = (s.q[0], s.k[0], s.v[0], s.dout[0])
        with mode("cpu", exp):
            assert not attention_failures(*arrays, exp=exp)
            assert not attention_failures(*arrays, exp=exp, softcap=3.0, sinks=SINKS)


def test_autograd_compiled_and_fakes(device: str, rng: np.random.Generator) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    s = Sequences(rng, LENGTHS, (4, 2), 24, "bfloat16", device)
    (q, k, v, dout), lists = narrowed(s, 16).call("packed")
    want = results(((q, k, v, dout), lists), exp="portable")

    def run(call: Any) -> dict[str, Any]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse = call(*leaves)
        grads = torch.autograd.grad(out, leaves, dout)
        return {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}

    def call(q: Any, k: Any, v: Any) -> Any:
        return rk.attention(q, k, v, **lists, exp="portable", return_lse=True)

    for way in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        got = run(way)
        for name in want:
            assert not differing(got[name], want[name]), name
    with FakeTensorMode() as fakes:
        arrays, others = moved(fakes.from_tensor, ((q, k, v), lists))
        fake = rk.attention(*arrays, **others, return_lse=True)
        partials = rk.attention(*(t.detach() for t in arrays), **others, return_partials=True)
    assert (fake.out.shape, fake.out.stride(), fake.out.dtype) == (dout.shape, dout.stride(), dout.dtype)
    assert partials.sums.shape[1:] == dout.shape
    stack = torch.stack([v, 2 * v])
    each = torch.func.vmap(lambda v: rk.attention(q, k, v, **lists, exp="portable"))(stack)
    assert not differing(each[0], want["out"])


def test_opcheck(device: str, rng: np.random.Generator) -> None:
    rk._call.load()

    s = narrowed(Sequences(rng, [(5, 9)], (4, 2), 24, "bfloat16", device), 16)
    q, k, v, dout = (t[0][None] for t in (s.q, s.k, s.v, s.dout))
    check, ops = torch.library.opcheck, torch.ops.rl_kernel_native
    none = (None,) * 6
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    check(ops.attention, (*leaves, None, *none, *none[:4], True, None, None, None, 0, 0))
    out, lse = rk.attention(q, k, v, return_lse=True)
    given = (dout, None, q, k, v, out, lse, None, *none, True, None, 0.5, None, 0, 0, True, True, False)
    check(ops.attention_backward, given)


def assert_close(got: Any, want: Any, terms: int = 1) -> None:
    allowed = row("attention", "derivatives").allowed(largest=float(want.abs().max()), terms=terms)
    off = float((got - want).detach().abs().max())
    assert off <= allowed, f"off by {off:.3g}, allowed {allowed:.3g}"


def test_second_derivatives_and_tangents(rng: np.random.Generator) -> None:
    """In float32, where results for padded values are near; derivatives are composed in float64."""
    q, k, v = (
        torch.from_numpy(rng.standard_normal((2, n, h, d), dtype=np.float32))
        for n, h, d in ((5, 4, 16), (6, 2, 16), (6, 2, 8))
    )

    def second(pads: int) -> Any:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        wide = torch.nn.functional.pad(leaves[2], (0, pads))
        out = rk.attention(*leaves[:2], wide)
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)

    for g, w in zip(second(0), second(8), strict=True):
        assert_close(g, w, 8)
    tangents = tuple(torch.randn_like(t) for t in (q, k, v))
    got = torch.func.jvp(rk.attention, (q, k, v), tangents)[1]
    pad = torch.nn.functional.pad
    want = torch.func.jvp(lambda q, k, v: rk.attention(q, k, pad(v, (0, 8))), (q, k, v), tangents)[1]
    assert_close(got, want[..., :8])


def test_numpy_has_the_bytes_of_torch(rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((1, 9, 2, d), dtype=np.float32) for d in (24, 24, 16))
    out, lse = rk.attention(q, k, v, return_lse=True)
    found = rk.attention_backward(out, q, k, v, out, lse)
    assert [x.shape[-1] for x in (out, *found)] == [16, 24, 24, 16]
    want = rk.attention(*map(torch.from_numpy, (q, k, v)))
    assert out.tobytes() == want.numpy().tobytes()
