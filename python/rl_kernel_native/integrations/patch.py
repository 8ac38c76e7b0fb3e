"""Swaps this library's operators into a transformers model, and out again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._shapes import dtype_name
from .._torch import DTYPES
from ..ops.attention_traced import MOST_HEAD_DIM
from . import decoder

# The oldest transformers that all tests pass with: up to 5.3 chunks against static caches give other numbers, and up to
# 5.13 models ask of a cache what that of rlk compare lacks.
MIN_TRANSFORMERS = (5, 14)

OPS = ("embedding", "linear", "rms_norm", "rope", "attention", "silu_mul")

_RECORD = "_rk_patch"
# Their frequencies change with the longest sequence of a batch, by design.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_MLPS = {"silu": decoder.silu_mul_mlp, "swish": decoder.silu_mul_mlp, "gelu_pytorch_tanh": decoder.gelu_mul_mlp}

# The parameters of the forwards that ours stand for, beside the cache's. Any other may change what is computed.
_PARAMETERS = {
    "Model": "input_ids attention_mask position_ids inputs_embeds use_cache cache_position",
    "DecoderLayer": "hidden_states attention_mask position_ids use_cache cache_position position_embeddings",
    "Attention": "hidden_states position_embeddings attention_mask cache_position",
    "MLP": "x",
    "RMSNorm": "hidden_states",
    "RotaryEmbedding": "x position_ids",
}


class _Patch:
    """What was put where, so that all of it can be taken back."""

    def __init__(self, root: torch.nn.Module, models: list[Any], chosen: frozenset[str]) -> None:
        self.root = root  # what patch_model was called with
        self.models = models  # that attention is chosen for, with all below them
        self.chosen = chosen
        self.parents: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self.forwards: list[tuple[str, torch.nn.Module, Any]] = []
        self.attributes: list[tuple[torch.nn.Module, str]] = []
        self.attention_implementations: list[str] = []
        self.counts: dict[str, int] = dict.fromkeys(OPS, 0)

    def forward(self, name: str, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        """`function` in place of the forward of `module`."""
        if "forward" in module.__dict__:
            raise ValueError(f"model: the forward of {name or 'the model'} was replaced by something else already")
        module.forward = functools.partial(function, module)  # which, unlike a method, can be pickled
        self.forwards.append((name, module, module.forward))

    def attribute(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """A value of ours on `module`."""
        module.__dict__[name] = value
        self.attributes.append((module, name))

    def undo(self) -> None:
        """Takes back what is in place; the modules are then as they were."""
        for _, module, forward in self.forwards:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]
        for module, name in self.attributes:
            module.__dict__.pop(name, None)
        for model, implementation in zip(self.models, self.attention_implementations, strict=False):  # none yet, or all
            model.set_attn_implementation(implementation)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the process that loads a model, transformers has yet to learn of this attention."""
        self.__dict__.update(state)
        if "attention" in self.chosen:
            _register_attention()

    def remember(self) -> None:
        """Which modules there are: what others put in their places later computes by torch's operators."""
        self.parents = [
            (module._modules, tuple(module._modules.values()))
            for module in self.root.modules()
            if any(_dense_op(child, self.chosen) for child in module.children())
        ]

    def require_no_others(self) -> None:
        """ValueError where a linear or an embedding came since. Asked in every forward, so cheap if none did."""
        if all(tuple(children.values()) == known for children, known in self.parents):
            return
        for name, module in self.root.named_modules():
            if _dense_op(module, self.chosen) and "forward" not in module.__dict__:
                raise ValueError(
                    f"model: expected the modules that patch_model found, got {name} since, which computes by torch; "
                    "resize_token_embeddings and adapters make new modules: call unpatch_model, and patch_model last"
                )
        self.remember()

    def wrapped_since(self) -> str | None:
        """A module whose forward something else replaced after this did."""
        return next((name for name, module, own in self.forwards if module.__dict__.get("forward") is not own), None)


def patch(model: Any, ops: Iterable[str] | None) -> dict[str, int]:
    """What rl_kernel_native.patch_model does."""
    chosen = _chosen(ops)
    _check_version()
    bodies = _bodies(model)
    for name, module in model.named_modules():
        if _RECORD in module.__dict__:
            what = f"{name}, a part of it, is patched" if name else "patched"
            raise ValueError(f"model: {what} already; call unpatch_model on {'that' if name else 'it'} first")
    _check_signatures()
    models = [model] if hasattr(model, "set_attn_implementation") else [body for _, body in bodies]
    done = _Patch(model, models, chosen)
    if "attention" in chosen and any(x.config._attn_implementation == decoder.ATTENTION_NAME for x in done.models):
        raise ValueError(
            "model: expected a configuration of its own, got one that it shares with a patched model; make the model "
            "of copy.deepcopy(config), or unpatch the other first"
        )
    try:
        for name, module in model.named_modules():
            _patch_module(done, name, module, chosen)
        _require_data(model)
        _require_dtypes(done)
        for name, body in bodies:
            _patch_body(done, name, body, chosen)
        if "attention" in chosen:
            _register_attention()
            done.attention_implementations = [x.config._attn_implementation for x in done.models]
            for each in done.models:
                each.set_attn_implementation(decoder.ATTENTION_NAME)
        done.remember()
    except BaseException:
        done.undo()
        raise
    model.__dict__[_RECORD] = done
    return {op: count for op, count in done.counts.items() if op in chosen}


def unpatch(model: Any) -> None:
    """What rl_kernel_native.unpatch_model does."""
    done: _Patch | None = getattr(model, "__dict__", {}).get(_RECORD)
    if done is None:
        modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
        inner = [name for name, module in modules if _RECORD in module.__dict__]
        hint = f", which is its {inner[0]}" if inner else ""
        raise ValueError(f"model: expected one that patch_model was called with{hint}")
    wrapped = done.wrapped_since()
    if wrapped is not None:
        raise ValueError(f"model: the forward of {wrapped} was wrapped since; undo that first")
    done.undo()
    del model.__dict__[_RECORD]


def _chosen(ops: Iterable[str] | None) -> frozenset[str]:
    if ops is None:
        return frozenset(OPS)
    if isinstance(ops, str):
        raise TypeError(f"ops: expected several names, such as ({ops!r},), got a str")
    try:
        chosen = frozenset(ops)
    except TypeError:
        raise TypeError(f"ops: expected an iterable of names, or None, got {type(ops).__name__}") from None
    for name in chosen:
        if name not in OPS:
            raise ValueError(f"ops: expected names of {', '.join(OPS)}, got {name!r}")
    return chosen


@functools.cache
def _families() -> dict[str, Any]:
    """transformers' modules of the families served, by name."""
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3 import modeling_qwen3

    return {"Llama": modeling_llama, "Qwen3": modeling_qwen3}


@functools.cache
def _classes(role: str) -> tuple[Any, ...]:
    """The class of each family that plays a role: Model, Attention, MLP, RMSNorm ..."""
    return tuple(getattr(module, family + role) for family, module in _families().items())


def _check_signatures() -> None:
    """ValueError where transformers' forwards have parameters that ours would lose without a word."""
    import transformers

    for role, known in _PARAMETERS.items():
        for kind in _classes(role):
            parameters = inspect.signature(kind.forward).parameters.values()
            given = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
            caches = [name for name in given if name in decoder.CACHE_NAMES]
            others = [name for name in given if name not in (*caches, *known.split())]
            if others or len(caches) != (role in ("Model", "DecoderLayer", "Attention")):
                raise ValueError(
                    f"model: expected {kind.__name__}.forward with parameters of {known.replace(' ', ', ')} and a "
                    f"cache as one of {decoder.CACHE_NAMES}, got {', '.join(given)} in transformers "
                    f"{transformers.__version__}, which this version of rl_kernel_native does not know"
                )


def _check_version() -> None:
    """ImportError for a transformers that is older than what is known, some of which give numbers without meaning."""
    import transformers

    wanted = ".".join(map(str, MIN_TRANSFORMERS))
    got = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if got < MIN_TRANSFORMERS:
        raise ImportError(
            f"transformers: expected version {wanted} or newer, found {transformers.__version__}; "
            f"pip install 'transformers>={wanted}'",
            name="transformers",
        )


def _require_data(model: Any) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"model: expected parameters and buffers with data, got {name} on the meta device; load the weights "
                "first (from_pretrained does, or to_empty, init_weights and load_state_dict), then call patch_model"
            )


def _require_dtypes(patch: _Patch) -> None:
    for name, module, _ in patch.forwards:
        for of, parameter in module.named_parameters(recurse=False):
            if parameter.dtype not in DTYPES:
                raise ValueError(
                    f"model: {name}.{of} has dtype {dtype_name(parameter.dtype)}, expected float32, bfloat16 or float16"
                )


def _bodies(model: Any) -> list[tuple[str, Any]]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    bodies = [(name, module) for name, module in model.named_modules() if isinstance(module, _classes("Model"))]
    if not bodies:
        raise TypeError(f"model: expected one of transformers' {' or '.join(_families())} family, got {type(model)}")
    return bodies


def _dense_op(module: Any, chosen: frozenset[str]) -> str | None:
    """The operator that serves a module of torch itself.

    Subclasses (quantised ones) compute something else; FSDP's keep the class's name and forward.
    """
    forward = type(module).forward
    if "linear" in chosen and forward is torch.nn.Linear.forward:
        return "linear"
    return "embedding" if "embedding" in chosen and forward is torch.nn.Embedding.forward else None


def _patch_module(patch: _Patch, name: str, module: Any, chosen: frozenset[str]) -> None:
    dense = _dense_op(module, chosen)
    if dense == "linear":
        patch.forward(name, module, decoder.linear)
        patch.counts["linear"] += 1
    elif dense == "embedding":
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise ValueError(f"model: {name} has {option}={getattr(module, option)}, which embedding does not do")
        patch.forward(name, module, decoder.embedding)
        patch.counts["embedding"] += 1
    elif "rms_norm" in chosen and isinstance(module, _classes("RMSNorm")):
        patch.forward(name, module, decoder.rms_norm)
        patch.counts["rms_norm"] += 1
    elif "rms_norm" in chosen and isinstance(module, _classes("DecoderLayer")):
        patch.forward(name, module, decoder.layer)
    elif "rope" in chosen and isinstance(module, _classes("Attention")):
        patch.forward(name, module, decoder.rope_attention)
        patch.counts["rope"] += 1
    elif "silu_mul" in chosen and isinstance(module, _classes("MLP")):
        activation = module.config.hidden_act
        if activation not in _MLPS:
            raise ValueError(f"model: {name} has hidden_act {activation!r}, expected {', '.join(_MLPS)}")
        patch.forward(name, module, _MLPS[activation])
        patch.counts["silu_mul"] += 1
    if "attention" in chosen and isinstance(module, _classes("Attention")):
        if module.attention_dropout:
            raise ValueError(f"model: {name} has attention_dropout {module.attention_dropout}, expected 0")
        if module.head_dim % 8 != 0 or module.head_dim > MOST_HEAD_DIM:
            raise ValueError(
                f"model: {name} has head_dim {module.head_dim}, expected a multiple of 8, at most {MOST_HEAD_DIM}"
            )
        patch.counts["attention"] += 1


def _patch_body(patch: _Patch, name: str, body: Any, chosen: frozenset[str]) -> None:
    if "attention" in chosen:
        patch.forward(name, body, decoder.body)
        patch.attribute(body, decoder.BODY_RECORD, patch)
    if "rope" in chosen:
        rotary = body.rotary_emb
        if rotary.rope_type not in _ROPE_TYPES:
            raise ValueError(f"model: rope type {rotary.rope_type!r}, expected {', '.join(_ROPE_TYPES)}")
        tables = decoder.RotaryTables(*_frequencies(rotary), body.config.max_position_embeddings)
        patch.attribute(rotary, "_rk_tables", tables)
        patch.forward(f"{name}.rotary_emb", rotary, decoder.rotary_embedding)


def _frequencies(rotary: Any) -> tuple[torch.Tensor, float]:
    """(inv_freq float32, scaling) as the configuration gives them, on the CPU.

    Not the module's buffer: a device computes it with its own power function, and `model.to(torch.bfloat16)` rounds it.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    own: Any = rotary.compute_default_rope_parameters
    inv_freq, scaling = (own if rotary.rope_type == "default" else ROPE_INIT_FUNCTIONS[rotary.rope_type])(rotary.config)
    buffer = rotary.inv_freq.detach().cpu()
    if not torch.allclose(buffer.float(), inv_freq, rtol=4 * torch.finfo(buffer.dtype).eps, atol=0):
        raise ValueError("model: inv_freq of the rotary embedding is not that of the configuration")
    return inv_freq, float(scaling)


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(decoder.ATTENTION_NAME, decoder.attention)
    AttentionMaskInterface.register(decoder.ATTENTION_NAME, decoder.no_mask)
