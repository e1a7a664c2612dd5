"""Extensions of the reference: links from pages, and docstrings as they are.

Code in the pages that names something public, such as `powernorm.swap`, leads to its reference.
"""

import inspect
import re
from functools import partial
from typing import Any, Final, get_type_hints

from docutils import nodes
from pydantic.dataclasses import is_pydantic_dataclass
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

import powernorm_lab as lab

_NAME: Final = re.compile(
    r"(powernorm(?:_lab)?(?:\.\w+)+|[A-Z]\w+|build_norm|register_norm)(\(.*\))?"
)

_LINKED: Final = (nodes.reference, nodes.title, pending_xref)


def _link(app: Sphinx, document: nodes.document) -> None:
    """Leave code without a public name unchanged, without a warning: most of it is not ours."""
    for literal in list(document.findall(nodes.literal)):
        match = _NAME.fullmatch(literal.astext())
        if match is None or isinstance(literal.parent, _LINKED):
            continue
        reference = pending_xref(
            "",
            refdomain="py",
            reftype="obj",
            reftarget=match[1],
            refdoc=app.env.docname,
            refwarn=False,
            **{"py:module": "powernorm", "py:class": None},
        )
        literal.replace_self(reference)
        reference += literal


def _keep_colons(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Keep the text before a colon in a value's docstring, which Napoleon takes for a type."""
    if what in ("attribute", "property", "data"):
        lines[:0] = ["..", ""]  # an empty comment


def _plain_settings(app: Sphinx) -> None:
    """Show the settings of tasks with the types that users write, without the checks on top."""
    for value in map(partial(getattr, lab), lab.__all__):
        if _is_settings(value):
            for owner in filter(_is_settings, value.__mro__):
                owner.__annotations__ = get_type_hints(owner)


def _is_settings(value: Any) -> bool:
    return inspect.isclass(value) and is_pydantic_dataclass(value)


def _no_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Omit the list of all fields above the fields themselves."""
    return ("", "") if _is_settings(value) else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the handlers for pages, and for docstrings before Napoleon."""
    app.connect("doctree-read", _link)
    app.connect("autodoc-process-docstring", _keep_colons, priority=100)
    app.connect("autodoc-process-signature", _no_signature)
    app.connect("builder-inited", _plain_settings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
