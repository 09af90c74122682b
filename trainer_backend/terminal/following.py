"""`--follow`: what a job tells, until it has ended, over the stops and starts of its service."""

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from trainer_backend.terminal.jobs_client import JobsClient, ServiceUnreachable
from trainer_backend.terminal.telling import line_of, tell

# Between two questions to a service that has stopped; after the last of them it is given up. Long enough for
# one that is started anew, and lets its jobs save before.
_WAITS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 60.0)


def follow(
    client: JobsClient,
    job: str,
    out: Console,
    err: Console,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Print what comes; the state that the job has ended in, or `deleted`.

    Raises:
        ServiceRefused: there is no such job.
        ServiceUnreachable: nobody answers; later, nobody has answered for minutes.
    """
    path, after, waits = f"/jobs/{job}/events", None, iter(_WAITS_S)
    reached = False
    while True:
        stopped: ServiceUnreachable | None = None
        try:
            for event in client.events(path, after=after):
                reached, after, waits = True, event.identity or after, iter(_WAITS_S)
                if event.name == "end":
                    tell(err, f"the job is {event.data['state']}")
                    return str(event.data["state"])
                _print(event.name, event.data, out, err)
        except ServiceUnreachable as error:
            if not reached:
                raise
            stopped = error
        wait_s = next(waits, None)
        if wait_s is None:
            raise stopped or ServiceUnreachable(
                f"the service at {client.url} does not tell how {job} goes on"
            )
        tell(err, f"the service has stopped before the job has ended; asking again in {wait_s:g} s")
        sleep(wait_s)


def _print(name: str, data: dict[str, Any], out: Console, err: Console) -> None:
    if name == "log":
        tell(out, line_of(data))
    elif name == "store":
        tell(err, f"warning: {data['detail']}")
