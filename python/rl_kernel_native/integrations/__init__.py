"""Connects this library's operators to models and frameworks of other projects. This package imports operators;
operators never import this package.

The first call of a function imports the modules that need torch. `integrations.trl`, `.megatron` and `.vllm` are
imported at first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from .. import _variants

if TYPE_CHECKING:
    from .patch import Patched
    from .switch import Enabled

__all__ = ["enable", "megatron", "patch_model", "status", "trl", "unpatch_model", "vllm"]


def __getattr__(name: str) -> Any:
    """Imports a framework's module at first use, because the module needs torch."""
    if name not in ("megatron", "trl", "vllm"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def enable(*, rollout: Literal["vllm"] | None = None, trainer: Literal["trl"] | None = None) -> Enabled:
    """Turns on this library in an engine and in a trainer, so that the ratio of an on-policy token is exactly 1.

    Call this function before the engine and the trainer are created::

        rk.enable(rollout="vllm", trainer="trl")
        trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="colocate", ...))
        with rk.trace() as ran:
            trainer.train()
        print(ran.calls)  # the operators that ran; without policy_loss and attention, the trainer is not served

    A trainer that already exists keeps its model and engine unchanged, and its first loss logs a warning about this.
    ``rk.status(trainer.model)`` names the modules that are served.

    Args:
        rollout: ``"vllm"``: the plugin of docs/vllm.md. The plugin refuses an engine if it cannot replace one of the
            engine's modules.
        trainer: ``"trl"``: ``integrations.trl.enabled()``, and ``patch_model(model, strict=True)`` for the model of
            each GRPOTrainer that is created after this call. If ``rollout`` is given too, an update raises an error if
            a colocated vLLM cannot reset its prefix cache afterwards.
    Returns:
        A context manager. The end of the context, or ``close()``, undoes the changes that the option ``trainer`` made.
        The plugin stays until the process ends, and patched models stay patched.
    Raises:
        ValueError for other names, or if no name is given. Further errors are those of ``integrations.vllm.enable``, of
        ``integrations.trl.enabled`` and, when a trainer is created, of :func:`patch_model`.
    Source: docs/vllm.md; examples/grpo_vllm.py.

    Example:
        >>> rk.enable(trainer="verl")
        Traceback (most recent call last):
        ValueError: trainer: expected one of trl or None, got 'verl'
    """
    from .switch import enable as turn_on

    return turn_on(rollout, trainer)


def _patch(name: str) -> Any:
    expected = f"{name}: expected torch 2.10 and transformers 5.14, or newer ones"
    with _variants.needed(expected, _variants.how_to_install("compare"), "torch", "transformers"):
        return importlib.import_module(f"{__name__}.patch")


def patch_model(model: Any, ops: Iterable[str] | None = None, *, strict: bool = False, probe: bool = True) -> Patched:
    """Replaces operators of a transformers decoder with this library's, if a proof shows that they compute the same.

    A module is replaced only if its class is known and its functions are unchanged from their source file. Known
    classes are torch's own and the classes of Llama, Qwen2, Qwen3, Mistral, Gemma 2 and 3, Phi-3, OLMo 2, GLM-4, and
    the dense parts of Qwen3-MoE and Mixtral. A probe on a small copy must show that the replacement computes the same.
    The replacement's error against float64 must be at most twice the error of the module itself, plus one unit in the
    last place. A module without this proof keeps its own forward. One warning lists these modules, and the result names
    each of them with the reason.

    Parameters, buffers and the modules themselves stay as they are: only the calls of their forwards are replaced.
    Hooks, adapters, checkpointing and sharding continue to work. Objects that other models may share are not changed.
    :func:`unpatch_model` undoes the patch. Patch after all other changes: if a module that computes with torch is added
    later, the next forward raises a ValueError.

    If all operators are replaced and torch computes none, a token's logits have the same bits in any batch and at any
    place in the batch. Padding on either side, packing, chunked prefill and decoding with a cache change no bit. If a
    mask is given and positions are not, positions count from the first real token, as in ``generate`` (docs/models.md).

    Args:
        model: a causal language model of transformers, or a module that holds one (a PEFT model).
        ops: a selection of ``"embedding"``, ``"linear"`` (including the head), ``"rms_norm"``, ``"rope"`` (its tables
            of cos and sin are the same on every device), ``"attention"``, ``"silu_mul"`` (or the model's GELU); None:
            all.
        strict: raise an error for a module without a proof, and for a switch, such as ``is_causal``, that is changed
            later.
        probe: False skips the probes, so only classes and functions are compared.
    Returns:
        A dict with the number of modules that each operator now computes. The dict's attribute ``unproved`` names the
        modules that torch still computes, with the reasons.
    Raises:
        ImportError for a transformers older than 5.14; TypeError for an object that is no such model, or a wrong type
        of `ops`. ValueError for an unknown name in `ops`, for a model that is already patched, in whole or in part, or
        for a model on the meta device. With `strict`, ValueError also for a module without a proof. Forwards raise a
        ValueError in three cases: a mask has padding inside a sequence; without a cache, a mask is wider than the
        tokens; with a cache, positions begin another sequence.
    Source:
        docs/numerics.md; forwards of modules are replaced through classes that are derived from transformers' classes.

    Example:
        >>> import transformers
        >>> size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> config = transformers.LlamaConfig(vocab_size=16, num_key_value_heads=1, **size)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> rk.patch_model(model)
        {'embedding': 1, 'linear': 8, 'rms_norm': 3, 'rope': 1, 'attention': 1, 'silu_mul': 1}
        >>> rk.unpatch_model(model)
    """
    return _patch("patch_model").patch(model, ops, strict, probe)


def status(model: Any) -> Patched:
    """Says which modules of a patched model this library computes now, and which modules torch computes, with the
    reasons.

    Args:
        model: the model that was given to :func:`patch_model`, a copy of this model, or a model loaded from its file.
    Returns: as :func:`patch_model`; switches and hooks that changed since the patch are checked again.
    Raises: ValueError if the model is not patched.
    Example:
        >>> import transformers
        >>> shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **shape))
        >>> _ = rk.patch_model(model)
        >>> rk.status(model)["linear"]
        8
    """
    return _patch("status").status(model)


def unpatch_model(model: Any) -> None:
    """Undoes :func:`patch_model`: the model then computes the same bits as before the patch.

    Args:
        model: the model that was given to :func:`patch_model`, a copy of this model, or a model loaded from its file.
    Raises: ValueError if the model is not patched, or if other code wrapped a forward after the patch.
    Example:
        >>> import transformers
        >>> shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **shape))
        >>> ids = torch.tensor([[3, 4, 5]])
        >>> before = model(ids).logits
        >>> _ = rk.patch_model(model)
        >>> rk.unpatch_model(model)
        >>> torch.equal(model(ids).logits, before)
        True
    """
    _patch("unpatch_model").unpatch(model)
