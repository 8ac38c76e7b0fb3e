"""Twins: small modules that compute like the modules of a model. A twin has the same class, configuration and
attributes as its module, but its own weights and no hooks. Making a twin does not touch the model's weights or torch's
random state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from .families import Family, known, plain_type

HIDDEN, INNER, WINDOW = 64, 96, 5
_OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__) | {"forward"}


class Float64(TorchFunctionMode):
    """Makes a module compute in float64, even where it asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*(wide(x) for x in args), **{name: wide(x) for name, x in (kwargs or {}).items()})


@contextmanager
def undisturbed() -> Iterator[None]:
    """Turns off autograd, autocast and global module hooks."""
    hooks = [
        getattr(torch_module, name)
        for name in dir(torch_module)
        if name.startswith("_global_") and name.endswith("hooks") and isinstance(getattr(torch_module, name), dict)
    ]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)


def attributes(module: Any) -> dict[str, Any]:
    """The attributes that a module's forward may read, except tensors and modules."""
    return {name: value for name, value in module.__dict__.items() if name not in _OF_EVERY_MODULE}


# Attributes that do not change what a forward computes: the module's place in the model, and what transformers' kernels
# add.
_ASIDE = ("layer_idx", "_hidden_kernels")


def facts(module: Any) -> tuple[Any, ...]:
    """The class and attributes of a module, except its place in the model. Modules with equal facts compute the
    same."""
    plain = (bool, int, float, str, type(None))
    values = sorted(attributes(module).items())
    return (
        plain_type(module),
        *((name, x if isinstance(x, plain) else id(x)) for name, x in values if name not in _ASIDE),
    )


class Twins:
    """Makes twins of one model's modules.

    Args:
        dtype, device: dtype and device of the hidden states.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._generator = torch.Generator("cpu").manual_seed(20)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal numbers."""
        wide = torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        return wide.to(self.device, dtype or self.dtype)

    def _dtype_of(self, module: Any) -> torch.dtype:
        weight = getattr(module, "weight", None)
        served = isinstance(weight, torch.Tensor) and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        return weight.dtype if served else self.dtype  # type: ignore[union-attr]

    def bare(self, module: Any, **changes: Any) -> Any:
        """A new module with the class, attributes and buffers of `module`, but without parameters, children and
        hooks."""
        kind = plain_type(module)
        twin = kind.__new__(kind)
        torch.nn.Module.__init__(twin)
        twin.__dict__.update(attributes(module))
        twin.__dict__["training"] = False
        twin.__dict__.update({name: value for name, value in changes.items() if name in twin.__dict__})
        for name, buffer in module._buffers.items():
            twin.register_buffer(name, None if buffer is None else buffer.detach().clone())
        return twin

    def linear(self, module: Any, out_features: int, in_features: int, dtype: torch.dtype | None = None) -> Any:
        """A linear layer of the given sizes, which replaces `module` of any class and dtype."""
        dtype = dtype or self.dtype
        twin = torch.nn.Linear.__new__(torch.nn.Linear)
        torch.nn.Module.__init__(twin)
        twin.in_features, twin.out_features, twin.training = in_features, out_features, False
        twin.weight = torch.nn.Parameter(self.random(out_features, in_features, dtype=dtype) * in_features**-0.5)
        with_bias = type(module) is torch.nn.Linear and module.bias is not None
        twin.register_parameter(
            "bias", torch.nn.Parameter(self.random(out_features, dtype=dtype)) if with_bias else None
        )
        return twin

    def embedding(self, module: Any) -> Any:
        """An embedding with 16 rows."""
        twin = self.bare(module, num_embeddings=16, embedding_dim=HIDDEN)
        twin.weight = torch.nn.Parameter(self.random(16, HIDDEN, dtype=self._dtype_of(module)))
        if twin.padding_idx is not None:
            twin.padding_idx = min(twin.padding_idx, 15)
        return twin

    def norm(self, module: Any, family: Family, width: int = HIDDEN, dtype: torch.dtype | None = None) -> Any:
        """A norm of `width`. If `module` is no norm of the family, the twin has the family's class."""
        found, dtype = known(module), dtype or self.dtype
        if found is None or found[1] != "RMSNorm":
            module = family.type("RMSNorm")(1)  # its initialisation draws no random numbers
        twin = self.bare(module)
        around = 0.0 if family.norm == "offset_rms_norm" else 1.0
        twin.weight = torch.nn.Parameter(around + 0.2 * self.random(width, dtype=dtype))
        return twin

    def mlp(self, module: Any, family: Family) -> Any:
        """An MLP with small projections."""
        twin = self.bare(module)
        for name, child in module._modules.items():
            if name == "down_proj":
                twin.add_module(name, self.linear(child, HIDDEN, INNER))
            elif name in ("gate_proj", "up_proj", "gate_up_proj"):
                twin.add_module(name, self.linear(child, 2 * INNER if family.fused_mlp else INNER, HIDDEN))
            else:
                twin.add_module(name, self._without_weights(child))
        return twin

    def attention(self, module: Any, family: Family, config: Any, layer_idx: int = 0) -> Any:
        """An attention with the heads of the original and a small hidden state."""
        width = module.head_dim
        queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
        outs = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "qkv_proj": queries + 2 * keys}
        norms = {"q_norm": queries, "k_norm": keys} if family.qk_norm == "row" else {"q_norm": width, "k_norm": width}
        twin = self.bare(module, config=config, layer_idx=layer_idx)
        if twin.__dict__.get("sliding_window") is not None:
            twin.sliding_window = WINDOW
        for name, child in module._modules.items():
            if name == "o_proj":
                twin.add_module(name, self.linear(child, HIDDEN, queries))
            elif name in outs:
                twin.add_module(name, self.linear(child, outs[name], HIDDEN))
            elif name in norms:
                twin.add_module(name, self.norm(child, family, norms[name]))
            else:
                twin.add_module(name, self._without_weights(child))
        return twin

    def layer(self, module: Any, family: Family, attention: Any) -> Any:
        """A layer with the given attention, and a linear layer as its MLP."""
        twin = self.bare(module)
        for name, child in module._modules.items():
            if name == "self_attn":
                twin.add_module(name, attention)
            elif name == "mlp":
                twin.add_module(name, self.linear(torch.nn.Identity(), HIDDEN, HIDDEN))
            elif name.endswith("layernorm"):
                twin.add_module(name, self.norm(child, family))
            else:
                twin.add_module(name, self._without_weights(child))
        return twin

    def config(self, body: Any, layers: list[Any]) -> Any:
        """The configuration of a body (a decoder without its LM head) with these layers, torch's attention and short
        windows."""
        config = copy.deepcopy(body.config)
        eager = config._attn_implementation == "eager" or not getattr(body, "_supports_sdpa", False)
        config._attn_implementation = "eager" if eager else "sdpa"
        config.num_hidden_layers = len(layers)
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = [
                body.config.layer_types[i] for i, layer in enumerate(body.layers) if any(layer is x for x in layers)
            ]
        if getattr(config, "sliding_window", None) is not None:
            config.sliding_window = WINDOW
        return config

    def body(self, module: Any, family: Family, layers: list[Any], config: Any) -> Any:
        """A decoder of a few layers."""
        twin = self.bare(module, config=config)
        for name, child in module._modules.items():
            if name == "layers":
                made = [
                    self.layer(layer, family, self.attention(layer.self_attn, family, config, i))
                    for i, layer in enumerate(layers)
                ]
                twin.add_module(name, torch.nn.ModuleList(made))
            elif name == "norm":
                twin.add_module(name, self.norm(child, family))
            elif name == "rotary_emb":
                twin.add_module(name, self.bare(child))
            else:
                twin.add_module(name, torch.nn.Identity())
        return twin

    def _without_weights(self, module: Any) -> Any:
        """A twin of a module without weights, such as an activation or a dropout."""
        if any(True for _ in module.parameters()):
            raise TypeError(f"a {type(module).__name__} with weights stands where none is known")
        twin = self.bare(module)
        for name, child in module._modules.items():
            twin.add_module(name, self._without_weights(child))
        return twin


def duplicate(twin: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy of a twin with its own tensors, in `dtype` if given. Attributes are shared."""
    kind: Any = type(twin)
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    made.__dict__.update(attributes(twin))
    made.__dict__["training"] = False

    def cast(x: torch.Tensor | None) -> Any:
        return x if x is None else (x.detach().to(dtype) if dtype and x.is_floating_point() else x.detach().clone())

    for name, parameter in twin._parameters.items():
        made.register_parameter(name, None if parameter is None else torch.nn.Parameter(cast(parameter)))
    for name, buffer in twin._buffers.items():
        made.register_buffer(name, cast(buffer))
    for name, child in twin._modules.items():
        made.add_module(name, duplicate(child, dtype))
    return made
