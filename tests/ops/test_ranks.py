"""Statistics of a batch that is spread over ranks have the bits of one rank that holds it all, for any distribution."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing
from ports import free_port

torch = pytest.importorskip("torch")

RANKS = 4
SHARES = ((3, 0, 2, 4), (0, 0, 9, 0), (0, 0, 0, 0), (4, 4, 4, 4))
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo of the batch": {"kind": "grpo", "scale": "batch"},
    "areal": {"kind": "areal"},
    "areal of the batch": {"kind": "areal", "scale": "batch"},
    "gpg": {"kind": "gpg"},
    "grpo_trl": {"kind": "grpo_trl"},
    "opo": {"kind": "opo"},
    "remax": {"kind": "remax"},
}
WHITEN: tuple[dict[str, bool], ...] = ({}, {"shift_mean": False}, {"unbiased": False})


def advantages_of_shares(shares: tuple[int, ...], mine: slice, group: Any, rng: np.random.Generator) -> None:
    num = sum(shares)
    rewards = torch.from_numpy(rng.standard_normal(num).astype(np.float32))
    rewards[rng.random(num) < 0.2] = torch.nan
    ids = torch.from_numpy(rng.integers(0, 3, num))  # groups are spread over ranks
    lengths, baseline = torch.from_numpy(rng.integers(1, 9, num)), torch.from_numpy(rng.random(num).astype(np.float32))
    for name, how in KINDS.items():
        more: dict[str, Any] = {"kind": name, **how, "return_stats": True, "return_status": True, "exclude_nan": True}
        arrays = {"opo": {"lengths": lengths}, "remax": {"baseline": baseline}}.get(more["kind"], {})
        grouped: list[dict[str, Any]] = [{}]
        if more["kind"] != "remax":
            grouped = [{"group_ids": ids}, {"group_size": next(n for n in (4, 3, 1) if num % n == 0)}]
        for by in grouped:
            given = {**arrays, **by}
            share = {key: a[mine] if isinstance(a, torch.Tensor) else a for key, a in given.items()}
            want = rk.group_advantage(rewards, **given, **more)
            got = rk.group_advantage(rewards[mine], process_group=group, **share, **more)
            assert not differing(tuple(got), tuple(a[mine].contiguous() for a in want)), (name, shares, by)


def tokens_of_shares(shares: tuple[int, ...], rank: int, mine: slice, group: Any, rng: np.random.Generator) -> None:
    num, width = sum(shares), 40
    x = torch.from_numpy(rng.standard_normal((num, width)).astype(np.float32))
    widths = (40, 31, 17, 40)
    owner = np.repeat(np.arange(RANKS), shares)
    lengths = np.array([rng.integers(0, widths[r] + 1) for r in owner], np.int64)
    mask = torch.from_numpy((np.arange(width) < lengths[:, None]) & (rng.random((num, width)) < 0.8))
    mask[owner == 2] = False  # no token of rank 2 counts
    x[~mask] = torch.nan
    own = lengths[mine].tolist()
    pieces, marks = ([a[mine][i, :n] for i, n in enumerate(own)] for a in (x, mask))
    packed = torch.cat([*pieces, torch.full((3 * rank,), torch.nan)])  # followed by tokens of no sequence
    counted = torch.cat([*marks, torch.ones(3 * rank, dtype=torch.bool)]).float()
    cu = torch.from_numpy(np.concatenate(([0], np.cumsum(own)))).to(torch.int32 if rank % 2 else torch.int64)
    for how in WHITEN:
        want = rk.masked_whiten(x, mask, return_stats=True, **how)
        narrow = [a[mine, : widths[rank]] for a in (x, mask)]
        got = rk.masked_whiten(*narrow, process_group=group, return_stats=True, **how)
        assert not differing(tuple(got), (want.y[mine, : widths[rank]].contiguous(), want.mean, want.var)), shares
        got = rk.masked_whiten(packed, counted, cu, process_group=group, return_stats=True, **how)
        rows = [want.y[mine][i, :n] for i, n in enumerate(own)]
        assert not differing(tuple(got), (torch.cat([*rows, torch.zeros(3 * rank)]), want.mean, want.var)), shares
    whole = x.nan_to_num()
    got = rk.masked_whiten(whole[mine], process_group=group)
    assert not differing(got, rk.masked_whiten(whole)[mine].contiguous())


def refusals(rank: int, group: Any) -> None:
    """Every rank refuses by itself, before the others wait."""
    one = torch.ones(2)
    for call, error, text in (
        (lambda: rk.group_advantage(one, torch.tensor([0, 2]), process_group=group), ValueError, "^group_offsets: exp"),
        (lambda: rk.group_advantage(one.numpy(), group_size=2, process_group=group), TypeError, "^rewards: .* torch"),
        (lambda: rk.group_advantage(one, group_ids=torch.zeros(3).long(), process_group=group), ValueError, "^group_i"),
        (lambda: rk.group_advantage(one[None], group_size=2, process_group=group), ValueError, "^rewards: expected sh"),
        (lambda: rk.group_advantage(one, group_size=2, process_group="world"), TypeError, "^process_group: expected a"),
        (lambda: rk.masked_whiten(one.numpy(), process_group=group), TypeError, "^x: expected a torch.Tensor beside p"),
        (lambda: rk.masked_whiten(one, one[:1], process_group=group), ValueError, "^mask: expected shape"),
        (lambda: rk.masked_whiten(one, process_group=3), TypeError, "^process_group: expected a torch.distributed"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()
    with pytest.raises(ValueError, match=r"^x: expected padded tokens of every rank"):
        rk.masked_whiten(one if rank else one[None], process_group=group)


def on_a_rank(rank: int, port: int) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    for number, shares in enumerate(SHARES):
        rng = np.random.default_rng(number)
        mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
        advantages_of_shares(shares, mine, group, rng)
        tokens_of_shares(shares, rank, mine, group, rng)
    refusals(rank, group)
    dist.barrier()
    dist.destroy_process_group()


def test_a_batch_over_ranks_has_the_bits_of_one_rank() -> None:
    port = free_port()
    multiprocessing.set_forkserver_preload(["torch.distributed", "rl_kernel_native", "cases", __name__])
    torch.multiprocessing.start_processes(on_a_rank, (port,), nprocs=RANKS, start_method="forkserver")
