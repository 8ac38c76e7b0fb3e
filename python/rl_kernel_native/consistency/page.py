"""One self-contained HTML page, without scripts, links or other files."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .errors import spelled
from .explain import explain, news, served_by
from .result import BatchRun, Comparison

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; color: #1f2328;
  background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; font-size: .87rem; margin: .5rem 0; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #d8dee4; padding: .25rem .7rem .25rem 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; }
td.n, .number { white-space: nowrap; } th { font-size: .85em; } .verdict { font-size: 1.15rem; font-weight: 600; }
.wide { overflow-x: auto; } svg { max-width: 100%; height: auto; }
.chart { background: #fff; border-radius: 6px; padding: .4rem; margin: .8rem 0; overflow-x: auto; }
.chart svg { min-width: 36rem; }
.ok { color: #15803d; font-weight: 600; } .bad { color: #b42318; font-weight: 600; }
tr.first td { background: #fff1e8; } code { font-size: .87em; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) {
  body { color: #e6edf3; background: #0d1117; } th, td { border-color: #30363d; } tr.first td { background: #3d2414; }
  .ok { color: #4ade80; } .bad { color: #f87171; } .chart { filter: invert(0.93) hue-rotate(180deg); }
}
"""


def _number(value: float | int) -> str:
    return f"{value + 0.0:.4g}" if isinstance(value, float) else f"{value:,}"  # + 0.0: no "-0"


def _escaped(text: str) -> str:
    """A sentence as HTML. A browser breaks no line inside a number, or inside a formula such as |ratio - 1|."""
    return re.sub(r"\d[\d.]*e-\d+|(?:max |mean )?\|[^|]*\|", r'<span class="number">\g<0></span>', html.escape(text))


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
        f'<th class="n">{_escaped(title)}</th>' if column in numeric else f"<th>{_escaped(title)}</th>"
        for column, title in enumerate(head)
    ]
    return f'<div class="wide"><table><tr>{"".join(titles)}</tr>{"".join(lines)}</table></div>'


def _verdict(aligned: bool) -> str:
    return '<span class="ok">aligned</span>' if aligned else '<span class="bad">drift</span>'


def _metrics(comparison: Comparison) -> str:
    rows = []
    for run in comparison.runs:
        m = run.metrics
        worst = f"prompt\u00a0{m.worst.prompt}, position\u00a0{m.worst.position}" if m.worst else ""
        forwards = (f"{run.prefills} + {run.decode_steps}", run.training_forwards)
        counts = (m.tokens, m.differing_tokens, m.logits_equal_tokens, m.logprob_differs_on_equal_logits)
        figures = (m.max_abs_ratio, m.max_abs_dlogp, m.mean_abs_dlogp, m.kl_k1, m.kl_k3, m.clip_fraction)
        rows.append([run.batch_size, *counts, *figures, worst, *forwards])
    head = ["batch", "tokens", "differ", "equal logits", "two logprobs"]
    head += ["max |ratio - 1|", "max |dlogp|", "mean |dlogp|", "KL k1", "KL k3", "clip fraction (0.2)"]
    return _table([*head, "worst token", "rollout forwards: prefill + decode", "training forwards"], rows)


def _operators(comparison: Comparison, run: BatchRun) -> str:
    judged = {judgement.name: judgement for judgement in run.judgements}
    rows = []
    for drift in run.operators:
        alone = judged.get(drift.name)
        own = (alone.error, "FAULT" if alone.fault else "") if alone else ("", "")
        counts = (drift.differing_tokens, drift.tokens, drift.first_here)
        errors = (drift.max_abs, drift.mean_relative, drift.max_relative)
        rows.append([drift.order, drift.name, served_by(comparison, drift.kind), *counts, *errors, *own])
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
        "max rel. on equal input",
        "",
    ]
    first = run.first_divergent.order if run.first_divergent else None
    table = _table(head, rows, first=first)
    return f"<details><summary>Every operator, batch {run.batch_size}</summary>{table}</details>"


def _section(comparison: Comparison, figures: Mapping[str, str]) -> str:
    name = slug(comparison)
    sentences = "".join(f"<li>{_escaped(line)}</li>" for line in explain(comparison)[1:])
    found = (figures.get(f"{kind}_{name}") for kind in ("drift", "log_ratio"))
    rows = [[row.operator, row.served_by, row.rollout, row.training] for row in comparison.operator_table]
    parts = [
        f"<h2>{html.escape(comparison.settings.label)}: {_verdict(comparison.aligned)}</h2>",
        f'<p class="verdict">{_escaped(str(comparison))}</p><ul>{sentences}</ul>',
        _metrics(comparison),
        *(_chart(figure) for figure in found if figure is not None),
        "<h3>Which operators are whose</h3>",
        _table(["operator", "served by", "rollout", "training"], rows),
        *(_operators(comparison, run) for run in comparison.runs),
    ]
    return "\n".join(parts)


def slug(comparison: Comparison) -> str:
    """The operators of a comparison as a part of a file's name."""
    return comparison.settings.label.replace(" ", "_")


def _chart(figure: str) -> str:
    return f'<div class="chart">{figure}</div>'


def render_page(report: Mapping[str, Any], comparisons: Sequence[Comparison], figures: Mapping[str, str]) -> str:
    """The page.

    Args:
        report: report_object of the comparisons.
        figures: SVG elements by name: overview, and drift_<ops> and log_ratio_<ops> if they have something to show.
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
    atol = first.settings.atol
    aligned = f"differences of at most {spelled('atol', atol)}" if atol else "equal bytes"
    facts = {**report["versions"], **report["hardware"]}
    body = "\n".join(_section(comparison, figures) for comparison in comparisons)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>rlk compare</title><style>{_STYLE}</style></head><body>
<h1>Rollout against training: {_verdict(bool(report["aligned"]))}</h1>
<p class="verdict">{_escaped(news(comparisons))}</p>
{_chart(figures["overview"])}
<p>The same ids, scored twice: one token a step against a KV cache in a batch whose members change, and by one
teacher-forced forward. Aligned means {aligned}.</p>
{body}
<h2>Settings</h2>
{_table(["setting", "value"], [[key, str(value)] for key, value in setting.items()])}
<h2>Versions and hardware</h2>
{_table(["", ""], [[key, str(value)] for key, value in facts.items()])}
</body></html>
"""


def table_page(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]], facts: Mapping[str, Any]) -> str:
    """A page with one table and a description of the run."""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
{_table(head, rows)}
{_table(["", ""], [[key, str(value)] for key, value in facts.items()])}
</body></html>
"""
