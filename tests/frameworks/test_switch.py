"""rk.enable: one switch for an engine and a trainer."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import framework_sources
import rl_kernel_native as rk

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rollout": "sglang"}, "rollout: expected one of vllm or None, got 'sglang'"),
        ({"trainer": "verl"}, "trainer: expected one of trl or None, got 'verl'"),
        ({}, "expected a rollout, a trainer or both, got neither"),
    ],
)
def test_other_names_are_errors(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rk.enable(**options)


def test_a_process_that_leaves_it_on_ends_without_a_word() -> None:
    framework_sources.imported("trl", "trl")
    command = "import rl_kernel_native as rk; rk.enable(trainer='trl')"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr


@pytest.fixture
def trainer_class() -> Any:
    framework_sources.imported("trl", "trl")
    from trl import GRPOTrainer

    return GRPOTrainer


def tiny() -> Any:
    import transformers

    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Qwen3Config(vocab_size=16, num_key_value_heads=1, head_dim=8, **size)
    return transformers.Qwen3ForCausalLM(config)


def made(trainer_class: Any, monkeypatch: pytest.MonkeyPatch, **parts: Any) -> Any:
    """A trainer that has only the parts that the switch reads."""

    def make(self: Any, model: Any) -> None:
        self.model = model
        vars(self).update(parts)

    monkeypatch.setattr(trainer_class, "__init__", make)
    return trainer_class


def test_it_stays_on_though_its_result_is_dropped(trainer_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = made(trainer_class, monkeypatch).__init__, trainer_class._compute_loss
    rk.enable(trainer="trl")
    gc.collect()
    try:
        assert trainer_class._compute_loss is not stock[1]
        trainer = trainer_class(tiny())
        assert rk.status(trainer.model)["linear"] == 8
        trainer_class(trainer.model)  # the model is patched already
    finally:
        from rl_kernel_native.integrations import switch

        (enabled,) = switch._open
        enabled.close()
    enabled.close()
    assert (trainer_class.__init__, trainer_class._compute_loss) == stock
    assert not switch._open


@pytest.mark.parametrize("patched", [False, True])
def test_a_trainer_that_exists_already_is_named_at_its_first_loss(
    trainer_class: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, patched: bool
) -> None:
    """The colocated engine is a stand-in. Only the loss is replaced, and without a warning the user would not know."""
    from rl_kernel_native.integrations import switch

    made(trainer_class, monkeypatch)
    monkeypatch.setattr(switch.vllm, "enable", lambda check: None)
    before = trainer_class(tiny())
    before.vllm_generation = SimpleNamespace(mode="colocate", sync_weights=lambda: None)
    if patched:
        rk.patch_model(before.model)
    caplog.clear()
    with rk.enable(trainer="trl", rollout="vllm"):
        inside = trainer_class(tiny())
        for trainer in (before, before, inside):
            with pytest.raises(KeyError):  # a batch without prompts
                trainer._compute_loss(trainer.model, {})
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    words = ["its model stays torch's"] * (not patched) + ["vLLM engine was created before"]
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True))


def test_an_engine_that_exists_already_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a stand-in of vLLM's engine and hooks."""
    from rl_kernel_native.integrations import vllm

    engine = type("LLMEngine", (), {})
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.llm_engine", SimpleNamespace(LLMEngine=engine))  # type: ignore[arg-type]
    hooks = SimpleNamespace(install=lambda enabled: None)
    monkeypatch.setitem(sys.modules, "rl_kernel_native.integrations.vllm.hooks", hooks)  # type: ignore[arg-type]
    monkeypatch.setattr(vllm, "hooks", hooks, raising=False)
    monkeypatch.setattr(vllm, "_mode", None)
    monkeypatch.setenv("RLK_VLLM", "")
    vllm.enable()
    assert not caplog.records
    running = engine()
    running.itself = {"an": "object"}
    monkeypatch.setattr(vllm, "_mode", None)
    vllm.enable()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("integrations.vllm: 1 engine of this process stays vLLM's own, created before")


def test_a_context_ends_after_an_exception(trainer_class: Any) -> None:
    stock = trainer_class.__init__, trainer_class._compute_loss
    enabled = rk.enable(trainer="trl")
    assert repr(enabled) == "Enabled(rollout=None, trainer='trl')"
    with pytest.raises(ZeroDivisionError), enabled:
        raise ZeroDivisionError
    assert (trainer_class.__init__, trainer_class._compute_loss) == stock


def test_a_model_that_is_not_served_is_an_error(trainer_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made(trainer_class, monkeypatch)
    model = tiny()
    model.model.layers[0].mlp.act_fn = torch.nn.Softplus()
    with rk.enable(trainer="trl"), pytest.raises(ValueError, match=r"act_fn|mlp"):
        trainer_class(model)


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_prefix_cache_that_keeps_old_keys_is_an_error(is_reset: bool) -> None:
    """Uses a stand-in of vLLM's LLM, whose answer TRL does not read."""
    from rl_kernel_native.integrations import switch

    done: list[str] = []
    generation = SimpleNamespace(
        sync_weights=lambda: done.append("synced"), llm=SimpleNamespace(reset_prefix_cache=lambda: is_reset)
    )
    sync = switch._synced(generation)
    if is_reset:
        sync()
    else:
        with pytest.raises(RuntimeError, match="prefix cache"):
            sync()
    assert done == ["synced"]
