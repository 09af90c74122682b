"""Log files as they are handed out: a megabyte at a time at most, and of each line where it ends."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from trainer_backend.rundir.json_lines import object_of
from trainer_backend.rundir.run_log import LogLine, line_of

MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole lines of a file, oldest first.

    Attributes:
        lines: without their line ends.
        ends: of each line the byte after it: from there on is all that came later.
        end: where the next piece begins.
        more: whether there is a next one already.
    """

    lines: tuple[bytes, ...] = ()
    ends: tuple[int, ...] = ()
    end: int = 0
    more: bool = False

    def texts(self) -> list[str]:
        """Of a file that anything may have been printed to."""
        return [part for line in self.lines for part in line.decode("utf-8", "replace").splitlines() or [""]]

    def told(self) -> Iterator[tuple[LogLine, int]]:
        """Of run.log: what each line says, and where it ends; what is no line of ours is left out."""
        for line, end in zip(self.lines, self.ends, strict=True):
            if (row := object_of(line)) is not None:
                yield line_of(row), end


def next_piece(path: Path, offset: int) -> Piece:
    """The first lines from a byte on; a file that is shorter was written anew, and begins anew."""
    return _piece(path, offset, last=False)


def last_piece(path: Path, offset: int) -> Piece:
    """The last lines of those from a byte on."""
    return _piece(path, offset, last=True)


def _piece(path: Path, offset: int, *, last: bool) -> Piece:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            begin = offset if offset <= size else 0
            skips = last and size - begin > MOST_BYTES
            file.seek(size - MOST_BYTES - 1 if skips else begin)
            if skips:
                file.readline()  # the end of a line that began before
            begin = file.tell()
            data = file.read(MOST_BYTES)
            if b"\n" not in data:
                data += file.readline()
    except FileNotFoundError:
        return Piece()
    lines = data.split(b"\n")[:-1]
    ends = tuple(accumulate((len(line) + 1 for line in lines), initial=begin))
    return Piece(tuple(lines), ends[1:], ends[-1], begin + len(data) < size)
