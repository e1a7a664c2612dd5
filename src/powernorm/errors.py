"""The error that says what a user gave, what was expected and how to mend it."""


class InputError(ValueError):
    """Something that the user gave cannot be used: an argument, a file, a folder, a setting.

    The message is one sentence or two that name the value, what was expected and the mend; the
    command line prints it as it stands, without a traceback.
    """
