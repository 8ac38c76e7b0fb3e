"""Proofs that a replacement computes the same as its module. Small twins of the module are compared with float64.

A replacement is proved if its error is at most twice the error of the module itself, plus one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._torch import DTYPES, dtype_name
from . import decoder
from .families import Family
from .served import serve
from .twins import HIDDEN, Float64, Twins, duplicate, facts, undisturbed

# The relative error of rk.attention's portable exponential is 2^-18.4 (docs/numerics.md, rule 3), in the numerator and
# in the denominator of a quotient. The error is visible only in float32.
_EXPONENTIAL = 2 * 2**-18.4


class Proofs:
    """The proofs for the modules of one model; equal modules are probed once.

    Each method returns None, or the reason why there is no proof.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, enabled: bool) -> None:
        self.twins = Twins(dtype, device)
        self.enabled = enabled
        self._found: dict[Any, str | None] = {}

    def _ask(self, key: Any, question: Callable[[], str | None]) -> str | None:
        if self.twins.dtype not in DTYPES:
            return f"its hidden states have dtype {dtype_name(self.twins.dtype)}, expected float32, bfloat16 or float16"
        if not self.enabled:
            return None
        if key not in self._found:
            try:
                with undisturbed():
                    self._found[key] = question()
            except Exception as error:  # a module with altered attributes may raise any error
                self._found[key] = f"the probe failed with {type(error).__name__}: {error}"
        return self._found[key]

    def linear(self, module: Any) -> str | None:
        """Probes torch.nn.Linear, in the dtype of autocast if autocast is on."""
        kind, dtype = self.twins.device.type, module.weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        if dtype == torch.float32 and kind == "cuda":
            return "its weight has dtype float32, in which rk.linear multiplies on a CPU alone; autocast is off"

        def question() -> str | None:
            twin = self.twins.linear(module, 24, HIDDEN, dtype)
            x = self.twins.random(5, HIDDEN, dtype=dtype)
            return self._compare(twin, lambda m, c: m(c(x)), lambda m: serve(m, decoder.linear))

        return self._ask(("linear", dtype, module.bias is None), question)

    def embedding(self, module: Any, forward: Any) -> str | None:
        """Probes torch.nn.Embedding and Gemma's embedding."""

        def question() -> str | None:
            ids = torch.arange(15, -1, -1, device=self.twins.device)[None]
            return self._compare(self.twins.embedding(module), lambda m, c: m(ids), lambda m: serve(m, forward))

        return self._ask((forward, facts(module)), question)

    def norm(self, module: Any, family: Family, forward: Any, adds: bool) -> str | None:
        """Probes an RMSNorm with rows of large and small values, including rows whose result epsilon decides. If the
        norm takes a residual, it also probes with a residual."""

        def question() -> str | None:
            twin = self.twins.norm(module, family, dtype=module.weight.dtype)
            x = self.twins.random(3, 4, HIDDEN)
            x = x * torch.tensor([1.0, 1e-3, 30.0, 1e-2], device=x.device, dtype=x.dtype)[:, None]
            reason = self._compare(twin, lambda m, c: m(c(x)), lambda m: serve(m, forward, _rk_adds=adds))
            if reason is None and adds:
                residual = self.twins.random(3, 4, HIDDEN)

                def with_residual(m: Any, c: Any) -> Any:
                    if getattr(type(m), "_rk_adds", False):
                        return m.forward(c(x), residual=c(residual))
                    total = c(residual) + c(x)
                    return m(total), total

                reason = self._compare(twin, with_residual, lambda m: serve(m, forward, _rk_adds=True))
            return reason

        return self._ask((forward, facts(module), module.weight.dtype), question)

    def mlp(self, module: Any, family: Family, forward: Any) -> str | None:
        """Probes an MLP's activation and product. torch computes the projections on both sides."""

        def question() -> str | None:
            x = self.twins.random(5, HIDDEN)
            twin = self.twins.mlp(module, family)
            return self._compare(twin, lambda m, c: m(c(x)), lambda m: serve(m, forward))

        act = module.activation_fn if family.fused_mlp else module.act_fn
        return self._ask((forward, facts(module), facts(act)), question)

    def rotary(self, module: Any, forward: Any, tables: Any) -> str | None:
        """Probes cos and sin of the first positions, of the table's last positions, and of positions past the table."""

        def question() -> str | None:
            def arrange(m: Any) -> None:
                m.__dict__[decoder.TABLES] = tables
                serve(m, forward, _rk_strict=True)

            x = torch.zeros(1, dtype=self.twins.dtype, device=self.twins.device)
            for layer, table in tables.items():
                last = table.num_positions
                for positions in ([0, 1, 2, 17], [last - 1], [last, last + 77, 3 * last]):
                    ids = torch.tensor([positions], device=self.twins.device)
                    more = () if layer is None else (layer,)
                    reason = self._compare(
                        self._rotary_twin(module, tables),
                        lambda m, c, ids=ids, more=more: m(c(x), ids, *more),  # type: ignore[misc]
                        arrange,
                    )
                    if reason is not None:
                        return reason
            return None

        return self._ask((forward, facts(module)), question)

    def _rotary_twin(self, module: Any, tables: Any) -> Any:
        """A twin of a rotary embedding. If a cast of the model has rounded the module's frequencies, the twin gets
        those of the configuration."""
        twin = self.twins.bare(module)
        for name, buffer in twin._buffers.items():
            if name.endswith("inv_freq") and buffer.dtype != torch.float32:
                layer = name.removesuffix("original_inv_freq").removesuffix("inv_freq").removesuffix("_") or None
                twin._buffers[name] = tables[layer].inv_freq.to(buffer.device)
        return twin

    def rope(self, module: Any, family: Family, body: Any) -> str | None:
        """Probes the forward of an attention in which `rk.rope` rotates queries and keys and torch's attention function
        does the rest."""

        def question() -> str | None:
            config = self.twins.config(body, list(body.layers)[:1])
            twin = self.twins.attention(module, family, config)
            x = self.twins.random(2, 6, HIDDEN)
            buffers = dict(body.rotary_emb.named_buffers())
            width = next(buffer.shape[-1] for name, buffer in buffers.items() if name.endswith("inv_freq"))
            angles = self.twins.random(1, 6, width, dtype=torch.float32)
            dtype = torch.float32 if family.rope_rounding == "float32" else x.dtype
            cos, sin = (torch.cat([y, y], -1).to(dtype) for y in (angles.cos(), angles.sin()))

            def run(m: Any, c: Any) -> Any:
                return m(hidden_states=c(x), position_embeddings=(c(cos), c(sin)), attention_mask=None)[0]

            return self._compare(twin, run, lambda m: _serve_attention(m, family, {"rope"}))

        return self._ask(("rope", facts(module)), question)

    def layer(self, module: Any, family: Family) -> str | None:
        """Probes a layer whose norm adds the residual. Linear layers replace attention and MLP."""

        def question() -> str | None:
            attention = _Attends()
            attention.linear = self.twins.linear(torch.nn.Identity(), HIDDEN, HIDDEN)
            twin = self.twins.layer(module, family, attention)
            x = self.twins.random(2, 3, HIDDEN)

            def arrange(m: Any) -> None:
                serve_layer(m, family)
                for name in filter(None, family.norms or ()):
                    serve(getattr(m, name), getattr(decoder, family.norm), _rk_adds=True)

            return self._compare(twin, lambda m, c: m(c(x), attention_mask=None), arrange)

        return self._ask(("layer", facts(module)), question)

    def attention(self, body: Any, family: Family) -> str | None:
        """Probes a body (a decoder without its LM head) with one layer of each kind, in each mode: without padding,
        padded, packed, and with a cache."""

        def question() -> str | None:
            kinds = {facts(layer.self_attn): layer for layer in reversed(body.layers)}
            layers = [layer for layer in body.layers if any(layer is x for x in kinds.values())]
            twin = self.twins.body(body, family, layers, self.twins.config(body, layers))

            def arrange(m: Any) -> None:
                attentions = tuple(layer.self_attn for layer in m.layers)
                for each in attentions:
                    _serve_attention(each, family, {"attention"})
                serve_body(m, attentions, strict=True)

            for name, run in self._mask_modes().items():
                reason = self._compare(twin, run, arrange, _EXPONENTIAL)
                if reason is not None:
                    return f"{name}: {reason}"
            return None

        return self._ask(("attention", id(body)), question)

    def _mask_modes(self) -> dict[str, Any]:
        from transformers import DynamicCache

        x = self.twins.random(2, 9, HIDDEN)
        device = x.device
        short = torch.arange(9, device=device)
        real = torch.stack([short < 9, short < 6])

        def plain(m: Any, c: Any, **inputs: Any) -> Any:
            return m(inputs_embeds=c(x), use_cache=False, **inputs)[0]

        def padded(m: Any, c: Any, left: bool) -> Any:
            mask = real.flip(1) if left else real
            positions = (mask.long().cumsum(1) - 1).clamp_min(0)
            return plain(m, c, attention_mask=mask.long(), position_ids=positions)[mask]

        def packed(m: Any, c: Any) -> Any:
            positions = torch.cat([short[:4], short[:5]])[None]
            return m(inputs_embeds=c(x)[:1], position_ids=positions, use_cache=False)[0]

        def cached(m: Any, c: Any) -> Any:
            cache = DynamicCache(config=m.config)
            name = decoder.cache_name(type(m).__mro__[1] if hasattr(type(m), "_rk_base") else type(m))
            parts = [m(inputs_embeds=y, use_cache=True, **{name: cache})[0] for y in c(x).split((6, 2, 1), 1)]
            return torch.cat(parts, 1)

        return {
            "without a mask": plain,
            "padded on the left": lambda m, c: padded(m, c, True),
            "padded on the right": lambda m, c: padded(m, c, False),
            "packed": packed,
            "against a cache": cached,
        }

    def _compare(
        self, twin: Any, run: Callable[[Any, Any], Any], arrange: Callable[[Any], None], contract: float = 0.0
    ) -> str | None:
        """Compares a twin and its replacement with float64. `contract`: the error that the operator's contract allows,
        relative to the largest value."""
        own = run(duplicate(twin), lambda x: x)
        with Float64():
            exact = run(duplicate(twin, torch.float64), lambda x: x.double())
        served = duplicate(twin)
        arrange(served)
        got = run(served, lambda x: x)
        triples = zip(*(x if isinstance(x, tuple) else (x,) for x in (own, exact, got)), strict=True)
        for theirs, right, ours in triples:
            if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
                return f"it gives {ours.dtype} {list(ours.shape)}, the module {theirs.dtype} {list(theirs.shape)}"
            size = float(right.abs().max())
            error, allowed = (float((x.double() - right).abs().max()) for x in (ours, theirs))
            if not error <= 2 * allowed + (torch.finfo(theirs.dtype).eps + contract) * size:
                return f"it is off by {error:.2g} from float64, the module by {allowed:.2g}, of values up to {size:.2g}"
        return None


class _Attends(torch.nn.Module):
    """A replacement for a layer's attention."""

    linear: Any

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return self.linear(hidden_states), None


def _serve_attention(module: Any, family: Family, ops: set[str]) -> None:
    serve(module, decoder.attention_block, _rk_family=family, _rk_ops=frozenset(ops))


def serve_layer(module: Any, family: Family) -> None:
    """Replaces the forward of a layer, so that its norms add the residual."""
    serve(module, decoder.layer, _rk_norms=family.norms, _rk_dropouts=family.dropouts)


def serve_body(module: Any, attentions: tuple[Any, ...], strict: bool) -> None:
    """Replaces the forward of a decoder. The decoder's attentions are already replaced."""
    module.__dict__[decoder.ATTENTIONS] = attentions
    module.__dict__[decoder.PROVED] = module.config._attn_implementation
    serve(module, decoder.body, _rk_strict=strict)
