"""Which sequences share a row."""

from bisect import bisect_left, insort
from collections.abc import Sequence

from trainer_backend.errors import BatchError


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Pack into rows of at most `row_tokens` tokens: best-fit decreasing.

    Each sequence, longest first, goes to the fullest row that still has room for it. The bound is that of
    first fit (11/9 of the fewest rows possible, and a constant); the row is found by bisection.

    Args:
        lengths: tokens of each sequence; equal lengths keep their order, so the result is deterministic.
        row_tokens: most tokens in a row.

    Returns:
        For each row, the indices of its sequences in order of placement.

    Raises:
        BatchError: a sequence is empty or longer than a row.

    Source: Johnson et al., Worst-case performance bounds for simple one-dimensional packing algorithms, 1974.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens free, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if not 1 <= length <= row_tokens:
            raise BatchError(f"sequence {index} has {length} tokens; a row takes 1 to {row_tokens}")
        fullest = bisect_left(room, (length, 0))
        if fullest < len(room):
            free, row = room.pop(fullest)
        else:
            free, row = row_tokens, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(room, (free - length, row))
    return rows
