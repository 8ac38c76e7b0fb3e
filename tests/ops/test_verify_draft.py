"""verify_draft: the tokens of a rollout without speculation, byte for byte; with rejection, their distribution."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import rl_kernel_native as rk
from rl_kernel_native.ops.sample import SampleStatus
from test_sample import logits_of, mixed, same


def rollout(model: Any, rows: int, length: int, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A rollout of one token per step. model(ids) gives the logits of the next token."""
    device = given["sample_id"].device
    ids, logprobs = torch.zeros(rows, 0, dtype=torch.int64, device=device), torch.zeros(rows, 0, device=device)
    for step in range(length):
        drawn = rk.sample(model(ids), position=step, **given)
        ids = torch.cat([ids, drawn.ids[:, None]], 1)
        logprobs = torch.cat([logprobs, drawn.logprob[:, None]], 1)
    return ids, logprobs


@pytest.mark.parametrize("num_draft", [1, 3])
def test_the_tokens_are_the_rollouts(num_draft: int, device: str, rng: np.random.Generator) -> None:
    rows, length, vocab = 6, 12, 40
    table = logits_of(rng, vocab + 1, vocab, 2.0).to(device)
    given = {n: v for n, v in mixed(rng, rows, device).items() if n != "position"} | {"seed": 5, "exp": "portable"}

    def model(ids: torch.Tensor) -> torch.Tensor:  # the next token depends on the last one
        return table[ids[:, -1] + 1] if ids.shape[1] else table[:1].expand(rows, vocab).contiguous()

    want, want_logprobs = rollout(model, rows, length, **given)
    done = [torch.zeros(0, dtype=torch.int64, device=device) for _ in range(rows)]
    scored = [torch.zeros(0, device=device) for _ in range(rows)]
    accepted = 0
    while min(map(len, done)) < length:
        position = torch.tensor([len(x) for x in done], device=device)
        draft = torch.from_numpy(rng.integers(-1, vocab, (rows, num_draft))).to(device)
        for i in range(rows):  # half of the drafts are right
            ahead = want[i, len(done[i]) : len(done[i]) + num_draft]
            if rng.random() < 0.5:
                draft[i, : len(ahead)] = ahead
        last = torch.stack([x[-1] if len(x) else torch.tensor(-1, device=device) for x in done])
        logits = table[torch.cat([last[:, None], draft], 1) + 1]
        found = rk.verify_draft(logits, draft, position=position, **given)
        accepted += int(found.num_accepted.sum())
        for i, n in enumerate(found.num_accepted.tolist()):
            done[i] = torch.cat([done[i], draft[i, :n], found.next_id[i : i + 1]])
            scored[i] = torch.cat([scored[i], found.logprobs[i, : n + 1]])
            assert found.logprobs[i, n + 1 :].isnan().all()
    assert accepted > rows
    for i in range(rows):
        assert torch.equal(done[i][:length], want[i])
        assert same(scored[i][:length], want_logprobs[i])


def chi(counts: np.ndarray, p: np.ndarray) -> float:
    """Distance of chi-square from its expectation, in standard deviations."""
    n, some = counts.sum(), p > 0
    assert (counts[~some] == 0).all()
    degrees = int(some.sum()) - 1
    return abs(((counts - n * p)[some] ** 2 / (n * p[some])).sum() - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize("cuts", [{}, {"temperature": 0.7, "top_k": 5}])
@pytest.mark.parametrize("certain", [False, True])
def test_rejection_keeps_the_distribution(
    cuts: dict[str, Any], certain: bool, device: str, rng: np.random.Generator
) -> None:
    """Every token is within five deviations. sample draws the draft with the same keys, in stream 0."""
    n, vocab = 1 << (13 if device == "cpu" else 19), 9
    target, draft = logits_of(rng, 3, vocab, 1.5).to(device), logits_of(rng, 2, vocab, 1.5).to(device)
    draft[0, 4] = -torch.inf
    keys: dict[str, Any] = {"seed": 5, "sample_id": torch.arange(n, device=device), "exp": "portable"}
    one = [rk.sample(z.expand(n, vocab), position=3 + j, **keys).ids for j, z in enumerate(draft)]
    ids = torch.stack(one, 1) if not certain else target[:2].argmax(1).expand(n, 2)
    found = rk.verify_draft(
        target.expand(n, 3, vocab), ids, None if certain else draft.expand(n, 2, vocab), mode="rejection", position=3,
        **keys, **cuts,
    )  # fmt: skip
    assert (found.status == 0).all()
    p = np.exp(rk.sample_reference(target.cpu().numpy(), **cuts).logprob)
    padded = torch.cat([ids, torch.zeros_like(ids[:, :1])], 1).cpu().numpy()
    accepted, last = found.num_accepted.cpu().numpy(), found.next_id.cpu().numpy()
    for j in range(3):
        reached = accepted >= j
        tokens = np.where(accepted > j, padded[:, j], last)[reached]
        assert chi(np.bincount(tokens, minlength=vocab).astype(float), p[j]) < 5, j
        logprobs = found.logprobs[:, j].cpu().numpy()
        np.testing.assert_allclose(logprobs[reached], np.log(p[j][tokens]), atol=2e-5)
        assert np.isnan(logprobs[~reached]).all()
    q = np.eye(vocab)[ids[0].cpu().numpy()] if certain else draft.double().softmax(1).cpu().numpy()
    share = np.minimum(p[0], q[0]).sum()
    assert abs((accepted > 0).mean() - share) < 5 * np.sqrt(share * (1 - share) / n)


def test_rejection_has_greedy_rows_bad_rows_and_arrays(device: str, rng: np.random.Generator) -> None:
    x = logits_of(rng, 4, 3 * 30).reshape(4, 3, 30).clone()
    x[2, 1, 3] = float("nan")
    best = x.argmax(2)[:, :2]
    best[1, 1] = (best[1, 1] + 1) % 30
    best[2, 0], best[3] = x[2, 0].argmax(), torch.tensor([-1, 30])
    greedy = torch.tensor([True, True, True, False])
    given: dict[str, Any] = {"mode": "rejection", "seed": 3, "position": 0, "exp": "portable"}
    put = {"sample_id": torch.arange(4), "temperature": torch.full((4,), 0.5), "greedy": greedy}
    found = rk.verify_draft(x.to(device), best.to(device), **given, **{k: v.to(device) for k, v in put.items()})
    assert found.num_accepted.tolist() == [2, 1, 1, 0]
    assert found.next_id.tolist()[:3] == [int(x[0, 2].argmax()), int(x[1, 1].argmax()), -1]
    assert found.status.tolist() == [0, 0, SampleStatus.NAN_LOGIT, 0]
    assert found.logprobs.isnan().tolist()[:3] == [[False] * 3, [False, False, True], [False, True, True]]
    assert same(found.logprobs[0, :1], rk.logprob(x[0, :1], best[0, :1], exp="portable"))
    arrays = rk.verify_draft(x.numpy(), best.numpy(), **given, **{k: v.numpy() for k, v in put.items()})
    assert all(same(torch.from_numpy(np.asarray(a)), b) for a, b in zip(arrays, found, strict=True))


def test_arrays_and_bad_rows(rng: np.random.Generator) -> None:
    x = logits_of(rng, 8, 30).reshape(2, 4, 30).clone()
    x[1, 1, 3] = float("nan")
    tokens = rk.sample(x.reshape(8, 30), seed=1, sample_id=0, position=torch.tensor([5, 6, 7, 8] * 2)).ids.reshape(2, 4)
    draft = tokens[:, :3].clone()
    draft[0, 2] = (draft[0, 2] + 1) % 30
    found = rk.verify_draft(x, draft, seed=1, sample_id=0, position=5)
    assert found.num_accepted.tolist() == [2, 1]  # a bad row's -1 is no token, even if the draft also has -1
    assert found.next_id.tolist() == [int(tokens[0, 2]), -1]
    assert found.status.tolist() == [0, SampleStatus.NAN_LOGIT]
    arrays = rk.verify_draft(x.numpy(), draft.numpy(), seed=1, sample_id=0, position=5)
    assert all(same(torch.from_numpy(np.asarray(a)), b) for a, b in zip(arrays, found, strict=True))
    for mode in ("same", "rejection"):
        no_draft = rk.verify_draft(x[:, :1], draft[:, :0], mode=mode, seed=1, sample_id=0, position=5)
        assert no_draft.num_accepted.tolist() == [0, 0]
        assert rk.verify_draft(x[:0], draft[:0], mode=mode, seed=1, sample_id=0, position=5).logprobs.shape == (0, 4)
    assert no_draft.next_id.tolist() == rk.sample(x[:, 0], seed=1, sample_id=0, position=5, stream=1).ids.tolist()


def test_bad_input() -> None:
    x, draft = torch.randn(2, 3, 9), torch.zeros(2, 2, dtype=torch.int64)
    for message, given in {
        r"target_logits: expected shape \[num_rows, num_draft \+ 1, vocab_size\], got \[3, 9\]": {
            "target_logits": x[0]
        },
        "target_logits: expected a torch tensor or NumPy array, got list": {"target_logits": [1]},
        r"draft_ids: expected shape \[2, 2\], got \[2, 3\]": {"draft_ids": torch.zeros(2, 3, dtype=torch.int64)},
        "draft_ids: expected dtype int32 or int64, got float32": {"draft_ids": draft.float()},
        "target_logits: expected dtype float32, bfloat16 or float16, got float64": {"target_logits": x.double()},
        "top_p: expected a torch.Tensor, got ndarray": {"top_p": np.ones(2, np.float32)},
        "draft_ids: expected a torch.Tensor, got list": {"draft_ids": [[0, 0]] * 2},
        r"draft_logits: expected shape \[2, 2, 9\], got \[2, 3, 9\]": {"draft_logits": x, "mode": "rejection"},
        'draft_logits: expected None with mode="same"': {"draft_logits": x[:, :2]},
        'mode: expected "same", "rejection", got': {"mode": "both"},
        r"allowed: expected shape \[2, 3, num_words\], got \[6, 1\]": {"allowed": torch.ones(6, 1, dtype=torch.int32)},
        r"temperature: expected shape \[2\], got \[6\]": {"temperature": torch.ones(6)},
        "position: expected an integer or an array of them, got NoneType": {"position": None},
    }.items():
        arguments: dict[str, Any] = {"target_logits": x, "draft_ids": draft, "seed": 1, "sample_id": 0, "position": 0}
        with pytest.raises((TypeError, ValueError), match=message):
            rk.verify_draft(**(arguments | given))


def test_bad_operands_are_samples_errors() -> None:
    """An operand that sample refuses is not converted before it reaches sample."""
    x, draft = torch.randn(1, 3, 9), torch.zeros(1, 2, dtype=torch.int64)
    cases: dict[str, list[dict[str, Any]]] = {
        "position: expected dtype int32 or int64, got": [
            {"position": torch.ones(1, dtype=dtype)} for dtype in (torch.bool, torch.int8, torch.uint8, torch.float32)
        ],
        r"{name}: expected shape \[1\], got \[\]": [
            {"position": torch.tensor(1)}, {"temperature": torch.tensor(0.5)}, {"greedy": torch.tensor(True)},
        ],
        "allowed: expected an array or None, got": [{"allowed": [[1]]}, {"allowed": 1}],
    }  # fmt: skip
    for mode, is_array in itertools.product(("same", "rejection"), (False, True)):
        for message, refused in cases.items():
            for given in refused:
                call = {"target_logits": x, "draft_ids": draft, "seed": 1, "sample_id": 0, "position": 0} | given
                if is_array:
                    call = {n: v.numpy() if isinstance(v, torch.Tensor) else v for n, v in call.items()}
                with pytest.raises((TypeError, ValueError), match=message.replace("{name}", next(iter(given)))):
                    rk.verify_draft(**call, mode=mode)


@pytest.mark.filterwarnings("error")
def test_a_value_has_one_meaning(device: str, rng: np.random.Generator) -> None:
    """Two calls with equal values give equal bytes, for torch's tensors and for NumPy's arrays, without a warning."""
    x, q = logits_of(rng, 6, 9).reshape(2, 3, 9), logits_of(rng, 4, 9).reshape(2, 2, 9)
    draft, yes = torch.stack([x[:, 0].argmax(1), q[:, 1].argmax(1)], 1), torch.tensor([True, True])
    padded, broken, cold = q.clone(), q.clone(), torch.tensor([0.0, 0.7])
    padded[..., 7:] = torch.tensor([torch.nan, 30.0])
    broken[0, 0], broken[1, :, 3] = -torch.inf, torch.inf
    cut = q.masked_fill(torch.arange(9) >= 7, -torch.inf)
    unknown = torch.full_like(q, torch.nan)
    pairs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "a flag of NumPy": ({"greedy": np.True_}, {"greedy": True}),
        "a flag of NumPy, false": ({"greedy": np.bool_(False)}, {}),
        "temperature a greedy row does not read": (
            {"greedy": yes, "temperature": torch.tensor([torch.inf, torch.nan])},
            {"greedy": yes},
        ),
        "a number for each row": ({"temperature": 0.7}, {"temperature": torch.tensor([0.7, 0.7])}),
        "positions that are none": ({"position": torch.tensor([-1, 0])}, {"position": torch.tensor([1 << 32, 0])}),
        "the draft's padding": (
            {"draft_logits": padded, "valid_vocab": 7},
            {"draft_logits": cut, "valid_vocab": 7},
        ),
        "a draft without a distribution": (
            {"draft_logits": broken, "temperature": cold},
            {"draft_logits": torch.where(torch.tensor([[[True], [False]], [[True], [True]]]), unknown, broken),
             "temperature": cold},
        ),
    }  # fmt: skip
    how: dict[str, Any] = {"mode": "rejection", "seed": 3, "sample_id": 0, "exp": "portable"}
    plain: dict[str, Any] = {"position": 0, "draft_logits": q}
    for default, to in itertools.product((torch.float32, torch.bfloat16), (lambda v: v.to(device), torch.Tensor.numpy)):

        def call(given: dict[str, Any], to: Any = to) -> Any:
            placed = {n: to(v) if isinstance(v, torch.Tensor) else v for n, v in (plain | given).items()}
            return rk.verify_draft(to(x), to(draft), **how, **placed)

        for name, (one, other) in pairs.items():
            torch.set_default_dtype(default)
            try:
                got = call(one)
            finally:
                torch.set_default_dtype(torch.float32)
            for a, b in zip(got, call(other), strict=True):
                np.testing.assert_array_equal(*(v.cpu() if isinstance(v, torch.Tensor) else v for v in (a, b)), name)


def test_mapped(rng: np.random.Generator) -> None:
    x, draft = logits_of(rng, 12, 30).reshape(2, 2, 3, 30), torch.from_numpy(rng.integers(0, 30, (2, 2, 2)))
    f = partial(rk.verify_draft, seed=1, sample_id=0, position=5)
    for got, want in zip(torch.func.vmap(f)(x, draft), zip(*map(f, x, draft), strict=True), strict=True):
        assert same(got, torch.stack(want))
    with pytest.raises(NotImplementedError, match="logprob: vmap with kept sets"):
        torch.func.vmap(partial(f, mode="rejection"))(x, draft)


@pytest.mark.parametrize("mode", ["same", "rejection"])
def test_compiled(mode: Any, rng: np.random.Generator) -> None:
    x, draft = logits_of(rng, 6, 30).reshape(2, 3, 30), torch.tensor([[1, 2], [3, 4]])

    def f(x: torch.Tensor, draft: torch.Tensor) -> Any:
        return rk.verify_draft(x, draft, mode=mode, seed=1, sample_id=draft[:, 0], position=5, top_k=4)

    torch.compiler.reset()
    got, want = torch.compile(f, backend="aot_eager", fullgraph=True)(x, draft), f(x, draft)
    assert all(same(a, b) for a, b in zip(got, want, strict=True))


def test_compiled_once_for_all_positions(rng: np.random.Generator) -> None:
    x, draft = logits_of(rng, 6, 30).reshape(2, 3, 30), torch.tensor([[1, 2], [3, 4]])

    def f(x: torch.Tensor, draft: torch.Tensor, position: int, temperature: float) -> Any:
        return rk.verify_draft(x, draft, seed=1, sample_id=0, position=position, temperature=temperature)

    torch.compiler.reset()
    for of in (x, draft):
        torch._dynamo.mark_static(of)  # symbolic sizes would take long
    compiled = torch.compile(f, backend="eager", fullgraph=True, dynamic=True)
    for position, stance in ((5, "default"), (6, "fail_on_recompile")):
        with torch.compiler.set_stance(stance):
            got = compiled(x, draft, position, 0.1 * position)
        assert all(same(a, b) for a, b in zip(got, f(x, draft, position, 0.1 * position), strict=True))
