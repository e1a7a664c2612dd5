"""HTML from the templates beside this module: whatever a file says is escaped where it stands."""

from base64 import b64encode
from functools import lru_cache
from hashlib import sha256
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from powernorm.files import package_folder
from powernorm.lab.report.numerals import printable

_FOLDER: Final = package_folder("powernorm.lab.report") / "templates"


def part(name: str, *values: object, **named: object) -> Markup:
    """Return a part of a page, by the name of its macro in `parts.html`.

    >>> part("paragraph", "a < b", kind="note")
    Markup('<p class="note">a &lt; b</p>')
    """
    macro = getattr(_environment().get_template("parts.html").module, name)
    return Markup(macro(*values, **named))


def page(**values: object) -> str:
    """Return a whole page of `page.html`, which loads nothing and runs its own script only."""
    style, script = (
        (_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'"
    )
    template = _environment().get_template("page.html")
    # Neither file is anybody else's.
    return template.render(policy=policy, style=Markup(style), script=Markup(script), **values)


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
    """Text without the control characters that HTML forbids and a file may hold."""
    return value if isinstance(value, Markup) else printable(str(value))
