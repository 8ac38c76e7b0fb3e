"""Forwards of the modules of a transformers decoder on this library's operators. `patch_model` puts these forwards in
place.

Each forward takes the module as its first argument and calls submodules as the original does, so hooks, adapters and
sharding of submodules continue to work. Rounding points are those of transformers: `rope`, `embedding`, `rms_norm` and
`silu_mul` differ from the originals only in the last bits of float32 functions and sums.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers

import rl_kernel_native as rk

from . import unchanged
from .families import CACHE_NAMES, servable
from .sequences import Sequences, locate_sequences
from .served import base_of, is_served, observed, other_than_served, taken_over

OFFSET_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k")  # transformers' keywords for packed sequences
SEQUENCES = "rk_sequences"  # keyword that passes the Sequences of a forward to the layers
# Names of attributes that patch_model sets. A body is a decoder without its LM head, such as LlamaModel.
ATTENTIONS = "_rk_attentions"  # attribute of a body: its attentions
PROVED = "_rk_proved"  # attribute of a body: its attention function at the time of the proof
TABLES = "_rk_tables"  # attribute of a rotary embedding: its own RotaryTables, by kind of layer
KNOWN = "_rk_known"  # attribute of a body and of the modules that contain it: the modules that patch_model found

# A tool may observe and replace attention's operands and output.
# The call observer.operands(query [B, H, T, D], key [B, Hkv, L, D]) returns both operands.
# The call observer.output(output [B, T, H, D]) returns the output.
OBSERVER_ATTRIBUTE = "_rlk_attention_observer"

# transformers passes on a mask of four dimensions unchanged. This empty mask therefore takes the place of a mask for
# attention that needs none.
_NO_MASK = torch.empty(1, 1, 0, 0, dtype=torch.bool, device="cpu")
_logger = logging.getLogger("rl_kernel_native")


def embedding(module: Any, input: torch.Tensor) -> torch.Tensor:
    """torch.nn.Embedding: ids [...] to [..., hidden]."""
    return rk.embedding(input, module.weight, padding_idx=module.padding_idx)


def scaled_embedding(module: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Gemma's embedding: the row of the table times a scale, in the table's dtype."""
    weight = module.weight
    return rk.embedding(input_ids, weight, padding_idx=module.padding_idx) * module.embed_scale.to(weight.dtype)


def linear(module: Any, input: torch.Tensor) -> torch.Tensor:
    """torch.nn.Linear: [..., in_features] to [..., out_features]."""
    weight = module.weight
    if type(weight) is not torch.nn.Parameter and type(weight).__module__.partition(".")[0] != "torch":
        raise ValueError(
            f"model: expected the weights that patch_model found, got a later {type(weight).__name__}, which only its "
            "own kernels multiply; call unpatch_model, and patch_model after all other changes"
        )
    return rk.linear(_rows(input), weight, module.bias)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with a contiguous last dimension, which the operators need."""
    return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def rms_norm(module: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """LlamaRMSNorm and similar classes. With a residual, the function returns the pair (normalised, hidden_states +
    residual).

    If the weight's dtype is wider, the normalised row is rounded to the dtype of the hidden states and the product to
    the weight's dtype, as in transformers.
    """
    weight, eps, hidden_states = module.weight, module.variance_epsilon, _rows(hidden_states)
    residual = None if residual is None else _rows(residual)
    if residual is not None and residual.dtype != hidden_states.dtype:
        total = residual + hidden_states
        return rms_norm(module, total), total
    if weight.dtype != hidden_states.dtype:
        if torch.promote_types(weight.dtype, hidden_states.dtype) != hidden_states.dtype:
            found = rk.rms_norm(hidden_states, None, eps, residual=residual)
            return weight * found if residual is None else (weight * found[0], found[1])
        weight = weight.to(hidden_states.dtype)
    return rk.rms_norm(hidden_states, weight, eps, residual=residual, round_before_weight=True)


def wide_rms_norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Olmo2RMSNorm, which rounds only once, after the product with the weight."""
    return rk.rms_norm(_rows(hidden_states), _weight_beside(module, hidden_states), module.variance_epsilon)


def offset_rms_norm(module: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """Gemma2RMSNorm and Gemma3RMSNorm, whose weights are stored minus 1. Queries and keys are passed transposed."""
    if x.dim() == 4 and x.shape[1] != 1 and x.stride(1) < x.stride(2):
        x = x.contiguous()
    x, residual = _rows(x), None if residual is None else _rows(residual)
    if residual is not None and residual.dtype != x.dtype:
        total = residual + x
        return offset_rms_norm(module, total), total
    return rk.rms_norm(x, _weight_beside(module, x), module.eps, residual=residual, weight_offset=1.0)


def _weight_beside(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A norm's weight in a dtype that rms_norm accepts for x."""
    weight: torch.Tensor = module.weight
    return weight if weight.dtype in (x.dtype, torch.float32) else weight.float()


def _silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _gated(rk.silu_mul, gate, up)


def _gelu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _gated(rk.gelu_mul, gate, up)


def _gated(product: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """If the dtypes differ, the activation is rounded to the gate's dtype, and the product to the wider dtype."""
    if gate.dtype != up.dtype:
        if torch.promote_types(gate.dtype, up.dtype) != gate.dtype:
            return product(gate, torch.ones_like(gate), round_before_mul=True) * up
        up = up.to(gate.dtype)
    return product(gate, up, round_before_mul=True)


# The supported activations by class, each with a function of (gate, up) that returns the product. The classes in
# transformers 5.14 differ from those in 5.24.
ACTIVATIONS: dict[Any, Any] = {torch.nn.SiLU: _silu}
for _name, _product in {"SiLUActivation": _silu, "GELUTanh": _gelu, "PytorchGELUTanh": _gelu}.items():
    if hasattr(transformers.activations, _name):
        ACTIVATIONS[getattr(transformers.activations, _name)] = _product


def gated_mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    """LlamaMLP and similar classes. If the activation has a hook or is not in ACTIVATIONS, torch computes the MLP."""
    act = module.act_fn
    product = ACTIVATIONS.get(type(act))
    if product is None or observed(act):
        return module.down_proj(act(module.gate_proj(x)) * module.up_proj(x))
    return module.down_proj(product(module.gate_proj(x), module.up_proj(x)))


def fused_gated_mlp(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Phi3MLP and Glm4MLP, in which one projection computes gate and up."""
    act = module.activation_fn
    product = ACTIVATIONS.get(type(act))
    gate, up = module.gate_up_proj(hidden_states).chunk(2, dim=-1)
    return module.down_proj(up * act(gate) if product is None or observed(act) else product(gate, up))


def layer(module: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor:
    """A decoder layer in which the norm of the MLP's input also adds the residual. If a hook observes the norm, a
    separate sum adds it."""
    kind = type(module)
    norms, dropouts = kind._rk_norms, kind._rk_dropouts
    attended, _ = module.self_attn(
        hidden_states=getattr(module, norms[0])(hidden_states), attention_mask=attention_mask, **kwargs
    )
    if norms[1] is not None:
        attended = getattr(module, norms[1])(attended)
    if dropouts is not None:
        attended = getattr(module, dropouts[0])(attended)
    norm = getattr(module, norms[2])
    if getattr(type(norm), "_rk_adds", False) and not observed(norm):
        normed, residual = norm.forward(attended, residual=hidden_states)
    else:
        residual = hidden_states + attended
        normed = norm(residual)
    fed = module.mlp(normed)
    if norms[3] is not None:
        fed = getattr(module, norms[3])(fed)
    if dropouts is not None:
        fed = getattr(module, dropouts[1])(fed)
    return residual + fed


def take_cache(kwargs: dict[str, Any]) -> Any:
    """Removes the cache from a forward's keywords and returns it; None if there is none."""
    given = [cache for cache in (kwargs.pop(name, None) for name in CACHE_NAMES) if cache is not None]
    if len(given) > 1:
        raise ValueError(f"{CACHE_NAMES[0]}: expected one cache, got another as {CACHE_NAMES[1]}")
    return given[0] if given else None


def cache_name(model: Any) -> str:
    """The name of the cache argument in the forward of a model's class."""
    return _cache_name(model)


@functools.cache
def _cache_name(model: Any) -> str:
    parameters = inspect.signature(model.forward).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise TypeError(
        f"{model.__name__}.forward: expected a cache by one of the names {CACHE_NAMES}, got {list(parameters)}"
    )


def attention_block(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of every family. Heads stay in the layout of the projections, and one call rotates queries and keys."""
    family, ops = type(module)._rk_family, type(module)._rk_ops
    cache = take_cache(kwargs)
    sequences = kwargs.pop(SEQUENCES, None)
    own = "attention" not in ops or isinstance(sequences, str)
    for name, given in kwargs.items():
        if callable(getattr(given, "update", None)) and hasattr(given, "get_seq_length"):
            raise TypeError(
                f"{name}: expected a cache by one of the names {CACHE_NAMES}, got one that would be left out"
            )
    shape = hidden_states.shape[:-1]
    query, key, value = _projected(module, family, hidden_states, (*shape, -1, module.head_dim))
    cos, sin = position_embeddings  # type: ignore[misc]
    if "rope" in ops:
        width = cos.shape[-1]
        query, key, cos, sin = _promoted(family, query, key, cos, sin)
        if family.interleaved:
            cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        query, key = rk.rope(
            query,
            key,
            cos,
            sin,
            intermediate=family.rope_rounding,
            interleaved=family.interleaved,
            partial_dim=None if width == query.shape[-1] else width,
        )
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    else:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        query, key = family.modeling.apply_rotary_pos_emb(query, key, cos, sin)
    if cache is not None:
        kind: Any = type(cache)
        more = {"kwargs": kwargs} if own and _sets_keywords(kind) else {}
        key, value = cache.update(key, value, module.layer_idx, **more)
    window = None
    if family.window is not None:
        window = getattr(module if family.window == "module" else module.config, "sliding_window", None)
    if not own:
        if sequences is not None:
            _require_mask_of_body(attention_mask, kwargs)
        output, weights = attention(module, query, key, value, sequences, window), None
    else:
        output, weights = _own_attention(module, family, (query, key, value), attention_mask, window, kwargs)
    return module.o_proj(output.reshape(*shape, -1).contiguous()), weights


@functools.cache
def _sets_keywords(cache: Any) -> bool:
    """Whether a cache class sets keywords for the attention function, as the cache of continuous batching does."""
    given = inspect.signature(cache.update).parameters.get("kwargs")
    return given is not None and given.kind is not inspect.Parameter.VAR_KEYWORD


def _require_mask_of_body(mask: Any, kwargs: dict[str, Any]) -> None:
    """Raises a ValueError if a hook of a layer or an attention replaced the mask that the model's forward passed."""
    if mask is None or tuple(mask.shape[-2:]) != (0, 0):
        got = "None" if mask is None else list(mask.shape)
    elif kwargs.get("is_causal", True) is False:
        got = "is_causal=False"
    else:
        return
    raise ValueError(
        f"attention_mask: expected the one that the model's forward hands to its layers, got {got}; rk.attention takes "
        "masks of the model alone: for hooks that set others choose ops without 'attention'"
    )


def _promoted(family: Any, query: Any, key: Any, cos: Any, sin: Any) -> tuple[Any, ...]:
    """Casts the operands of a rotation to one dtype, as torch's products do. OLMo 2 keeps queries in their own
    dtype."""
    wide = family.rope_rounding == "float32" and cos.dtype == torch.float32
    if query.dtype == key.dtype and (wide or cos.dtype == query.dtype):
        return query, key, cos, sin
    dtype = functools.reduce(torch.promote_types, (query.dtype, key.dtype, cos.dtype))
    return tuple(x.to(dtype) for x in (query, key, cos, sin))


def _projected(module: Any, family: Any, hidden_states: torch.Tensor, heads: tuple[int, ...]) -> Any:
    """Queries, keys and values [B, T, heads, head_dim], normalised if the family normalises queries and keys."""
    if family.fused_qkv:
        fused = module.qkv_proj(hidden_states)
        keys = module.num_key_value_heads * module.head_dim
        query, key, value = fused.split([fused.shape[-1] - 2 * keys, keys, keys], -1)
    else:
        query, key, value = module.q_proj(hidden_states), module.k_proj(hidden_states), module.v_proj(hidden_states)
    if family.qk_norm == "row":
        query, key = module.q_norm(query), module.k_norm(key)
    query, key, value = query.view(heads), key.view(heads), value.view(heads)
    if family.qk_norm == "head":
        query, key = module.q_norm(query), module.k_norm(key)
    elif family.qk_norm == "transposed":
        query, key = _head_norm(module.q_norm, query), _head_norm(module.k_norm, key)
    return query, key, value


def _head_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Normalises x [B, T, heads, head_dim]. If a hook or another forward could see the layout, the norm gets [B, heads,
    T, head_dim]."""
    if is_served(norm) and not observed(norm):
        return norm.forward(x)
    return norm(x.transpose(1, 2)).transpose(1, 2)


def _own_attention(
    module: Any, family: Any, operands: tuple[Any, ...], mask: Any, window: int | None, kwargs: dict[str, Any]
) -> Any:
    """Calls the attention function that the configuration names, as transformers does."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS.get_interface(
        module.config._attn_implementation, family.modeling.eager_attention_forward
    )
    if family.window is not None:
        kwargs["sliding_window"] = window
    if family.softcap:
        kwargs["softcap"] = module.attn_logit_softcapping
    dropout = module.attention_dropout if module.training else 0.0
    return attend(module, *operands, mask, dropout=dropout, scaling=module.scaling, **kwargs)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: Sequences | None,
    window: int | None,
) -> torch.Tensor:
    """Computes attention [B, T, H, D] from query [B, H, T, D], key and value [B, Hkv, L, D]."""
    if sequences is None:
        raise ValueError(f"attention: {type(module).__name__} was called outside of its model's forward")
    observer = getattr(module, OBSERVER_ATTRIBUTE, None)
    if observer is not None:
        query, key = observer.operands(query, key)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    num_keys = sequences.num_keys
    if num_keys is not None and num_keys != k.shape[1]:
        k, v = (rows_of_cache(x, num_keys, q.shape[1], window) for x in (k, v))
    softcap = module.attn_logit_softcapping if type(module)._rk_family.softcap else None
    options: dict[str, Any] = {"softmax_scale": module.scaling, "window_size": window, "softcap": softcap}
    if sequences.cu_seqlens_q is not None:
        packed = rk.attention(
            *(x.flatten(0, 1) for x in (q, k, v)),
            cu_seqlens_q=sequences.cu_seqlens_q,
            cu_seqlens_k=sequences.cu_seqlens_k,
            **options,
        )
        output = packed.view(q.shape)
    else:
        output = rk.attention(q, k, v, leftpad_k=sequences.leftpad_k, seqused_k=sequences.seqused_k, **options)
    return output if observer is None else observer.output(output)


def rows_of_cache(x: torch.Tensor, num_keys: int, num_queries: int, window: int | None) -> torch.Tensor:
    """Keys or values [B, L, Hkv, D] of a cache as [B, num_keys, Hkv, D].

    A static cache is longer than its content, so its end is cut off. The cache of a sliding window has dropped the
    first keys. Attention counts its blocks from a sequence's first key, so zeros replace the dropped keys; no query
    reads these zeros.
    """
    missing = num_keys - x.shape[1]
    if missing <= 0:
        return x[:, :num_keys]
    if window is None or x.shape[1] < num_queries + window - 1:
        wanted = f"all {num_keys}" if window is None else f"the last {num_queries + window - 1} or more"
        raise ValueError(f"{CACHE_NAMES[0]}: expected {wanted} keys of a row, got {x.shape[1]}")
    return torch.cat([x.new_zeros(x.shape[0], missing, *x.shape[2:]), x], 1)


def masks_for_generate(*, attention_mask: torch.Tensor | None = None, **_: Any) -> torch.Tensor | None:
    """Returns the mask unchanged, so the model gets the caller's mask. ``generate`` calls this function for a static
    cache with this attention."""
    return attention_mask


def makes_cache(module: Any, use_cache: bool | None) -> bool:
    """Whether the forward of LlamaModel or Qwen3Model makes a cache if it is given none; the rule follows
    transformers."""
    checkpointed = module.gradient_checkpointing and module.training and torch.is_grad_enabled()
    return bool(module.config.use_cache if use_cache is None else use_cache) and not checkpointed


def why_own_attention(body: Any, kwargs: dict[str, Any]) -> str | None:
    """The reason why `rk.attention` does not compute the attention of this call, or None. The checked switches may
    change between calls."""
    config = body.config
    if config._attn_implementation != body.__dict__[PROVED]:
        return _why_another_function(body, config._attn_implementation)
    if kwargs.get("is_causal") is False or not getattr(config, "is_causal", True):
        return "is_causal is False"
    if getattr(config, "use_bidirectional_attention", False):
        return "use_bidirectional_attention is set"
    for each in body.__dict__[ATTENTIONS]:
        kind: Any = type(each)
        if not is_served(each):
            return f"the class of an attention was set to {kind.__name__} after the patch"
        if not each.is_causal:
            return "is_causal is False"
        reason = why_no_softcap(each, kind._rk_family)
        if reason is not None:
            return reason
        if each.training and each.attention_dropout:
            return f"attention_dropout is {each.attention_dropout} in training"
    return why_other_windows(body, kind._rk_family)


def why_no_softcap(attention: Any, family: Any) -> str | None:
    """The reason why the configuration's attention function does not apply the module's softcap."""
    cap, name = attention.attn_logit_softcapping if family.softcap else None, attention.config._attn_implementation
    if cap is None or name != "sdpa":
        return None
    return f"attn_logit_softcapping is {cap}, and its attention function {name!r} takes none"


def why_other_windows(body: Any, family: Any) -> str | None:
    """The reason why a layer's window differs from the mask's window, which follows from the configuration and the
    layer's index."""
    if family.window != "module":
        return None
    attentions, config = body.__dict__.get(ATTENTIONS), body.config
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    for place, each in enumerate(body.layers):
        attention = getattr(each, "self_attn", None)
        if attention is None:  # a wrapper that was added later hides the attention
            attention = attentions[place]
        masks = window if kinds is None or kinds[place] == "sliding_attention" else None
        if attention.sliding_window != masks:
            return f"sliding_window of layer {place} is {attention.sliding_window}, and {masks} by its mask"
    return None


def _why_another_function(body: Any, name: str) -> str | None:
    """The reason why `rk.attention` cannot compute an attention function that was set after the patch; checked at each
    call."""
    reason = f"its attention function was set to {name!r} after the patch"
    if not torch.compiler.is_compiling():
        attention = body.__dict__[ATTENTIONS][0]
        reason = unchanged.why_attention_changed(attention, type(attention)._rk_family)  # type: ignore[assignment]
        if reason is None:
            body.__dict__[PROVED] = name
            return why_own_attention(body, {})
    return reason


def body(
    module: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    inputs_embeds: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """LlamaModel and similar classes: finds the batch's sequences once, then calls the original forward."""
    base = base_of(module)
    reason = why_own_attention(module, kwargs)
    tokens = input_ids if input_ids is not None else inputs_embeds
    if reason is not None:
        _stay(module, "attention", reason)
        kwargs[SEQUENCES] = reason
    elif tokens is not None:
        cache = take_cache(kwargs)
        for name in kwargs:  # transformers would ignore an unknown keyword
            if name.startswith("cu_") and name not in OFFSET_NAMES:
                raise TypeError(f"{name}: expected offsets by the names {' and '.join(OFFSET_NAMES)}, got {name}")
        kwargs[SEQUENCES] = located = locate_sequences(
            tokens.shape[0],
            tokens.shape[1],
            tokens.device,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=makes_cache(module, kwargs.get("use_cache")),
            cu_seq_lens_q=kwargs.get("cu_seq_lens_q"),
            cu_seq_lens_k=kwargs.get("cu_seq_lens_k"),
        )
        if position_ids is None:  # counts as `generate` does; the original also counts padding
            position_ids = located.positions(tokens.shape[0], tokens.shape[1])
        if cache is not None:
            kwargs[cache_name(base)] = cache
        attention_mask = _NO_MASK
    return base.forward(
        module,
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        inputs_embeds=inputs_embeds,
        **kwargs,
    )


def _stay(module: Any, what: str, reason: str, strict: bool | None = None) -> None:
    """Logs once that torch now computes a part of a model. If the model was patched with strict=True, raises an error
    instead."""
    words = f"model: {what} of this forward stays torch's: {reason}"
    if type(module)._rk_strict if strict is None else strict:
        raise ValueError(f"{words}; patch_model was called with strict=True")
    if not torch.compiler.is_compiling() and module.__dict__.get("_rk_said") != reason:
        module.__dict__["_rk_said"] = reason
        _logger.warning("%s", words)


def require_no_others(module: Any, *_: Any) -> None:
    """A hook before each forward: raises a ValueError if a module that computes with torch was added after the patch.
    The check is cheap if no module was added.

    It is no error to remove modules or to wrap known modules. If a module that this library computes later gets another
    class or forward, torch computes the module, and a warning says so.
    """
    if torch.compiler.is_compiling():
        return
    name, chosen, strict, known, served, bases = module.__dict__[KNOWN]
    for each in served:
        if not is_served(each) or "forward" in each.__dict__:
            reason = taken_over(each)
            if reason is not None:
                at = next((at for at, x in _below(module, name) if x is each), None)
                if at is not None:
                    _stay(module, at, reason, strict)
    for base in bases:
        other = other_than_served(base)
        if other is not None:
            raise ValueError(
                f"model: expected {other} as patch_model found it, got a later one, which no patched module calls; "
                "call unpatch_model, and patch_model after all other changes"
            )
    if all(tuple(children.values()) == found for children, found in known):
        return
    before = {id(x) for _, found in known for x in found}
    for at, each in _below(module, name):
        if id(each) not in before and not is_served(each) and servable(each, chosen):
            raise ValueError(
                f"model: expected the modules that patch_model found, got a later one, {at}, which torch computes; "
                "resize_token_embeddings and adapters make new modules: call unpatch_model, and patch_model after them"
            )
    remember(module, name, chosen, strict)


def remember(module: Any, name: str, chosen: frozenset[str], strict: bool) -> Iterable[Any]:
    """Stores the modules that are now below ``module``. Modules below a module that has its own record are left out.

    Returns the classes that this library's classes replaced.
    """
    parents = [module, *(each for _, each in _below(module, name) if KNOWN not in each.__dict__)]
    found = [(each._modules, tuple(each._modules.values())) for each in parents if each._modules]
    served = tuple(each for each in parents[1:] if is_served(each))  # without `module`, which must not hold itself
    bases = dict.fromkeys(base_of(each) for each in parents if is_served(each))
    module.__dict__[KNOWN] = (name, chosen, strict, found, served, tuple(bases))
    return bases


def _below(module: Any, name: str) -> Iterator[tuple[str, Any]]:
    for key, child in module._modules.items():
        if child is not None:
            at = f"{name}.{key}" if name else key
            yield at, child
            if KNOWN not in child.__dict__:
                yield from _below(child, at)


def why_own_angles(module: Any) -> str | None:
    """The reason why a rotary embedding's tables are no longer valid, or None. The tables become invalid if the
    module's frequencies change."""
    for layer, tables in module.__dict__[TABLES].items():
        if not tables.agrees(getattr(module, "inv_freq" if layer is None else f"{layer}_inv_freq")):
            return "inv_freq is not that of the configuration"
    return None


def _own_angles(module: Any, *inputs: Any) -> Any:
    _stay(module, "cos and sin", str(why_own_angles(module)))
    return base_of(module).forward(module, *inputs)


def rotary_embedding(
    module: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """LlamaRotaryEmbedding and similar classes. Only the dtype of x is used; position_ids is [B, T]."""
    if why_own_angles(module) is not None:
        return _own_angles(module, x, position_ids, *(() if layer_type is None else (layer_type,)))
    scaling = module.attention_scaling if layer_type is None else getattr(module, f"{layer_type}_attention_scaling")
    return module.__dict__[TABLES][layer_type](position_ids, x.dtype, scaling)


def wide_rotary_embedding(
    module: Any, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Olmo2RotaryEmbedding, whose cos and sin stay float32."""
    tables = module.__dict__[TABLES][None]
    if why_own_angles(module) is not None:
        return _own_angles(module, x, position_ids)
    return tables(position_ids, torch.float32, module.attention_scaling)
