"""linear_sample: the bytes of sample of linear in any workspace, batch and stride; the log-probabilities of
linear_logprob; bad input."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import rl_kernel_native as rk
from rl_kernel_native._arithmetic import UNITS
from rl_kernel_native.ops.sample import SampleStatus

NAMES = ("ids", "logprob", "raw_logprob", "status")
KEYS_AND_TEMPERATURE = ("temperature", "seed", "sample_id", "position")
CASES = int(os.environ.get("RLK_SAMPLE_FUZZ_CASES", "100"))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    width = {4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.cpu().view(width), b.cpu().view(width))


def differing(got: Any, want: Any) -> list[str]:
    return [n for n in NAMES if not same(getattr(got, n), getattr(want, n))]


def head(rng: np.random.Generator, rows: int, ins: int, vocab: int, dtype: Any, device: str) -> list[torch.Tensor]:
    """Hidden states and a weight whose logits have a deviation of 3."""
    shapes = ((rows, ins), (vocab, ins))
    found = (torch.from_numpy(rng.standard_normal(s) * (3 / ins**0.5) ** 0.5) for s in shapes)
    return [x.to(dtype).to(device) for x in found]


def mixed(rng: np.random.Generator, rows: int, device: str) -> dict[str, torch.Tensor]:
    """Parameters that differ in every row."""
    choose = {
        "temperature": rng.choice([0.6, 1.0, 1.7], rows).astype(np.float32),
        "top_k": rng.choice([0, 1, 20, 64], rows),
        "min_p": rng.choice([0.0, 0.0, 0.05, 0.3], rows).astype(np.float32),
        "greedy": rng.random(rows) < 0.2,
        "seed": rng.integers(-9, 9, rows),
        "sample_id": rng.integers(0, 1 << 40, rows),
        "position": rng.integers(0, 1 << 20, rows).astype(np.int32),
    }
    return {name: torch.from_numpy(x).to(device) for name, x in choose.items()}


def composed(hidden: Any, weight: Any, logits_dtype: Any = None, bias: Any = None, **given: Any) -> Any:
    return rk.sample(rk.linear(hidden, weight, bias, out_dtype=logits_dtype), return_logprob="both", **given)


def least(*operands: Any, **given: Any) -> int:
    """Workspace of one row, which the error names."""
    with pytest.raises(ValueError, match="workspace_bytes: expected at least") as refused:
        rk.linear_sample(*operands, **given | {"workspace_bytes": 0})
    return int(str(refused.value).split("at least ")[1].split(" ")[0])


def dtypes_of(device: str, unit: str = "ieee") -> list[torch.dtype]:
    """Float32 operands work only on the CPU, in ieee arithmetic."""
    return [torch.bfloat16, torch.float16, *([torch.float32] if (device, unit) == ("cpu", "ieee") else [])]


# One column; a leaf and some columns; no multiple of a tile; several leaves per part and two blocks of rows.
SHAPES = ((7, 16, 1), (40, 24, 130), (33, 72, 1999), (300, 16, 5000))


@pytest.mark.parametrize("logits_dtype", [None, "float32"])
@pytest.mark.parametrize("unit", UNITS)
def test_it_has_the_bytes_of_sample_of_linear(
    unit: str, logits_dtype: Any, device: str, rng: np.random.Generator
) -> None:
    if device != "cpu" and unit != "ieee":
        pytest.skip("a GPU has its own arithmetic")
    for rows, ins, vocab in SHAPES[: 4 if unit == "ieee" else 2]:
        for dtype in dtypes_of(device, unit):
            operands = head(rng, rows, ins, vocab, dtype, device)
            given = mixed(rng, rows, device) | {"valid_vocab": vocab - vocab // 9, "logits_dtype": logits_dtype}
            bias = torch.from_numpy(rng.standard_normal(vocab).astype(np.float32)).to(device)
            for b in (None, bias, bias.to(dtype)):
                with rk.arithmetic(unit):
                    want = composed(*operands, bias=b, **given)
                    got = rk.linear_sample(*operands, bias=b, return_logprob="both", **given)
                    one = least(*operands, **given)
                    few = [
                        rk.linear_sample(*operands, bias=b, return_logprob="both", workspace_bytes=size, **given)
                        for size in (one, 9 * one)
                    ]
                assert (want.status == 0).all()
                assert not any(differing(x, want) for x in (got, *few))


# One column; a leaf per part; several; logits at odd addresses; more rows than a warpgroup has.
FEW_ROWS = ((1, 16, 1), (7, 24, 130), (33, 72, 1999), (64, 200, 5000), (64, 16, 33_001), (65, 16, 5000))


@pytest.mark.parametrize("logits_dtype", [None, "float32"])
@pytest.mark.parametrize("exp", ["portable", "hardware"])
def test_few_rows_that_nothing_cuts(exp: Any, logits_dtype: Any, device: str, rng: np.random.Generator) -> None:
    """For up to 64 such rows, a GPU has a kernel that computes product and leaf statistics. Bad rows touch no other."""
    if device == "cpu" and exp == "hardware":
        pytest.skip("a GPU's exponential")
    for rows, ins, vocab in FEW_ROWS:
        for dtype in dtypes_of(device):
            hidden, weight = head(rng, rows, ins, vocab, dtype, device)
            given: dict[str, Any] = {n: x for n, x in mixed(rng, rows, device).items() if n in KEYS_AND_TEMPERATURE}
            given |= {"exp": exp, "logits_dtype": logits_dtype, "valid_vocab": vocab - vocab // 9}
            bias = torch.from_numpy(rng.standard_normal(vocab).astype(np.float32)).to(device)
            if rows > 6:
                hidden[2, 3], hidden[4, 1] = float("nan"), float("inf")
                given["temperature"][5], given["position"][6] = 0.0, -1
            for b in (None, bias):
                got, want = rk.linear_sample(hidden, weight, bias=b, **given), composed(hidden, weight, bias=b, **given)
                assert not [n for n in ("ids", "logprob", "status") if not same(getattr(got, n), getattr(want, n))]
                assert (want.status != 0).sum() == (4 if rows > 6 else 0)
                for i in range(0, rows, 9):
                    one = {n: v[i : i + 1] if isinstance(v, torch.Tensor) else v for n, v in given.items()}
                    alone = rk.linear_sample(hidden[i : i + 1], weight, bias=b, **one)
                    assert same(alone.ids, want.ids[i : i + 1])
                    assert same(alone.logprob, want.logprob[i : i + 1])


def apart(x: torch.Tensor, pitch: int, offset: int = 0) -> torch.Tensor:
    """The same rows with a larger stride."""
    wide = torch.full((len(x), pitch), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, offset : offset + x.shape[1]] = x
    return wide[:, offset : offset + x.shape[1]]


# Memory layouts of hidden and weight. A GPU's kernel for few rows takes only rows that a tensor map describes, but
# every call has the same bytes.
LAYOUTS: dict[str, Any] = {
    "rows of hidden expanded": lambda hidden, weight: (hidden[:1].expand(len(hidden), -1), weight),
    "rows of weight expanded": lambda hidden, weight: (hidden, weight[:1].expand(len(weight), -1)),
    "gaps": lambda hidden, weight: (apart(hidden, 64, 8), apart(weight, 56)),
    "odd addresses": lambda hidden, weight: (apart(hidden, 43, 1), weight),
    "odd addresses of weight": lambda hidden, weight: (hidden, apart(weight, 45, 3)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_rows_in_any_layout_and_workspace(layout: str, device: str, rng: np.random.Generator) -> None:
    hidden, weight = LAYOUTS[layout](*head(rng, 30, 40, 1500, torch.bfloat16, device))
    given: dict[str, Any] = {n: x for n, x in mixed(rng, 30, device).items() if n in KEYS_AND_TEMPERATURE}
    want = composed(hidden, weight, **given)
    for size in (None, 7 * least(hidden, weight, **given)):
        more = {} if size is None else {"workspace_bytes": size}
        got = rk.linear_sample(hidden, weight, **given, **more)
        assert not [n for n in ("ids", "logprob", "status") if not same(getattr(got, n), getattr(want, n))], size


# Rows, options and layout of a call, and whether its plan stores logits.
PLANS: dict[str, tuple[int, dict[str, Any], str, bool]] = {
    "one row": (1, {}, "", False),
    "64 rows": (64, {}, "", False),
    "float32 logits": (9, {"logits_dtype": "float32"}, "", False),
    "rows apart": (30, {}, "gaps", False),
    "65 rows": (65, {}, "", True),
    "the raw log-probability": (9, {"return_logprob": "both"}, "", True),
    "top_k": (9, {"top_k": 5}, "", True),
    "min_p": (9, {"min_p": 0.1}, "", True),
    "greedy": (9, {"greedy": True}, "", True),
    "odd addresses": (30, {}, "odd addresses", True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_takes_memory_for_logits_only_if_it_stores_them(plan: str, rng: np.random.Generator) -> None:
    """The logits of a row take 66 KB or more, and sample's own workspace less than half of this."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel without logits is of compute capability 9.0")
    rows, how, layout, stores = PLANS[plan]
    hidden, weight = head(rng, rows, 40, 33_001, torch.bfloat16, "cuda")
    hidden, weight = LAYOUTS[layout](hidden, weight) if layout else (hidden, weight)
    rk.workspace_stats(reset=True)
    rk.linear_sample(hidden, weight, seed=7, sample_id=0, position=0, **how)
    (found,) = rk.workspace_stats(reset=True).values()
    assert (found.last_bytes >= rows * 33_001 * 2) == stores


@pytest.mark.parametrize("vocab", [131_073, 151_936])
def test_few_rows_of_more_leaves_than_one_step_draws_among(vocab: int, device: str, rng: np.random.Generator) -> None:
    hidden, weight = head(rng, 3, 16, vocab, torch.bfloat16, device)
    given: dict[str, Any] = {n: x for n, x in mixed(rng, 3, device).items() if n in KEYS_AND_TEMPERATURE}
    for valid in (vocab, 5):  # 5 leave most parts without a column
        got, want = (f(hidden, weight, valid_vocab=valid, **given) for f in (rk.linear_sample, composed))
        assert not [n for n in ("ids", "logprob", "status") if not same(getattr(got, n), getattr(want, n))], valid


def case(number: int, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    rng = np.random.default_rng([36, 1, number])
    rows, ins, vocab = (int(rng.choice(x)) for x in ((1, 2, 5, 130), (1, 16, 40, 200), (1, 7, 130, 1000, 2500)))
    dtypes = dtypes_of(device)
    operands = head(rng, rows, ins, vocab, dtypes[int(rng.integers(len(dtypes)))], device)
    if rng.random() < 0.2:
        operands = [torch.round(x) for x in operands]  # gives many equal logits
    every = mixed(rng, rows, device)
    given: dict[str, Any] = {n: x if rng.random() < 0.5 else x[0].item() for n, x in every.items()}
    given["exp"] = "portable"
    given["logits_dtype"] = [None, "float32"][int(rng.integers(2))]
    given["valid_vocab"] = int(rng.integers(1, vocab + 1)) if rng.random() < 0.3 else None
    return operands, given


@pytest.mark.parametrize("block", range(4))  # split, so that one failure does not stop the other tests
def test_any_call_has_the_bytes_of_sample_of_linear(block: int, device: str) -> None:
    for number in range(block, CASES, 4):
        operands, given = case(number, device)
        few = (
            {"workspace_bytes": (1 + number % 3) * least(*operands, return_logprob="both", **given)}
            if number % 2
            else {}
        )
        got = rk.linear_sample(*operands, return_logprob="both", **given, **few)
        assert not differing(got, composed(*operands, **given)), number


def test_a_row_has_its_bytes_in_any_batch_and_stride(device: str, rng: np.random.Generator) -> None:
    hidden, weight = head(rng, 48, 40, 1500, torch.bfloat16, device)
    hidden[5, 7] = float("nan")
    given = mixed(rng, 48, device) | {"return_logprob": "both"}
    want = rk.linear_sample(hidden, weight, **given)
    order = torch.from_numpy(rng.permutation(48)).to(device)
    moved = {n: v[order] if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    got = rk.linear_sample(hidden[order], weight, **moved)
    assert all(same(getattr(got, n), getattr(want, n)[order]) for n in NAMES)
    for i in range(0, 48, 7):
        one = {n: v[i : i + 1] if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        alone = rk.linear_sample(hidden[i : i + 1], weight, **one)
        assert all(same(getattr(alone, n), getattr(want, n)[i : i + 1]) for n in NAMES)
    # Rows and weights have gaps, and parameters use every second element.
    wide = torch.full((48, 200), float("nan"), dtype=hidden.dtype, device=device)
    wide[:, 3:43] = hidden
    tall = torch.full((1500, 48), float("nan"), dtype=hidden.dtype, device=device)
    tall[:, 8:] = weight
    apart = {n: v.repeat_interleave(2)[::2] if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    size = 5 * least(hidden, weight, **given)
    few = rk.linear_sample(wide[:, 3:43], tall[:, 8:], workspace_bytes=size, **apart)
    assert not differing(few, want)


def test_the_logprob_is_that_of_linear_logprob(device: str, rng: np.random.Generator) -> None:
    """logprob is equal if top_k, top_p and min_p drop no column; raw_logprob always is."""
    hidden, weight = head(rng, 40, 64, 3000, torch.bfloat16, device)
    given = mixed(rng, 40, device) | {"greedy": False, "top_k": 0, "min_p": 0.0}
    for logits_dtype in ("bfloat16", "float32"):
        how: dict[str, Any] = {"logits_dtype": logits_dtype}
        got = rk.linear_sample(hidden, weight, return_logprob="both", **given, **how)
        scored = rk.linear_logprob(hidden, weight, got.ids, temperature=given["temperature"], **how)
        assert same(scored, got.logprob)
        assert same(rk.linear_logprob(hidden, weight, got.ids, **how), got.raw_logprob)


def test_the_workspace_is_bounded_and_its_least_is_named(device: str, rng: np.random.Generator) -> None:
    hidden, weight = head(rng, 300, 16, 5000, torch.bfloat16, device)
    keys: dict[str, Any] = {"seed": 1, "sample_id": 0, "position": 0}
    want = rk.linear_sample(hidden, weight, return_logprob="both", **keys)
    one = least(hidden, weight, **keys)
    assert one < 300 * 5000  # half of the bytes of all logits
    for size in (one, 7 * one):
        rk.workspace_stats(reset=True)
        got = rk.linear_sample(hidden, weight, return_logprob="both", workspace_bytes=size, **keys)
        (found,) = rk.workspace_stats(reset=True).values()
        assert max(one, size // 2) <= found.last_bytes <= size + 3  # whole numbers of float32
        assert not differing(got, want)


def test_bad_rows_are_minus_one_and_touch_no_other(device: str, rng: np.random.Generator) -> None:
    hidden, weight = head(rng, 9, 16, 700, torch.bfloat16, device)
    good = rk.linear_sample(hidden, weight, seed=1, sample_id=0, position=3, return_logprob="both")
    hidden[1, 3], hidden[2, 3] = float("nan"), float("inf")
    given = {
        "temperature": torch.ones(9), "top_k": torch.zeros(9, dtype=torch.int64), "min_p": torch.zeros(9),
        "position": torch.full((9,), 3),
    }  # fmt: skip
    given["temperature"][3], given["top_k"][4], given["top_k"][5], given["min_p"][6] = 0.0, -1, 65, 1.5
    given["position"][7] = -1
    given = {name: v.to(device) for name, v in given.items()}
    got = rk.linear_sample(hidden, weight, seed=1, sample_id=0, return_logprob="both", **given)
    s = SampleStatus
    assert [bool(x) for x in got.status.tolist()] == [False, *[True] * 7, False]
    assert got.status.tolist()[3:8] == [s.BAD_TEMPERATURE, *[s.BAD_PARAMETER] * 3, s.BAD_POSITION]
    assert got.ids.tolist()[1:8] == [-1] * 7
    assert got.logprob[1:8].isnan().all()
    assert got.raw_logprob[1:8].isnan().all()
    for i in (0, 8):
        assert all(same(getattr(got, n)[i : i + 1], getattr(good, n)[i : i + 1]) for n in NAMES)


def test_results_that_are_not_asked_for(device: str, rng: np.random.Generator) -> None:
    hidden, weight = head(rng, 3, 16, 40, torch.bfloat16, device)
    keys: dict[str, Any] = {"seed": 1, "sample_id": 0, "position": 0}
    want = rk.linear_sample(hidden, weight, **keys)
    for kind, wants in {"none": (False, False), "processed": (True, False), "raw": (False, True)}.items():
        r = rk.linear_sample(hidden, weight, return_logprob=kind, **keys)
        assert (r.logprob is not None, r.raw_logprob is not None) == wants
        assert r.kept is r.top_ids is r.raw_top_logprobs is None
        assert same(r.ids, want.ids)
    assert rk.linear_sample(hidden[:0], weight, **keys).ids.shape == (0,)
    if device == "cpu":
        arrays = [x.float().numpy() for x in (hidden, weight)]
        plain, tensors = (rk.linear_sample(*x, **keys) for x in (arrays, [torch.from_numpy(a) for a in arrays]))
        assert plain.ids.tolist() == tensors.ids.tolist()
        assert plain.logprob.tolist() == tensors.logprob.tolist()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_and_batched(backend: str, device: str, rng: np.random.Generator) -> None:
    operands, given = head(rng, 5, 16, 90, torch.bfloat16, device), mixed(rng, 5, device)
    torch.compiler.reset()

    def f(operands: Any, given: Any, position: int) -> Any:
        first = rk.linear_sample(*operands, return_logprob="both", exp="portable", **given)
        keys = {"seed": 3, "sample_id": 4, "position": position}
        second = rk.linear_sample(*operands, top_k=3, logits_dtype="float32", exp="portable", **keys)
        return *(getattr(first, n) for n in NAMES), second.ids, second.logprob

    for position in (0, 5):
        got = torch.compile(f, backend=backend, fullgraph=True)(operands, given, position)
        assert all(same(a, b) for a, b in zip(got, f(operands, given, position), strict=True))
    if device == "cpu":
        with rk.arithmetic("sm_90"), pytest.raises(Exception, match="arithmetic: a compiled call computes in ieee"):
            torch.compile(f, backend=backend, fullgraph=True)(operands, given, 5)
    stacked = torch.stack([operands[0], operands[0] * 2])
    one = lambda x: f((x, operands[1]), given, 1)  # noqa: E731
    want = [one(x) for x in stacked]
    got = torch.func.vmap(one)(stacked)
    assert all(same(a, torch.stack(b)) for a, b in zip(got, zip(*want, strict=True), strict=True))


def test_autocast_casts_as_linear_does(rng: np.random.Generator) -> None:
    hidden, weight = head(rng, 4, 16, 50, torch.float32, "cpu")
    given: dict[str, Any] = {"seed": 1, "sample_id": torch.arange(4), "position": 0, "bias": torch.randn(50)}
    with torch.autocast("cpu", torch.bfloat16):
        got = rk.linear_sample(hidden, weight.bfloat16(), return_logprob="both", **given)
        assert not differing(got, composed(hidden, weight.bfloat16(), **given))
    assert differing(got, composed(hidden, weight, **given))


def test_inputs_are_taken_as_detached(device: str, rng: np.random.Generator) -> None:
    hidden, weight = (x.requires_grad_() for x in head(rng, 4, 16, 50, torch.bfloat16, device))
    assert not rk.linear_sample(hidden, weight, seed=1, sample_id=0, position=0).logprob.requires_grad


def test_flops_are_those_of_the_product(device: str) -> None:
    x, w = (torch.ones(n, 16, device=device, dtype=torch.bfloat16) for n in (4, 50))
    with FlopCounterMode(display=False) as counter:
        rk.linear_sample(x, w, seed=1, sample_id=0, position=0)
    assert counter.get_total_flops() == 2 * 4 * 16 * 50


def test_opcheck(device: str) -> None:
    rk._call.load()
    x, w, ids = torch.randn(4, 16, device=device), torch.randn(50, 16, device=device), torch.arange(4, device=device)
    x, w = (x, w) if device == "cpu" else (x.bfloat16(), w.bfloat16())
    rows = (None, 7, ids, 0, None, 3, None, 1.0, None, 4, torch.full((4,), 0.1, device=device), 0.0, None, False)
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = torch.ops.rl_kernel_native.linear_sample
    torch.library.opcheck(call, (x, w, None, *rows, 40, 0, 0, -1, 3, 1 << 20), test_utils=utils)


def test_bad_input() -> None:
    x, w, ids = torch.randn(3, 16), torch.randn(40, 16), torch.arange(3)
    for message, given in {
        r"hidden: expected shape \[num_rows, in_features\], got \[1, 3, 16\]": {"hidden": x[None]},
        "hidden: expected dtype float32, bfloat16 or float16, got int64": {"hidden": x.long()},
        r"weight: expected shape \[out_features, 16\] \(16 is the last dimension of hidden\), got \[16, 40\]": {
            "weight": w.T
        },
        "weight: expected dtype float32": {"weight": w.half()},
        "weight: expected 1 to 524288 rows, got 524289": {"weight": torch.zeros((1 << 19) + 1, 16)},
        r"bias: expected shape \[40\] \(out_features\), got \[39\]": {"bias": torch.zeros(39)},
        "temperature: expected a finite number > 0, got 0; for greedy rows pass greedy=True": {"temperature": 0},
        r"temperature: expected shape \[3\], got \[2\]": {"temperature": torch.ones(2)},
        r"top_k: expected an integer in \[0, 64\] \(0 cuts nothing\), got 65": {"top_k": 65},
        r"top_k: expected an integer >= 0 \(0 cuts nothing\), got -1": {"top_k": -1},
        r"min_p: expected a number in \[0, 1\], got -0.1": {"min_p": -0.1},
        "greedy: expected a bool, got int": {"greedy": 1},
        r"valid_vocab: expected an integer in \[1, 40\], got 41": {"valid_vocab": 41},
        "return_logprob: expected": {"return_logprob": True},
        r"logits_dtype: expected float32 \(that of hidden\), got bfloat16": {"logits_dtype": "bfloat16"},
        "workspace_bytes: expected an integer, got float": {"workspace_bytes": 1e9},
        "sample_id: expected an integer or an array of them, got NoneType": {"sample_id": None},
        "position: expected": {"position": -1},
        "unexpected keyword argument 'top_p'": {"top_p": 0.9},
        "unexpected keyword argument 'allowed'": {"allowed": None},
        "unexpected keyword argument 'return_kept'": {"return_kept": True},
        "unexpected keyword argument 'n_logprobs'": {"n_logprobs": 3},
        "unexpected keyword argument 'repetition_penalty'": {"repetition_penalty": 1.1},
    }.items():
        operands = {"hidden": x, "weight": w, "seed": 1, "sample_id": ids, "position": 0} | given
        with pytest.raises((TypeError, ValueError), match=message):
            rk.linear_sample(**operands)


@pytest.mark.gpu
def test_a_gpu_has_the_bytes_of_the_cpu_as_an_sm_90(rng: np.random.Generator) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the model of sm_90 is the verified one")
    for vocab in (130, 4099):
        operands, given = head(rng, 33, 64, vocab, torch.bfloat16, "cpu"), mixed(rng, 33, "cpu")
        for logits_dtype in (None, "float32"):
            how: dict[str, Any] = {"logits_dtype": logits_dtype, "exp": "portable", "return_logprob": "both"}
            with rk.arithmetic("sm_90"):
                want = rk.linear_sample(*operands, **given, **how)
            got = rk.linear_sample(*(x.cuda() for x in operands), **{n: v.cuda() for n, v in given.items()}, **how)
            assert not differing(got, want)


@pytest.mark.gpu
def test_nothing_waits_for_the_host_and_a_graph_replays(rng: np.random.Generator) -> None:
    operands, given = head(rng, 300, 64, 32000, torch.bfloat16, "cuda"), mixed(rng, 300, "cuda")
    call = lambda: rk.linear_sample(*operands, workspace_bytes=16 << 20, return_logprob="both", **given)  # noqa: E731
    want = call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    operands[0].mul_(0.5)
    graph.replay()
    assert not differing(got, call())
    assert differing(got, want)
