"""LoRA on the head of linear_logprob: refusals and their messages, and the count of its products."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing

torch = pytest.importorskip("torch")

_A, _B = torch.zeros(4, 16), torch.zeros(40, 4)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "lora_a alone": ({"lora_b": None}, ValueError, "lora_b: expected an array beside lora_a, got None"),
    "lora_b alone": ({"lora_a": None}, ValueError, "lora_a: expected an array beside lora_b, got None"),
    "lora_a a list": ({"lora_a": [[0.0] * 16] * 4}, TypeError, "lora_a: expected .*, got list"),
    "lora_b a list": ({"lora_b": [[0.0] * 4] * 40}, TypeError, "lora_b: expected .*, got list"),
    "lora_a dtype": (
        {"lora_a": _A.half()},
        TypeError,
        r"lora_a: expected dtype .*float32 \(that of hidden\), got .*16",
    ),
    "lora_b dtype": (
        {"lora_b": _B.half()},
        TypeError,
        r"lora_b: expected dtype .*float32 \(that of hidden\), got .*16",
    ),
    "lora_a width": ({"lora_a": _A[:, :8]}, ValueError, r"lora_a: expected shape \[rank, 16\], .*, got \[4, 8\]"),
    "lora_a vector": ({"lora_a": _A[0]}, ValueError, r"lora_a: expected shape \[rank, 16\], .*, got \[16\]"),
    "lora_a empty": ({"lora_a": _A[:0], "lora_b": _B[:, :0]}, ValueError, r"lora_a: expected shape \[rank, 16\]"),
    "lora_b rank": ({"lora_b": _B[:, :3]}, ValueError, r"lora_b: expected shape \[40, 4\] .*, got \[40, 3\]"),
    "lora_b rows": ({"lora_b": _B[:39]}, ValueError, r"lora_b: expected shape \[40, 4\] .*, got \[39, 4\]"),
    "scale infinite": ({"lora_scale": float("inf")}, ValueError, "lora_scale: expected a finite number .*, got inf"),
    "scale NaN": ({"lora_scale": float("nan")}, ValueError, "lora_scale: expected a finite number .*, got nan"),
    "scale beyond float32": ({"lora_scale": -1e39}, ValueError, "lora_scale: expected a finite number"),
    "scale a word": ({"lora_scale": "2"}, TypeError, "lora_scale: expected a number, got str"),
    "scale too long": (
        {"lora_scale": 10**400},
        ValueError,
        r"lora_scale: expected a number below 2\^1024 in magnitude, got an integer of 1329 bits",
    ),
    "scale a bool": ({"lora_scale": np.True_}, TypeError, "lora_scale: expected a number, got bool"),
    "scales": ({"lora_scale": np.array([0.5, 1.0])}, TypeError, "lora_scale: expected a number, got ndarray"),
    "scale with a gradient": (
        {"lora_scale": torch.tensor(0.5, requires_grad=True)},
        TypeError,
        "lora_scale: expected a number, got Tensor",
    ),
    "scale on a device": (
        {"lora_scale": torch.empty((), device="meta")},
        TypeError,
        "lora_scale: expected a number, got Tensor",
    ),
    "scale None": ({"lora_scale": None}, TypeError, "lora_scale: expected a number, got NoneType"),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str, traced: bool) -> None:
    given: dict[str, Any] = {"lora_a": _A, "lora_b": _B}
    changed, error, text = BAD[case]

    def score(x: Any) -> Any:
        return rk.linear_logprob(x, torch.zeros(40, 16), torch.tensor([1, 2, 3]), **{**given, **changed})

    with pytest.raises(error, match=text):
        torch.func.vmap(score)(torch.zeros(1, 3, 16)) if traced else score(torch.zeros(3, 16))


def test_bad_columns_are_named() -> None:
    for name, array in (("lora_a", torch.zeros(16, 4).T), ("lora_b", torch.zeros(4, 40).T)):
        with pytest.raises(ValueError, match=rf"{name}: expected a contiguous last dimension"):
            rk.linear_logprob(
                torch.zeros(3, 16),
                torch.zeros(40, 16),
                torch.tensor([1, 2, 3]),
                **{"lora_a": _A, "lora_b": _B, name: array},
            )


def test_a_shard_needs_its_rows_of_lora_b() -> None:
    where = {"vocab_start": 0, "vocab_size": 40, "lora_a": _A, "lora_b": _B}
    with pytest.raises(ValueError, match=r"lora_b: expected shape \[16, 4\]"):
        rk.linear_logprob_partial(torch.zeros(3, 16), torch.zeros(16, 16), torch.tensor([1, 2, 3]), **where)


def test_a_scale_or_a_cap_that_would_lose_its_gradient_is_refused() -> None:
    def score(name: str, value: Any) -> Any:
        given = {"lora_a": _A, "lora_b": _B, name: value}
        return rk.linear_logprob(torch.zeros(3, 16), torch.zeros(40, 16), torch.tensor([1, 2, 3]), **given).sum()

    for name in ("lora_scale", "logit_scale", "softcap"):
        with pytest.raises(TypeError, match=f"{name}: expected a number, got Tensor"):
            torch.func.grad(lambda value, n=name: score(n, value))(torch.tensor(0.5))
        with pytest.raises(TypeError, match=f"{name}: expected a number, got Parameter"):
            score(name, torch.nn.Parameter(torch.tensor(0.5)))


def test_a_compiled_call_names_a_bad_scale() -> None:
    def score(scale: float) -> Any:
        given = {"lora_a": _A, "lora_b": _B, "lora_scale": scale}
        return rk.linear_logprob(torch.zeros(3, 16), torch.zeros(40, 16), torch.tensor([1, 2, 3]), **given)

    compiled = torch.compile(score, fullgraph=True, dynamic=True, backend="aot_eager")
    for scale in (0.5, 0.25):
        assert not differing(compiled(scale), score(scale))
    for scale in (float("nan"), 1e39):
        with pytest.raises(ValueError, match="lora_scale: expected a finite number of float32"):
            compiled(scale)


@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "lora_a", "lora_b"])
def test_main_grad_lies_apart_from_the_operands(name: str) -> None:
    main_grad = torch.zeros(40, 16)
    shapes = {"hidden": (3, 16), "weight": (40, 16), "bias": (40,), "lora_a": (4, 16), "lora_b": (40, 4)}
    given = {n: torch.zeros(shape) for n, shape in shapes.items()}
    given[name] = main_grad.view(-1)[: math.prod(shapes[name])].view(shapes[name])
    given["weight"].requires_grad_()
    with pytest.raises(ValueError, match=f"main_grad: may share memory with {name}: their addresses overlap"):
        rk.linear_logprob(target=torch.tensor([1, 2, 3]), main_grad=main_grad.detach(), **given)


def test_flops_are_those_of_every_product() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    rows, ins, vocab, rank = 3, 16, 40, 4
    hidden, weight = torch.zeros(rows, ins, requires_grad=True), torch.zeros(vocab, ins)
    a, b = _A.clone().requires_grad_(), _B.clone().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        rk.linear_logprob(
            hidden, weight, torch.tensor([1, 2, 3]), lora_a=a, lora_b=b, weight_grad=False
        ).sum().backward()
    # forward and recomputation; then dhidden, v, and the gradients of both factors
    logits = vocab * ins + rank * (ins + vocab)
    gradients = vocab * ins + rank * vocab + rank * ins + rank * ins + rank * vocab
    assert counter.get_total_flops() == 2 * rows * (2 * logits + gradients)


def test_the_reference_wants_both_factors() -> None:
    for given in ({"lora_a": _A.numpy()}, {"lora_b": _B.numpy()}):
        with pytest.raises(ValueError, match="lora_a, lora_b: expected both or neither"):
            rk.linear_logprob_reference(np.zeros((3, 16)), np.zeros((40, 16)), np.array([1, 2, 3]), **given)
