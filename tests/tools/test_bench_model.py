"""The bench of whole models: its counts and its output. Times are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the bench builds models of transformers")

import rl_kernel_native as rk  # noqa: E402
from rl_kernel_native.bench import __main__ as command  # noqa: E402
from rl_kernel_native.bench import model  # noqa: E402
from rl_kernel_native.integrations.families import FAMILIES  # noqa: E402

SMALL = [
    "--device",
    "cpu",
    "--seconds",
    "0.01",
    "--dtype",
    "float32",
    "--layers",
    "1",
    "--tokens",
    "12",
    "--threads",
    "1",
]


def test_command_for_models_writes_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out" / "run.json"
    assert command.main(["model", *SMALL, "--family", "Qwen3", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    (run,) = found["runs"]
    rows = {row["what"]: row for row in run["results"]}
    assert {name.split(",")[0] for name in rows if name.endswith("ms")} == set(model.PASSES)
    assert all(row["rk"] > 0 and row["stock"] > 0 for name, row in rows.items() if name.endswith("ms"))
    tokens = {name.split(": ")[1]: (row["rk"], row["of"]) for name, row in rows.items() if "of" in row}
    assert tokens == {name: (0, 2 * (11 if name == "decode" else 12)) for name in model.LAYOUTS}
    assert (run["served"]["attention"], run["unproved"], run["layers"]) == (1, {}, 1)
    assert "--layers 1" in found["command"]
    text = capsys.readouterr().out
    assert "| | stock | rk | rk / stock |" in text
    assert "| tokens that differ: packing |" in text


def test_what_stays_torchs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    patched = model.make("Gemma2", small=True, layers=1, dtype=torch.float32, device=torch.device("cpu"))
    patched.model.layers[0].self_attn.is_causal = False
    run = {
        "model": "small", "family": "Gemma2", "layers": 1, "hidden_size": 64, "parameters": 10**6, "dtype": "float32",
        "device": "none", "versions": {"torch": "2", "transformers": "5"}, "unproved": rk.patch_model(patched).unproved,
        "results": [model._row("prefill, ms", 3.0, 2.0)],
    }  # fmt: skip
    model.print_tables([run])
    text = capsys.readouterr().out
    assert "| prefill, ms | 3 | 2 | 0.67 |" in text
    assert "torch serves 1 module, model.layers.0.self_attn: attention: " in text
    with pytest.raises(SystemExit):
        command.main(["model", *SMALL, "--family", "GPT2"])
    assert "--family GPT2: want one of Qwen3, " in capsys.readouterr().err


@pytest.mark.parametrize("family", model.FAMILIES)
def test_shapes_are_those_of_dense_families(family: str) -> None:
    assert family.partition("-")[0] in {each.prefix for each in FAMILIES}
    with torch.device("meta"):
        stock = model.make(family, small=False, layers=1, dtype=torch.bfloat16, device=torch.device("meta"))
    assert stock.config.num_hidden_layers == 1


def test_both_models_share_their_weights_and_a_byte_is_noticed() -> None:
    stock = model.make("Llama", small=True, layers=1, dtype=torch.float32, device=torch.device("cpu"))
    patched = model.twin_of(stock)
    rk.patch_model(patched)
    assert all(a is b for a, b in zip(stock.parameters(), patched.parameters(), strict=True))
    ids = torch.arange(12).view(2, 6)
    served = model.Served(patched, ids, ids)
    served.prefill()(0)
    assert {name: differ for name, differ, _ in served.layouts()} == dict.fromkeys(model.LAYOUTS, 0)
    logits = served.logits(ids)
    other = logits.clone()
    other[1, 4, 3] += 1
    other[0, 2, 0] += 1
    assert model._differing(other, logits) == 2
    step = served.decode_step()
    assert torch.equal(step(0), step(1))  # each step finds the cache unchanged
