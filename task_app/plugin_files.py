"""A Python file that the operator named, as a module: run once, under a name of its own."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from service_kit.errors import SettingsError
from task_app.errors import CriticalError, boundary


def module_of(file: Path) -> ModuleType:
    """Import the file. Its neighbours can be imported by it.

    Raises:
        SettingsError: it is not there, is no Python, or raises.
    """
    if not file.is_file():
        raise SettingsError(f"--plugins {file}: no such file")
    # What is installed comes first, so that no neighbour replaces it.
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"turnwise_plugins_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SettingsError(f"--plugins {file} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks up annotations of its classes there
    try:
        with boundary(f"--plugins {file}"):
            spec.loader.exec_module(module)
    except CriticalError as exc:
        raise SettingsError(exc.detail) from exc
    return module
