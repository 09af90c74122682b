"""The guard of a command: three processes that end all that it starts, however it, they or the service end.

    python -I -S guard.py REPORT COMMAND...

The first guard is the service's child, each further one the child of the one before, and the command is the
child of the last. All are subreapers: whatever the command starts, in another session too, becomes a child of
theirs when its own parent ends, and they kill it. Each notices the end of its parent by the kernel. So the
death of any two of them, or of one and its neighbour, leaves nothing behind. Each has a process group of its
own, so a signal to a group kills one of them.

SIGQUIT kills the command and all that it has started at once. Other signals are passed on to the command. The
guard ends as the command does, with its exit code or by its signal. The descriptor REPORT receives the
command's process id, and the errno where it cannot be run. Linux alone has what this needs. Only the standard
library, and no package of ours: it must start quickly.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False  # the import would double the time of a start
if TYPE_CHECKING:
    from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
_KILL = signal.SIGQUIT
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_GUARDS = 3
# A process of another user, or one that waits for a disk, cannot be killed.
_END_S, _LOOK_S = 2.5, 0.005


def main() -> None:
    report, command = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(report, False)
    # By a pidfd, since PR_SET_PDEATHSIG tells the end of the thread that started this process.
    parent = os.getppid()
    ended: int | None = _open_pidfd(parent)
    for further in reversed(range(_GUARDS)):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        signals, own = _watch_signals(), os.getpid()
        if ended is None:
            os.setpgid(0, 0)
        if os.getppid() != parent:
            os._exit(1)
        child = os.fork()
        if child:
            _let_go(signals, ended)
            _keep(child, signals, ended, further > 0)
        parent, ended = own, None
        _prctl(_PR_SET_PDEATHSIG, _KILL)
    _run(command, report, parent)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _watch_signals() -> int:
    """Have each signal written to a pipe; return the end to read."""
    reads, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, _KILL, *_PASSED_ON):
        signal.signal(number, lambda *_: None)
    return reads


def _open_pidfd(process: int) -> int:
    """Open a descriptor that becomes readable when the process ends."""
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        os._exit(1)


def _run(command: list[str], report: int, guard: int) -> "NoReturn":
    """Become the command, in a session of its own."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, _KILL, *_PASSED_ON, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == guard:
        os.write(report, b"%d\n" % os.getpid())
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(report, str(error.errno).encode())
    os._exit(127)


def _let_go(signals: int, ended: int | None) -> None:
    """Close the descriptors that only the command should hold, so that its pipes end when it closes them."""
    writes = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    kept = sorted({2, signals, writes, *([] if ended is None else [ended])})
    for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)


def _keep(child: int, signals: int, ended: int | None, is_guard: bool) -> "NoReturn":
    """Wait for the end of the child or its parent; kill the rest, and exit as the child did."""
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    if ended is not None:
        poll.register(ended, select.POLLIN)
    status: int | None = None
    while status is None:
        for descriptor, _ in poll.poll():
            if descriptor == ended:
                status = signal.SIGKILL
                continue
            for number in os.read(signals, 256):
                if number == _KILL:
                    status = signal.SIGKILL
                elif number == signal.SIGCHLD:
                    status = _reap(child) if status is None else status
                else:
                    _send(child, number)
    _kill_children(child if is_guard else None)
    _end_with(status)


def _reap(child: int) -> int | None:
    """Reap ended processes; return the child's status if it is among them."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found = ended[1] if ended[0] == child else found
    return found


def _kill_children(guard: int | None) -> None:
    """Kill all children until there are none; the children of each become this process's.

    The next guard is asked for it, because this one may be killed now.
    """
    until_s = time.monotonic() + _END_S
    while True:
        for process in _children():
            _send(process, _KILL if process == guard and time.monotonic() < until_s else signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() > until_s + _END_S:
            return
        time.sleep(_LOOK_S)


def _children() -> list[int]:
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children", encoding="ascii") as file:
            return [int(process) for process in file.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [int(name) for name in os.listdir("/proc") if name.isdecimal() and _parent(name) == own]


def _parent(process: str) -> int | None:
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _end_with(status: int) -> "NoReturn":
    if not os.WIFSIGNALED(status):
        os._exit(os.waitstatus_to_exitcode(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


if __name__ == "__main__":
    main()
