"""linear's gradients: sums over tokens in blocks, main_grad, and torch's autograd over the same functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from linear_cases import Operands, chain, dtypes_of, operands

torch = pytest.importorskip("torch")

BLOCK = 8192  # rows per block of rule 9
ROWS = [1, 8191, 8192, 8193, 3 * 8192 + 77]  # around the end of a block, and several blocks


def assert_same(a: Any, b: Any, what: Any = "") -> None:
    found = differing(a, b)
    assert not found, f"{what}: {found}"


def blocks(rows: int) -> list[slice]:
    return [slice(i, min(i + BLOCK, rows)) for i in range(0, rows, BLOCK)]


def folded(terms: list[Any], start: Any = None) -> Any:
    """Adds in float32, ascending."""
    total = terms[0] if start is None else start + terms[0]
    for term in terms[1:]:
        total = total + term
    return total


# ---- rule 9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["ieee", "sm_90"])
@pytest.mark.parametrize("rows", ROWS)
def test_dweight_is_a_fold_over_blocks_of_8192_rows(
    rows: int, unit: str, device: str, rng: np.random.Generator
) -> None:
    o = operands(rng, (rows,), 18, 11, "bfloat16", device)
    main_grad = torch.from_numpy(rng.standard_normal((11, 18), dtype=np.float32)).to(device)
    with rk.arithmetic(unit):
        terms = [rk.linear_weight_grad(o.dy[b], o.x[b], out_dtype="float32") for b in blocks(rows)]
        whole = rk.linear_weight_grad(o.dy, o.x, out_dtype="float32")
        assert_same(whole, folded(terms))
        assert_same(rk.linear_weight_grad(o.dy, o.x), whole.bfloat16(), "rounded once, at the end")
        want = folded(terms, main_grad)
        assert rk.linear_weight_grad(o.dy, o.x, main_grad=main_grad) is main_grad
        assert_same(main_grad, want)


def test_a_block_is_one_chain_over_its_rows(rng: np.random.Generator) -> None:
    o = operands(rng, (500,), 9, 5)
    dy, x = o.dy.float().numpy(), o.x.float().numpy()
    assert_same(rk.linear_weight_grad(o.dy, o.x, out_dtype="float32"), chain(dy.T, x.T))


def test_micro_batches_of_whole_blocks_have_the_bytes_of_one_batch(device: str, rng: np.random.Generator) -> None:
    """Micro-batches accumulate in main_grad: the order of additions is the same as in one pass."""
    o = operands(rng, (2 * BLOCK + 5,), 20, 12, "bfloat16", device)
    whole, pieces = (torch.zeros(12, 20, device=device) for _ in range(2))
    rk.linear_weight_grad(o.dy, o.x, main_grad=whole)
    for b in blocks(len(o.x)):
        rk.linear_weight_grad(o.dy[b], o.x[b], main_grad=pieces)
    assert_same(pieces, whole)


def test_rows_of_zeros_change_no_gradient(device: str, rng: np.random.Generator) -> None:
    """Padding inside a block: a zero row adds +0 to every chain. (A sum of -0 would become +0; none occurs here.)"""
    o = operands(rng, (40,), 33, 17, "bfloat16", device)
    padded = Operands(torch.cat([o.x, o.x]), o.weight, o.bias, torch.cat([o.dy, torch.zeros_like(o.dy)]))
    for dtype in ("float32", "bfloat16"):
        assert_same(
            rk.linear_weight_grad(padded.dy, padded.x, out_dtype=dtype),
            rk.linear_weight_grad(o.dy, o.x, out_dtype=dtype),
        )
    assert_same(rk.linear_bias_grad(padded.dy), rk.linear_bias_grad(o.dy))


@pytest.mark.parametrize("rows", [1, 63, 65, 1000, *ROWS[1:]])
def test_dbias_is_groups_of_64_rows_trees_and_blocks(rows: int, device: str, rng: np.random.Generator) -> None:
    single = torch.from_numpy(rng.standard_normal((rows, 7), dtype=np.float32)).to(device)
    for dy in (single, single.bfloat16(), single.half()):
        want = torch.from_numpy(sum_of_rows(dy.float().cpu().numpy()))
        assert_same(rk.linear_bias_grad(dy, out_dtype="float32"), want)
        assert_same(rk.linear_bias_grad(dy), want.to(dy.dtype))


def sum_of_rows(values: np.ndarray) -> np.ndarray:
    """Sum of rows by rule 9, as for dbias."""
    terms = []
    for b in blocks(len(values)):
        padded = np.zeros((BLOCK, 7), np.float32)
        padded[: b.stop - b.start] = values[b]
        groups = padded.reshape(128, 64, 7)
        level = np.zeros((128, 7), np.float32)
        for i in range(64):
            level = level + groups[:, i]
        while len(level) > 1:
            level = level[::2] + level[1::2]
        terms.append(level[0])
    return folded(terms)


def test_main_grad_and_out_may_be_views_and_nothing_else_is_touched(device: str, rng: np.random.Generator) -> None:
    """main_grad is a slice of a flat gradient buffer, or of a wider buffer; the bytes around it do not change."""
    o = operands(rng, (21,), 19, 10, "bfloat16", device)
    want = rk.linear_weight_grad(o.dy, o.x, out_dtype="float32")
    memory = torch.full((14, 30), 7.0, device=device)
    view = memory[2:12, 5:24]
    for name, start in (("main_grad", 0.5), ("out", float("nan"))):
        view.fill_(start)
        got = rk.linear_weight_grad(o.dy, o.x, **{name: view})
        assert got is view
        assert_same(view, want + 0.5 if name == "main_grad" else want)
        view.fill_(7.0)
        assert bool((memory == 7.0).all())
    half = torch.empty(10, 19, dtype=torch.bfloat16, device=device)
    assert_same(rk.linear_weight_grad(o.dy, o.x, out=half), want.bfloat16())


# ---- autograd -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
def test_autograd_has_the_bytes_of_the_functions(out: str, device: str, rng: np.random.Generator) -> None:
    """dy has the dtype of y, and is rounded to the dtype of x before any product or sum."""
    for dtype in dtypes_of(device):
        if dtype == "float32" and out != "float32":
            continue
        o = operands(rng, (2, 9), 40, 23, dtype, device)
        for bias in (o.bias, o.bias.float()):
            x, weight, b = (t.clone().requires_grad_() for t in (o.x, o.weight, bias))
            dy = torch.from_numpy(rng.standard_normal((2, 9, 23), dtype=np.float32)).to(device, getattr(torch, out))
            rk.linear(x, weight, b, out_dtype=out).backward(dy)
            rounded = dy.to(x.dtype)
            assert_same(x.grad, rk.linear_input_grad(rounded, o.weight))
            assert_same(weight.grad, rk.linear_weight_grad(rounded, o.x))
            assert_same(b.grad, rk.linear_bias_grad(rounded, out_dtype=bias.dtype))


def test_only_what_is_asked_for_is_computed(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (4,), 16, 8, "bfloat16", device)
    for asked in ((0,), (1,), (2,), (0, 2)):
        leaves = [t.clone().requires_grad_(i in asked) for i, t in enumerate(o[:3])]
        rk.linear(*leaves).backward(o.dy)
        assert [t.grad is not None for t in leaves] == [i in asked for i in range(3)]


GRADIENTS = ["expanded", "transposed", "strided", "rows expanded", "four dimensions"]


@pytest.mark.parametrize("layout", GRADIENTS)
def test_any_layout_of_the_incoming_gradient_is_right(layout: str, device: str, rng: np.random.Generator) -> None:
    """y.sum() gives an incoming gradient with strides of 0, y.t() a transposed gradient. Only the numbers of an
    incoming gradient matter."""
    rows = (2, 3, 2) if layout == "four dimensions" else (12,)
    o = operands(rng, rows, 24, 10, "bfloat16", device)
    dy = {
        "expanded": lambda: torch.ones((), dtype=torch.bfloat16, device=device).expand(12, 10),
        "transposed": lambda: o.dy.t().contiguous().t(),
        "strided": lambda: torch.stack([o.dy, o.dy], -1)[..., 0],
        "rows expanded": lambda: o.dy[:1].expand(12, 10),
        "four dimensions": lambda: o.dy.transpose(0, 2).contiguous().transpose(0, 2),
    }[layout]()
    grads = []
    for gradient in (dy, dy.contiguous()):
        leaves = [t.clone().requires_grad_() for t in o[:3]]
        rk.linear(*leaves).backward(gradient)
        grads.append(tuple(t.grad for t in leaves))
    assert_same(*grads)


def test_the_sum_of_y_has_a_gradient(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (5,), 16, 8, "float16", device)
    x = o.x.clone().requires_grad_()
    rk.linear(x, o.weight).sum().backward()
    assert_same(x.grad, rk.linear_input_grad(torch.ones_like(o.dy), o.weight))


# ---- main_grad and the dtype of dweight in autograd -----------------------------------------------------------------


def test_main_grad_takes_the_gradient_of_weight(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (2, 30), 40, 23, "bfloat16", device)
    x, weight, bias = (t.clone().requires_grad_() for t in o[:3])
    main_grad = torch.full((23, 40), 0.25, device=device)
    want = main_grad.clone()
    for _ in range(3):  # micro-batches; each is one block here
        rk.linear(x, weight, bias, main_grad=main_grad).backward(o.dy)
        rk.linear_weight_grad(o.dy, o.x, main_grad=want)
    assert_same(main_grad, want)
    assert weight.grad is None
    assert x.grad is not None
    assert bias.grad is not None


def test_writing_in_place_is_seen_by_autograd(device: str, rng: np.random.Generator) -> None:
    """Without this, a backward that saved the memory would compute with its overwritten contents."""
    o = operands(rng, (6,), 16, 8, "bfloat16", device)
    for write in (
        lambda m: rk.linear_weight_grad(o.dy, o.x, main_grad=m),
        lambda m: rk.linear_weight_grad(o.dy, o.x, out=m),
        lambda m: rk.linear(o.x, o.weight.clone().requires_grad_(), main_grad=m).backward(o.dy),
    ):
        memory, other = torch.ones(8, 16, device=device), torch.ones(8, 16, device=device, requires_grad=True)
        product = memory * other
        write(memory)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_several_uses_may_share_one_main_grad(device: str, rng: np.random.Generator) -> None:
    """A tied weight. Backward may run the uses in any order, and a float32 sum of two terms is the same in either
    order."""
    o = operands(rng, (6,), 16, 16, "bfloat16", device)
    weight, main_grad = o.weight.clone().requires_grad_(), torch.zeros(16, 16, device=device)
    hidden = rk.linear(o.x, weight, main_grad=main_grad)
    rk.linear(hidden, weight, main_grad=main_grad).backward(o.dy)
    first = rk.linear_weight_grad(o.dy, hidden.detach(), out_dtype="float32")
    second = rk.linear_weight_grad(rk.linear_input_grad(o.dy, o.weight), o.x, out_dtype="float32")
    assert_same(main_grad, first + second)


def test_main_grad_is_left_alone_without_a_gradient(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (6,), 16, 8, "bfloat16", device)
    main_grad = torch.ones(8, 16, device=device)
    with torch.no_grad():
        y = rk.linear(o.x, o.weight, main_grad=main_grad)
    assert_same(y, rk.linear(o.x, o.weight))
    assert bool((main_grad == 1).all())


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype")
def test_a_weight_may_have_a_float32_gradient(device: str, rng: np.random.Generator) -> None:
    o = operands(rng, (300,), 24, 10, "bfloat16", device)
    for allowed in (torch.float32, None):
        weight = torch.nn.Parameter(o.weight.clone())
        weight.grad_dtype = allowed
        rk.linear(o.x, weight, weight_grad_dtype=torch.float32).backward(o.dy)
        assert_same(weight.grad, rk.linear_weight_grad(o.dy, o.x, out_dtype="float32"))
    weight = torch.nn.Parameter(o.weight.clone())
    rk.linear(o.x, weight, weight_grad_dtype="bfloat16").backward(o.dy)
    assert_same(weight.grad, rk.linear_weight_grad(o.dy, o.x))


def test_a_backward_has_the_forwards_unit(rng: np.random.Generator) -> None:
    """The context may be left or entered between forward and backward; gradients use the forward's arithmetic."""
    o = operands(rng, (200,), 300, 400, "float16")  # some of 60,000 sums round to another float16
    wants = {}
    for unit in ("ieee", "sm_90"):
        with rk.arithmetic(unit):
            wants[unit] = (rk.linear_input_grad(o.dy, o.weight), rk.linear_weight_grad(o.dy, o.x))
            x, weight = o.x.clone().requires_grad_(), o.weight.clone().requires_grad_()
            y = rk.linear(x, weight)
        with rk.arithmetic("sm_90" if unit == "ieee" else "ieee"):
            y.backward(o.dy)
        assert_same((x.grad, weight.grad), wants[unit], unit)
    assert all(differing(a, b) for a, b in zip(*wants.values(), strict=True))
