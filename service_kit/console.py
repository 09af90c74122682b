"""Makes the text output of commands and of their child processes work with any terminal and locale.

Turnwise always writes files in UTF-8. Characters that a terminal's encoding lacks are printed as escapes.
"""

import io
import os
import sys
from collections.abc import Mapping, Sequence

from service_kit.errors import SettingsError


def begin_command(arguments: Sequence[str]) -> None:
    """Prepare the process so that no character in an argument, a path or a model's text raises an error.

    In an ASCII locale (LC_ALL=C with PYTHONUTF8=0), Python cannot open a file whose name contains other
    characters. In such a locale, the process restarts itself in Python's UTF-8 mode, but keeps the encoding
    of its output.

    Raises:
        SettingsError: an argument is not valid UTF-8.
    """
    # `python -I` ignores PYTHONUTF8. The second condition prevents endless restarts in this case.
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
    """Return the environment, extended so that a Python child prints UTF-8 regardless of the terminal."""
    return {**environment, "PYTHONIOENCODING": "utf-8:backslashreplace"}
