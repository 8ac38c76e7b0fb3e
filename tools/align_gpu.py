"""`rlk align` on a GPU, for models of random weights made on the spot: `python tools/align_gpu.py OUT [MODEL ...]`.

Needs vLLM 0.26.0 with its libraries, transformers and this package, and no network. MODEL is small (344M), wide
(8B-shaped, 2 layers) or whole (8B-shaped, 36 layers); by default small and wide. OUT gets a model, align.json and
align.html each.

Expected of every model: setting rk differs at no token from prefill and trainer, both settings of vLLM's own operators
differ, and rk generates at least 0.98 times as many tokens a second as stock. The exit status is 1 where rk differs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16},
    "wide": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 2, "num_attention_heads": 32},
    "whole": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
# 128 prompts x 64 tokens: 8192 at most.
OPTIONS = ("--prompts", "128", "--prompt-tokens", "512", "--max-tokens", "64", "--settings", "stock,canonical-blas,rk")


def make(folder: Path, shape: dict[str, int]) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    options: dict[str, Any] = {
        **shape, "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
        "tie_word_embeddings": shape["hidden_size"] == 1024,
    }  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**options)).to(torch.bfloat16)
    model.save_pretrained(folder)


def main(arguments: list[str]) -> int:
    if not arguments or set(arguments[1:]) - set(SHAPES):
        print(__doc__, file=sys.stderr)
        return 2
    status = 0
    for name in arguments[1:] or ("small", "wide"):
        out = Path(arguments[0]) / name
        if not (out / "model" / "config.json").is_file():
            subprocess.run([sys.executable, __file__, "--make", str(out / "model"), name], check=True)
        command = [sys.executable, "-c", "from rl_kernel_native.consistency.main import main; main()", "align"]
        done = subprocess.run([*command, "--model", str(out / "model"), "--report", str(out), *OPTIONS])
        status = status or done.returncode
    return status


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make(Path(sys.argv[2]), SHAPES[sys.argv[3]])
    else:
        sys.exit(main(sys.argv[1:]))
