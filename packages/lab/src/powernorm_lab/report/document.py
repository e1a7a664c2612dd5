"""Pages from templates: rendering, escaping, and writing to files."""

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from powernorm.errors import InputError
from powernorm.files import package_folder, write
from powernorm_lab.report.numerals import counted, printable

Section = tuple[str, str, Markup]
"""Id, heading and contents."""


@dataclass(frozen=True)
class Article:
    """A page, or one of several articles on a page.

    Attributes:
        heading: heading of the article.
        lead: one or two lines below the conclusion.
        sections: sections with their ids.
        anchor: prefix of the ids if a page has several articles.
        conclusion: sentences at the top.
    """

    heading: str
    lead: str
    sections: Sequence[Section]
    anchor: str = ""
    conclusion: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Id of the article, if a page has several."""
        return self.anchor.rstrip("-")


def article(
    module: Any, heading: str, *, conclusion: Sequence[str] = (), anchor: str = ""
) -> Article:
    """Return the article of a rendered template, which has a macro `lead` and sections.

    Args:
        module: result of `rendered`.
        heading: heading of the article.
        conclusion: sentences at the top.
        anchor: prefix of the ids if a page has several articles.
    """
    return Article(heading, module.lead(), sections(module), anchor, conclusion)


def sections(module: Any) -> list[Section]:
    """Return the sections of a rendered template; those without contents are left out.

    The template's `sections` are names and headings; each name has a macro of the same name.
    """
    found = (
        (name, heading, getattr(module, name.replace("-", "_"))().strip())
        for name, heading in module.sections.items()
    )
    return [section for section in found if section[2]]


def rendered(template: str, **values: object) -> Any:
    """Return a template as a module, whose macros are functions that see the values."""
    return _environment().get_template(template).make_module(values)


def write_page(page: str, target: Path) -> Path:
    """Write a page atomically and return its path.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        write(target, page)
    except OSError as error:
        raise InputError(
            f"{target} cannot be written ({error.strerror}): give the name of a file in a folder "
            "that can be"
        ) from error
    return target


_FOLDER: Final = package_folder("powernorm_lab.report") / "templates"


def part(name: str, *values: object, **named: object) -> Markup:
    """Render a part of a page by the name of its macro in `parts.html`.

    >>> part("heading", "a < b")
    Markup('<h3>a &lt; b</h3>')
    """
    macro = getattr(_environment().get_template("parts.html").module, name)
    return Markup(macro(*values, **named))


def words(name: str, *values: object, **named: object) -> str:
    """Render a caption as plain text by the name of its macro in `words.txt`."""
    macro = getattr(_environment().get_template("words.txt").module, name)
    return str(macro(*values, **named))


def document(title: str, articles: Sequence[Article]) -> str:
    """Render a whole page, which loads nothing and runs its own script only.

    Args:
        title: title of the browser's tab.
        articles: one article, or several below each other with a list of them at the top.
    """
    style, script = (
        (_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'"
    )
    template = _environment().get_template("page.html")
    # Both files belong to this package, so that they need no escaping.
    return template.render(
        title=title, articles=articles, policy=policy, style=Markup(style), script=Markup(script)
    )


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=lambda name: not str(name).endswith((".md", ".txt")),
        undefined=StrictUndefined,
        finalize=_shown,
        auto_reload=False,
    )
    environment.globals["counted"] = counted
    environment.filters |= {"md": escaped, "code": code}
    return environment


def _shown(value: object) -> object:
    """Remove control characters, which HTML forbids and files may contain."""
    return value if isinstance(value, Markup) else printable(str(value))


# Texts in Markdown.


_MARKDOWN: Final = re.compile(
    r"[\\|*`<>\[\]$~&#]"
    r"|(?<![^\W_])_|_(?![^\W_])"  # not between letters and digits, where it is not markup
    r"|:(?=//)|(?<=www)\.",  # in addresses that GitHub would turn into links
    re.IGNORECASE,
)
_BACKTICKS: Final = re.compile("`+")


def escaped(text: str) -> str:
    r"""Escape a text for one line of Markdown: no markup, HTML, links or ends of cells.

    >>> escaped("a|b <i>[x](https://y)</i>\n# `c`")
    'a\\|b \\<i\\>\\[x\\](https\\://y)\\</i\\> \\# \\`c\\`'
    """
    return _MARKDOWN.sub(r"\\\g<0>", printable(" ".join(text.split())))


def code(text: str) -> str:
    """Format any text as code in a line of Markdown.

    >>> code("a <b>"), code("a `b`")
    ('`a <b>`', '`` a `b` ``')
    """
    line = printable(" ".join(text.split()))
    longest = max(map(len, _BACKTICKS.findall(line)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {line} {fence}" if longest else f"`{line}`"
