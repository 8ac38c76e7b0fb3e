"""Makes the model and the text of `rlk digest` by training a small model on the Python standard library. It was run
once. The resulting files are what counts; another run gives another model and other digests.

    python tools/make_digest_model.py
"""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

from rl_kernel_native.consistency.demo_model import BOS_ID, demo_files, encode_bytes, new_model, train
from rl_kernel_native.consistency.digest import DIRECTORY, MODEL, TEXT
from rl_kernel_native.integrations.rotary import RotaryTables

SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
# Some are longer than a block of 128 keys; all are short enough for a modelled arithmetic.
LENGTHS = (1, 2, 17, 64, 129, 200, 331)
MOST_BYTES = 4_000_000


def main() -> None:
    """Writes model.safetensors and text.json."""
    files, held_out = demo_files()
    model = new_model(0, **SHAPE)
    outcome = train(model, encode_bytes(files), seed=0, seconds=600)
    print(f"{outcome.steps} steps, loss {outcome.first_loss:.2f} -> {outcome.last_loss:.2f}")
    config, rotary = model.config, model.model.rotary_emb
    cos, sin = RotaryTables(
        rotary.inv_freq.detach(), rotary.attention_scaling, config.max_position_embeddings
    ).half_width()
    weights = {
        name: tensor.bfloat16().contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    shape = {
        "num_layers": config.num_hidden_layers,
        "num_q_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "eps": config.rms_norm_eps,
    }
    DIRECTORY.mkdir(exist_ok=True)
    save_file({**weights, "rope.cos": cos, "rope.sin": sin}, MODEL, metadata={"shape": json.dumps(shape)})
    if MODEL.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{MODEL} has {MODEL.stat().st_size} bytes, more than {MOST_BYTES}")
    text = held_out.decode("ascii", errors="ignore")
    stride = len(text) // len(LENGTHS)
    pieces = [text[index * stride :][: length - 1] for index, length in enumerate(LENGTHS)]
    sequences = [[BOS_ID, *piece.encode()] for piece in pieces]
    TEXT.write_text(
        json.dumps({"source": "argparse.py of the Python standard library, by bytes", "sequences": sequences}) + "\n"
    )


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
