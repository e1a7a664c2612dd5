"""HTML that is escaped by construction: a plain `str` never reaches the page as markup."""

from collections.abc import Iterable, Mapping
from html import escape as _escape
from typing import Final

from powernorm.lab.report.numerals import printable

VOID_ELEMENTS: Final = frozenset({"meta", "br", "hr", "wbr"})


class Markup(str):
    """Text that is HTML already. Everything else is escaped by `element`."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """The text as HTML; unchanged where it is markup already.

    >>> escape("<script>&")
    '&lt;script&gt;&amp;'
    """
    return text if isinstance(text, Markup) else Markup(_escape(printable(text), quote=True))


def element(name: str, *children: str, attributes: Mapping[str, str] | None = None) -> Markup:
    """An element with escaped children and attribute values.

    >>> element("p", "a < b", element("b", "c"), attributes={"class": "note"})
    '<p class="note">a &lt; b<b>c</b></p>'
    """
    opening = "".join(
        f' {key}="{_escape(printable(value), quote=True)}"'
        for key, value in (attributes or {}).items()
    )
    if name in VOID_ELEMENTS:
        return Markup(f"<{name}{opening}>")
    return Markup(f"<{name}{opening}>{join(children)}</{name}>")


def join(parts: Iterable[str], between: str = "") -> Markup:
    """Several pieces in a row, each escaped unless it is markup."""
    return Markup(escape(between).join(escape(part) for part in parts))
