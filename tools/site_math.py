"""A Sphinx extension that writes formulas as MathML when the site is built, so that a reader needs no network and no
script to see them. A formula that cannot be written is a warning."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

LOG = logging.getLogger(__name__)


def mathml(formula: str, display: str, node: Any) -> str:
    """MathML of a formula in TeX's notation; `display` is `inline` or `block`."""
    try:
        made = str(convert(formula, display=display))
    except Exception as error:  # the converter has an exception for each fault of a formula
        LOG.warning("formula %r: %s", formula, type(error).__name__, location=node)
        return ""
    if "\\" in made:  # a command that the converter does not know stays as it is
        LOG.warning("formula %r: a command is not known", formula, location=node)
    return made


def inline(translator: Any, node: Any) -> None:
    """Writes a formula inside a line."""
    translator.body.append(mathml(node.astext(), "inline", node))
    raise nodes.SkipNode


def block(translator: Any, node: Any) -> None:
    """Writes a formula on separate lines."""
    translator.body.append(f'<div class="math">{mathml(node.astext(), "block", node)}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls this."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
