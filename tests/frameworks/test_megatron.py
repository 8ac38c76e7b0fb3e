"""megatron-core's GPTModel on this library's operators has the bits of a patched model of transformers, packed or not.

Tests of a model need megatron-core on PYTHONPATH (scripts/requirements-megatron.txt); RLK_REQUIRE_MEGATRON=1 makes them
fail without it. scripts/test.sh engines runs them.
"""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import rl_kernel_native as rk  # noqa: E402
from rl_kernel_native.consistency import align_megatron, align_trainer  # noqa: E402
from rl_kernel_native.integrations import megatron  # noqa: E402

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None and "RLK_REQUIRE_MEGATRON" not in os.environ,
    reason="megatron-core is not on PYTHONPATH: scripts/requirements-megatron.txt",
)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tensor_model_parallel_size", 2), ("hidden_dropout", 0.1), ("normalization", "LayerNorm"), ("fp8", "e4m3"),
     ("num_moe_experts", 8), ("apply_rope_fusion", True), ("window_size", (128, 0))],
)  # fmt: skip
def test_what_is_not_served_is_named(name: str, value: Any) -> None:
    config = SimpleNamespace()
    model = SimpleNamespace(config=config, position_embedding_type="rope")
    assert all(got == served for _, got, served in megatron._asked(model))
    setattr(config, name, value)
    assert [n for n, got, served in megatron._asked(model) if got != served] == [name]


def test_packs_hold_what_fits() -> None:
    sequences = [[0] * n for n in (3000, 1000, 97, 5000, 1)]
    found = list(align_trainer.packs(sequences))
    assert [[len(s) for s in pack] for pack in found] == [[3000, 1000], [97], [5000], [1]]


@pytest.fixture(scope="module", params=[True, False], ids=["qwen3_tied", "llama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.2,
        "tie_word_embeddings": request.param,
    }  # fmt: skip
    kind = "Qwen3" if request.param else "Llama"
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**shape))
    folder = tmp_path_factory.mktemp("model")
    theirs.to(torch.bfloat16).save_pretrained(folder)
    return theirs.eval(), folder


@needs_megatron
def test_a_token_has_the_bits_of_the_patched_model_of_transformers(pair: Any) -> None:
    theirs, folder = pair
    model = align_megatron.make(str(folder), torch.bfloat16, "cpu")
    draw = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 96, (n,), generator=draw).tolist() for n in (7, 33, 1, 20)]
    rk.patch_model(theirs, strict=True)
    with torch.no_grad():
        want = [theirs(torch.tensor([ids])).logits[0] for ids in sequences]
        stock = [align_megatron.alone(model, ids, "cpu") for ids in sequences]
        served = megatron.patch(model)
        assert served["attention"] == 2
        alone = [align_megatron.alone(model, ids, "cpu") for ids in sequences]
        packed = align_megatron.packed(model, sequences, "cpu")
    assert any(not torch.equal(a, b) for a, b in zip(stock, want, strict=True)), "the control does not differ"
    for found in (alone, packed):
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))

    ids = torch.tensor([sequences[1]])
    loss = model(ids, torch.arange(33)[None], None, labels=ids.roll(-1))
    assert torch.equal(loss, -rk.logprob(want[1][None], ids.roll(-1)))
    loss.mean().backward()
    (-rk.logprob(theirs(ids).logits, ids.roll(-1))).mean().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    expected = align_megatron.renamed(gradients, 4, 2)
    for name, parameter in model.named_parameters():
        apart = (parameter.grad.float() - expected[name].float()).norm() / expected[name].float().norm()
        # bfloat16: sums over q, k and v are rounded once in one model and twice in the other
        assert apart < 0.02, (name, apart)


@needs_megatron
def test_another_module_or_version_is_named(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core as core

    _, folder = pair
    model = align_megatron.make(str(folder), torch.float32, "cpu")
    with pytest.raises(TypeError, match=r"expected megatron\.core's GPTModel, got Linear"):
        megatron.patch(torch.nn.Linear(2, 2))
    model.decoder.layers[0].input_layernorm = torch.nn.LayerNorm(64)
    with pytest.raises(ValueError, match=r"decoder\.layers\.0\.input_layernorm \(LayerNorm\)"):
        megatron.patch(model)
    monkeypatch.setattr(core, "__version__", "0.1")
    with pytest.raises(RuntimeError, match=r"expected 0\.16\.1, got 0\.1"):
        megatron.patch(model)
