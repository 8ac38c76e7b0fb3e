"""rl_kernel_native.integrations.trl: compares GRPOTrainer's log-probabilities, loss, gradients and logs with TRL's
own."""

from __future__ import annotations

import copy
import itertools
import os
import types
import warnings
from collections import defaultdict
from typing import Any

import pytest

import rl_kernel_native as rk
from rl_kernel_native.contract import row
from trl_seams import STOCK, grpo_trainer

torch = pytest.importorskip("torch", reason="TRL trains models of torch")

# If two releases are tested (scripts/test.sh), each case of the loss runs with one of them.
TURN = {None: slice(None), "newest": slice(0, None, 2), "oldest": slice(1, None, 2)}[os.environ.get("RLK_TRL_TURN")]

SEQUENCES, PROMPT, COMPLETION, VOCAB = 6, 5, 9, 101


# ---- log-probabilities ----------------------------------------------------------------------------------------------

ALL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def head(rows: int, dtype: Any, bias: bool = False, width: int = 32) -> tuple[Any, ...]:
    random = torch.Generator().manual_seed(rows)
    hidden, weight = torch.randn(rows, width, generator=random), torch.randn(VOCAB, width, generator=random) / 4
    offset = torch.randn(VOCAB, generator=random) if bias else None
    targets = torch.randint(VOCAB, (rows,), generator=random)
    tensors = (None if x is None else x.to(dtype).requires_grad_() for x in (hidden, weight, offset))
    return *tensors, targets


def logprob_error(hidden: Any, weight: Any, logits: Any, dtype: str = "float32") -> float:
    """The error bound of a log-probability against float64: its own bound plus twice a logit's bound."""
    scale = float((hidden.double().abs() @ weight.double().abs().T).max())
    of_logit = row("linear", "y").allowed(dtype, terms=hidden.shape[-1], scale=scale, expected=logits.abs().max())
    return float(row("logprob", "logprob").allowed(max_abs_z=logits.abs().max()) + 2 * of_logit)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("temperature", "softcap", "logit_scale"), [(1.0, None, 1.0), (0.7, None, 1.0), (0.7, 5.0, 0.5)]
)
def test_the_head_has_all_outputs_of_trls(
    temperature: float, softcap: float | None, logit_scale: float, bias: bool
) -> None:
    *operands, targets = head(37, torch.float32, bias)
    options = (targets, temperature, 16, softcap, logit_scale, ALL)
    theirs = STOCK[0].apply(*operands, *options)
    ours = rk.integrations.trl.ChunkedLogprob.apply(*operands, *options)
    hidden, weight, offset = (None if x is None else x.detach().double() for x in operands)
    z = hidden @ weight.T * logit_scale + (0 if offset is None else offset * logit_scale)
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    logp = z.log_softmax(-1)
    wanted = [
        logp.gather(-1, targets[:, None])[:, 0],
        -(logp.exp() * logp).sum(-1),
        (2 * logp).exp().sum(-1).log(),
        z.mean(-1),
    ]
    allowed = logprob_error(hidden, weight, z) / temperature
    for name, x, exact in zip(("log_probs", *ALL), ours, wanted, strict=False):
        bound = 2 * allowed * (float(logp.abs().max()) if name == "entropy" else 2)
        assert float((x - exact).detach().abs().max()) <= bound, name
    assert torch.equal(ours[4], theirs[4])
    assert torch.equal(ours[4], z.argmax(-1) == targets)
    for x in (*ours, *theirs):
        assert x.shape == targets.shape


def test_a_tie_is_top1_for_its_first_token_alone() -> None:
    hidden, weight = torch.ones(2, 4), torch.zeros(VOCAB, 4)
    weight[[3, 8]] = 1.0
    targets = torch.tensor([3, 8])
    ours = rk.integrations.trl.ChunkedLogprob.apply(hidden, weight, None, targets, 1.0, 16)
    assert ours[4].tolist() == [True, False]


def test_outputs_that_are_not_asked_for_are_none() -> None:
    *operands, targets = head(5, torch.float32)
    found = rk.integrations.trl.ChunkedLogprob.apply(*operands, targets, 1.0, 16, None, 1.0, ("log_probs",))
    assert [x is None for x in found] == [False, True, True, True, True]


def gradients(function: Any, operands: Any, targets: Any, of_entropy: bool) -> list[Any]:
    inputs = [x for x in operands if x is not None]
    logp, entropy, *_ = function.apply(*operands, targets, 0.8, 32, None, 1.0, ("log_probs", "entropy"))
    weights = torch.linspace(-1, 1, len(targets))
    total = (logp * weights).sum() + ((entropy * weights.flip(0)).sum() if of_entropy else 0)
    return list(torch.autograd.grad(total, inputs))


@pytest.mark.parametrize("of_entropy", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [8192, 16])
def test_gradients_of_the_head_are_within_the_contract(
    monkeypatch: pytest.MonkeyPatch, block: int, dtype: str, of_entropy: bool
) -> None:
    monkeypatch.setattr(rk.integrations.trl, "_TOKENS", block)
    temperature = 0.8
    *operands, targets = head(53, getattr(torch, dtype), bias=True)
    hidden, weight, offset = (x.detach().double() for x in operands)
    y = hidden @ weight.T + offset
    logp = (y / temperature).log_softmax(-1)
    p, entropy = logp.exp(), -(logp.exp() * logp).sum(-1, keepdim=True)
    given = torch.linspace(-1, 1, len(targets)).double()[:, None]
    given_entropy = given.flip(0) * of_entropy
    hit = torch.nn.functional.one_hot(targets, VOCAB)
    d_y = (given * (hit - p) - given_entropy * p * (logp + entropy)) / temperature

    magnitudes = hidden.abs() @ weight.abs().T + offset.abs()
    of_y = row("linear", "y").allowed(dtype, terms=hidden.shape[1], scale=magnitudes, expected=y).max() / temperature
    sensitive = given.abs() + given_entropy.abs() * (1 + logp.abs() + (logp + entropy).abs())
    allowed = 2 * of_y * p * sensitive / temperature + row("logprob", "dlogits").allowed(
        dtype, expected=d_y, max_abs_z=(y / temperature).abs().amax(-1, keepdim=True), p=p, log_p=logp.abs(),
        spread=(logp + entropy).abs(), given=given.abs(), given_entropy=given_entropy.abs(),
        given_target=given.abs() * hit, slope=1 / temperature,
    )  # fmt: skip
    exact = d_y @ weight, d_y.T @ hidden, d_y.sum(0)
    moved = allowed @ weight.abs(), allowed.T @ hidden.abs(), allowed.sum(0)
    scales = d_y.abs() @ weight.abs(), d_y.abs().T @ hidden.abs(), d_y.abs().sum(0)
    rows = row("linear", "dx"), row("linear", "dweight"), row("linear", "dbias")
    facts: tuple[dict[str, int], ...] = {"terms": VOCAB}, {"terms": len(targets)}, {"rows": len(targets)}
    found = gradients(rk.integrations.trl.ChunkedLogprob, operands, targets, of_entropy)
    for x, e, m, scale, of, fact in zip(found, exact, moved, scales, rows, facts, strict=True):
        assert str(x.dtype) == f"torch.{dtype}"
        bound = m + of.allowed(dtype, scale=scale + m, expected=e.abs() + m, **fact)
        assert bool(((x.double() - e).abs() <= bound).all())


def test_blocks_of_tokens_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    *operands, targets = head(300, torch.bfloat16, bias=True)

    def everything() -> list[Any]:
        found = rk.integrations.trl.ChunkedLogprob.apply(*operands, targets, 0.8, 16)
        return [*found[:2], *gradients(rk.integrations.trl.ChunkedLogprob, operands, targets, True)[:1]]

    whole = everything()
    monkeypatch.setattr(rk.integrations.trl, "_TOKENS", 64)
    assert all(torch.equal(a, b) for a, b in zip(whole, everything(), strict=True))


def test_a_backward_computes_in_the_arithmetic_of_its_forward() -> None:
    *operands, targets = head(400, torch.bfloat16)

    def gradient(forward: str, backward: str) -> Any:
        with rk.arithmetic(forward):
            logp, *_ = rk.integrations.trl.ChunkedLogprob.apply(*operands, targets, 1.0, 16)
        with rk.arithmetic(backward):
            return torch.autograd.grad(logp.sum(), operands[1])[0]

    assert torch.equal(gradient("sm_90", "ieee"), gradient("sm_90", "sm_90"))
    # the test must be able to tell the two modes apart
    assert not torch.equal(gradient("ieee", "ieee"), gradient("sm_90", "sm_90"))


def test_no_token_at_all() -> None:
    *operands, targets = head(0, torch.float32)
    found = rk.integrations.trl.ChunkedLogprob.apply(*operands, targets, 1.0, 16)
    assert all(x.shape == (0,) for x in found)
    found[0].sum().backward()
    assert not operands[1].grad.any()


# ---- one step of GRPOTrainer ----------------------------------------------------------------------------------------


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w1", eos_token="w2")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer of TRL. Tests change its settings but not its model."""
    datasets = pytest.importorskip("datasets", reason="TRL's trainers take a data set of the package datasets")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
        )
    )  # fmt: skip
    model.generation_config.max_length = 64
    return grpo_trainer.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        args=grpo_trainer.GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("grpo")), report_to=[], use_cpu=True, bf16=False, temperature=0.9,
            per_device_train_batch_size=SEQUENCES, num_generations=3, max_completion_length=COMPLETION, max_steps=2,
            logging_steps=1, save_strategy="no", disable_tqdm=True, learning_rate=1e-3,
        ),
        processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w5 w6 w7", "w8"]}),
    )  # fmt: skip


# Options of GRPOConfig. Settings that TRL's trainer copies are set on the trainer.
CASES: dict[str, dict[str, Any]] = {
    **{kind: {"loss_type": kind} for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")},
    "cispo, epsilon_high": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.02},
    "sequence luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "delta": {"loss_type": "dapo", "delta": 1.25, "epsilon_high": 0.28},
    "beta": {"loss_type": "grpo", "beta": 0.4},
    "unbiased kl": {"loss_type": "dapo", "beta": 0.04, "use_bias_correction_kl": True},
    "off-policy mask": {"loss_type": "dapo", "off_policy_mask_threshold": 0.01},
    "entropy": {"loss_type": "dapo", "entropy_coef": 0.02},
    "entropy grpo": {"loss_type": "grpo", "entropy_coef": 0.02},
    "adaptive entropy": {"loss_type": "grpo", "entropy_coef": 0.02, "use_adaptive_entropy": True},
    "adaptive entropy, above its target": {
        "loss_type": "grpo",
        "entropy_coef": 0.02,
        "use_adaptive_entropy": True,
        "entropy_target": 0.1,
        "_last_world_entropy": 5.0,
    },
    "entropy quantile": {"loss_type": "bnpo", "top_entropy_quantile": 0.4, "beta": 0.04},
    "entropy quantile, bonus": {"loss_type": "dapo", "top_entropy_quantile": 0.4, "entropy_coef": 0.02},
    "tools": {"loss_type": "dapo", "tool_mask": True},
    "on policy": {"loss_type": "dapo", "old": False},
    "advantages of tokens": {"loss_type": "dr_grpo", "token_advantages": True},
}
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def batch(options: dict[str, Any]) -> dict[str, Any]:
    random = torch.Generator().manual_seed(3)

    def noise(size: float, *shape: int) -> Any:
        return size * torch.randn(*(shape or (SEQUENCES, COMPLETION)), generator=random)

    prompts = torch.randint(3, VOCAB, (SEQUENCES, PROMPT), generator=random)
    completions = torch.randint(3, VOCAB, (SEQUENCES, COMPLETION), generator=random)
    lengths = torch.tensor([COMPLETION, 1, 4, COMPLETION, 7, 6])[:, None]
    return {
        "prompt_ids": prompts,
        "prompt_mask": (torch.arange(PROMPT) >= torch.tensor([0, 3, 1, 0, 4, 2])[:, None]).long(),
        "completion_ids": completions,
        "completion_mask": (torch.arange(COMPLETION) < lengths).long(),
        "advantages": noise(1.0) if options.get("token_advantages") else noise(1.0, SEQUENCES),
        "num_items_in_batch": torch.tensor(47),
        "noise": noise(0.3),
        "noise of the reference": noise(0.1),
        "noise of vLLM": noise(0.2),
        "tools": (torch.rand(SEQUENCES, COMPLETION, generator=random) < 0.7).long(),
    }


def logprobs(trainer: Any, inputs: dict[str, Any], batch_size: int | None = None) -> Any:
    """Log-probabilities and entropies of the completions."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    return trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, attention, COMPLETION, batch_size=batch_size, compute_entropy=True
    )[:2]


class Step:
    """One call of _compute_loss with its gradients and logs."""

    def __init__(self, trainer: Any, model: Any, inputs: dict[str, Any]) -> None:
        trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        model.zero_grad()
        self.loss = trainer._compute_loss(model, inputs)
        self.loss.backward()
        self.gradient = torch.cat([p.grad.flatten().double() for p in model.parameters()])
        self.logs = {name: list(values) for name, values in trainer._metrics["train"].items()}


def in_float64(self: Any, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, **_: Any) -> Any:
    """GRPOTrainer._get_per_token_logps_and_entropies with head and softmax in float64, from the same hidden states."""
    hidden = model.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    z = hidden[:, :-1].double() @ model.lm_head.weight.double().T / self.temperature
    logp = z.log_softmax(-1)
    mask = attention_mask[:, 1:] != 0
    selected = logp.gather(-1, input_ids[:, 1:, None])[..., 0].masked_fill(~mask, 0)
    entropy = -(logp.exp() * logp).sum(-1).masked_fill(~mask, 0)
    self.logprob_error = logprob_error(hidden.detach().flatten(0, 1), model.lm_head.weight.detach(), z.detach())
    self.max_abs_z, self.max_log_p = float(z.detach().abs().max()), float(logp.detach().abs().max())
    self.of_float64, self.entropy_of_float64 = selected[:, -logits_to_keep:], entropy[:, -logits_to_keep:]
    self.of_float64.retain_grad()
    self.entropy_of_float64.retain_grad()
    return self.of_float64, self.entropy_of_float64, None


def high_entropy_in_float32(self: Any, entropies: Any, mask: Any, threshold: float) -> Any:
    """GRPOTrainer.get_high_entropy_mask with float32 entropies, as in a step. TRL's threshold is one of the entropies,
    rounded to float32. In float64 that entropy would often lie below the threshold computed from it."""
    return type(self).get_high_entropy_mask(self, entropies.float(), mask, threshold)


def norms_of_tokens(trainer: Any) -> tuple[Any, Any]:
    """Norms of the parameters' gradients for each token's log-probability and entropy, [SEQUENCES, COMPLETION]."""
    if not hasattr(trainer, "norms"):
        inputs = batch({})
        found = logprobs(trainer, inputs)
        parameters = list(trainer.model.parameters())
        trainer.norms = tuple(torch.zeros_like(x, requires_grad=False) for x in found)
        for norms, x in zip(trainer.norms, found, strict=True):
            for i, j in inputs["completion_mask"].nonzero().tolist():
                of_token = torch.autograd.grad(x[i, j], parameters, retain_graph=True)
                norms[i, j] = torch.cat([g.flatten() for g in of_token]).norm()
    return trainer.norms


def allowed_gradient(trainer: Any, exact: Any) -> float:
    """The allowed error of the parameters' gradient, as a norm: a sum over tokens. The loss's gradient in a
    log-probability has two errors: one within its own bound, and one from the errors of the log-probabilities. A
    log-probability's gradient in the logits has an error within its bound."""
    given = exact.of_float64.grad.abs()
    of_entropy = 0.0 if exact.entropy_of_float64.grad is None else exact.entropy_of_float64.grad.abs()
    facts = {"max_abs_z": exact.max_abs_z, "p": 1.0, "log_p": exact.max_log_p, "spread": exact.max_log_p}
    dlogits = row("logprob", "dlogits")
    relative = dlogits.allowed(**facts, given=1.0, given_entropy=0.0, given_target=1.0)
    of_entropies = dlogits.allowed(**facts, given=0.0, given_entropy=1.0, given_target=0.0)
    of_loss = row("policy_loss", "d_logprob").allowed(largest=given.max())
    norms, entropy_norms = norms_of_tokens(trainer)
    total = norms * (of_loss + given * (relative + 2 * exact.logprob_error))
    return float((total + entropy_norms * of_entropy * (of_entropies + 2 * exact.logprob_error)).sum())


def settings(trainer: Any, options: dict[str, Any]) -> Any:
    """A trainer like `trainer` with other options, as its constructor sets them."""
    made = copy.copy(trainer)
    made.args = copy.copy(trainer.args)
    made.current_gradient_accumulation_steps = 4
    made.args.entropy_target, made._last_world_entropy = 100.0, 0.0
    for name, value in options.items():
        target = made.args if name in ("delta", "use_bias_correction_kl", "entropy_target") else made
        setattr(target, name, value)
    made._entropy_bonus_enabled = made.entropy_coef != 0
    made._entropy_window_stats = None
    return made


def compare(trainer: Any, options: dict[str, Any]) -> None:
    inputs = batch(options)
    model = trainer.model.train()
    with torch.no_grad():
        now, _ = logprobs(trainer, inputs)
    before, reference = now + inputs.pop("noise"), now + inputs.pop("noise of the reference")
    sampled, tools = before + inputs.pop("noise of vLLM"), inputs.pop("tools")
    if options.get("old", True):
        inputs["old_per_token_logps"] = before
    if options.get("beta"):
        inputs["ref_per_token_logps"] = reference
    if options.get("tool_mask"):
        inputs["tool_mask"] = tools
    if options.get("use_vllm"):
        sampled[3, 2] = torch.nan  # vLLM did not score this token
        inputs["sampling_per_token_logps"] = sampled
        inputs["importance_sampling_ratio"] = trl_weights(options, before, sampled, inputs["completion_mask"])

    theirs = Step(settings(trainer, options), model, dict(inputs))
    with rk.integrations.trl.enabled():
        ours = Step(settings(trainer, options), model, dict(inputs))
    exact_trainer = settings(trainer, options)
    exact_trainer._get_per_token_logps_and_entropies = types.MethodType(in_float64, exact_trainer)
    exact_trainer.get_high_entropy_mask = types.MethodType(high_entropy_in_float32, exact_trainer)
    exact = Step(exact_trainer, model, dict(inputs))
    model.zero_grad()

    slope = float(exact_trainer.of_float64.grad.abs().sum())  # the change of the loss if every log-probability changes
    allowed = row("policy_loss", "loss").allowed(scale=slope + abs(exact.loss.item()))
    allowed += slope * exact_trainer.logprob_error
    assert abs(ours.loss.item() - exact.loss.item()) <= allowed
    # otherwise the comparison would prove nothing about our loss
    assert abs(theirs.loss.item() - exact.loss.item()) <= allowed
    allowed = allowed_gradient(trainer, exact_trainer)
    for step in (ours, theirs):
        assert float((step.gradient - exact.gradient).norm()) <= allowed
    assert float(exact.gradient.norm()) > 100 * allowed  # gradients of zero would agree, too

    assert set(ours.logs) == set(theirs.logs)
    for name, values in theirs.logs.items():
        expected = torch.tensor(values)
        bound = row("policy_loss", "metrics").allowed(expected=expected)
        torch.testing.assert_close(torch.tensor(ours.logs[name]), expected, rtol=0, atol=float(bound), msg=name)


def trl_weights(options: dict[str, Any], old: Any, sampled: Any, mask: Any) -> Any:
    """The weights, as GRPOTrainer._generate_and_score_completions computes them."""
    difference = ((old - sampled) * mask).nan_to_num(nan=0.0)
    mode = options["vllm_importance_sampling_mode"]
    weights = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    low, high = options["vllm_importance_sampling_clip_min"], options["vllm_importance_sampling_clip_max"]
    outside = (weights < low) | (weights > high)
    return weights.clamp(low, high) if mode.endswith("truncate") else weights.masked_fill(outside, 0.0)


@pytest.mark.parametrize("name", [*CASES][TURN])
def test_a_step_has_trls_loss_gradients_and_logs(stock: Any, name: str) -> None:
    compare(stock, CASES[name])


# TRL refuses VESPO with weights per sequence.
CORRECTED = [
    (loss_type, mode)
    for loss_type, mode in itertools.product(("grpo", "dapo", "cispo", "vespo"), MODES)
    if loss_type != "vespo" or mode.startswith("token")
]


@pytest.mark.parametrize(("loss_type", "mode"), CORRECTED[TURN])
def test_a_step_corrected_for_vllm(stock: Any, loss_type: str, mode: str) -> None:
    low, high = (0.9, 1.1) if mode.startswith("token") else (0.7, 1.3)  # some weights are outside, some are not
    options = {
        "loss_type": loss_type, "use_vllm": True, "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high,
        "off_policy_mask_threshold": 0.05,
    }  # fmt: skip
    compare(stock, options)


def test_evaluation_has_no_share_of_an_accumulation(stock: Any) -> None:
    trainer = settings(stock, {"loss_type": "grpo"})
    inputs = batch({})
    losses = []
    for context in (rk.integrations.trl.enabled, warnings.catch_warnings):
        with context(), torch.no_grad():
            stock.model.eval()
            trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
            losses.append(trainer._compute_loss(stock.model, inputs).item())
            assert not trainer._metrics["train"]
    stock.model.train()
    assert losses[0] == pytest.approx(losses[1], abs=float(row("policy_loss", "loss").allowed(scale=1.0)))


def test_a_whole_training_has_trls_rewards_and_logs(stock: Any) -> None:
    """generate(), rewards, loss and update, twice from the same weights; the logs have TRL's own names."""
    state = copy.deepcopy(stock.model.state_dict())
    histories = []
    for context in (warnings.catch_warnings, rk.integrations.trl.enabled):
        stock.model.load_state_dict(state)
        trainer = grpo_trainer.GRPOTrainer(
            model=stock.model,
            reward_funcs=stock.reward_funcs,
            args=stock.args,
            processing_class=stock.processing_class,
            train_dataset=stock.train_dataset,
        )
        with context():
            trainer.train()
        histories.append(trainer.state.log_history)
    stock.model.load_state_dict(state)
    timing = ("runtime", "per_second", "time")
    for theirs, ours in zip(*histories, strict=True):
        assert set(theirs) == set(ours)
        for name, value in theirs.items():
            if name.startswith(("reward", "completions/", "num_tokens")):
                assert ours[name] == value, name
            elif not name.endswith(timing):
                assert abs(ours[name] - value) <= row("policy_loss", "metrics").allowed(expected=value), name


def test_with_a_patched_model_logprobs_do_not_depend_on_the_micro_batch(stock: Any) -> None:
    """The library's purpose: the ratio of an on-policy step is 1, in any batches."""
    rk.patch_model(stock.model)
    try:
        with torch.no_grad(), rk.integrations.trl.enabled():
            found = [logprobs(stock, batch({}), size) for size in (SEQUENCES, 1, 4)]
    finally:
        rk.unpatch_model(stock.model)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_the_reference_of_a_patched_policy_is_patched_and_the_first_kl_is_0(stock: Any, tmp_path: Any) -> None:
    """Whole steps of TRL: the rollout scores the reference, and the loss divides by the reference. Outside the context
    the reference is TRL's again."""
    folder = tmp_path / "policy"
    stock.model.save_pretrained(folder)
    args = copy.copy(stock.args)
    args.beta, args.max_steps, args.output_dir = 0.5, 2, str(tmp_path)
    trainer = grpo_trainer.GRPOTrainer(
        model=type(stock.model).from_pretrained(folder),
        reward_funcs=stock.reward_funcs,
        args=args,
        processing_class=stock.processing_class,
        train_dataset=stock.train_dataset,
    )
    rk.patch_model(trainer.model)
    with rk.integrations.trl.enabled():
        trainer.train()
        assert rk.status(trainer.ref_model) == rk.status(trainer.model)
    kl = [line["kl"] for line in trainer.state.log_history if "kl" in line]
    assert kl[0] == 0.0
    assert kl[1] > 0.0
    with pytest.raises(ValueError, match="patch_model"):
        rk.status(trainer.ref_model)


def test_the_divisor_of_dr_grpo_is_logged_once(stock: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = settings(stock, {"loss_type": "dr_grpo", "max_completion_length": 515})
    with caplog.at_level("INFO", logger="rl_kernel_native"), rk.integrations.trl.enabled():
        for _ in range(2):
            Step(trainer, stock.model.train(), batch({}))
    lines = [record.getMessage() for record in caplog.records if "dr_grpo" in record.getMessage()]
    assert lines == ["TRL's dr_grpo divides by sequences times max_completion_length, which is 515"]


def test_a_reference_that_cannot_be_patched_is_named_once(stock: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = settings(stock, {})
    trainer.ref_model = torch.nn.Linear(2, 2)
    trainer.model = copy.deepcopy(stock.model)
    rk.patch_model(trainer.model)
    caplog.clear()
    with caplog.at_level("WARNING", logger="rl_kernel_native"), rk.integrations.trl.enabled():
        for _ in range(2):
            with pytest.raises(TypeError):
                trainer._get_per_token_logps_and_entropies(trainer.ref_model)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "reference model stays on torch's operators" in line
    assert "got <class 'torch.nn.modules.linear.Linear'>" in line
