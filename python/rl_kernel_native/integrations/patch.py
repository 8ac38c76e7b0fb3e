"""Puts this library's operators into a transformers model, and removes them again.

A module is replaced only if its class is exactly a known class, its functions are unchanged from their file, and a
probe shows that the replacement computes the same. Torch computes all other modules, and the patch reports the reason
for each of them.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _check
from .._torch import DTYPES, dtype_name
from ..ops.attention_traced import MOST_HEAD_DIM
from . import decoder, unchanged
from .families import FAMILIES, ROLE_OPS, Family, known, plain_type, resembles, servable
from .probe import Proofs, serve_body, serve_layer
from .rotary import make_tables
from .served import is_served, note, observed, serve, taken_over, why_kept, withdraw

# The oldest transformers with which all tests pass. Up to 5.3, chunked prefill with a static cache gives other numbers.
# Up to 5.13, models call a cache method that the cache of rlk compare does not have.
MIN_TRANSFORMERS = (5, 14)

OPS = ("embedding", "linear", "rms_norm", "rope", "attention", "silu_mul")

_RECORD = "_rk_patch"
_logger = logging.getLogger("rl_kernel_native")


class Patched(dict[str, int]):
    """The number of modules that each operator computes.

    Attributes:
        unproved: the modules that torch computes, each with the reason. Empty if this library computes every operator
            of the model.
    """

    unproved: dict[str, str]

    def __init__(self, counts: dict[str, int], unproved: dict[str, str]) -> None:
        super().__init__(counts)
        self.unproved = unproved

    def __reduce__(self) -> Any:
        return (Patched, (dict(self), self.unproved))


@dataclass
class _Record:
    """The record of a patch, stored on the model. The record holds no module, so that it keeps no module alive."""

    chosen: frozenset[str]
    unproved: dict[str, str]


@dataclass
class _Plan:
    """The changes of a patch, collected before the first change is made, and the modules that will stay unpatched."""

    unproved: dict[str, str] = field(default_factory=dict)
    steps: list[Callable[[], None]] = field(default_factory=list)

    def stays(self, name: str, op: str, reason: str) -> None:
        """Records that torch keeps computing an operator of a module."""
        said = self.unproved.get(name)
        self.unproved[name] = f"{op}: {reason}" if said is None else f"{said}; {op}: {reason}"

    def serve(self, name: str, op: str, reason: str | None, module: Any, forward: Any, **facts: Any) -> None:
        """Plans to replace a module if `reason` is None, else records the reason."""
        if reason is not None:
            self.stays(name, op, reason)
        else:
            self.steps.append(lambda: serve(module, forward, _rk_counts=(op,), **facts))


def patch(model: Any, ops: Iterable[str] | None, strict: bool, probe: bool) -> Patched:
    """The implementation of rl_kernel_native.patch_model."""
    chosen = _chosen(ops)
    _check.flag("strict", strict)
    _check.flag("probe", probe)
    _check_version()
    bodies = _bodies(model)
    for name, module in model.named_modules():
        if _RECORD in module.__dict__ or is_served(module):
            what = f"{name}, a part of it, is patched" if name else "patched"
            raise ValueError(f"model: {what} already; call unpatch_model on {'that' if name else 'it'} first")
    _require_data(model)
    with torch.device("cpu"):  # overrides a default device that the caller has set
        plan = _planned(model, bodies, chosen, strict, probe)
    try:
        for step in plan.steps:
            step()
        for body_name, _ in bodies:
            _watch(model, body_name, chosen, strict)
    except BaseException:
        _take_back(model)
        raise
    model.__dict__[_RECORD] = _Record(chosen, plan.unproved)
    found = status(model)
    counts = ", ".join(f"{op} {count}" for op, count in found.items())
    _logger.info("patch_model: modules of %s that each operator serves: %s", type(model).__name__, counts)
    if found.unproved:
        words = [f"{name or 'the model'} ({reason})" for name, reason in found.unproved.items()]
        modules = "1 module" if len(words) == 1 else f"{len(words)} modules"
        shown = "; ".join(words[:4]) + (f"; and {len(words) - 4} more" if len(words) > 4 else "")
        if strict:
            unpatch(model)
            raise ValueError(f"model: strict=True, without proof that this serves {modules}: {shown}")
        _logger.warning("patch_model: torch serves %s, so the model's bits are not this library's: %s", modules, shown)
    return found


def status(model: Any) -> Patched:
    """The implementation of rl_kernel_native.status."""
    record = _record(model)
    counts = {op: 0 for op in OPS if op in record.chosen}
    unproved = dict(record.unproved)

    def stays(name: str, words: str) -> None:
        unproved[name] = f"{unproved[name]}; {words}" if name in unproved else words

    for name, module in model.named_modules():
        ops = getattr(type(module), "_rk_counts", ())
        reason = taken_over(module) if is_served(module) else None
        if reason:
            stays(name, f"all: {reason}")
            ops = ()
        if "silu_mul" in ops:
            act = getattr(module, "activation_fn", None) or module.act_fn
            if type(act) not in decoder.ACTIVATIONS or observed(act):
                stays(name, "silu_mul: its activation is not one that is served, or a hook looks at it")
                ops = ()
        for op in ops:
            counts[op] += 1
        if not is_served(module) and name not in unproved and _is_of_an_operator(module, record.chosen):
            stays(name, f"all: its class was set to {plain_type(module).__name__} after the patch")
        if decoder.TABLES in module.__dict__:
            reason = decoder.why_own_angles(module)
            if reason:
                stays(name, f"rope: {reason}")
        attentions = module.__dict__.get(decoder.ATTENTIONS)
        reason = attentions and decoder.why_own_attention(module, {})
        if reason:
            counts["attention"] -= sum("attention" in getattr(type(x), "_rk_counts", ()) for x in attentions)
            stays(name, f"attention: {reason}")
    return Patched(counts, unproved)


def _is_of_an_operator(module: Any, chosen: frozenset[str]) -> bool:
    """Whether an unreplaced module belongs to a kind that patch_model replaces or reports for the chosen operators."""
    if plain_type(module) in (torch.nn.Linear, torch.nn.Embedding):
        return servable(module, chosen)
    _, role = known(module) or resembles(module) or (None, "")
    return role not in ("Model", "DecoderLayer") and not chosen.isdisjoint(ROLE_OPS.get(role, ()))


def unpatch(model: Any) -> None:
    """The implementation of rl_kernel_native.unpatch_model."""
    _record(model)
    for name, module in model.named_modules():
        reason = why_kept(module) if is_served(module) else None
        if reason is not None:
            raise ValueError(f"model: {reason.format(name)}")
    _take_back(model)
    del model.__dict__[_RECORD]


def chosen_ops(model: Any) -> frozenset[str] | None:
    """The chosen operators of a patched model, or of the patched model that `model` contains; None if nothing is
    patched."""
    holder = _holder(model)
    return None if holder is None else holder.__dict__[_RECORD].chosen


def is_proved(model: Any) -> bool:
    """Whether a patched model, or the patched model that `model` contains, runs only this library's operators."""
    return not status(_holder(model)).unproved


def _holder(model: Any) -> Any:
    return next((module for module in model.modules() if _RECORD in module.__dict__), None)


def _take_back(model: Any) -> None:
    for module in model.modules():
        if is_served(module):
            withdraw(module)
        for name in (decoder.KNOWN, decoder.ATTENTIONS, decoder.PROVED, decoder.TABLES, "_rk_said"):
            module.__dict__.pop(name, None)
        if module.__dict__.get("create_masks_for_generate") is decoder.masks_for_generate:
            del module.__dict__["create_masks_for_generate"]
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is decoder.require_no_others:
                del module._forward_pre_hooks[key]


def _record(model: Any) -> _Record:
    record: _Record | None = getattr(model, "__dict__", {}).get(_RECORD)
    if record is None:
        modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
        inner = [name for name, module in modules if _RECORD in module.__dict__]
        hint = f", which is its {inner[0]}" if inner else "; call rk.patch_model(model) first"
        raise ValueError(f"model: expected one that patch_model was called with{hint}")
    return record


def _chosen(ops: Iterable[str] | None) -> frozenset[str]:
    if ops is None:
        return frozenset(OPS)
    if isinstance(ops, str):
        raise TypeError(f"ops: expected several names, such as ({_check.shown(ops)},), got a str")
    try:
        chosen = frozenset(ops)
    except TypeError:
        raise TypeError(f"ops: expected an iterable of names, or None, got {type(ops).__name__}") from None
    for name in chosen:
        if name not in OPS:
            raise ValueError(f"ops: expected names of {', '.join(OPS)}, got {_check.shown(name)}")
    return chosen


def _check_version() -> None:
    """Raises an ImportError for a transformers older than MIN_TRANSFORMERS, because some older versions give wrong
    numbers."""
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


def _bodies(model: Any) -> list[tuple[str, Any]]:
    """The decoders in a model: modules whose class is a family's decoder class, or is derived from such a class."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    bodies = [(n, m) for n, m in model.named_modules() if "Model" in ((known(m) or resembles(m) or ("", ""))[1],)]
    if not bodies:
        names = ", ".join(family.prefix for family in FAMILIES)
        raise TypeError(f"model: expected one of transformers' families {names}, got {type(model)}")
    return bodies


def _planned(model: Any, bodies: list[tuple[str, Any]], chosen: frozenset[str], strict: bool, probe: bool) -> _Plan:
    plan = _Plan()
    weight = next((p for p in bodies[0][1].parameters() if p.is_floating_point()), torch.zeros(1))
    proofs = Proofs(weight.dtype, weight.device, probe)
    attentions: dict[int, set[str]] = {}  # operators with a proof, by the id() of an attention
    for name, body in bodies:
        _plan_body(plan, name, body, chosen, proofs, attentions, strict)
    for name, module in model.named_modules():
        found = known(module)
        if found is None:
            _plan_stranger(plan, name, module, chosen, proofs)
        elif found[1] == "Attention":
            ops = attentions.get(id(module), set())
            if ops:
                facts = {"_rk_family": found[0], "_rk_ops": frozenset(ops), "_rk_counts": tuple(sorted(ops))}
                plan.steps.append(lambda m=module, f=facts: serve(m, decoder.attention_block, **f))  # type: ignore[misc]
            elif id(module) not in attentions:
                for op in sorted(chosen.intersection(ROLE_OPS["Attention"])):
                    plan.stays(name, op, "it is not the attention of a decoder that is known")
        elif not chosen.isdisjoint(ROLE_OPS[found[1]]):
            _plan_module(plan, name, module, *found, proofs, strict)
    return plan


def _plan_stranger(plan: _Plan, name: str, module: Any, chosen: frozenset[str], proofs: Proofs) -> None:
    """Plans a module of torch, or of an unknown class."""
    kind = plain_type(module)
    if kind is torch.nn.Linear and "linear" in chosen:
        reason = unchanged.why_module_changed(module) or _why_weights(module)
        if not isinstance(torch.nn.functional.linear, types.BuiltinFunctionType):
            reason = "torch.nn.functional.linear was replaced"
        plan.serve(name, "linear", reason or proofs.linear(module), module, decoder.linear)
    elif kind is torch.nn.Embedding and "embedding" in chosen:
        reason = unchanged.why_module_changed(module) or _why_embedding(module)
        reason = reason or proofs.embedding(module, decoder.embedding)
        plan.serve(name, "embedding", reason, module, decoder.embedding)
    elif kind not in (torch.nn.Linear, torch.nn.Embedding):
        like = resembles(module)
        if like is not None and not chosen.isdisjoint(ROLE_OPS[like[1]]):
            for op in sorted(chosen.intersection(ROLE_OPS[like[1]])):
                plan.stays(name, op, f"its class {kind.__name__} is derived from one that is known")
        elif isinstance(module, torch.nn.Linear) and "linear" in chosen:
            plan.stays(name, "linear", f"its class is {kind.__name__}")
        elif isinstance(module, torch.nn.Embedding) and "embedding" in chosen:
            plan.stays(name, "embedding", f"its class is {kind.__name__}")
        elif chosen == frozenset(OPS) and like is None and any(True for _ in module.parameters(recurse=False)):
            plan.stays(name, "all", f"nothing serves a {kind.__name__}")


def _plan_module(plan: _Plan, name: str, module: Any, family: Family, role: str, proofs: Proofs, strict: bool) -> None:
    """Plans a module of a family's class, except decoders and attentions."""
    reason = unchanged.why_module_changed(module, role) or _why_weights(module)
    if role == "RMSNorm":
        forward, adds = getattr(decoder, family.norm), family.norm != "wide_rms_norm"
        reason = reason or proofs.norm(module, family, forward, adds)
        plan.serve(name, "rms_norm", reason, module, forward, _rk_adds=adds)
    elif role == "MLP":
        forward = decoder.fused_gated_mlp if family.fused_mlp else decoder.gated_mlp
        act = getattr(module, "activation_fn" if family.fused_mlp else "act_fn")
        if type(act) not in decoder.ACTIVATIONS:
            reason = reason or f"its activation is a {type(act).__name__}, which no operator computes"
        reason = reason or unchanged.why_module_changed(act) or proofs.mlp(module, family, forward)
        plan.serve(name, "silu_mul", reason, module, forward)
    elif role == "TextScaledWordEmbedding":
        reason = reason or _why_embedding(module) or proofs.embedding(module, decoder.scaled_embedding)
        plan.serve(name, "embedding", reason, module, decoder.scaled_embedding)
    elif role == "RotaryEmbedding":
        _plan_rotary(plan, name, module, family, reason, proofs, strict)
    elif role == "DecoderLayer":
        if reason is None and family.norms is not None:
            reason = proofs.layer(module, family)
            if reason is None:
                plan.steps.append(lambda: serve_layer(module, family))
        if reason is not None:
            plan.stays(name, "rms_norm", reason)


def _plan_rotary(
    plan: _Plan, name: str, module: Any, family: Family, reason: str | None, proofs: Proofs, strict: bool
) -> None:
    wide = family.rope_rounding == "float32"
    forward = decoder.wide_rotary_embedding if wide else decoder.rotary_embedding
    if reason is None:
        try:
            tables = make_tables(module)
        except ValueError as error:
            reason = str(error)
        else:
            reason = proofs.rotary(module, forward, tables)
    if reason is not None:
        plan.stays(name, "rope", reason)
        return

    def place() -> None:
        module.__dict__[decoder.TABLES] = tables
        serve(module, forward, _rk_strict=strict)

    plan.steps.append(place)


def _plan_body(
    plan: _Plan,
    name: str,
    body: Any,
    chosen: frozenset[str],
    proofs: Proofs,
    attentions: dict[int, set[str]],
    strict: bool,
) -> None:
    """Plans a decoder and its attentions. `rk.attention` computes either all attentions of the decoder, which then
    needs no mask, or none of them."""
    found = known(body)
    reason: str | None
    layers = [(n, m) for n, m in body.named_modules(prefix=name) if (known(m) or ("", ""))[1] == "Attention"]
    if found is None:
        return  # a class derived from a known class; other code reports it
    family = found[0]
    for at, module in layers:
        attentions[id(module)] = set()
        reason = unchanged.why_module_changed(module, "Attention")
        for op in sorted(chosen.intersection(ROLE_OPS["Attention"])):
            if reason is not None:
                plan.stays(at, op, reason)
        if "rope" in chosen and reason is None:
            why = proofs.rope(module, family, body)
            if why is None:
                attentions[id(module)].add("rope")
            else:
                plan.stays(at, "rope", why)
    if "attention" not in chosen:
        return
    reason = _why_no_attention(body, family) or proofs.attention(body, family)
    if reason is None:
        for _, module in layers:
            attentions[id(module)].add("attention")
        found_attentions = tuple(module for _, module in layers)
        plan.steps.append(lambda: serve_body(body, found_attentions, strict))
        return
    for at, _ in layers:
        if f"{reason}" not in plan.unproved.get(at, ""):
            plan.stays(at, "attention", reason)


def _why_no_attention(body: Any, family: Family) -> str | None:
    """The reason against `rk.attention` in a decoder that can be found without a computation, or None."""
    reason = unchanged.why_module_changed(body, "Model")
    kinds = {"DecoderLayer": body.layers, "Attention": [getattr(layer, "self_attn", None) for layer in body.layers]}
    for role, modules in kinds.items():
        for module in modules:
            if reason is None and (module is None or known(module) != (family, role)):
                reason = f"an attention or a layer of its decoder is a {type(module).__name__}, which is not known"
            reason = reason or unchanged.why_module_changed(module, role)
    if reason is not None:
        return reason
    attentions = tuple(layer.self_attn for layer in body.layers)
    config = body.config
    if not getattr(config, "is_causal", True) or not all(each.is_causal for each in attentions):
        return "is_causal is False"
    if getattr(config, "use_bidirectional_attention", False):
        return "use_bidirectional_attention is set"
    for each in attentions:
        if each.head_dim % 8 != 0 or each.head_dim > MOST_HEAD_DIM:
            return f"head_dim is {each.head_dim}, expected a multiple of 8, at most {MOST_HEAD_DIM}"
        if each.config is not config:
            return "its configuration is not that of its decoder"
        reason = decoder.why_no_softcap(each, family)
        if reason is not None:
            return reason
    if not attentions:
        return "its decoder has no layers"
    return decoder.why_other_windows(body, family) or unchanged.why_attention_changed(attentions[0], family)


def _why_weights(module: Any) -> str | None:
    """The reason why an operator cannot read a module's own parameters."""
    for name, tensor in module.named_parameters(recurse=False):
        kind = type(tensor)
        sharded = kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.")
        if kind not in (torch.nn.Parameter, torch.Tensor) and not sharded:
            return f"its {name} is a {kind.__name__}"
        if tensor.dtype not in DTYPES:
            return f"its {name} has dtype {dtype_name(tensor.dtype)}, expected float32, bfloat16 or float16"
        if not sharded and tensor.dim() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return f"its {name} has stride {tensor.stride(-1)} in its last dimension, expected 1"
    return None


def _why_embedding(module: Any) -> str | None:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            return f"it has {option}={getattr(module, option)}, which embedding does not do"
    return _why_weights(module)


def _watch(model: Any, body_name: str, chosen: frozenset[str], strict: bool) -> None:
    """Adds hooks to a decoder and to each module that contains it. The hooks look for added modules before each
    forward."""
    parts = body_name.split(".") if body_name else []
    for depth in range(len(parts), -1, -1):  # from the decoder outwards; outer modules skip its modules
        name = ".".join(parts[:depth])
        module = model.get_submodule(name)
        if decoder.KNOWN in module.__dict__:
            continue
        for base in decoder.remember(module, name, chosen, strict):
            note(base)
        module.register_forward_pre_hook(decoder.require_no_others)
        served = depth < len(parts) or decoder.ATTENTIONS in module.__dict__
        own = "create_masks_for_generate" in vars(type(module))
        if served and hasattr(module, "prepare_inputs_for_generation") and not own:
            body = model.get_submodule(body_name)
            if decoder.ATTENTIONS in body.__dict__:
                module.__dict__["create_masks_for_generate"] = decoder.masks_for_generate
