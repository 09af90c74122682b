"""`python -m task_app --host 127.0.0.1 --port 8001`: the task app alone.

Port 0 takes a free port. When the task app is ready, it prints one line to stdout, which the trainer's
embedded
mode reads: `listening on http://host:port`. With --replicas the line is `task_url = [...]`, for a job's
[services]. Logs go to stderr. Exit codes: 0 stopped, 2 a setting, a port or a plug-in file is wrong.
"""

import argparse
import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import structlog
from fastapi import FastAPI

from service_kit.children import READY
from service_kit.connections import ConnectionBounds
from service_kit.console import begin_command
from service_kit.errors import PortTaken, SettingsError
from service_kit.keys import TASK_APP_KEY
from service_kit.logs import configure_logs
from service_kit.server import Listener, Server
from shared_schemas.urls import is_loopback
from task_app.app import create_app
from task_app.errors import CapacityReached
from task_app.interactions.config_file import load_interactions, package_interactions
from task_app.observing.spans import spans_of
from task_app.operator_plugins import with_packages, with_plugins
from task_app.plugins import default_plug_boards
from task_app.replicas import run_replicas
from task_app.services import Services
from task_app.settings import settings_from_environ

log = structlog.get_logger("task_app")

# New objects between two collections of garbage. The steps of an episode stay until it is sent, and Python's
# 700 would look through them again and again: a tenth of the CPU time of a scripted decision.
_OBJECTS_A_COLLECTION = 10_000
_MOST_REPLICAS = 256
_LAST_PORT = 65_535


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.replicas and options.port and options.port + options.replicas - 1 > _LAST_PORT:
        parser.error(f"{options.replicas} replicas from port {options.port} on go beyond port {_LAST_PORT}")
    try:
        settings = settings_from_environ(os.environ).with_hosts(options.allow_inference_host)
        if options.state_dir is not None:
            settings = settings.model_copy(update={"state_dir": options.state_dir})
        if options.interactions is not None:
            settings = settings.model_copy(update={"interaction_config_path": options.interactions})
        configure_logs(settings.log_level, form=settings.log_format)
        if options.replicas is not None:
            return run_replicas(options, settings)
        boards = with_plugins(with_packages(default_plug_boards()), options.plugins)
        interactions = package_interactions(settings)
        if settings.interaction_config_path is not None:
            interactions |= load_interactions(settings.interaction_config_path, settings)
        boards = replace(boards, interactions=interactions)
        # A variable that is set and empty is a secret that failed, and no wish to have none.
        wants_key = any(name.startswith(TASK_APP_KEY) for name in os.environ)
        needs_key = wants_key or not is_loopback(options.host)
        app = create_app(settings, boards=boards, needs_key=needs_key, spans=spans_of(os.environ))
        listener = Listener(options.host, options.port)
    except (SettingsError, PortTaken) as exc:
        print(f"task_app: {exc.detail}", file=sys.stderr)
        return 2
    if not settings.api_keys:
        told = "every route answers 503" if needs_key else "only this machine is answered"
        log.warning("no_key_configured", hint=f"{told} until {TASK_APP_KEY} is set")
    log.info("starting", address=listener.url)
    gc.freeze()  # what is imported stays, and is never looked through again
    gc.set_threshold(_OBJECTS_A_COLLECTION)
    server = server_of(app, ready=lambda: print(f"{READY}{listener.url}", flush=True))
    server.run_on(listener, exit_with_parent=options.exit_with_parent)
    log.info("stopped", address=listener.url)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m task_app", description="Environments behind HTTP.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=_port, default=8001, help="0 takes a free port")
    parser.add_argument(
        "--allow-inference-host", action="append", default=[], metavar="HOST[:PORT]",
        help="a host that an inference_url may name, beside those of the environment; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--plugins", action="append", default=[], type=Path, metavar="FILE",
        help="a Python file with environments or policies of your own (docs/plugins.md); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--interactions", type=Path, metavar="FILE", default=None,
        help="the YAML or TOML file of interactions (docs/plugins.md)",
    )  # fmt: skip
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", default=None,
        help="write sessions there: after a restart or a kill each continues from its last decision",
    )  # fmt: skip
    parser.add_argument(
        "--replicas", type=_count, metavar="N", default=None,
        help="serve N task apps on consecutive ports, and restart each when it dies",
    )  # fmt: skip
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when standard input is closed")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= _MOST_REPLICAS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of replicas; allowed: 1 to {_MOST_REPLICAS}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; allowed: 0 to {_LAST_PORT}")
    return int(text)


def server_of(app: FastAPI, *, ready: Callable[[], None]) -> Server:
    """Make a server that drains on a stop signal: it still answers, but accepts no new work."""
    services: Services = app.state.services
    settings = services.settings

    async def drain(orphaned: bool) -> None:
        # Without the parent nobody would fetch further results.
        await services.drain(within_s=0.0 if orphaned else settings.drain_s)

    bounds = ConnectionBounds(
        max_connections=settings.max_connections,
        max_header_s=settings.max_header_s,
        max_header_bytes=settings.max_header_bytes,
        max_body_s=settings.max_body_s,
        too_many=CapacityReached,
    )
    return Server(app, bounds, max_message_bytes=settings.max_body_bytes, ready=ready, before_stop=drain)


if __name__ == "__main__":
    try:
        begin_command(sys.argv[1:])
    except SettingsError as exc:
        sys.exit(f"task_app: {exc}")
    sys.exit(main())
