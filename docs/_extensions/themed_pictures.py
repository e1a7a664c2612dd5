"""On dark pages `NAME-dark.svg` replaces `NAME-light.svg`, if there is one."""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def _add_dark(app: Sphinx, document: nodes.document) -> None:
    folder = Path(str(document["source"])).parent
    for image in list(document.findall(nodes.image)):
        dark = image["uri"].replace("-light.", "-dark.")
        if dark == image["uri"] or not (folder / dark).exists():
            continue
        twin = image.copy()
        twin["uri"] = dark
        image["classes"].append("only-light")
        twin["classes"].append("only-dark")
        image.parent.insert(image.parent.index(image) + 1, twin)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the handler that runs on every page before Sphinx collects its pictures."""
    app.connect("doctree-read", _add_dark, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
