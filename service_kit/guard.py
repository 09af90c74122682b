"""Runs a command under guard processes that kill all of its descendants when the command or the service ends.

    python -I -S guard.py REPORT COMMAND...

Three guards form a chain: the service starts the first guard, each guard starts the next one, and the last
guard starts the command. Each guard is a subreaper: if a descendant of the command loses its parent, even in
another session, a guard becomes its parent and can kill it at the end. The kernel notifies each guard when
the guard's parent ends. If any two of the three guards are killed, the third still kills all descendants.
Each guard has its own process group, so a signal to a process group kills at most one guard.

A guard that receives SIGQUIT kills the command and all of its descendants. The guards forward other signals
to the command. A guard ends like the command: with the same exit code, or by the same signal.

REPORT is the number of an open file descriptor. The command's process id is written to it and, if the command
cannot be run, then also the errno. Guards need Linux. This file imports only the standard library, so that a
guard starts quickly.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False  # importing it from `typing` would double the time until a guard has started
if TYPE_CHECKING:
    from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h
_KILL = signal.SIGQUIT
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_GUARDS = 3
# Limits the time for killing: a process of another user, or one that waits for a disk, cannot be killed.
_END_S, _LOOK_S = 2.5, 0.005


def main() -> None:
    report, command = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(report, False)
    parent = os.getppid()
    try:
        # PR_SET_PDEATHSIG would report the end of the thread that started us, not of the parent process.
        parent_end: int | None = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    for guards_left in reversed(range(_GUARDS)):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        signals, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # Python writes each signal's number to it
        signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, _KILL, *_PASSED_ON):
            signal.signal(number, lambda *_: None)
        own = os.getpid()
        if parent_end is None:
            os.setpgid(0, 0)
        if os.getppid() != parent:
            os._exit(1)
        child = os.fork()
        if child:
            _close_descriptors(signals, parent_end)
            _guard(child, signals, parent_end, guards_left > 0)
        parent, parent_end = own, None
        _prctl(_PR_SET_PDEATHSIG, _KILL)
    _run(command, report, parent)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _run(command: list[str], report: int, guard: int) -> "NoReturn":
    """Replace this process by the command, in a new session; `guard` is the process id of its guard."""
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


def _close_descriptors(signals: int, parent_end: int | None) -> None:
    """Close every inherited descriptor that the guard does not use itself.

    Otherwise the guard would keep the command's pipes open after the command has closed them.
    """
    writes = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    kept = sorted({2, signals, writes, *([] if parent_end is None else [parent_end])})
    for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)


def _guard(child: int, signals: int, parent_end: int | None, is_guard: bool) -> "NoReturn":
    """Wait until `child` or this guard's parent ends, kill all remaining children, and exit as `child` did.

    If the parent ended or this guard got SIGQUIT, the guard ends itself by SIGKILL.

    Args:
        child: process id of the next guard or of the command.
        signals: descriptor from which the numbers of received signals are read.
        parent_end: descriptor that becomes readable when the parent ends. It is None if the parent is another
            guard; the kernel then sends SIGQUIT when the parent ends.
        is_guard: whether `child` is a guard.
    """
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    if parent_end is not None:
        poll.register(parent_end, select.POLLIN)
    status: int | None = None
    while status is None:
        for descriptor, _ in poll.poll():
            if descriptor == parent_end:
                status = signal.SIGKILL
                continue
            for number in os.read(signals, 256):
                if number == _KILL:
                    status = signal.SIGKILL
                elif number == signal.SIGCHLD:
                    with suppress(ChildProcessError):
                        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                            status = ended[1] if ended[0] == child and status is None else status
                else:
                    _send(child, number)
    _kill_children(child if is_guard else None)
    _end_with(status)


def _kill_children(guard: int | None) -> None:
    """Kill this process's children until none is left, including orphans that become its children later.

    `guard` is the process id of the next guard, if there is one. The next guard first gets SIGQUIT, so that
    it kills its own children even if this process is killed. If it has not ended after some seconds, it gets
    SIGKILL.
    """
    until_s = time.monotonic() + _END_S
    while True:
        for process in _list_children():
            _send(process, _KILL if process == guard and time.monotonic() < until_s else signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() > until_s + _END_S:
            return
        time.sleep(_LOOK_S)


def _list_children() -> list[int]:
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children", encoding="ascii") as file:
            return [int(process) for process in file.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        pass
    children = []
    for name in os.listdir("/proc"):
        with suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            if name.isdecimal() and parent == own:
                children.append(int(name))
    return children


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
