"""A token's hidden states, logits and log-probability have the same bytes however its sequence is laid out. Whole
decoders run on this library's operators. Every operator is recorded, and the first that differs is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the chain runs on torch")
pytest.importorskip("transformers", reason="the chain is a decoder of transformers")

import rl_kernel_native as rk  # noqa: E402
from chain_cases import (  # noqa: E402
    BATCHES,
    alone,
    difference,
    layouts,
    make_model,
    neighbours,
    packed,
    padded,
    places_in,
    sequence,
)

# More than two blocks of 128 keys, and more than a chunk of 256.
LENGTH = 300
NEIGHBOURS = 24  # most tokens of a neighbour


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    found = make_model(request.param)
    rk.patch_model(found)
    return found


# One process runs all tests of these models, because several at once do not fit a GPU.
PUBLISHED = [
    pytest.param(name, marks=pytest.mark.xdist_group("published models")) for name in ("qwen3-8b", "llama-3-8b")
]


@pytest.fixture(scope="module", params=PUBLISHED)
def shaped(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One layer and the head of a published model."""
    found = make_model(request.param, device="cuda")
    rk.patch_model(found)
    yield found
    del found
    torch.cuda.empty_cache()


def check_layouts(model: Any, length: int, batches: tuple[int, ...]) -> None:
    ids = sequence(model, length, 3)
    want = alone(model, ids)
    assert {"layers.0.self_attn.attention", "layers.0.mlp.gate_up_mul", "lm_head", "logprob"} <= set(want.kinds)
    failures = []
    count = 0
    for name, got in layouts(model, ids, batches, NEIGHBOURS):
        count += 1
        found = difference(want, got, length)
        if found:
            failures.append(f"{name}: {found}")
    assert count >= 5 * len(batches) + 3
    assert not failures, "\n".join(failures)


def test_every_layout_of_a_sequence_has_its_bytes(model: Any) -> None:
    check_layouts(model, 40, (1, 2, 7))


def test_a_long_sequence_has_the_bytes_of_its_chunks(model: Any) -> None:
    check_layouts(model, LENGTH, ())


def test_a_large_batch_has_the_bytes_of_one(model: Any) -> None:
    ids = sequence(model, 20, 4)
    want = alone(model, ids)
    others = neighbours(model, 128, 12, 9)
    for place in places_in(129):
        assert difference(want, packed(model, ids, others, place, named=True), 20) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3-8b"])
def test_every_layout_has_the_same_bytes_at_a_published_models_shape_on_the_cpu(name: str) -> None:
    found = make_model(name)
    rk.patch_model(found)
    check_layouts(found, 40, (1, 2, 7))


@pytest.mark.gpu
def test_every_layout_has_the_same_bytes_at_a_published_models_shape(shaped: Any) -> None:
    check_layouts(shaped, 40, BATCHES)


@pytest.mark.gpu
def test_chunks_have_the_same_bytes_at_a_published_models_shape(shaped: Any) -> None:
    check_layouts(shaped, LENGTH, (2,))


def gradients(model: Any, rows: list[torch.Tensor], *, how: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of each row's input embeddings, and of the parameters, for a sum of log-probabilities."""
    lengths = [len(row) for row in rows]
    flat = torch.cat(rows)
    embeds = model.get_input_embeddings()(flat).detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    if how == "packed":
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().to(flat.device)
        positions = torch.cat([torch.arange(n, device=flat.device) for n in lengths])[None]
        logits = model(
            inputs_embeds=embeds[None], position_ids=positions, cu_seq_lens_q=cu_seqlens, use_cache=False
        ).logits[0]
        parts = logits.split(lengths)
    else:
        width = max(lengths)
        left = [width - n if how == "left" else 0 for n in lengths]
        _, mask, positions = padded(rows, left, width)
        wide = torch.zeros(len(rows), width, embeds.shape[1], dtype=embeds.dtype, device=embeds.device)
        index = torch.cat([i * width + left[i] + torch.arange(n) for i, n in enumerate(lengths)]).to(flat.device)
        wide = wide.flatten(0, 1).index_copy(0, index, embeds).view_as(wide)
        logits = model(inputs_embeds=wide, attention_mask=mask, position_ids=positions, use_cache=False).logits
        parts = tuple(logits[i, left[i] : left[i] + n] for i, n in enumerate(lengths))
    total = sum(
        (rk.logprob(part[:-1], row[1:]) * torch.linspace(0.5, 1.5, len(row) - 1, device=flat.device)).sum()
        for part, row in zip(parts, rows, strict=True)
        if len(row) > 1
    )
    total.backward()
    return list(embeds.grad.split(lengths)), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_gradients(model: Any, batches: tuple[int, ...]) -> None:
    ids = sequence(model, 33, 6)
    (want,), _ = gradients(model, [ids], how="packed")
    assert bool(want.any())
    for batch in batches:
        others = neighbours(model, batch - 1, NEIGHBOURS, 50 + batch)
        for place in places_in(batch):
            rows = [*others[:place], ids, *others[place:]]
            for how in ("packed", "left", "right"):
                got, _ = gradients(model, rows, how=how)
                assert same(got[place], want), f"batch {batch}, row {place}, {how}"


def test_the_gradient_of_a_row_has_the_same_bytes_in_any_batch(model: Any) -> None:
    check_gradients(model, (1, 2, 7))


@pytest.mark.gpu
def test_the_gradient_of_a_row_has_the_same_bytes_in_any_batch_at_a_published_models_shape(shaped: Any) -> None:
    check_gradients(shaped, (1, 2, 7, 32))


def check_runs(model: Any) -> None:
    rows = [sequence(model, 33, 6), *neighbours(model, 6, NEIGHBOURS, 57)]
    first, weights = gradients(model, rows, how="packed")
    assert set(weights) == {name for name, _ in model.named_parameters() if "embed_tokens" not in name}
    for _ in range(3):
        again, weights_again = gradients(model, rows, how="packed")
        assert all(same(a, b) for a, b in zip(first, again, strict=True))
        assert [name for name, grad in weights.items() if not same(grad, weights_again[name])] == []


def test_gradients_have_the_same_bytes_run_to_run(model: Any) -> None:
    check_runs(model)


@pytest.mark.gpu
def test_gradients_have_the_same_bytes_run_to_run_at_a_published_models_shape(shaped: Any) -> None:
    check_runs(shaped)


def test_the_first_operator_that_differs_is_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a fault, an operator whose bits depend on the batch, and reads the report that every test above makes."""
    ids = sequence(model, 12, 3)
    want = alone(model, ids)
    honest = rk.silu_mul

    def faulty(gate: Any, up: Any, **options: Any) -> Any:
        y = honest(gate, up, **options)
        return y if gate[..., 0].numel() == len(ids) else torch.nextafter(y, y + 1)

    monkeypatch.setattr(rk, "silu_mul", faulty)
    found = difference(want, packed(model, ids, neighbours(model, 1, 5, 2), 0, named=True), len(ids))
    assert found.startswith("layers.0.mlp.gate_up_mul differs first, at position 0")


def test_probes_change_no_bit(model: Any) -> None:
    ids = sequence(model, 12, 3)
    with torch.no_grad():
        plain = model(input_ids=ids[None], use_cache=False).logits[0]
    keys, recorded = alone(model, ids).values("lm_head")
    assert len(keys) == len(ids)
    assert same(plain.cpu(), recorded)
