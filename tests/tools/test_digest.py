"""One digest from laptop to GPU: the log-probabilities of the package's model and text have the recorded sha256."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the digest runs on torch")
pytest.importorskip("safetensors", reason="the digest's model is a safetensors file")

import rl_kernel_native as rk  # noqa: E402
from rl_kernel_native.consistency import digest, environment  # noqa: E402
from rl_kernel_native.consistency.errors import BadInput  # noqa: E402

CPU = torch.device("cpu")


def test_the_files_are_small_and_whole() -> None:
    assert digest.MODEL.stat().st_size <= 4_000_000
    sequences = digest.digest_sequences()
    lengths = sorted(map(len, sequences))
    assert lengths[0] == 1  # it has nothing to score
    assert lengths[-1] > 2 * 128  # longer than two blocks of keys
    assert max(map(max, sequences)) < 259


@pytest.mark.parametrize("unit", ["ieee", "sm_90", "sm_80", "gfx942", "gfx90a"])
def test_the_cpu_computes_the_recorded_digest(unit: str) -> None:
    """sm_90 gives the results of an H200 on any machine."""
    found = digest.compute_digest(CPU, unit)
    assert found.layouts == dict.fromkeys(digest.LAYOUTS, True)
    assert found.sha256 == found.expected
    assert found.arithmetic == unit


@pytest.mark.gpu
def test_the_gpu_computes_the_recorded_digest() -> None:
    found = digest.compute_digest(torch.device("cuda"))
    assert found.agrees, found


def test_a_gpu_has_its_own_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with rk.arithmetic("gfx942"), environment.computing_as("sm_90", gpu):
        assert environment.arithmetic_of(gpu) == "sm_90"
        assert environment.arithmetic_of(CPU) == "gfx942"
    with pytest.raises(BadInput, match="--arithmetic ieee: cuda:0 has sm_90; the CPU has any"):
        environment.computing_as("ieee", gpu)
    with pytest.raises(BadInput, match="--arithmetic sm_70: want one of ieee, sm_90"):
        environment.computing_as("sm_70", CPU)


def test_digests_of_different_arithmetics_differ() -> None:
    """Equal digests would mean that the arithmetic was not applied."""
    recorded = json.loads(digest.DIGESTS.read_text())
    assert len(set(recorded.values())) == len(recorded) == 5


def test_the_model_has_learnt_something() -> None:
    """A uniform distribution over 259 bytes would be -5.56 nats; the digest should cover realistic values."""
    assert -3.0 < digest.compute_digest(CPU).mean_logprob < -1.0


def test_a_changed_weight_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = digest.load_digest_model

    def spoilt(*arguments: Any) -> Any:
        model = honest(*arguments)
        weight = model.weights["model.layers.3.mlp.down_proj.weight"]
        weight.view(torch.int16)[0] ^= 64  # flips the first bit after the point of a row's significands
        return model

    monkeypatch.setattr(digest, "load_digest_model", spoilt)
    found = digest.compute_digest(CPU)
    assert not found.agrees
    assert all(found.layouts.values())


def test_a_layout_that_differs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = rk.attention

    def faulty(q: Any, k: Any, v: Any, **options: Any) -> Any:
        out = honest(q, k, v, **options)
        return out * 1.25 if q.dim() == 4 and k.shape[1] > q.shape[1] else out

    monkeypatch.setattr(rk, "attention", faulty)
    found = digest.compute_digest(CPU)
    assert found.layouts == {"packed": True, "one by one": True, "chunks of 17": False}
    assert not found.agrees


def test_a_patched_model_of_transformers_is_the_same_chain() -> None:
    """The digest's forward is written out. This forward must equal the patched Qwen3 of transformers."""
    transformers = pytest.importorskip("transformers")
    model = digest.load_digest_model(CPU, "portable")
    weights = {name: tensor for name, tensor in model.weights.items() if not name.startswith("rope.")}
    shape = model.shape
    config = transformers.Qwen3Config(
        vocab_size=259, hidden_size=192, intermediate_size=512, num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_q_heads"], num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"], rms_norm_eps=shape["eps"], max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    theirs = transformers.Qwen3ForCausalLM(config).bfloat16().eval()
    left = theirs.load_state_dict(weights, strict=False)
    assert left.missing_keys == ["lm_head.weight"]
    assert not left.unexpected_keys
    rk.patch_model(theirs)
    ids = digest.digest_sequences()[-1]
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    want = digest.score(model, [ids], CPU, "packed")[0]
    got = rk.logprob(logits[:-1], torch.tensor(ids[1:]), exp="portable")
    assert torch.equal(got, want)
