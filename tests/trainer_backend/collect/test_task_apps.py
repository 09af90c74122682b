"""The task apps of a job: where the key of a named one comes from, and how its own ones start and end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.conftest import TASK_APP_KEY, task_app, tiny_job
from tests.trainer_backend.collect.scripted_task_app import ScriptedTaskApp, served
from trainer_backend import job_parts
from trainer_backend.collect.apps import TaskApps
from trainer_backend.errors import JobError, TaskAppError
from trainer_backend.job.schema import JobConfig
from trainer_backend.processes.launching import Place, Role


@pytest.fixture
def environment(monkeypatch):
    for name in ("ENVIRONMENT_API_KEY", "ENVIRONMENT_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


async def test_the_key_may_lie_in_a_file(environment, tmp_path):
    job = tiny_job(services__task_url=(task_app(),))
    (tmp_path / "key").write_text(TASK_APP_KEY.get_secret_value() + "\n")
    environment.setenv("ENVIRONMENT_API_KEY_FILE", str(tmp_path / "key"))
    async with job_parts.task_apps(job, tmp_path / "log") as apps:
        assert [app.url for app in apps.serving] == [task_app()]
    (tmp_path / "key").write_text("another")
    with pytest.raises(TaskAppError):
        async with job_parts.task_apps(job, tmp_path / "log"):
            raise AssertionError("a wrong key was accepted")


class Children:
    """In place of the processes that a job starts: a child for each URL; None: it fails at once.

    None has an address before all are started, and none ends before all are told to.
    """

    def __init__(self, *urls: str | None, code: int = 1) -> None:
        self.urls, self.code, self.roles, self.ended = urls, code, list[Role](), list[Role]()
        self.are_started, self.are_told = asyncio.Event(), asyncio.Event()

    async def start(self, role: Role) -> "OneOf":
        self.roles.append(role)
        role.log_file.write_text(f"fault {len(self.roles)}\n")
        if len(self.roles) == len(self.urls):
            self.are_started.set()
        return OneOf(self, role, self.urls[len(self.roles) - 1])


class OneOf:
    exit_code = None

    def __init__(self, children: Children, role: Role, url: str | None) -> None:
        self.children, self.role, self.url = children, role, url

    async def address(self) -> str | None:
        await self.children.are_started.wait()
        if self.url == "later":
            await asyncio.Event().wait()
        return self.url

    async def ended(self) -> int:
        return self.children.code

    async def end(self, grace_s: float) -> None:
        self.children.ended.append(self.role)
        if None in self.children.urls or len(self.children.ended) == len(self.children.urls):
            self.children.are_told.set()
        await self.children.are_told.wait()


@asynccontextmanager
async def opened(
    children: Children, job: JobConfig, log_file: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TaskApps]:
    monkeypatch.setattr("trainer_backend.collect.task_apps.LOCAL", children)
    async with asyncio.timeout(60), job_parts.task_apps(job, log_file) as apps:
        yield apps


@pytest.mark.parametrize(
    ("gateway", "allowed"),
    [("127.0.0.1", []), ("trainer-backend", ["trainer-backend"]), ("fd00::2", ["[fd00::2]"])],
)
async def test_the_jobs_own_task_app_has_its_files_no_key_of_the_learner_and_may_call_its_gateways(
    monkeypatch, tmp_path, gateway, allowed
):
    (tmp_path / "users.yaml").touch()
    job = tiny_job(
        services__gateway_host=gateway,
        multi_turn={"enable": True, "interaction_config_path": tmp_path / "users.yaml"},
    )
    children = Children(None, code=2)  # it does not take its settings or files
    with pytest.raises(JobError, match="the job's own task app did not start: fault 1"):
        async with opened(children, job, tmp_path / "log", monkeypatch):
            raise AssertionError("nothing was started")
    (role,) = children.roles
    assert role.withheld == {"TURNWISE_LEARNER_KEY", "TURNWISE_LEARNER_KEY_FILE"}
    words = [*role.command(Place())]
    assert words[words.index("--exit-with-parent") + 1 :] == [
        *(word for host in allowed for word in ("--allow-inference-host", host)),
        "--interactions",
        str(tmp_path / "users.yaml"),
    ]


async def test_own_task_apps_start_side_by_side_and_one_that_fails_is_told_by_its_own_log(
    monkeypatch, tmp_path
):
    children = Children(None, "later")  # the second one is not up yet when the first one has failed
    with pytest.raises(TaskAppError, match="fault 1") as caught:
        async with opened(children, tiny_job(services__task_apps=2), tmp_path / "task_app.log", monkeypatch):
            raise AssertionError("none was up")
    assert [role.log_file.name for role in children.roles] == ["task_app.log", "task_app_1.log"]
    assert str(tmp_path / "task_app.log") in caught.value.hint
    assert children.ended == children.roles


async def test_a_job_may_start_several_task_apps_of_its_own_which_end_side_by_side(monkeypatch, tmp_path):
    first, second = ScriptedTaskApp(instance="a"), ScriptedTaskApp(instance="b")
    async with served(first) as a, served(second) as b:
        children = Children(a.url, b.url)
        job = tiny_job(services__task_apps=2)
        async with opened(children, job, tmp_path / "log", monkeypatch) as apps:
            assert [(app.label, app.instance_id) for app in apps.members] == [("own-0", "a"), ("own-1", "b")]
    assert len(children.ended) == 2


@pytest.mark.parametrize("content", [None, "\n"])
async def test_a_key_file_without_a_key_is_told_before_anything_is_asked(environment, tmp_path, content):
    if content is not None:
        (tmp_path / "key").write_text(content)
    environment.setenv("ENVIRONMENT_API_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(JobError, match="ENVIRONMENT_API_KEY_FILE"):
        async with job_parts.task_apps(tiny_job(services__task_url=("http://a:9",)), tmp_path / "log"):
            raise AssertionError("there was no key")
