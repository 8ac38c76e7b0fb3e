"""linear_logprob with few scored rows: kernels may leave the other rows out, without a change of bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import rl_kernel_native as rk
from cases import ALL, differing, part_cut

torch = pytest.importorskip("torch")

FEATURES, VOCAB = 64, 3000
BLOCK = 8192  # rows per block of rule 9


def spans(rows: int, *scored: tuple[int, int]) -> Any:
    mask = torch.zeros(rows, dtype=torch.bool)
    for first, last in scored:
        mask[first:last] = True
    return mask


def answers(rows: int, width: int) -> Any:
    """A padded batch in which the first few of each `width` rows are scored."""
    place = torch.arange(rows)
    return place % width < 1 + (place // width * 37) % width


MASKS = {
    "none": spans(700),
    "all": spans(700, (0, 700)),
    "one row": spans(700, (333, 334)),
    "first and last": spans(701, (0, 1), (700, 701)),
    "a tile off its place": spans(900, (272, 400)),
    "more than a tile": spans(900, (16, 500)),
    "every other group": torch.arange(1500) // 16 % 2 == 1,
    "a tile off its place at an end off the groups": spans(325, (208, 325)),
    "the last answer": spans(700, (580, 700)),
    "an end of a tile and another": spans(701, (0, 128), (576, 701)),
    "answers": answers(1300, 100),
    "few rows": answers(120, 40),
    "fewer rows": answers(60, 20),
    "129 rows": spans(129, (128, 129)),
    "second block alone": spans(BLOCK + 600, (BLOCK + 50, BLOCK + 90)),
    "first block alone": spans(BLOCK + 600, (8000, 8100)),
    "both blocks": answers(BLOCK + 600, 256),
    "the end of both blocks": spans(BLOCK + 325, (7000, 7100), (BLOCK + 208, BLOCK + 325)),
    "8193 rows": spans(BLOCK + 1, (BLOCK, BLOCK + 1)),
}
MANY = [name for name, mask in MASKS.items() if len(mask) > BLOCK]
SHORT = [name for name in MASKS if name not in MANY]


class Case:
    def __init__(self, name: str, device: str, dtype: Any = torch.bfloat16) -> None:
        generator = torch.Generator().manual_seed(len(name))
        self.mask = MASKS[name].to(device)
        rows = len(self.mask)

        def normal(*sizes: int) -> Any:
            return torch.randn(*sizes, generator=generator)

        hidden, weight = normal(rows, FEATURES), normal(VOCAB, FEATURES) / 4
        self.hidden, self.weight = hidden.to(device, dtype), weight.to(device, dtype)
        self.target = torch.randint(0, VOCAB, (rows,), generator=generator).to(device)
        self.temperature = (0.5 + torch.rand(rows, generator=generator)).to(device)
        self.dy = normal(rows).to(device)
        self.hidden[~self.mask] = float("nan")  # not scored, so never read
        self.scored = torch.where(self.mask[:, None], self.hidden, torch.zeros_like(self.hidden))

    def called(self, hidden: Any = None, weight: Any = None, **options: Any) -> Any:
        x, w = self.hidden if hidden is None else hidden, self.weight if weight is None else weight
        return rk.linear_logprob(x, w, self.target, loss_mask=self.mask, **options)

    @property
    def ignoring(self) -> Any:
        return torch.where(self.mask, self.target, -100)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize("logits_dtype", ["float32", "same"])
@pytest.mark.parametrize("name", SHORT)
def test_outputs_have_the_bits_of_logprob_of_linear(
    name: str, logits_dtype: str, moments: bool, dtype: Any, device: str
) -> None:
    c = Case(name, device, dtype)
    logits_dtype = dtype if logits_dtype == "same" else logits_dtype
    how: dict[str, Any] = {"temperature": c.temperature, "return_lse": True, "return_status": True}
    if moments:
        how |= {"return_entropy": True, "return_sum_p_sq": True}
    want = rk.logprob(rk.linear(c.scored, c.weight, out_dtype=logits_dtype), c.ignoring, **how)
    assert not differing(tuple(c.called(logits_dtype=logits_dtype, **how)), tuple(want))


@pytest.mark.parametrize("workspace", [1 << 20, 1 << 29], ids=["in steps", "at once"])
@pytest.mark.parametrize("name", MANY)
def test_outputs_of_several_blocks(name: str, workspace: int, device: str) -> None:
    c = Case(name, device)
    want = rk.logprob(rk.linear(c.scored, c.weight, out_dtype="float32"), c.ignoring, **ALL)
    assert not differing(tuple(c.called(workspace_bytes=workspace, **ALL)), tuple(want))


@pytest.mark.parametrize("name", ["the last answer", "answers", "fewer rows"])
def test_statistics_of_shards_merge_to_the_bits_of_the_whole(name: str, device: str) -> None:
    c = Case(name, device)
    middle = part_cut(VOCAB, 4)
    stats = [
        rk.linear_logprob_partial(
            c.hidden, c.weight[first:last], c.target, vocab_start=first, vocab_size=VOCAB, loss_mask=c.mask
        )
        for first, last in ((0, middle), (middle, VOCAB))
    ]
    assert not differing(rk.logprob_merge(torch.stack(stats)), c.called())


@pytest.mark.gpu
def test_a_graph_replays_with_another_mask() -> None:
    c = Case("answers", "cuda")
    x, w = c.hidden.nan_to_num().requires_grad_(), c.weight.clone().requires_grad_()
    target = c.ignoring

    def step() -> tuple[Any, Any, Any]:
        y = rk.linear_logprob(x, w, target)
        return y, *torch.autograd.grad(y, (x, w), c.dy)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for mask in (MASKS["answers"].roll(500), MASKS["answers"].flip(0), torch.zeros_like(MASKS["answers"])):
        target.copy_(torch.where(mask.cuda(), c.target, -100))
        graph.replay()
        assert not differing(tuple(t.detach() for t in found), tuple(t.detach() for t in step()))


def gradients(c: Case, **options: Any) -> tuple[Any, Any]:
    x, w = c.hidden.clone().requires_grad_(), c.weight.clone().requires_grad_()
    c.called(x, w, temperature=c.temperature, **options).backward(c.dy)
    return x.grad, w.grad


def logit_gradients(c: Case) -> Any:
    logits = rk.linear(c.scored, c.weight, out_dtype="float32")
    lse = rk.logprob(logits, c.ignoring, temperature=c.temperature, return_lse=True).lse
    d = rk.logprob_backward(logits, c.ignoring, lse, dlogprob=c.dy, temperature=c.temperature)
    return d.to(c.hidden.dtype)


# workspaces that cut the vocabulary into chunks
@pytest.mark.parametrize("workspace", [1 << 21, 1 << 28], ids=["small", "large"])
@pytest.mark.parametrize("name", SHORT)
def test_gradients_have_the_bits_of_products(name: str, workspace: int, dtype: Any, device: str) -> None:
    c = Case(name, device, dtype)
    dx, dw = gradients(c, workspace_bytes=workspace)
    d = logit_gradients(c)
    assert not differing(dx, rk.linear_input_grad(d, c.weight))
    assert not differing(dw, rk.linear_weight_grad(d, c.scored))


@pytest.mark.parametrize("workspace", [1 << 25, 28_200_000], ids=["apart", "hidden states in dhidden"])
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("name", MANY)
def test_gradients_of_several_blocks(name: str, main_grad: bool, workspace: int, device: str) -> None:
    c = Case(name, device)
    d = logit_gradients(c)
    total = torch.linspace(-1, 1, VOCAB * FEATURES, device=device).view(VOCAB, FEATURES) if main_grad else None
    want = rk.linear_weight_grad(d, c.scored, main_grad=None if total is None else total.clone())
    dx, dw = gradients(c, main_grad=total, workspace_bytes=workspace)
    assert not differing(dx, rk.linear_input_grad(d, c.weight))
    assert not differing(dw if total is None else total, want)


@pytest.mark.parametrize("name", ["both blocks", "the end of both blocks"])
def test_a_gradient_of_the_weight_alone(name: str, device: str) -> None:
    """With 16 bits and several blocks, the outer loop is over chunks of the vocabulary."""
    c = Case(name, device)
    w = c.weight.clone().requires_grad_()
    c.called(c.hidden, w, temperature=c.temperature, workspace_bytes=1 << 25).backward(c.dy)
    assert not differing(w.grad, rk.linear_weight_grad(logit_gradients(c), c.scored).to(w.dtype))


@pytest.mark.parametrize("dh_segments", [1, 8])
@pytest.mark.parametrize("name", ["answers", "none", "both blocks", "the last answer"])
def test_gradients_of_lora_have_the_bits_of_products(name: str, dh_segments: int, device: str) -> None:
    c = Case(name, device)
    rank, scale = 16, 0.5
    generator = torch.Generator().manual_seed(7)
    a = (torch.randn(rank, FEATURES, generator=generator) / 8).to(c.hidden)
    b = (torch.randn(VOCAB, rank, generator=generator) / 4).to(c.hidden)
    leaves = [t.clone().requires_grad_() for t in (c.hidden, c.weight, a, b)]
    of_lora = {"lora_a": leaves[2], "lora_b": leaves[3], "lora_scale": scale}
    found = c.called(*leaves[:2], dh_segments=dh_segments, return_lse=True, **of_lora)
    found.logprob.backward(c.dy)
    u = (rk.linear(c.scored, a, out_dtype="float32") * scale).to(c.hidden.dtype)
    logits = rk.linear(torch.cat([c.scored, u], 1), torch.cat([c.weight, b], 1), out_dtype="float32")
    assert not differing(found.logprob.detach(), rk.logprob(logits, c.ignoring))
    d = rk.logprob_backward(logits, c.ignoring, found.lse.detach(), dlogprob=c.dy).to(c.hidden.dtype)
    assert not differing(leaves[1].grad, rk.linear_weight_grad(d, c.scored))
    assert not differing(leaves[3].grad, rk.linear_weight_grad(d, u))
    assert not leaves[0].grad[~c.mask].any()
    cuts = [0, VOCAB] if dh_segments == 1 else [part_cut(VOCAB, part) for part in range(9)]
    shares, da = [], None
    for first, last in itertools.pairwise(cuts):
        part = d[:, first:last].contiguous()
        v = (rk.linear(part, b[first:last].T.contiguous(), out_dtype="float32") * scale).to(d.dtype)
        padding = -(last - first) % 16
        wide = torch.cat([c.weight[first:last].T, b.new_zeros(FEATURES, padding), a.T], 1)
        shares.append(rk.linear(torch.cat([part, d.new_zeros(len(d), padding), v], 1), wide, out_dtype="float32"))
        da = rk.linear_weight_grad(v, c.scored, out_dtype="float32", main_grad=da)
    assert not differing(leaves[0].grad, rk.tree_sum(shares, out_dtype=d.dtype))
    assert not differing(leaves[2].grad, da.to(d.dtype))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_a_weight_holds_reaches_scored_rows_alone(value: float, device: str) -> None:
    c = Case("answers", device)
    c.weight[5, 3] = value
    dx, _ = gradients(c)
    assert not dx[~c.mask].any()
    assert dx[c.mask].isnan().any()
