"""The findings in sentences: where drift begins, which operators are whose, and what was not looked at."""

from __future__ import annotations

from collections.abc import Sequence

from .result import BatchRun, Comparison


def explain(comparison: Comparison) -> list[str]:
    """Sentences for people. They claim nothing that the run did not observe."""
    lines = [_ownership(comparison)]
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


def conclude(comparisons: Sequence[Comparison]) -> str:
    """One sentence: what comparisons of the same model say about the log-probability itself, and about the rest."""
    counts = []
    for comparison in comparisons:
        metrics = [run.metrics for run in comparison.runs]
        equal = sum(m.logits_equal_tokens for m in metrics)
        differ = sum(m.logprob_differs_on_equal_logits for m in metrics)
        counts.append(f"{differ} of {equal} with --ops {comparison.settings.ops}")
    return f"To conclude: where logits have equal bytes, log-probabilities differ for {', '.join(counts)}; " + _rest(
        comparisons[-1]
    )


def _rest(comparison: Comparison) -> str:
    """Where drift begins that the log-probability inherits."""
    if not any(run.metrics.differing_tokens for run in comparison.runs):
        return "rollout and training give every token the same one."
    firsts = [run.first_divergent for run in comparison.runs]
    kinds = dict.fromkeys(first.kind for first in firsts if first is not None and first.kind != "logprob")
    if not kinds:
        return "no operator before it differs among the recorded tokens."
    return f"the other drift begins in {' and '.join(f'{kind} ({served_by(comparison, kind)})' for kind in kinds)}."


def _ownership(comparison: Comparison) -> str:
    ours = [row.operator for row in comparison.operator_table if row.served_by == "rk"]
    theirs = [row.operator for row in comparison.operator_table if row.served_by == "stock"]
    if not ours:
        return "All operators are torch's and transformers' own (--ops stock)."
    return f"Served by rl_kernel_native: {', '.join(ours)}. Still torch's own: {', '.join(theirs)}."


def served_by(comparison: Comparison, kind: str) -> str:
    """ "rk" or "stock" for a kind of operator."""
    return next((row.served_by for row in comparison.operator_table if row.operator == kind), "stock")


def _run(comparison: Comparison, run: BatchRun) -> list[str]:
    metrics = run.metrics
    head = f"Batch {run.batch_size}: "
    if not metrics.differing_tokens:
        lines = [head + f"all {metrics.tokens} log-probabilities have the same bytes on both sides."]
    else:
        verdict = "aligned within --atol" if run.aligned else "drift"
        lines = [
            head + f"{verdict}: {metrics.differing_tokens} of {metrics.tokens} log-probabilities differ, "
            f"max |dlogp| {metrics.max_abs_dlogp:.3g}, mean {metrics.mean_abs_dlogp:.3g}, "
            f"KL (k3) {metrics.kl_k3:.3g}, clip fraction {metrics.clip_fraction:.3g}."
        ]
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
            head
            + f"no operator differs among the {run.probed_tokens} recorded tokens; raise --probe-mb to record more."
        )
    fault = run.first_beyond_tolerance
    if fault is not None and fault.beyond_tolerance is not None:
        prompt, position = fault.beyond_tolerance
        lines.append(
            head + f"beyond rounding (relative error > {comparison.fault_tolerance:g}) first at {fault.name}, prompt "
            f"{prompt}, position {position}: look for a fault there."
        )
    lines.append(
        head + f"{metrics.logits_equal_tokens} of {metrics.tokens} logits rows have equal bytes; "
        f"{metrics.logprob_differs_on_equal_logits} of their log-probabilities differ all the same."
    )
    return lines
