"""kv_cache_append: the reference's bytes in every engine's layout, attention on these caches, and users' errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk

torch = pytest.importorskip("torch")

PAGES, PAGE, HEADS, COLUMNS = 9, 16, 2, 64

# Layouts of vLLM 0.26 and the plain layout. Each layout is an array with k_cache and v_cache as its views.
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Any], tuple[Any, Any]]]] = {
    "NHD, halves of pages": ((PAGES, 2, PAGE, HEADS, COLUMNS), lambda c: (c[:, 0], c[:, 1])),
    "HND, halves of pages": (
        (PAGES, 2, HEADS, PAGE, COLUMNS),
        lambda c: (c[:, 0].transpose(1, 2), c[:, 1].transpose(1, 2)),
    ),
    "NHD, halves of the cache": ((2, PAGES, PAGE, HEADS, COLUMNS), lambda c: (c[0], c[1])),
    "NHD, K|V": ((PAGES, PAGE, HEADS, 2 * COLUMNS), lambda c: (c[..., :COLUMNS], c[..., COLUMNS:])),
    "HND, K|V": (
        (PAGES, HEADS, PAGE, 2 * COLUMNS),
        lambda c: (c.transpose(1, 2)[..., :COLUMNS], c.transpose(1, 2)[..., COLUMNS:]),
    ),
    "slots": ((2, PAGES * PAGE, HEADS, COLUMNS), lambda c: (c[0], c[1])),
}


def tokens(count: int, device: str, dtype: Any, seed: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, HEADS, COLUMNS, generator=generator).to(dtype).to(device) for _ in range(2))


def some_slots(count: int, device: str, dtype: Any = torch.int64) -> Any:
    slots = torch.randperm(PAGES * PAGE, generator=torch.Generator().manual_seed(1))[:count]
    slots[::5] = -1
    return slots.to(dtype).to(device)


def bits(tensor: Any) -> np.ndarray:
    """The bits of any dtype, as NumPy integers."""
    kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return np.array(tensor.cpu().contiguous().view(kind).numpy())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_layout_has_the_bytes_of_the_reference(layout: str, dtype: Any, device: str) -> None:
    shape, views = LAYOUTS[layout]
    cache = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
    k, v = tokens(50, device, dtype)
    for slot_dtype in (torch.int32, torch.int64):
        slots = some_slots(50, device, slot_dtype)
        before = [torch.from_numpy(bits(c)) for c in views(cache)]
        assert rk.kv_cache_append(k, v, *views(cache), slots) is None
        want = rk.kv_cache_append_reference(bits(k), bits(v), *before, slots.cpu())
        for got, expected in zip(views(cache), want, strict=True):
            assert bits(got).tobytes() == expected.tobytes()


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "slots"])
def test_attention_reads_the_pages_of_every_layout(layout: str, device: str) -> None:
    """Queries that read tokens appended in three calls get the bytes of attention over the keys and values
    themselves."""
    shape, views = LAYOUTS[layout]
    cache = torch.full(shape, float("nan"), device=device).bfloat16()
    k, v = tokens(40, device, torch.bfloat16)
    q = torch.randn(40, 4, COLUMNS, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    pages = torch.tensor([7, 2, 5], device=device)
    position = torch.arange(40, device=device)
    slots = pages[position // PAGE] * PAGE + position % PAGE
    for part in (slice(0, 20), slice(20, 21), slice(21, 40)):
        rk.kv_cache_append(k[part], v[part], *views(cache), slots[part])
    used = torch.tensor([40], dtype=torch.int32, device=device)
    got = rk.attention(q[None, 25:], *views(cache), block_table=pages[None].int(), seqused_k=used, exp="portable")
    want = rk.attention(q[None, 25:], k[None], v[None], exp="portable")
    assert torch.equal(got, want)


def test_strided_tokens_and_tokens_without_a_slot(device: str) -> None:
    """k and v lie as in the output of a merged projection, with padding after the last slot."""
    qkv = torch.randn(12, 4 * HEADS * COLUMNS, generator=torch.Generator().manual_seed(4)).bfloat16().to(device)
    k, v = (qkv[:, i * HEADS * COLUMNS : (i + 1) * HEADS * COLUMNS].view(12, HEADS, COLUMNS) for i in (2, 3))
    cache = torch.zeros(PAGES, PAGE, HEADS, 2 * COLUMNS, dtype=torch.bfloat16, device=device)
    slots = torch.arange(7, device=device)
    rk.kv_cache_append(k, v, cache[..., :COLUMNS], cache[..., COLUMNS:], slots)
    assert torch.equal(cache[0, :7], torch.cat([k, v], -1)[:7])
    assert not cache[0, 7:].any()
    assert not cache[1:].any()


def test_numpy_and_torch_have_the_same_bytes() -> None:
    k, v = (t.numpy() for t in tokens(20, "cpu", torch.float16))
    slots = some_slots(20, "cpu").numpy()
    caches = [np.zeros((PAGES, PAGE, HEADS, COLUMNS), np.float16) for _ in range(2)]
    want = rk.kv_cache_append_reference(k, v, *caches, slots)
    rk.kv_cache_append(k, v, *caches, slots)
    for got, expected in zip(caches, want, strict=True):
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str, device: str) -> None:
    k, v = tokens(6, device, torch.bfloat16)
    slots = some_slots(6, device)

    def f(k: Any, v: Any, cache: Any, slots: Any) -> Any:
        rk.kv_cache_append(k, v + 1, cache[0], cache[1], slots)
        return cache.sum()

    caches = [torch.zeros(2, PAGES, PAGE, HEADS, COLUMNS, dtype=torch.bfloat16, device=device) for _ in range(2)]
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(f, backend=backend, fullgraph=True)(k, v, caches[0], slots)
        assert torch.equal(got, f(k, v, caches[1], slots))
    assert torch.equal(*caches)
    assert caches[0].any()


def test_opcheck(device: str) -> None:
    rk._call.load()

    k, v = tokens(6, device, torch.float32)
    caches = [torch.zeros(PAGES, PAGE, HEADS, COLUMNS, device=device) for _ in range(2)]
    torch.library.opcheck(
        torch.ops.rl_kernel_native.kv_cache_append, (k, v, *caches, some_slots(6, device)),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
    )  # fmt: skip


def test_autograd_learns_of_the_write(device: str) -> None:
    k, v = tokens(6, device, torch.float32)
    cache = torch.zeros(2, PAGES, PAGE, HEADS, COLUMNS, device=device)
    x = torch.ones(1, device=device, requires_grad=True)
    loss = (x * cache).sum()
    rk.kv_cache_append(k, v, cache[0], cache[1], some_slots(6, device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(ValueError, match="k: requires a gradient, which a cache does not keep"):
        rk.kv_cache_append(k.requires_grad_(), v, cache[0], cache[1], some_slots(6, device))


def bad_calls() -> dict[str, Callable[[], Any]]:
    k, v = tokens(6, "cpu", torch.bfloat16)
    cache = torch.zeros(2, PAGES, PAGE, HEADS, COLUMNS, dtype=torch.bfloat16)
    slots = torch.arange(6)
    append = rk.kv_cache_append
    return {
        "k: expected dtype float32, bfloat16 or float16, got int64": lambda: append(k.long(), v, *cache, slots),
        r"k: expected shape \[num_tokens, num_heads, columns\], got \[6, 128\]": lambda: append(
            k.flatten(1), v, *cache, slots
        ),
        r"k: expected a contiguous last dimension \(stride 1\), got stride 2": lambda: append(
            k[..., ::2], v, *cache, slots
        ),
        r"v: expected dtype bfloat16 \(that of k\), got float16": lambda: append(k, v.half(), *cache, slots),
        r"v: expected shape \[6, 2, columns\] \(tokens and heads of k\), got \[5, 2, 64\]": lambda: append(
            k, v[1:], *cache, slots
        ),
        "k_cache: expected dtype float32, bfloat16 or float16, got float8_e4m3fn": lambda: append(
            k, v, *cache.to(torch.float8_e4m3fn), slots
        ),
        r"k_cache: expected dtype bfloat16 \(that of k\), got float32": lambda: append(k, v, *cache.float(), slots),
        r"k_cache: expected shape \[num_pages, page_size, 2, 64\] or \[num_slots, 2, 64\] \(heads and columns of k\), "
        r"got \[9, 2, 16, 64\]": lambda: append(k, v, *cache.transpose(2, 3), slots),
        r"v_cache: expected as many slots, in the same pages, as k_cache of shape \[9, 16, 2, 64\], got "
        r"\[8, 16, 2, 64\]": lambda: append(k, v, cache[0], cache[1, 1:], slots),
        "v_cache: expected memory other than k_cache's": lambda: append(k, v, cache[0], cache[0], slots),
        "v_cache: expected memory other than k_cache's.*": lambda: append(k, v, cache[0, 1:], cache[0, :-1], slots),
        ".*v_cache: expected memory other than k_cache's": lambda: append(
            k, v, cache[0], cache.view(-1)[8:][: cache[0].numel()].view(cache[0].shape), slots
        ),
        "k_cache: expected strides that do not overlap": lambda: append(
            k, v, cache[0, :1].expand(9, -1, -1, -1), cache[1], slots
        ),
        "k_cache: may share memory with k": lambda: append(cache[0, 0, :6], v, *cache, slots),
        "slot_mapping: expected dtype int32 or int64, got float32": lambda: append(k, v, *cache, slots.float()),
        r"slot_mapping: expected a contiguous array of at most 6 slots \(the tokens of k\), got shape \[7\]": (
            lambda: append(k, v, *cache, torch.arange(7))
        ),
        r"slot_mapping: expected -1 or a slot in \[0, 144\) \(pages \* page_size of the cache\), got 144 at index 5": (
            lambda: append(k, v, *cache, slots + 139)
        ),
        r"slot_mapping: expected -1 or a slot in \[0, 144\) .*, got -2 at index 0": lambda: append(
            k, v, *cache, slots - 2
        ),
    }


@pytest.mark.parametrize("message", bad_calls())
def test_bad_input(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        bad_calls()[message]()


def test_a_read_only_cache() -> None:
    k, v = (t.numpy() for t in tokens(2, "cpu", torch.float32))
    caches = [np.zeros((PAGES, PAGE, HEADS, COLUMNS), np.float32) for _ in range(2)]
    caches[1].setflags(write=False)
    with pytest.raises(BufferError, match="v_cache: is read-only"):
        rk.kv_cache_append(k, v, *caches, np.arange(2))


@pytest.mark.gpu
def test_slots_that_are_none_write_nothing_on_a_gpu() -> None:
    k, v = tokens(4, "cuda", torch.bfloat16)
    cache = torch.zeros(2, PAGES, PAGE, HEADS, COLUMNS, dtype=torch.bfloat16, device="cuda")
    rk.kv_cache_append(k, v, *cache, torch.tensor([-2, 144, 1 << 40, -(1 << 62)], device="cuda"))
    assert not cache.any()


@pytest.mark.gpu
def test_a_graph_replays_with_other_slots() -> None:
    k, v = tokens(4, "cuda", torch.bfloat16)
    cache = torch.zeros(2, PAGES, PAGE, HEADS, COLUMNS, dtype=torch.bfloat16, device="cuda")
    slots = torch.full((4,), -1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rk.kv_cache_append(k, v, *cache, slots)
    slots.copy_(torch.tensor([3, 17, -1, 143]))
    graph.replay()
    flat = cache.view(2, PAGES * PAGE, HEADS, COLUMNS)
    assert torch.equal(flat[0, [3, 17, 143]], k[[0, 1, 3]])
    assert torch.equal(flat[1, [3, 17, 143]], v[[0, 1, 3]])
    assert int((flat != 0).any(-1).any(-1).sum()) == 6
