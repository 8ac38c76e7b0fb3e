"""Wrong options are refused by name, with what was expected and what was given: one table over the public operators.
Every flag and every integer of a signature is tried, so a new option is tried, too."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from call_arrays import by_array, mapped
from call_cases import CALLS as DRAWN
from call_cases import OPERATORS, Draw, Operand
from cases import raw
from fuzz_calls import names_of

torch = pytest.importorskip("torch")

Z = torch.linspace(-1.0, 1.0, 27).reshape(3, 9)
X = torch.linspace(-1.0, 1.0, 24).reshape(3, 8)
W = torch.linspace(-1.0, 1.0, 72).reshape(9, 8)
Y = torch.tensor([1, 0, 8])
P = -torch.linspace(0.1, 1.0, 6).reshape(2, 3)
ONE = torch.ones(2, 3)
Q = torch.linspace(-1.0, 1.0, 1 * 4 * 2 * 16).reshape(1, 4, 2, 16)
CUTS = torch.tensor([0, 2, 6])
LSE = torch.logsumexp(Z, -1)
PAIR = {"group_size": 3}
# Positional and keyword arguments of a valid call.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "attention": ((Q, Q, Q), {}),
    "embedding": ((Y, W), {}),
    "embedding_backward": ((X, Y, 9), {}),
    "gelu_mul": ((X, X), {}),
    "gelu_mul_backward": ((X, X, X), {}),
    "group_advantage": ((P[0],), PAIR),
    "importance_weights": ((P, P), {"upper": 2.0}),
    "kl": ((P, P), {"estimator": "k3"}),
    "kl_backward": ((P, P, P), {"estimator": "k3"}),
    "linear": ((X, W), {}),
    "linear_cross_entropy": ((X, W, Y), {}),
    "linear_logprob": ((X, W, Y), {}),
    "linear_logprob_pair": ((X, W, X, W, Y), {}),
    "linear_logprob_partial": ((X, W, Y), {"vocab_start": 0, "vocab_size": 9}),
    "logprob": ((Z, Y), {}),
    "logprob_backward": ((Z, Y, LSE), {"dlogprob": LSE}),
    "logprob_merge": ((torch.ones(1, 3, 5),), {}),
    "logprob_partial": ((Z, Y), {"vocab_start": 0, "vocab_size": 9}),
    "masked_whiten": ((P,), {}),
    "mismatch_metrics": ((P, P), {}),
    "policy_loss": ((P, P, P, ONE), {"spec": rk.PolicySpec()}),
    "policy_loss_and_grad": ((P, P, P, ONE), {"spec": rk.PolicySpec()}),
    "rms_norm": ((X, None, 1e-6), {}),
    "rms_norm_backward": ((X, X, None, 1e-6), {}),
    "scatter_rewards": ((torch.ones(2), ONE), {}),
    "sequence_logprob": ((P,), {}),
    "shift_labels_packed": ((torch.arange(6), CUTS), {}),
    "silu_mul": ((X, X), {}),
    "silu_mul_backward": ((X, X, X), {}),
    "value_loss": ((P, None, P), {"clip": None}),
    "value_loss_and_grad": ((P, None, P), {"clip": None}),
}
OTHER_FLAGS: tuple[Any, ...] = ("False", None, 1, 0.0, torch.tensor(True), [])
OTHER_INTEGERS: tuple[Any, ...] = (np.array(1), torch.tensor(1), np.array([1, 2]), 1.0, "1", [1], True)


def options(kind: type) -> list[tuple[str, str]]:
    found = []
    for name in CALLS:
        for key, option in inspect.signature(getattr(rk, name)).parameters.items():
            if type(option.default) is kind:
                found.append((name, key))
    return found


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_of_this_table_are_right(name: str) -> None:
    given, how = CALLS[name]
    getattr(rk, name)(*given, **how)


@pytest.mark.parametrize(("name", "flag"), options(bool))
def test_a_flag_is_a_bool(name: str, flag: str) -> None:
    given, how = CALLS[name]
    for wrong in OTHER_FLAGS:
        expected = f"^{flag}: expected a bool, got {type(wrong).__name__}$"
        with pytest.raises(TypeError, match=expected):
            getattr(rk, name)(*given, **how, **{flag: wrong})


@pytest.mark.parametrize(("name", "option"), options(int))
def test_an_integer_is_one(name: str, option: str) -> None:
    given, how = CALLS[name]
    how = {k: x for k, x in how.items() if k != option}
    for wrong in OTHER_INTEGERS:
        with pytest.raises(TypeError, match=re.escape(f"{option}: expected an integer, got {type(wrong).__name__}")):
            getattr(rk, name)(*given, **how, **{option: wrong})


def leaves_of(result: Any) -> list[Any]:
    """Bytes of a result's tensors, and the text of its metrics."""
    return [raw(x) if isinstance(x, torch.Tensor) else str(x) for x in torch.utils._pytree.tree_leaves(result)]


@pytest.mark.parametrize(("name", "option"), options(float))
def test_a_number_may_be_of_any_type_of_python_that_is_one(name: str, option: str) -> None:
    given, how = CALLS[name]
    number = inspect.signature(getattr(rk, name)).parameters[option].default
    want = leaves_of(getattr(rk, name)(*given, **{**how, option: number}))
    for same in (Fraction(number), Decimal(number), np.float64(number)):
        assert leaves_of(getattr(rk, name)(*given, **{**how, option: same})) == want
    for wrong in (str(number), True, [number]):
        with pytest.raises(TypeError, match=f"{option}: expected .*got {type(wrong).__name__}"):
            getattr(rk, name)(*given, **{**how, option: wrong})


# An error about a shard may use the name of the whole argument.
ALSO = {"logits_shard": "logits", "weight_shard": "weight"}
OPERANDS = [
    (name, i, list(inspect.signature(getattr(rk, name)).parameters)[i])
    for name, (given, _) in CALLS.items()
    for i in range(len(given))
    if isinstance(given[i], torch.Tensor)
]


def refusal(name: str, index: int, operand: Any) -> tuple[type, str]:
    given, how = CALLS[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011, since the callers check type and message
        getattr(rk, name)(*given[:index], operand, *given[index + 1 :], **how)
    return caught.type, str(caught.value)


@pytest.fixture(scope="module")
def mesh() -> Any:
    """A group with one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "index", "operand"), OPERANDS)
def test_an_operand_that_is_no_dense_tensor_is_named(name: str, index: int, operand: str) -> None:
    dense = CALLS[name][0][index]
    nested = torch.nested.nested_tensor([dense.reshape(dense.shape[0], -1)[0]])
    others = [dense.to_sparse(), nested, object(), "x"]
    if name != "group_advantage":  # its rewards may be a list of numbers
        others.append(dense.tolist())
    for other in others:
        kind, words = refusal(name, index, other)
        assert kind in (TypeError, ValueError), (kind, words)
        assert words.startswith((operand, ALSO.get(operand, operand))), words


@pytest.mark.parametrize(("name", "index", "operand"), OPERANDS)
def test_a_distributed_operand_is_to_be_made_local(mesh: Any, name: str, index: int, operand: str) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    kind, words = refusal(name, index, distribute_tensor(CALLS[name][0][index], mesh, [Replicate()]))
    assert kind is TypeError
    assert "got a DTensor; pass " in words, words
    assert "to_local()" in words


NO_ROWS: dict[str, dict[str, Any]] = {
    "logprob": {"logits": Z[:0], "target": Y[:0], "temperature": LSE[:0]},
    "logprob, out": {"logits": Z[:0], "target": Y[:0], "out": LSE[:0].clone()},
    "logprob_backward": {"logits": Z[:0], "target": Y[:0], "lse": LSE[:0], "dlogprob": LSE[:0]},
    "logprob_partial": {"logits_shard": Z[:0], "target": Y[:0], "vocab_start": 0, "vocab_size": 9},
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_a_distributed_operand_without_rows_is_to_be_made_local(mesh: Any, name: str) -> None:
    """Its view has no memory, like that of any array without elements."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    call, given = getattr(rk, name.split(",")[0]), NO_ROWS[name]
    call(**given)
    for operand in [
        k for k, x in given.items() if isinstance(x, torch.Tensor) and (k, name) != ("logits", "logprob, out")
    ]:
        other = distribute_tensor(given[operand], mesh, [Replicate()])
        with pytest.raises(TypeError, match=rf"{ALSO.get(operand, operand)}.*got a DTensor; pass .*to_local"):
            call(**given | {operand: other})


@pytest.mark.parametrize("operator", sorted(set(OPERATORS) & set(DRAWN)))
@pytest.mark.parametrize("framework", ["torch", "NumPy"])
def test_none_in_place_of_a_required_operand_is_named(operator: str, framework: str) -> None:
    def made(o: Operand) -> Any:
        return tensor_of(o) if framework == "torch" else np.ascontiguousarray(o.values).astype(o.dtype)

    parameters = inspect.signature(getattr(rk, operator)).parameters
    optional = {"scatter_rewards": ["rewards"]}.get(operator, [])  # other rewards may be given alone
    optional += [name for name, p in parameters.items() if p.default is not p.empty or "None" in str(p.annotation)]
    for name, arguments in by_array(operator, made):
        if name in optional:
            continue
        with pytest.raises((TypeError, ValueError)) as refused:
            getattr(rk, operator)(**arguments | {name: None})
        words = str(refused.value)
        assert words.startswith((name, ALSO.get(name, name))), words
        assert words.endswith("None") or "NoneType" in words, words


# Integers and fractions beyond every float, also with more digits than Python prints; and one that is 0 as a float.
HUGE: dict[str, Any] = {
    "an integer of 1329 bits": 10**400, "an integer of 1025 bits": -(2**1024), "an integer of 16610 bits": 10**5000,
    "a larger Fraction": Fraction(10**400), "": Fraction(1, 10**5000),
}  # fmt: skip


def tensor_of(o: Operand) -> Any:
    return torch.from_numpy(np.ascontiguousarray(o.values)).to(getattr(torch, o.dtype))


def is_of_floats(parameter: inspect.Parameter) -> bool:
    return type(parameter.default) is float or "float" in str(parameter.annotation)


@pytest.mark.parametrize("operator", sorted(set(OPERATORS) & set(DRAWN)))
def test_a_number_beyond_the_floats_is_refused_by_its_size(operator: str) -> None:
    names = (f"{operator}: ", *(name for of in names_of(operator).values() for name in of))
    for seed in range(4):
        drawn = DRAWN[operator](Draw(np.random.default_rng(seed)))
        if operator in ("linear", "embedding"):
            drawn.pop("main_grad", None)  # this test asks for no gradient
        for name, parameter in inspect.signature(getattr(rk, operator)).parameters.items():
            if isinstance(drawn.get(name), Operand) or parameter.kind is parameter.VAR_KEYWORD:
                continue
            for words, number in HUGE.items():
                try:
                    getattr(rk, operator)(**{k: mapped(v, tensor_of) for k, v in drawn.items()} | {name: number})
                except (TypeError, ValueError) as error:
                    said = str(error)
                    assert said.startswith(names), said
                    assert len(said) < 500
                    if f"{name}: expected " in said and is_of_floats(parameter) and "number" in said:
                        assert said.endswith(words), said
                else:
                    # A window of more keys than there are sees all of them.
                    assert name in ("window_size", "fill_value") or not words, (name, number)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Long(str):
    def __repr__(self) -> str:
        return 10**6 * "x"


def of_parts(number: Any) -> dict[str, Callable[[], Any]]:
    """Calls that show a value in their error, beside the operators' options."""
    return {
        "rollout: ": lambda: rk.enable(rollout=number, trainer=None),
        "trainer: ": lambda: rk.enable(rollout=None, trainer=number),
        "ops: ": lambda: rk.patch_model(torch.nn.Linear(2, 2), ops=(number,)),
        "max_norm: ": lambda: rk.nn.Embedding(3, 2, max_norm=number),
        "kind: ": lambda: rk.group_advantage(X[:, 0], kind=number, group_size=1),
        "semantics: ": lambda: rk.LogprobSemantics.from_json({"logits_dtype": "float32", number: 1}),
        "logits_dtype: ": lambda: rk.LogprobSemantics(logits_dtype=number),
    }


@pytest.mark.parametrize("number", [10**5000, (-(10**5000),), Unprintable(), Long("a")], ids=lambda x: type(x).__name__)
def test_a_value_that_has_no_short_text_is_shown_by_its_size_or_type(number: Any) -> None:
    for words, call in of_parts(number).items():
        with pytest.raises((TypeError, ValueError)) as refused:
            call()
        said = str(refused.value)
        assert said.startswith(words), said
        assert len(said) < 500, words


@pytest.mark.parametrize("framework", ["torch", "NumPy"])
def test_a_wide_integer_is_the_float_of_its_value(framework: str) -> None:
    """2^64 does not fit into the integers of torch and NumPy."""
    arrays = (Z[None], Y[None, :2])
    arrays = arrays if framework == "torch" else tuple(x.numpy() for x in arrays)
    how: dict[str, Any] = {"mode": "rejection", "seed": 1, "sample_id": 0, "position": 0}
    wide, same = (rk.verify_draft(*arrays, temperature=t, **how) for t in (2**64, 2.0**64))
    assert [raw(x) for x in wide] == [raw(x) for x in same]
    with pytest.raises(ValueError, match="weight_offset: expected a number below 2"):
        rk.nn.RMSNorm(2, weight_offset=10**5000)


@pytest.mark.parametrize("name", ["sample", "linear_sample", "sample_partial", "verify_draft"])
def test_a_number_of_rows_has_its_range_in_any_type(name: str) -> None:
    """A row of an array may have a bad parameter, which its status says; one number for all rows is an error."""
    keys: dict[str, Any] = {"seed": 1, "sample_id": 0, "position": 0}
    given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "sample": ((Z,), keys), "linear_sample": ((X, W), keys), "verify_draft": ((Z[None], Y[None, :2]), keys),
        "sample_partial": ((Z,), {**keys, "vocab_start": 0, "vocab_size": 9}),
    }  # fmt: skip
    operands, how = given[name]
    for option, wrong in (("temperature", -1), ("min_p", 2), ("top_p", 0)):
        if option not in inspect.signature(getattr(rk, name)).parameters:
            continue
        for kind in (Fraction, Decimal, np.float64, int):
            with pytest.raises(ValueError, match=f"^{option}: expected a .*number"):
                getattr(rk, name)(*operands, **how, **{option: kind(wrong)})
