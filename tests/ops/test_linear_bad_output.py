"""Invalid outputs of linear: arrays to write, main_grad, and the dtype of a weight's gradient in autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch", reason="most bad inputs are torch's")

_generator = torch.Generator().manual_seed(0)
X = torch.randn(3, 32, generator=_generator).bfloat16()
W = torch.randn(8, 32, generator=_generator).bfloat16()
DY = torch.randn(3, 8, generator=_generator).bfloat16()
MAIN = torch.zeros(8, 32)  # only read, since calls that would write to it are refused


def with_weight_of(**options: Any) -> Any:
    """The forward of a training step that needs a gradient of weight."""
    return lambda: rk.linear(X, W.clone().requires_grad_(), **options)


def compiled(**options: Any) -> Any:
    """Without fullgraph=True Dynamo breaks the graph here, and the call runs eagerly."""
    step = torch.compile(lambda x, w: rk.linear(x, w, **options), backend="eager", fullgraph=True)
    return lambda: step(X, W.clone().requires_grad_())


def twice_with_main_grad() -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = rk.linear(x, w, main_grad=MAIN.clone())
    y.float().square().sum().backward(create_graph=True)


def once_twice_differentiated() -> None:
    """Asks only for the gradient of x. A gradient of weight through this graph would not be added to main_grad."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    torch.autograd.grad(rk.linear(x, w, main_grad=MAIN.clone()).float().sum(), x, create_graph=True)


class OwnParameter(torch.nn.Parameter):
    pass


def shared_with_a_parameter() -> None:
    weight = OwnParameter(W.float())
    rk.linear(X.float(), weight, main_grad=weight.data)


def shared_with_a_narrow_weight() -> None:
    memory = torch.zeros(W.shape)
    weight = memory.view(torch.bfloat16)[:, : W.shape[1]].copy_(W).detach().requires_grad_()
    rk.linear(X.bfloat16(), weight, main_grad=memory)


# Maps a name to (call, error, pattern of its message).
CASES: dict[str, tuple[Any, Any, str]] = {
    "main_grad and out": (
        lambda: rk.linear_weight_grad(DY, X, main_grad=MAIN.clone(), out=MAIN.clone()),
        ValueError,
        "out: cannot be given together with main_grad",
    ),
    "main_grad bfloat16": (
        lambda: rk.linear_weight_grad(DY, X, main_grad=MAIN.bfloat16()),
        TypeError,
        "main_grad: expected dtype float32, got bfloat16",
    ),
    "main_grad with another out_dtype": (
        lambda: rk.linear_weight_grad(DY, X, main_grad=MAIN.clone(), out_dtype="bfloat16"),
        TypeError,
        "out_dtype: expected float32, that of main_grad",
    ),
    "out of another dtype": (
        lambda: rk.linear_weight_grad(DY, X, out=MAIN.clone(), out_dtype="bfloat16"),
        TypeError,
        "out: expected dtype bfloat16, got float32",
    ),
    "out float16": (
        lambda: rk.linear_weight_grad(DY, X, out=MAIN.half()),
        TypeError,
        "out: expected dtype float32 or bfloat16 .that of dy., got float16",
    ),
    "main_grad of another shape": (
        lambda: rk.linear_weight_grad(DY, X, main_grad=torch.zeros(32, 8)),
        ValueError,
        r"main_grad: expected shape \[8, 32\] .*got \[32, 8\]",
    ),
    "main_grad expanded": (
        lambda: rk.linear_weight_grad(DY, X, main_grad=torch.zeros(1, 32).expand(8, 32)),
        ValueError,
        "main_grad: expected strides that do not overlap",
    ),
    "main_grad of two columns, strided": (
        lambda: rk.linear_weight_grad(DY, X[:, :2].contiguous(), main_grad=torch.zeros(8, 4)[:, ::2]),
        ValueError,
        "main_grad: expected a contiguous last dimension",
    ),
    "main_grad by columns": (
        lambda: rk.linear_weight_grad(DY, X, main_grad=torch.zeros(32, 8).t()),
        ValueError,
        "main_grad: expected a contiguous last dimension",
    ),
    "out in x": (
        lambda: (x := torch.zeros(8, 32), rk.linear_weight_grad(torch.zeros(8, 8), x, out=x)),
        ValueError,
        "out: may share memory with x",
    ),
    "main_grad in dy": (
        lambda: (m := torch.zeros(8, 40), rk.linear_weight_grad(m[:3, :8], X.float(), main_grad=m[:, 8:])),
        ValueError,
        "main_grad: may share memory with dy",
    ),
    "out a list": (lambda: rk.linear_weight_grad(DY, X, out=[1.0]), TypeError, "out: expected an array .* got list"),
    "out of NumPy for torch": (
        lambda: rk.linear_weight_grad(DY, X, out=np.zeros((8, 32), np.float32)),
        TypeError,
        "out: expected .* got ndarray",
    ),
    "out that requires grad": (
        lambda: rk.linear_weight_grad(DY, X, out=MAIN.clone().requires_grad_()),
        ValueError,
        "out: cannot be given where a gradient",
    ),
    "main_grad with a gradient wanted": (
        lambda: rk.linear_weight_grad(DY.clone().requires_grad_(), X, main_grad=MAIN.clone()),
        ValueError,
        "main_grad: cannot be given where a gradient",
    ),
    "out with a negative bit": (
        lambda: rk.linear_weight_grad(DY, X, out=torch._neg_view(MAIN.clone())),
        ValueError,
        "out",
    ),
    # main_grad and weight_grad_dtype in autograd.
    "weight_grad_dtype float16": (
        with_weight_of(weight_grad_dtype=torch.float16),
        TypeError,
        "weight_grad_dtype: expected float32 or torch.bfloat16",
    ),
    "autograd main_grad a list": (with_weight_of(main_grad=[1.0]), TypeError, "main_grad: expected a torch.Tensor"),
    "autograd main_grad half": (with_weight_of(main_grad=MAIN.half()), TypeError, "main_grad: expected dtype float32"),
    "autograd main_grad short": (with_weight_of(main_grad=MAIN[:4]), ValueError, r"main_grad: .*\[8, 32\].*\[4, 32\]"),
    "autograd main_grad of two columns, strided": (
        lambda: rk.linear(
            X[:, :2].contiguous(), W[:, :2].clone().requires_grad_(), main_grad=torch.zeros(8, 4)[:, ::2]
        ),
        ValueError,
        "main_grad: expected a contiguous last",
    ),
    "autograd main_grad by columns": (
        with_weight_of(main_grad=torch.zeros(32, 8).t()),
        ValueError,
        "main_grad: expected a contiguous last",
    ),
    "autograd main_grad on another device": (
        with_weight_of(main_grad=MAIN.to("meta")),
        ValueError,
        "main_grad: expected device cpu .*got meta",
    ),
    "autograd main_grad that requires grad": (
        with_weight_of(main_grad=MAIN.clone().requires_grad_()),
        ValueError,
        "main_grad: .*has no gradient; pass main_grad.detach",
    ),
    "main_grad of a frozen weight": (
        lambda: rk.linear(X.clone().requires_grad_(), W, main_grad=MAIN.clone()),
        ValueError,
        "main_grad: weight requires no gradient",
    ),
    "main_grad twice differentiated": (twice_with_main_grad, ValueError, "main_grad: .*without create_graph"),
    "main_grad in a weight of a class of its own": (
        shared_with_a_parameter,
        ValueError,
        "main_grad: may share memory with weight",
    ),
    "main_grad around a bfloat16 weight": (
        shared_with_a_narrow_weight,
        ValueError,
        "main_grad: may share memory with weight",
    ),
    "main_grad around the bias": (
        lambda: rk.linear(X, W.clone().requires_grad_(), MAIN[0], main_grad=MAIN),
        ValueError,
        "main_grad: may share memory with bias",
    ),
    "main_grad, x twice differentiated": (once_twice_differentiated, ValueError, "main_grad: .*without create_graph"),
    "main_grad compiled": (compiled(main_grad=MAIN), Exception, "main_grad: cannot be given under torch.compile"),
    "main_grad in torch.func": (
        lambda: torch.func.grad(lambda w: rk.linear(X, w, main_grad=MAIN).float().sum())(W),
        ValueError,
        "main_grad: cannot be given under .*torch.func",
    ),
    "main_grad for NumPy": (
        lambda: rk.linear(X.float().numpy(), W.float().numpy(), main_grad=MAIN.numpy()),
        ValueError,
        "main_grad: only torch has an autograd",
    ),
    "weight_grad_dtype for NumPy": (
        lambda: rk.linear(X.float().numpy(), W.float().numpy(), weight_grad_dtype="float32"),
        ValueError,
        "weight_grad_dtype: only torch",
    ),
    "weight_grad_dtype with main_grad": (
        with_weight_of(weight_grad_dtype="float32", main_grad=MAIN.clone()),
        ValueError,
        "weight_grad_dtype: main_grad takes the gradient",
    ),
    "weight_grad_dtype that torch would round": (
        with_weight_of(weight_grad_dtype="float32"),
        ValueError,
        "weight_grad_dtype: torch would round the gradient to torch.bfloat16 again; .*main_grad",
    ),
    "weight_grad_dtype of an inner weight": (
        lambda: rk.linear(X, W.clone().requires_grad_() * 1, weight_grad_dtype="float32"),
        ValueError,
        "weight_grad_dtype: torch would round",
    ),
    "weight_grad_dtype compiled": (
        compiled(weight_grad_dtype=torch.float32),
        Exception,
        "weight_grad_dtype: cannot differ",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_bad_output_is_a_typed_error_that_names_it(case: str) -> None:
    call, error, words = CASES[case]
    with pytest.raises(error, match=words):
        call()
    assert not bool(MAIN.any()), "nothing was written"


def test_a_read_only_array_is_no_output_and_a_fine_input() -> None:
    x, dy = X.float().numpy().copy(), DY.float().numpy().copy()
    x.flags.writeable = dy.flags.writeable = False
    want = rk.linear_weight_grad(dy, x)
    memory = np.zeros((8, 32), np.float32)
    memory.flags.writeable = False
    for name in ("main_grad", "out"):
        with pytest.raises((BufferError, TypeError), match=r"read-?only"):
            rk.linear_weight_grad(dy, x, **{name: memory})
    assert not memory.any()
    assert want.any()
