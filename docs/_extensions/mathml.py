"""Formulas as MathML, which browsers render themselves, without scripts or fonts."""

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def _inline(self: HTML5Translator, node: nodes.Element) -> None:
    self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block(self: HTML5Translator, node: nodes.Element) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math"))
    self.body.append(tex2mathml(node.astext(), as_block=True))
    self.body.append("</div>")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer for `html_math_renderer`."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
