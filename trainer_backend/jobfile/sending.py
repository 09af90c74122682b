"""A job as it is sent to a trainer service: its text as it stands, or several files and --set joined.

Unlike in layers.read_layers, paths stay as they are written: they are those of the service's machine.
"""

from collections.abc import Sequence
from pathlib import Path

import tomli_w

from trainer_backend.errors import JobError
from trainer_backend.jobfile.layers import merge, read_layers


def text_to_send(paths: Sequence[Path], overrides: Sequence[str]) -> str:
    """The TOML to send. What it means is for the service to say, which knows its own version.

    Raises:
        JobError: a file cannot be read, is no TOML where it has to be merge, or --set names no key.
    """
    if len(paths) == 1 and not overrides:
        try:
            return paths[0].read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise JobError(f"{paths[0]}: no such file") from error
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"{paths[0]}: cannot be read: {error}") from error
    document, _ = merge(read_layers(paths, anchored=False), overrides)
    return tomli_w.dumps(document)
