"""One HTML page with everything inside: no scripts, no links, no outside files."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .explain import explain, served_by
from .result import BatchRun, Comparison

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; color: #1f2328;
  background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; font-size: .87rem; margin: .5rem 0; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #d8dee4; padding: .25rem .7rem .25rem 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; }
.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; }
.ok { color: #15803d; font-weight: 600; } .bad { color: #b42318; font-weight: 600; }
tr.first td { background: #fff1e8; } code { font-size: .87em; overflow-wrap: anywhere; }
"""


def _number(value: float | int) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], first: int | None = None) -> str:
    lines = []
    numeric: set[int] = set()
    for index, row in enumerate(rows):
        cells = []
        for column, value in enumerate(row):
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                numeric.add(column)
                cells.append(f'<td class="n">{_number(value)}</td>')
            else:
                cells.append(f"<td>{html.escape(str(value))}</td>")
        mark = ' class="first"' if index == first else ""
        lines.append(f"<tr{mark}>{''.join(cells)}</tr>")
    titles = [
        f'<th class="n">{html.escape(title)}</th>' if column in numeric else f"<th>{html.escape(title)}</th>"
        for column, title in enumerate(head)
    ]
    return f'<div class="wide"><table><tr>{"".join(titles)}</tr>{"".join(lines)}</table></div>'


def _verdict(aligned: bool) -> str:
    return '<span class="ok">aligned</span>' if aligned else '<span class="bad">drift</span>'


def _metrics(comparison: Comparison) -> str:
    rows = []
    for run in comparison.runs:
        m = run.metrics
        worst = f"prompt {m.worst.prompt}, position {m.worst.position}" if m.worst else ""
        forwards = (f"{run.prefills} + {run.decode_steps}", run.training_forwards)
        counts = (m.tokens, m.differing_tokens, m.logits_equal_tokens, m.logprob_differs_on_equal_logits)
        figures = (m.max_abs_dlogp, m.mean_abs_dlogp, m.kl_k1, m.kl_k3, m.clip_fraction)
        rows.append([run.batch_size, *counts, *figures, worst, *forwards])
    head = ["batch", "tokens", "differing", "rows of logits with equal bytes", "of these, log-probs that differ"]
    head += ["max |dlogp|", "mean |dlogp|", "KL k1", "KL k3", "clip fraction (0.2)"]
    return _table([*head, "worst token", "rollout forwards (prefill + decode)", "training forwards"], rows)


def _operators(comparison: Comparison, run: BatchRun) -> str:
    rows = []
    for drift in run.operators:
        counts = (drift.differing_tokens, drift.tokens, drift.first_here)
        errors = (drift.max_abs, drift.mean_relative, drift.max_relative)
        rows.append([drift.order, drift.name, served_by(comparison, drift.kind), *counts, *errors])
    head = [
        "",
        "operator",
        "served by",
        "tokens that differ",
        "tokens",
        "first here",
        "max abs",
        "mean rel.",
        "max rel.",
    ]
    first = run.first_divergent.order if run.first_divergent else None
    table = _table(head, rows, first=first)
    return f"<details><summary>Every operator, batch {run.batch_size}</summary>{table}</details>"


def _section(comparison: Comparison, figures: Mapping[str, str]) -> str:
    ops = comparison.settings.ops
    sentences = "".join(f"<li>{html.escape(line)}</li>" for line in explain(comparison))
    rows = [[row.operator, row.served_by, row.rollout, row.training] for row in comparison.operator_table]
    parts = [
        f"<h2>--ops {html.escape(ops)}: {_verdict(comparison.aligned)}</h2><ul>{sentences}</ul>",
        _metrics(comparison),
        figures[f"drift_{ops}"],
        figures[f"log_ratio_{ops}"],
        "<h3>Which operators are whose</h3>",
        _table(["operator", "served by", "rollout", "training"], rows),
        *(_operators(comparison, run) for run in comparison.runs),
    ]
    return "\n".join(parts)


def render_page(report: Mapping[str, Any], comparisons: Sequence[Comparison], figures: Mapping[str, str]) -> str:
    """The page.

    Args:
        report: report_object of the comparisons.
        figures: SVG elements named drift_<ops> and log_ratio_<ops>.
    """
    first = comparisons[0]
    setting = {
        "command": report["command_line"],
        "created": report["created"],
        **first.model,
        "prompts": first.prompts,
        **{
            name: getattr(first.settings, name)
            for name in ("seed", "temperature", "max_new_tokens", "packing", "micro_batch_tokens", "atol")
        },
    }
    facts = {**report["versions"], **report["hardware"]}
    body = "\n".join(_section(comparison, figures) for comparison in comparisons)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>rlk compare</title><style>{_STYLE}</style></head><body>
<h1>Rollout against training: {_verdict(bool(report["aligned"]))}</h1>
<p>The same ids, scored twice: one token a step against a KV cache in a batch whose members change, and by one
teacher-forced forward. Aligned means equal bytes unless --atol says otherwise.</p>
{_table(["setting", "value"], [[key, str(value)] for key, value in setting.items()])}
{body}
<h2>Versions and hardware</h2>
{_table(["", ""], [[key, str(value)] for key, value in facts.items()])}
</body></html>
"""
