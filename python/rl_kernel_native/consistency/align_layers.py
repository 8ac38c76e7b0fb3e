"""Finds the first operator whose results differ, for `rlk align`, in its own process: `python -m
rl_kernel_native.consistency.align_layers FILE`.

FILE holds a scored rollout (align_trainer.py) and gets ``first_divergent``. Engine and transformers model compute one
sequence, and hooks keep the result of each module. The engine runs eagerly here, because compiled code calls no hooks.
The engine's operators may therefore differ from those of the compiled rollout.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from . import align_turns as turns

# Modules of a decoder layer under vLLM's names, in the order of a forward, each with its operator.
IN_LAYER = {
    "input_layernorm": "rms_norm",
    "self_attn.qkv_proj": "linear",
    "self_attn.q_norm": "rms_norm",
    "self_attn.k_norm": "rms_norm",
    "self_attn.attn": "rope or attention",
    "self_attn.o_proj": "linear",
    "post_attention_layernorm": "rms_norm",
    "mlp.gate_up_proj": "linear",
    "mlp.act_fn": "silu_mul",
    "mlp.down_proj": "linear",
}
# Merged modules of vLLM. The results of the named transformers modules, side by side, equal the result of the merged
# module.
MERGED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
# vLLM's modules that are plain functions in transformers. The result of such a function is the input of the named
# transformers module.
BEFORE = {"self_attn.attn": "self_attn.o_proj", "mlp.act_fn": "mlp.down_proj"}
HEAD = "head or log-probability"  # the answer if no module differs; compiled code may also be the cause

Kept = dict[str, list[Any]]


def places(layers: int) -> list[tuple[str, int | None, str]]:
    """Module, layer and operator, in the order of a forward."""
    inside = [(f"layers.{n}.{name}", n, operator) for n in range(layers) for name, operator in IN_LAYER.items()]
    return [("embed_tokens", None, "embedding"), *inside, ("norm", None, "rms_norm")]


def first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def keep(kept: Kept, name: str, value: Any) -> None:
    """Keeps a copy as ``[tokens, columns]``, because later code may overwrite the value in place."""
    tensor = first(value)
    columns = tensor.shape[-1] * (tensor.shape[-2] if name.endswith(("q_norm", "k_norm")) else 1)
    kept.setdefault(name, []).append(tensor.detach().clone().reshape(-1, columns).cpu())


def watch(model: Any, kept: Kept, results: dict[str, str], inputs: dict[str, str]) -> list[Any]:
    """Keeps outputs of the modules in ``results`` and inputs of the modules in ``inputs``. The dictionaries map a
    module's own name to the name under which the value is kept. Returns the hooks, which the caller removes."""
    hooks = []
    for own, module in model.named_modules():
        if own in results:
            hooks.append(module.register_forward_hook(lambda m, given, made, n=results[own]: keep(kept, n, made)))
        if own in inputs:
            hooks.append(module.register_forward_pre_hook(lambda m, given, n=inputs[own]: keep(kept, n, given)))
    return hooks


def of_engine(request: dict[str, Any], ids: list[int], names: list[str], on_gpu: bool) -> Kept:
    from vllm import SamplingParams

    from . import align_rollout

    kept: Kept = {}
    engine = align_rollout.make_engine(request | {"pages_for": 0}, on_gpu, enforce_eager=True)
    engine.apply_model(lambda model: watch(model, kept, {f"model.{name}": name for name in names}, {}) and None)
    engine.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    return kept


def of_trainer(request: dict[str, Any], ids: list[int], names: list[str], on_gpu: bool) -> Kept:
    import torch
    from transformers import AutoModelForCausalLM

    import rl_kernel_native as rk

    model: Any = AutoModelForCausalLM.from_pretrained(request["model"], dtype=getattr(torch, request["dtype"]))
    model = model.to("cuda" if on_gpu else "cpu").eval()
    if request["served"]:
        rk.patch_model(model, strict=True)
    kept: Kept = {}
    results: dict[str, str] = {}
    inputs: dict[str, str] = {}
    merged: dict[str, list[str]] = {}
    for name in names:
        layer, inside = split(name)
        if inside in MERGED:
            merged[name] = [f"{layer}.{part}" for part in MERGED[inside]]
            results |= {f"model.{part}": part for part in merged[name]}
        elif inside in BEFORE:
            inputs[f"model.{layer}.{BEFORE[inside]}"] = name
        else:
            results[f"model.{name}"] = name
    hooks = watch(model, kept, results, inputs)
    with torch.no_grad():
        model(torch.tensor([ids], device=model.device))
    for hook in hooks:
        hook.remove()
    for name, parts in merged.items():
        if all(part in kept for part in parts):
            kept[name] = [torch.cat([kept[part][0] for part in parts], 1)]
    return kept


def split(name: str) -> tuple[str, str]:
    """("layers.3", "mlp.down_proj") for "layers.3.mlp.down_proj"; ("", name) for a module outside the layers."""
    found = re.fullmatch(r"(layers\.\d+)\.(.+)", name)
    return (found[1], found[2]) if found else ("", name)


def first_divergent(layers: int, engine: Kept, trainer: Kept, tokens: int) -> dict[str, Any]:
    """The first divergent operator with its layer, module and number of differing tokens, and the number of modules
    that both sides have."""
    import torch

    both = [place for place in places(layers) if place[0] in engine and place[0] in trainer]
    for name, layer, operator in both:
        ours, theirs = torch.cat(engine[name])[:tokens], torch.cat(trainer[name])[:tokens]
        differing = int((ours.view(torch.uint8) != theirs.view(torch.uint8)).any(1).sum())
        if differing:
            apart = float((ours.double() - theirs.double()).abs().max())
            return {
                "operator": operator, "layer": layer, "module": name, "tokens": differing, "max_abs": apart,
                "modules": len(both),
            }  # fmt: skip
    return {
        "operator": HEAD, "layer": None, "module": "lm_head", "tokens": 0, "max_abs": 0.0, "modules": len(both),
    }  # fmt: skip


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    from ..integrations import vllm as plugin

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        from ..integrations.vllm import cpu

        cpu.install()
    plugin.plugin()
    furthest = max(
        request["sequences"], key=lambda s: max(abs(a - b) for a, b in zip(s["rollout"], s["trainer"], strict=True))
    )
    ids = furthest["prompt"] + furthest["tokens"]
    layers = json.loads((Path(request["model"]) / "config.json").read_text())["num_hidden_layers"]
    names = [name for name, *_ in places(layers)]
    engine = of_engine(request, ids, names, on_gpu)
    return {"first_divergent": first_divergent(layers, engine, of_trainer(request, ids, names, on_gpu), len(ids))}


if __name__ == "__main__":
    turns.serve(answer, measures=False)
