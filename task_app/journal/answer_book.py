"""Under --state-dir: the answers that retries get, which so outlive the process (task_app.journal.keeping).

Two files, and neither is ever written anew: answers are appended to one; once that is old or large it takes
the place of the other, which is dropped.
"""

import base64
from typing import Any

import structlog

from task_app.errors import JournalDamaged
from task_app.guards.idempotency import Answer, Answers, Claim
from task_app.journal.files import FORMAT, JournalFile, read_records
from task_app.journal.sessions import FREE_SPACE, Home, failed

KIND = "answers"

log = structlog.get_logger("task_app")


class AnswerBook:
    """The two files.

    Args:
        home: the folder that they are in.
        answers: what is held in memory. Its bounds are those of a file: what is remembered there has not been
            dropped here.
    """

    def __init__(self, home: Home, answers: Answers) -> None:
        self._answers = answers
        self._file, self._before = home.file("answers"), home.file("answers-before")
        # None: there is no file to append to.
        self._begun_s: float | None = None

    def read(self) -> None:
        """Remember what the process before had answered, and go on with its file."""
        self._read(self._before)
        if self._read(self._file):
            self._file.size = self._file.path.stat().st_size
            self._begun_s = self._answers.clock()

    def write(self, claim: Claim) -> None:
        """Make an answer survive the process, and then say so where its request left a record.

        Raises:
            JournalFailed: the request was carried out, but nobody may be told yet.
        """
        try:
            for journal in claim.touched.values():
                journal.catch_up()
            if self._is_full():
                self.rotate()
            self._file.append([_record(claim)])
        except OSError as exc:
            hint = f"{FREE_SPACE}, then send it again with this Idempotency-Key: it is not carried out twice"
            raise failed("this request was carried out, but", exc, hint=hint) from exc
        claim.written = True
        for journal in claim.touched.values():
            journal.told(claim)
        claim.touched.clear()

    def rotate(self) -> None:
        """Begin another file; raises OSError."""
        self._begun_s = None
        if self._file.path.exists():
            self._file.path.replace(self._before.path)
        self._file.replace([{"format": FORMAT, "kind": KIND}])
        self._begun_s = self._answers.clock()

    def _is_full(self) -> bool:
        if self._begun_s is None or self._file.size > self._answers.most_bytes:
            return True
        return self._answers.clock() - self._begun_s > self._answers.most_s

    def _read(self, file: JournalFile) -> bool:
        """Whether there is such a file, whole."""
        if not file.path.exists():
            return False
        try:
            records = read_records(file.path, kind=KIND)
            next(records)
            for record in records:
                self._remember(record)
        except (JournalDamaged, OSError) as exc:
            reason = exc.detail if isinstance(exc, JournalDamaged) else str(exc)
            log.error("journal_refused", file=file.path.name, reason=reason)
            # The next one must not be written over it.
            file.path.rename(file.path.with_suffix(".refused"))
            return False
        return True

    def _remember(self, record: dict[str, Any]) -> None:
        headers = tuple((name.encode("latin-1"), text.encode("latin-1")) for name, text in record["headers"])
        answer = Answer(record["status"], headers, base64.b64decode(record["body"]))
        self._answers.restore(record["key"], record["digest"], answer).written = True


def _record(claim: Claim) -> dict[str, Any]:
    answer = claim.answer
    assert answer is not None, "only what is answered is written"
    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in answer.headers]
    return {
        "key": claim.key,
        "digest": claim.digest,
        "status": answer.status,
        "headers": headers,
        "body": base64.b64encode(answer.body).decode(),
    }
