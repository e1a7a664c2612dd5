"""The figures of a page in files of their own, for papers and slides."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from powernorm.errors import InputError
from powernorm.files import check_regular, write
from powernorm.runs import REPORT_FILE

_SVG: Final = "http://www.w3.org/2000/svg"
_XLINK: Final = "http://www.w3.org/1999/xlink"
_FIGURE: Final = re.compile(r'<svg [^>]*viewBox=[^>]*role="img".*?</svg>', re.DOTALL)
_NAME: Final = re.compile(r'id="([\w-]+)-figure_1"')
_COLORS: Final = re.compile(r":root \{(.*?)\}", re.DOTALL)
_COLOR: Final = re.compile(r"(--[\w-]+): (#\w+)")
_VARIABLE: Final = re.compile(r"var\((--[\w-]+)\)")


def save_figures(page: Path, folder: Path) -> Mapping[Path, str]:
    """Write the figures of a page as SVG files that stand alone, in the page's light colors.

    Args:
        page: of `powernorm compare`, `report`, `diagnose` or `remove`, or a folder with a
            report.html.
        folder: where to; files of the same names are replaced.

    Returns:
        What each file shows, in the order of the page.

    Raises:
        InputError: the page cannot be read or holds no figure, or a file cannot be written.
    """
    source = page / REPORT_FILE if page.is_dir() else page
    try:
        check_regular(source)
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{source} cannot be read ({getattr(error, 'strerror', 'not UTF-8')}): give a page "
            "that powernorm wrote, such as report.html, or the folder that holds it"
        ) from error
    written = {}
    try:
        for name, picture in _figures(text):
            folder.mkdir(parents=True, exist_ok=True)
            target = folder / f"{name}.svg"
            write(target, ElementTree.tostring(picture, "utf-8", xml_declaration=True))
            written[target] = picture.get("aria-label", "")
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror}): give a folder of your own"
        ) from error
    except ElementTree.ParseError as error:
        raise InputError(
            f"{source} has a damaged figure ({error}): build the page again"
        ) from error
    if not written:
        raise InputError(f"{source} holds no figure of powernorm: give a page that it wrote")
    return written


def _figures(text: str) -> Iterator[tuple[str, ElementTree.Element]]:
    # The page's first block of colors is the light one.
    block = _COLORS.search(text)
    colors = dict(_COLOR.findall(block[1])) if block else {}
    for number, match in enumerate(_FIGURE.finditer(text), start=1):
        name = _NAME.search(match[0])
        colored = _VARIABLE.sub(lambda found: colors.get(found[1], "gray"), match[0])
        root = ElementTree.fromstring(colored.replace("currentColor", colors.get("--ink", "black")))
        yield name[1] if name else f"figure-{number}", _alone(root, colors.get("--paper", "white"))


def _alone(root: ElementTree.Element, paper: str) -> ElementTree.Element:
    """Return the element as the root of a file: with its size, its background and namespaces."""
    left, top, width, height = root.attrib["viewBox"].split()
    for node in root.iter():
        for key in [key for key in node.attrib if key.startswith("data-")]:
            del node.attrib[key]  # For the page's script.
        if "href" in node.attrib:
            # Older readers of SVG know no other form.
            node.attrib["xlink:href"] = node.attrib.pop("href")
    root.attrib |= {"xmlns": _SVG, "xmlns:xlink": _XLINK}
    root.attrib |= {"width": f"{width}pt", "height": f"{height}pt"}
    place = {"x": left, "y": top, "width": width, "height": height}
    root.insert(0, ElementTree.Element("rect", {**place, "fill": paper}))
    return root
