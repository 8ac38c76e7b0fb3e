"""A digest that compares machines, from a laptop to a GPU: the sha256 of the log-probabilities that a machine computes
for a fixed model and text.

The model, its tables of cos and sin, and its text are in the package, so every machine has the same operands. Other
libraries only lay out tensors and compute a bfloat16 sum. `digests.json` holds the digest of each arithmetic. On a CPU,
`rk.arithmetic("sm_90")` reproduces a Hopper GPU, so a CPU can compute the digest that the GPU must give.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rl_kernel_native as rk

from .._types import Exp
from .environment import arithmetic_of, computing_as

DIRECTORY = Path(__file__).parent / "digest"
MODEL, TEXT, DIGESTS = (DIRECTORY / name for name in ("model.safetensors", "text.json", "digests.json"))
# Layouts of the sequences in a forward. Log-probabilities must not depend on the layout.
LAYOUTS = ("packed", "one by one", "chunks of 17")


@dataclass(frozen=True)
class DigestModel:
    """A decoder of Qwen3's shape: RMSNorm before attention and MLP, norms of queries and keys, SwiGLU, tied head.

    Attributes:
        shape: num_layers, num_q_heads, num_kv_heads, head_dim, eps.
        weights: bfloat16 weights under transformers' names, and rope.cos and rope.sin, float32 [positions, head_dim /
            2].
        exp: mode of the exponential in attention and log-probabilities. The CPU models the hardware's exponential
            only for sm_90.
    """

    shape: dict[str, Any]
    weights: dict[str, torch.Tensor]
    exp: Exp

    def logits(self, ids: torch.Tensor, start: int, cache: list[Any], cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        """Logits [tokens, vocab_size] of int64 ids [tokens].

        Args:
            start: position of the first token, if the tokens are one sequence whose earlier keys and values are in
                `cache`.
            cache: (keys, values) of each layer, extended in place; empty at the first call.
            cu_seqlens: int32 [num_sequences + 1], offsets of packed sequences that begin at position 0 without a cache;
                or None.
        """
        shape, weights = self.shape, self.weights
        num_tokens, device = ids.shape[0], ids.device
        positions = torch.arange(num_tokens, device=device) + start
        if cu_seqlens is not None:
            begins = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
            positions = positions - begins

        def normed(x: torch.Tensor, name: str, residual: torch.Tensor | None = None) -> Any:
            weight = weights[f"{name}.weight"]
            return rk.rms_norm(x, weight, shape["eps"], residual=residual, round_before_weight=True)

        def projected(x: torch.Tensor, name: str, head_dim: int = 0) -> torch.Tensor:
            y: torch.Tensor = rk.linear(x, weights[f"{name}.weight"])
            return y.view(num_tokens, -1, head_dim) if head_dim else y

        hidden = rk.embedding(ids, weights["model.embed_tokens.weight"])
        for index in range(shape["num_layers"]):
            layer = f"model.layers.{index}"
            x = normed(hidden, f"{layer}.input_layernorm")
            attention = f"{layer}.self_attn"
            q, k, v = (projected(x, f"{attention}.{name}_proj", shape["head_dim"]) for name in "qkv")
            q, k = rk.rope(
                normed(q, f"{attention}.q_norm"), normed(k, f"{attention}.k_norm"),
                weights["rope.cos"], weights["rope.sin"], position_ids=positions, intermediate="input",
            )  # fmt: skip
            if cu_seqlens is not None:
                attended = rk.attention(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, exp=self.exp)
            else:
                if index < len(cache):
                    k, v = (torch.cat([old, new]) for old, new in zip(cache[index], (k, v), strict=True))
                cache[index : index + 1] = [(k, v)]
                attended = rk.attention(q[None], k[None], v[None], exp=self.exp)[0]
            attended = projected(attended.flatten(1), f"{attention}.o_proj")
            x, hidden = normed(attended, f"{layer}.post_attention_layernorm", hidden)
            gate, up = projected(x, f"{layer}.mlp.gate_proj"), projected(x, f"{layer}.mlp.up_proj")
            hidden = hidden + projected(rk.silu_mul(gate, up, round_before_mul=True), f"{layer}.mlp.down_proj")
        result: torch.Tensor = rk.linear(normed(hidden, "model.norm"), weights["model.embed_tokens.weight"])
        return result


@dataclass(frozen=True)
class Digest:
    """The digest that a machine computed, and the repository's digest for its arithmetic.

    Attributes:
        arithmetic: "sm_90", "sm_80", "gfx942", "gfx90a" or "ieee".
        sha256: sha256 of the little-endian float32 log-probabilities of all sequences, in order.
        expected: the recorded digest, or None.
        layouts: for each layout of the sequences, whether it gave the bytes of `sha256`.
        mean_logprob: nats per token; the value shows that the model has learnt something.
    """

    arithmetic: str
    device: str
    tokens: int
    sha256: str
    expected: str | None
    layouts: dict[str, bool]
    mean_logprob: float

    @property
    def agrees(self) -> bool:
        """Whether every layout gives the recorded digest."""
        return self.sha256 == self.expected and all(self.layouts.values())


def load_digest_model(device: torch.device, exp: Exp) -> DigestModel:
    """The model of the package, on `device`."""
    from safetensors import safe_open

    with safe_open(str(MODEL), framework="pt", device=str(device)) as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        return DigestModel(json.loads(file.metadata()["shape"]), weights, exp)


def digest_sequences() -> list[list[int]]:
    """The token ids of the package's text, by sequence."""
    sequences: list[list[int]] = json.loads(TEXT.read_text(encoding="utf-8"))["sequences"]
    return sequences


@torch.no_grad()
def score(model: DigestModel, sequences: list[list[int]], device: torch.device, layout: str) -> list[torch.Tensor]:
    """For each sequence, log-probabilities float32 [length - 1] of its tokens from the second on."""
    if layout == "packed":
        flat = torch.tensor([token for ids in sequences for token in ids], device=device)
        lengths = torch.tensor([0, *map(len, sequences)])
        rows = model.logits(flat, 0, [], lengths.cumsum(0).int().to(device)).split([len(ids) for ids in sequences])
    else:
        rows = tuple(_one_by_one(model, ids, device, layout) for ids in sequences)
    return [
        rk.logprob(logits[:-1], torch.tensor(ids[1:], dtype=torch.long, device=device), exp=model.exp).cpu()
        for logits, ids in zip(rows, sequences, strict=True)
    ]


def _one_by_one(model: DigestModel, ids: list[int], device: torch.device, layout: str) -> torch.Tensor:
    step = 17 if layout == "chunks of 17" else len(ids)
    cache: list[Any] = []
    tokens = torch.tensor(ids, device=device)
    return torch.cat([model.logits(tokens[at : at + step], at, cache, None) for at in range(0, len(ids), step)])


def compute_digest(device: torch.device, arithmetic: str | None = None) -> Digest:
    """Scores the text in every layout.

    Args:
        arithmetic: the CPU's arithmetic, as for `rk.arithmetic`; None: the current arithmetic. A GPU has its own
            arithmetic.

    Raises:
        BadInput: an arithmetic other than the GPU's.
    """
    sequences = digest_sequences()
    with computing_as(arithmetic, device):
        used = arithmetic_of(device)
        model = load_digest_model(device, "hardware" if used == "sm_90" else "portable")
        found = {layout: _bytes(score(model, sequences, device, layout)) for layout in LAYOUTS}
    scored = found[LAYOUTS[0]]
    sha256 = hashlib.sha256(scored).hexdigest()
    expected = json.loads(DIGESTS.read_text(encoding="utf-8")) if DIGESTS.is_file() else {}
    values = torch.frombuffer(bytearray(scored), dtype=torch.float32)
    return Digest(
        arithmetic=used,
        device=str(device),
        tokens=len(values),
        sha256=sha256,
        expected=expected.get(used),
        layouts={layout: part == scored for layout, part in found.items()},
        mean_logprob=float(values.double().mean()),
    )


def _bytes(logprobs: list[torch.Tensor]) -> bytes:
    return torch.cat(logprobs).numpy().astype("<f4").tobytes()
