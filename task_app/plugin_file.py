"""The operator's Python file as a module, for the service and for the process of a reward function.

It imports nothing of the task app but its errors, so that such a process starts in half a second.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from service_kit.errors import SettingsError
from task_app.errors import CriticalError, boundary


def module_of(file: Path) -> ModuleType:
    """Import the file, which may import its neighbours."""
    if not file.is_file():
        raise SettingsError(f"--plugins {file}: no such file")
    # At the end of the path, so that no neighbour replaces an installed module.
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
