from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.trainer_backend.store.postgres import Postgres
from trainer_backend.operator_plugins import _BY_FILE, _load_packages_once
from trainer_backend.plugins import OPEN_BOARDS


@pytest.fixture
def own_boards() -> Iterator[None]:
    """No other test meets the plug-ins that a test adds."""
    with ExitStack() as stack:
        for board in (*OPEN_BOARDS.values(), _BY_FILE):
            stack.enter_context(patch.dict(board))
        yield
    _load_packages_once.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], Path]:
    """Installs a package of one module; returns its folder of metadata."""

    def install_package(name: str, code: str, entry_points: str) -> Path:
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(entry_points)
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        _load_packages_once.cache_clear()
        return metadata

    return install_package


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One server for all tests of a process, which may kill it and start it again."""
    server = Postgres()
    yield server
    server.close()
