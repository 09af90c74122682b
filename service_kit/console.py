"""The text that a command is given and prints, whatever the terminal and its locale hold.

Files that we write are UTF-8 everywhere; a terminal shows what it can, and escapes in place of the rest.
"""

import io
import os
import sys
from collections.abc import Mapping, Sequence

from service_kit.errors import SettingsError

# Of children, whose output goes to a log of ours or to a pipe that we read.
_UTF8 = {"PYTHONIOENCODING": "utf-8:backslashreplace"}


def begin_command(arguments: Sequence[str]) -> None:
    """Let no character of an argument, a path or a model end the command.

    In a locale of ASCII alone, such as LC_ALL=C with PYTHONUTF8=0, Python could not even name a file with
    other characters, so the command starts again in Python's UTF-8 mode, and prints as before. Raises
    SettingsError where an argument holds bytes that are no UTF-8, with which nothing can be written down.
    """
    # `python -I` ignores the variable; starting again and again would not help it.
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        encoding = sys.stdout.encoding if sys.stdout is not None else "ascii"
        os.environ.setdefault("PYTHONIOENCODING", encoding)
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it is closed
            stream.reconfigure(errors="backslashreplace")
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise SettingsError(
                f"the argument {os.fsencode(argument)!r} is no UTF-8 text, and a run cannot write it down",
                hint="Rename the file.",
            ) from error


def utf8_output(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child whose output is read as UTF-8, whatever this terminal's encoding."""
    return {**environment, **_UTF8}
