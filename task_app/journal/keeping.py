"""--state-dir: what is written of sessions and answers while they live, so that they survive the process.

The folder holds these files of `task_app.journal.files`, one JSON object a line, beside `lock`:

`env_<id>.journal`, one for each environment session (task_app.journal.sessions):

    {"format": 1, "kind": "env", "id", "env": EnvSpec, "switches": {name: StepRewards}, "rl_run_id"}
    {"op": "state", "snapshot": base64}                       the whole session; or, without snapshots:
    {"op": "reset", "seed"}
    {"op": "step", "calls": [[tool, arguments as text]], "seen": digest of what the decision showed}
    {"op": "told", "claim": [key, digest]}                    that request has been answered

`policy_<id>.journal`, one for each policy session that can be restored:

    {"format": 1, "kind": "policy", "id"}
    {"op": "state", "snapshot": base64, "had_key"}            after each decision; the last one holds
    {"op": "told", "claim"}

A `claim` is an Idempotency-Key and the digest of its request. A record with `"claim"` comes from that
request, and is undone at the next start if the request was never answered and nothing else was done after
it: its retry does it. The first record may say `"open": [claim]`: what those requests did is a part of it, so
it stays; if one of them was never answered, its retry is told so (409 answer_lost) and does nothing.

`answers.journal` and `answers-before.journal`, which is older (task_app.journal.answer_book):

    {"format": 1, "kind": "answers"}
    {"key", "digest", "status", "headers": [[name, value]], "body": base64}

Order of writing: what a request did, its answer, `told`; then it is answered. `told` is there because old
answers are dropped: a claim without it and without an answer was never answered. `*.tmp` is a file on its
way; `*.refused`, answers that could not be read. task_app.journal.recovery reads all of it back.
"""

import fcntl
import os
from pathlib import Path
from typing import IO

from task_app.errors import SettingsError
from task_app.journal.files import SUFFIX, JournalFile
from task_app.journal.sessions import EnvironmentJournal, PolicyJournal
from task_app.plugins import PlugBoards
from task_app.protocols import RestorablePolicy
from task_app.sessions import EnvironmentSession, PolicySession
from task_app.settings import Settings


class StateDir:
    """The folder of one task app; no other process may use it meanwhile.

    Args:
        folder: made if it is not there.
        boards: what sessions were built from.
        snapshot_every: decisions between two snapshots of a session.
        max_snapshot_bytes: of one.

    Raises:
        SettingsError: the folder cannot be used, or another task app uses it.
    """

    def __init__(
        self, folder: Path, boards: PlugBoards, *, snapshot_every: int, max_snapshot_bytes: int
    ) -> None:
        self.folder = folder
        self.boards = boards
        self.snapshot_every = snapshot_every
        self.max_snapshot_bytes = max_snapshot_bytes
        self._lock = _locked(folder)

    def file(self, name: str) -> JournalFile:
        return JournalFile(self.folder / f"{name}{SUFFIX}")

    def opened_environment(self, session_id: str, session: EnvironmentSession) -> None:
        """Begin the file of a session; raises JournalFailed."""
        journal = EnvironmentJournal(self, session_id)
        journal.begin(session)
        session.journal = journal

    def opened_policy(self, session_id: str, session: PolicySession) -> None:
        """Begin the file of a session, if its policy can be brought back at all; raises JournalFailed."""
        if isinstance(session.policy, RestorablePolicy):
            journal = PolicyJournal(self, session_id)
            journal.begin(session)
            session.journal = journal

    def closed(self, session_id: str, session: EnvironmentSession | PolicySession) -> None:
        """The session was terminated, or has expired."""
        journal, session.journal = session.journal, None
        if journal is not None:
            journal.remove()

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.close()


class NotKept:
    """Without --state-dir: sessions end with the process."""

    def opened_environment(self, session_id: str, session: EnvironmentSession) -> None: ...

    def opened_policy(self, session_id: str, session: PolicySession) -> None: ...

    def closed(self, session_id: str, session: EnvironmentSession | PolicySession) -> None: ...


def state_dir(settings: Settings, boards: PlugBoards) -> StateDir | None:
    """The folder that the settings name, if they name one; raises SettingsError."""
    if settings.state_dir is None:
        return None
    return StateDir(
        settings.state_dir,
        boards,
        snapshot_every=settings.journal_snapshot_every,
        max_snapshot_bytes=settings.max_snapshot_bytes,
    )


def _locked(folder: Path) -> IO[bytes]:
    """Held as long as the process lives, however it ends."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open(folder / "lock", "wb", opener=lambda path, flags: os.open(path, flags, 0o600))  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise SettingsError(f"{folder} is in use by another task app", where="--state-dir") from exc
    except OSError as exc:
        raise SettingsError(f"{folder} cannot be used: {exc.strerror or exc}", where="--state-dir") from exc
    return lock
