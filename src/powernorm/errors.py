"""The error that says what a user gave, what was expected and how to mend it; printable text."""

from unicodedata import category


class InputError(ValueError):
    """Something that the user gave cannot be used: an argument, a file, a folder, a setting.

    The message is one sentence or two that name the value, what was expected and the mend; the
    command line prints it without a traceback.
    """


class RepeatedInputError(InputError):
    """The same as the first of several processes says; this one ends without a word."""


def printable(text: str) -> str:
    """Return a text with control characters made visible.

    They could move a terminal's cursor, XML forbids them, and a lone surrogate cannot be written.

    >>> printable("a" + chr(27) + "[2J")
    'a�[2J'
    """
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if category(character)[0] == "C" and character != "\n"
        else character
        for character in text
    )
