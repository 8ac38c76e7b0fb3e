"""Fixed random calls of attention. A sequence has the same bytes in every form and alone. Values are within the
contract's bounds of float64. A GPU has the bytes of the CPU.

RLK_FUZZ_CASES (300) sets how many. A failure names its case. This command runs one case:
`PYTHONPATH=tests/support python tests/ops/test_attention_fuzz.py CASE`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import rl_kernel_native as rk
from cases import differing, mode
from fuzz_layouts import log_uniform

torch = pytest.importorskip("torch", reason="the fuzz makes its forms with torch")

from attention_bounds import attention_failures  # noqa: E402
from attention_cases import DTYPES, FORMS, Sequences, alone, each, moved, results  # noqa: E402

SEED = 20_261
CASES = int(os.environ.get("RLK_FUZZ_CASES", "300"))
CHUNK = 20  # cases per test, so that a run shows progress; a failing chunk names its case


@dataclass
class Problem:
    number: int
    sequences: Sequences
    form: str
    options: dict[str, Any]

    @property
    def name(self) -> str:
        s = self.sequences
        heads = [*s.q[0].shape[1:], s.v[0].shape[-1]]
        return f"case {self.number}: {s.q[0].dtype} {heads} {s.lengths} {self.form} {self.options}"


def make(number: int) -> Problem:
    rng = np.random.default_rng([SEED, number])
    form = str(rng.choice(FORMS))
    lengths = []
    for _ in range(int(rng.integers(1, 4))):
        keys = log_uniform(rng, 1, 300)
        queries = keys if form == "left" or rng.random() < 0.4 else log_uniform(rng, 1, 100)
        lengths.append((queries, keys))
    kv_heads = int(rng.integers(1, 3))
    heads = (kv_heads * int(rng.choice([1, 2, 5])), kv_heads)
    head_dim = 8 * (int(rng.choice([8, 16])) if rng.random() < 0.4 else log_uniform(rng, 1, 32))
    s = Sequences(rng, lengths, heads, head_dim, str(rng.choice(DTYPES)))
    spread = float(rng.choice([0.1, 1.0, 6.0]))
    s.q = [t * spread for t in s.q]
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["window_size"] = log_uniform(rng, 1, 200)
    elif rng.random() < 0.3 and form != "left":
        options["causal"] = False
    if rng.random() < 0.3:
        options["softmax_scale"] = float(rng.uniform(0.02, 1.0))
    if rng.random() < 0.3:
        options["softcap"] = float(rng.choice([2.0, 30.0]))
    if rng.random() < 0.3:
        options["sinks"] = torch.from_numpy(3 * rng.standard_normal(heads[0], dtype=np.float32))
    if rng.random() < 0.3:  # values narrower than keys
        value_dim = 8 * log_uniform(rng, 1, head_dim // 8)
        s.v, s.dout = ([t[..., :value_dim].contiguous() for t in parts] for parts in (s.v, s.dout))
    return Problem(number, s, form, options)


def check_cpu(p: Problem) -> None:
    exp = ("portable", "hardware")[p.number % 2]
    want = alone(p.sequences, exp=exp, **p.options)
    for b, got in enumerate(each(p.sequences, p.form, exp=exp, **p.options)):
        for name in got:
            found = differing(got[name].contiguous(), want[b][name].contiguous())
            assert not found, f"{p.name}, {name} of sequence {b}: {found}"
        if p.number % 3:  # the float64 reference takes longer than all forms
            continue
        s = p.sequences
        with mode("cpu", exp):
            found = attention_failures(s.q[b], s.k[b], s.v[b], s.dout[b], exp=exp, **p.options)
        assert not found, f"{p.name}, sequence {b}: {found}"


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_every_form_has_the_bytes_of_each_sequence_alone(first: int) -> None:
    for number in range(first, min(first + CHUNK, CASES)):
        check_cpu(make(number))


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_cpu_and_gpu_have_the_same_bytes(first: int) -> None:
    for number in range(first, min(first + CHUNK, CASES)):
        p = make(number)
        call = p.sequences.call(p.form)
        for exp in ("portable", "hardware"):
            with rk.arithmetic("sm_90"):
                want = results(call, exp=exp, **p.options)
            there, options = moved(torch.Tensor.cuda, (call, p.options))
            got = results(there, device="cuda", exp=exp, **options)
            for name in want:
                found = differing(want[name], got[name])
                assert not found, f"{p.name}, {exp}, {name}: {found}"


if __name__ == "__main__":
    case = make(int(sys.argv[1]))
    print(case.name)
    check_cpu(case)
