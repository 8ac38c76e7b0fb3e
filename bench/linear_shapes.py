"""linear against cuBLAS over the shapes of Llama 3 8B and Qwen3 8B, as a table of time ratios: our time divided by
torch's, for engine="native" and for engine="auto".

    python bench/linear_shapes.py [--rows 1,64,8192] [--passes y,dx,dw,segments]

Every ratio is of medians of alternating graph replays, so that both run at the same clocks. Weights rotate among
buffers larger than the L2. The process's environment decides how torch is measured. Run again with
CUBLAS_WORKSPACE_CONFIG=:0:0 and CUBLASLT_WORKSPACE_SIZE=0 for cuBLAS without split-K, and compare with the faster of
the two.
"""

from __future__ import annotations

import argparse
import math
import os

import torch

import rl_kernel_native as rk
from rl_kernel_native.bench.measure import Call, replay_medians_us

LAYERS = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (24576, 4096),
    (4096, 14336),
    (4096, 12288),
    (128256, 4096),
    (151936, 4096),
)
ENGINES = ("native", "auto")
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ROTATED_BYTES = 400_000_000
MOST_OUTPUTS = 2_300_000_000


def calls(which: str, rows: int, layer: tuple[int, int]) -> tuple[list[Call], int]:
    """A call of rk.linear for each engine, then torch's call, and the number of buffers that these calls rotate
    over."""
    outs, ins = layer
    # At least three: with a single matrix, a part stays in L2, whatever its size.
    count = min(12, max(3, ROTATED_BYTES // (outs * ins * 2))) if which == "y" else 1

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device="cuda", dtype=torch.bfloat16)

    weights = [normal(outs, ins) for _ in range(count)]
    if which in ("y", "segments"):
        x, y = normal(rows, ins), torch.empty(rows, outs, device="cuda", dtype=torch.bfloat16)
        segments = 8 if which == "segments" else 1
        ours = [lambda i, e=engine: rk.linear(x, weights[i], k_segments=segments, engine=e) for engine in ENGINES]
        return [*ours, lambda i: torch.mm(x, weights[i].t(), out=y)], count
    dy = normal(rows, outs)
    if which == "dx":
        dx = torch.empty(rows, ins, device="cuda", dtype=torch.bfloat16)
        ours = [lambda i, e=engine: rk.linear_input_grad(dy, weights[0], engine=e) for engine in ENGINES]
        return [*ours, lambda i: torch.mm(dy, weights[0], out=dx)], 1
    x, dw = normal(rows, ins), torch.empty_like(weights[0])
    ours = [lambda i, e=engine: rk.linear_weight_grad(dy, x, out_dtype=torch.bfloat16, engine=e) for engine in ENGINES]
    return [*ours, lambda i: torch.mm(dy.t(), x, out=dw)], 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--passes", default="y,dx,dw,segments", help="dx, dw and segments are measured at 8192 rows")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    workspace = {
        name: os.environ.get(name, "default") for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {workspace}")
    print(
        "time of rk native, of rk auto / time of torch; microseconds of rk native; N x K:",
        ", ".join(f"{n} x {k}" for n, k in LAYERS),
    )
    cases = [("y", int(rows)) for rows in options.rows.split(",") if "y" in options.passes.split(",")]
    cases += [(which, 8192) for which in options.passes.split(",") if which != "y"]
    with torch.no_grad():
        for which, rows in cases:
            cells: list[str] = []
            ratios: list[list[float]] = []
            for layer in LAYERS:
                if rows * layer[0] > MOST_OUTPUTS or (which != "y" and layer[0] > 1 << 16):
                    cells.append("-")
                    continue
                candidates, buffers = calls(which, rows, layer)
                *ours, theirs = replay_medians_us(candidates, buffers, options.rounds)
                ratios.append([us / theirs for us in ours])
                cells.append(" ".join(f"{ratio:.3f}" for ratio in ratios[-1]) + f" ({ours[0]:.4g})")
                del candidates
            means = (math.exp(sum(map(math.log, column)) / len(ratios)) for column in zip(*ratios, strict=True))
            print(
                f"| {which} {rows} | " + " | ".join([*cells, " ".join(f"{mean:.3f}" for mean in means)]) + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
