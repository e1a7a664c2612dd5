"""HTML pages: templates, escaping, and writing to files."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from powernorm.errors import InputError
from powernorm.files import package_folder, write
from powernorm_lab.report.numerals import printable

SectionParts = tuple[str, str, Sequence[Markup]]
"""Id, heading and contents; a section without contents is omitted."""


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
    sections: Sequence[SectionParts]
    anchor: str = ""
    conclusion: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Id of the article, if a page has several."""
        return self.anchor.rstrip("-")


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

    >>> part("paragraph", "a < b", kind="note")
    Markup('<p class="note">a &lt; b</p>')
    """
    macro = getattr(_environment().get_template("parts.html").module, name)
    return Markup(macro(*values, **named))


def gallery(drawn: Sequence[object]) -> list[Markup]:
    """Return figures with their captions side by side; empty without one."""
    return [part("gallery", drawn)] if drawn else []


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
    return Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        auto_reload=False,
    )


def _shown(value: object) -> object:
    """Remove control characters, which HTML forbids and files may contain."""
    return value if isinstance(value, Markup) else printable(str(value))
