"""This library's operators inside of models and frameworks of others. Imports operators, never the other way round.

What needs torch is imported with the first call, `integrations.trl` with its first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

__all__ = ["patch_model", "trl", "unpatch_model"]


def __getattr__(name: str) -> Any:
    """`rl_kernel_native.integrations.trl` without an import of its own: the module needs torch."""
    if name != "trl":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.trl")


def patch_model(model: Any, ops: Iterable[str] | None = None) -> dict[str, int]:
    """Swaps this library's operators into a Qwen3 or Llama model of transformers, in place.

    Parameters, buffers and the modules themselves stay as they are: only what their forwards call is replaced, and
    hooks, adapters, checkpointing and sharding go on working. :func:`unpatch_model` takes it back. Patch last: a linear
    or embedding that comes into the model afterwards is a ValueError in its next forward.

    With all operators a token's logits have the same bits in any batch, at any place in it, with padding on either
    side, packed among other sequences, prefilled whole or in chunks, or decoded against a cache. Beside a mask,
    positions that are not given count from the first real token, as ``generate`` counts them (docs/models.md).

    Args:
        model: a `LlamaForCausalLM` or `Qwen3ForCausalLM` of transformers, or a module that holds one (a PEFT model).
        ops: of ``"embedding"``, ``"linear"`` (the head too), ``"rms_norm"``, ``"rope"`` (with cos and sin from tables
            that are the same on every device), ``"attention"``, ``"silu_mul"`` (or the GELU that the model has); None:
            all.
    Returns:
        How many modules each operator now serves.
    Raises:
        ImportError for a transformers older than 5.14; TypeError for another model or type of `ops`; ValueError for
        another name, a model that is patched already, in whole or in part, or lies on the meta device, or options of a
        model that an operator does not compute: attention dropout, rope that depends on the batch, an embedding with a
        largest norm, a head_dim that is no multiple of 8 or over 256, parameters of float64. Forwards raise ValueError
        for masks with padding inside of a sequence, or wider than the tokens where there is no cache, and for positions
        that begin another sequence beside a cache.
    Source:
        docs/numerics.md; the seams are transformers' own: the forwards of modules and the attention interface.
    """
    from . import patch

    return patch.patch(model, ops)


def unpatch_model(model: Any) -> None:
    """Takes back what :func:`patch_model` did: the model then computes what it did before, bit for bit.

    Args:
        model: what was given to :func:`patch_model`, or a copy of it, or what was loaded from a file of it.
    Raises: ValueError where the model is not patched, or a forward was wrapped by something else since.
    """
    from . import patch

    patch.unpatch(model)
