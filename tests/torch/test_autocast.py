"""torch.autocast: matrix products cast their operands as torch's own do; everything else computes as without
autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="autocast is torch's")

import rl_kernel_native as rk  # noqa: E402
from test_compiled_transforms import FUNCTIONS  # noqa: E402

_generator = torch.Generator().manual_seed(5)


def normal(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, generator=_generator).to(dtype)


TARGET = torch.tensor([1, 0, -100, 4])
HALF = torch.bfloat16
# name: (function, its operands, some of which have another dtype than the rest)
PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "linear": (rk.linear, (normal(4, 32), normal(6, 32, dtype=HALF), normal(6))),
    "linear_partial": (
        lambda x, w: rk.linear_partial(x, w, k_segments=2, first_segment=0, num_segments=1),
        (normal(4, 32, dtype=HALF), normal(6, 32)),
    ),
    "attention": (rk.attention, (normal(1, 5, 2, 8), normal(1, 5, 2, 8, dtype=HALF), normal(1, 5, 2, 8))),
    "linear_logprob": (
        lambda h, w, b, p, q: rk.linear_logprob(h, w, TARGET, bias=b, lora_a=p, lora_b=q),
        (normal(4, 32), normal(6, 32, dtype=HALF), normal(6), normal(8, 32), normal(6, 8)),
    ),
    "linear_logprob_pair": (
        lambda h, w, r, v: torch.stack(rk.linear_logprob_pair(h, w, r, v, TARGET, ref_grad=True)[:2]),
        (normal(4, 32), normal(6, 32), normal(4, 32, dtype=HALF), normal(6, 32)),
    ),
    "linear_cross_entropy": (
        lambda h, w: rk.linear_cross_entropy(h, w, TARGET), (normal(4, 32, dtype=HALF), normal(6, 32)),
    ),
}  # fmt: skip


def value_and_grads(f: Callable[..., Any], operands: tuple[Any, ...]) -> tuple[Any, ...]:
    leaves = [x.clone().requires_grad_() for x in operands]
    y = f(*leaves)
    return (y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves))


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("how", ["eager", "without gradients", "compiled", "compiled around it"])
def test_products_cast_as_torchs_do(name: str, how: str) -> None:
    f, operands = PRODUCTS[name]
    cast = tuple(x.to(HALF) for x in operands)
    want = value_and_grads(f, cast)
    if how == "without gradients":
        with torch.no_grad(), torch.autocast("cpu", HALF):
            assert torch.equal(f(*operands), want[0])
        return
    if how == "compiled around it":

        def run(*x: Any) -> Any:
            with torch.autocast("cpu", HALF):
                return f(*x)

        got = value_and_grads(torch.compile(run, fullgraph=True, backend="aot_eager"), operands)
    else:
        call = torch.compile(f, fullgraph=True, backend="aot_eager") if how == "compiled" else f
        with torch.autocast("cpu", HALF):
            got = value_and_grads(call, operands)
    assert [x.dtype for x in got] == [want[0].dtype, *(x.dtype for x in operands)]
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(got, want, strict=True))
    with torch.autocast("cpu", HALF), torch.autocast("cpu", enabled=False), pytest.raises(TypeError, match="dtype"):
        f(*operands)


def test_the_dtype_is_that_of_torchs_linear() -> None:
    x, w, b = PRODUCTS["linear"][1]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            theirs, ours = torch.nn.functional.linear(x, w, b), rk.linear(x, w, b)
        assert ours.dtype == theirs.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.1)
    torch.set_autocast_enabled("cuda", True)
    try:
        with pytest.raises(TypeError, match="weight: expected dtype"):
            rk.linear(x, w, b)  # on a CPU, where autocast is off
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_transforms_and_main_grad_see_the_cast() -> None:
    x, w = normal(2, 4, 32), normal(6, 32)
    with torch.autocast("cpu", HALF):
        got = torch.func.vmap(lambda one: rk.linear(one, w))(x)
        main_grad = torch.zeros(6, 32)
        weight = w.clone().requires_grad_()
        rk.linear(x, weight, main_grad=main_grad).sum().backward()
    assert torch.equal(got, rk.linear(x.to(HALF), w.to(HALF)))
    want = torch.zeros(6, 32)
    rk.linear_weight_grad(torch.ones(2, 4, 6, dtype=HALF), x.to(HALF), main_grad=want)
    assert weight.grad is None or not weight.grad.any()
    assert torch.equal(main_grad, want)


def test_an_error_about_dtypes_names_autocast_where_it_is_not_followed() -> None:
    x, w = normal(3, 8, dtype=HALF), normal(8)
    for call in (
        lambda: rk.rms_norm(x, w, 1e-6, residual=x.float()),
        lambda: rk.rms_norm(x.clone().requires_grad_(), w, 1e-6, residual=x.float()),
        lambda: torch.func.vmap(lambda one: rk.rms_norm(one, w, 1e-6, residual=one.float()))(x[None]),
        lambda: rk.rms_norm(x.to("meta"), w.to("meta"), 1e-6, residual=x.float().to("meta")),
    ):
        with torch.autocast("cpu"), pytest.raises(TypeError, match="got float32; autocast is not followed: cast"):
            call()
        with pytest.raises(TypeError, match=r"got float32$"):
            call()


OTHERS = [name for name in FUNCTIONS if name.split(" ")[0] not in PRODUCTS]


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_computes_as_without_it(name: str) -> None:
    f, x = FUNCTIONS[name]
    want = value_and_grads(f, (x,))
    with torch.autocast("cpu", HALF):
        got = value_and_grads(f, (x,))
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))
