"""The learner in a process of its own: equal numbers, one call at a time, and its loss."""

import asyncio
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from service_kit.keys import Keys
from service_kit.server import Listener, ServerThread
from shared_schemas.problem import PROBLEM_MEDIA_TYPE, Problem
from tests.conftest import ListReporter, tiny_job
from tests.processes import until
from tests.trainer_backend.learner.receiver import Receiver
from trainer_backend import job_parts, learner_parts
from trainer_backend.core.critic import CriticTargets
from trainer_backend.core.segments import build_segments
from trainer_backend.errors import (
    CheckpointError,
    LearnerBusy,
    LearnerFailed,
    LearnerLost,
    NonFiniteLoss,
    TrainerError,
)
from trainer_backend.inference.vllm_worker.turnwise_transfer import Worker
from trainer_backend.learner.calls import LEARNER_KEY, NUMBER_HEADER, SESSION_HEADER
from trainer_backend.learner.process import Call, Calls, create_app
from trainer_backend.learner.ranks import ALONE
from trainer_backend.learner.relay import Relay
from trainer_backend.parts import CreditedEpisode, Learner, LearnerFactory, Progress
from trainer_backend.processes.learner_process import LearnerConnection, LearnerProcess
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_files import read_rollouts

# A critic, a KL in the rewards, and dropout, which draws.
TABLES: dict[str, Any] = {
    "algorithm__advantage": "gae",
    "training__kl_reward_coef": 0.1,
    "training__mismatch_limit": 1e9,
    "lora__rank": 2,
    "lora__dropout": 0.1,
    "warmup__epochs": 1,
}
JOB = tiny_job(**TABLES)


@pytest.fixture(scope="module")
def played(trained):
    """The teacher's episodes, and credited ones that a policy has sampled."""
    teacher = [item.trajectory for item in read_rollouts(trained[0].rollouts_file("warmup"))]
    rollouts = read_rollouts(trained[0].rollouts_file("iteration_1"))[:5]
    episodes = []
    for number, item in enumerate(rollouts):
        steps = item.trajectory.steps
        # Their mean is not 0: a gradient that rounding alone makes would set the sign of a step of Adam.
        ups = [(-1.0) ** (number + t) / (3 + t) for t in range(len(steps))]
        critic = CriticTargets([0.0] * len(steps), ups)
        parts = build_segments(steps, rollout_id=item.rollout_id)
        episodes.append(CreditedEpisode(item.rollout_id, parts, ups, critic))
    return [item for item in teacher if item is not None], episodes


def calls_in_order(factory: LearnerFactory, played: Any, folder: Path) -> list[Any]:
    """All calls that a run makes, a save and a resume among them, and what they return."""
    teacher, episodes = played
    parts = {item.rollout_id: item.segments for item in episodes}
    stages: list[tuple[int, int]] = []
    learner = factory.fresh(teacher, None)
    results: list[Any] = [learner.warm_up(teacher[:8], lambda *stage: stages.append(stage))]
    learner.save(folder / "iteration_0", Progress())
    results += [stages[-1], learner.values(parts), learner.score(parts)]
    results.append(learner.update(episodes, iteration=1))
    learner.save(folder / "iteration_1", Progress(1, 1, 4))
    learner.publish(folder / "version_1")
    results += [learner.score_ids(range(3, 12)), sent(learner)]
    questions = [[{"role": "user", "content": "wood " * count}] for count in (1, 30, 9000)]
    results.append(learner.find_long(questions, 20))
    assert [(item.place, item.is_bound) for item in results[-1]] == [(1, False), (2, True)]
    learner, progress = factory.resumed(folder / "iteration_1")
    results += [progress, learner.values(parts), learner.update(episodes, iteration=2)]
    learner.save(folder / "iteration_2", Progress(2, 2, 8))
    return results


def huge(episodes: list[CreditedEpisode]) -> list[CreditedEpisode]:
    """The episodes with advantages that no gradient can hold."""
    return [replace(item, advantages=[1e38] * len(item.advantages)) for item in episodes]


def sent(learner: Learner) -> dict[str, float]:
    """The norms of the weights that a server is sent."""
    receiver = Receiver(learner.offer("127.0.0.1"), Worker("a", 0, 1))
    assert learner.broadcast(1, 60.0, lambda done, expected: None) == 1
    receiver.join()
    return {name: tensor.norm().item() for name, tensor in receiver.weights.items()}


def read_files(folder: Path) -> dict[str, bytes]:
    """Without those of peft, which hold the order of a set and the folder's own path."""
    paths = [*folder.rglob("*.safetensors"), *folder.glob("*/*.json"), *folder.glob("*/*.jinja")]
    paths = [path for path in paths if path.name not in ("digests.json", "adapter_config.json")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


async def test_it_is_the_learner_of_this_process_bit_for_bit_with_its_errors_until_a_stop_and_a_kill(
    played, tmp_path: Path
):
    expected = calls_in_order(learner_parts.local_learners(JOB), played, tmp_path / "here")
    directory = RunDirectory(tmp_path, "run")
    async with job_parts.learner_process(JOB, directory, ListReporter()) as process:
        results = await asyncio.to_thread(calls_in_order, process, played, tmp_path / "there")
        plan = await asyncio.to_thread(process.plan_memory, None, [])
        learner, _ = await asyncio.to_thread(process.resumed, tmp_path / "there" / "iteration_2")

        async def raised(kind: type[TrainerError], call: Any, *arguments: Any, **keywords: Any) -> Any:
            with pytest.raises(kind) as caught:
                await asyncio.to_thread(call, *arguments, **keywords)
            return caught.value

        (tmp_path / "file").touch()
        error = await raised(CheckpointError, learner.save, tmp_path / "file" / "iteration_3", Progress())
        assert "free some space" in error.hint
        stopped = await raised(NonFiniteLoss, learner.update, huge(played[1]), iteration=3)
        assert stopped.steps_taken == 0
        failed = await raised(LearnerFailed, learner.score, {"r": []})
        assert "an error inside the learner in 'score'" in str(failed)
        await stopped_and_killed(process, played[0], tmp_path)
    assert plan.startswith("memory (cpu, float32)")
    assert results == expected
    assert read_files(tmp_path / "there") == read_files(tmp_path / "here")
    assert "iteration_2/training_state/optimizer.safetensors" in read_files(tmp_path / "there")
    assert "Traceback" in directory.learner_log.read_text()


async def stopped_and_killed(process: LearnerProcess, teacher: Any, folder: Path) -> None:
    """A kill in the middle of a call is told, and a stop ends a call."""

    class Enough(Exception):
        pass

    told: list[int] = []

    def stop(done: int, total: int) -> None:
        told.append(done)
        if done:
            raise Enough

    learner = await asyncio.to_thread(process.fresh, teacher, None)
    with pytest.raises(Enough):
        await asyncio.to_thread(learner.warm_up, teacher, stop)
    assert max(told) < 3
    assert len(await asyncio.to_thread(learner.score_ids, [3, 4])) == 1, "it serves the next call"

    def kill(done: int, total: int) -> None:
        os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(LearnerLost, match=r"has ended with SIGKILL .* in the call 'warm_up'; the last line"):
        await asyncio.to_thread(learner.warm_up, teacher, kill)
    with pytest.raises(LearnerLost, match="in the call 'save'"):
        await asyncio.to_thread(learner.save, folder / "iteration_0", Progress())


async def test_the_last_progress_of_a_call_is_told_also_where_its_answer_comes_at_once():
    call = Call(1, "warm_up", b"")
    for done in range(3):
        call.tell(done, 2)
    call.end(b"result 1")
    lines = [line async for line in call.lines()]
    assert lines == [b"progress [2,2]\n", b"result 1\n"]


@pytest.mark.parametrize(
    ("variable", "kind", "code"),
    [("PYTHONHOME", LearnerFailed, "exit code 1"), ("PYTHONPATH", LearnerLost, r"SIGKILL \(.*\)")],
)
async def test_a_process_that_does_not_start_is_told_with_its_last_words_and_a_killed_one_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, kind: type[TrainerError], code: str
):
    (tmp_path / "sitecustomize.py").write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(kind, match=rf"ended with {code} before it was ready: '.*Its log is"):
        async with job_parts.learner_process(JOB, RunDirectory(tmp_path, "run"), ListReporter()):
            raise AssertionError


async def test_what_a_library_prints_blocks_no_call_and_an_end_between_two_calls_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copy(Path(__file__).with_name("scripted_child.py"), tmp_path / "sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a torchrun around this process
    reporter = ListReporter()
    job = JOB.model_copy(update={"learner": JOB.learner.model_copy(update={"timeout_s": 10.0})})
    async with job_parts.learner_process(job, RunDirectory(tmp_path, "run"), reporter) as process:
        learner = await asyncio.to_thread(process.fresh, [], None)
        await asyncio.to_thread(learner.publish, tmp_path / "version_1")  # it prints 2 MB
        assert not reporter.lines
        await asyncio.to_thread(learner.save, tmp_path / "iteration_1", Progress())
        await until(lambda: ("learner", "learner", "lost") in reporter.processes)
    (line,) = reporter.lines
    assert line.startswith("the learner's process ended with exit code 7; the last line of its log, ")
    assert line.endswith("learner.log: 'its last words'")
    assert [state for _, _, state in reporter.processes] == ["starting", "serving", "lost"]


class Host:
    """Stands for the learner: `update` waits for `go_on`, and counts how often it was done."""

    def __init__(self) -> None:
        self.updates, self.begun, self.go_on = 0, threading.Event(), threading.Event()
        self.lost_replies = 0

    def do(self, name: str, *arguments: Any) -> Any:
        if name == "publish":
            raise ValueError("of a library")
        self.begun.set()
        assert self.go_on.wait(60)
        self.updates += 1
        return {"optim/steps": math.nan, "loss": math.inf}


@contextmanager
def served(host: Host) -> Iterator[Callable[..., Any]]:
    """What connects to a server of this learner."""
    app = create_app(Calls(Relay(ALONE, host.do)), Keys([SecretStr("key")], variable=LEARNER_KEY))  # type: ignore[arg-type]

    async def cut(scope: Any, receive: Any, send: Any) -> None:
        """Break off the first replies in their middle."""

        async def send_the_head(message: Any) -> None:
            if message["type"] == "http.response.start":
                await send(message)

        is_lost = scope["type"] == "http" and host.lost_replies > 0
        host.lost_replies -= is_lost
        await app(scope, receive, send_the_head if is_lost else send)

    with ServerThread(cut, Listener("127.0.0.1", 0)) as url, ExitStack() as stack:

        def connect(*, key: str = "key", silence_s: float = 60.0, session: str = "run/one") -> Any:
            log = Path("the.log")
            link = LearnerConnection(url, key, silence_s=silence_s, log_file=log, session=session)
            stack.callback(link.close)
            return link

        yield connect
        host.go_on.set()


def asking(link: LearnerConnection, host: Host) -> threading.Thread:
    """A thread whose call is under way."""
    thread = threading.Thread(target=link.ask, args=("update", [], 1, None))
    thread.start()
    assert host.begun.wait(60)
    return thread


def test_a_call_whose_connection_breaks_is_repeated_and_done_once():
    host = Host()
    host.go_on.set()
    host.lost_replies = 2
    with served(host) as connect:
        link = connect()
        assert link.ask("update", [], 1, None)["loss"] == math.inf
        assert (host.updates, host.lost_replies) == (1, 0)
        host.lost_replies = 3
        with pytest.raises(LearnerLost, match="process broke off 3 connections in the call 'update'"):
            link.ask("update", [], 2, None)


def test_everybody_who_asks_for_a_call_by_its_number_gets_its_answer_and_it_is_done_once():
    host, results = Host(), []
    with served(host) as connect:
        first, again = connect(), connect()  # the same call by its number, on another connection
        threads = [
            threading.Thread(target=lambda link=link: results.append(link.ask("update", [], 1, None)))
            for link in (first, again)
        ]
        for thread in threads:
            thread.start()
        assert host.begun.wait(60)
        host.go_on.set()
        for thread in threads:
            thread.join()
        results.append(connect().ask("update", [], 1, None))
        assert host.updates == 1
        assert all(math.isnan(item["optim/steps"]) and item["loss"] == math.inf for item in results)
        assert len(results) == 3
        with pytest.raises(LearnerBusy, match=r"call 1, 'update', cannot begin: call 1, 'update', was the"):
            connect().ask("update", [], 2, None)  # the same number, and another call


def test_two_orchestrators_on_one_learner_and_a_call_during_another_are_refused():
    host = Host()
    with served(host) as connect:
        own = connect()
        thread = asking(own, host)
        with pytest.raises(LearnerBusy, match=r"works for the run 'run'; two runs would update"):
            connect(session="other/two").ask("update", [], 1, None)
        second = connect()
        second._number = 1
        with pytest.raises(LearnerBusy, match=r"'values', cannot begin: call 1, 'update', is under way"):
            second.ask("values", {})
        host.go_on.set()
        thread.join()
        with pytest.raises(LearnerFailed, match="another key was given"):
            connect(key="of a stranger").ask("update", [], 1, None)
        with pytest.raises(
            LearnerFailed, match=r"in 'publish': ValueError: of a library \(\w+\.py:\d+\)\. Its log is the"
        ):
            own.ask("publish", Path("x"), "whole")
        assert host.updates == 1


def test_a_learner_whose_run_has_left_it_in_a_call_is_busy_until_the_call_has_ended():
    host = Host()
    with served(host) as connect:
        other = connect(session="other/two")
        thread = asking(connect(), host)
        connect().leave()
        assert other.fault("other") == "it is busy with call 1, 'update' of an earlier start"
        host.go_on.set()
        thread.join()
        assert other.fault("other") == ""
        other.ask("update", [], 1, None)
        assert host.updates == 2


def test_a_request_without_what_a_learner_needs_is_refused_and_no_fault_of_its_own():
    right = {SESSION_HEADER: "run/one", NUMBER_HEADER: "1"}
    faulty: list[tuple[str, Any]] = [(name, None) for name in right]
    faulty += [(SESSION_HEADER, text) for text in ("", "run", "/one", "run/", ["run/one", "run/two"])]
    faulty += [(NUMBER_HEADER, text) for text in ("", "one", "-1", "1.0", "9" * 5_000, ["1", "1"])]
    host = Host()
    with served(host) as connect, httpx.Client(base_url=connect().url) as http:

        def reply(path: str, headers: dict[str, Any]) -> tuple[int, str, str | None]:
            pairs = [(name, one) for name, value in headers.items() for one in _each(value)]
            answer = http.post(path, headers=[("Authorization", "Bearer key"), *pairs])
            assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
            problem = Problem.model_validate_json(answer.content)
            return answer.status_code, problem.code, problem.where

        for name, value in faulty:
            routes = ["/calls/update", "/stop"] + ["/leave"] * (name == SESSION_HEADER)
            for path in routes:
                expected = (400, "malformed_request", f"header {name}")
                assert reply(path, {**right, name: value}) == expected, (path, value)
        assert reply("/calls/none", right)[:2] == (404, "not_found")
    assert not host.begun.is_set()


def _each(value: Any) -> list[str]:
    """The values of a header that may be there once, several times, or not at all."""
    return value if isinstance(value, list) else [] if value is None else [value]


def test_a_learner_that_says_nothing_is_lost_after_its_deadline():
    told = r"nothing for 0\.1 s \(learner\.timeout_s\)"
    with served(Host()) as connect, pytest.raises(LearnerLost, match=told):
        connect(silence_s=0.1).ask("update", [], 1, None)
