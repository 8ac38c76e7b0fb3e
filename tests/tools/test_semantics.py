"""LogprobSemantics: equality of stamps, JSON, and a refusal by every comparison if two stamps differ."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import rl_kernel_native as rk

RAW = rk.LogprobSemantics(logits_dtype="bfloat16", raw=True)
WARM = rk.LogprobSemantics(logits_dtype="bfloat16", temperature=0.7)
CUT = rk.LogprobSemantics(logits_dtype="bfloat16", temperature=0.7, top_p=0.9)

X, MASK = torch.full((2, 3), -1.0), torch.ones(2, 3)
COMPARISONS: dict[str, Any] = {
    "mismatch_metrics": lambda **given: rk.mismatch_metrics(X, X, MASK, **given),
    "importance_weights": lambda **given: rk.importance_weights(X, X, MASK, upper=2.0, **given),
    "policy_loss": lambda **given: rk.policy_loss(X, X, X, MASK, spec=rk.PolicySpec(), **given),
    "policy_loss_and_grad": lambda **given: rk.policy_loss_and_grad(X, X, X, MASK, spec=rk.PolicySpec(), **given),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_pair_that_disagrees_is_refused(name: str) -> None:
    compare = COMPARISONS[name]
    for pair in ((WARM, CUT), (RAW, WARM), (RAW, rk.LogprobSemantics(logits_dtype="float32", raw=True))):
        with pytest.raises(ValueError, match="semantics: expected log-probabilities of the same kind") as refused:
            compare(semantics=pair)
        assert all(str(stamp) in str(refused.value) for stamp in pair)
    compare(semantics=(CUT, rk.LogprobSemantics.from_json(CUT.to_json())))
    with pytest.raises(TypeError, match="semantics: expected None or"):
        compare(semantics=CUT)
    with pytest.raises(TypeError, match="semantics: expected two LogprobSemantics, got dict"):
        compare(semantics=(CUT, CUT.to_json()))


def test_what_means_the_same_is_equal() -> None:
    assert rk.LogprobSemantics(logits_dtype="bfloat16") == RAW
    assert rk.LogprobSemantics(logits_dtype="bfloat16", temperature=0.7, order="sglang") == WARM
    assert rk.LogprobSemantics(logits_dtype="bfloat16", temperature=0.7, top_p=0.9, order="hf") != CUT
    of_float32 = float(torch.tensor(0.9))
    assert rk.LogprobSemantics(logits_dtype="bfloat16", temperature=0.7, top_p=of_float32) == CUT
    assert rk.LogprobSemantics(logits_dtype="bfloat16", temperature=0.7, top_p=0.9, allowed=True) != CUT
    for stamp in (RAW, WARM, CUT):
        assert rk.LogprobSemantics.from_json(json.loads(json.dumps(stamp.to_json()))) == stamp


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"raw": True, "temperature": 0.5}, "temperature: expected its default beside raw=True, got 0.5"),
        ({"top_p": 0.0}, r"top_p: expected a number in \(0, 1\], got 0.0"),
        ({"temperature": 0}, "temperature: expected a finite number > 0, got 0"),
        ({"top_k": 1.5}, "top_k: expected an integer, got float"),
        ({"temperature": 1e39}, "temperature: expected a finite number > 0, got 1e.39, which is inf in float32"),
        ({"temperature": 1e-50}, "temperature: expected .* got 1e-50, which is below the normal numbers of float32"),
        ({"temperature": 10**400}, "temperature: expected a number below 2.1024 in magnitude, got an integer of 1329"),
        ({"top_p": 1e-50}, "top_p: expected a number in .*which is below the normal numbers of float32"),
        ({"presence_penalty": -1e39}, "presence_penalty: expected a finite number, got -1e.39, which is -inf in float"),
        ({"top_k": 10**5000}, "top_k: expected an integer of 64 bits, got one of 16610 bits"),
        ({"min_p": "0.1"}, "min_p: expected a number, got str"),
        ({"allowed": 1}, "allowed: expected a bool, got int"),
        ({"order": "trt"}, "order: expected 'vllm', 'hf', 'sglang', got 'trt'"),
        ({"logits_dtype": "int8"}, "logits_dtype: expected 'float32', .* got 'int8'"),
        ({"typical_p": 0.5}, "semantics: expected fields of logits_dtype, .* got 'typical_p'"),
    ],
)
def test_bad_stamps(given: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        rk.LogprobSemantics.from_json({"logits_dtype": "float32"} | given)
    with pytest.raises(ValueError, match="semantics: expected a logits_dtype, got none"):
        rk.LogprobSemantics.from_json({})
    with pytest.raises(TypeError, match="semantics: expected an object"):
        rk.LogprobSemantics.from_json([1])


@pytest.mark.parametrize("backend", ["eager"])
def test_compiled(backend: str) -> None:
    torch.compiler.reset()
    f = torch.compile(lambda x: rk.mismatch_metrics(x, x, semantics=(CUT, CUT)).vector, backend=backend, fullgraph=True)
    assert torch.equal(f(X), rk.mismatch_metrics(X, X).vector)
