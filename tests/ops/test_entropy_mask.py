"""entropy_mask: torch.quantile and TRL's own mask, the same tokens for every layout of sequences, bad input, and calls
through torch. test_covariance_mask.cpp compares the contract's bytes."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import framework_sources
import rl_kernel_native as rk
from policy_loss_cases import same
from torch_properties import captured

QUANTILES = [0.0, 1e-3, 0.1, 0.2, 0.3, 0.5, 0.9, 1.0]
SHAPES = [(1, 1), (3, 7), (12, 97), (3, 1300)]


def batch(rows: int, columns: int, seed: int = 0, steps: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Entropies and a mask; with ``steps`` some entropies are equal."""
    random = np.random.default_rng(seed)
    h = random.gamma(0.5, 1.0, (rows, columns)).astype(np.float32)
    return np.floor(h * steps) / np.float32(steps) if steps else h, random.random(h.shape) < 0.7


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("top_quantile", QUANTILES)
def test_tokens_are_those_not_below_torchs_quantile(top_quantile: float, steps: int, device: str) -> None:
    for seed, shape in enumerate(SHAPES):
        h, mask = (torch.from_numpy(x).to(device) for x in batch(*shape, seed, steps))
        got = rk.entropy_mask(h, mask, top_quantile=top_quantile)
        want = mask & (h >= torch.quantile(h[mask], 1 - top_quantile)) if bool(mask.any()) else mask
        assert torch.equal(got, want.float()), shape
        reference = rk.entropy_mask_reference(h.cpu(), mask.cpu(), top_quantile=top_quantile)
        assert same(got.cpu(), reference)
        if shape[1] > 90:
            assert 0 < int(got.sum()) <= int(mask.sum())


def test_every_rank_that_float32_rounds_is_torchs() -> None:
    """Numbers of tokens for which the rank is a whole number, or nearly a whole number."""
    for n in range(1, 200):
        h = torch.randperm(n).float()
        for top in (0.1, 0.2, 0.25, 0.3, 1 / 3, 0.7):
            want = (h >= torch.quantile(h, 1 - top)).float()
            assert torch.equal(rk.entropy_mask(h, top_quantile=top), want), (n, top)


def test_the_mask_is_trls_own() -> None:
    trainer = framework_sources.trl("trl.trainer.grpo_trainer").GRPOTrainer
    alone = SimpleNamespace(accelerator=SimpleNamespace(pad_across_processes=lambda x, **_: x, gather=lambda x: x))
    for seed in range(5):
        h, mask = map(torch.from_numpy, batch(6, 50, seed))
        want = trainer.get_high_entropy_mask(alone, h, mask, 1 - 0.2)
        assert torch.equal(rk.entropy_mask(h, mask, top_quantile=0.2) > 0, want)


def test_more_tokens_than_torch_takes() -> None:
    h = torch.arange((1 << 24) + 100, dtype=torch.float32).flip(0) / 8
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(h, 0.75)
    got = rk.entropy_mask(h, top_quantile=0.25)
    assert abs(int(got.sum()) - h.numel() // 4) <= 2
    assert bool(got[: h.numel() // 4 - 2].all())


@pytest.mark.parametrize("top_quantile", [0.0, 0.2, 1.0])
def test_packing_padding_and_strides_change_no_token(top_quantile: float, device: str) -> None:
    h, mask = batch(5, 300, seed=3)
    lengths = [300, 0, 17, 256, 131]
    mask &= np.arange(300) < np.array(lengths)[:, None]
    want = rk.entropy_mask(h, mask, top_quantile=top_quantile)
    flat, of_flat = (np.concatenate([x[:n] for x, n in zip(a, lengths, strict=True)]) for a in (h, mask))
    cuts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).to(device)
    packed = rk.entropy_mask(
        torch.from_numpy(flat).to(device), torch.from_numpy(of_flat).to(device), top_quantile=top_quantile,
        cu_seqlens=cuts,
    )  # fmt: skip
    assert same(packed.cpu(), np.concatenate([x[:n] for x, n in zip(want, lengths, strict=True)]))
    wide = torch.full((5, 400), float("nan"), device=device)
    wide[:, 3:303] = torch.from_numpy(h).to(device)
    strided = rk.entropy_mask(wide[:, 3:303], torch.from_numpy(mask).to(device), top_quantile=top_quantile)
    assert same(strided.cpu(), want)


def test_masked_slots_are_never_read() -> None:
    h, mask = batch(4, 65, seed=2)
    wild = np.random.default_rng(1).choice(np.array([np.nan, np.inf, -np.inf, 3e38], np.float32), h.shape)
    want = rk.entropy_mask(h, mask, top_quantile=0.3)
    assert same(rk.entropy_mask(np.where(mask, h, wild), mask, top_quantile=0.3), want)
    assert not want[~mask].view(np.int32).any(), "+0"


def test_a_nan_is_larger_than_any_number() -> None:
    h, mask = batch(2, 40, seed=4)
    mask[:] = True
    h[1, 7] = np.nan
    got = rk.entropy_mask(h, mask, top_quantile=0.0)
    assert got[1, 7] == 1
    assert got.sum() == 1


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (3, 7)])
def test_without_a_token_none_is_chosen(shape: tuple[int, int]) -> None:
    got = rk.entropy_mask(np.full(shape, np.nan, np.float32), np.zeros(shape, bool), top_quantile=0.5)
    assert same(got, np.zeros(shape, np.float32))


def test_numpy_and_jax_get_torchs_bytes() -> None:
    h, mask = batch(3, 40, seed=8)
    want = rk.entropy_mask(torch.from_numpy(h), torch.from_numpy(mask), top_quantile=0.2)
    assert same(rk.entropy_mask(h, mask, top_quantile=0.2), want)
    jax = pytest.importorskip("jax")
    got = rk.entropy_mask(jax.numpy.asarray(h), jax.numpy.asarray(mask), top_quantile=0.2)
    assert isinstance(got, jax.Array)
    assert same(got, want)


def test_compiled_calls_give_the_same_bytes(device: str) -> None:
    h, mask = (torch.from_numpy(x).to(device) for x in batch(4, 65))
    want = rk.entropy_mask(h, mask, top_quantile=0.2)
    compiled: Any = torch.compile(
        lambda h, mask: rk.entropy_mask(h, mask, top_quantile=0.2), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(h, mask), want)
    assert not rk.entropy_mask(h.requires_grad_(), mask, top_quantile=0.2).requires_grad


X = torch.zeros(2, 8)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({"entropy": X.double()}, TypeError, "entropy: expected dtype float32, got float64"),
    "strided": ({"entropy": X.T}, ValueError, "entropy: expected a contiguous last dimension (stride 1)"),
    "mask": ({"mask": X[:1]}, ValueError, "mask: expected shape [2, 8] (that of entropy), got [1, 8]"),
    "quantile": ({"top_quantile": 1.1}, ValueError, "top_quantile: expected a number in [0, 1], got 1.1"),
    "NaN": ({"top_quantile": float("nan")}, ValueError, "top_quantile: expected a number in [0, 1], got nan"),
    "type": ({"top_quantile": "0.2"}, TypeError, "top_quantile: expected a number, got str"),
    "cuts": (
        {"entropy": X[0], "cu_seqlens": torch.tensor([0, 9, 8])}, ValueError,
        "cu_seqlens: expected at most 8 (the number of tokens), got 9 at index 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_names_the_argument(case: str) -> None:
    changed, error, text = BAD[case]
    arguments: dict[str, Any] = {"entropy": X, "top_quantile": 0.2} | changed
    with pytest.raises(error, match="^" + re.escape(text)):
        rk.entropy_mask(**arguments)


def test_a_fake_tensor_says_shapes_and_errors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert rk.entropy_mask(torch.zeros(3, 5), top_quantile=0.2).shape == (3, 5)
        with pytest.raises(TypeError, match="entropy: expected dtype float32"):
            rk.entropy_mask(torch.zeros(3, 5).half(), top_quantile=0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("top_quantile", QUANTILES)
def test_cpu_and_cuda_have_the_same_bytes(top_quantile: float) -> None:
    for rows, columns in ((1, 1), (5, 37), (300, 64), (33, 2048), (3, 20000), (5000, 7)):
        for steps in (0, 4):
            h, mask = map(torch.from_numpy, batch(rows, columns, 11, steps))
            want = rk.entropy_mask(h, mask, top_quantile=top_quantile)
            assert same(rk.entropy_mask(h.cuda(), mask.cuda(), top_quantile=top_quantile).cpu(), want)


@pytest.mark.gpu
def test_a_cuda_graph_replays_without_a_synchronisation() -> None:
    h, mask = (torch.from_numpy(x).cuda() for x in batch(64, 512))
    graph, got = captured(lambda: (rk.entropy_mask(h, mask, top_quantile=0.2),))
    h.copy_(h.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert same(got[0].cpu(), rk.entropy_mask(h, mask, top_quantile=0.2).cpu())
