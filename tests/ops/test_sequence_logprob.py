"""sequence_logprob: float64, the contract's bytes, padded and packed, masked garbage, gradients, torch's transforms,
and users' errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import beyond, differing, tree_sum
from torch_properties import no_synchronisation

torch = pytest.importorskip("torch")

DTYPES = ("float32", "bfloat16", "float16")
# Lengths: 0; 1; around a row of a kernel; around a chunk; several chunks.
LENGTHS = (0, 1, 255, 257, 2047, 2049, 9000)


def batch(rng: np.random.Generator, rows: int, columns: int, dtype: str = "float32", device: str = "cpu") -> Any:
    logprob = torch.from_numpy(-rng.exponential(1.0, (rows, columns)).astype(np.float32)).to(getattr(torch, dtype))
    return logprob.to(device), torch.from_numpy(rng.random((rows, columns)) < 0.7).to(device)


@pytest.mark.parametrize("columns", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_of_the_contract_and_float64(dtype: str, columns: int, device: str, rng: np.random.Generator) -> None:
    logprob, mask = batch(rng, 3, columns, dtype, device)
    got = rk.sequence_logprob(logprob, mask)
    x, kept = logprob.float().cpu().numpy(), mask.cpu().numpy()
    want = np.array([tree_sum(np.where(b, a, 0)) for a, b in zip(x, kept, strict=True)], np.float32)
    assert got.sum.cpu().numpy().tobytes() == want.tobytes()
    reference = rk.sequence_logprob_reference(x, kept)
    assert not beyond("sequence_logprob", "sum", got.sum, reference["sum"], terms=columns, scale=reference["scale"])
    assert got.count.tolist() == reference["count"].tolist()
    assert (got.sum.dtype, got.count.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_and_packed_have_the_same_bytes(dtype: str, device: str, rng: np.random.Generator) -> None:
    lengths = torch.tensor([0, 1, 2049, 700, 3000, 255], device=device)
    logprob, mask = batch(rng, 6, 3000, dtype, device)
    exists = torch.arange(3000, device=device)[None] < lengths[:, None]
    padded = rk.sequence_logprob(logprob, mask & exists)
    cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    for offsets in (cu, cu.int()):
        packed = rk.sequence_logprob(logprob[exists], mask[exists], offsets)
        assert not differing(tuple(packed), tuple(padded))
    wider = rk.sequence_logprob(
        torch.nn.functional.pad(logprob, (0, 77)), torch.nn.functional.pad(mask & exists, (0, 77))
    )
    assert not differing(tuple(wider), tuple(padded))
    one = [rk.sequence_logprob(logprob[i : i + 1], (mask & exists)[i : i + 1]) for i in range(6)]
    assert not differing(torch.cat([o.sum for o in one]), padded.sum)


@pytest.mark.parametrize("kind", ["bool", "uint8", "int8", "int16", "int32", "int64", "float32", "bfloat16", "float64"])
def test_masks_of_every_dtype_and_masked_garbage(kind: str, device: str, rng: np.random.Generator) -> None:
    logprob, mask = batch(rng, 4, 2500, device=device)
    want = rk.sequence_logprob(logprob, mask)
    garbage = torch.where(mask, logprob, torch.full_like(logprob, float("nan")))
    garbage[:, ::3] = torch.where(mask[:, ::3], logprob[:, ::3], torch.full_like(logprob[:, ::3], float("inf")))
    flags = mask.to(getattr(torch, kind))
    if flags.is_floating_point():
        flags = torch.where(mask, flags, -flags)  # a mask of -0 does not count
    for x, m in ((garbage, flags), (garbage[:, 1:], flags[:, 1:])):  # the second pair is not aligned to vectors
        got = rk.sequence_logprob(x, m)
        assert not differing(
            tuple(got), tuple(want if x is garbage else rk.sequence_logprob(logprob[:, 1:], mask[:, 1:]))
        )
    leaf = garbage.clone().requires_grad_()
    rk.sequence_logprob(leaf, flags).sum.sum().backward()
    assert torch.equal(leaf.grad, mask.float())


def test_a_token_that_counts_and_is_no_number_makes_its_sequence_nan_alone(device: str) -> None:
    logprob = torch.zeros(3, 400, device=device)
    logprob[1, 300] = float("nan")
    logprob[2, 5] = -float("inf")
    got = rk.sequence_logprob(logprob)
    assert got.sum.tolist()[0] == 0.0
    assert got.sum.view(torch.int32).tolist()[1] == 0x7FC00000
    assert got.sum.tolist()[2] == -float("inf")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: str, packed: bool, device: str, rng: np.random.Generator) -> None:
    logprob, mask = batch(rng, 5, 320, dtype, device)
    cu = torch.tensor([0, 3, 3, 900, 1500], device=device) if packed else None
    if packed:
        logprob, mask = logprob.reshape(-1), mask.reshape(-1)
    leaf = logprob.clone().requires_grad_()
    out = rk.sequence_logprob(leaf, mask, cu)
    dsum = torch.from_numpy(rng.standard_normal(out.sum.shape[0]).astype(np.float32)).to(device)
    out.sum.backward(dsum)
    of_numpy = [None if t is None else t.float().cpu().numpy() for t in (logprob, mask)]
    want = rk.sequence_logprob_reference(*of_numpy, None if cu is None else cu.cpu(), dsum=dsum.cpu())["d_logprob"]
    assert not differing(leaf.grad, torch.from_numpy(want).to(leaf.dtype))
    again = rk.sequence_logprob_backward(dsum, mask, cu, num_tokens=logprob.shape[-1], dtype=dtype)
    assert not differing(again, leaf.grad)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_and_transformed(packed: bool, backend: str, device: str, rng: np.random.Generator) -> None:
    logprob, mask = batch(rng, 4, 30, device=device)
    cu = torch.tensor([0, 20, 50, 120], device=device) if packed else None
    if packed:
        logprob, mask = logprob.reshape(-1), mask.reshape(-1)

    def f(x: Any) -> Any:
        return rk.sequence_logprob(x, mask, cu).sum

    torch.compiler.reset()
    g = torch.func.grad(lambda x: f(x).square().sum())
    for function in (
        f,
        g,
        lambda x: torch.func.jvp(f, (x,), (x * 2,))[1],
        lambda x: torch.func.vmap(f)(torch.stack([x, x])),
    ):
        got = torch.compile(function, backend=backend, fullgraph=True)(logprob)
        assert not differing(got, function(logprob))
        assert bool(got.any())
    assert not differing(torch.func.jacfwd(f)(logprob), torch.func.jacrev(f)(logprob))
    leaf = logprob.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf).square().sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    assert not differing(second, torch.func.grad(lambda x: g(x).square().sum())(logprob))


def test_opcheck(device: str, rng: np.random.Generator) -> None:
    rk._call.load()

    logprob, mask = batch(rng, 3, 8, device=device)
    ops, cu = torch.ops.rl_kernel_native, torch.tensor([0, 3, 24], device=device)
    torch.library.opcheck(ops.sequence_logprob, (logprob, mask, None, True))
    torch.library.opcheck(ops.sequence_logprob, (logprob.view(-1), None, cu, False))
    torch.library.opcheck(
        ops.sequence_logprob_backward, (torch.ones(2, device=device), mask.view(-1), cu, 24, 1, False)
    )


def test_numpy_and_jax(rng: np.random.Generator) -> None:
    logprob, mask = batch(rng, 3, 300)
    want = rk.sequence_logprob(logprob, mask)
    got = rk.sequence_logprob(logprob.numpy(), mask.numpy())
    assert isinstance(got.sum, np.ndarray)
    assert not differing(tuple(got), tuple(want))
    jnp = pytest.importorskip("jax.numpy")
    from_jax = rk.sequence_logprob(jnp.asarray(logprob.numpy()), jnp.asarray(mask.numpy()))
    assert np.asarray(from_jax.sum).tobytes() == got.sum.tobytes()


def test_a_status_has_a_name(rng: np.random.Generator) -> None:
    x, mask = batch(rng, 3, 50)
    want = rk.sequence_logprob(x, mask)
    for arrays in ((x, mask), (x.clone().requires_grad_(), mask), (x.numpy(), mask.numpy())):
        got = rk.sequence_logprob(*arrays, return_status=True)
        assert isinstance(got, rk.SequenceLogprobAndStatus)
        assert got.status.tolist() == [0, 0, 0]
        assert not differing(got.sum if not hasattr(got.sum, "detach") else got.sum.detach(), want.sum)
        assert not differing(got.count, want.count)
    with pytest.raises(TypeError, match="return_status: expected a bool, got str"):
        rk.sequence_logprob(x, return_status="no")


def test_bad_input() -> None:
    x, m = torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool)
    cu = torch.tensor([0, 5, 12])
    for message, call in {
        "logprob: expected dtype float32, bfloat16 or float16, got": lambda: rk.sequence_logprob(x.double()),
        r"logprob: expected shape \[num_sequences, num_tokens\] or \[num_tokens\], got \[1, 3, 4\]": lambda: (
            rk.sequence_logprob(x[None])
        ),
        r"logprob: expected shape \[num_tokens\] beside cu_seqlens, got \[3, 4\]": lambda: rk.sequence_logprob(
            x, m, cu
        ),
        r"mask: expected shape \[3, 4\] .that of logprob., got \[4\]": lambda: rk.sequence_logprob(x, m[0]),
        "cu_seqlens: expected 0 first, got 5": lambda: rk.sequence_logprob(
            torch.zeros(0), cu_seqlens=torch.tensor([5])
        ),
        "num_tokens: expected an integer of 64 bits": lambda: rk.sequence_logprob_backward(x[:, 0], num_tokens=10**30),
        "num_tokens: expected a number >= 0, got -1": lambda: rk.sequence_logprob_backward(x[:, 0], num_tokens=-1),
        "mask: expected dtype bool, of integers or of floats of 16 bits and more, got complex64": lambda: (
            rk.sequence_logprob(x, m.to(torch.complex64))
        ),
        r"logprob: expected a contiguous last dimension .stride 1., got stride 3": lambda: rk.sequence_logprob(
            torch.zeros(4, 3).t(), m
        ),
        "cu_seqlens: expected dtype int32 or int64, got float32": lambda: rk.sequence_logprob(
            x.view(-1), None, cu.float()
        ),
        "cu_seqlens: expected 0 first, got 1": lambda: rk.sequence_logprob(x.view(-1), None, cu + 1),
        "cu_seqlens: expected ascending offsets, got 4 after 5 at index 2": lambda: rk.sequence_logprob(
            x.view(-1), None, torch.tensor([0, 5, 4])
        ),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()


@pytest.mark.gpu
def test_offsets_that_are_none_give_nan_and_a_status_on_a_gpu() -> None:
    x = torch.ones(12, device="cuda")
    for bad, status in (([0, 5, 3, 12], [0, 1, 0]), ([1, 5, 6, 12], [1, 0, 0]), ([0, -4, 99, 12], [1, 1, 1])):
        cu = torch.tensor(bad, device="cuda")
        total, count, flags = rk.sequence_logprob(x, None, cu, return_status=True)
        assert flags.tolist() == status
        assert total.isnan().int().tolist() == status
        assert [n for n, s in zip(count.tolist(), status, strict=True) if s] == [0] * sum(status)


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths() -> None:
    x = torch.randn(1000, device="cuda")
    cu = torch.tensor([0, 10, 500, 1000], device="cuda")
    rk.sequence_logprob(x, None, cu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rk.sequence_logprob(x, None, cu)
    cu.copy_(torch.tensor([0, 400, 401, 777]))
    graph.replay()
    assert not differing(tuple(t.clone() for t in out), tuple(rk.sequence_logprob(x, None, cu)))


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    x, m = torch.randn(64, 100, device="cuda", requires_grad=True), torch.ones(64, 100, device="cuda")
    rk.sequence_logprob(x, m)
    with no_synchronisation():
        packed = rk.pack([x, m], mask=m)
        cu = packed.cu_seqlens
        sums = rk.sequence_logprob(packed.tensors[0], packed.tensors[1], cu)
        rk.preference_loss(sums.sum[:32], sums.sum[32:], kind="simpo").losses.sum().backward()
        rk.unpack(packed.tensors, cu, 100, positions=packed.positions)


@pytest.mark.gpu
@pytest.mark.gpu_memory(10)
def test_more_than_2_to_the_31_tokens() -> None:
    rows, columns = 3, 1 << 30
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[2, -1] = -3.0
    assert rk.sequence_logprob(x).sum.tolist() == [0.0, 0.0, -3.0]
    cu = torch.tensor([0, (1 << 31) + 5, rows * columns], device="cuda")
    got = rk.sequence_logprob(x.view(-1), None, cu)
    assert got.sum.tolist() == [0.0, -3.0]
    assert got.count.tolist() == [(1 << 31) + 5, rows * columns - (1 << 31) - 5]
