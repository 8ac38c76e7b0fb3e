"""Groups decoding sequences that begin with the same pages, such as completions of one prompt, for attention's
`shared_prefix`.

vLLM's prefix cache gives such sequences the same pages. The host finds the groups in its own copy of the block table,
so no step waits for the GPU. Equal page ids mean the same memory, so a sequence reads the same keys through the prefix
table as through the block table.

A CUDA graph that includes attention keeps the shapes of its capture, so it does not use groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The least work for which `shared_prefix` took less time on an H200 (cuda/attention/README.md): 8 completions with 4
# query heads per key head, after a shared prompt of 2048 keys. The kernel that shares reads of pages needs 32 rows on
# Hopper, and 64 on other GPUs.
LEAST_KEYS = 2048
LEAST_ROWS, LEAST_ROWS_ELSEWHERE = 32, 64

Prefix = tuple[Tensor, tuple[Tensor, Tensor, Tensor]]  # block_table and shared_prefix of rk.attention


@dataclass(frozen=True)
class HostPages:
    """The host's copy of a block table. Sequence b has row ``rows[b]`` of ``table``, or row b if ``rows`` is None."""

    table: np.ndarray
    rows: np.ndarray | None = None

    def columns(self, rows: Any, columns: Any) -> np.ndarray:
        return self.table[rows if self.rows is None else self.rows[rows], columns]


@dataclass(frozen=True)
class Groups:
    """The arrays of `shared_prefix` on the host, and what is needed to find each sequence's other pages.

    Attributes:
        skipped: for each sequence, the number of pages that its group shares.
        own_pages: the largest number of pages that a sequence has after the shared pages.
    """

    table: np.ndarray
    keys: np.ndarray
    offsets: np.ndarray
    skipped: np.ndarray
    own_pages: int


def of_rows(lengths: np.ndarray, rows: int) -> np.ndarray:
    """A length for each row of a block table. A row without a given length is padding, and gets length 0."""
    if len(lengths) == rows:
        return lengths
    found = np.zeros(rows, lengths.dtype)
    found[: len(lengths)] = lengths[:rows]
    return found


def find(pages: HostPages, lengths: np.ndarray, page_size: int, least_sequences: float) -> Groups | None:
    """Groups among consecutive sequences with one query each.

    Args:
        lengths: the number of keys of each sequence, including the key of the query itself; 0 for padding.
        least_sequences: the least number of sequences in a group. It is also the least average over all groups of the
            call, where sequences between two groups count as a group.
    """
    least = -(-LEAST_KEYS // page_size)
    usable = (lengths - 1) // page_size  # number of full pages before the query's own key
    far = usable >= least
    if not far.any():
        return None
    count = len(lengths)
    last = pages.columns(slice(0, count), least - 1)
    alike = far[1:] & far[:-1] & (last[1:] == last[:-1])
    if not alike.any():  # in most steps, no neighbours share pages
        return None
    shared = np.zeros(count - 1, np.int64)  # number of pages that sequences i and i + 1 share
    for i in np.flatnonzero(alike):
        most = int(min(usable[i], usable[i + 1]))
        differ = pages.columns(i, slice(0, most)) != pages.columns(i + 1, slice(0, most))
        shared[i] = differ.argmax() if differ.any() else most
    return _groups(pages, shared, lengths, page_size, least, least_sequences)


def _groups(
    pages: HostPages, shared: np.ndarray, lengths: np.ndarray, page_size: int, least: int, least_sequences: float
) -> Groups | None:
    begins: list[int] = []
    widths: list[int] = []  # shared pages per group; 0 for a run of sequences between groups
    i, count = 0, len(lengths)
    while i < count:
        end = i
        while end < count - 1 and shared[end] >= least:
            end += 1
        width = int(shared[i:end].min()) if end > i and end + 1 - i >= least_sequences else 0
        if width or not widths or widths[-1]:
            begins.append(i)
            widths.append(width)
        i = end + 1
    if not any(widths):
        return None
    begins.append(count)
    if not widths[-1]:  # sequences after the last group need no entry
        widths.pop()
        begins.pop()
    if count < least_sequences * len(widths):
        return None
    table = np.zeros((len(widths), max(widths)), np.int32)
    skipped = np.zeros(count, np.int32)
    for g, width in enumerate(widths):
        table[g, :width] = pages.columns(begins[g], slice(0, width))
        skipped[begins[g] : begins[g + 1]] = width
    own = -(-lengths // page_size) - skipped
    keys = np.array(widths, np.int32) * page_size
    return Groups(table, keys, np.array(begins, np.int32), skipped, max(1, int(own.max())))


def prefix_of(groups: Groups, block_table: Tensor) -> Prefix:
    """Copies the groups to the block table's device. The host does not wait for the device."""

    def sent(array: np.ndarray) -> Tensor:
        made = torch.from_numpy(array)
        return made if block_table.is_cpu else made.pin_memory().to(block_table.device, non_blocking=True)

    arrays = (sent(groups.table), sent(groups.keys), sent(groups.offsets))
    first = int(groups.skipped[0])
    if (groups.skipped == first).all():
        return block_table[:, first : first + groups.own_pages], arrays
    places = torch.arange(groups.own_pages, device=block_table.device) + sent(groups.skipped)[:, None]
    return block_table.gather(1, places.clamp_(max=block_table.shape[1] - 1)), arrays


# ---- the host's copy of the block table, which both model runners attach to the device's table --------------


def pages_of(block_table: Tensor) -> HostPages | None:
    return getattr(block_table, "rlk_pages", None)


def given(own: Any, self: Any, num_reqs: int) -> Tensor:
    """Wraps the first runner's ``BlockTable.get_device_tensor``. This runner has its own copy of the table on the
    host."""
    table = own(self, num_reqs)
    table.rlk_pages = HostPages(self.block_table.np)
    return table


def appended(own: Any, self: Any, req_index: int, new_block_ids: Any, overwrite: bool) -> None:
    """Wraps the second runner's ``BlockTables.append_block_ids``. The runner's tables are only on the GPU, so this
    function keeps a copy on the host."""
    if not hasattr(self, "rlk_pages"):
        self.rlk_pages = [np.zeros(tuple(table.gpu.shape), np.int32) for table in self.block_tables]
    for i, ids in enumerate(new_block_ids):
        each = self.blocks_per_kv_block[i]
        if each > 1:
            ids = [page * each + part for page in ids for part in range(each)]
        start = 0 if overwrite else int(self.num_blocks.np[i, req_index])
        self.rlk_pages[i][req_index, start : start + len(ids)] = ids
    own(self, req_index, new_block_ids, overwrite)


def prepared(own: Any, self: Any, input_batch: Any) -> Any:
    """Wraps the second runner's ``GPUModelRunner.prepare_attn``: attaches the host's copy to the tables."""
    tables, slots = own(self, input_batch)
    requests = input_batch.idx_mapping_np
    for table, copy in zip(tables, getattr(self.block_tables, "rlk_pages", ()), strict=False):
        rows = np.zeros(max(len(table), len(requests)), np.int64)  # a padding row has no keys, so row 0 serves
        rows[: len(requests)] = requests
        table.rlk_pages = HostPages(copy, rows)
    return tables, slots
