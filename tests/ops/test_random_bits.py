"""random_bits: known answers, the reference's words in every layout and batch, independence, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from rl_kernel_native.reference.random_bits import philox4x32

# Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(low: int, high: int) -> int:
    bits = low | high << 32
    return bits - (1 << 64) if bits >> 63 else bits


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers_of_the_paper(counter: Any, key: Any, words: Any, device: str) -> None:
    assert philox4x32(counter, key) == words
    sample_id = torch.tensor([signed(*counter[:2])], device=device)
    stream, block = divmod(counter[3], 256)
    got = rk.random_bits(signed(*key), sample_id, counter[2], 4 * block + 4, stream=stream)
    assert tuple(got[0, -4:].tolist()) == words


def test_words_are_the_references(device: str, rng: np.random.Generator) -> None:
    wide = rng.integers(-(1 << 63), 1 << 63, (3, 40), dtype=np.int64)
    position = rng.integers(0, 1 << 32, 40)
    position[[3, 7]] = -1, 1 << 32  # out of range, so the row's words are -1
    for n in (1, 2, 3, 4, 5, 1023, 1024):  # parts of a block; the last block of a stream
        got = rk.random_bits(*(torch.from_numpy(x).to(device) for x in (wide[0], wide[1], position)), n, stream=3)
        assert got.dtype == torch.int64
        want = rk.random_bits_reference(wide[0], wide[1], position, n, stream=3)
        np.testing.assert_array_equal(got.cpu().numpy(), want)
        assert (want[[3, 7]] == -1).all()
        assert (np.delete(want, [3, 7], 0) >= 0).all()


def test_a_row_has_its_words_anywhere(device: str, rng: np.random.Generator) -> None:
    ids, seeds, at = (torch.from_numpy(rng.integers(0, 1 << 31, 64)).to(device) for _ in range(3))
    want = rk.random_bits(seeds, ids, at, 5)
    order = torch.from_numpy(rng.permutation(64)).to(device)
    assert torch.equal(rk.random_bits(seeds[order], ids[order], at[order], 5), want[order])
    assert torch.equal(
        torch.cat([rk.random_bits(seeds[i : i + 1], ids[i : i + 1], at[i : i + 1], 5) for i in range(64)]), want
    )
    strided = [torch.stack([x, -x], 1)[:, 0] for x in (seeds, ids, at)]
    assert torch.equal(rk.random_bits(*strided, 5), want)
    assert torch.equal(rk.random_bits(seeds.int(), ids.int(), at.int(), 5), want)  # all values fit 31 bits
    assert torch.equal(
        rk.random_bits(9, ids, 4, 5), rk.random_bits(torch.full_like(ids, 9), ids, torch.full_like(ids, 4), 5)
    )
    assert torch.equal(rk.random_bits(seeds[:1].expand(64), ids, at, 5)[0], want[0])
    assert rk.random_bits(1, ids[:0], 0, 5).shape == (0, 5)


def test_seeds_count_by_their_bits() -> None:
    ids = np.arange(3)
    np.testing.assert_array_equal(rk.random_bits((1 << 64) - 5, ids, 0, 4), rk.random_bits(-5, ids, 0, 4))
    assert (rk.random_bits(5, ids, 0, 4) != rk.random_bits(-5, ids, 0, 4)).all()
    assert (rk.random_bits(5, ids, 0, 4) != rk.random_bits(5 + (1 << 32), ids, 0, 4)).all()


def chi_square(counts: np.ndarray) -> float:
    """Distance of chi-square from its mean in standard deviations, for counts of equal expectation."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("vary", ["sample_id", "position", "seed", "word", "stream"])
def test_words_are_uniform_and_independent(vary: str) -> None:
    """A million words for each; pairs are neighbours in one coordinate. Five deviations are rare, and the words are the
    same in every run."""
    n = 1 << 18
    ids, rows = np.arange(n), np.zeros(n, np.int64)
    if vary == "word":
        words = rk.random_bits(3, ids[: n // 256], 0, 1024).reshape(-1)
    elif vary == "stream":
        words = np.concatenate([rk.random_bits(3, np.arange(1 << 12), 5, 4, stream=s)[:, 0] for s in range(256)])
    else:
        keys = {"seed": rows + 3, "sample_id": rows + 11, "position": rows} | {vary: ids}
        words = rk.random_bits(keys["seed"], keys["sample_id"], keys["position"], 4).T.reshape(-1)
    for shift in (0, 12, 24):  # each third of a word
        assert abs(chi_square(np.bincount((words >> shift) & 255, minlength=256))) < 5
    assert abs(chi_square(np.bincount(((words[1:] >> 24) << 8) | (words[:-1] >> 24), minlength=1 << 16))) < 5
    ones = (((words[1:] ^ words[:-1])[:, None] >> np.arange(32)) & 1).mean(0)  # a bit compared with its neighbour's
    assert (np.abs(ones - 0.5) * 2 * np.sqrt(words.size) < 5.5).all()  # 32 such frequencies


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str, device: str) -> None:
    ids = torch.arange(9, device=device)
    torch.compiler.reset()
    f = torch.compile(
        lambda i, at: (rk.random_bits(5, i, at, 3), rk.random_bits(i, i, 7, 3)), backend=backend, fullgraph=True
    )
    for at in (0, 1, 7):
        assert torch.equal(f(ids, at)[0], rk.random_bits(5, ids, at, 3))
        assert torch.equal(f(ids, at)[1], rk.random_bits(ids, ids, 7, 3))


def test_opcheck(device: str) -> None:
    rk._call.load()

    ids = torch.arange(9, device=device)
    torch.library.opcheck(torch.ops.rl_kernel_native.random_bits, (ids, None, 5, ids, 0, 3, 1))


def test_bad_input() -> None:
    ids = torch.arange(5)
    for message, call in {
        "sample_id: expected dtype int32 or int64, got float32": lambda: rk.random_bits(1, ids.float(), 0, 4),
        r"sample_id: expected shape \[num_rows\], got \[5, 1\]": lambda: rk.random_bits(1, ids[:, None], 0, 4),
        "sample_id: expected an array that speaks DLPack, got int": lambda: rk.random_bits(1, 3, 0, 4),
        r"seed: expected shape \[5\], got \[4\]": lambda: rk.random_bits(ids[:4], ids, 0, 4),
        "seed: expected an integer of 64 bits, got one of 65 bits": lambda: rk.random_bits(1 << 64, ids, 0, 4),
        "seed: expected an integer or an array of them, got NoneType": lambda: rk.random_bits(None, ids, 0, 4),
        "seed: expected an integer, got float": lambda: rk.random_bits(1.5, ids, 0, 4),
        r"position: expected an integer in \[0, 2\^32\), got -1": lambda: rk.random_bits(1, ids, -1, 4),
        "position: expected dtype int32 or int64, got bool": lambda: rk.random_bits(1, ids, ids > 2, 4),
        "n: expected 1 to 1024 words, got 0": lambda: rk.random_bits(1, ids, 0, 0),
        "n: expected 1 to 1024 words, got 1025": lambda: rk.random_bits(1, ids, 0, 1025),
        r"stream: expected an integer in \[0, 2\^24\), got 16777216": lambda: rk.random_bits(
            1, ids, 0, 4, stream=1 << 24
        ),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()
