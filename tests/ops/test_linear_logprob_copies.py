"""linear_logprob of hidden states that a fused forward first copies, since they have two strides or unaligned rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rl_kernel_native as rk
from cases import differing

torch = pytest.importorskip("torch")

SEQUENCES, LENGTH, HIDDEN, VOCAB = 3, 70, 72, 1000
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"return_lse": True},
    "moments": {"return_entropy": True, "return_sum_p_sq": True, "exp": "portable"},
    "general": {"temperature": 0.7, "softcap": 11.0, "logits_dtype": torch.bfloat16, "return_status": True},
}


def sliced(hidden: Any) -> Any:
    """hidden[:, :-1] of sequences with one token more."""
    padded = torch.full((hidden.shape[0], hidden.shape[1] + 1, hidden.shape[2]), float("nan")).to(hidden)
    padded[:, :-1] = hidden
    return padded[:, :-1]


def off_16_bytes(hidden: Any) -> Any:
    memory = torch.empty(hidden.numel() + 1, dtype=hidden.dtype, device=hidden.device)
    memory[1:] = hidden.reshape(-1)
    return memory[1:].view(hidden.shape)


LAYOUTS: dict[str, Callable[[Any], Any]] = {"sliced": sliced, "off 16 bytes": off_16_bytes}


def head(device: str) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(SEQUENCES, LENGTH, HIDDEN, generator=generator).bfloat16()
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) / HIDDEN**0.5).bfloat16()
    target = torch.randint(0, VOCAB, (SEQUENCES, LENGTH), generator=generator)
    target[1, 5:60] = -100
    return hidden.to(device), weight.to(device), target.to(device)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_has_the_bits_of_plain_rows(layout: str, options: str, device: str) -> None:
    hidden, weight, target = head(device)
    want = rk.linear_logprob(hidden, weight, target, **OPTIONS[options])
    hidden[1, 5:60] = float("nan")  # ignored, so never read
    assert not differing(tuple(rk.linear_logprob(LAYOUTS[layout](hidden), weight, target, **OPTIONS[options])), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_has_the_bits_of_plain_rows_with_lora(layout: str, device: str) -> None:
    hidden, weight, target = head(device)
    generator = torch.Generator().manual_seed(1)
    lora = {
        "lora_a": torch.randn(16, HIDDEN, generator=generator).to(device, torch.bfloat16),
        "lora_b": torch.randn(VOCAB, 16, generator=generator).to(device, torch.bfloat16),
        "lora_scale": 0.25,
    }
    want = rk.linear_logprob(hidden, weight, target, **lora)
    assert not differing(rk.linear_logprob(LAYOUTS[layout](hidden), weight, target, **lora), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_takes_the_least_workspace_that_it_names(layout: str, device: str) -> None:
    hidden, weight, target = head(device)
    want = rk.linear_logprob(hidden, weight, target)
    other = LAYOUTS[layout](hidden)
    with pytest.raises(ValueError, match="workspace_bytes: expected at least") as refused:
        rk.linear_logprob(other, weight, target, workspace_bytes=1)
    least = int(str(refused.value).split("at least ")[1].split(" ")[0])
    for workspace in (least, least + (64 << 10), 2 * least):
        assert not differing(rk.linear_logprob(other, weight, target, workspace_bytes=workspace), want)
    with pytest.raises(ValueError, match=f"expected at least {least}"):
        rk.linear_logprob(other, weight, target, workspace_bytes=least - 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_have_the_bits_of_plain_rows(layout: str, device: str) -> None:
    hidden, weight, target = head(device)
    gradients = []
    for x in (hidden, LAYOUTS[layout](hidden)):
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
        rk.linear_logprob(*leaves, target).nan_to_num(0.0).sum().backward()
        gradients.append(tuple(t.grad.contiguous() for t in leaves))
    assert not differing(*gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_takes_the_memory_of_copies_and_no_logits(layout: str) -> None:
    rows, features, columns = 4096, 512, 60_000
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(4, rows // 4, features, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(columns, features, generator=generator, device="cuda").bfloat16()
    target = torch.randint(0, columns, hidden.shape[:-1], generator=generator, device="cuda")
    rk.workspace_stats(reset=True)
    rk.linear_logprob(hidden, weight, target)
    of_plain = rk.workspace_stats()["cuda:0"].last_bytes
    rk.linear_logprob(LAYOUTS[layout](hidden), weight, target)
    assert rk.workspace_stats()["cuda:0"].last_bytes == of_plain + rows * features * 2
