"""Connects this library's operators to models and frameworks of other projects. This package imports operators;
operators never import it.

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
    """Imports a framework's module at first use: it needs torch."""
    if name not in ("megatron", "trl", "vllm"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def enable(*, rollout: Literal["vllm"] | None = None, trainer: Literal["trl"] | None = None) -> Enabled:
    """Turns on this library in an engine and in a trainer, so that the ratio of an on-policy token is exactly 1.

    Call it before the engine and the trainer are created::

        rk.enable(rollout="vllm", trainer="trl")
        trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="colocate", ...))
        with rk.trace() as ran:
            trainer.train()
        print(ran.calls)  # the operators that ran; without policy_loss and attention, the trainer is not served

    A trainer that exists already keeps its model and engine as they are; its first loss logs a warning that says so.
    ``rk.status(trainer.model)`` names the modules that are served.

    Args:
        rollout: ``"vllm"``: the plugin of docs/vllm.md. The plugin refuses an engine if it cannot replace one of the
            engine's modules.
        trainer: ``"trl"``: ``integrations.trl.enabled()``, and ``patch_model(model, strict=True)`` for the model of
            each GRPOTrainer created from now on. With both, an update raises an error if a colocated vLLM cannot reset
            its prefix cache afterwards.
    Returns:
        A context manager. The end of the context, or ``close()``, undoes the trainer's part. The plugin stays until the
        process ends, and patched models stay patched.
    Raises:
        ValueError for other names, or none at all; else as ``integrations.vllm.enable``, ``integrations.trl.enabled``
        and, when a trainer is made, :func:`patch_model`.
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
    """Replaces operators in a transformers decoder by this library's, where they are proved to compute the same.

    A module is replaced only if its class is known and its functions are unchanged from their source file. Known
    classes are torch's own and the classes of Llama, Qwen2, Qwen3, Mistral, Gemma 2 and 3, Phi-3, OLMo 2, GLM-4, and
    the dense parts of Qwen3-MoE and Mixtral. A probe on a small copy must show that the replacement computes the same.
    The replacement's error against float64 is at most twice the module's own, plus one unit in the last place. A module
    without this proof keeps its own forward. One warning logs such modules, and the result names each with the reason.

    Parameters, buffers and the modules themselves stay as they are: only the calls of their forwards are replaced, and
    hooks, adapters, checkpointing and sharding go on working. Nothing that another model could share is changed.
    :func:`unpatch_model` undoes the patch. Patch last: a module that is added later and computes with torch raises a
    ValueError in the next forward.

    With all operators, and nothing left to torch, a token's logits have the same bits in any batch and at any place in
    it. Padding on either side, packing, chunked prefill and decoding with a cache change no bit. With a mask, positions
    that are not given count from the first real token, as in ``generate`` (docs/models.md).

    Args:
        model: a causal language model of transformers, or a module that holds one (a PEFT model).
        ops: a selection of ``"embedding"``, ``"linear"`` (including the head), ``"rms_norm"``, ``"rope"`` (with cos and
            sin from tables that are the same on every device), ``"attention"``, ``"silu_mul"`` (or the model's GELU);
            None: all.
        strict: raise an error for each module that is not proved, and for a switch that is changed later, such as
            ``is_causal``.
        probe: False skips the probes: only classes and functions are compared.
    Returns:
        The number of modules that each operator now serves, as a dict. The dict's attribute ``unproved`` lists the
        modules that torch still computes.
    Raises:
        ImportError for a transformers older than 5.14; TypeError for another model or type of `ops`; ValueError for
        another name, and for a model that is already patched, in whole or in part, or is on the meta device. With
        `strict`, a module that is not proved is a ValueError too. Forwards raise a ValueError for masks with padding
        inside a sequence, for masks wider than the tokens without a cache, and for positions that begin another
        sequence with a cache.
    Source:
        docs/numerics.md; the hooks are transformers' own: forwards of modules, through classes derived from theirs.

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
    """Says which modules of a model :func:`patch_model` serves now, and which ones torch computes, with the reasons.

    Args:
        model: the model that was given to :func:`patch_model`, a copy of it, or one loaded from its file.
    Returns: as :func:`patch_model`; switches and hooks that changed since are checked again.
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
    """Undoes :func:`patch_model`: the model then computes the same as before, bit for bit.

    Args:
        model: the model that was given to :func:`patch_model`, a copy of it, or one loaded from its file.
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
