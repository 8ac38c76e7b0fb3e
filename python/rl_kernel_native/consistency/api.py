"""`rk.compare`, which does what `rlk compare` does, but also takes models in memory. The first call imports torch and
transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _variants

if TYPE_CHECKING:
    import torch

    from .model import LoadedModel
    from .result import Comparison


@_variants.needed(
    "rk.compare: expected torch 2.10, transformers 5.14 and safetensors, or newer ones",
    _variants.how_to_install("compare"),
    "torch", "transformers", "safetensors", "rich", "matplotlib",
)  # fmt: skip
def compare(
    model_a: Any,
    model_b: Any = None,
    ids: Iterable[Sequence[int]] | None = None,
    *,
    rollout_ops: str | None = None,
    training_ops: str | None = None,
    temperature: float = 1.0,
    training_temperature: float | None = None,
    max_new_tokens: int = 32,
    batch_sizes: Sequence[int] = (1, 8),
    packing: str = "packed",
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    device: str = "auto",
    atol: float = 0.0,
    probe_mb: int = 512,
    fault_tolerance: float | None = None,
    report: str | Path | None = None,
) -> Comparison:
    """Generates a rollout with one model, scores its ids with another model, and names the operator where the two
    diverge.

    The rollout decodes token by token with a cache in a changing batch. The training side runs one forward over the
    whole sequences. Each operator of the training side then runs again on the input that the rollout's operator had.
    This second run distinguishes a wrong weight, bias, epsilon or temperature from rounding, and names the faulty
    operator.

    Args:
        model_a: the rollout's model: a transformers model (Qwen2, Qwen3, Llama, Mistral), a directory or a Hub id.
        model_b: the training side's model, in the same forms; None: model_a.
        ids: prompts, lists of ids or a tensor ``[num_prompts, length]``.
        rollout_ops, training_ops: ``"stock"``, ``"sdpa"``, ``"eager"``, ``"flash"`` (the package flash-attn) or
            ``"rk"``. rollout_ops=None: ``"rk"`` for a model that :func:`rl_kernel_native.patch_model` patched, else
            ``"stock"``. training_ops=None: rollout_ops if given, else chosen by model_b in the same way. A patched
            model stays patched; the comparison runs the named operators with its weights.
        temperature: temperature of sampling and of the rollout's log-probabilities. training_temperature: that of the
            training side; None means the same temperature.
        max_new_tokens: most tokens of a response.
        batch_sizes: the most requests in flight; the comparison runs once for each size.
        packing: ``"packed"`` or ``"padded"`` training batches.
        dtype, device: dtype and device of both sides. With dtype=None, the checkpoint or the model in memory decides.
            With device="auto", a loaded model runs on a GPU if there is one, and a model in memory stays on its device.
            A model in memory with another dtype or device is copied.
        atol: largest ``|dlogp|`` that counts as aligned; 0: equal bytes.
        probe_mb: MiB for recorded hidden states, for both sides together.
        fault_tolerance: relative error, on equal input, above which an operator is at fault; None: the error that
            rounding explains.
        report: a directory for report.html, report.json and charts.
    Returns: a Comparison, whose ``str`` is the verdict in words; programs read ``aligned`` and ``faults``.
    Raises: ValueError for an argument, prompts or a model that cannot be compared; TypeError for a wrong type.

    Example:
        >>> import torch, transformers
        >>> import rl_kernel_native as rk
        >>> shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> config = transformers.LlamaConfig(vocab_size=99, num_key_value_heads=2, initializer_range=0.2, **shape)
        >>> rollout, trainer = (transformers.LlamaForCausalLM(config) for _ in range(2))
        >>> _ = trainer.load_state_dict(rollout.state_dict())
        >>> _ = trainer.model.layers[1].mlp.down_proj.weight.data.mul_(1.01)
        >>> rk.compare(rollout, trainer, [[1, 5, 9], [1, 7]], max_new_tokens=4).faults[0].name
        'layers.1.mlp.down_proj'
    """
    from .compare import run_compare
    from .errors import BadInput
    from .model import in_memory, is_patched, load_model, parse_device, parse_dtype, patched_in_part
    from .progress import Progress
    from .prompts import prompts_of_ids
    from .report import prepare_directory, write_report
    from .settings import CompareSettings

    try:
        batch_sizes = tuple(batch_sizes)
    except TypeError:
        kind = type(batch_sizes).__name__
        raise TypeError(f"batch_sizes: expected a sequence of integers, got {kind}") from None
    if ids is None:
        raise BadInput("ids: expected prompts, lists of token ids, got None")

    def ops_of(model: Any, name: str, argument: str) -> str:
        part = patched_in_part(model) if is_patched(model) else None
        if part is not None:
            raise BadInput(
                f"{name}: expected a model that rk.patch_model serves whole, or {argument}, got one patched with "
                f'ops={part}; pass {argument}="rk" or "stock", or call rk.unpatch_model(model)'
            )
        return "rk" if is_patched(model) else "stock"

    trained = model_a if model_b is None else model_b
    if training_ops is None:
        training_ops = rollout_ops or ops_of(trained, "model_a" if model_b is None else "model_b", "training_ops")
    if rollout_ops is None:
        rollout_ops = ops_of(model_a, "model_a", "rollout_ops")
    settings = CompareSettings(
        seed=seed,
        batch_sizes=batch_sizes,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        training_temperature=training_temperature,
        rollout_ops=rollout_ops,
        training_ops=training_ops,
        packing=packing,
        atol=atol,
        probe_mb=probe_mb,
        fault_tolerance=fault_tolerance,
    )
    settings.check()
    torch_dtype, torch_device = parse_dtype(dtype), parse_device(device)
    if report is not None:
        prepare_directory(Path(report))
    with ExitStack() as stack:

        def loaded(model: Any, name: str) -> LoadedModel:
            if isinstance(model, (str, Path)):
                return load_model(model, torch_dtype, torch_device, name)
            return stack.enter_context(in_memory(model, name, torch_dtype, None if device == "auto" else torch_device))

        rollout = loaded(model_a, "model_a")
        trainer = None if model_b is None or model_b is model_a else loaded(model_b, "model_b")
        prompts = prompts_of_ids(ids, rollout, max_new_tokens)
        result = run_compare(rollout, prompts, settings, training_model=trainer, progress=Progress(silent=True))
    if report is not None:
        write_report(Path(report), [result])
    return result
