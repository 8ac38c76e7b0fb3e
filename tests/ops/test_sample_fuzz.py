"""Random calls of sample, compared with the float64 reference, which sorts: kept sets, log-probabilities and drawn ids.

RLK_SAMPLE_FUZZ_CASES (2,000) sets how many. A failure names its case. This command runs one case:
`PYTHONPATH=tests/support python tests/ops/test_sample_fuzz.py CASE`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from rl_kernel_native.reference.sample_draw import draw_reference

CASES = int(os.environ.get("RLK_SAMPLE_FUZZ_CASES", "2000"))
BLOCKS = 4  # several tests, so that one failure does not stop the other tests
MARGIN = 1e-4  # relative: 2.9e-6 of the exponential in up to six nodes, and float32 sums of these, with some reserve


def case(number: int) -> tuple[torch.Tensor, dict[str, Any]]:
    rng = np.random.default_rng([36, number])
    rows, vocab = int(rng.integers(1, 5)), int(rng.choice([1, 7, 130, 1000, 2500, 9000]))
    scale = float(rng.choice([0.5, 1.0, 4.0, 10.0]))
    x = torch.from_numpy((rng.standard_normal((rows, vocab)) * scale).astype(np.float32))
    if rng.random() < 0.2:
        x = torch.round(x)  # gives many equal logits
    x = x.to([torch.float32, torch.bfloat16, torch.float16][int(rng.integers(3))])

    def rows_of(choices: list[float], dtype: Any) -> Any:
        found = rng.choice(choices, rows).astype(dtype)
        return torch.from_numpy(found) if rng.random() < 0.5 else found[0].item()

    given: dict[str, Any] = {
        "temperature": rows_of([0.3, 0.7, 1.0, 1.5], np.float32),
        "top_k": rows_of([0, 0, 1, 5, 40, 600, vocab + 3], np.int64),
        "top_p": rows_of([1.0, 1.0, 0.1, 0.5, 0.9, 0.99], np.float32),
        "min_p": rows_of([0.0, 0.0, 0.001, 0.1, 1.0], np.float32),
        "greedy": torch.from_numpy(rng.random(rows) < 0.1),
        "order": str(rng.choice(["vllm", "hf", "sglang"])),
        "valid_vocab": int(rng.integers(1, vocab + 1)) if rng.random() < 0.3 else None,
    }
    if rng.random() < 0.3:
        words = rng.integers(-(1 << 31), 1 << 31, (rows, (vocab + 31) // 32)).astype(np.int32)
        words[:, 0] |= 1  # at least one column is allowed
        given["allowed"] = torch.from_numpy(words)
    return x, given


def failure(number: int, device: str) -> str:
    x, given = case(number)
    keys = {"seed": number, "sample_id": torch.arange(x.shape[0]) + (1 << 33), "position": number % 97}
    # A GPU gives calls of few rows other kernels, so every second case has copies of its rows.
    copies = 1 if device == "cpu" or number % 2 else 72
    put = lambda v: v.to(device).repeat(copies, *[1] * (v.ndim - 1)) if isinstance(v, torch.Tensor) else v  # noqa: E731
    everything = {name: put(v) for name, v in (given | keys).items()}
    got = rk.sample(put(x), return_kept=True, exp="portable", **everything)
    rows = x.shape[0]
    if not (got.ids.view(copies, rows) == got.ids[:rows]).all():
        return "a copy of a row has another id"
    counts = got.kept_offsets.diff().view(copies, rows)
    if not (counts == counts[0]).all():
        return "a copy of a row has another number of kept columns"
    plain = {n: v.numpy() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    z = x.float().numpy()
    want = rk.sample_reference(z, **plain)
    greedy, temperature = plain["greedy"], np.broadcast_to(plain["temperature"], len(z))
    ids, margin = draw_reference(
        z, want.kept, np.where(greedy, np.float32(1), temperature), number, keys["sample_id"].numpy(), number % 97
    )
    offsets, valid = got.kept_offsets.tolist(), given["valid_vocab"] or x.shape[1]
    bound = rk.contract.row("sample", "logprob").allowed(max_abs_z=np.abs(z).max() / 0.3)
    for i, kept in enumerate(want.kept):
        if want.margin[i] < MARGIN:
            continue
        drawn, found = int(got.ids[i]), got.kept_ids[offsets[i] : offsets[i + 1]].tolist()
        if int(got.status[i]) != 0:
            return f"row {i}: status {int(got.status[i])}"
        if found != ([] if len(kept) == valid else kept.tolist()):
            return f"row {i}: kept {len(found)}, expected {len(kept)}"
        expected = int(kept[np.argmax(z[i, kept])]) if greedy[i] else int(ids[i])
        if drawn != expected and (greedy[i] or margin[i] >= MARGIN):
            return f"row {i}: drew {drawn}, expected {expected}"
        if not abs(float(got.logprob[i]) - want.logprob[i, drawn]) <= bound:
            return f"row {i}: logprob {float(got.logprob[i])}, expected {want.logprob[i, drawn]}"
    return ""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_it_is_the_references(block: int, device: str) -> None:
    found = {n: said for n in range(block, CASES, BLOCKS) if (said := failure(n, device))}
    assert not found, found


if __name__ == "__main__":
    sys.exit(failure(int(sys.argv[1]), "cpu"))
