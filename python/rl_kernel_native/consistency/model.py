"""Loads and checks a Hugging Face causal LM from a directory, a Hub id or memory. This module never reads a pickle."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import _check
from ..integrations import patch
from ..integrations.served import is_served
from .attention import ATTENTION_NAME
from .errors import BadInput, spelled

FAMILIES = ("qwen3", "qwen2", "llama", "mistral")
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
# "dynamic" and "longrope" are not supported: by design, their frequencies depend on the longest sequence of the batch.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# The form of a Hub id, the time limit for the Hub, and the files that are read from its repository.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_SECONDS = 10.0
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM in evaluation mode and the facts about it that the comparison needs. directory: None for a model in
    memory."""

    model: Any
    name: str
    directory: Path | None
    family: str
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    num_layers: int
    max_length: int
    bos_id: int | None
    pad_id: int | None
    eos_ids: tuple[int, ...]

    @property
    def special_ids(self) -> dict[str, tuple[int, ...]]:
        """Special token ids by name; an unset id is an empty tuple."""

        def one(value: int | None) -> tuple[int, ...]:
            return () if value is None else (value,)

        return {"bos": one(self.bos_id), "pad": one(self.pad_id), "eos": self.eos_ids}


def parse_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """The torch dtype for a name in DTYPES. One of these dtypes, or None, is returned unchanged; BadInput for any other
    value."""
    if name is None or name in DTYPES.values():
        return name  # type: ignore[return-value]
    if not isinstance(name, str) or name not in DTYPES:
        raise BadInput(f"{spelled('dtype', name)}: want one of {', '.join(DTYPES)}")
    return DTYPES[name]


def parse_device(name: str) -> torch.device:
    """'auto' is the GPU if torch sees one, else the CPU. BadInput for a missing device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError) as error:
        raise BadInput(f"{spelled('device', name)}: want auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"{spelled('device', name)}: want auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"{spelled('device', name)}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def find_directory(name: str | Path, argument: str = "model_a") -> Path:
    """The directory of a model. The path of a directory is returned unchanged; huggingface_hub finds a Hub id in its
    cache or on the Hub.

    Raises: BadInput for a path that is missing or is a file, and for an id that is not available.
    """
    path = Path(name)
    try:
        is_file = path.is_file()
    except OSError as error:  # for example, the name is too long for a file
        raise BadInput(f"{spelled(argument, str(path))}: {error.strerror}") from error
    if path.is_dir():
        return path
    if is_file:
        raise BadInput(f"{spelled(argument, str(path))}: want the model's directory, got a file; give {path.parent}")
    if not _HUB_ID.fullmatch(str(name)):
        raise BadInput(f"model directory {path} does not exist; give a directory, or a Hub id such as Qwen/Qwen3-0.6B")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    silence = _silence_of_hub(str(name))
    try:
        return Path(snapshot_download(str(name), allow_patterns=_FILES, local_files_only=silence is not None))
    except Exception as error:  # many types: offline, gated or unknown repository, no such revision
        if silence is not None and isinstance(error, LocalEntryNotFoundError):
            why = f"the Hub does not answer ({silence}) and its cache here has no such model"
        else:
            first_line = (str(error).strip().splitlines() or [""])[0]
            why = f"the Hub does not give it ({type(error).__name__}: {first_line})"
        raise BadInput(
            f"{spelled(argument, str(name))}: no such directory here, {why}. Without a network, run `hf download "
            f"{name} --local-dir DIR` where there is one and give {spelled(argument, 'DIR')}; a gated model wants "
            "`hf auth login` first"
        ) from error


def _silence_of_hub(name: str) -> str | None:
    """The reason why the Hub is unreachable, found by one request of at most _HUB_SECONDS; None if the Hub answers,
    even with an error.

    The request runs in a thread, which limits its time: a download would retry many times, and a silent name server has
    no timeout.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    silence: list[str | None] = [f"no answer in {_HUB_SECONDS:g} s"]

    def ask() -> None:
        try:
            HfApi().model_info(name, timeout=_HUB_SECONDS)
        except HfHubHTTPError:
            silence[0] = None
        except Exception as error:  # types of several libraries: no route, no name, a refusal, a timeout
            silence[0] = f"{type(error).__name__}: {error}"
        else:
            silence[0] = None

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_HUB_SECONDS)
    return silence[0]


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory, checked for settings that the comparison does not support. Raises BadInput."""
    path = directory / "config.json"
    if not path.is_file():
        raise BadInput(f"{path} does not exist: not a Hugging Face model directory")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadInput(f"{path}: want a JSON object")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise BadInput(f"{path}: model_type {_check.shown(family)} is not supported, want one of {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise BadInput(f"{path}: quantised weights are not supported")
    windowed = config.get("use_sliding_window", family == "mistral")
    if windowed and config.get("sliding_window") is not None:
        raise BadInput(
            f"{path}: sliding-window attention is not supported; for sequences no longer than the window, compare "
            'copies whose config.json has "sliding_window": null'
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    if rope_type not in ROPE_TYPES:
        raise BadInput(
            f"{path}: rope type {_check.shown(rope_type)} is not supported, want one of {', '.join(ROPE_TYPES)}"
        )
    if not list(directory.glob("*.safetensors")):
        raise BadInput(f"{directory} holds no *.safetensors file; other weight formats are not read")
    return config


def load_model(
    name: str | Path, dtype: torch.dtype | None, device: torch.device, argument: str = "model_a"
) -> LoadedModel:
    """Loads a model of a family in FAMILIES from files, in `dtype` (None: the checkpoint's) on `device`, in evaluation
    mode.

    Raises:
        BadInput: no such model, another family, weights that are damaged or incomplete, or only pickled weights.
    """
    directory = find_directory(name, argument)
    read_config(directory)
    import transformers

    quiet_transformers()
    try:
        auto: Any = transformers.AutoModelForCausalLM
        model, info = auto.from_pretrained(
            str(directory),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype="auto" if dtype is None else dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    except Exception as error:  # the loader raises many types; each of them means that this directory cannot be used
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise BadInput(f"cannot load the model in {directory}: {type(error).__name__}: {first_line}") from error
    if info["missing_keys"]:
        # transformers initialises missing weights at random without an error.
        first, *others = sorted(info["missing_keys"])
        more = f" and {len(others)} more" if others else ""
        raise BadInput(
            f"{directory}: weights lack {first}{more}, which config.json demands; save the whole model again"
        )
    model.eval().requires_grad_(False).to(device)
    return wrap_model(model, str(name), directory)


@contextmanager
def in_memory(
    model: Any, name: str, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Iterator[LoadedModel]:
    """The LoadedModel of a caller's model, which is in evaluation mode while the context is open. If the model is
    patched, its LoadedModel holds a twin without the patch. If the model has another dtype or device, the LoadedModel
    holds a copy.

    Raises: BadInput for a model of another family, and for a patch that cannot be removed.
    """
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in FAMILIES:
        raise BadInput(
            f"{name}: expected a causal language model of transformers of the families {', '.join(FAMILIES)}, got "
            f"{type(model).__name__} ({family})"
        )
    known_as = f"{name} ({type(model).__name__})"
    copies = _copies(model, dtype, device)
    if is_patched(model) or copies:
        yield wrap_model(_twin(model, name, copies), known_as, None)
        return
    training, attention = model.training, model.config._attn_implementation
    model.eval()
    try:
        yield wrap_model(model, known_as, None)
    finally:
        model.set_attn_implementation(attention)
        model.train(training)


def is_patched(model: Any) -> bool:
    """Whether rk.patch_model has patched any module of a model in memory."""
    return isinstance(model, torch.nn.Module) and any(is_served(module) for module in model.modules())


def patched_in_part(model: Any) -> str | None:
    """The operators of a patched model if its patch covers only some of patch.OPS; None for any other model."""
    chosen = patch.chosen_ops(model)
    return None if chosen is None or chosen == frozenset(patch.OPS) else ", ".join(sorted(chosen))


def _copies(model: Any, dtype: torch.dtype | None, device: torch.device | None) -> dict[int, torch.Tensor]:
    """Copies, by the id of the original tensor, of every parameter whose dtype or device must change, and of every
    buffer whose device must change. Buffers keep their dtype, as in from_pretrained."""
    copies: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        cast = dtype if isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point() else None
        moved = tensor.detach().to(device=device, dtype=cast)
        if moved.dtype != tensor.dtype or moved.device != tensor.device:
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            copies[id(tensor)] = torch.nn.Parameter(moved, requires_grad=False) if is_parameter else moved
    return copies


def _twin(model: Any, name: str, copies: dict[int, torch.Tensor]) -> Any:
    """A copy of the model without a patch, in evaluation mode, with its class's forward. The twin shares the model's
    parameters and buffers, except those that have a copy in `copies`."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared | copies)
    twin.__dict__.pop("forward", None)  # TRL or accelerate may set one, which runs the original
    holding = [module for module in twin.modules() if patch.chosen_ops(module) is not None]
    try:
        for module in holding:
            if not any(child in holding for child in module.children()):  # `module` is the innermost patched one
                patch.unpatch(module)
    except ValueError as error:
        raise BadInput(f"{name}: it is patched, and its patch cannot be taken off: {error}") from error
    if is_patched(twin):
        raise BadInput(
            f"{name}: expected a model without rk.patch_model's operators, or the module that was patched, got a part "
            "of that module; call rk.unpatch_model on the module that was patched"
        )
    return twin.eval()


def wrap_model(model: Any, name: str, directory: Path | None) -> LoadedModel:
    """The LoadedModel of a transformers model in memory. Sets the model's attention implementation."""
    model.set_attn_implementation(ATTENTION_NAME)
    config = model.config
    weight = model.lm_head.weight
    generation_eos = getattr(model.generation_config, "eos_token_id", None)
    eos = generation_eos if generation_eos is not None else config.eos_token_id
    eos_ids = tuple(eos) if isinstance(eos, (list, tuple)) else (() if eos is None else (eos,))
    return LoadedModel(
        model=model,
        name=name,
        directory=directory,
        family=config.model_type,
        dtype=weight.dtype,
        device=weight.device,
        vocab_size=weight.shape[0],
        num_layers=config.num_hidden_layers,
        max_length=config.max_position_embeddings,
        bos_id=config.bos_token_id,
        pad_id=config.pad_token_id,
        eos_ids=eos_ids,
    )


def quiet_transformers() -> None:
    """Turns off transformers' progress bars and advice, which would otherwise be written into a pipe."""
    import transformers

    log: Any = transformers.utils.logging
    log.disable_progress_bar()
    log.set_verbosity_error()


class ForwardCounter:
    """Counts calls of a model's forward while the context is open."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.calls = 0

    def __enter__(self) -> ForwardCounter:
        self._handle = self._model.register_forward_pre_hook(self._count)
        return self

    def _count(self, *_: object) -> None:
        self.calls += 1

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


class HeadInput:
    """Holds the last input of a model's head, [B, T, hidden_size], while the context is open."""

    input: torch.Tensor

    def __init__(self, head: Any) -> None:
        self._head = head

    def __enter__(self) -> HeadInput:
        self._handle = self._head.register_forward_pre_hook(self._keep)
        return self

    def _keep(self, _: object, arguments: tuple[Any, ...]) -> None:
        (self.input,) = arguments

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
