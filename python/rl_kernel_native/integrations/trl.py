"""Runs TRL's GRPOTrainer on this library's operators, which compute the log-probabilities of its LM head and its loss.

:func:`enabled` installs these replacements, and removes them at the end of its context. TRL's trainer, configuration
and logs stay in use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import rl_kernel_native as rk

from .. import _variants

with _variants.needed("integrations.trl: expected torch 2.10 or newer", _variants.INSTALL_TORCH, "torch"):
    import torch
    from torch.autograd.function import once_differentiable

__all__ = ["NEWEST", "OLDEST", "enabled"]

# The oldest release with all replaced functions, and the newest release that the tests compare with; major.minor.
OLDEST, NEWEST = "1.15", "1.16"
_INSTALL = f"pip install 'trl~={NEWEST}.0'"

# Number of tokens whose logits exist at a time. 8192 is the block of the weight's gradient (rule 9 of
# docs/numerics.md), so the gradient has the bits of one call.
_TOKENS = 8192

# TRL's functions and names that this module replaces, calls or reads: private names, which any release may change.
_HEAD = ("ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size")
_HEAD_OPTIONS = 3  # further positional parameters: cap, scale, names of outputs
_METHODS = {
    "_compute_loss": {"self", "model", "inputs"},
    "_get_per_token_logps_and_entropies": {"model", "input_ids", "attention_mask", "logits_to_keep", "compute_entropy"},
    "get_off_policy_mask": {
        "advantages", "per_token_logps", "sampling_per_token_logps", "mask", "off_policy_threshold",
    },
    "get_high_entropy_mask": {"entropies", "mask", "threshold"},
    "get_gamma_weights": {"advantages", "log_ratio_per_token", "mask", "importance_sampling_ratio"},
}  # fmt: skip
_OF_CONFIG = {
    "delta", "use_bias_correction_kl", "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_k_neg",
    "vespo_lambda_pos", "vespo_lambda_neg", "entropy_target", "entropy_coef_delta", "entropy_coef_min",
    "entropy_coef_max", "steps_per_generation",
}  # fmt: skip


def _release(version: str) -> tuple[int, ...]:
    """(major, minor) of a version."""
    return tuple(int(part) for part in version.split(".")[:2])


def _modules() -> tuple[Any, Any]:
    """TRL's modules that are patched: (trl.trainer.utils, trl.trainer.grpo_trainer).

    Raises: ModuleNotFoundError without TRL; ImportError for a release before OLDEST, or without a name that this module
        uses.
    """
    with _variants.needed(f"trl: expected version {OLDEST} or newer", _INSTALL, "trl"):
        import trl
    if _release(trl.__version__) < _release(OLDEST):
        message = f"trl: expected version {OLDEST} or newer, found {trl.__version__}; {_INSTALL}"
        raise ImportError(message, name="trl")
    from trl.trainer import grpo_trainer, utils

    lacking = _what_lacks(utils, grpo_trainer)
    if lacking is not None:
        message = f"trl: expected {lacking}, which version {trl.__version__} lacks; {_INSTALL}"
        raise ImportError(message, name="trl")
    return utils, grpo_trainer


def _what_lacks(utils: Any, grpo_trainer: Any) -> str | None:
    """The first name or parameter that this module needs and TRL does not have."""
    for name in ("_ChunkedLogProbFunction", "maybe_gather_lm_head_ctx", "nanmax", "nanmin"):
        if not hasattr(utils, name):
            return f"{utils.__name__}.{name}"
    head = utils._ChunkedLogProbFunction  # None in TRL 1.15 without Triton; this module replaces None, too
    if head is not None:
        found = tuple(inspect.signature(head.forward).parameters)
        if found[: len(_HEAD)] != _HEAD or len(found) != len(_HEAD) + _HEAD_OPTIONS:
            return f"{utils.__name__}._ChunkedLogProbFunction of {', '.join(_HEAD)} and {_HEAD_OPTIONS} options"
    trainer = grpo_trainer.GRPOTrainer
    for name, wanted in _METHODS.items():
        if not hasattr(trainer, name):
            return f"GRPOTrainer.{name}"
        missing = wanted - set(inspect.signature(getattr(trainer, name)).parameters)
        if missing:
            return f"GRPOTrainer.{name} with {', '.join(sorted(missing))}"
    missing = _OF_CONFIG - {field.name for field in dataclasses.fields(grpo_trainer.GRPOConfig)}
    return f"GRPOConfig.{sorted(missing)[0]}" if missing else None


def _patches() -> list[tuple[Any, str, Any]]:
    """The patches as (owner, attribute, replacement)."""
    utils, grpo_trainer = _modules()
    trainer = grpo_trainer.GRPOTrainer
    scores = "_get_per_token_logps_and_entropies"
    return [
        (utils, "_ChunkedLogProbFunction", ChunkedLogprob),
        (trainer, "_compute_loss", compute_loss),
        (trainer, scores, _with_patched_reference(getattr(trainer, scores))),
    ]


_logger = logging.getLogger("rl_kernel_native")
_lock = threading.Lock()
_depth = 0  # number of open contexts, in all threads
_originals: list[tuple[Any, str, Any]] = []
_references: list[Any] = []  # reference models that a context has patched
before_loss: list[Callable[[Any], None]] = []  # each function is called with the trainer before its loss
_no_reference: set[int] = set()  # trainers that were already warned about an unpatched reference model


class _Context(contextlib.ContextDecorator):
    """The context manager that :func:`enabled` returns."""

    _inner: contextlib.AbstractContextManager[None] | None = None

    def _recreate_cm(self) -> _Context:  # called by contextlib for each call of a decorated function
        self._inner = contextlib.nullcontext()
        return _Context()

    def __enter__(self) -> None:
        self._inner = _replaced()
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        if self._inner is None:
            raise RuntimeError("integrations.trl.enabled: a context manager that was not entered")
        return self._inner.__exit__(*error)

    def __del__(self) -> None:
        if self._inner is None and not sys.is_finalizing():
            warnings.warn(
                "integrations.trl.enabled() was called without `with`, so TRL is unchanged: write "
                "`with rk.integrations.trl.enabled(): trainer.train()`, or call rk.enable(trainer='trl') before the "
                "trainer is created",
                RuntimeWarning,
                stacklevel=2,
            )


def enabled() -> contextlib.AbstractContextManager[None]:
    """Inside the context, TRL's trainers compute log-probabilities with ``linear`` and ``logprob``, and GRPOTrainer
    computes its loss with ``policy_loss``. The end of the context restores TRL, also after an exception.

    ::

        with rk.integrations.trl.enabled():
            trainer.train()

    Without ``with`` nothing is replaced, and a RuntimeWarning says so. To see that the replacements are active, run a
    training step inside ``with rk.trace() as ran:``; ``ran.calls`` then counts ``policy_loss`` and ``logprob``.

    Two functions are replaced in the whole process, also for trainers that already exist:
    ``GRPOTrainer._compute_loss``, and ``trl.trainer.utils._ChunkedLogProbFunction``, which every trainer with a fused
    LM head calls. A subclass with its own ``_compute_loss`` keeps it. Contexts may be nested and may overlap: TRL is
    restored when the last context closes.

    Every ``loss_type`` of GRPOConfig is supported, with KL, vLLM's importance correction, off-policy and entropy masks,
    the entropy bonus and MoE's auxiliary loss. Metrics go to TRL's logs under TRL's names. Log-probabilities have the
    same bits for any micro-batch, given the same hidden states. :func:`rl_kernel_native.patch_model` gives models in
    one dtype the same hidden states. The reference model of a patched policy is also patched, so the KL of the first
    step is exactly 0. If the reference model cannot be patched, a warning gives the reason. On CUDA, ``linear``
    supports bfloat16 and
    float16: train with ``bf16=True`` or ``fp16=True``, without ``cast_lm_head_to_fp32``.

    The tests compare with TRL 1.15 and 1.16. A newer release also works, with a warning, if it still has the names and
    parameters that this module uses.

    Raises:
        ModuleNotFoundError without TRL; ImportError for a release before ``OLDEST``, or without a name that this module
        uses. Both errors say what was found and what to install. Inside the context, ``linear``, ``logprob`` and
        ``policy_loss`` may raise their errors.
    Source:
        TRL 1.16.0: trl/kernels/chunked_logprob.py, trl/trainer/grpo_trainer.py; docs/objectives.md.
    """
    return _Context()


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    global _depth
    with _lock:
        if _depth == 0:
            patches = _patches()
            _originals[:] = [(owner, name, vars(owner)[name]) for owner, name, _ in patches]
            for owner, name, value in patches:
                setattr(owner, name, value)
            _say_what_is_served()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                for owner, name, original in _originals:
                    setattr(owner, name, original)
                _originals.clear()
                for model in _references:
                    rk.unpatch_model(model)
                _references.clear()
                _no_reference.clear()


def _say_what_is_served() -> None:
    import trl

    _logger.info(
        "TRL %s: log-probabilities of fused LM heads by linear and logprob, GRPOTrainer's loss by policy_loss",
        trl.__version__,
    )
    if _release(trl.__version__) > _release(NEWEST):
        _logger.warning(
            "TRL %s has the names that are used here, but is newer than %s, the newest that was compared; %s",
            trl.__version__, NEWEST, _INSTALL,
        )  # fmt: skip


def _with_patched_reference(score: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps GRPOTrainer's method: it first patches the reference model of a patched policy."""

    @functools.wraps(score, assigned=("__name__", "__qualname__", "__doc__"))
    def scored(self: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        reference = getattr(self, "ref_model", None)
        if reference is not None and model is reference:
            _patch_reference(self, reference)
        return score(self, model, *arguments, **options)

    return scored


def _patch_reference(trainer: Any, reference: Any) -> None:
    from . import patch  # this imports transformers, as TRL has already done

    ops = patch.chosen_ops(trainer.model)
    if ops is None or patch.chosen_ops(reference) is not None or id(trainer) in _no_reference:
        return
    try:
        rk.patch_model(reference, ops, strict=patch.is_proved(trainer.model))
    except (TypeError, ValueError) as error:
        _no_reference.add(id(trainer))
        _logger.warning("TRL's reference model stays on torch's operators, so the KL is not exactly 0: %s", error)
    else:
        _references.append(reference)


# ---- log-probabilities ----------------------------------------------------------------------------------------------


class ChunkedLogprob(torch.autograd.Function):
    """``logprob(linear(hidden, weight, bias), targets)`` in blocks of tokens. Backward recomputes the logits of each
    block.

    Arguments and results are the same as for TRL's ChunkedLogProbFunction. TRL's ``chunk_size`` over the vocabulary is
    ignored, because this library sums a row in one fixed order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns (log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1), each [N], for hidden [N, H], weight [V,
        H], bias [V] and targets [N]. An output that `outputs` does not name is None."""
        ctx.set_materialize_grads(False)
        kind = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.options = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
        ctx.unit = rk.current_arithmetic()
        operands = _cast(ctx.dtype, hidden, weight, bias)
        results = [_score(operands, targets, rows, ctx.options, outputs) for rows in _blocks(len(hidden))]
        columns = zip(*results, strict=True)
        logprobs, lse, entropy, *metrics = (None if column[0] is None else torch.cat(column) for column in columns)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.mark_non_differentiable(*(x for x in metrics if x is not None))
        return logprobs, entropy, *metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprobs: Any, d_entropy: Any, *_: Any) -> tuple[Any, ...]:
        from trl.trainer.utils import maybe_gather_lm_head_ctx

        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wants_hidden else None
        with maybe_gather_lm_head_ctx(weight, bias), rk.arithmetic(ctx.unit):  # gathers ZeRO-3's shards
            x, w, b = _cast(ctx.dtype, hidden, weight, bias)
            d_weight = torch.zeros(w.shape, dtype=torch.float32, device=w.device) if wants_weight else None
            d_bias = torch.zeros(len(w), dtype=torch.float32, device=w.device) if wants_bias else None
            for rows in _blocks(len(hidden)):
                logits = rk.linear(x[rows], w, b)
                d_logits = rk.logprob_backward(
                    logits,
                    targets[rows],
                    lse[rows],
                    dlogprob=None if d_logprobs is None else d_logprobs[rows],
                    dentropy=None if d_entropy is None else d_entropy[rows],
                    entropy=None if d_entropy is None else entropy[rows],
                    out=logits,
                    **ctx.options,
                )
                if d_hidden is not None:
                    d_hidden[rows] = rk.linear_input_grad(d_logits, w)
                if d_weight is not None:
                    rk.linear_weight_grad(d_logits, x[rows], main_grad=d_weight)
                if d_bias is not None:
                    d_bias += rk.linear_bias_grad(d_logits, out_dtype=torch.float32)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, *(None,) * 6


def _blocks(num_tokens: int) -> list[slice]:
    """The blocks of tokens. There is at least one block, so that a call without tokens still has outputs."""
    return [slice(i, i + _TOKENS) for i in range(0, max(num_tokens, 1), _TOKENS)]


def _cast(dtype: torch.dtype, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
    return tuple(None if x is None else x.detach().to(dtype) for x in tensors)


def _score(
    operands: tuple[Any, ...], targets: torch.Tensor, rows: slice, options: dict[str, Any], outputs: tuple[str, ...]
) -> tuple[torch.Tensor | None, ...]:
    """(log_probs, lse, entropy, log_sum_sq_probs, mean_logits, is_top1) of a block of tokens."""
    hidden, weight, bias = operands
    target = targets[rows]
    logits = rk.linear(hidden[rows], weight, bias)
    found = rk.logprob(
        logits,
        target,
        return_lse=True,
        return_entropy="entropy" in outputs,
        return_sum_p_sq="log_sum_sq_probs" in outputs,
        **options,
    )
    log_sum_sq = None if found.sum_p_sq is None else found.sum_p_sq.log()
    mean = top = None
    if "mean_logits" in outputs:
        z = logits.float() * options["logit_scale"]
        cap = options["softcap"]
        z = z if cap is None else cap * torch.tanh(z / cap)
        mean = (z / options["temperature"]).mean(-1)
    if "is_top1" in outputs:  # the first of equal logits is the prediction
        of_target = logits.gather(-1, target[:, None])
        before = torch.arange(logits.shape[-1], device=logits.device) < target[:, None]
        top = ((logits < of_target) | ((logits == of_target) & ~before)).all(-1)
    return found.logprob, found.lse, found.entropy, log_sum_sq, mean, top


# ---- loss -----------------------------------------------------------------------------------------------------------

_OF_MODEL = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


def compute_loss(self: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """GRPOTrainer._compute_loss: TRL's loss, gradients and metrics, computed by ``policy_loss`` with ``presets.trl``.

    TRL's own methods select the tokens (off-policy and entropy masks). The policy term is linear in the advantage, so a
    dropped token gets an advantage of 0.
    """
    for look in before_loss:
        look(self)
    prompt_ids, completion_ids = inputs["prompt_ids"], inputs["completion_ids"]
    mask = inputs["completion_mask"]
    logprob, entropy, aux_loss = self._get_per_token_logps_and_entropies(
        model,
        torch.cat([prompt_ids, completion_ids], dim=1),
        torch.cat([inputs["prompt_mask"], mask], dim=1),
        completion_ids.size(1),
        compute_entropy=True,
        compute_aux_loss=self.aux_loss_enabled,
        **{name: inputs.get(name) for name in _OF_MODEL},
    )
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    old = inputs.get("old_per_token_logps")
    ratio_to = logprob.detach() if old is None else old
    advantages = inputs["advantages"]
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    acting = advantages
    if self.off_policy_mask_threshold is not None:
        acting = acting * self.get_off_policy_mask(
            advantages=advantages,
            per_token_logps=logprob,
            sampling_per_token_logps=inputs.get("sampling_per_token_logps", ratio_to),
            mask=mask,
            off_policy_threshold=self.off_policy_mask_threshold,
        )
    entropy_mask = None
    if self.top_entropy_quantile < 1.0:
        entropy_mask = self.get_high_entropy_mask(entropy, mask, 1 - self.top_entropy_quantile)
        acting = acting * entropy_mask

    mode = "train" if self.model.training else "eval"
    spec = _spec(self, mode)
    rollout = None
    if spec.needs_rollout:  # a token without a vLLM score gets no correction
        rollout = torch.where(inputs["sampling_per_token_logps"].isnan(), ratio_to, inputs["sampling_per_token_logps"])
    result = rk.policy_loss(
        logprob,
        old,
        acting.squeeze(1) if acting.size(1) == 1 else acting,
        mask,
        spec=spec,
        ref_logprob=inputs["ref_per_token_logps"] if self.beta != 0.0 else None,
        rollout_logprob=rollout,
        entropy=_bonus(entropy, mask, entropy_mask) if spec.entropy_coef else None,
        denominator=_denominator(self, inputs, mode) if spec.aggregation == "constant" else None,
    )
    loss = result.loss

    logs = self._metrics[mode]
    if self._entropy_bonus_enabled:
        policy = result.metrics.loss + spec.entropy_coef * result.metrics.entropy_loss
        policy = policy / spec.scale  # TRL logs the policy term without this factor
        logs["policy_loss"].append(self.accelerator.gather(policy).nanmean().item())
        _adapt_entropy_coef(self, mode, entropy, mask if entropy_mask is None else mask * entropy_mask)
    if self.aux_loss_enabled:
        steps = self.current_gradient_accumulation_steps if mode == "train" else 1.0
        loss = loss + self.router_aux_loss_coef * aux_loss / steps
        logs["aux_loss"].append(self.accelerator.gather_for_metrics(aux_loss).mean().item())
    if self.beta != 0.0:
        logs["kl"].append(_mean_over_ranks(self, result.metrics.kl_sum, result.metrics.num_tokens))
    logs["entropy"].append(_mean_over_ranks(self, (entropy.detach() * mask).sum(), mask.sum()))
    _log_ratios(self, logs, logprob.detach() - ratio_to, advantages, mask, inputs)
    return loss


def _spec(self: Any, mode: str) -> rk.PolicySpec:
    """The trainer's current objective. The objective is made anew for each loss, because an adaptive entropy
    coefficient changes between steps."""
    args = self.args
    coef = 0.0
    if self._entropy_bonus_enabled:
        low = not self.use_adaptive_entropy or self._last_world_entropy <= args.entropy_target
        coef = self.entropy_coef if low else 0.0
    if self.loss_type == "dr_grpo":
        _log_horizon(self.max_completion_length)
    return rk.presets.trl(
        loss_type=self.loss_type,
        epsilon=self.epsilon_low,
        epsilon_high=self.epsilon_high,
        delta=args.delta,
        beta=self.beta,
        importance_sampling_level=self.importance_sampling_level,
        use_bias_correction_kl=args.use_bias_correction_kl,
        sapo_temperature_pos=args.sapo_temperature_pos,
        sapo_temperature_neg=args.sapo_temperature_neg,
        vespo_k_pos=args.vespo_k_pos,
        vespo_lambda_pos=args.vespo_lambda_pos,
        vespo_k_neg=args.vespo_k_neg,
        vespo_lambda_neg=args.vespo_lambda_neg,
        use_vllm=self.use_vllm,
        vllm_importance_sampling_correction=self.vllm_importance_sampling_correction,
        vllm_importance_sampling_mode=self.vllm_importance_sampling_mode,
        vllm_importance_sampling_clip_max=self.vllm_importance_sampling_clip_max,
        vllm_importance_sampling_clip_min=self.vllm_importance_sampling_clip_min,
        entropy_coef=coef,
        max_completion_length=self.max_completion_length,
        gradient_accumulation_steps=self.current_gradient_accumulation_steps if mode == "train" else 1,
    )


@functools.cache  # logs once for each length
def _log_horizon(length: int) -> None:
    _logger.info("TRL's dr_grpo divides by sequences times max_completion_length, which is %d", length)


def _denominator(self: Any, inputs: dict[str, Any], mode: str) -> torch.Tensor:
    """The divisor of the loss: the tokens of the generation batch on all ranks, divided by the number of ranks and, in
    training, by the number of accumulation windows."""
    tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
    if mode == "train":
        tokens = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
    return tokens


def _bonus(entropy: torch.Tensor, mask: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
    """A tensor whose mean over `mask` equals the mean of the entropy over the selected tokens."""
    if chosen is None:
        return entropy
    return entropy * (chosen * (mask.sum() / (mask * chosen).sum().clamp(min=1.0)))


def _adapt_entropy_coef(self: Any, mode: str, entropy: torch.Tensor, mask: torch.Tensor) -> None:
    """TRL's controller of the entropy coefficient. After the last micro-batch of an optimizer step, the controller
    changes the coefficient in the opposite direction of the mean entropy."""
    if mode != "train":
        return
    if self.use_adaptive_entropy:
        window = torch.stack([(entropy * mask).sum(), mask.sum()]).detach()
        self._entropy_window_stats = (
            window if self._entropy_window_stats is None else self._entropy_window_stats + window
        )
        if self.accelerator.sync_gradients:
            total, count = self.accelerator.reduce(self._entropy_window_stats, reduction="sum")
            mean = (total / count.clamp(min=1.0)).item()
            step = self.args.entropy_coef_delta if mean <= self.args.entropy_target else -self.args.entropy_coef_delta
            self.entropy_coef = max(
                min(self.entropy_coef + step, self.args.entropy_coef_max), self.args.entropy_coef_min
            )
            self._last_world_entropy = mean
            self._entropy_window_stats = None
    if self.accelerator.sync_gradients:
        self._metrics[mode]["entropy_coef"].append(self.entropy_coef)


def _mean_over_ranks(self: Any, total: torch.Tensor, count: torch.Tensor) -> float:
    totals = self.accelerator.reduce(torch.stack([total.float(), count.float()]), reduction="sum")
    return (totals[0] / totals[1].clamp(min=1.0)).item()


def _log_ratios(
    self: Any, logs: Any, log_ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any]
) -> None:
    """Logs the share of clipped tokens under TRL's names; with importance_sampling_level="sequence", the share of
    clipped sequences."""
    from trl.trainer.utils import nanmax, nanmin

    if self.loss_type == "vespo":
        weights = self.get_gamma_weights(
            advantages=advantages,
            log_ratio_per_token=log_ratio,
            mask=mask,
            importance_sampling_ratio=inputs.get("importance_sampling_ratio"),
            k_pos=self.args.vespo_k_pos,
            lambda_pos=self.args.vespo_lambda_pos,
            k_neg=self.args.vespo_k_neg,
            lambda_neg=self.args.vespo_lambda_neg,
        )
        logs["vespo/phi_seq_mean"].append(_mean_over_ranks(self, weights.sum(), mask.new_tensor(weights.size(0))))
        return
    if self.loss_type == "sapo":
        return
    if self.importance_sampling_level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    ratio = log_ratio.exp()

    def counts(clipped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of clipped tokens and of all tokens, per sequence."""
        counted = mask if clipped.size(1) > 1 else torch.ones_like(mask[:, :1])
        return (clipped * counted).sum(-1), counted.sum(-1)

    def mean(clipped: torch.Tensor) -> float:
        found, total = counts(clipped)
        return _mean_over_ranks(self, found.sum(), total.sum())

    def of_sequences(clipped: torch.Tensor) -> torch.Tensor:
        found, total = counts(clipped)
        return self.accelerator.gather(found / total)

    if self.loss_type == "cispo":
        logs["cispo_clip_ratio"].append(mean((ratio > self.epsilon_high) & (advantages > 0)))
        return
    if self.args.delta is not None:
        ratio = ratio.clamp(max=self.args.delta)
    low = (ratio < 1 - self.epsilon_low) & (advantages < 0)
    high = (ratio > 1 + self.epsilon_high) & (advantages > 0)
    for name, clipped in (("low", low), ("high", high), ("region", low | high)):
        logs[f"clip_ratio/{name}_mean"].append(mean(clipped))
    logs["clip_ratio/low_min"].append(nanmin(of_sequences(low)).item())
    logs["clip_ratio/high_max"].append(nanmax(of_sequences(high)).item())
