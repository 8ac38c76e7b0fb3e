"""Shared by the tests of the chain: decoders of one or more layers, and every way to lay out a sequence in forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

import rl_kernel_native as rk
from rl_kernel_native.consistency.divergence import compare_traces, first_divergent
from rl_kernel_native.consistency.probes import ProbePlan, Recorder, Trace, attached

# Shapes of published models. On a CPU, the smaller "qwen3" and "llama" replace them. The smaller models have the same
# head_dim and ratio of query heads to key heads, and their vocabulary ends in a partial leaf.
_LARGE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_SMALL = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 2003}
_QWEN3 = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
_LLAMA = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-8b": ("Qwen3", {**_LARGE, **_QWEN3, "intermediate_size": 12288, "vocab_size": 151936}),
    "llama-3-8b": ("Llama", {**_LARGE, **_LLAMA, "intermediate_size": 14336, "vocab_size": 128256}),
    "qwen3": ("Qwen3", {**_SMALL, **_QWEN3, "intermediate_size": 1536}),
    "llama": ("Llama", {**_SMALL, **_LLAMA, "intermediate_size": 1792}),
}
BATCHES = (1, 2, 7, 32, 129)
CHUNKS = (1, 17, 256)


def make_model(name: str, *, layers: int = 1, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    """A decoder with its own head and random weights, in evaluation mode, not patched."""
    import transformers

    family, shape = SHAPES[name]
    config = getattr(transformers, f"{family}Config")(
        **shape, num_hidden_layers=layers, max_position_embeddings=1024, tie_word_embeddings=False
    )
    torch.manual_seed(1)
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = getattr(transformers, f"{family}ForCausalLM")(config)
        finally:
            torch.set_default_dtype(default)
    # transformers initialises norms to one; other values show whether the weights take part.
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    return model.eval()


def sequence(model: Any, length: int, seed: int) -> torch.Tensor:
    """Token ids int64 [length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (length,), generator=generator).to(model.device)


def neighbours(model: Any, count: int, longest: int, seed: int) -> list[torch.Tensor]:
    """Other sequences, of 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [sequence(model, length, seed + 1 + i) for i, length in enumerate(lengths)]


def places_in(batch: int) -> list[int]:
    """First, middle and last place in a batch."""
    return sorted({0, batch // 2, batch - 1})


def padded(
    rows: Sequence[torch.Tensor], left: Sequence[int], width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, mask, position ids), int64 [rows, width]; row i begins at column left[i]."""
    device = rows[0].device
    ids = torch.full((len(rows), width), 7, device=device)
    mask, positions = torch.zeros_like(ids), torch.zeros_like(ids)
    for i, (row, begin) in enumerate(zip(rows, left, strict=True)):
        ids[i, begin : begin + len(row)] = row
        mask[i, begin : begin + len(row)] = 1
        positions[i, begin : begin + len(row)] = torch.arange(len(row), device=device)
    return ids, mask, positions


class Run:
    """Results of every operator for one sequence, recorded while the forwards of a layout run."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self.model, self.ids = model, ids
        self.recorder = Recorder(ProbePlan({0: len(ids)}))

    @torch.no_grad()
    def forward(self, row: int, column: int, first: int, count: int, **inputs: Any) -> None:
        """One forward in which tokens [first, first + count) of the sequence are in row `row` from `column` on."""
        key_column = inputs.pop("key_column", column)
        tokens = [(row, column + p, key_column + p, 0, first + p) for p in range(count)]
        self.recorder.begin(tokens, self.ids.device)
        with attached(self.model, self.recorder):
            logits = self.model(**inputs).logits[row, column : column + count]
        positions = list(range(first, first + count))
        self.recorder.add_tokens("lm_head", "lm_head", [0] * count, positions, logits)
        scored = min(count, len(self.ids) - 1 - first)
        if scored > 0:
            logprob = rk.logprob(logits[:scored], self.ids[first + 1 : first + 1 + scored])
            self.recorder.add_tokens("logprob", "logprob", [0] * scored, positions[:scored], logprob)

    @property
    def trace(self) -> Trace:
        return self.recorder.trace


def alone(model: Any, ids: torch.Tensor) -> Trace:
    """The sequence in a separate forward."""
    run = Run(model, ids)
    run.forward(0, 0, 0, len(ids), input_ids=ids[None], use_cache=False)
    return run.trace


def in_padded_batch(model: Any, ids: torch.Tensor, others: list[torch.Tensor], place: int, side: str) -> Trace:
    """Row `place` of a batch padded on the left, on the right, or (as trainers of responses do) on both sides."""
    rows = [*others[:place], ids, *others[place:]]
    slack = {"left": 0, "right": 0, "both": 3}[side]
    width = max(map(len, rows)) + 2 * slack
    left = [width - len(row) if side == "left" else slack for row in rows]
    tokens, mask, positions = padded(rows, left, width)
    run = Run(model, ids)
    run.forward(
        place, left[place], 0, len(ids),
        input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False,
    )  # fmt: skip
    return run.trace


def packed(model: Any, ids: torch.Tensor, others: list[torch.Tensor], place: int, *, named: bool) -> Trace:
    """The sequence among others in one row. With `named`, cu_seq_lens gives their begins, otherwise positions do."""
    rows = [*others[:place], ids, *others[place:]]
    lengths = torch.tensor([0, *map(len, rows)])
    cu_seqlens = lengths.cumsum(0).int().to(ids.device)
    positions = torch.cat([torch.arange(len(row), device=ids.device) for row in rows])[None]
    extra = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens} if named else {}
    run = Run(model, ids)
    run.forward(
        0, int(cu_seqlens[place]), 0, len(ids),
        input_ids=torch.cat(rows)[None], position_ids=positions, use_cache=False, **extra,
    )  # fmt: skip
    return run.trace


def in_chunks(model: Any, ids: torch.Tensor, chunk: int) -> Trace:
    """Chunk by chunk with transformers' cache; chunk 1 is decoding."""
    import transformers

    cache = transformers.DynamicCache(config=model.config)
    run = Run(model, ids)
    for first in range(0, len(ids), chunk):
        part = ids[first : first + chunk]
        run.forward(
            0, 0, first, len(part), key_column=first, input_ids=part[None], past_key_values=cache, use_cache=True
        )
    return run.trace


def in_chunks_of_a_batch(model: Any, ids: torch.Tensor, others: list[torch.Tensor], place: int, chunk: int) -> Trace:
    """Row `place` of a batch padded on the left, chunk by chunk against a cache, as `generate` does it."""
    import transformers

    rows = [*others[:place], ids, *others[place:]]
    width = max(map(len, rows))
    tokens, mask, positions = padded(rows, [width - len(row) for row in rows], width)
    cache = transformers.DynamicCache(config=model.config)
    run = Run(model, ids)
    begin = width - len(ids)
    for first in range(0, width, chunk):
        end = min(first + chunk, width)
        skipped = min(max(begin - first, 0), end - first)
        run.forward(
            place, skipped, first + skipped - begin, end - first - skipped, key_column=first + skipped,
            input_ids=tokens[:, first:end], attention_mask=mask[:, :end], position_ids=positions[:, first:end],
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
    return run.trace


def difference(want: Trace, got: Trace, length: int) -> str:
    """Names the first operator whose bytes differ; empty if all bytes agree."""
    assert list(want.kinds) == list(got.kinds)
    drifts = compare_traces(want, got, [length])
    assert all(drift.tokens == length - (drift.name == "logprob") for drift in drifts)
    first = first_divergent(drifts)
    if first is None:
        return ""
    return (
        f"{first.name} differs first, at position {first.first_position}, for {first.differing_tokens} of "
        f"{first.tokens} tokens, by at most {first.max_abs:.3g}"
    )


def layouts(model: Any, ids: torch.Tensor, batches: Sequence[int], longest: int) -> Iterator[tuple[str, Trace]]:
    """Every layout of the sequence, by name, with the results of its operators."""
    for batch in batches:
        others = neighbours(model, batch - 1, longest, 100 + batch)
        for place in places_in(batch):
            for side in ("left", "right", "both"):
                yield f"batch {batch}, row {place}, padded {side}", in_padded_batch(model, ids, others, place, side)
            for named in (True, False):
                how = "cu_seq_lens" if named else "positions"
                yield f"{batch} packed by {how}, place {place}", packed(model, ids, others, place, named=named)
    for chunk in (*(c for c in CHUNKS if c < len(ids)), len(ids)):
        yield f"chunks of {chunk}", in_chunks(model, ids, chunk)
    others = neighbours(model, 4, longest, 5)
    # Decoding takes one forward per token, so a long sequence is not decoded.
    for chunk in (c for c in CHUNKS if c < len(ids) and (c > 1 or len(ids) < 100)):
        yield f"batch 5, row 2, chunks of {chunk}", in_chunks_of_a_batch(model, ids, others, 2, chunk)
