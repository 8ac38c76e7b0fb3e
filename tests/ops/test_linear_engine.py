"""linear's backward in torch's engine: the requested gradients, main_grad, checkpointing."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from linear_cases import Operands, operands

torch = pytest.importorskip("torch")

from engine_cases import Subclass, zeros_for  # noqa: E402


@pytest.fixture
def o(device: str, rng: np.random.Generator) -> Operands:
    return operands(rng, (2, 3), 32, 10, "bfloat16", device)


def leaves_of(o: Operands) -> list[Any]:
    return [t.clone().requires_grad_() for t in o[:3]]


# ---- requested gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("inner", [False, True], ids=["leaf", "product"])
def test_main_grad_gets_the_gradient_once_where_backward_is_split(inner: bool, traced: bool, o: Operands) -> None:
    """Splits backward as zero-bubble pipelines do: inputs first, weights later."""
    x, weight, bias = leaves_of(o)
    if traced:
        x = o.x.as_subclass(Subclass).clone().requires_grad_()
    w = weight * 1 if inner else weight
    main_grad, want = zeros_for(weight), zeros_for(weight)
    y = rk.linear(x, w, bias, main_grad=main_grad)
    rk.linear_weight_grad(o.dy, o.x, main_grad=want)
    (dx,) = torch.autograd.grad(y, x, o.dy, retain_graph=True)
    assert not bool(main_grad.any())
    assert main_grad._version == 0
    assert not differing(dx.as_subclass(torch.Tensor), rk.linear_input_grad(o.dy, o.weight))
    y.backward(o.dy, inputs=[x, bias], retain_graph=True)
    assert not bool(main_grad.any())
    y.backward(o.dy, inputs=[w], retain_graph=True)
    assert not differing(main_grad, want)
    if not inner:
        with pytest.raises(ValueError, match=r"main_grad: takes the gradient of weight, so torch.autograd.grad"):
            torch.autograd.grad(y, weight, o.dy, retain_graph=True, allow_unused=True)
    assert not differing(main_grad, want)
    y.backward(o.dy)
    rk.linear_weight_grad(o.dy, o.x, main_grad=want)
    assert not differing(main_grad, want)


class _Product(torch.autograd.Function):
    """A minimal autograd Function in Python."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        return dy * weight, dy * x


def test_pipelinings_split_backward_counts_once(o: Operands) -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining._backward")
    x, weight = (torch.ones(2, requires_grad=True) for _ in range(2))
    try:
        _, groups = pipelining.stage_backward_input(
            [_Product.apply(x * 1, weight)], [torch.ones(2)], [x], iter([weight])
        )
        pipelining.stage_backward_weight(iter([weight]), groups)
    except RuntimeError as error:
        pytest.skip(f"this torch splits no backward through a Function of Python: {error}")
    for main_grad in (None, zeros_for(o.weight)):
        x, weight, bias = leaves_of(o)
        y = rk.linear(x * 1, weight, bias, main_grad=main_grad)
        (dx,), groups = pipelining.stage_backward_input([y], [o.dy], [x], iter([weight, bias]))
        assert not differing(dx, rk.linear_input_grad(o.dy, o.weight))
        if main_grad is None:
            pipelining.stage_backward_weight(iter([weight, bias]), groups)
            assert not differing(weight.grad, rk.linear_weight_grad(o.dy, o.x))
            assert not differing(bias.grad, rk.linear_bias_grad(o.dy))
        else:  # that function asks autograd.grad for the weight's gradient
            with pytest.raises(ValueError, match="main_grad: takes the gradient of weight"):
                pipelining.stage_backward_weight(iter([weight, bias]), groups)
            assert not bool(main_grad.any())


def test_a_gradient_that_nobody_asks_for_is_not_computed(o: Operands, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_kernel_native.ops import eager_autograd

    called: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            called.append(name)
            return getattr(native, name)

    native = eager_autograd._C
    y = rk.linear(*(leaves := leaves_of(o)))
    monkeypatch.setattr(eager_autograd, "_C", Counting())
    names = (["linear_input_grad"], ["linear_weight_grad", "linear_bias_grad"], ["linear_bias_grad"])
    for leaf, expected in zip(leaves, names, strict=True):
        called.clear()
        torch.autograd.grad(y, leaf, o.dy, retain_graph=True)
        assert called == expected
        y.backward(o.dy, inputs=[leaf], retain_graph=True)
        assert called == expected * 2


# ---- gradients of every kind -----------------------------------------------------------------------------------------


def test_gradcheck_with_batched_gradients_and_a_vectorised_hessian(rng: np.random.Generator) -> None:
    o = operands(rng, (4,), 6, 5, "float32")
    leaves = tuple(t.clone().requires_grad_() for t in o[:3])
    # the function is bilinear, so a quotient of any step is exact up to float32
    options = {"eps": 0.25, "atol": 1e-4, "rtol": 1e-4}
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(rk.linear, leaves, check_batched_grad=True, **options)
    f = lambda x: rk.linear(x, o.weight).square().sum()  # noqa: E731
    got, want = (torch.autograd.functional.hessian(f, o.x, vectorize=v) for v in (True, False))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_flops_are_counted_forward_and_backward(o: Operands) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    product = 2 * 6 * 32 * 10
    with FlopCounterMode(display=False) as counter:
        rk.linear(*leaves_of(o)).sum().backward()
    assert counter.get_total_flops() == 3 * product
    with FlopCounterMode(display=False) as counter:
        rk.linear(*leaves_of(o), main_grad=zeros_for(o.weight)).sum().backward()
        rk.linear_input_grad(o.dy, o.weight)
    assert counter.get_total_flops() == 4 * product


# ---- main_grad -------------------------------------------------------------------------------------------------------


def test_a_write_of_every_path_is_counted(o: Operands) -> None:
    """A backward that saved main_grad must not run after something was added to it."""
    from torch.utils.flop_counter import FlopCounterMode

    memory = zeros_for(o.weight)
    rk.linear_weight_grad(o.dy, o.x, main_grad=memory)
    with FlopCounterMode(display=False):
        rk.linear_weight_grad(o.dy, o.x, main_grad=memory)
    assert memory._version == 2
    if o.x.is_cuda:
        return
    dy, x = (t.float().numpy() for t in (o.dy, o.x))
    for name in ("main_grad", "out"):
        assert rk.linear_weight_grad(dy, x, **{name: memory}) is memory
    assert memory._version == 4
    logits, target, out = torch.randn(3, 8), np.array([1, 2, 3]), torch.zeros(3)
    rk.logprob(logits.numpy(), target, out=out)
    assert out._version == 1
    rk.logprob(logits, torch.from_numpy(target), out=out)
    assert out._version == 2
    rk.logprob_backward(logits, torch.from_numpy(target), out, dlogprob=out, out=logits)
    assert logits._version == 1


def test_backwards_of_several_threads_lose_no_addition(rng: np.random.Generator) -> None:
    """Every addition is of ones, so the sum is exact in any order."""
    x, dy, threads, calls = torch.ones(8, 256), torch.ones(8, 256), 8, 25
    weight = torch.zeros(256, 256, requires_grad=True)
    main_grad = torch.zeros(256, 256)

    def work() -> None:
        for _ in range(calls):
            rk.linear(x, weight, main_grad=main_grad).backward(dy)

    running = [threading.Thread(target=work) for _ in range(threads)]
    for t in running:
        t.start()
    for t in running:
        t.join()
    assert bool((main_grad == 8.0 * threads * calls).all())


def test_a_row_parallel_layer_takes_main_grad_and_weight_grad_dtype(o: Operands) -> None:
    columns = slice(16, 32)
    options: dict[str, Any] = {"k_segments": 2, "first_segment": 1, "num_segments": 1}
    x, weight, main_grad = o.x[..., columns], o.weight[:, columns].clone().requires_grad_(), torch.zeros(10, 16)
    main_grad = main_grad.to(o.x.device)
    dy = o.dy.float()
    rk.linear_partial(x, weight, **options, main_grad=main_grad).backward(dy)
    assert weight.grad is None
    want = rk.linear_weight_grad(o.dy, x, out_dtype="float32")
    assert not differing(main_grad, want)
    if hasattr(torch.Tensor, "grad_dtype"):
        weight.grad_dtype = torch.float32
        rk.linear_partial(x, weight, **options, weight_grad_dtype="float32").backward(dy)
        assert not differing(weight.grad, want)


# ---- activation checkpointing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["context_fn", "inside", "inside, reentrant"])
def test_checkpointing_recomputes_in_the_arithmetic_of_the_forward(how: str, rng: np.random.Generator) -> None:
    """The gradient of a factor of y is the recomputed y. The gradient is float32, so that every bit shows."""
    from torch.utils.checkpoint import checkpoint

    o = operands(rng, (4,), 256, 256)

    def layer(x: Any, factor: Any) -> Any:
        return rk.linear(x, o.weight, out_dtype="float32") * factor

    inside = rk.arithmetic("sm_90")(layer)

    def gradient(run: Any) -> Any:
        factor = torch.ones(4, 256, requires_grad=True)
        with rk.arithmetic("sm_90"):
            y = run(o.x, factor)
        y.sum().backward()  # outside the context
        return factor.grad

    want = gradient(layer)
    runs = {
        "context_fn": lambda *a: checkpoint(layer, *a, use_reentrant=False, context_fn=rk.checkpoint_contexts),
        "inside": lambda *a: checkpoint(inside, *a, use_reentrant=False),
        "inside, reentrant": lambda *a: checkpoint(inside, *a, use_reentrant=True),
    }
    assert not differing(gradient(runs[how]), want)
    plain = gradient(lambda *a: checkpoint(layer, *a, use_reentrant=False))
    assert differing(plain, want), "without it the test would pass as well"


def test_an_arithmetic_context_is_for_one_with() -> None:
    context = rk.arithmetic("sm_90")
    with context:
        with pytest.raises(RuntimeError, match="arithmetic: a context manager is for one `with`"), context:
            pass
        assert rk.current_arithmetic() == "sm_90"
    assert rk.current_arithmetic() == "ieee"
    with pytest.raises(RuntimeError, match=r"call rk.arithmetic again"), context:
        pass
    decorated = rk.arithmetic("sm_80")(rk.current_arithmetic)
    assert [decorated(), decorated(), rk.current_arithmetic()] == ["sm_80", "sm_80", "ieee"]


def test_an_arithmetic_context_decorates_no_function_that_runs_after_its_call() -> None:
    async def coroutine() -> None: ...

    def generator() -> Any:
        yield

    async def generates() -> Any:
        yield

    class Layer: ...

    for late in (coroutine, generator, generates, Layer):
        with pytest.raises(TypeError, match=f"arithmetic: {late.__name__} runs after its call returned"):
            rk.arithmetic("sm_90")(late)
    with pytest.raises(RuntimeError, match="not entered"):
        rk.arithmetic("sm_90").__exit__(None, None, None)
    with pytest.raises(ValueError, match='unit: expected "ieee"'):
        rk.arithmetic(("sm_90", "ieee"))  # type: ignore[arg-type]
