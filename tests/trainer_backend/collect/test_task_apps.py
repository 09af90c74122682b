"""Where the key of a named task app comes from, against a real one."""

import asyncio

import pytest

from service_kit.process import Child
from tests.conftest import TASK_APP_KEY, task_app, tiny_job
from trainer_backend import job_parts
from trainer_backend.errors import JobError, TaskAppError
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


@pytest.mark.parametrize(
    ("gateway", "allowed"),
    [("127.0.0.1", []), ("trainer-backend", ["trainer-backend"]), ("fd00::2", ["[fd00::2]"])],
)
async def test_the_jobs_own_task_app_has_no_key_of_the_learner_and_may_call_its_gateways(
    monkeypatch, tmp_path, gateway, allowed
):
    roles: list[Role] = []

    class Recording:
        async def start(self, role: Role) -> None:
            roles.append(role)
            raise OSError

    monkeypatch.setattr("trainer_backend.collect.task_apps.LOCAL", Recording())
    with pytest.raises(OSError):
        async with job_parts.task_apps(tiny_job(services__gateway_host=gateway), tmp_path / "log"):
            raise AssertionError("nothing was started")
    (role,) = roles
    assert role.withheld == {"TURNWISE_LEARNER_KEY", "TURNWISE_LEARNER_KEY_FILE"}
    words = [*role.command(Place())]
    assert words[words.index("--exit-with-parent") + 1 :] == [
        word for host in allowed for word in ("--allow-inference-host", host)
    ]


async def test_own_task_apps_start_side_by_side_and_one_that_fails_is_told_by_its_own_log(
    monkeypatch, tmp_path
):
    roles: list[Role] = []
    ended: list[Role] = []
    both = asyncio.Event()

    class Waiting:
        def __init__(self, role: Role) -> None:
            self.role = role

        async def address(self) -> None:
            await both.wait()
            if self.role is roles[1]:
                await asyncio.Event().wait()  # it is not up yet when the first one has failed

        async def ended(self) -> int:
            return 1

        async def end(self, grace_s: float) -> None:
            ended.append(self.role)

    class Starting:
        async def start(self, role: Role) -> Waiting:
            roles.append(role)
            role.log_file.write_text(f"fault {len(roles)}\n")
            if len(roles) == 2:
                both.set()
            return Waiting(role)

    monkeypatch.setattr("trainer_backend.collect.task_apps.LOCAL", Starting())
    with pytest.raises(TaskAppError, match="fault 1") as caught:
        async with (
            asyncio.timeout(20),
            job_parts.task_apps(tiny_job(services__task_apps=2), tmp_path / "task_app.log"),
        ):
            raise AssertionError("none was up")
    assert [role.log_file.name for role in roles] == ["task_app.log", "task_app_1.log"]
    assert str(tmp_path / "task_app.log") in caught.value.hint
    assert ended == roles


async def test_a_job_may_start_several_task_apps_of_its_own_which_end_side_by_side(monkeypatch, tmp_path):
    end, both = Child.end, asyncio.Barrier(2)

    async def end_with_the_other(child, grace_s):
        await both.wait()
        return await end(child, grace_s)

    monkeypatch.setattr(Child, "end", end_with_the_other)
    async with (
        asyncio.timeout(60),
        job_parts.task_apps(tiny_job(services__task_apps=2), tmp_path / "log") as apps,
    ):
        assert [app.label for app in apps.members] == ["own-0", "own-1"]
        assert len({app.instance_id for app in apps.members}) == 2


@pytest.mark.parametrize("content", [None, "\n"])
async def test_a_key_file_without_a_key_is_told_before_anything_is_asked(environment, tmp_path, content):
    if content is not None:
        (tmp_path / "key").write_text(content)
    environment.setenv("ENVIRONMENT_API_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(JobError, match="ENVIRONMENT_API_KEY_FILE"):
        async with job_parts.task_apps(
            tiny_job(services__task_url=("http://127.0.0.1:9",)), tmp_path / "log"
        ):
            raise AssertionError("there was no key")
