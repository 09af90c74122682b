"""`turnwise jobs …`: commands for a trainer service on any machine."""

import json
import time
from collections.abc import Callable
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer_backend.errors import JobError
from trainer_backend.terminal.output import JobPaths, Overrides, TextConsole, format_line, tell, write

if TYPE_CHECKING:
    from trainer_backend.terminal.jobs_client import JobsClient

jobs = typer.Typer(no_args_is_help=True, help="Use a trainer service: submit, list, show, pause, cancel.")
_out = TextConsole()
_err = TextConsole(stderr=True)

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        show_default=False,
        help="URL of the service; absent: TURNWISE_URL, or http://127.0.0.1:8100",
    ),
]
JobName = Annotated[str, typer.Argument(help="its id, the beginning of its id, or a unique name")]


@jobs.command()
def submit(
    job: JobPaths,
    url: Url = None,
    dry_run: Annotated[bool, typer.Option(help="only check it, and print it with every default")] = False,
    follow: Annotated[
        bool,
        typer.Option(help="print its log until it has ended; exit code 1 unless it succeeded"),
    ] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="your key for this request: repeating it makes no second job")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Submit a job. Paths in it refer to the service's machine."""
    from trainer_backend.job.load import text_to_send
    from trainer_backend.terminal.jobs_client import CreatedReply, ResolvedReply, client_for

    client = client_for(url)
    text, notes = text_to_send(job, overrides or ())
    headers = {"Content-Type": "application/toml"}
    headers |= {"Idempotency-Key": idempotency_key} if idempotency_key else {}
    query = {"dry_run": True} if dry_run else {}
    kind = ResolvedReply if dry_run else CreatedReply
    reply = client.post("/jobs", kind, body=text, headers=headers, **query)
    for warning in (*notes, *reply["warnings"]):
        tell(_err, f"warning: {warning}")
    if dry_run:
        write(reply["toml"])
        return
    tell(_out, f"{reply['id']}  {reply['state']}  {reply['name']}")
    if follow:
        _follow(client, reply["id"])


@jobs.command("list")
def list_jobs(
    url: Url = None,
    state: Annotated[list[str] | None, typer.Option(help="only jobs in this state; may be repeated")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="print the service's reply")] = False,
) -> None:
    """List the newest jobs, including runs of `turnwise train` that the service sees."""
    from trainer_backend.terminal.jobs_client import JobsReply, client_for

    reply = client_for(url).get("/jobs", JobsReply, limit=limit, state=state or [])
    if as_json:
        print(json.dumps(reply))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("id", "name", "state", "iteration", "begun", "folder", ""):
        table.add_column(title)
    for job in reply["jobs"]:
        cells = (
            job["id"][:12],
            job["name"],
            job["state"],
            _iteration(job),
            (job["started"] or "")[:19],
            # Runs of `--seeds` share a name: seed_0, seed_1, …
            PurePath(job["run_dir"] or "").name,
            str(job["detail"] or (job["progress"] or {}).get("stage") or "").partition("\n")[0][:80],
        )
        table.add_row(*(Text(word) for word in cells))
    _out.print(table)
    if reply["next_cursor"] is not None:
        tell(_err, "there are more: --limit, --state, or --json with its next_cursor")


@jobs.command()
def show(
    job: JobName,
    url: Url = None,
    config: Annotated[bool, typer.Option(help="print its TOML instead")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the service's reply")] = False,
) -> None:
    """Show one job: its state, its progress, its run directory."""
    from trainer_backend.terminal.jobs_client import JobReply, client_for

    client = client_for(url)
    if config:
        write(client.text(f"/jobs/{job}/config"))
        return
    reply = client.get(f"/jobs/{job}", JobReply)
    if as_json:
        print(json.dumps(reply))
        return
    iteration, progress = _iteration(reply), reply.pop("progress") or {}
    facts = {**reply, "iteration": iteration, "stage": progress.get("stage")}
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in facts.items():
        if value not in (None, "", {}):
            table.add_row(Text(name), Text(json.dumps(value) if isinstance(value, dict) else str(value)))
    _out.print(table)


@jobs.command()
def logs(
    job: JobName,
    url: Url = None,
    follow: Annotated[
        bool, typer.Option(help="continue until the job has ended; exit code 1 unless it succeeded")
    ] = False,
    part: Annotated[str, typer.Option(help="run, process, task_app, learner or gateway_0")] = "run",
    tail: Annotated[int, typer.Option(min=1, max=10_000, help="number of last lines")] = 1000,
) -> None:
    """Print a job's log."""
    from trainer_backend.terminal.jobs_client import LogReply, client_for

    client = client_for(url)
    if follow and part != "run":
        raise JobError(f"--follow prints what the run tells; of --part {part} leave it out")
    if follow:
        _follow(client, job)
        return
    for line in client.get(f"/jobs/{job}/log", LogReply, part=part, tail=tail)["lines"]:
        tell(_out, format_line(line))


@jobs.command()
def pause(job: JobName, url: Url = None) -> None:
    """Let a job save finished work, and stop it until `resume`."""
    _ask(job, "pause", url)


@jobs.command()
def resume(job: JobName, url: Url = None) -> None:
    """Queue a job again; it continues from its newest checkpoint."""
    _ask(job, "resume", url)


@jobs.command()
def cancel(job: JobName, url: Url = None) -> None:
    """End a job; its results stay."""
    _ask(job, "cancel", url)


@jobs.command()
def delete(
    job: JobName,
    url: Url = None,
    files: Annotated[bool, typer.Option(help="delete its run directory too, with everything in it")] = False,
) -> None:
    """Forget a job that has ended."""
    from trainer_backend.terminal.jobs_client import JobReply, client_for

    client = client_for(url)
    reply = client.get(f"/jobs/{job}", JobReply)
    client.delete(f"/jobs/{reply['id']}", files=files)
    note = "" if files or not reply["run_dir"] else f"; its files stay in {reply['run_dir']}"
    tell(_out, f"{reply['id']}  deleted{note}")


def _ask(job: str, verb: str, url: str | None) -> None:
    from trainer_backend.terminal.jobs_client import JobReply, client_for

    reply = client_for(url).post(f"/jobs/{job}/{verb}", JobReply)
    tell(_out, f"{reply['id']}  {reply['state']}  {reply['name']}")


def _follow(client: "JobsClient", job: str) -> None:
    if follow(client, job, _out, _err) != "succeeded":
        raise typer.Exit(1)


def _iteration(job: dict[str, Any]) -> str:
    progress = job["progress"] or {}
    total = progress.get("iterations")
    return f"{progress.get('iteration', 0)}" + (f"/{total}" if total else "")


# Seconds between attempts to reach a service that has stopped. In total they suffice for a service that lets
# its jobs save and then restarts.
_WAITS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 60.0)


def follow(
    client: "JobsClient", job: str, out: Console, err: Console, *, sleep: Callable[[float], None] = time.sleep
) -> str:
    """Print the events of a job until it ends; return its final state, or `deleted`."""
    from trainer_backend.store.rows import ENDED
    from trainer_backend.terminal.jobs_client import ServiceUnreachable

    path, after, waits = f"/jobs/{job}/events", None, iter(_WAITS_S)
    detail = ""
    has_connected = False
    while True:
        outage: ServiceUnreachable | None = None
        try:
            for event in client.events(path, after=after):
                has_connected, after, waits = True, event.identity or after, iter(_WAITS_S)
                if event.name == "state" and event.data.get("detail") not in (None, detail):
                    detail = event.data["detail"]
                    if event.data["state"] not in ENDED:  # a restart, with its reason
                        tell(err, detail)
                if event.name == "end":
                    why = f": {detail}" if detail and event.data["state"] == "failed" else ""
                    tell(err, f"the job is {event.data['state']}{why}")
                    return str(event.data["state"])
                if event.name == "log":
                    tell(out, format_line(event.data))
                elif event.name == "store":
                    tell(err, f"warning: {event.data['detail']}")
        except ServiceUnreachable as error:
            if not has_connected:
                raise
            outage = error
        wait_s = next(waits, None)
        if wait_s is None:
            raise outage or ServiceUnreachable(f"the service at {client.url} does not tell how {job} goes on")
        tell(err, f"the service has stopped before the job has ended; asking again in {wait_s:g} s")
        sleep(wait_s)
