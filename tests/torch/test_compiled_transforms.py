"""torch.func, forward mode and lazy modules around compiled functions: the bytes of eager or an error, never a lost
derivative."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

import rl_kernel_native as rk
from cases import differing
from rl_kernel_native import _dispatch

torch = pytest.importorskip("torch")
forward_ad = torch.autograd.forward_ad

_generator = torch.Generator().manual_seed(0)
X = torch.randn(3, 32, generator=_generator)
W = torch.randn(8, 32, generator=_generator)
DY = torch.randn(3, 8, generator=_generator)
TARGET = torch.tensor([1, 5, -100])
R = torch.randn(3, 32, generator=_generator)
GAIN = torch.randn(32, generator=_generator)
EPS = 0.5
IDS = torch.tensor([[1, 4, 1], [7, -1, 6]])
HEADS = torch.randn(3, 4, 8, generator=_generator)
KEYS = torch.randn(1, 5, 2, 8, generator=_generator)
ANGLES = torch.rand(3, 4, generator=_generator)


def joined(outputs: tuple[Any, Any]) -> Any:
    """Rows and a vector as one tensor."""
    return torch.cat([outputs[0], outputs[1][None]])


def rotated(q: Any, k: Any) -> Any:
    return torch.cat(rk.rope(q, k, ANGLES, ANGLES.flip(0)), 1)


def attended(q: Any, k: Any, v: Any) -> Any:
    out, lse = rk.attention(q, k, v, return_lse=True)
    return torch.cat([out.flatten(2), lse.transpose(1, 2)], -1)


# name: (function of one tensor, that tensor)
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "attention in q": (lambda q: attended(q[None], KEYS, KEYS), HEADS),
    "attention in k": (lambda k: attended(HEADS[None], k, KEYS), KEYS),
    "attention in v": (lambda v: attended(HEADS[None], KEYS, v), KEYS),
    "linear in x": (lambda x: rk.linear(x, W), X),
    "linear in weight": (lambda w: rk.linear(X, w), W),
    "linear in bias": (lambda b: rk.linear(X, W, b), DY[0]),
    "input_grad": (lambda dy: rk.linear_input_grad(dy, W), DY),
    "weight_grad": (lambda dy: rk.linear_weight_grad(dy, X), DY),
    "bias_grad": (lambda dy: rk.linear_bias_grad(dy), DY),
    "tree_sum": (lambda p: rk.tree_sum([p, DY]), DY),
    "linear_logprob in hidden": (lambda x: rk.linear_logprob(x, W, TARGET, dh_segments=8), X),
    "linear_logprob in weight": (lambda w: rk.linear_logprob(X, w, TARGET), W),
    "linear_logprob in lora_a": (lambda a: rk.linear_logprob(X, W, TARGET, lora_a=a, lora_b=DY.T.contiguous()), R),
    "linear_logprob in lora_b": (
        lambda b: rk.linear_logprob(X, W, TARGET, lora_a=X, lora_b=b, lora_scale=0.5),
        W[:, :3] * 1,
    ),
    "linear_cross_entropy": (
        lambda x: rk.linear_cross_entropy(x, W, TARGET, z_loss=0.1, label_smoothing=0.1, reduction="none"),
        X,
    ),
    "logprob": (lambda x: rk.logprob(x, TARGET), X),
    "rms_norm in x": (lambda x: rk.rms_norm(x, GAIN, EPS, weight_offset=1.0), X),
    "rms_norm in weight": (lambda w: rk.rms_norm(X, w, EPS), GAIN),
    "rms_norm in residual": (lambda r: torch.cat(rk.rms_norm(X, GAIN, EPS, residual=r)), R),
    "rms_norm_backward in dy": (lambda dy: joined(rk.rms_norm_backward(dy, X, GAIN, EPS, d_new_residual=R)), R),
    "rms_norm_backward in h": (lambda h: joined(rk.rms_norm_backward(R, h, GAIN, EPS)), X),
    "embedding": (lambda w: rk.embedding(IDS % 8, w), W),
    "embedding_backward": (lambda dy: rk.embedding_backward(dy, IDS[0], 6, padding_idx=4), X),
    "silu_mul": (lambda x: rk.silu_mul(x), X),
    "silu_mul in up": (lambda u: rk.silu_mul(X, u, round_before_mul=True), R),
    "gelu_mul in gate": (lambda g: rk.gelu_mul(g, R, approximate="none"), X),
    "silu_mul_backward in gate": (lambda g: torch.cat(rk.silu_mul_backward(R, g, X * R)), X),
    "pack": (lambda x: rk.pack([x, x * 2], torch.tensor([3, 0, 32])).tensors[1], X),
    "unpack": (lambda p: rk.unpack(p, torch.tensor([0, 2, 2, 7]), 5), GAIN),
    "preference_loss": (lambda w: rk.preference_loss(w, w.flip(0), kind="cpo").losses, GAIN),
    "sequence_logprob": (lambda x: rk.sequence_logprob(x, X > 0).sum, X),
    "sequence_logprob_backward": (lambda d: rk.sequence_logprob_backward(d, num_tokens=3), GAIN),
    "rope in q": (lambda q: rotated(q, HEADS), HEADS),
    "rope in k": (lambda k: rotated(HEADS, k), HEADS),
    "rope_backward": (lambda dq: rk.rope_backward(dq, None, ANGLES, ANGLES, interleaved=True)[0], HEADS),
}


WITHOUT_TANGENTS = ("linear_logprob", "linear_cross_entropy")  # their forward mode would need the logits


def squared(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A scalar whose gradient depends on the result."""
    return lambda a: f(a).square().sum()


TRANSFORMS: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "grad": lambda f: torch.func.grad(squared(f)),
    "vjp": lambda f: lambda a: (lambda y, pullback: pullback(y)[0])(*torch.func.vjp(f, a)),
    "jvp": lambda f: lambda a: torch.func.jvp(f, (a,), (a,))[1],
    "jacrev": lambda f: torch.func.jacrev(f),
    "jacfwd": lambda f: torch.func.jacfwd(f),
    "hessian": lambda f: torch.func.hessian(squared(f)),
    "vmap": lambda f: lambda a: torch.func.vmap(f)(torch.stack([a, a + 1])),
    "vmap of grad": lambda f: lambda a: torch.func.vmap(torch.func.grad(squared(f)))(torch.stack([a, a + 1])),
}


# The graph is the same for either backend; four functions show that aot_eager differentiates it.
BACKENDS = [
    *((name, "eager") for name in FUNCTIONS),
    *((name, "aot_eager") for name in ("linear in weight", "logprob", "rms_norm in residual", "rope in k")),
]


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_a_transform_inside_of_a_compiled_function_has_the_bytes_of_eager(name: str, backend: str) -> None:
    """One function applies every transform, since compiling eight functions takes more than twice as long."""
    left_out = set()
    if name == "preference_loss":
        left_out = {"hessian"}  # has no second derivative, and says so: tests/ops/test_preference_loss.py
    if name.startswith(WITHOUT_TANGENTS):
        left_out = {"jvp", "jacfwd", "hessian"}  # has no tangent, and says so: tests/ops/test_linear_logprob.py
    f, argument = FUNCTIONS[name]
    functions = {way: transform(f) for way, transform in TRANSFORMS.items() if way not in left_out}
    torch.compiler.reset()
    compiled = torch.compile(lambda a: tuple(g(a) for g in functions.values()), backend=backend, fullgraph=True)
    for (way, function), got in zip(functions.items(), compiled(argument), strict=True):
        assert not differing(got, function(argument)), way
        assert bool(got.any()), f"{way}: a gradient of zeros would compare equal to another"


def tangent_or_error(f: Callable[[Any], Any], dual: Any) -> Any:
    try:
        return forward_ad.unpack_dual(f(dual)).tangent
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.startswith(WITHOUT_TANGENTS)])
def test_a_tangent_into_a_compiled_function_comes_out_or_is_refused(name: str) -> None:
    """Dynamo ignores levels of forward mode, so a graph traced without such a level is used again inside a level."""
    f, argument = FUNCTIONS[name]
    for seen_before, backend in itertools.product((False, True), ("eager", "aot_eager")):
        torch.compiler.reset()
        compiled = torch.compile(f, backend=backend, fullgraph=True)
        if seen_before:
            compiled(argument)
        with forward_ad.dual_level():
            want = forward_ad.unpack_dual(f(forward_ad.make_dual(argument, argument))).tangent
            dual = forward_ad.make_dual(argument, argument)
            got = tangent_or_error(compiled, dual)
            assert (
                "a derivative is wanted where it would be lost" in got if type(got) is str else not differing(got, want)
            )


def test_the_registered_operators_have_derivatives_and_refuse_to_lose_one() -> None:
    ops, as_is = torch.ops.rl_kernel_native, (None, 1, torch.float32, True, 0)
    leaf = W.clone().requires_grad_()
    for ours, theirs in (
        (lambda w: ops.linear(X, w, *as_is), lambda w: rk.linear(X, w)),
        (lambda w: ops.linear_input_grad(DY, w, True, 0), lambda w: rk.linear_input_grad(DY, w)),
        (lambda w: ops.tree_sum([w, w], None, torch.float32), lambda w: rk.tree_sum([w, w])),
        (
            lambda w: ops.logprob(w[:3], TARGET, None, None, None, 1.0, 1.0, None, -100, None, None, 0, 1)[0],
            lambda w: rk.logprob(w[:3], TARGET),
        ),
        (
            lambda w: torch.cat(ops.rms_norm(X, GAIN, w[:3], EPS, 0.0, True)[:2]),
            lambda w: torch.cat(rk.rms_norm(X, GAIN, EPS, residual=w[:3], round_before_weight=True)),
        ),
        (
            lambda w: joined(ops.rms_norm_backward(w, W, GAIN, None, None, EPS, 0.0, False, True, torch.float32)),
            lambda w: joined(rk.rms_norm_backward(w, W, GAIN, EPS)),
        ),
        (lambda w: ops.embedding(IDS % 8, w, 0, None, None), lambda w: rk.embedding(IDS % 8, w)),
        (
            lambda w: ops.embedding_backward(w[:3], IDS[0], 4, 0, None, None, torch.float32),
            lambda w: rk.embedding_backward(w[:3], IDS[0], 4),
        ),
        (
            lambda w: ops.rope(w[None], None, W, -W, None, True, None, True, None, 0, False)[0],
            lambda w: rk.rope(w[None], None, W, -W, interleaved=True, intermediate="input", head_axis=0)[0],
        ),
    ):
        assert not differing(*(torch.autograd.grad(f(leaf).square().sum(), leaf)[0] for f in (ours, theirs)))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(W, W * 2)
            assert not differing(*(forward_ad.unpack_dual(f(dual)).tangent for f in (ours, theirs)))
        for transform in (torch.func.grad(lambda w, f=ours: f(w).sum()), torch.func.jacfwd(ours)):
            with pytest.raises(RuntimeError, match="a derivative is wanted where it would be lost"):
                transform(W)
    with pytest.raises(RuntimeError, match="linear_weight_grad_: a derivative is wanted where it would be lost"):
        ops.linear_weight_grad_(torch.zeros(8, 32), DY, X.clone().requires_grad_(), True, 0)
    with pytest.raises(RuntimeError, match="rms_norm_backward_: a derivative is wanted where it would be lost"):
        ops.rms_norm_backward_(torch.zeros(32), R, X.clone().requires_grad_(), GAIN, None, None, EPS, 0.0, False, True)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_gradients(strict: bool) -> None:
    class Layer(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            weight = rk.rms_norm(self.weight, self.weight[0], EPS)
            return rk.linear(x, weight, self.bias)

    layer = Layer(32, 8)
    program = torch.export.export(layer, (X,), strict=strict).module()
    for module in (layer, program):
        module(X).square().sum().backward()
    assert not differing(program.weight.grad, layer.weight.grad)
    assert not differing(program.bias.grad, layer.bias.grad)


def test_a_name_of_two_functions_is_refused() -> None:
    """A graph calls a Function by its class's name, so a later class would replace an earlier class."""
    from rl_kernel_native import _in_graph

    rk.linear(X, W)  # its Functions are registered from now on
    with pytest.raises(ValueError, match="two autograd Functions are called Linear"):
        _in_graph.callable_in_graph(type("Linear", (torch.autograd.Function,), {}))


def test_a_compiled_function_under_a_transform_is_torchs_to_refuse_or_right() -> None:
    compiled = torch.compile(lambda w: rk.linear(X, w).square().sum(), backend="eager")
    compiled(W)
    want = torch.func.grad(lambda w: rk.linear(X, w).square().sum())(W)
    assert not differing(torch.func.grad(compiled)(W), want)


def test_a_trace_of_torch_jit_or_fx_is_refused() -> None:
    """torch.jit.trace would record the result as a constant; torch.fx.symbolic_trace passes no values at all."""
    for call in (
        lambda x: rk.linear(x, W),
        lambda x: rk.tree_sum([x]),
        lambda x: rk.linear_weight_grad(x, x),
        lambda x: rk.logprob(x, TARGET),
        lambda x: rk.rms_norm(x, GAIN, EPS),
        lambda x: rk.rms_norm_backward(x, R, GAIN, EPS),
        lambda x: rk.embedding(IDS, x),
        lambda x: rk.embedding_backward(x, IDS[0], 4),
        lambda x: rk.rope(x, None, ANGLES[0, :16], ANGLES[0, :16])[0],
    ):
        with pytest.raises(RuntimeError, match=r"torch.jit.trace is not supported; use torch.export"):
            torch.jit.trace(call, X)
        with pytest.raises(
            TypeError, match=r"(x|parts\[0\]|dy|logits|q|weight): torch.fx.symbolic_trace is not supported"
        ):
            torch.fx.symbolic_trace(call)


class ImportsWhenLookedAt(types.ModuleType):
    """Imitates the effect of a lazy module on sys.modules under a tracer."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        sys.modules.setdefault(f"{self.__name__}.part", types.ModuleType("part"))
        return types.ModuleType


@pytest.mark.parametrize("torch_first", [True, False])
def test_compiles_beside_lazy_modules(torch_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "_torch_at_import", torch if torch_first else None)
    monkeypatch.setitem(sys.modules, "lazy_module", ImportsWhenLookedAt("lazy_module"))
    torch.compiler.reset()
    try:
        found = torch.compile(lambda x, y: rk.logprob(x, y), fullgraph=True, backend="eager")(X, TARGET)
    finally:
        sys.modules.pop("lazy_module.part", None)
    assert not differing(found, rk.logprob(X, TARGET))
