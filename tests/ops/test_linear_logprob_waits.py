"""Blocks of linear_logprob wait for each other, but not for long: next to other work the calls end, with
their usual bytes."""

from __future__ import annotations

from typing import Any

import pytest

import rl_kernel_native as rk
from cases import differing

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

ROWS, FEATURES, VOCAB = 2048, 64, 40000  # every block has several stretches of the vocabulary and waits after each
CALLS = 30


def test_calls_of_two_streams_beside_a_product() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(VOCAB, FEATURES, generator=generator, device="cuda").bfloat16()
    target = torch.randint(0, VOCAB, (ROWS,), generator=generator, device="cuda")
    hidden = [torch.randn(ROWS, FEATURES, generator=generator, device="cuda").bfloat16() for _ in range(2)]
    square = torch.randn(4096, 4096, generator=generator, device="cuda").bfloat16()
    want = [rk.linear_logprob(x, weight, target) for x in hidden]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    found: list[list[Any]] = [[], []]
    for _ in range(CALLS):
        with torch.cuda.stream(streams[2]):
            square @ square
        for x, stream, results in zip(hidden, streams, found, strict=False):
            with torch.cuda.stream(stream):
                results.append(rk.linear_logprob(x, weight, target))
    torch.cuda.synchronize()
    for results, one in zip(found, want, strict=True):
        for result in results:
            assert not differing(result, one)
