"""pack and unpack: the references' bytes for any dtype and layout, gradients, torch's transforms, and users' errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing

torch = pytest.importorskip("torch")

ROWS, COLUMNS = 6, 23
DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
    "complex128",
)  # fmt: skip


def random(rng: np.random.Generator, dtype: str, *shape: int, device: str = "cpu") -> Any:
    """Random bytes, NaNs of every kind included."""
    kind = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=kind, device=device)
    raw = torch.from_numpy(rng.integers(0, 256, (*shape, kind.itemsize)).astype(np.uint8)).to(device)
    return raw[..., 0] > 127 if dtype == "bool" else raw.view(kind)[..., 0]


def kept_tokens(rng: np.random.Generator, device: str = "cpu") -> tuple[Any, Any]:
    """Lengths, one of them 0 and one full, and a mask with holes."""
    lengths = torch.tensor([COLUMNS, 0, 1, 7, 20, 5], device=device)
    return lengths, torch.from_numpy(rng.random((ROWS, COLUMNS)) < 0.6).to(device)


def raw(x: Any) -> bytes:
    x = x.contiguous().cpu()
    return x.view(torch.uint8).numpy().tobytes() if x.numel() else b""


@pytest.mark.parametrize("trailing", [(), (3,), (2, 8), (0,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_of_every_dtype(dtype: str, trailing: tuple[int, ...], device: str, rng: np.random.Generator) -> None:
    x = random(rng, dtype, ROWS, COLUMNS, *trailing, device=device)
    lengths, mask = kept_tokens(rng, device)
    by_length = torch.arange(COLUMNS, device=device)[None] < lengths[:, None]
    for how, kept in (
        ({"lengths": lengths}, by_length),
        ({"lengths": lengths.int()}, by_length),
        ({"mask": mask}, mask),
    ):
        total = int(kept.sum())
        got = rk.pack(x, **how, max_tokens=total + 4)
        assert raw(got.tensors[:total]) == raw(x[kept])
        assert raw(got.tensors[total:]) == raw(torch.zeros_like(got.tensors[total:]))
        assert got.cu_seqlens.tolist() == [0, *kept.sum(1).cumsum(0).tolist()]
        assert got.status.tolist() == [0]
        back = rk.unpack(got.tensors, got.cu_seqlens, COLUMNS, positions=got.positions)
        empty = torch.zeros_like(x)
        where = kept.view(ROWS, COLUMNS, *(1 for _ in trailing)).expand(x.shape)
        want = x.clone()
        want[~where] = empty[~where]
        assert raw(back) == raw(want)


def test_without_a_bound_there_is_room_for_all(device: str, rng: np.random.Generator) -> None:
    x = random(rng, "float32", ROWS, COLUMNS, device=device)
    got = rk.pack(x, lengths=kept_tokens(rng, device)[0])
    assert got.tensors.shape == (ROWS * COLUMNS,)
    assert got.positions is None


@pytest.mark.parametrize("count", [1, 3, 8, 19])
def test_any_number_of_arrays_of_one_layout(count: int, device: str, rng: np.random.Generator) -> None:
    arrays = [random(rng, DTYPES[i % 10], ROWS, COLUMNS, *(() if i % 2 else (i,)), device=device) for i in range(count)]
    mask = kept_tokens(rng, device)[1]
    for options in ({}, {"requires_grad": True}):
        given = [a.float().nan_to_num().requires_grad_() if options else a for a in arrays]
        got = rk.pack(given, mask=mask)
        for a, b in zip(given, got.tensors, strict=True):
            assert raw(rk.pack(a, mask=mask).tensors) == raw(b)
        back = rk.unpack(got.tensors, got.cu_seqlens, COLUMNS, positions=got.positions)
        assert isinstance(back, list)
        for a, b in zip(given, back, strict=True):
            assert raw(a[mask]) == raw(b[mask])


def test_strided_arrays_and_fill_values(device: str, rng: np.random.Generator) -> None:
    lengths, mask = kept_tokens(rng, device)
    wide = random(rng, "int64", ROWS + 1, 2 * COLUMNS, 5, device=device)
    for x in (
        wide[1:, :COLUMNS, 1:4],
        wide[1:, ::2],
        wide[1:, 1::2, 2:],
        wide[:-1, :COLUMNS].transpose(0, 1).contiguous().transpose(0, 1),
    ):
        for how in ({"lengths": lengths}, {"mask": mask}):
            got, want = rk.pack(x, **how, fill_value=-100), rk.pack(x.contiguous(), **how, fill_value=-100)
            assert raw(got.tensors) == raw(want.tensors)
            numpy = rk.pack_reference(x.cpu(), **{k: v.cpu() for k, v in how.items()}, fill_value=-100)
            assert raw(got.tensors) == numpy["packed"].tobytes()
            back = rk.unpack(got.tensors, got.cu_seqlens, COLUMNS + 2, fill_value=7)
            reference = rk.unpack_reference(numpy["packed"], numpy["cu_seqlens"], COLUMNS + 2, fill_value=7)
            assert raw(back) == reference.tobytes()
    half = rk.pack(torch.zeros(2, 3, dtype=torch.bfloat16, device=device), lengths=lengths[1:3], fill_value=1.5)
    assert half.tensors.tolist() == [0.0, 1.5, 1.5, 1.5, 1.5, 1.5]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int64", 2**62 + 1), ("int64", 2**63 - 1), ("int64", -(2**63)), ("int64", 2**53 + 1), ("uint8", 255),
     ("float16", -0.0), ("bfloat16", -0.0), ("float32", -0.0), ("float64", -0.0), ("float16", 65504),
     ("float16", float("inf")), ("float32", float("nan")), ("complex64", 1.5), ("bool", 1)],
)  # fmt: skip
def test_a_fill_value_is_the_dtypes_own(dtype: str, value: Any, device: str) -> None:
    kind = getattr(torch, dtype)
    x, lengths = torch.zeros(2, 3, dtype=kind, device=device), torch.tensor([0, 2], device=device)
    want = raw(torch.cat([torch.zeros(2, dtype=kind), torch.full((4,), value, dtype=kind)]))

    def packed(x: Any) -> Any:
        return rk.pack(x, lengths, fill_value=value).tensors

    assert raw(packed(x)) == want
    torch.compiler.reset()
    assert raw(torch.compile(packed, fullgraph=True, backend="eager")(x)) == want
    if dtype != "bfloat16":  # NumPy has no bfloat16
        number = np.int64(value) if dtype == "int64" else value
        assert rk.pack(x.cpu().numpy(), lengths.cpu().numpy(), fill_value=number).tensors.tobytes() == want
    back = rk.unpack(x[0], torch.tensor([0, 3], device=device), 4, fill_value=value)
    assert raw(back[0, 3:]) == want[-kind.itemsize :]


def test_gradients_of_both(device: str, rng: np.random.Generator) -> None:
    lengths, mask = kept_tokens(rng, device)
    for how in ({"lengths": lengths}, {"mask": mask}):
        x = torch.from_numpy(rng.standard_normal((ROWS, COLUMNS, 3))).to(device).requires_grad_()
        ids = torch.arange(ROWS * COLUMNS, device=device).view(ROWS, COLUMNS)
        got = rk.pack([x, ids, x.detach()], **how)
        weight = torch.from_numpy(rng.standard_normal(got.tensors[0].shape)).to(device)
        (got.tensors[0] * weight).sum().backward()
        kept = mask if "mask" in how else torch.arange(COLUMNS, device=device)[None] < lengths[:, None]
        want = torch.zeros_like(x)
        want[kept] = weight[: int(kept.sum())]
        assert not differing(x.grad, want)
        packed = got.tensors[0].detach().clone().requires_grad_()
        back = rk.unpack(packed, got.cu_seqlens, COLUMNS, positions=got.positions)
        dy = torch.from_numpy(rng.standard_normal(back.shape)).to(device)
        (gradient,) = torch.autograd.grad(back, packed, dy, create_graph=True)
        want = torch.zeros_like(packed)
        want[: int(kept.sum())] = dy[kept]
        assert not differing(gradient.detach(), want)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_requires_no_gradient_gets_none(compiled: bool, device: str, rng: np.random.Generator) -> None:
    """One call may pack constants of a loss together with tensors that need gradients."""
    old = torch.from_numpy(rng.standard_normal((ROWS, COLUMNS))).to(device)
    lengths, mask = kept_tokens(rng, device)

    def f(x: Any) -> Any:
        got = rk.pack([mask, x, old], lengths)
        return *got.tensors, *rk.unpack(got.tensors, got.cu_seqlens, COLUMNS)

    torch.compiler.reset()
    leaf = (old * 2).requires_grad_()
    found = (torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f)(leaf)
    assert [t.requires_grad for t in found] == [False, True, False] * 2
    for got, want in zip(found[:3], (mask, leaf, old), strict=True):
        assert raw(got.detach()) == raw(rk.pack(want.detach(), lengths).tensors)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_and_transformed(backend: str, device: str, rng: np.random.Generator) -> None:
    x = torch.from_numpy(rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)).to(device)
    lengths, mask = kept_tokens(rng, device)

    def f(y: Any) -> Any:
        one = rk.pack([y, y * 2], mask=mask)
        two = rk.pack(y, lengths=lengths, max_tokens=100)
        return rk.unpack(one.tensors[1], two.cu_seqlens, COLUMNS) + rk.unpack(two.tensors, two.cu_seqlens, COLUMNS)

    torch.compiler.reset()
    g = torch.func.grad(lambda y: f(y).square().sum())
    for function in (
        f,
        g,
        lambda y: torch.func.jvp(f, (y,), (y * 2,))[1],
        lambda y: torch.func.vmap(f)(torch.stack([y, y])),
    ):
        got = torch.compile(function, backend=backend, fullgraph=True)(x)
        assert not differing(got, function(x))
        assert bool(got.any())


def test_a_batch_has_the_bytes_of_a_loop(device: str, rng: np.random.Generator) -> None:
    """Tensors, lengths and masks under torch.func.vmap, together and each next to unbatched arrays."""
    x = torch.from_numpy(rng.standard_normal((3, ROWS, COLUMNS))).to(device)
    mask = torch.from_numpy(rng.random((3, ROWS, COLUMNS)) < 0.5).to(device)

    def there_and_back(y: Any, m: Any) -> Any:
        got = rk.pack([y, m], mask=m, fill_value=[3, 0])
        back = rk.unpack(got.tensors[0], got.cu_seqlens, COLUMNS, positions=got.positions)
        return *got.tensors, back, got.cu_seqlens, got.positions, rk.pack(y, m.sum(1)).tensors

    for dims in ((0, 0), (0, None), (None, 0)):
        operands = [a if d == 0 else a[1] for a, d in zip((x, mask), dims, strict=True)]
        got = torch.func.vmap(there_and_back, in_dims=dims)(*operands)
        for i in range(3):
            want = there_and_back(*(a[i] if d == 0 else a for a, d in zip(operands, dims, strict=True)))
            assert not differing(tuple(g[i] for g in got), want)
    assert [tuple(g.shape) for g in torch.func.vmap(there_and_back)(x[:0], mask[:0])] == [
        (0, *g.shape[1:]) for g in torch.func.vmap(there_and_back)(x, mask)
    ]


def test_a_tensor_without_a_tangent_has_one_of_zeros(device: str, rng: np.random.Generator) -> None:
    x = torch.from_numpy(rng.standard_normal((2, ROWS, COLUMNS))).to(device)
    lengths, mask = kept_tokens(rng, device)

    def f(y: Any) -> Any:
        got = rk.pack([x[1], y, mask], lengths)
        return *got.tensors[:2], *rk.unpack([got.tensors[1], x[0].reshape(-1)], got.cu_seqlens, COLUMNS)

    none, packed, unpacked, nor_here = torch.func.jvp(f, (x[0],), (x[1],))[1]
    want = rk.pack(x[1], lengths)
    assert not differing((packed, unpacked), (want.tensors, rk.unpack(want.tensors, want.cu_seqlens, COLUMNS)))
    assert not bool(none.any())
    assert not bool(nor_here.any())


def test_opcheck(device: str, rng: np.random.Generator) -> None:
    rk._call.load()
    ops, check = torch.ops.rl_kernel_native, torch.library.opcheck
    lengths, mask = kept_tokens(rng, device)
    x = torch.randn(ROWS, COLUMNS, 2, device=device)
    layout = rk.pack(x, mask=mask)
    check(ops.pack_layout, (lengths, COLUMNS, 200, False))
    check(ops.pack_layout, (mask, COLUMNS, 200, True))
    none = (None,) * 6
    check(ops.pack, (layout.cu_seqlens, layout.positions, x, mask, *none, COLUMNS, [0.0, 0.0], 200, True))
    check(ops.unpack, (layout.cu_seqlens, None, layout.tensors, None, *none, COLUMNS, [1.0]))


def test_numpy(rng: np.random.Generator) -> None:
    x, lengths = rng.standard_normal((ROWS, COLUMNS, 2)), np.array([COLUMNS, 0, 1, 7, 20, 5])
    got, want = rk.pack([x, x > 0], lengths=lengths), rk.pack_reference(x, lengths=lengths)
    assert got.tensors[0].tobytes() == want["packed"].tobytes()
    assert got.tensors[1].dtype == bool
    back = rk.unpack(got.tensors[0], got.cu_seqlens, COLUMNS)
    assert back.tobytes() == rk.unpack_reference(want["packed"], want["cu_seqlens"], COLUMNS).tobytes()


def test_bad_input() -> None:
    x, lengths = torch.zeros(2, 5), torch.tensor([5, 2])
    cu = torch.tensor([0, 5, 7])
    for message, call in {
        "pack: expected lengths or mask, got neither": lambda: rk.pack(x),
        "pack: expected lengths or mask, got both": lambda: rk.pack(x, lengths, x > 0),
        r"lengths: expected shape \[2\] \(that of tensors\), got \[3\]": lambda: rk.pack(x, torch.tensor([1, 2, 3])),
        r"mask: expected shape \[2, 5\] \(that of tensors\), got \[3, 5\]": lambda: rk.pack(x, mask=torch.ones(3, 5)),
        r"lengths: expected shape \[2\] \(that of tensors\), got \[1\]": lambda: rk.pack(x.numpy(), np.array([1])),
        "lengths: expected a torch.Tensor, got ndarray": lambda: rk.pack(x.clone().requires_grad_(), np.array([5, 2])),
        "mask: expected a torch.Tensor, got ndarray": lambda: rk.pack(x.clone().requires_grad_(), mask=np.ones((2, 5))),
        "max_tokens: expected an integer of 64 bits, got one of 100 bits": lambda: rk.pack(
            x, lengths, max_tokens=10**30
        ),
        "tensors: expected at least one array, got none": lambda: rk.pack([], lengths),
        r"tensors: expected shape \[num_sequences, num_tokens, ...\], got \[5\]": lambda: rk.pack(x[0], lengths),
        r"lengths: expected numbers in \[0, 5\] .the tokens of a row., got 6 for row 1": lambda: rk.pack(
            x, lengths + torch.tensor([0, 4])
        ),
        r"lengths: expected numbers in \[0, 5\] .the tokens of a row., got -1 for row 0": lambda: rk.pack(
            x, lengths - 6
        ),
        "max_tokens: expected at least 7 .the tokens that are kept., got 6": lambda: rk.pack(x, lengths, max_tokens=6),
        r"tensors\[1\]: expected shape \[2, 5, ...\], got \[2, 4\]": lambda: rk.pack([x, x[:, :4]], lengths),
        "tensors: expected contiguous dimensions after those of tokens": lambda: rk.pack(
            torch.zeros(2, 5, 3, 4).transpose(2, 3), lengths
        ),
        "lengths: expected dtype int32 or int64, got float32": lambda: rk.pack(x, lengths.float()),
        "fill_value: expected a number that dtype int8 holds, got 300": lambda: rk.pack(
            x.to(torch.int8), lengths, fill_value=300
        ),
        "fill_value: expected a number that dtype int64 holds, got nan": lambda: rk.pack(
            x.long(), lengths, fill_value=float("nan")
        ),
        "fill_value: expected a number that dtype float16 holds, got 1e.30": lambda: rk.pack(
            x.half(), lengths, fill_value=1e30
        ),
        "fill_value: expected a number that dtype bool holds, got 2": lambda: rk.pack(x > 0, lengths, fill_value=2),
        "fill_value: expected an integer of 64 bits, or a float, got one of 65 bits": lambda: rk.pack(
            x, lengths, fill_value=2**64
        ),
        "mask: expected dtype bool, of integers or of floats of 16 bits and more, got float8": lambda: rk.pack(
            x, mask=x.to(torch.float8_e5m2)
        ),
        "fill_value: expected 0 for dtype complex128": lambda: rk.pack(x.to(torch.complex128), lengths, fill_value=1),
        r"fill_value: expected one number or 1": lambda: rk.pack(x, lengths, fill_value=[1, 2]),
        "cu_seqlens: expected sequences of at most 4 tokens .those of a padded row., got 5": lambda: rk.unpack(
            torch.zeros(7), cu, 4
        ),
        "cu_seqlens: expected at most 6 .the number of tokens., got 7 at index 2": lambda: rk.unpack(
            torch.zeros(6), cu, 5
        ),
        r"positions: expected a contiguous array of shape \[2, 5\], got \[2, 4\]": lambda: rk.unpack(
            torch.zeros(7), cu, 5, positions=torch.zeros(2, 4, dtype=torch.int32)
        ),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()


@pytest.mark.parametrize(
    ("wrong", "message"),
    {
        "repeated": ([[0, -1, 0], [0, -1, -1]], r"-1 or 1, .*, got 0 at token 2 in row 0"),
        "beyond the sequence": ([[0, 1, 2], [0, -1, -1]], r"one for each of the sequence's 2 tokens, got 3 in row 0"),
        "out of range": ([[0, -1, 1], [7, -1, -1]], r"-1 or 0, .*, got 7 at token 0 in row 1"),
        "negative": ([[0, -1, 1], [-2, -1, -1]], r"-1 or 0, .*, got -2 at token 0 in row 1"),
        "descending": ([[1, -1, 0], [0, -1, -1]], r"-1 or 0, .*, got 1 at token 0 in row 0"),
        "a token that is dropped": ([[0, -1, 1], [-1, -1, -1]], r"one for each of the sequence's 1 tokens, got 0"),
    }.values(),
)
def test_positions_that_are_not_packs_are_refused(wrong: list[list[int]], message: str) -> None:
    packed, cu = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 3])
    right = torch.tensor([[0, -1, 1], [0, -1, -1]], dtype=torch.int32)
    assert rk.unpack(packed, cu, 3, positions=right).tolist() == [[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]]
    for as_array in (torch.tensor(wrong, dtype=torch.int32), np.array(wrong, np.int32)):
        given = (packed, cu) if isinstance(as_array, torch.Tensor) else (packed.numpy(), cu.numpy())
        with pytest.raises(ValueError, match=f"positions: expected {message}"):
            rk.unpack(*given, 3, positions=as_array)


@pytest.mark.gpu
def test_bad_lengths_are_clamped_with_a_status_on_a_gpu() -> None:
    x = torch.arange(20.0, device="cuda").view(4, 5)
    lengths = torch.tensor([2, -1, 9, 3], device="cuda")
    got = rk.pack(x, lengths)
    assert (got.cu_seqlens.tolist(), got.status.tolist()) == ([0, 2, 2, 7, 10], [1])
    got = rk.pack(x, lengths.clamp(0, 5), max_tokens=6)
    assert (got.cu_seqlens.tolist(), got.status.tolist()) == ([0, 2, 2, 6, 6], [2])
    assert got.tensors.tolist() == [0.0, 1.0, 10.0, 11.0, 12.0, 13.0]


def test_a_conjugated_view_is_packed_as_what_it_shows() -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor([[1 + 2j, 3 + 4j]])
    packed = rk.pack(x.conj(), lengths=torch.tensor([2]))
    assert packed.tensors.tolist() == [1 - 2j, 3 - 4j]
    assert rk.unpack(x[0].conj(), packed.cu_seqlens, 2).tolist() == [[1 - 2j, 3 - 4j]]
