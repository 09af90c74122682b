"""Shared by all tests: one tiny job that trains for real, and a task app on a real port."""

import asyncio
import atexit
import fcntl
import gc
import os
import pickle
import secrets
import shutil
import socket

# Before torch: spinning OpenMP threads make it many times slower beside another busy process.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before triton, where it is installed: without a GPU its kernels are interpreted.
if not (os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import stamina
from hypothesis import settings
from pydantic import SecretStr

from service_kit.server import Listener, ServerThread
from tests.foreign_server import ELSEWHERE
from trainer_backend.job.load import parse_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.rundir.layout import RunDirectory, create_run, open_run

if TYPE_CHECKING:  # torch
    from trainer_backend.processes.policy_server import PolicyServer

# A busy machine is no failure: nothing here asserts on time.
settings.register_profile("turnwise", deadline=None)
settings.load_profile("turnwise")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector: it would go through two million objects that stay, again and again.

    Half of the collection's time went there, in each worker. They are not looked at afterwards either.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def tries_without_waits() -> Iterator[None]:
    """As many tries as the code makes, without the waits between them."""
    with stamina.set_testing(True, attempts=100, cap=True):
        yield


@pytest.fixture(scope="module", autouse=True)
def _what_stays_is_not_looked_at_again() -> Iterator[None]:
    """What a file of tests leaves behind is imports and caches. A run collects garbage in each iteration."""
    yield
    gc.collect()
    gc.freeze()


class ListReporter:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.notes: list[str] = []
        self.stages: list[tuple[str, int, int]] = []
        self.rows: list[dict[str, Any]] = []
        self.row_lines: list[str] = []
        self.processes: list[tuple[str, str, str]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def note(self, text: str) -> None:
        self.lines.append(text)
        self.notes.append(text)

    def stage(self, name: str, done: int, total: int) -> None:
        self.stages.append((name, done, total))

    def metrics(self, row: dict[str, Any], line: str) -> None:
        self.rows.append(row)
        self.row_lines.append(line)

    def process(self, name: str, *, role: str, state: str, **more: Any) -> None:
        self.processes.append((role, name, state))


def free_port(count: int = 1) -> int:
    """The first of `count` consecutive ports that nobody uses.

    They are not of those that the system gives out by itself, which another process may get meanwhile.
    """
    while True:
        first = 20_000 + secrets.randbelow(10_000)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def tiny_job(**overrides: Any) -> JobConfig:
    """A job of seconds: 8 episodes of 8 decisions an iteration.

    `table__key=value` overrides; `table=value` stands in place of a table, `table=None` takes it out.
    """
    document: dict[str, Any] = {
        "job": {"name": "tiny", "seed": 1},
        "model": {"preset": "tiny-0.3m", "device": "cpu"},
        "inference": {"max_model_len": 256, "max_running": 16},
        "rollout": {
            "env_config": {"text": "compact", "max_actions": 4},
            "max_turns": 8,
            "episodes_per_batch": 8,
            "max_tokens": 8,
        },
        "warmup": {
            "episodes": 24,
            "epochs": 3,
            "batch_decisions": 12,
            "learning_rate": 6e-3,
            "policy_config": {"memory": False, "max_actions": 4},
        },
        "training": {
            "iterations": 2,
            "group_size": 4,
            "batch_decisions": 32,
            "threads": 1,
            "checkpoint_every": 1,
            "step_rewards_enabled": True,
            "step_rewards_mode": "decision_stepwise",
        },
        "evaluation": {"instances": 4, "every_n_iters": 2},
    }
    for dotted, value in overrides.items():
        table, _, key = dotted.partition("__")
        if key:
            document.setdefault(table, {})[key] = value
        elif value is None:
            del document[table]
        else:
            document[table] = value
    return parse_job(document, where="tests").config


TASK_APP_KEY = SecretStr("the-task-app-of-the-tests")


def task_app_thread(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    interactions: Path | None = None,
    calls: Sequence[str] = (),
    plugins: Sequence[Path] = (),
) -> ServerThread:
    """A task app for `TASK_APP_KEY`, on a thread of this process.

    Args:
        calls: hosts of inference servers that it may call beside those of 127.0.0.1.
    """
    from shared_schemas.urls import LOOPBACK
    from task_app.app import create_app
    from task_app.interactions.config_file import load_interactions
    from task_app.operator_plugins import with_plugins
    from task_app.plugins import default_plug_boards
    from task_app.settings import Settings

    settings = Settings(
        api_keys=(TASK_APP_KEY,),
        interaction_config_path=interactions,
        allowed_inference_hosts=(*LOOPBACK, *calls),
    )
    boards = with_plugins(default_plug_boards(), plugins)
    if interactions is not None:
        boards = replace(boards, interactions=load_interactions(interactions, settings))
    return ServerThread(create_app(settings, boards=boards), Listener(host, port))


@cache
def task_app(interactions: Path | None = None) -> str:
    """The address of a task app, one for all jobs of this process with these interactions.

    A process of its own costs each job seconds; `test_a_whole_run.py` and others start it.
    """
    server = task_app_thread(interactions=interactions, calls=(ELSEWHERE,))
    atexit.register(server.stop)
    return server.start()


def at_the_task_app(job: JobConfig, url: str = "") -> JobConfig:
    """The job, played at this task app, or at the one of the tests.

    What names task apps stays as it is, and a job with plug-ins starts a task app of its own.
    """
    if job.services.task_url or job.services.task_plugins:
        return job
    url = url or task_app(job.multi_turn.interaction_config_path)
    services = job.services.model_copy(update={"task_url": (url,), "task_api_key": TASK_APP_KEY})
    return job.model_copy(update={"services": services})


@contextmanager
def with_its_plugins(job: JobConfig) -> Iterator[JobConfig]:
    """The job at a task app that has its plug-ins, on a thread: a process of its own costs seconds."""
    with task_app_thread(plugins=job.services.task_plugins, calls=(ELSEWHERE,)) as url:
        services = job.services.model_copy(update={"task_plugins": ()})
        yield at_the_task_app(job.model_copy(update={"services": services}), url)


def train_job(
    job: JobConfig, path: Path, *, resume: RunDirectory | None = None
) -> tuple[RunDirectory, ListReporter, Any]:
    """Run a job to its end in this process, gateway included, at the task app of the tests."""
    from trainer_backend.start import run_job

    directory = resume or create_run(job, path)
    reporter = ListReporter()
    ended = run_job(at_the_task_app(job), directory, reporter, resume=resume is not None)
    progress, _ = asyncio.run(ended)
    directory.replace_job(job)  # a resumed run has stored where it was played
    return directory, reporter, progress


@contextmanager
def policy_server(job: JobConfig) -> "Iterator[PolicyServer]":
    """The gateway of a job at a port that is held, and let go in the end."""
    from trainer_backend.processes.gateways import gateway_listener
    from trainer_backend.processes.policy_server import PolicyServer

    with gateway_listener(job.services) as listener:
        yield PolicyServer(job.job.name, listener, job.inference)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> tuple[Path, Any]:
    """A folder and what `make` returned of it: one of the workers makes it, each has a copy of its own."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, record = root / f"once-{name}", root / f"once-{name}.pickle"
    # The lock ends with its process, so a worker that fails or dies keeps nobody waiting.
    with (root / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not record.exists():
            shutil.rmtree(folder, ignore_errors=True)
            record.write_bytes(pickle.dumps(make(folder)))
    copy = factory.mktemp("once") / name
    shutil.copytree(folder, copy, symlinks=True)
    return copy, pickle.loads(record.read_bytes())


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, ListReporter, Any]:
    """The tiny job, trained once for all tests that only look at what came of it."""

    def make(folder: Path) -> tuple[dict[str, Any], Any]:
        _, reporter, progress = train_job(tiny_job(), folder)
        return vars(reporter), progress

    run, (seen, progress) = made_once(tmp_path_factory, "tiny", make)
    reporter = ListReporter()
    vars(reporter).update(seen)
    return open_run(run), reporter, progress


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Model folders as the hub has them, by family; for reading only: copy one to change it."""
    from tests.model_folders import make_model_folders

    def make(folder: Path) -> dict[str, Path]:
        folder.mkdir()
        return {name: path.relative_to(folder) for name, path in make_model_folders(folder).items()}

    folders, names = made_once(tmp_path_factory, "models", make)
    return {name: folders / path for name, path in names.items()}


def warmed_up(trained: tuple[RunDirectory, ListReporter, Any]) -> dict[str, Any]:
    """Overrides of `tiny_job`: it begins with what the warm-up of `trained` made, in place of its own."""
    return {
        "model": {"path": str(trained[0].checkpoints / "iteration_0"), "device": "cpu"},
        "warmup": None,
    }


def decisions_by_turn(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The stored decisions of a file of rollouts, by rollout and turn."""
    import pyarrow.parquet as pq  # a run of the pure core's tests alone needs none

    return {
        (row["rollout_id"], decision["turn"]): decision
        for row in pq.read_table(path).to_pylist()
        for decision in row["decisions"]
    }


def is_declared(name: str) -> bool:
    """Whether a metric is declared; a `*` stands for what the code fills in, such as a policy or a reason."""
    from trainer_backend.metrics import DECLARED

    if name.endswith("/*") and any(metric.name.startswith(name[:-1]) for metric in DECLARED):
        return True
    return any(metric.matches(name.replace("*", "x")) for metric in DECLARED)


def rows_of(directory: RunDirectory, kind: str) -> Sequence[dict[str, Any]]:
    return [row for row in directory.metrics() if row["kind"] == kind]
