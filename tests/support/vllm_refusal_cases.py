"""Tests the refusals of the plugin that need vLLM's own classes. `run()` runs in a process with vLLM enabled
(tests/frameworks/test_vllm.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

# Features of attention that are refused, and how the error names them.
ATTENTION: dict[str, dict[str, Any]] = {
    "alibi_slopes": {"alibi_slopes": [0.5]},
    "logits_soft_cap = 30.0": {"logits_soft_cap": 30.0},
    "attn_type = encoder_only": {"attn_type": "encoder_only"},
    "kv_sharing_target_layer_name = layers.0": {"kv_sharing_target_layer_name": "layers.0"},
    "sinks": {"sinks": torch.zeros(4)},
}


def attention() -> None:
    from rl_kernel_native.integrations.vllm.attention import RlkAttentionBuilder, RlkAttentionImpl

    served: Any = RlkAttentionImpl(4, 64, 0.125, 2, sliding_window=128)
    for named, feature in ATTENTION.items():
        with pytest.raises(ValueError, match=f"RLK_VLLM's attention does not serve {named}$"):
            RlkAttentionImpl(4, 64, 0.125, 2, **feature)
    x = torch.zeros(1, 4, 64)
    for scale in ("output_scale", "output_block_scale"):
        with pytest.raises(ValueError, match="does not quantise its output"):
            served.forward(None, x, x, x, x, None, x, **{scale: torch.ones(1)})
    builder: Any = object.__new__(RlkAttentionBuilder)
    with pytest.raises(ValueError, match="serves causal attention, got False"):
        builder.build(0, SimpleNamespace(causal=False))


def settings() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from rl_kernel_native.integrations.vllm import config

    def engine(backend: Any, additional: Any) -> Any:
        return SimpleNamespace(
            model_config=SimpleNamespace(), additional_config=additional,
            attention_config=SimpleNamespace(backend=backend),
        )  # fmt: skip

    chosen = engine(None, {"own": 1})
    config.prepare(chosen)
    assert chosen.attention_config.backend is AttentionBackendEnum.CUSTOM
    assert chosen.additional_config == {"own": 1, config.KEY: config.identity()}
    assert chosen.model_config.disable_cascade_attn is True
    with pytest.raises(ValueError, match="expected CUSTOM or none with RLK_VLLM, got FLASH_ATTN"):
        config.prepare(engine(AttentionBackendEnum.FLASH_ATTN, {}))
    with pytest.raises(TypeError, match="expected a dict with RLK_VLLM, got list"):
        config.prepare(engine(None, []))


def processors() -> None:
    from rl_kernel_native.integrations.vllm import sampler

    class Own:
        """A logits processor that is not vLLM's."""

    for kind in ("argmax_invariant", "non_argmax_invariant"):
        given = {"argmax_invariant": [], "non_argmax_invariant": [], kind: [Own()]}
        runner = SimpleNamespace(input_batch=SimpleNamespace(logitsprocs=SimpleNamespace(**given)))
        with pytest.raises(ValueError, match=r"does not serve the logits processor vllm_refusal_cases\..*Own"):
            sampler.keyed(None, runner, None, None)


def check() -> None:
    """With ``check`` an engine does not start if a module of its model is vLLM's own; otherwise a warning names it."""
    from rl_kernel_native.integrations.vllm import hooks

    model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(8)})

    def load(mode: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hooks, "_enabled", lambda: mode)
            return hooks._loaded(lambda loader: model, None)

    assert load("1") is model
    with pytest.raises(ValueError, match=r"whose bits are vLLM's own: norm \(LayerNorm\)"):
        load("check")


def norms() -> None:
    """A norm of some columns, or without a weight, has other bits than rk.rms_norm."""
    from vllm.config import VllmConfig, set_current_vllm_config

    from rl_kernel_native.integrations.vllm.layers import RlkRMSNorm

    with set_current_vllm_config(VllmConfig(), check_compile=False):
        assert RlkRMSNorm(64, var_hidden_size=64).hidden_size == 64
        for given in ({"var_hidden_size": 32, "has_weight": True}, {"var_hidden_size": None, "has_weight": False}):
            named = ", ".join(f"{option} = {value}" for option, value in given.items())
            with pytest.raises(ValueError, match=f"norms of all columns with a weight, got {named}$"):
                RlkRMSNorm(64, **given)


def run() -> None:
    attention()
    norms()
    settings()
    processors()
    check()
