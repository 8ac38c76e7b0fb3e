"""Reference of process_logits in float64, from the formulas alone. It counts the tokens of the history, then applies
bias and penalties one after another."""

from __future__ import annotations

from typing import Any

import numpy as np


def process_logits_reference(
    logits: Any,
    *,
    repetition_penalty: Any = 1.0,
    presence_penalty: Any = 0.0,
    frequency_penalty: Any = 0.0,
    history: Any = None,
    logit_bias: Any = None,
    order: str = "vllm",
) -> np.ndarray:
    """Args: as :func:`rl_kernel_native.process_logits`, only for valid rows. Computes in float64."""
    z = np.array(logits, np.float64)
    rows, vocab = z.shape
    repetition, presence, frequency = (
        np.broadcast_to(np.asarray(x, np.float32).astype(np.float64), rows)[:, None]
        for x in (repetition_penalty, presence_penalty, frequency_penalty)
    )
    count, seen, bias = np.zeros((rows, vocab)), np.zeros((rows, vocab), bool), np.zeros((rows, vocab))
    for i in range(rows):
        if history is not None:
            ids, offsets, is_prompt = (*history, None)[:3]
            own = slice(int(offsets[i]), int(offsets[i + 1]))
            of_row = np.asarray(ids)[own]
            of_prompt = np.zeros(len(of_row), bool) if is_prompt is None else np.asarray(is_prompt, bool)[own]
            seen[i, of_row] = True
            np.add.at(count[i], of_row[~of_prompt], 1)
        if logit_bias is not None:
            ids, values, offsets = logit_bias
            own = slice(int(offsets[i]), int(offsets[i + 1]))
            bias[i, np.asarray(ids)[own]] = np.asarray(values, np.float64)[own]

    def repeated(z: np.ndarray, where: np.ndarray) -> np.ndarray:
        return np.where(where, np.where(z > 0, z / repetition, z * repetition), z)

    of_output = count > 0
    additive = np.where(of_output, frequency * count + presence, 0.0)
    if order == "sglang":
        return repeated(z - additive, of_output) + bias
    return repeated(z + bias, seen) - additive
