"""The error for wrong input, with the value, the expectation and the fix; printable text."""

from unicodedata import category


class InputError(ValueError):
    """A value from the user cannot be used: an argument, a file, a folder, a setting.

    The message is one or two sentences that name the value, what was expected and the fix; the
    command line prints it without a traceback.
    """


class RepeatedInputError(InputError):
    """An error that the first of several processes reports too; this process prints nothing."""


def printable(text: str) -> str:
    """Return a text with control characters made visible.

    Control characters could move a terminal's cursor and are forbidden in XML; lone surrogates
    cannot be written.

    >>> printable("a" + chr(27) + "[2J")
    'a�[2J'
    """
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if category(character)[0] == "C" and character != "\n"
        else character
        for character in text
    )
