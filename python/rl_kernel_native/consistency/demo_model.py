"""The demo's model: a byte-level tokenizer, text from the standard library, and a few hundred training steps."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import BadInput
from .progress import Advance

BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
# Deliberately no multiple of a tile's width, because real vocabularies also end in a partial tile.
VOCAB_SIZE = 259
MAX_STEPS = 300
_CONTEXT = 512
_ROWS, _COLUMNS = 8, 128
_LEARNING_RATE = 2e-3
_WARMUP_STEPS = 20
_HELD_OUT = "argparse.py"


@dataclass(frozen=True)
class TrainOutcome:
    """The number of steps done, and the loss (nats per byte) of the first step and of the last ten steps."""

    steps: int
    first_loss: float
    last_loss: float


def demo_files() -> tuple[list[bytes], bytes]:
    """The contents of the standard library's top-level *.py files in the order of their names, and the one file that is
    held out for prompts."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
    contents = {path.name: path.read_bytes() for path in paths}
    held_out = contents.pop(_HELD_OUT, b"")
    training = [content for content in contents.values() if len(content) > _COLUMNS]
    if len(held_out) < 10_000 or sum(map(len, training)) < 1_000_000:
        raise BadInput("this Python has no readable standard library (*.py); the demo has nothing to train on")
    return training, held_out


def encode_bytes(files: Sequence[bytes]) -> torch.Tensor:
    """int64 [bytes]: the files one after the other, each followed by eos."""
    parts = [np.append(np.frombuffer(content, dtype=np.uint8).astype(np.int64), EOS_ID) for content in files]
    return torch.from_numpy(np.concatenate(parts))


def demo_tokenizer() -> Any:
    """A Hugging Face tokenizer whose ids 0..255 are bytes; it puts bos first."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", model_max_length=_CONTEXT
    )


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


_SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def new_model(seed: int, **shape: int) -> Any:
    """A Qwen3-shaped model: 4 layers, width 256, 8 query heads on 2 KV heads, q and k norms, tied head; float32.

    `shape` may give other sizes, under the names of Qwen3Config.
    """
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        **{**_SHAPE, **shape},
    )
    causal_lm: Any = transformers.Qwen3ForCausalLM
    return causal_lm(config)


def train(
    model: Any, data: torch.Tensor, *, seed: int, seconds: float, advance: Advance = lambda n: None
) -> TrainOutcome:
    """Trains on the next byte for MAX_STEPS steps, or for `seconds` if that time ends earlier.

    Args:
        model: from new_model, float32, on any device; ends in evaluation mode.
        data: int64 [bytes], on the CPU.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    losses: list[float] = []
    started = time.perf_counter()
    model.train()
    for step in range(MAX_STEPS):
        elapsed = time.perf_counter() - started
        if elapsed > seconds:
            break
        # Progress by time or by steps, whichever is larger, so that the learning rate ends near zero on slow machines
        # too.
        done = max(step / MAX_STEPS, elapsed / seconds)
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / _WARMUP_STEPS) * (1.0 - 0.9 * done)
        starts = torch.randint(len(data) - _COLUMNS, (_ROWS,), generator=generator)
        window = torch.stack([data[start : start + _COLUMNS] for start in starts.tolist()])
        ids = torch.cat([torch.full((_ROWS, 1), BOS_ID), window], dim=1).to(device)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss: Any = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        advance(1)
    model.eval()
    tail = losses[-10:]
    return TrainOutcome(len(losses), losses[0], sum(tail) / len(tail))
