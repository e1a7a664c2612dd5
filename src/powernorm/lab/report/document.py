"""The shell of a page: one HTML file that loads nothing, and how it gets to the disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from powernorm.errors import InputError
from powernorm.lab.report.figures import DrawnFigure
from powernorm.lab.report.markup import Markup, element
from powernorm.lab.report.style import STYLE

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

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


def document(title: str, articles: Sequence[Article]) -> str:
    """The whole page.

    Args:
        title: of the browser's tab.
        articles: one, or several below each other with a list of them on top.
    """
    head = element(
        "head",
        element("meta", attributes={"charset": "utf-8"}),
        element("meta", attributes={"http-equiv": "Content-Security-Policy", "content": _POLICY}),
        element(
            "meta",
            attributes={"name": "viewport", "content": "width=device-width, initial-scale=1"},
        ),
        element("title", f"powernorm: {title}"),
        element("style", Markup(STYLE)),
    )
    if len(articles) == 1:
        body = element("body", *_article(articles[0]))
    else:
        links = [(article.anchor.rstrip("-"), article.heading) for article in articles]
        body = element(
            "body",
            _links(links, "Parts"),
            element(
                "main",
                *(
                    element(
                        "article", *_article(article), attributes={"id": article.anchor.rstrip("-")}
                    )
                    for article in articles
                ),
            ),
        )
    return "<!doctype html>\n" + element("html", head, body, attributes={"lang": "en"}) + "\n"


def _article(article: Article) -> list[Markup]:
    sections = [
        (article.anchor + name, heading, contents) for name, heading, contents in article.sections
    ]
    return [
        element(
            "header",
            element("h1", article.heading),
            element("p", article.lead, attributes={"class": "lead"}),
            *_conclusion(article.conclusion),
        ),
        _links([(name, heading) for name, heading, _ in sections], "Contents"),
        element(
            "main" if not article.anchor else "div",
            *(
                element("section", element("h2", heading), *contents, attributes={"id": name})
                for name, heading, contents in sections
            ),
        ),
    ]


def _conclusion(sentences: Sequence[str]) -> list[Markup]:
    if not sentences:
        return []
    items = (element("li", sentence) for sentence in sentences)
    return [element("ul", *items, attributes={"class": "conclusion"})]


def _links(targets: Sequence[tuple[str, str]], label: str) -> Markup:
    links = [
        element("li", element("a", heading, attributes={"href": f"#{name}"}))
        for name, heading in targets
    ]
    return element("nav", element("ul", *links), attributes={"aria-label": label})


def gallery(drawn: Sequence[DrawnFigure]) -> Markup:
    """Figures with their captions, as many in a row as have room."""
    figures = (element("figure", one.svg, element("figcaption", one.caption)) for one in drawn)
    return element("div", *figures, attributes={"class": "figures"})


def folded(summary: str, *contents: Markup, is_open: bool = False) -> Markup:
    """Contents below a line that opens them."""
    attributes = {"open": ""} if is_open else {}
    return element("details", element("summary", summary), *contents, attributes=attributes)


def write_page(page: str, target: Path) -> Path:
    """Puts a page into its place at once; returns the place.

    Raises:
        InputError: it cannot be written there.
    """
    # A reader never sees half a page, also when the writer is killed.
    draft = target.with_suffix(".html.partial")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        raise InputError(
            f"{target} cannot be written ({error.strerror}): give the name of a file in a folder "
            "that can be"
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    return target
