"""Records of an engine: which log-probabilities `rlk compare --recorded` reads, and its error for each bad line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="rlk compare needs torch")
pytest.importorskip("transformers", reason="rlk compare needs transformers")
for _name in ("typer", "rich", "matplotlib"):
    pytest.importorskip(_name, reason="rlk compare needs it")

from typer.testing import CliRunner  # noqa: E402

from rl_kernel_native.consistency import cli, model  # noqa: E402
from rl_kernel_native.consistency.errors import BadInput  # noqa: E402
from rl_kernel_native.consistency.recorded import Record, load_records  # noqa: E402

VOCAB = 99
IDS = [5, 6, 7]  # the response, after a prompt of two tokens
GOOD = -0.5


def line_of(dialect: str, logprobs: list[Any], ids: list[int] = IDS) -> str:
    """A line in an engine's format, written as Python's json does, with NaN and Infinity."""
    prompt = [1, 2]
    pairs = list(zip(ids, logprobs, strict=False))
    return json.dumps(
        {
            "rk": {"prompt_ids": prompt, "response_ids": ids, "logprobs": logprobs},
            "vllm": {
                "prompt_token_ids": prompt,
                "outputs": [{"token_ids": ids, "logprobs": [{str(i): {"logprob": x, "rank": 1}} for i, x in pairs]}],
            },
            "sglang": {
                "input_ids": prompt, "output_ids": ids,
                "meta_info": {"output_token_logprobs": [[x, i, None] for i, x in pairs]},
            },
            "verl": {"prompts": prompt, "responses": ids, "rollout_log_probs": logprobs},
        }[dialect]
    )  # fmt: skip


def read(tmp_path: Path, *lines: str) -> list[Record]:
    path = tmp_path / "recorded.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return load_records(path, VOCAB)


FIELDS = {"rk": "logprobs", "vllm": "logprobs", "sglang": "output_token_logprobs", "verl": "rollout_log_probs"}
# No log-probability of a token: above 0 by more than rounding, NaN, no number, or beyond float32.
BAD = [0.5, 1.0, 1, 1.1e-4, math.inf, math.nan, 1e39, -1e39, 10**400, -(10**400), True, False, None, "-1", [], {}]
# 6e-5 is the last bit of a float32 logit of 1000; vLLM's server writes -9999 for -Inf.
LEGAL = [0, 0.0, -0.0, 1.2e-7, 6.2e-5, 1e-4, -1e-30, -9999.0, -(2**100), -3.4e38, -math.inf]


@pytest.mark.parametrize("dialect", FIELDS)
@pytest.mark.parametrize("value", BAD, ids=lambda x: str(x)[:9])
def test_a_number_that_is_no_log_probability_is_named(tmp_path: Path, dialect: str, value: Any) -> None:
    """By its file, line, place in the list, and position among the tokens of prompt and response."""
    lines = [line_of(dialect, [GOOD] * 3), line_of(dialect, [GOOD, value, GOOD])]
    where = f"{tmp_path}/recorded.jsonl:2: {FIELDS[dialect]}[1]: expected a log-probability of token 6 at position 3, "
    with pytest.raises(BadInput) as found:
        read(tmp_path, *lines)
    words = str(found.value)
    assert words.startswith(f"{where}a number <= 0 (or up to 0.0001, by rounding), got ")
    assert len(words) < 500


@pytest.mark.parametrize("dialect", FIELDS)
def test_log_probabilities_are_read_as_they_stand(tmp_path: Path, dialect: str) -> None:
    for value in LEGAL:
        (record,) = read(tmp_path, line_of(dialect, [GOOD, value, GOOD]))
        assert record.logprobs == [GOOD, value, GOOD]
        assert (record.prompt, record.response) == ([1, 2], IDS)


@pytest.mark.parametrize("dialect", FIELDS)
@pytest.mark.parametrize("logprobs", [[], [GOOD], [GOOD] * 2, [GOOD] * 4], ids=len)
def test_every_token_has_one_log_probability(tmp_path: Path, dialect: str, logprobs: list[float]) -> None:
    ids = IDS + [8] * (len(logprobs) - 3)  # a line of vLLM or SGLang has an id for each
    record = json.loads(line_of(dialect, logprobs, ids))
    for fields in (record, *record.get("outputs", [])):
        for name in ("response_ids", "token_ids", "output_ids", "responses"):
            if name in fields:
                fields[name] = IDS
    with pytest.raises(BadInput, match=rf"recorded.jsonl:1: .* for each of 3 ids of the response, got {len(logprobs)}"):
        read(tmp_path, json.dumps(record))


def test_each_response_of_a_prompt_is_read(tmp_path: Path) -> None:
    """vLLM's n > 1; the responses after the first were not compared."""
    line = json.loads(line_of("vllm", [GOOD] * 3))
    line["outputs"].append({"token_ids": [8], "logprobs": [{"8": {"logprob": -2.0}}]})
    first, second = read(tmp_path, json.dumps(line))
    assert (first.response, second.response, second.logprobs) == (IDS, [8], [-2.0])
    line["outputs"][1]["logprobs"] = [{"8": {"logprob": 2.0}}]
    with pytest.raises(BadInput, match=r"recorded.jsonl:1: outputs\[1\]: logprobs\[0\]: .* of token 8 at position 2"):
        read(tmp_path, json.dumps(line))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":1: not JSON"),
        ("[]", ":1: want a JSON object"),
        ('{"a": 1}', "and log-probabilities by the names of one of: prompt_ids, response_ids, logprobs"),
        ('{"prompt_ids": [1], "response_ids": [2, 3], "logprobs": [-1.0]}', "each of 2 ids of the response, got 1"),
        ('{"prompt_ids": [1], "response_ids": [2], "logprobs": ["a"]}', "expected a log-probability of token 2"),
        ('{"prompt_ids": [1], "response_ids": [2], "logprobs": [-1, -2]}', "each of 1 ids of the response, got 2"),
        ('{"prompt_ids": [1], "response_ids": [2], "logprobs": {}}', "'logprobs' must be a list"),
        ('{"prompt_ids": [1], "response_ids": 2, "logprobs": [-1]}', "'response_ids' must be a list of integers"),
        ('{"input_ids": [1], "output_token_logprobs": [[-1]]}', "'output_ids' must be a list of integers"),
        ('{"prompt_ids": [1], "response_ids": [2], "logprobs": [-1' + "0" * 400 + "]}", "got an integer of 1329 bits"),
        ('{"prompt_ids": [1], "response_ids": [200], "logprobs": [-1.0]}', "outside the vocabulary of 99"),
        # a log-probability of another token than the response's
        ('{"input_ids": [1], "output_ids": [2], "output_token_logprobs": [[-1, 3, null]]}', "got [-1, 3, None]"),
        ('{"prompt_token_ids": [1], "token_ids": [2], "logprobs": [{"3": {"logprob": -1}}]}', "token 2 at position 1"),
        ('{"prompt_token_ids": [1], "outputs": [3]}', ":1: expected a response, an object in 'outputs', got 3"),
        ('{"prompt_token_ids": [1], "outputs": [null, 3]}', ":1: outputs[0]: expected a response"),
        ("", "holds no response"),
    ],
)
def test_bad_records(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(BadInput) as found:
        read(tmp_path, line)
    assert message in str(found.value)
    assert str(found.value).startswith(f"{tmp_path}/recorded.jsonl")


def test_a_bad_record_ends_the_command_with_status_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded:
        vocab_size = VOCAB

    monkeypatch.setattr(model, "load_model", lambda *arguments: Loaded())
    path = tmp_path / "recorded.jsonl"
    path.write_text(line_of("rk", [GOOD, 0.5, GOOD]) + "\n")
    result = CliRunner().invoke(cli.app, ["compare", "--model", str(tmp_path), "--recorded", str(path)])
    assert result.exit_code == cli.EXIT_BAD_INPUT
    assert ":1: logprobs[1]: expected a log-probability of token 6" in result.output.replace("\n", " ")
