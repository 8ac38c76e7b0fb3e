"""The errors of stock torch on whole models, which the chain's rows of contract.py are based on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from chain_reference import chain_logprobs
from rl_kernel_native import contract
from rl_kernel_native.contract import CLIP_RANGE, row

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

from rl_kernel_native.consistency.digest import MODEL, TEXT  # noqa: E402

THETA = 10_000.0
SHAPE = {"num_layers": 4, "num_q_heads": 6, "num_kv_heads": 2, "head_dim": 32, "eps": 1e-6}
OUTPUTS = ("max |dlogp|", "mean |dlogp|", "KL k3", f"clip fraction at {CLIP_RANGE}")


def decoder(**options: Any) -> Any:
    """A Qwen3 of the digest's shape with bfloat16 parameters and float32 rotary frequencies."""
    config = transformers.Qwen3Config(
        vocab_size=259, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_theta=THETA,
        max_position_embeddings=512, attn_implementation="sdpa", **options,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def digest_model() -> Any:
    from safetensors import safe_open

    model = decoder()
    with safe_open(str(MODEL), "pt") as file:
        assert json.loads(file.metadata()["shape"]) == SHAPE
        names = [name for name in file.keys() if not name.startswith("rope.")]  # noqa: SIM118
        model.load_state_dict({name: file.get_tensor(name) for name in names}, strict=False)
    model.tie_weights()
    return model


def random_model() -> Any:
    torch.manual_seed(0)
    return decoder(initializer_range=0.1)  # logits spread as in a trained model


def figures(model: Any) -> tuple[float, ...]:
    """The OUTPUTS of the digest's text against float64 from the model's own weights, in figures of their bounds."""
    angles = np.arange(512)[:, None] / THETA ** (np.arange(16) / 16)
    ratios = []
    for ids in json.loads(TEXT.read_text())["sequences"]:
        if len(ids) < 2:
            continue
        want = chain_logprobs(model.state_dict(), SHAPE, ids, np.cos(angles), np.sin(angles))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0].float()
        got = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        ratios.append(got.double().numpy() - want)
    r = np.concatenate(ratios)
    excess = np.expm1(r)
    return (
        float(np.abs(r).max()), float(np.abs(r).mean()), float((excess - r).mean()),
        float((np.abs(excess) > CLIP_RANGE).mean()),
    )  # fmt: skip


@pytest.mark.parametrize("make", [digest_model, random_model])
def test_float64_of_a_chain_is_what_transformers_computes(make: Any) -> None:
    """In float32 the model's error is its own roundings alone: a thousandth of the error in bfloat16."""
    largest, mean, *_ = figures(make().float())
    assert largest < 1e-3 * contract.MAX_DLOGP
    assert mean < 1e-3 * contract.MEAN_DLOGP


def test_the_recorded_error_of_stock_torch_is_what_it_is() -> None:
    """Another torch or CPU sums in other orders: the worst token changes somewhat, the means little."""
    recorded = (contract.STOCK_MAX_DLOGP, contract.STOCK_MEAN_DLOGP, contract.STOCK_KL_K3, contract.STOCK_CLIP_FRACTION)
    found = figures(digest_model())
    for output, got, want, within in zip(OUTPUTS, found, recorded, (1.5, 1.15, 1.3, 1.0), strict=True):
        assert want / within <= got <= want * within, (output, found)
        assert row("chain", output).allowed() == 2 * want


def test_a_random_model_has_errors_of_that_size() -> None:
    """The bounds of any model are twice the stock error of the same model."""
    found = figures(random_model())
    assert 0.3 * contract.STOCK_MAX_DLOGP < found[0] < 3 * contract.STOCK_MAX_DLOGP
    for output, stock in zip(OUTPUTS, found, strict=True):
        assert row("chain", output).allowed(stock=stock) == 2 * stock
    assert row("chain", "rollout against training").allowed() == 0
