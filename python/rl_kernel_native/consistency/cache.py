"""A KV cache of slots: a request keeps its slot while other requests come and go, as in a serving engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class SlotCache:
    """Keys and values of up to `num_slots` requests, [slot, num_kv_heads, position, head_dim] for each layer.

    The model gets this object as its KV cache. Before each forward, `begin_prefill` or `begin_decode` assigns slots to
    the batch's rows. Columns are positions (nothing is shifted or left-padded), so a token's key stays where it was
    written, for any other requests in the batch.
    """

    def __init__(self, config: Any, num_slots: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, num_slots, config.num_key_value_heads, capacity, head_dim)
        # Memory begins as zeros: a masked column is still multiplied by 0, and 0 times a NaN in it would be NaN.
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._free = list(range(num_slots))[::-1]
        self._slots = torch.zeros(0, dtype=torch.long, device=device)
        self._positions = torch.zeros(0, dtype=torch.long, device=device)
        self._length = 0
        self._prefill = False

    def acquire(self) -> int:
        """A free slot. IndexError when all are taken."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Frees a slot. The next request overwrites the slot's content and never reads it."""
        self._free.append(slot)

    def begin_prefill(self, slot: int, length: int) -> None:
        """The next forward is one row of `length` tokens at positions 0, 1, ... of `slot`."""
        self._slots = torch.tensor([slot], dtype=torch.long, device=self._keys.device)
        self._length = length
        self._prefill = True

    def begin_decode(self, slots: Sequence[int], positions: Sequence[int]) -> torch.Tensor | None:
        """The next forward has one token per row; row i is at positions[i] of slots[i].

        Returns:
            bool [B, L], true for the keys that a row has; L = max(positions) + 1. None if no row is shorter than L.
        """
        device = self._keys.device
        self._slots = torch.tensor(slots, dtype=torch.long, device=device)
        self._positions = torch.tensor(positions, dtype=torch.long, device=device)
        self._length = max(positions) + 1
        self._prefill = False
        if min(positions) + 1 == self._length:
            return None
        columns = torch.arange(self._length, device=device)
        return columns[None, :] <= self._positions[:, None]

    def get_query_offset(self, layer_idx: int) -> int:
        """transformers asks for this offset to make masks, but masks are made here."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys, offset): transformers asks for these sizes to make masks, but masks are made here."""
        return self._length, 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores key and value [B, num_kv_heads, T, head_dim]; returns all keys and values of each row so far, [B,
        num_kv_heads, L, head_dim]."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._prefill:
            slot = self._slots[0]
            keys[slot, :, : self._length] = key[0]
            values[slot, :, : self._length] = value[0]
            return key, value
        keys[self._slots, :, self._positions] = key[:, :, 0]
        values[self._slots, :, self._positions] = value[:, :, 0]
        return keys[self._slots, :, : self._length], values[self._slots, :, : self._length]
