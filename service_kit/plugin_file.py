"""The operator's Python file as a module: of a task app, of a reward function's process, of a trainer.

It imports little, so that the process of a reward function starts in half a second.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import structlog

from service_kit.errors import ServiceError, SettingsError
from shared_schemas.json_text import encodable

log = structlog.get_logger("service_kit")


def module_of(file: Path, *, option: str) -> ModuleType:
    """Import the file, which may import its neighbours.

    Args:
        option: names the file in errors: `--plugins`, or a key of a job.

    Raises:
        SettingsError: it is no Python file, or raises when it is imported; the log gets the traceback.
    """
    place = f"{option} {file}"
    if not file.is_file():
        raise SettingsError(f"{place}: no such file")
    # At the end of the path, so that no neighbour replaces an installed module.
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"turnwise_plugins_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{place} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks up annotations of its classes there
    try:
        spec.loader.exec_module(module)
    except ServiceError as error:
        raise SettingsError(f"{place}: {error}") from error
    except Exception as error:
        log.exception("plugin_file", file=str(file))
        first_line = (str(error).splitlines() or [""])[0][:200]
        raise SettingsError(encodable(f"{place} raised {type(error).__name__}: {first_line}")) from error
    return module
