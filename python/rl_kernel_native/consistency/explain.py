"""The findings in sentences: the verdict, then the place where drift begins, the operators that ran, and what the run
could not observe."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import spelled
from .result import NAMED_FAULTS, ROUNDING, BatchRun, Comparison

# For a kind of result, the operator of this library that computes it. A kind that is absent is the operator's own name.
_CALLS = {"rotary_emb": "rope", "mul": "silu_mul", "activation": "silu_mul", "lm_head": "linear"}
_NAMES = {"stock": "stock", "sdpa": "sdpa", "eager": "eager", "flash": "flash", "rk": "rl_kernel_native"}


def explain(comparison: Comparison) -> list[str]:
    """Sentences for readers, the verdict first. The sentences claim nothing that the run did not observe."""
    lines = [str(comparison), _ownership(comparison)]
    if lines[0].startswith(ROUNDING) and "training model" in comparison.model:
        options = f"{spelled('rollout_ops', 'rk')} and {spelled('training_ops', 'rk')}"
        lines.append(
            f"A fault smaller than rounding does not show here; with {options} equal weights give equal bytes."
        )
    for run in comparison.runs:
        lines += _run(comparison, run)
    for cross in comparison.across_batches:
        what = f"Rollouts at batch {cross.batch_a} and {cross.batch_b}"
        if cross.sequences_differing:
            lines.append(
                f"{what} sampled different ids in {cross.sequences_differing} of {comparison.prompts} sequences, first "
                f"at prompt {cross.first_prompt}, position {cross.first_position}; before that, "
                f"{cross.differing_tokens} of {cross.common_tokens} log-probabilities differ "
                f"(max |dlogp| {cross.max_abs_dlogp:.3g})."
            )
        else:
            lines.append(
                f"{what} sampled the same ids; {cross.differing_tokens} of {cross.common_tokens} log-probabilities "
                f"differ (max |dlogp| {cross.max_abs_dlogp:.3g})."
            )
    return lines


def news(comparisons: Sequence[Comparison]) -> str:
    """The last line of the console: one clause per comparison, with the number of differing tokens and any fault."""
    clauses: list[str] = []
    for comparison in comparisons:
        tokens, differing, _ = comparison.totals
        settings = comparison.settings
        name = _NAMES[settings.rollout_ops] if settings.rollout_ops == settings.training_ops else settings.label
        clauses.append(f"{name}: {differing} of {tokens}{' tokens differ' if not clauses else ''}")
    found = comparisons[-1].faults
    end = f"; fault: {found[0].name}" if found else ""
    return "; ".join(clauses) + end


def _ownership(comparison: Comparison) -> str:
    def called(served_by: str) -> list[str]:
        rows = (row.operator for row in comparison.operator_table if row.served_by == served_by)
        return list(dict.fromkeys(_CALLS.get(operator, operator) for operator in rows))

    ours, mixed = called("rk"), called("both")
    sums = "torch computes residual sums, which have the same bits everywhere"
    if mixed:
        return f"rl_kernel_native serves one side's {', '.join(mixed)}, and torch the other's; {sums}."
    if not ours:
        return f"All operators are torch's and transformers' own ({comparison.settings.label})."
    return f"rl_kernel_native serves {', '.join(ours)}; {sums}."


def served_by(comparison: Comparison, kind: str) -> str:
    """ "rk", "stock" or "both" for a kind of operator; "both" means that the two sides differ."""
    return next((row.served_by for row in comparison.operator_table if row.operator == kind), "stock")


def _run(comparison: Comparison, run: BatchRun) -> list[str]:
    metrics = run.metrics
    head = f"Batch {run.batch_size}: "
    if not metrics.differing_tokens:
        lines = [head + f"all {metrics.tokens} log-probabilities have the same bytes on both sides."]
    else:
        word = f"aligned within {spelled('atol')}" if run.aligned else "drift"
        lines = [
            head + f"{word}: {metrics.differing_tokens} of {metrics.tokens} log-probabilities differ, "
            f"max |dlogp| {metrics.max_abs_dlogp:.3g}, mean {metrics.mean_abs_dlogp:.3g}, "
            f"KL (k3) {metrics.kl_k3:.3g}, clip fraction {metrics.clip_fraction:.3g}."
        ]
    for fault in run.faults[:NAMED_FAULTS]:
        lines.append(
            head + f"{fault.name} is at fault: {comparison.how_far(fault)}, most at prompt {fault.prompt}, position "
            f"{fault.position}."
        )
    first = run.first_divergent
    if first is not None:
        where = f"layer {first.layer}" if first.layer is not None else "outside the layers"
        lines.append(
            head
            + f"the first divergent operator is {first.name} ({where}, {served_by(comparison, first.kind)}), first "
            f"at prompt {first.first_prompt}, position {first.first_position} ({first.first_phase}); it differs for "
            f"{first.differing_tokens} of {first.tokens} recorded tokens."
        )
    elif metrics.differing_tokens:
        lines.append(
            head + f"no operator differs among the {run.probed_tokens} recorded tokens; with fewer prompts or a larger "
            f"{spelled('probe_mb')} more are recorded."
        )
    equal = metrics.logits_equal_tokens
    if metrics.logprob_differs_on_equal_logits:
        lines.append(
            head + f"both sides have the same logits for {equal} of {metrics.tokens} tokens; "
            f"{metrics.logprob_differs_on_equal_logits} of these tokens still get two log-probabilities."
        )
    else:
        lines.append(head + f"both sides have the same logits for {equal} of {metrics.tokens} tokens.")
    return lines
