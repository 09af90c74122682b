"""The dashboard of a run that `turnwise train` makes: a child process that shows it, and runs nothing.

It lives as long as this process at most: its standard input is our pipe. Nothing of the run waits for it, and
whatever becomes of it, the run goes on.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from service_kit.children import READY

_STOP_S = 10.0


@contextmanager
def dashboard_beside(
    data_dir: Path,
    say: Callable[[str], None],
    *,
    command: Sequence[str] = (sys.executable, "-m", "trainer_backend"),
) -> Iterator[None]:
    """Show the runs of a folder on a free port of this machine, while what is inside goes on.

    Args:
        data_dir: the folder that run directories are in; its index is kept there too.
        say: is given the address once it can be asked, or why there is none; from a thread.
    """
    with subprocess.Popen(
        [*command, "trainer", "--no-jobs", "--port", "0", "--data-dir", str(data_dir), "--exit-with-parent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Its own session: Ctrl-C is for the run, which ends first.
        start_new_session=True,
    ) as child:
        listener = Thread(target=_listen, args=(child, say), daemon=True)
        listener.start()
        try:
            yield
        finally:
            if child.poll() is None:
                say(f"the dashboard ends with the run; again: turnwise trainer --data-dir {data_dir}")
            child.terminate()
            try:
                child.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
            listener.join(_STOP_S)


def _listen(child: "subprocess.Popen[bytes]", say: Callable[[str], None]) -> None:
    """Tell where it is; then go on reading, for a pipe that nobody empties would stop it."""
    assert child.stdout is not None
    last, told = "", False
    for raw in child.stdout:
        last = raw.decode(errors="replace").strip() or last
        if last.startswith(READY) and not told:
            told = True
            say(f"dashboard: {last.removeprefix(READY)}")
    if not told and child.wait() > 0:
        say(f"the dashboard did not start: {last.removeprefix('error: ')}")
