"""Every operator's backward in torch's engine: gradients of every kind, and gradients that main_grad cannot take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import rl_kernel_native as rk  # noqa: E402
from cases import differing  # noqa: E402
from engine_cases import CASES, Case, Subclass, zeros_for  # noqa: E402
from rl_kernel_native._operator import OPERATORS  # noqa: E402
from rl_kernel_native.contract import row  # noqa: E402

forward_ad = torch.autograd.forward_ad
WITH_MAIN_GRAD = ("linear", "linear_logprob", "rms_norm", "embedding")
SCALARS = ("policy_loss", "value_loss")
# test_torch.py compares the tangents of logprob with float64. The other operators have no tangents and say so, in
# test_preference_loss.py and test_linear_logprob.py.
WITHOUT_TANGENTS = ("logprob", "linear_logprob", "preference_loss")
# torch itself refuses, or the message is about capsules; the other operators name the argument and say what to pass.
BY_TORCH = (RuntimeError, "got mixed torch.Tensor and DTensor")
DTENSORS = dict.fromkeys(("preference_loss", "policy_loss", "value_loss"), BY_TORCH)
# torch passes zeros to these operators, its default unless a Function asks for None.
FILLED_BY_TORCH = ("linear", "linear_input_grad", "linear_weight_grad", "linear_bias_grad", "tree_sum", "embedding",
                   "silu_mul", "gelu_mul", "kl")  # fmt: skip
PRODUCTS = ("linear", "linear_input_grad", "linear_weight_grad", "linear_logprob")  # float32 is the CPU's alone
SPARSE = dict.fromkeys(("policy_loss", "value_loss"), (TypeError, "factor: expected a dense array in memory"))


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def case(name: str, device: str, rng: np.random.Generator) -> Case:
    return CASES[name](rng, device, "bfloat16")


def test_every_differentiable_operator_is_here() -> None:
    ops = Path(rk.__file__).parent / "ops"
    by_hand = {path.name.removesuffix("_traced.py") for path in ops.glob("*_traced.py")}
    described = {operator.name.removesuffix("_backward") for operator in OPERATORS if operator.gradient is not None}
    described = {"silu_mul" if name == "gated_mul" else name for name in described}  # silu_mul and gelu_mul share it
    assert by_hand | described <= {name.split()[0] for name in CASES}


class Flag:
    """True as a condition, but not an index."""

    def __bool__(self) -> bool:
        return True


NAMED = [o for o in OPERATORS if any(a.called for a in o.arrays) and "[]" not in o.options.replace("int[]?", "")]


@pytest.mark.parametrize("operator", NAMED, ids=lambda o: o.name)
def test_a_name_in_errors_indexes_nothing_by_a_bool(operator: Any) -> None:
    """Dynamo of torch 2.11 cannot index a tuple by a bool, and asks for names while it traces."""
    by_type = {"bool": Flag(), "int": 0, "float": 1.0, "SymInt": 0}
    how = tuple(by_type.get(option.split()[0]) for option in operator.options.split(", "))
    assert all(isinstance(a.label(how), str) for a in operator.arrays)


def plain(tensors: Any) -> tuple[Any, ...]:
    return tuple(t.as_subclass(torch.Tensor) for t in tensors)


def test_a_call_may_be_the_first_of_its_thread(case: Case) -> None:
    """The driver encodes tensor maps only for threads with a current CUDA context. A new thread may have none."""
    want = case.outputs(case.leaves)
    with ThreadPoolExecutor(1) as thread:
        got = thread.submit(case.outputs, case.leaves).result()
    assert not differing(got, want)


def test_batches_of_gradients_have_the_bytes_of_a_loop(case: Case) -> None:
    leaves = case.fresh()
    outputs = case.outputs(leaves)

    def gradients(*dys: Any, **options: Any) -> tuple[Any, ...]:
        return torch.autograd.grad(outputs, leaves, dys, retain_graph=True, **options)

    batches = tuple(torch.stack([g, g * 2, g - 1]) for g in case.gradients.values())
    batched = gradients(*batches, is_grads_batched=True)
    mapped = torch.func.vmap(gradients)(*batches)
    for i, dys in enumerate(zip(*batches, strict=True)):
        want = gradients(*dys)
        for got in (batched, mapped):
            assert not differing(tuple(g[i] for g in got), want)


@pytest.mark.parametrize("name", [name for name in CASES if name not in WITHOUT_TANGENTS])
def test_a_tangent_of_the_gradient_is_kept(name: str, case: Case, device: str, rng: np.random.Generator) -> None:
    """The gradient is linear in the incoming gradient."""
    if case.tangents:
        # float32, so that no 16-bit rounding hides errors of torch's composition
        case = CASES[name](rng, device, "float32")
    leaves = case.fresh()
    outputs, dys = case.outputs(leaves), tuple(case.gradients.values())
    with forward_ad.dual_level():
        duals = tuple(forward_ad.make_dual(g, g * 2) for g in dys)
        got = torch.autograd.grad(outputs, leaves, duals, retain_graph=True)
        tangents = tuple(forward_ad.unpack_dual(g).tangent for g in got)
    want = torch.autograd.grad(outputs, leaves, tuple(g * 2 for g in dys))
    if not case.tangents:
        assert not differing(tangents, want)
        return
    for tangent, expected in zip(tangents, want, strict=True):
        allowed = row(case.tangents, "derivatives").allowed(largest=float(expected.abs().max()))
        torch.testing.assert_close(tangent, expected, rtol=0, atol=allowed)


def test_two_derivatives_agree_in_any_order(name: str, device: str, rng: np.random.Generator) -> None:
    """What a forward keeps, or a first derivative reads, is no constant of the second derivative. An operator without a
    second derivative refuses it in every order."""
    is_half = device != "cpu" and name in PRODUCTS
    case = CASES[name](rng, device, "float16" if is_half else "float32")
    places = tuple(range(len(case.leaves)))
    other = tuple(torch.nan_to_num(x).flip(0) * 0.5 for x in case.leaves)  # padding may be NaN

    def loss(*leaves: Any) -> Any:
        outputs = case.outputs(leaves)
        return sum((y * g).sum() for y, g in zip(outputs, case.gradients.values(), strict=True))

    def first(*leaves: Any) -> Any:
        found = torch.func.grad(loss, places)(*leaves)
        return sum((g * t).sum() for g, t in zip(found, other, strict=True))

    def along(*leaves: Any) -> Any:
        return torch.func.jvp(loss, leaves, other)[1]

    orders = {
        "reverse over reverse": lambda: torch.func.grad(first, places)(*case.leaves),
        "forward over reverse": lambda: torch.func.jvp(torch.func.grad(loss, places), case.leaves, other)[1],
        "reverse over forward": lambda: torch.func.grad(along, places)(*case.leaves),
    }
    found, refused = {}, {}
    for order, derivative in orders.items():
        try:
            found[order] = derivative()
        except RuntimeError as error:
            refused[order] = str(error)
    words = r"has no second derivative|no backward|no forward-mode|second derivative is wanted"
    assert all(re.search(words, text) for text in refused.values()), refused
    assert not refused or not found, (refused, list(found))
    for order, got in found.items():
        for x, want in zip(got, found["reverse over reverse"], strict=True):
            allowed = 2**-8 * float(want.abs().max()) if is_half else 1e-4  # some eight roundings of float16
            torch.testing.assert_close(
                x, want, rtol=1e-4, atol=allowed, msg=lambda words, order=order: f"{order}: {words}"
            )


KINDS: dict[str, Any] = {
    "subclass": lambda g: g.as_subclass(Subclass),
    "negative bit": lambda g: torch._neg_view(-g),
    "mode": lambda g: g,
    "expanded columns": lambda g: g[..., :1].expand_as(g),
    "expanded rows": lambda g: g.narrow(max(g.dim() - 2, 0), 0, 1).expand_as(g),
    "transposed": lambda g: (
        g.transpose(-3, -2).contiguous().transpose(-3, -2) if g.dim() > 2 else torch.stack([g, g], -1)[..., 0]
    ),
    "another dtype": lambda g: g.float() if g.dtype != torch.float32 else g.double(),
}


def every_gradient(case: Case, transform: Any, widen: bool) -> tuple[Any, ...]:
    """Gradients of all outputs, of each output alone, and through main_grad."""
    dys = [transform(g) for g in case.gradients.values()]
    leaves = case.fresh()

    def outputs(**options: Any) -> tuple[Any, ...]:
        found = case.outputs(leaves, **options)
        return tuple(y.to(g.dtype) for y, g in zip(found, dys, strict=True)) if widen else found

    found = [*torch.autograd.grad(outputs(), leaves, dys)]
    for i in range(len(dys) if len(dys) > 1 else 0):
        found += torch.autograd.grad(outputs()[i], leaves, dys[i], allow_unused=True)
    if case.accumulated is not None:
        main_grad = zeros_for(leaves[case.accumulated])
        torch.autograd.backward(outputs(main_grad=main_grad), dys)
        assert main_grad._version == 1
        found += [main_grad, *(leaf.grad for leaf in leaves)]
    return tuple(t for t in found if t is not None)


# A result without dimensions has no expanded layouts.
@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for n in CASES for k in KINDS if n not in SCALARS or not k.startswith("expanded")]
)
def test_a_gradient_of_any_kind_has_the_bytes_of_a_plain_one(name: str, kind: str, case: Case) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    make, widen = KINDS[kind], kind == "another dtype"
    want = every_gradient(case, lambda g: plain([make(g)])[0].clone().contiguous(), widen)
    if kind == "mode":
        with FlopCounterMode(display=False) as counter:
            got = every_gradient(case, make, widen)
        assert (
            name in ("linear", "linear_input_grad", "linear_weight_grad", "linear_logprob", "attention")
            or counter.get_total_flops() == 0
        ), "of products alone, as torch counts"
    else:
        got = every_gradient(case, make, widen)
    assert not differing(plain(t.resolve_neg() for t in got), want)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process group with one rank."""
    dist = pytest.importorskip("torch.distributed")
    file = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Ending(torch.autograd.Function):
    """A later step whose backward has no gradient to pass on."""

    @staticmethod
    def forward(ctx: Any, *outputs: Any) -> Any:
        return outputs[0].new_zeros(()).requires_grad_()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None,) * len(ctx.needs_input_grad)


def test_no_gradient_from_later_steps_leaves_none(name: str, case: Case) -> None:
    """The gradient is None. Zeros would cost a backward, and an optimiser would take a step with them."""
    leaves = case.fresh()
    Ending.apply(*case.outputs(leaves)).backward()
    if name.split()[0] in FILLED_BY_TORCH:
        assert not any(leaf.grad is not None and leaf.grad.any() for leaf in leaves)
    else:
        assert [leaf.grad for leaf in leaves] == [None] * len(leaves)


@pytest.mark.parametrize("device", ["cpu"])  # the group uses gloo
def test_a_gradient_from_a_collective_is_waited_for(case: Case, group: Any) -> None:
    collectives = pytest.importorskip("torch.distributed._functional_collectives")

    def reduced(g: Any) -> Any:
        found = collectives.all_reduce(g.clone(), "sum", group)
        assert type(found) is collectives.AsyncCollectiveTensor
        return found

    want = every_gradient(case, lambda g: g, False)
    assert not differing(every_gradient(case, reduced, False), want)
    leaves, dys = case.fresh(), list(case.gradients.values())
    for i in range(len(dys)):  # only dys[i] is special; the other dys are plain
        mixed = [reduced(g) if j == i else g for j, g in enumerate(dys)]
        assert not differing(torch.autograd.grad(case.outputs(leaves), leaves, mixed), want[: len(leaves)])


@pytest.mark.parametrize("device", ["cpu"])
def test_a_gradient_that_is_a_dtensor_is_refused(name: str, case: Case, group: Any) -> None:
    tensor = pytest.importorskip("torch.distributed.tensor")
    mesh = tensor.init_device_mesh("cpu", (1,))
    leaves = case.fresh()
    outputs = case.outputs(leaves)
    for refused in case.gradients:
        dys = [
            tensor.DTensor.from_local(g, mesh, [tensor.Replicate()]) if argument == refused else g
            for argument, g in case.gradients.items()
        ]
        ours = TypeError, rf"{refused}: expected a local tensor, got a DTensor; pass tensor.to_local"
        error, words = DTENSORS.get(name, ours)
        with pytest.raises(error, match=words):
            torch.autograd.grad(outputs, leaves, dys, retain_graph=True)


def test_a_fake_gradient_gives_fake_gradients(case: Case) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    leaves = case.fresh()
    outputs = case.outputs(leaves)
    with FakeTensorMode(allow_non_fake_inputs=True):
        got = torch.autograd.grad(outputs, leaves, [torch.ones_like(g) for g in case.gradients.values()])
    assert all(isinstance(g, FakeTensor) and g.shape == leaf.shape for g, leaf in zip(got, leaves, strict=True))


def test_a_sparse_gradient_is_refused(name: str, case: Case) -> None:
    leaves = case.fresh()
    for refused in case.gradients:
        dys = [g.to_sparse() if argument == refused else g for argument, g in case.gradients.items()]
        error, words = SPARSE.get(name, (TypeError, f"{refused}: expected a dense tensor, got a sparse_coo one"))
        with pytest.raises(error, match=words):
            torch.autograd.grad(case.outputs(leaves), leaves, dys)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("name", WITH_MAIN_GRAD)
def test_what_cannot_be_added_to_main_grad_is_refused(case: Case) -> None:
    assert case.accumulated is not None
    leaves = case.fresh()
    weight = leaves[case.accumulated] = leaves[case.accumulated] * 1
    main_grad = zeros_for(weight)
    y, dy = case.outputs(leaves, main_grad=main_grad)[0], next(iter(case.gradients.values()))
    batch = torch.stack([dy, dy])
    with pytest.raises(ValueError, match="main_grad: a batch of gradients"):
        torch.autograd.grad(y, weight, batch, is_grads_batched=True, retain_graph=True, allow_unused=True)
    with pytest.raises(ValueError, match="main_grad: a batch of gradients"):
        torch.func.vmap(lambda g: torch.autograd.grad(y, leaves, g, retain_graph=True, allow_unused=True)[0])(batch)
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match=f"{case.adds}: a derivative is wanted where it would be lost"),
    ):
        y.backward(forward_ad.make_dual(dy, dy), retain_graph=True)
    with pytest.raises(ValueError, match=r"main_grad: .*without create_graph"):
        y.backward(dy, create_graph=True)
    assert not bool(main_grad.any())
    assert main_grad._version == 0


@pytest.mark.parametrize("name", CASES)
def test_no_output_is_a_view(name: str, rng: np.random.Generator) -> None:
    """In-place changes of a view drop the hooks of its base, such as the hooks of FSDP2, which reduce gradients."""
    case = CASES[name](rng, "cpu", "float32")
    assert not any(t._is_view() for t in case.outputs(case.fresh()))


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 2)])
@pytest.mark.parametrize(
    "how", [{"reduction": r, "z_loss": z} for r in ("mean", "sum", "none") for z in (0.0, 0.1)], ids=str
)
def test_no_cross_entropy_is_a_view(shape: tuple[int, ...], how: dict[str, Any]) -> None:
    h, w = torch.randn(*shape, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    loss = rk.linear_cross_entropy(h, w, torch.arange(4).reshape(shape), **how)
    assert not loss._is_view()
    loss += 1.0
    loss.sum().backward()
    assert h.grad is not None


def cache() -> tuple[Any, ...]:
    return tuple(torch.zeros(1, 4, 1, 8) for _ in range(2))


SHORT_WAYS = {
    "embedding": lambda: rk.embedding(torch.arange(2), torch.zeros(2, 4)),
    "kl": lambda: rk.kl(torch.zeros(3), torch.zeros(3), estimator="k1"),
    "kv_cache_append": lambda: rk.kv_cache_append(
        torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), *cache(), torch.zeros(1, dtype=torch.int64)
    ),
    "rms_norm": lambda: rk.rms_norm(torch.zeros(2, 4), torch.zeros(4), 1e-6),
    "rope": lambda: rk.rope(torch.zeros(2, 1, 8), None, torch.zeros(2, 8), torch.zeros(2, 8)),
    "sequence_logprob": lambda: rk.sequence_logprob(torch.zeros(2, 3)),
    "silu_mul": lambda: rk.silu_mul(torch.zeros(2, 4), torch.zeros(2, 4)),
}


def caches_of(k: Any, v: Any) -> Any:
    caches = cache()
    rk.kv_cache_append(k, v, *caches, torch.zeros(1, dtype=torch.int64))
    return caches


# The short way of a GPU by its function of the extension: a public call, and its operands.
EAGER: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "attention_eager": (lambda q, k, v: rk.attention(q, k, v, exp="portable"), ((1, 2, 1, 8),) * 3),
    "embedding_eager": (lambda w: rk.embedding(torch.arange(2), w), ((2, 4),)),
    "gated_mul_eager": (rk.silu_mul, ((2, 4),) * 2),
    "kv_cache_append_eager": (caches_of, ((1, 1, 8),) * 2),
    "linear_eager": (rk.linear, ((2, 4), (3, 4), (3,))),
    "logprob_eager": (lambda z: rk.logprob(z, torch.arange(2), exp="portable"), ((2, 4),)),
    "rms_norm_eager": (lambda x, w, r: rk.rms_norm(x, w, 1e-6, residual=r), ((2, 4), (4,), (2, 4))),
    "rope_eager": (rk.rope, ((2, 1, 8), (2, 1, 8), (2, 8), (2, 8))),
    "sequence_logprob_eager": (rk.sequence_logprob, ((2, 3),) * 2),
}


OF_A_GPU_ALONE = {"attention_eager", "logprob_eager"}  # these functions check where the memory is


def test_every_short_way_is_in_the_table() -> None:
    from rl_kernel_native._native import module

    assert set(EAGER) == {name for name in vars(module) if name.endswith("_eager")}


@pytest.mark.parametrize("name", EAGER)
def test_a_negated_operand_leaves_the_short_way_and_is_resolved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a CPU stand in for a GPU's, and take the GPU's short path."""
    from rl_kernel_native._native import module

    call, shapes = EAGER[name]
    given = [torch.randn(shape) for shape in shapes]
    want = call(*given)
    found, own = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *arguments: found.append(own(*arguments)) or found[-1])
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    for i, x in enumerate(given):
        got = call(*given[:i], torch._neg_view(-x), *given[i + 1 :])
        assert not differing(plain(got), plain(want)), f"operand {i}"
    assert len(found) == len(given)
    assert all(result is NotImplemented for result in found)


@pytest.mark.parametrize("name", EAGER)
def test_the_short_way_is_that_of_plain_tensors_without_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    from rl_kernel_native._native import module

    call, shapes = EAGER[name]
    given = [torch.randn(shape) for shape in shapes]
    want, asked, own = call(*given), [], getattr(module, name)
    with monkeypatch.context() as gpu:
        gpu.setattr(module, name, lambda *arguments: asked.append(arguments) or own(*arguments))
        gpu.setattr(torch.Tensor, "is_cuda", True, raising=False)
        assert not differing(plain(call(*given)), plain(want))
        (plain_ones,) = asked
        leaf = given[0].clone().requires_grad_()
        found = {"plain": own(*plain_ones), "gradient": own(*(leaf if x is given[0] else x for x in plain_ones))}
        with torch.no_grad():
            found["no_grad"] = own(*(leaf if x is given[0] else x for x in plain_ones))
        with TorchDispatchMode():
            found["mode"] = own(*plain_ones)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found["autocast"] = own(*plain_ones)
        torch.vmap(lambda x: found.update(vmap=own(*plain_ones)) or x)(torch.zeros(2))
    found["cpu"] = own(*plain_ones)
    short = {kind for kind, result in found.items() if result is not NotImplemented}
    assert short == (set() if name in OF_A_GPU_ALONE else {"plain", "no_grad"})


@pytest.mark.parametrize("name", SHORT_WAYS)
def test_the_first_call_of_any_operator_opens_the_short_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first eager call stores the engine, and later calls use it again. A process that calls one operator alone has
    the same host cost as any other."""
    import importlib

    from rl_kernel_native import _call, _engine

    module = importlib.import_module(f"rl_kernel_native.ops.{name}")
    monkeypatch.setattr(_call, "loaded", None)
    monkeypatch.setattr(_call, "plain", ())
    monkeypatch.setattr(_call, "is_read_by_dynamo", lambda: True)
    if hasattr(module, "_torch_path"):
        monkeypatch.setattr(module, "_torch_path", None)
    SHORT_WAYS[name]()
    assert _call.loaded is _engine
    assert torch.Tensor in _call.plain


@pytest.mark.parametrize("kind", ["plain", "parameter", "negative bit", "meta", "subclass", "vmap", "mode", "tangents"])
def test_only_plain_tensors_skip_the_dispatcher(kind: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    from rl_kernel_native._torch import is_direct

    x, found = torch.zeros(3), []
    if kind == "vmap":
        torch.vmap(lambda y: found.append(is_direct(x)) or y)(x)
    elif kind == "mode":
        with TorchDispatchMode():
            found.append(is_direct(x))
    elif kind == "tangents":
        with forward_ad.dual_level():
            found.append(is_direct(x))
    else:
        of = {
            "plain": lambda: x,
            "parameter": lambda: torch.nn.Parameter(x),
            "negative bit": lambda: torch._neg_view(x),
            "meta": lambda: x.to("meta"),
            "subclass": lambda: x.as_subclass(Subclass),
        }
        found.append(is_direct(None, 1.0, x, of[kind]()))
    assert found == [kind in ("plain", "parameter")]
