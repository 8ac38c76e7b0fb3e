"""rk.jax: gradients by custom_vjp, in jit, with the bits of torch."""

from __future__ import annotations

import doctest
import io
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy


def bits(array: object) -> bytes:
    if isinstance(array, torch.Tensor):
        array = array.detach().view(torch.int16 if array.element_size() == 2 else torch.int32).numpy()
    return np.asarray(array).tobytes()


def leaf(array: object) -> torch.Tensor:
    """The same numbers as a torch tensor that requires a gradient."""
    wide = torch.tensor(np.asarray(array, np.float32))
    return wide.to(getattr(torch, array.dtype.name)).requires_grad_()  # type: ignore[attr-defined]


HEADS = [(jnp.float32, "float32"), (jnp.bfloat16, "float32"), (jnp.bfloat16, "bfloat16"), (jnp.float16, "float16")]


@pytest.mark.parametrize(("dtype", "logits_dtype"), [*HEADS, (jnp.float16, None)])
@pytest.mark.parametrize("jit", [False, True])
def test_a_head_and_its_gradients_have_the_bits_of_torch(
    dtype: Any, logits_dtype: str | None, jit: bool, rng: np.random.Generator
) -> None:
    hidden = jnp.asarray(rng.standard_normal((5, 32)), dtype)
    weight, target = jnp.asarray(rng.standard_normal((70, 32)), dtype), jnp.asarray([0, 69, 3, -100, 7])
    how = {} if logits_dtype is None else {"logits_dtype": logits_dtype}

    def total(hidden: object, weight: object) -> object:
        return (rk.jax.linear_logprob(hidden, weight, target, temperature=0.8, **how) * jnp.arange(1.0, 6)).sum()

    differentiate = jax.grad(total, argnums=(0, 1))
    dhidden, dweight = (jax.jit(differentiate) if jit else differentiate)(hidden, weight)
    h, w, y = leaf(hidden), leaf(weight), torch.tensor(np.asarray(target))
    found = rk.linear_logprob(h, w, y, temperature=0.8, **how)
    (found * torch.arange(1.0, 6)).sum().backward()
    assert bits(rk.jax.linear_logprob(hidden, weight, target, temperature=0.8, **how)) == bits(found)
    assert bits(dhidden) == bits(h.grad)
    assert bits(dweight) == bits(w.grad)


def test_bias_and_norm_have_the_bits_of_torch(rng: np.random.Generator) -> None:
    x, gain = jnp.asarray(rng.standard_normal((3, 24)), jnp.float32), jnp.asarray(rng.standard_normal(24), jnp.float32)
    weight, bias = jnp.asarray(rng.standard_normal((8, 24)), jnp.float32), jnp.arange(8, dtype=jnp.float32)

    def total(x: object, gain: object, weight: object, bias: object) -> object:
        return rk.jax.linear(rk.jax.rms_norm(x, gain, 1e-6), weight, bias).sum()

    found = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(x, gain, weight, bias)
    leaves = [leaf(a) for a in (x, gain, weight, bias)]
    rk.linear(rk.rms_norm(leaves[0], leaves[1], 1e-6), leaves[2], leaves[3]).sum().backward()
    assert [bits(a) for a in found] == [bits(a.grad) for a in leaves]


def test_a_policy_loss_and_its_gradient_have_the_bits_of_torch(rng: np.random.Generator) -> None:
    old = jnp.asarray(rng.standard_normal((3, 7)) - 2, jnp.float32)
    logprob, advantage = old + 0.3, jnp.asarray([1.0, -1.0, 0.5])
    mask = jnp.asarray(rng.integers(0, 2, (3, 7)), jnp.float32)
    spec = rk.PolicySpec()
    loss, gradient = jax.value_and_grad(rk.jax.policy_loss)(logprob, old, advantage, mask, spec=spec)
    leaves = leaf(logprob)
    want = rk.policy_loss(leaves, leaf(old).detach(), leaf(advantage).detach(), leaf(mask).detach(), spec=spec).loss
    want.backward()
    assert bits(loss) == bits(want)
    assert bits(gradient) == bits(leaves.grad)


def test_a_batch_of_calls_is_each_call(rng: np.random.Generator) -> None:
    logits, target = jnp.asarray(rng.standard_normal((4, 3, 9)), jnp.float32), jnp.zeros((4, 3), jnp.int32)
    together = jax.vmap(rk.jax.logprob)(logits, target)
    assert bits(together) == bits(jnp.stack([rk.jax.logprob(x, y) for x, y in zip(logits, target, strict=True)]))


@pytest.mark.parametrize("name", rk.jax.__all__)
def test_the_example_of_a_call(name: str) -> None:
    said, runner = io.StringIO(), doctest.DocTestRunner(verbose=False)
    names = {"jax": jax, "jnp": jnp, "rk": rk}
    runner.run(doctest.DocTestParser().get_doctest(getattr(rk.jax, name).__doc__, names, name, name, 0), out=said.write)
    assert runner.tries > 0
    assert not said.getvalue()
