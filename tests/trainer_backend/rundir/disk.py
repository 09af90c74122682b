"""A disk that is full: without filling one, or a real one that is small."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def full_disk(bytes_left: int = 0) -> Iterator[None]:
    """A write past `bytes_left` of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def mounted(folder: Path, *, kilobytes: int) -> Iterator[Path]:
    """A disk of that size, in memory; the test is skipped where it may not be mounted."""
    folder.mkdir(exist_ok=True)
    if not _mount("-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)):
        pytest.skip("mounting a disk needs root, and a container that is allowed to")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def grow(disk: Path, *, kilobytes: int) -> None:
    """Make room on a mounted disk."""
    assert _mount("-o", f"remount,size={kilobytes}k", str(disk))


def make_read_only(disk: Path) -> None:
    assert _mount("-o", "remount,ro", str(disk))


def _mount(*arguments: str) -> bool:
    try:
        return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
