"""Compares a stock transformers model with the same model on this library's operators, in one process. Both models
share their weights. Calls are timed in turn. A token counts as different if the bytes of its logits differ.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import rl_kernel_native as rk

from ..integrations.decoder import cache_name
from .measure import device_text, measure
from .report import write_json

_SMALL = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
_PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}


def _shape(hidden: int, inner: int, layers: int, heads: tuple[int, int], width: int, vocab: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": width,
    }  # fmt: skip


# By family: (name of a published model, its shape, further settings of its configuration). A suffix after a hyphen
# means another shape of the same family.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen3": ("Qwen3 1.7B", _shape(2048, 6144, 28, (16, 8), 128, 151936), {"tie_word_embeddings": True}),
    "Qwen3-8B": ("Qwen3 8B", _shape(4096, 12288, 36, (32, 8), 128, 151936), {"tie_word_embeddings": False}),
    "Qwen2": ("Qwen2.5 1.5B", _shape(1536, 8960, 28, (12, 2), 128, 151936), {"tie_word_embeddings": True}),
    "Llama": ("Llama 3.2 1B", _shape(2048, 8192, 16, (32, 8), 64, 128256), {"tie_word_embeddings": True}),
    "Mistral": ("Mistral 7B", _shape(4096, 14336, 32, (32, 8), 128, 32000), {"sliding_window": None}),
    "Gemma2": ("Gemma 2 2B", _shape(2304, 9216, 26, (8, 4), 256, 256000), {"attn_implementation": "eager"}),
    "Gemma3": ("Gemma 3 1B", _shape(1152, 6912, 26, (4, 1), 256, 262144), {"sliding_window": 512}),
    "Phi3": ("Phi-3 mini", _shape(3072, 8192, 32, (32, 32), 96, 32064), {"pad_token_id": 0}),
    "Olmo2": ("OLMo 2 1B", _shape(2048, 8192, 16, (16, 16), 128, 100352), {}),
    "Glm4": ("GLM-4 9B", _shape(4096, 13696, 40, (32, 2), 128, 151552), {"pad_token_id": 0, **_PARTIAL}),
}
PASSES = ("prefill", "training step", "training step without head and loss", "decode step")
LAYOUTS = ("batch", "chunks", "decode", "padding", "packing")


def make(family: str, *, small: bool, layers: int | None, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns a model of the family with random weights. The model has the published shape, or a small shape if
    ``small``. If ``layers`` is given, it replaces the shape's number of layers."""
    import transformers

    _, shape, options = FAMILIES[family]
    shape = {**(_SMALL if small else shape), **options}
    if layers is not None:
        shape["num_hidden_layers"] = layers
    family = family.partition("-")[0]
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")(
        **shape, max_position_embeddings=8192
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return getattr(transformers, f"{family}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(before)


def twin_of(model: Any) -> Any:
    """Returns a copy of the model that shares its parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


class Served:
    """One of the two compared models, with the functions that measure it."""

    def __init__(self, model: Any, ids: torch.Tensor, context: torch.Tensor) -> None:
        self.model, self.ids, self.context = model, ids, context
        self.cache_name = cache_name(type(model))

    @torch.no_grad()
    def logits(self, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        found: torch.Tensor = self.model(input_ids=ids, **{"use_cache": False, **inputs}).logits
        return found

    def prefill(self) -> Callable[[int], object]:
        return lambda _: self.logits(self.ids)

    def training_step(self) -> Callable[[int], object]:
        def step(_: int) -> object:
            self.model.zero_grad(set_to_none=True)
            loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
            loss.backward()
            return loss.detach()

        return step

    def training_step_without_head_and_loss(self) -> Callable[[int], object]:
        """Returns a step of forward and backward through the decoder alone. LM head and loss are left out: they need
        the same memory in both models, and it is a large part of the total."""
        gradient: list[torch.Tensor] = []

        def step(_: int) -> object:
            self.model.zero_grad(set_to_none=True)
            hidden = self.model.base_model(input_ids=self.ids, use_cache=False)[0]
            if not gradient:
                gradient.append(torch.full_like(hidden, 1 / 64))
            hidden.backward(gradient[0])
            return hidden.detach()

        return step

    def decode_step(self) -> Callable[[int], object]:
        """Returns a step that computes one more token for each row of the context. Every call starts from the same
        cache."""
        with torch.no_grad():
            filled = getattr(self.model(input_ids=self.context, use_cache=True, logits_to_keep=1), self.cache_name)
        token = self.context[:, :1]

        def step(_: int) -> object:
            cache = copy.copy(filled)
            cache.layers = [copy.copy(layer) for layer in filled.layers]
            return self.logits(token, use_cache=True, **{self.cache_name: cache})

        return step

    def peak_mib(self, step: Callable[[int], object]) -> float | None:
        """Returns the peak memory of the device in MiB while a step runs, including the weights, or None on a CPU."""
        self.model.zero_grad(set_to_none=True)
        device = self.ids.device
        if device.type != "cuda":
            return None
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        step(0)
        torch.cuda.synchronize(device)
        self.model.zero_grad(set_to_none=True)
        return torch.cuda.max_memory_allocated(device) / 2**20

    def layouts(self) -> Iterator[tuple[str, int, int]]:
        """Yields (layout, number of tokens that differ, number of tokens) for each layout. A token differs if its
        logits differ from the logits of a call with its sequence alone."""
        import transformers

        batch, length = self.ids.shape
        device = self.ids.device
        alone = torch.cat([self.logits(row[None]) for row in self.ids])
        yield ("batch", _differing(self.logits(self.ids), alone), batch * length)

        def through_cache(ids: torch.Tensor, parts: Iterable[int]) -> torch.Tensor:
            cache = transformers.DynamicCache(config=self.model.config)
            more = {self.cache_name: cache, "use_cache": True}
            return torch.cat([self.logits(part, **more) for part in ids.split(list(parts), 1)], 1)

        quarter = max(1, length // 4)
        parts = [quarter] * (length // quarter) + [length % quarter] * (length % quarter > 0)
        yield ("chunks", _differing(through_cache(self.ids, parts), alone), batch * length)
        few = min(16, length - 1)
        decoded = through_cache(self.ids, [length - few] + [1] * few)[:, -few:]
        yield ("decode", _differing(decoded, alone[:, -few:]), batch * few)
        del decoded

        padding = torch.arange(batch, device=device) * 3 + 1
        columns = torch.arange(length + int(3 * batch), device=device)
        mask = (columns >= padding[:, None]) & (columns < (padding + length)[:, None])
        tokens = torch.zeros(mask.shape, dtype=self.ids.dtype, device=device)
        tokens[mask] = self.ids.flatten()
        positions = (columns - padding[:, None]).clamp(0, length - 1)
        padded = self.logits(tokens, attention_mask=mask.long(), position_ids=positions)
        yield ("padding", _differing(padded[mask].view(alone.shape), alone), batch * length)
        del padded

        positions = torch.arange(length, device=device).repeat(batch)[None]
        packed = self.logits(self.ids.reshape(1, -1), position_ids=positions)
        yield ("packing", _differing(packed.view(alone.shape), alone), batch * length)


def _differing(logits: torch.Tensor, alone: torch.Tensor) -> int:
    words = torch.int32 if alone.dtype == torch.float32 else torch.int16
    return sum(  # rows are compared one by one, because a comparison needs as much memory as its logits
        int((a.contiguous().view(words) != b.contiguous().view(words)).any(-1).sum())
        for a, b in zip(logits, alone, strict=True)
    )


def run(
    family: str,
    *,
    small: bool,
    layers: int | None,
    shape: tuple[int, int],
    context: tuple[int, int],
    dtype_name: str,
    device_name: str,
    seconds: float,
    ops: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Measures one family, and returns the numbers of its table.

    Args:
        small: use a model of two narrow layers instead of the published shape.
        layers: the number of layers; None: the number in the chosen shape.
        shape: (number of sequences, tokens per sequence) for prefill, training step and layouts.
        context: (number of sequences, tokens per sequence) in the cache before the decoded token.
        seconds: time for which each pass of each model is measured.
        ops: the argument ``ops`` of :func:`rl_kernel_native.patch_model`.
    """
    import transformers

    device = torch.device(device_name)
    stock = make(family, small=small, layers=layers, dtype=getattr(torch, dtype_name), device=device)
    patched = twin_of(stock)
    found = rk.patch_model(patched, ops)
    vocab = stock.config.vocab_size
    generator = torch.Generator("cpu").manual_seed(1)
    ids, before = (torch.randint(0, vocab, x, generator=generator).to(device) for x in (shape, context))
    pair = [Served(model, ids, before) for model in (stock, patched)]
    rows: list[dict[str, Any]] = []
    for name in PASSES:
        make_step = name.replace(" ", "_")
        peaks = [model.peak_mib(getattr(model, make_step)()) for model in pair]  # so only one cache exists at a time
        steps = [getattr(model, make_step)() for model in pair]
        times = measure(steps, device, seconds)
        of = f"{context[0]} after {context[1]}" if name == "decode step" else f"{shape[0]} x {shape[1]}"
        rows.append(_row(f"{name}, {of}, ms", *(timing.median_ms for timing in times)))
        if None not in peaks:
            rows.append(_row(f"{name}, peak memory, MiB", *peaks))
        del steps
        stock.zero_grad(set_to_none=True)
    layouts = [list(model.layouts()) for model in pair]
    for (name, theirs, tokens), (_, ours, _) in zip(*layouts, strict=True):
        rows.append({"what": f"tokens that differ: {name}", "stock": theirs, "rk": ours, "of": tokens})
    return {
        "family": family,
        "model": "small" if small else FAMILIES[family][0],
        "layers": stock.config.num_hidden_layers,
        "hidden_size": stock.config.hidden_size,
        "parameters": sum(parameter.numel() for parameter in stock.parameters()),
        "dtype": dtype_name,
        "device": device_text(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "served": dict(found),
        "unproved": found.unproved,
        "versions": {
            "rl_kernel_native": rk.__version__, "variant": rk.variant, "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
        "results": rows,
    }  # fmt: skip


def _row(what: str, stock: Any, ours: Any) -> dict[str, Any]:
    return {"what": what, "stock": stock, "rk": ours, "ratio": ours / stock}


def print_tables(runs: Iterable[dict[str, Any]]) -> None:
    """Prints one Markdown table per family, as in docs/models.md."""
    for found in runs:
        versions = found["versions"]
        print(
            f"\n{found['model']} ({found['family']}), {found['layers']} layers of {found['hidden_size']}, "
            f"{found['parameters'] / 1e6:.4g} million parameters, {found['dtype']}; {found['device']}, torch "
            f"{versions['torch']}, transformers {versions['transformers']}\n"
        )
        print("| | stock | rk | rk / stock |\n|---|---|---|---|")
        for row in found["results"]:
            cells = [f"{row[name]} of {row['of']}" if "of" in row else f"{row[name]:.4g}" for name in ("stock", "rk")]
            print(f"| {row['what']} | {' | '.join(cells)} | {'' if 'of' in row else format(row['ratio'], '.2f')} |")
        if found["unproved"]:
            name, reason = next(iter(found["unproved"].items()))
            count = len(found["unproved"])
            modules = "1 module," if count == 1 else f"{count} modules, such as"
            print(f"\ntorch serves {modules} {name}: {reason}")


def main(options: Any, device: str) -> int:
    """Runs the command ``model`` with its options."""
    small = device == "cpu" if options.size is None else options.size == "small"
    rows, tokens = options.rows or (2 if small else 4), options.tokens or (32 if small else 1024)
    runs = []
    for family in options.family or ["Qwen3"]:
        runs.append(
            run(
                family, small=small, layers=options.layers, shape=(rows, tokens),
                context=(options.decode_rows or (2 if small else 32), tokens), dtype_name=options.dtype,
                device_name=device, seconds=options.seconds, ops=options.ops,
            )
        )  # fmt: skip
        print_tables(runs[-1:])
        gc.collect()
    if options.json:
        write_json({"operator": "model", "command": options.command, "runs": runs}, Path(options.json))
    return 0
