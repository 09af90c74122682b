"""The files of answers: appended to, rotated by age and size, never written anew."""

import shutil

import pytest

from task_app.guards.idempotency import Answer, Answers
from task_app.journal.answer_book import AnswerBook
from task_app.journal.files import JournalFile
from task_app.journal.keeping import StateDir
from tests.task_app.counting import boards
from tests.task_app.guards.test_idempotency import Clock


@pytest.fixture
def state(tmp_path):
    folder = StateDir(tmp_path, boards(), snapshot_every=1, max_snapshot_bytes=1)
    yield folder
    folder.close()


def opened(state, clock, **bounds):
    answers = Answers(**{"most": 1_000, "most_bytes": 1 << 20, "most_s": 60.0} | bounds, clock=clock)
    book = AnswerBook(state, answers)
    book.read()
    return answers, book


def answer(answers, book, *keys, body=b"x", digest="d"):
    for key in keys:
        claim = answers.take(key, digest)
        answers.settle(claim, Answer(200, ((b"a", b"\xff"),), body))
        book.write(claim)


def read_again(state, *keys, **bounds):
    answers, _ = opened(state, Clock(), **bounds)
    return [key for key in keys if answers.get(key) is not None]


def test_what_is_written_is_read_back_as_it_was(state):
    answers, book = opened(state, Clock())
    answer(answers, book, "a", body=b"\x00\xff")
    again, _ = opened(state, Clock())
    claim = again.find("a", "d")
    assert (claim.answer, claim.written) == (Answer(200, ((b"a", b"\xff"),), b"\x00\xff"), True)


def test_a_key_that_came_again_has_its_last_answer(state):
    answers, book = opened(state, Clock(), most=1)
    for key, digest in (("a", "first"), ("b", "d"), ("a", "last")):
        answer(answers, book, key, digest=digest)
    again, _ = opened(state, Clock())
    assert again.get("a").digest == "last"
    assert (len(again), again.held_bytes) == (2, 2 * (1 + 2))


def test_files_rotate_by_age_and_the_older_one_is_dropped(state):
    """An answer is there for as long as it is remembered, and at most twice as long."""
    clock = Clock()
    answers, book = opened(state, clock)
    answer(answers, book, "a")
    clock.now_s = 60.0
    answer(answers, book, "b")
    clock.now_s = 61.0
    answer(answers, book, "c")
    assert read_again(state, *"abc") == ["a", "b", "c"]
    clock.now_s = 122.0
    answer(answers, book, "d")
    assert read_again(state, *"abcd") == ["c", "d"]


def test_files_are_bounded_by_the_bytes_that_are_remembered(state):
    answers, book = opened(state, Clock(), most_bytes=10_000)
    for number in range(200):
        answer(answers, book, str(number), body=b"x" * 1_000)
        sizes = [path.stat().st_size for path in state.folder.glob("answers*")]
        assert sum(sizes) < 2 * (10_000 + 2_000)
    kept = read_again(state, *map(str, range(200)), most_bytes=10_000)
    assert kept == [str(number) for number in range(200 - len(kept), 200)], "the last ones"
    assert len(kept) >= 6, "10,000 bytes of lines of about 1,430"


def test_an_answer_costs_its_own_line_however_many_there_are(state):
    answers, book = opened(state, Clock())
    answer(answers, book, *map(str, range(100)))
    file = state.folder / "answers.journal"
    inode, size = file.stat().st_ino, file.stat().st_size
    answer(answers, book, "more")
    assert file.stat().st_ino == inode
    assert 0 < file.stat().st_size - size < 300


def test_the_next_process_goes_on_with_the_file(state):
    answers, book = opened(state, Clock())
    answer(answers, book, "a")
    answers, book = opened(state, Clock())
    answer(answers, book, "b")
    assert not (state.folder / "answers-before.journal").exists()
    assert read_again(state, "a", "b") == ["a", "b"]


def test_a_kill_between_two_files_loses_nothing(state):
    answers, book = opened(state, Clock())
    answer(answers, book, "a")
    (state.folder / "answers.journal").rename(state.folder / "answers-before.journal")
    answers, book = opened(state, Clock())
    answer(answers, book, "b")
    assert read_again(state, "a", "b") == ["a", "b"]


def test_a_damaged_file_is_put_aside_and_gives_what_came_before_the_damage(state):
    answers, book = opened(state, Clock())
    answer(answers, book, "a", "b", "c")
    file = state.folder / "answers.journal"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], lines[2].replace(b'"b"', b'"B"'), lines[3]]))
    answers, book = opened(state, Clock())
    assert [key for key in "abc" if answers.get(key)] == ["a"]
    assert (state.folder / "answers.refused").exists()
    answer(answers, book, "d")
    assert read_again(state, "d") == ["d"]


def test_a_file_of_another_kind_is_put_aside(state):
    JournalFile(state.folder / "answers.journal").replace([{"format": 2, "kind": "env"}])
    opened(state, Clock())
    assert not (state.folder / "answers.journal").exists()


def test_a_rotation_that_fails_half_way_is_ended_by_the_next_answer(state, tmp_path):
    answers, book = opened(state, Clock())
    answer(answers, book, "a")
    aside = tmp_path.with_name("aside")
    tmp_path.rename(aside)
    with pytest.raises(OSError):
        book.rotate()
    shutil.move(aside, tmp_path)
    answer(answers, book, "b")
    assert read_again(state, "a", "b") == ["a", "b"]
