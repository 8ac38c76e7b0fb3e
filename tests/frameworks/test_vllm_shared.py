"""vLLM's requests that share a prompt's pages are served as one group: the groups that are found, and equal bytes.

The engine's test needs `tools/fetch_vllm.sh` and its folder on PYTHONPATH, like the tests of test_vllm.py.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import rl_kernel_native as rk  # noqa: E402
import vllm_model  # noqa: E402
from rl_kernel_native.integrations.vllm import shared  # noqa: E402

PAGE = 4
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and "RLK_REQUIRE_ENGINES" not in os.environ,
    reason="vllm is not on PYTHONPATH: tools/fetch_vllm.sh",
)


@pytest.fixture(autouse=True)
def short_prompts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "LEAST_KEYS", 2 * PAGE)


def found(table: Any, lengths: Any, least_sequences: float = 2) -> Any:
    groups = shared.find(shared.HostPages(np.array(table, np.int32)), np.array(lengths), PAGE, least_sequences)
    if groups is None:
        return None
    return groups.table.tolist(), groups.keys.tolist(), groups.offsets.tolist(), groups.skipped.tolist()


def test_completions_of_one_prompt_are_a_group() -> None:
    table = [[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 7, 3]]
    assert found(table, [14, 13, 16]) == ([[5, 6, 7]], [12], [0, 3], [3, 3, 3])
    # The page with a query's own key is not shared, even if the page is full.
    assert found(table, [14, 12, 16]) == ([[5, 6]], [8], [0, 3], [2, 2, 2])
    # Ids behind the keys in use mean nothing.
    assert found([[5, 6, 7, 9], [5, 6, 8, 9]], [12, 12]) == ([[5, 6]], [8], [0, 2], [2, 2])


def test_sequences_between_groups_share_nothing() -> None:
    a, b = [[1, 2, 3, 9]] * 3, [[4, 5, 6, 9]] * 2
    alone = [[7, 8, 9, 9], [7, 7, 7, 7]]
    sizes = [16] * 7
    assert found([*a, *alone, *b], sizes) == (
        [[1, 2, 3], [0, 0, 0], [4, 5, 6]], [12, 0, 12], [0, 3, 5, 7], [3, 3, 3, 0, 0, 3, 3],
    )  # fmt: skip
    assert found([*a, *b, *alone], sizes) == ([[1, 2, 3], [4, 5, 6]], [12, 12], [0, 3, 5], [3] * 5 + [0, 0])
    assert found([*alone, *a], sizes[:5]) == ([[0, 0, 0], [1, 2, 3]], [0, 12], [0, 2, 5], [0, 0, 3, 3, 3])


@pytest.mark.parametrize(
    ("table", "lengths", "least"),
    [
        ([[1, 2, 3]] * 2, [8, 12], 2),  # the first sequence has its query in the second page
        ([[1, 2, 3], [1, 4, 3]], [12, 12], 2),  # one page
        ([[1, 2, 3], [4, 2, 3]], [12, 12], 2),  # the same second page, but not the same first page
        ([[1, 2, 3]] * 3, [12] * 3, 4),  # few sequences
        ([[1, 2, 3]] * 4 + [[4, 5, 6], [7, 8, 9]] + [[4, 5, 6]] * 4, [12] * 10, 3.5),  # few on average over 3 groups
        ([[0, 0, 0]] * 3, [0, 0, 0], 2),  # padding
        ([[1, 2, 3]], [12], 1),
    ],
)
def test_what_does_not_pay_is_no_group(table: Any, lengths: Any, least: float) -> None:
    assert found(table, lengths, least) is None


@pytest.mark.parametrize("given", [3, 5, 6])
def test_a_padded_step_has_a_length_per_row(device: str, given: int) -> None:
    """Three sequences in a table of five rows, with a length for each sequence, each row, or more."""
    table = np.array([[5, 6, 1], [5, 6, 2], [5, 6, 3], [0, 0, 0], [0, 0, 0]], np.int32)
    lengths = shared.of_rows(np.array([12, 11, 10, 0, 0, 0][:given], np.int32), len(table))
    assert lengths.tolist() == [12, 11, 10, 0, 0]
    groups = shared.find(shared.HostPages(table), lengths, PAGE, 2)
    assert groups is not None
    on_device = torch.from_numpy(table).to(device)
    block_table, prefix = shared.prefix_of(groups, on_device)
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4, 16), (7, PAGE, 2, 16), (7, PAGE, 2, 16))
    q, k, v = (torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)
    common: dict[str, Any] = {
        "cu_seqlens_q": torch.tensor([0, 1, 2, 3, 3, 3], dtype=torch.int32, device=device),
        "seqused_k": torch.from_numpy(lengths).to(device),
    }
    plain = rk.attention(q, k, v, block_table=on_device, **common)
    assert torch.equal(rk.attention(q, k, v, block_table=block_table, shared_prefix=prefix, **common), plain)


@pytest.mark.parametrize("seed", range(8))
def test_a_step_has_the_same_bytes_by_groups(device: str, seed: int) -> None:
    """Random groups of 1 to 6 sequences with prompts of 0 to 6 pages, and padding behind them."""
    draw = np.random.default_rng(seed)
    fresh = iter(draw.permutation(400).tolist())
    table = np.full((40, 9), 399, np.int32)
    lengths = np.zeros(40, np.int64)
    row = 0
    while row < 34:
        prompt = [next(fresh) for _ in range(draw.integers(0, 7))]
        for _ in range(draw.integers(1, 7)):
            own = [next(fresh) for _ in range(draw.integers(1, 3))]
            pages = prompt + own
            table[row, : len(pages)] = pages
            lengths[row] = draw.integers((len(pages) - 1) * PAGE + 1, len(pages) * PAGE + 1)
            row += 1
    generator = torch.Generator().manual_seed(seed)
    shapes = ((40, 4, 16), (400, PAGE, 2, 16), (400, PAGE, 2, 16))
    q, k, v = (torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)
    on_device = torch.from_numpy(table).to(device)
    common: dict[str, Any] = {
        "cu_seqlens_q": torch.arange(41, dtype=torch.int32, device=device),
        "seqused_k": torch.from_numpy(lengths).int().to(device),
    }
    groups = shared.find(shared.HostPages(table), lengths, PAGE, 2)
    assert groups is not None
    assert (groups.skipped > 0).sum() >= 4, "the case tests little"
    block_table, prefix = shared.prefix_of(groups, on_device)
    plain = rk.attention(q, k, v, block_table=on_device, **common)
    assert torch.equal(rk.attention(q, k, v, block_table=block_table, shared_prefix=prefix, **common), plain)


@pytest.mark.gpu
def test_groups_of_completions_share_reads_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of 2048 keys with 8 completions each, and 4 query heads per key head: the least that counts."""
    monkeypatch.setattr(shared, "LEAST_KEYS", 2048)
    table = np.arange(16 * 130, dtype=np.int32).reshape(16, 130)
    for first in (0, 8):
        table[first : first + 8, :128] = table[first, :128]
    lengths = np.arange(2049, 2065)
    q = torch.randn(16, 8, 128, device="cuda").bfloat16()
    k, v = (torch.randn(16 * 130, 16, 2, 128, device="cuda").bfloat16() for _ in "kv")
    on_gpu = torch.from_numpy(table).cuda()
    common: dict[str, Any] = {
        "cu_seqlens_q": torch.arange(17, dtype=torch.int32, device="cuda"),
        "seqused_k": torch.from_numpy(lengths).int().cuda(),
    }
    groups = shared.find(shared.HostPages(table), lengths, 16, shared.LEAST_ROWS / 4)
    assert groups is not None
    torch.cuda.set_sync_debug_mode("error")
    try:
        block_table, prefix = shared.prefix_of(groups, on_gpu)
        with rk.trace() as found:
            by_groups = rk.attention(q, k, v, block_table=block_table, shared_prefix=prefix, **common)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ((_, plans),) = found.plans["attention"].items()
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert plans == {f"{'groups' if hopper else 'few rows'}, shared prefix": 1}
    assert torch.equal(by_groups, rk.attention(q, k, v, block_table=on_gpu, **common))


def test_a_group_of_all_sequences_needs_no_copy_of_their_pages() -> None:
    table = torch.tensor([[5, 6, 7, 1], [5, 6, 7, 2]], dtype=torch.int32)
    groups = shared.find(shared.HostPages(table.numpy()), np.array([14, 13]), PAGE, 2)
    assert groups is not None
    own, (pages, keys, offsets) = shared.prefix_of(groups, table)
    assert own.data_ptr() == table[:, 3:].data_ptr()
    assert (own.tolist(), pages.tolist(), keys.tolist(), offsets.tolist()) == ([[1], [2]], [[5, 6, 7]], [12], [0, 2])


def test_the_host_follows_the_second_runners_tables() -> None:
    """Pages of two kernel pages each, requests in another order than their places, and a place that is used again."""
    counts = np.zeros((1, 4), np.int32)
    tables = SimpleNamespace(
        blocks_per_kv_block=[2], num_blocks=SimpleNamespace(np=counts),
        block_tables=[SimpleNamespace(gpu=torch.zeros(4, 8, dtype=torch.int32))],
    )  # fmt: skip

    def own(self: Any, req_index: int, new_block_ids: Any, overwrite: bool) -> None:
        begin = 0 if overwrite else counts[0, req_index]
        counts[0, req_index] = begin + 2 * len(new_block_ids[0])

    def append(place: int, *ids: int, overwrite: bool = False) -> None:
        shared.appended(own, tables, place, (list(ids),), overwrite)

    append(3, 5, 6, overwrite=True)
    append(1, 9, 9, 9, overwrite=True)
    append(1, 5, 7, overwrite=True)
    append(3, 8)
    runner = SimpleNamespace(block_tables=tables)
    batch = SimpleNamespace(idx_mapping_np=np.array([3, 1], np.int32))
    (device_table,), _ = shared.prepared(lambda self, batch: ((torch.zeros(3, 8),), None), runner, batch)
    pages = shared.pages_of(device_table)
    assert pages is not None
    assert pages.columns(slice(0, 2), slice(0, 6)).tolist() == [[10, 11, 12, 13, 16, 17], [10, 11, 14, 15, 18, 19]]
    groups = shared.find(pages, np.array([20, 15, 0]), PAGE, 1)
    assert groups is not None
    assert groups.table.tolist() == [[10, 11]]
    assert shared.pages_of(torch.zeros(3, 8)) is None


def test_the_first_runner_gives_its_own_copy() -> None:
    own = np.zeros((4, 8), np.int32)
    table = shared.given(lambda self, n: torch.zeros(n, 8), SimpleNamespace(block_table=SimpleNamespace(np=own)), 3)
    pages = shared.pages_of(table)
    assert pages is not None
    assert pages.table is own


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_model.save(tmp_path_factory.mktemp("model"))


ENGINE = """
import sys
from rl_kernel_native.integrations.vllm import cpu
cpu.install()
import torch
import rl_kernel_native as rk
from rl_kernel_native.integrations import vllm as plugin
plugin.enable(check=True)
from rl_kernel_native.integrations.vllm import shared
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

engine = LLM(
    model=sys.argv[1], dtype="bfloat16", skip_tokenizer_init=True, max_model_len=160, enable_prefix_caching=True,
    max_num_batched_tokens=256, max_num_seqs=64, enforce_eager=True, block_size=16,
)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
rk.patch_model(model, strict=True)
draw = torch.Generator().manual_seed(0)
# Two prompts with a group each, and a request between them that shares nothing.
prompts = [torch.randint(512, (n,), generator=draw).tolist() for n in (110, 100, 97)]
counts = (24, 1, 24)

def rollout(least_keys):
    shared.LEAST_KEYS = least_keys
    assert engine.reset_prefix_cache()
    how = [
        SamplingParams(temperature=1.0, max_tokens=12, n=n, seed=7, logprobs=0, ignore_eos=True, detokenize=False)
        for n in counts
    ]
    with rk.trace() as found:
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
    plans = found.plans["attention"]["cpu"]
    by_groups = sum(n for plan, n in plans.items() if plan.endswith(", shared prefix"))
    return outputs, by_groups, sum(plans.values())

def scored(outputs):
    return [
        (c.token_ids, [x[t].logprob for x, t in zip(c.logprobs, c.token_ids, strict=True)])
        for o in outputs for c in o.outputs
    ]

outputs, by_groups, calls = rollout(64)
plain, none, _ = rollout(1 << 20)
assert none == 0
# Every step but the first ones decodes: 12 tokens in two layers.
assert 2 * 8 <= by_groups <= calls - 2, (by_groups, calls)
assert scored(outputs) == scored(plain)
differing = 0
for output in outputs:
    for c in output.outputs:
        ids = torch.tensor([list(output.prompt_token_ids) + list(c.token_ids)])
        with torch.no_grad():
            logits = model(ids).logits[0, len(output.prompt_token_ids) - 1 : -1]
        want = rk.logprob(logits, ids[0, len(output.prompt_token_ids) :]).tolist()
        differing += sum(a != x[t].logprob for a, x, t in zip(want, c.logprobs, c.token_ids, strict=True))
assert differing == 0, differing
print(f"0 of {49 * 12} tokens differ, {by_groups} of {calls} calls by groups")
"""


@needs_vllm
def test_an_engine_decodes_groups_and_no_token_differs(model: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ENGINE, str(model)], capture_output=True, text=True)
    assert "\n0 of 588 tokens differ" in "\n" + done.stdout, done.stdout + done.stderr
