"""Batches, padding, packed sequences, caches and sliding windows of patched models: the same bits, or an error."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="patch_model patches models of torch")
transformers = pytest.importorskip("transformers", reason="patch_model patches models of transformers")

import rl_kernel_native as rk  # noqa: E402
from patch_cases import IDS, logits_of, tiny  # noqa: E402
from rl_kernel_native.integrations.decoder import CACHE_NAMES  # noqa: E402
from rl_kernel_native.integrations.sequences import locate_sequences  # noqa: E402


@pytest.fixture(params=["Qwen3", "Llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param)


@pytest.mark.parametrize("counted", [False, True], ids=["no positions", "positions"])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_changes_no_bit(model: Any, side: str, counted: bool) -> None:
    """Without given positions, positions count from the first real token, at any padding."""
    rk.patch_model(model)
    lengths = (20, 3, 11)
    want = [logits_of(model, IDS[i : i + 1, :n])[0] for i, n in enumerate(lengths)]
    begin = [{"left": 20 - n, "right": 0, "both": (20 - n) // 2}[side] for n in lengths]
    ids, mask = torch.full((3, 20), 9), torch.zeros(3, 20, dtype=torch.long)
    for i, (n, b) in enumerate(zip(lengths, begin, strict=True)):
        ids[i, b : b + n], mask[i, b : b + n] = IDS[i, :n], 1
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)} if counted else {}
    got = logits_of(model, ids, attention_mask=mask, **positions)
    for i, (n, b) in enumerate(zip(lengths, begin, strict=True)):
        assert torch.equal(got[i, b : b + n], want[i])


@pytest.mark.parametrize("widths", [(12, 7, 1), (19, 1)])
def test_chunks_behind_padding_need_no_positions(model: Any, widths: tuple[int, ...]) -> None:
    rk.patch_model(model)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, :7] = mask[2, :13] = 0  # the first chunk of 12 has no token of the last row
    cache, parts, done = transformers.DynamicCache(config=model.config), [], 0
    for width in widths:
        step = {"input_ids": IDS[:, done : done + width], "attention_mask": mask[:, : done + width]}
        with torch.no_grad():
            parts.append(model(**step, past_key_values=cache, use_cache=True).logits)
        done += width
    got = torch.cat(parts, 1)
    for row, first in ((0, 0), (1, 7), (2, 13)):
        assert torch.equal(got[row, first:], logits_of(model, IDS[row : row + 1, first:])[0])


def test_generation_decodes_what_a_whole_forward_gives(model: Any) -> None:
    """Greedy, from prompts padded on the left: each token is the largest logit of its own sequence's forward."""
    rk.patch_model(model)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, :7] = 0
    out = model.generate(
        IDS, attention_mask=mask, max_new_tokens=12, do_sample=False, output_logits=True,
        return_dict_in_generate=True, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    steps = torch.stack(out.logits, 1)
    for row in range(3):
        ids = out.sequences[row, 7 if row == 1 else 0 :]
        whole = logits_of(model, ids[None])[0]
        assert torch.equal(steps[row], whole[-13:-1].float())


def test_a_static_cache_is_read_as_far_as_it_is_filled(model: Any) -> None:
    rk.patch_model(model)
    want = logits_of(model, IDS)
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    with torch.no_grad():
        first = model(input_ids=IDS[:, :13], past_key_values=cache, use_cache=True).logits
        second = model(input_ids=IDS[:, 13:], past_key_values=cache, use_cache=True).logits
    assert torch.equal(torch.cat([first, second], 1), want)


def test_generation_takes_a_static_cache(model: Any) -> None:
    """transformers makes a mask for each kind of layer with such a cache."""
    rk.patch_model(model)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = model.generate(IDS, **options)
    assert torch.equal(model.generate(IDS, cache_implementation="static", disable_compile=True, **options), want)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_attention_reads_a_cache_by_either_name(model: Any, name: str) -> None:
    """transformers renamed the cache argument; a cache under an unknown name would not be read."""
    rk.patch_model(model)
    want = logits_of(model, IDS)[:, 13:]
    body, cache = model.model, transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        body(input_ids=IDS[:, :13], **{name: cache})
        assert cache.get_seq_length() == 13
        assert torch.equal(model.lm_head(body(input_ids=IDS[:, 13:], **{name: cache})[0]), want)
    with pytest.raises(TypeError, match="key_cache: expected a cache by one of the names"):
        body.layers[0].self_attn(
            hidden_states=torch.zeros(1, 2, 64, dtype=torch.bfloat16),
            position_embeddings=body.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), torch.arange(2)[None]),
            key_cache=cache,
        )


def test_a_mask_narrower_than_the_cache_and_the_new_tokens_is_refused(model: Any) -> None:
    rk.patch_model(model)
    with torch.no_grad():
        cache = model(input_ids=IDS[:, :13], use_cache=True).past_key_values
        with pytest.raises(ValueError, match=r"attention_mask: expected \[3, at least 20\].*got \[3, 7\]"):
            model(input_ids=IDS[:, 13:], past_key_values=cache, attention_mask=torch.ones(3, 7))


def test_sliding_windows_are_kept() -> None:
    options = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    windowed = tiny("Qwen3", torch.float32, **options)
    assert "sliding_attention" in windowed.config.layer_types
    want = logits_of(windowed)
    assert not torch.allclose(want, logits_of(tiny("Qwen3", torch.float32)), atol=1e-3)
    rk.patch_model(windowed)
    torch.testing.assert_close(logits_of(windowed), want, rtol=1e-4, atol=1e-4)


# A cache with this window drops keys in numbers that are no multiple of attention's block of 128. The text has three
# blocks.
WINDOWED = {
    "use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1, "max_position_embeddings": 512,
}  # fmt: skip


LONG_IDS = torch.arange(2 * 300).view(2, 300) % 101


def windowed() -> Any:
    """A patched model with a layer of each kind. In float32, with scores of some tens whose maximum grows between
    blocks, a wrong start of the blocks would show in the results."""
    model = tiny("Qwen3", torch.float32, **WINDOWED)
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(12)
    rk.patch_model(model)
    return model


@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("chunk", [130, 17, 1])  # more than a block; less than the window; decoding
def test_sliding_windows_have_the_same_bits_in_chunks(cache: str, chunk: int) -> None:
    """A cache keeps only the window's keys, while attention counts its blocks from the sequence's first key."""
    model = windowed()
    want = logits_of(model, LONG_IDS)
    options = {"max_cache_len": 320} if cache == "StaticCache" else {}
    kept = getattr(transformers, cache)(config=model.config, **options)
    with torch.no_grad():
        got = [model(input_ids=ids, past_key_values=kept, use_cache=True).logits for ids in LONG_IDS.split(chunk, 1)]
    assert torch.equal(torch.cat(got, 1), want)


def test_sliding_windows_generate_from_prompts_padded_on_the_left() -> None:
    model = windowed()
    mask = torch.ones(2, 70, dtype=torch.long)  # longer than the window
    mask[1, :33] = 0
    out = model.generate(
        LONG_IDS[:, :70], attention_mask=mask, max_new_tokens=70, do_sample=False, output_logits=True,
        return_dict_in_generate=True, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    for row in range(2):
        whole = logits_of(model, out.sequences[row : row + 1, 33 * row :])[0]
        assert torch.equal(torch.stack(out.logits, 1)[row], whole[-71:-1].float())


def test_a_cache_that_lost_keys_is_refused() -> None:
    model = windowed()
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=LONG_IDS, past_key_values=cache, use_cache=True)
        layer = cache.layers[1]
        layer.keys, layer.values = layer.keys[:, :, 9:], layer.values[:, :, 9:]
        with pytest.raises(ValueError, match="cache: expected the last 50 or more keys of a row, got 41"):
            model(input_ids=LONG_IDS[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("counted", [False, True], ids=["no positions", "positions"])
def test_packed_sequences_named_by_their_lengths_need_no_host(model: Any, counted: bool) -> None:
    """For any use_cache, and in a full graph. Without position ids, positions restart at each sequence."""
    rk.patch_model(model)
    want = torch.cat([logits_of(model, ids) for ids in IDS[:1].split([7, 13], 1)], 1)
    options = {"cu_seq_lens_q": torch.tensor([0, 7, 20], dtype=torch.int32)}
    if counted:
        options["position_ids"] = torch.cat([torch.arange(7), torch.arange(13)])[None]
    with torch.no_grad():
        for use_cache in (False, None):
            assert torch.equal(model(input_ids=IDS[:1], use_cache=use_cache, **options).logits, want)
        torch._dynamo.reset()  # its limit of recompilations counts all models
        compiled = torch.compile(model, fullgraph=True)
        assert torch.equal(compiled(input_ids=IDS[:1], use_cache=False, **options).logits, want)


@pytest.mark.parametrize(
    ("offsets", "positions"),
    [
        ([0, 3, 3, 5, 6, 10], [[0, 1, 2, 0, 1, 0, 0, 1, 2, 3]]),  # an empty sequence has no position
        ([0, 2, 4], [[0, 1, 0, 1, 0, 1, 2, 3, 4, 5]]),  # tokens after the last offset belong to no sequence
        ([3, 1, 2], None),  # bad offsets on a device: any result is allowed, but no access out of range
    ],
)
def test_positions_of_packed_sequences_begin_anew(offsets: list[int], positions: list[list[int]] | None) -> None:
    given = torch.tensor(offsets)
    found = locate_sequences(
        1, 10, given.device, attention_mask=None, position_ids=None, past_key_values=None, cu_seq_lens_q=given
    ).positions(1, 10)
    assert found is not None
    assert found.shape == (1, 10)
    assert int(found.min()) >= 0
    assert int(found.max()) < 10
    assert positions is None or found.tolist() == positions


_OFFSETS = torch.tensor([0, 7, 20], dtype=torch.int32)


@pytest.mark.parametrize(
    ("rows", "options", "error", "words"),
    [
        (1, {"cu_seqlens_q": _OFFSETS}, TypeError, "cu_seqlens_q: expected offsets by the names cu_seq_lens_q and "),
        (1, {"cu_seqlens": _OFFSETS}, TypeError, "cu_seqlens: expected offsets by the names cu_seq_lens_q and "),
        (1, {"cu_seq_lens_q": _OFFSETS, "cu_seqlens_k": _OFFSETS}, TypeError, "cu_seqlens_k: expected offsets by the"),
        (1, {"cu_seq_lens_k": _OFFSETS}, ValueError, "cu_seq_lens_q: expected offsets .* beside cu_seq_lens_k, got No"),
        (2, {"cu_seq_lens_q": _OFFSETS}, ValueError, "input_ids: expected one row that .* cu_seq_lens_q, got 2 rows"),
        (1, {"cu_seq_lens_q": [0, 7, 20]}, TypeError, "cu_seq_lens_q: expected a torch.Tensor or None, got a list"),
        (1, {"cu_seq_lens_q": _OFFSETS.float()}, TypeError, "cu_seq_lens_q: expected int32 or int64, got torch.float3"),
        (
            1,
            {"cu_seq_lens_q": _OFFSETS[None]},
            ValueError,
            r"cu_seq_lens_q: expected \[num_sequences \+ 1\], got \[1, 3",
        ),
        (1, {"cu_seq_lens_q": _OFFSETS, "cu_seq_lens_k": [0]}, TypeError, "cu_seq_lens_k: expected a torch.Tensor or "),
    ],
)
def test_offsets_that_name_no_sequences_are_refused(
    model: Any, rows: int, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    """transformers ignores a keyword that it does not know, so a typo would give one long sequence."""
    rk.patch_model(model)
    with pytest.raises(error, match=words):
        logits_of(model, IDS[:rows], **options)


def test_tokens_behind_the_last_offset_belong_to_no_sequence(model: Any) -> None:
    """They are the padding of a packed buffer: they change no bit of a sequence, and their logits mean nothing."""
    rk.patch_model(model)
    want = torch.cat([logits_of(model, ids) for ids in IDS[:1, :15].split([7, 8], 1)], 1)
    for rest in (IDS[:1, 15:], torch.zeros_like(IDS[:1, 15:])):
        got = logits_of(model, torch.cat([IDS[:1, :15], rest], 1), cu_seq_lens_q=torch.tensor([0, 7, 15]))
        assert torch.equal(got[:, :15], want)


def test_packed_sequences_are_found_by_positions_in_every_row() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    found = locate_sequences(2, 5, positions.device, attention_mask=None, position_ids=positions, past_key_values=None)
    assert found.cu_seqlens_q is not None
    assert found.cu_seqlens_q.tolist() == [0, 3, 5, 6, 10]
    assert found.cu_seqlens_q.dtype == torch.int32


@pytest.mark.parametrize("cache", ["default", "asked for", "given"])
def test_positions_that_restart_beside_a_cache_are_refused(model: Any, cache: str) -> None:
    """transformers' sdpa takes these positions as one sequence, its flash attention as two."""
    rk.patch_model(model)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 0, 1]])
    options: dict[str, Any] = {"default": {}, "asked for": {"use_cache": True}, "given": {"use_cache": True}}[cache]
    if cache == "given":
        options["past_key_values"] = transformers.DynamicCache(config=model.config)
    words = r"position_ids: .* by one beside a cache, .*, got 0 after 2 in row 1; .* pass use_cache=False"
    with torch.no_grad(), pytest.raises(ValueError, match=words):
        model(input_ids=IDS[:2, :5], position_ids=positions, **options)
    with torch.no_grad():
        assert model(input_ids=IDS[:2, :5], position_ids=positions[:1], **options).logits.shape == (2, 5, 101)


def test_packed_sequences_need_no_cache_turned_off_under_checkpointing(model: Any) -> None:
    """transformers makes no cache then."""
    rk.patch_model(model)
    want = [logits_of(model, ids) for ids in (IDS[:1, :3], IDS[:1, 3:5])]
    model.gradient_checkpointing_enable()
    model.train()
    got = model(input_ids=IDS[:1, :5], position_ids=torch.tensor([[0, 1, 2, 0, 1]])).logits
    assert torch.equal(got, torch.cat(want, 1))


@pytest.mark.parametrize(
    "mask", [torch.ones(1, 6), torch.tensor([[1, 1, 1, 1, 0, 0]]), torch.tensor([[0, 1, 1, 1, 1, 1]])]
)
def test_a_mask_wider_than_the_tokens_is_refused_without_a_cache(model: Any, mask: Any) -> None:
    rk.patch_model(model)
    for use_cache in (False, None):
        with pytest.raises(ValueError, match=r"attention_mask: expected None or \[1, 4\], .*, got \[1, 6\]"):
            model(input_ids=IDS[:1, :4], attention_mask=mask, use_cache=use_cache)


def test_a_mask_wider_than_a_cache_is_read_as_far_as_the_keys(model: Any) -> None:
    rk.patch_model(model)
    mask = torch.zeros(3, 64, dtype=torch.long)
    mask[:, :20] = 1
    mask[1, :5] = 0
    want = logits_of(model, attention_mask=mask[:, :20])
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        got = [
            model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits
            for ids in IDS.split(13, 1)
        ]
    assert torch.equal(torch.cat(got, 1)[mask[:, :20] != 0], want[mask[:, :20] != 0])


def test_a_mask_of_padding_alone_is_a_row_without_keys(model: Any) -> None:
    rk.patch_model(model)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1] = 0
    got = logits_of(model, attention_mask=mask)
    assert bool(torch.isfinite(got).all())
    assert torch.equal(got[[0, 2]], logits_of(model)[[0, 2]])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([[1, 0, 1, 1]]), "row 0 has some inside"),
        (torch.ones(1, 1, 4, 4), r"attention_mask: expected None or \[1, 4\]"),
        (torch.ones(2, 4), r"attention_mask: expected None or \[1, 4\]"),
        (torch.ones(1, 3), r"attention_mask: expected None or \[1, 4\]"),
    ],
)
def test_masks_that_say_something_else_are_refused(model: Any, mask: Any, message: str) -> None:
    rk.patch_model(model)
    with pytest.raises(ValueError, match=message):
        logits_of(model, IDS[:1, :4], attention_mask=mask)


def test_a_mask_of_another_type_is_refused(model: Any) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    blocks = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    rk.patch_model(model)
    with pytest.raises(TypeError, match=r"attention_mask: expected a torch.Tensor or None, got a BlockMask"):
        logits_of(model, IDS[:1, :4], attention_mask=blocks)


def test_a_mask_with_zeros_beside_lengths_of_packed_sequences_is_refused(model: Any) -> None:
    """The lengths name all sequences, so padding that a mask names would be attended to."""
    rk.patch_model(model)
    lengths = {"cu_seq_lens_q": torch.tensor([0, 5, 12]), "cu_seq_lens_k": torch.tensor([0, 5, 12])}
    want, mask = logits_of(model, IDS[:1, :12], **lengths), torch.ones(1, 12)
    assert torch.equal(logits_of(model, IDS[:1, :12], attention_mask=mask, **lengths), want)
    mask[0, :2] = 0
    with pytest.raises(ValueError, match="attention_mask: expected None or no zero beside cu_seq_lens_q"):
        logits_of(model, IDS[:1, :12], attention_mask=mask, **lengths)


@pytest.mark.parametrize(
    ("rows", "positions", "error", "message"),
    [
        (2, torch.arange(4.0)[None], TypeError, "position_ids: expected int64 or int32, got torch.float32"),
        (2, torch.arange(4), ValueError, r"position_ids: expected \[2 or 1, 4\], got \[4\]"),
        (2, torch.arange(5)[None], ValueError, r"position_ids: expected \[2 or 1, 4\], got \[1, 5\]"),
        (1, torch.arange(4).repeat(3, 1), ValueError, r"position_ids: expected \[1, 4\], got \[3, 4\]"),
        (0, None, ValueError, r"input_ids: expected at least one row and one token, got \[0, 4\]"),
    ],
)
def test_positions_and_batches_of_another_shape_are_refused(
    model: Any, rows: int, positions: Any, error: type[Exception], message: str
) -> None:
    rk.patch_model(model)
    for mask in (None, torch.ones(rows, 4)):
        with pytest.raises(error, match=message):
            logits_of(model, IDS[:rows, :4], attention_mask=mask, position_ids=positions)


def test_a_layer_alone_has_no_sequences(model: Any) -> None:
    rk.patch_model(model)
    x = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    angles = model.model.rotary_emb(x, torch.arange(4)[None])
    with pytest.raises(ValueError, match="was called outside of its model's forward"):
        model.model.layers[0](x, position_embeddings=angles)
