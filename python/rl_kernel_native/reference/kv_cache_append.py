"""The reference of kv_cache_append in plain Python, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np


def kv_cache_append_reference(
    k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Copies of the caches with the tokens in their slots.

    Args: as :func:`rl_kernel_native.kv_cache_append`.
    """
    found = []
    for tokens, cache in ((k, k_cache), (v, v_cache)):
        after = np.asarray(cache).copy()
        for token, slot in zip(np.asarray(tokens), np.asarray(slot_mapping).tolist(), strict=False):
            if slot == -1:
                continue
            where: Any = slot if after.ndim == 3 else divmod(slot, after.shape[1])
            after[where] = token
        found.append(after)
    return found[0], found[1]
