"""The shell of a page: one HTML file that loads nothing, and how it gets to the disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from powernorm.errors import InputError
from powernorm.files import write
from powernorm.lab.report import templates

SectionParts = tuple[str, str, Sequence[Markup]]
"""Id, heading and contents."""


@dataclass(frozen=True)
class Article:
    """A page, or one of several on a page.

    Attributes:
        heading: of the whole.
        lead: a line or two below it.
        sections: with their ids.
        anchor: in front of the ids, where a page has several articles.
        conclusion: what it shows, in sentences.
    """

    heading: str
    lead: str
    sections: Sequence[SectionParts]
    anchor: str = ""
    conclusion: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Id of the whole, where a page has several."""
        return self.anchor.rstrip("-")


def document(title: str, articles: Sequence[Article]) -> str:
    """The whole page.

    Args:
        title: of the browser's tab.
        articles: one, or several below each other with a list of them on top.
    """
    return templates.page(title=title, articles=articles)


def write_page(page: str, target: Path) -> Path:
    """Puts a page into its place at once; returns the place.

    Raises:
        InputError: it cannot be written there.
    """
    try:
        write(target, page)
    except OSError as error:
        raise InputError(
            f"{target} cannot be written ({error.strerror}): give the name of a file in a folder "
            "that can be"
        ) from error
    return target
