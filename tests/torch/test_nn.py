"""rk.nn: torch's modules on this library's operators, with torch's checkpoints and main_grad."""

from __future__ import annotations

import doctest
import io
from typing import Any

import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch")


def pair(ours: Any, theirs: Any) -> tuple[Any, Any]:
    """Loads the weights of `theirs` into `ours` through a state dict, and returns both."""
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def test_linear_takes_torchs_checkpoint_and_gives_its_values() -> None:
    ours, theirs = pair(rk.nn.Linear(24, 8), torch.nn.Linear(24, 8))
    x = torch.randn(5, 24, requires_grad=True)
    torch.testing.assert_close(ours(x), theirs(x))
    assert torch.equal(ours(x)[1:2], ours(x[1:2]))
    ours(x).sum().backward()
    theirs(x.detach()).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad)


def test_main_grad_takes_the_gradient_of_the_weight() -> None:
    layer, x = rk.nn.Linear(16, 4, bias=False), torch.randn(3, 16)
    layer(x).sum().backward()
    want = layer.weight.grad
    layer.weight.grad, layer.weight.main_grad = None, torch.zeros(4, 16)
    layer(x).sum().backward()
    assert torch.equal(layer.weight.main_grad, want)


def test_embedding_takes_torchs_checkpoint_and_refuses_what_it_lacks() -> None:
    ours, theirs = pair(rk.nn.Embedding(10, 4, padding_idx=1), torch.nn.Embedding(10, 4, padding_idx=1))
    ids = torch.tensor([[1, 2], [9, 2]])
    assert torch.equal(ours(ids), theirs(ids))
    ours(ids).sum().backward()
    theirs(ids).sum().backward()
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: expected"):
            rk.nn.Embedding(10, 4, **options)


def test_rms_norm_adds_a_residual_in_its_pass() -> None:
    ours, theirs = pair(rk.nn.RMSNorm(32), torch.nn.RMSNorm(32, eps=1e-6))
    x, residual = torch.randn(3, 32), torch.randn(3, 32)
    torch.testing.assert_close(ours(x), theirs(x))
    y, total = ours(x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(y, theirs(x + residual))
    gemma = rk.nn.RMSNorm(32, weight_offset=1.0)
    assert not gemma.weight.any(), "stored less 1"
    torch.testing.assert_close(gemma(x), theirs(x))


def test_a_head_scores_without_logits() -> None:
    head, theirs = pair(rk.nn.LinearLogprob(16, 50), torch.nn.Linear(16, 50, bias=False))
    hidden, target = torch.randn(6, 16), torch.arange(6)
    want = torch.log_softmax(theirs(hidden) / 0.7, -1)[range(6), range(6)]
    torch.testing.assert_close(head(hidden, target, temperature=0.7), want)


@pytest.mark.parametrize("name", ["Linear", "Embedding", "RMSNorm", "LinearLogprob"])
def test_the_example_of_a_module(name: str) -> None:
    said, runner = io.StringIO(), doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    text = getattr(rk.nn, name).__doc__
    runner.run(doctest.DocTestParser().get_doctest(text, {"torch": torch, "rk": rk}, name, name, 0), out=said.write)
    assert runner.tries > 0
    assert not said.getvalue()
