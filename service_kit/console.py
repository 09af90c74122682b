"""Text encoding of commands and their children, for any terminal and locale.

Files are always written in UTF-8. On a terminal, characters outside its encoding are printed as escapes.
"""

import io
import os
import sys
from collections.abc import Mapping, Sequence

from service_kit.errors import SettingsError


def begin_command(arguments: Sequence[str]) -> None:
    """Prepare the process so that no character of an argument, path or model text raises an encoding error.

    In an ASCII locale (LC_ALL=C with PYTHONUTF8=0) Python cannot open files with other characters in their
    names. The command then executes itself again in Python's UTF-8 mode; its output keeps its encoding.
    Raises SettingsError if an argument is not valid UTF-8.
    """
    # `python -I` ignores PYTHONUTF8, so check the variable to avoid an endless loop.
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        encoding = sys.stdout.encoding if sys.stdout is not None else "ascii"
        os.environ.setdefault("PYTHONIOENCODING", encoding)
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a closed stream is None
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
    """Return environment variables with which a child prints UTF-8, whatever this terminal's encoding."""
    return {**environment, "PYTHONIOENCODING": "utf-8:backslashreplace"}
