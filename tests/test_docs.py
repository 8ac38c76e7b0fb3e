"""The code in README.md, docs/linear.md and docs/objectives.md runs, and does what the text around it says."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

import rl_kernel_native as rk
from cases import differing

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent


def run_code_of(page: str) -> dict[str, Any]:
    """The names that its Python defines."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S):
        exec(compile(block, page, "exec"), names)
    return names


def test_the_readme_runs() -> None:
    assert "rk" in run_code_of("README.md")


def test_the_page_on_objectives_runs() -> None:
    names = run_code_of("docs/objectives.md")
    assert names["logprob"].grad.abs().sum() > 0
    assert 0 <= float(names["clipped"]) <= 1


def test_a_layer_of_the_docs_takes_main_grad() -> None:
    layer = run_code_of("docs/linear.md")["Linear"](64, 8)
    x = torch.randn(5, 64)
    layer.weight.main_grad = torch.zeros(8, 64)
    y = layer(x)
    y.backward(torch.ones_like(y))
    assert layer.weight.grad is None
    assert not differing(layer.weight.main_grad, rk.linear_weight_grad(torch.ones(5, 8), x))
    with torch.no_grad():
        layer.weight.requires_grad_(False)
        assert not differing(layer(x), y)


def test_a_head_of_the_docs_has_gradients_that_no_split_changes() -> None:
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(6, 32, generator=generator), torch.randint(0, 40, (6,), generator=generator)
    mask, found = torch.arange(6) != 4, []
    layer = run_code_of("docs/linear.md")["Head"](32, 40)
    for cuts in ((slice(0, 6),), (slice(0, 2), slice(2, 6))):
        leaf = x.clone().requires_grad_()
        for rows in cuts:
            layer(leaf[rows], target[rows], mask[rows], 5).backward()
        found.append(leaf.grad)
    assert not differing(*found)
    assert found[0].any(-1).tolist() == mask.tolist()


def on_a_rank(rank: int, ranks: int, port: int, k_segments: int) -> None:
    """A row-parallel layer of the docs next to the same layer on one rank."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, dy = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((7, 128), (24, 128), (24,), (7, 24))
    )
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    want = rk.linear(*whole, k_segments=k_segments)
    want.backward(dy)
    width = 128 // ranks
    columns = slice(rank * width, (rank + 1) * width)
    for main_grad in (None, torch.zeros(24, width)):
        layer = run_code_of("docs/linear.md")["RowParallelLinear"](weight[:, columns].clone(), bias.clone(), k_segments)
        if main_grad is not None:
            layer.weight.main_grad = main_grad
        shard = x[:, columns].clone().requires_grad_()
        y = layer(shard)
        y.backward(dy)
        assert not differing(y, want)
        assert not differing(shard.grad, whole[0].grad[:, columns])
        assert not differing(layer.bias.grad, whole[2].grad)
        if main_grad is None:
            assert not differing(layer.weight.grad, whole[1].grad[:, columns])
        else:
            assert layer.weight.grad is None
            assert not differing(main_grad.bfloat16(), whole[1].grad[:, columns])
    dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "k_segments"), [(2, 2), (2, 8)])
def test_a_row_parallel_layer_of_the_docs_has_the_bytes_of_one_rank(ranks: int, k_segments: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(on_a_rank, (ranks, port, k_segments), nprocs=ranks)
