"""The index of the models in transformers, kept from one process to the next, and the folder for such things.

`import transformers` reads the text of its 1,800 model files, twice, to learn which class lies in which. That
takes a fifth of the CPU time in which a process with a model starts. The index depends on those files alone.
Where it cannot be kept, or transformers builds it otherwise than today, transformers reads the files as ever.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_MODULE, _FUNCTION = "transformers.utils.import_utils", "define_import_structure"
# What transformers makes of its files: for each set of libraries that are needed, names by module.
Index = dict[frozenset[str], dict[str, set[str]]]


class IndexFinder:
    """Finds the one module of transformers that makes the index."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if callable(made := getattr(module, _FUNCTION, None)):
            models = Path(self.path).parents[1] / "models"
            setattr(module, _FUNCTION, partial(_index_of, made, models, cache_folder()))


def cache_folder() -> Path:
    """The user's folder for what can be made again."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "turnwise"


def _index_of(
    make: Callable[..., Index], models: Path, cache: Path, place: str | Path, prefix: str | None = None
) -> Index:
    """As `make(place, prefix)`, by the kept index if that is the place of all models."""
    if Path(place) not in (models, models / "__init__.py"):
        return make(place, prefix)
    file = cache / f"transformers_{_state(models)}.json"
    index = _read(file)
    if index is None:
        index = make(models)
        _write(file, index)
    ahead = "" if prefix is None else f"{prefix}."
    return {
        needs: {ahead + name: set(of) for name, of in modules.items()} for needs, modules in index.items()
    }


def _state(models: Path) -> str:
    """A word for the files as they are: each change of one that pip or an editor makes changes its folder."""
    from hashlib import sha256

    with os.scandir(models) as entries:
        folders = sorted((one.name, one.stat().st_mtime_ns) for one in entries)
    return sha256(repr((str(models), folders)).encode()).hexdigest()[:24]


def _read(file: Path) -> Index | None:
    import json

    with suppress(OSError, ValueError, TypeError, AttributeError):
        if file.stat().st_uid == os.getuid():
            stored = json.loads(file.read_text(encoding="utf-8"))
            return {
                frozenset(needs): {name: set(of) for name, of in modules.items()} for needs, modules in stored
            }
    return None


def _write(file: Path, index: Index) -> None:
    import json

    stored: Any = [
        [sorted(needs), {name: sorted(of) for name, of in modules.items()}]
        for needs, modules in index.items()
    ]
    with suppress(OSError, TypeError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = file.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(stored), encoding="utf-8")
        own.replace(file)


def keep_index() -> None:
    """Have transformers, which must not be imported yet, use the kept index."""
    if _MODULE not in sys.modules and IndexFinder not in sys.meta_path:
        sys.meta_path.insert(0, IndexFinder)
