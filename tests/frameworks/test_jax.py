"""rk.jax: gradients by custom_vjp, in jit, with the bits of torch."""

from __future__ import annotations

import doctest
import io
import itertools
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


CALLS: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "linear": (lambda x, w, b: rk.jax.linear(x, w, b), ((3, 24), (8, 24), (8,))),
    "linear_logprob": (lambda h, w: rk.jax.linear_logprob(h, w, jnp.asarray([0, 7, -100])), ((3, 24), (8, 24))),
    "rms_norm": (lambda x, w: rk.jax.rms_norm(x, w, 1e-6), ((3, 24), (24,))),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_only_gradients_that_are_asked_for_are_computed(
    name: str, jit: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient has the same bytes with and without the other gradients, and backward computes nothing else."""
    call, shapes = CALLS[name]
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    made: list[Any] = []

    def recorded(function: Any, shapes: Any, *given: Any, call: Any = rk.jax._call) -> Any:
        made.append([x.shape for x in jax.tree.leaves(shapes)])
        return call(function, shapes, *given)

    monkeypatch.setattr(rk.jax, "_call", recorded)

    def gradients(of: tuple[int, ...]) -> Any:
        made.clear()
        differentiate = jax.grad(lambda *a: (call(*a) ** 2).sum(), argnums=of)
        return (jax.jit(differentiate) if jit else differentiate)(*arrays)

    everything = gradients(tuple(range(len(arrays))))
    assert sorted(itertools.chain(*made[1:])) == sorted(shapes)  # made[0] is the forward
    for i, shape in enumerate(shapes):
        (alone,) = gradients((i,))
        assert list(itertools.chain(*made[1:])) == [shape]
        assert bits(alone) == bits(everything[i])


def test_a_result_whose_gradient_is_zero_has_no_backward(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old log-probabilities of a policy loss have no gradient, so the head that computed them has none either."""
    new, old = (jnp.asarray(rng.standard_normal((2, 3, 9)), jnp.float32) for _ in range(2))
    ids, advantage, mask = jnp.zeros((2, 3), jnp.int32), jnp.ones(2), jnp.ones((2, 3))

    def loss(new: Any, old: Any) -> Any:
        logprob, before = (rk.jax.logprob(logits, ids) for logits in (new, old))
        return rk.jax.policy_loss(logprob, before, advantage, mask, spec=rk.PolicySpec())

    backward, calls = rk.logprob_backward, []
    monkeypatch.setattr(rk, "logprob_backward", lambda *a, **b: calls.append(1) or backward(*a, **b))
    of_new, of_old = jax.grad(loss, argnums=(0, 1))(new, old)
    assert len(calls) == 1
    assert np.asarray(of_new).any()
    assert not np.asarray(of_old).any()


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


def ones(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.ones(shape, dtype)


def ids(*shape: int) -> Any:
    return jnp.zeros(shape, jnp.int32)


def loss_of(spec: Any = rk.PolicySpec(), **changes: Any) -> Any:  # noqa: B008 - frozen
    names = ("logprob", "old_logprob", "advantage", "mask", "denominator")
    return lambda *given: rk.jax.policy_loss(**{**dict(zip(names, given, strict=False)), "spec": spec, **changes})


TOKENS = (ones(2, 3), ones(2, 3), ones(2), ones(2, 3))
BAD = {
    "columns": (rk.jax.linear, (ones(4, 16), ones(8, 12)), ValueError, r"weight: .*16 is the last dimension of x"),
    "bias": (rk.jax.linear, (ones(4, 16), ones(8, 16), ones(7)), ValueError, r"bias: expected shape \[8\].*got \[7\]"),
    "0-d": (rk.jax.linear, (ones(), ones(8, 16)), ValueError, r"x: expected shape \[\.\.\., features\], got \[\]"),
    "two dtypes": (rk.jax.linear, (ones(4, 16), ones(8, 16, dtype=jnp.bfloat16)), TypeError, "weight: .*got bfloat16"),
    "1-d weight": (rk.jax.linear, (ones(4, 16), ones(16)), ValueError, r"weight: expected .*got \[16\]"),
    "integers": (rk.jax.logprob, (ids(4, 16), ids(4)), TypeError, "logits: expected dtype .*got int32"),
    "rows": (rk.jax.logprob, (ones(4, 16), ids(3)), ValueError, r"target: expected shape \[4\] .*got \[3\]"),
    "float ids": (rk.jax.logprob, (ones(4, 16), ones(4)), TypeError, "target: .*int32 or int64, got float"),
    "a list": (rk.jax.logprob, ([[1.0, 2.0]], ids(1)), TypeError, "logits: .*array, got list; convert it"),
    "a tensor": (rk.jax.logprob, (torch.ones(1, 2), ids(1)), TypeError, "logits: .*array, got Tensor; "),
    "head's columns": (rk.jax.linear_logprob, (ones(4, 16), ones(8, 12), ids(4)), ValueError, "w.*of hidden"),
    "head's rows": (rk.jax.linear_logprob, (ones(2, 4, 16), ones(8, 16), ids(4)), ValueError, r"t.*\[2, 4\] \(h"),
    "gain": (lambda x, w: rk.jax.rms_norm(x, w, 1e-6), (ones(4, 16), ones(12)), ValueError, r"w.*\[16\].*\[12\]"),
    "no gain": (lambda x: rk.jax.rms_norm(x, None, 1e-6), (ones(4, 16),), TypeError, "weight: .*array, got NoneType"),
    "eps": (lambda x, w: rk.jax.rms_norm(x, w, -1.0), (ones(4, 16), ones(16)), ValueError, "eps: expected .*> 0"),
    "eps of text": (lambda x, w: rk.jax.rms_norm(x, w, "a"), (ones(4, 16), ones(16)), TypeError, "eps: .*got str"),
    "flag": (
        lambda x: rk.jax.rms_norm(x, ones(16), 1e-6, round_before_weight=1), (ones(4, 16),), TypeError, "got int",
    ),
    "temperature": (
        lambda x: rk.jax.logprob(x, ids(4), temperature=0.0), (ones(4, 16),), ValueError, "temperature: expected .*> 0",
    ),
    "logits_dtype": (
        lambda x: rk.jax.linear_logprob(x, ones(8, 16), ids(4), logits_dtype=jnp.bfloat16), (ones(4, 16),), TypeError,
        "logits_dtype: expected float32",
    ),
    "old": (loss_of(), (TOKENS[0], ones(2, 4), *TOKENS[2:]), ValueError, r"old_logprob: .*\[2, 3\].*got \[2, 4\]"),
    "mask": (loss_of(), (*TOKENS[:3], ones(3, 3)), ValueError, r"mask: .*\[2, 3\].*got \[3, 3\]"),
    "advantage": (loss_of(), (*TOKENS[:2], ones(3), TOKENS[3]), ValueError, r"advantage: .* or \[2\].*got \[3\]"),
    "half": (loss_of(), (TOKENS[0].astype(jnp.float16), *TOKENS[1:]), TypeError, "logprob: .*float32, got float16"),
    "no spec": (loss_of(None), TOKENS, TypeError, "spec: expected a PolicySpec, got NoneType"),
    "no denominator": (loss_of(rk.presets.trl(loss_type="dapo")), TOKENS, ValueError, "denominator: expected a number"),
    "denominator": (loss_of(denominator=-1), TOKENS, ValueError, "denominator: expected a finite number > 0, got -1"),
    **{
        f"spec with {name}": (
            loss_of(rk.PolicySpec(**{field: value})), TOKENS, ValueError,
            f"spec: rk.jax.policy_loss takes no {name}, .*rk.policy_loss_and_grad outside of jit and grad",
        )
        for field, value, name in (
            ("kl", "k3", "ref_logprob"),
            ("entropy_coef", 0.1, "entropy"),
            ("importance", "token", "rollout_logprob"),
            ("importance", "given", "importance_weight"),
            ("clip", "clip_cov", "selected"),
        )
    },
    "traced eps": (
        lambda x, eps: rk.jax.rms_norm(x, ones(16), eps), (ones(4, 16), 1e-6), TypeError, "eps: .*traced.*static",
    ),
    "traced temperature": (
        lambda x, t: rk.jax.logprob(x, ids(4), temperature=t), (ones(4, 16), 1.0), TypeError, "temperature: .*traced",
    ),
    "a head's traced temperature": (
        lambda x, t: rk.jax.linear_logprob(x, ones(8, 16), ids(4), temperature=t), (ones(4, 16), 1.0), TypeError,
        "temperature: .*traced",
    ),
    "traced denominator": (loss_of(), (*TOKENS, 6.0), TypeError, "denominator: .*traced.*close over it"),
}  # fmt: skip


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named_while_jax_traces(case: str, jit: bool) -> None:
    call, given, error, words = BAD[case]
    if jit:
        fixed = tuple(i for i, x in enumerate(given) if not isinstance(x, (jax.Array, float)))
        call = jax.jit(call, static_argnums=fixed) if all(map(is_hashable, (given[i] for i in fixed))) else call
    elif "traced" in case:
        call = jax.grad(lambda *given, call=call: call(*given).sum(), argnums=len(given) - 1)
    with pytest.raises(error, match=words) as found:
        call(*given)
    assert len(str(found.value).splitlines()) == 1


def is_hashable(value: object) -> bool:
    return not isinstance(value, list)


def test_values_of_numpy_and_of_jax_are_numbers_and_arrays() -> None:
    logits, target = np.float32([[2.0, 0.0, -1.0]]), np.int64([0])
    want = rk.jax.logprob(jnp.asarray(logits), jnp.asarray(target), temperature=0.5)
    assert bits(rk.jax.logprob(logits, target, temperature=jnp.float32(0.5))) == bits(want)
    assert bits(rk.jax.logprob(logits[0], jnp.int32(0), temperature=np.float32(0.5))) == bits(want[0])


@pytest.mark.parametrize("name", rk.jax.__all__)
def test_the_example_of_a_call(name: str) -> None:
    said, runner = io.StringIO(), doctest.DocTestRunner(verbose=False)
    names = {"jax": jax, "jnp": jnp, "rk": rk}
    runner.run(doctest.DocTestParser().get_doctest(getattr(rk.jax, name).__doc__, names, name, name, 0), out=said.write)
    assert runner.tries > 0
    assert not said.getvalue()
