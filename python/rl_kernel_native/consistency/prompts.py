"""The prompt file: JSON lines with `prompt_ids`, `text` or both, checked before anything is computed.

Optional fields of a line: `position_ids` and `attention_mask`, lists as long as `prompt_ids`, for prompts exported from
a pipeline. These two fields do not change the computation. They are only checked, because wrong positions or masks are
a common cause of drift. Other fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checks import check_padding, check_positions, check_special_tokens, check_token_ids, first_difference
from .errors import BadInput, InputMismatch
from .model import LoadedModel

Encode = Callable[[str], list[int]]
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json")


@dataclass(frozen=True)
class Prompt:
    """One prompt. `line` is its 1-based line in the file."""

    ids: tuple[int, ...]
    line: int


def tokenizer_of(directory: Path) -> Encode:
    """A function from text to ids, with the tokenizer of a local model directory. BadInput if the directory has no
    tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for a tokenizer that cannot be loaded
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise BadInput(
            f"prompts hold text but {directory} has no usable tokenizer ({first_line}); save one there by "
            "tokenizer.save_pretrained, or give prompt_ids"
        ) from error

    files = {*tokenizer.vocab_files_names.values(), *_VOCABULARIES}
    if not any((directory / name).is_file() for name in files):  # the loaded tokenizer is then empty
        raise BadInput(
            f"prompts hold text but {directory} has no tokenizer (none of {', '.join(sorted(files))}); save one there "
            "by tokenizer.save_pretrained, or give prompt_ids"
        )

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids

    return encode


def load_prompts(path: Path, loaded: LoadedModel, max_new_tokens: int, encode: Encode | None = None) -> list[Prompt]:
    """The prompts of a JSON lines file, checked against a model.

    Args:
        path: UTF-8 file; empty lines are skipped.
        loaded: provides vocabulary size, special tokens and context length.
        max_new_tokens: prompt and response together must fit the model's context.
        encode: text -> ids; by default the tokenizer in the model's directory, loaded only if a line needs it.

    Raises:
        BadInput: unreadable file, malformed line (the message starts with FILE:LINE), prompt too long.
        InputMismatch: ids, special tokens, positions or padding are wrong; the error names the first such position.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read prompts {path}: {error}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        record = _parse(line, where)
        if "text" in record and encode is None:
            if loaded.directory is None:
                raise BadInput(f"{where}: expected 'prompt_ids' for a model in memory, got 'text'")
            encode = tokenizer_of(loaded.directory)
        ids = _ids_of(record, where, encode, len(prompts))
        _check(record, ids, where, loaded, len(prompts))
        if len(ids) + max_new_tokens > loaded.max_length:
            raise BadInput(
                f"{where}: {len(ids)} prompt tokens + {max_new_tokens} new ones exceed the model's {loaded.max_length}"
            )
        prompts.append(Prompt(ids=tuple(ids), line=number))
    if not prompts:
        raise BadInput(f"{path} holds no prompt")
    return prompts


def prompts_of_ids(ids: Iterable[Sequence[int]], loaded: LoadedModel, max_new_tokens: int) -> list[Prompt]:
    """Prompts from lists of ids, or from a tensor [num_prompts, length], checked like the prompts of a file. `line` is
    the number of the prompt."""
    prompts = []
    if not isinstance(ids, Iterable):
        raise BadInput(f"ids: expected prompts, lists of token ids, got {type(ids).__name__}")
    for index, given in enumerate(ids):
        where = f"ids[{index}]"
        try:
            row = [int(item) for item in given]
        except (TypeError, ValueError):
            raise BadInput(f"{where}: expected a list of token ids, got {type(given).__name__}") from None
        if not row:
            raise BadInput(f"{where}: the prompt is empty; give at least one id")
        _check({}, row, where, loaded, index)
        if len(row) + max_new_tokens > loaded.max_length:
            raise BadInput(
                f"{where}: {len(row)} prompt tokens + {max_new_tokens} new ones exceed the model's {loaded.max_length}"
            )
        prompts.append(Prompt(ids=tuple(row), line=index + 1))
    if not prompts:
        raise BadInput("ids: expected at least one prompt, got none")
    return prompts


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f'{where}: want JSON such as {{"text": "hello"}}: {error}') from error
    if not isinstance(record, dict):
        raise BadInput(f'{where}: want a JSON object such as {{"text": "hello"}}')
    if "prompt_ids" not in record and "text" not in record:
        got = ", ".join(map(repr, record)) or "no field"
        raise BadInput(f"{where}: want 'prompt_ids' or 'text', got {got}")
    if not isinstance(record.get("text", ""), str):
        raise BadInput(f"{where}: 'text' must be a string")
    return record


def _ints(record: dict[str, Any], field: str, where: str) -> list[int]:
    value = record[field]
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise BadInput(f"{where}: {field!r} must be a list of integers")
    return value


def _ids_of(record: dict[str, Any], where: str, encode: Encode | None, index: int) -> list[int]:
    given = _ints(record, "prompt_ids", where) if "prompt_ids" in record else None
    if "text" in record:
        assert encode is not None
        encoded = encode(record["text"])
        if given is not None and given != encoded:
            position = first_difference(given, encoded)
            raise InputMismatch(
                f"{where}: 'prompt_ids' and the tokenizer disagree on 'text', first at position {position}",
                prompt=index,
                position=position,
            )
        given = encoded
    assert given is not None
    if not given:
        raise BadInput(
            f"{where}: the prompt is empty; give at least one id, or a text that the tokenizer does not drop"
        )
    return given


def _check(record: dict[str, Any], ids: list[int], where: str, loaded: LoadedModel, index: int) -> None:
    check_token_ids(ids, loaded.vocab_size, where=where, prompt=index)
    check_special_tokens(ids, loaded.special_ids, where=where, prompt=index)
    for field in ("position_ids", "attention_mask"):
        if field in record and len(_ints(record, field, where)) != len(ids):
            raise BadInput(f"{where}: {field!r} must be as long as the prompt ({len(ids)})")
    if "attention_mask" in record:
        check_padding(record["attention_mask"], "none", where=where, prompt=index)
    if "position_ids" in record:
        check_positions(record["position_ids"], where=where, prompt=index)
