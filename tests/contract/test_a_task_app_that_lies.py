"""A real task app behind a proxy that spoils some rollouts: the run says so, and an honest one mends it."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from tests.conftest import ListReporter, at_the_task_app, rows_of, task_app, tiny_job, warmed_up
from trainer_backend.errors import SegmentError, TooManyLost, TrainerError
from trainer_backend.rundir.layout import create_run
from trainer_backend.start import run_job

JOB: dict[str, Any] = {
    "training__iterations": 1,
    "evaluation__instances": 1,
    "rollout__max_turns": 2,
}


def without_outcome(episode: dict[str, Any]) -> None:
    episode["outcome_reward"] = float("nan")


def with_unknown_ids(episode: dict[str, Any]) -> None:
    episode["steps"][0]["policy_logprobs"]["token_ids"][0] = 1_000_000


class Proxy:
    """Passes all on to the task app of the tests, and spoils the first sibling of each training group."""

    def __init__(self) -> None:
        self.spoil: Callable[[dict[str, Any]], None] | None = None
        self.asked: list[str] = []

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with ClientSession() as self._session:
            try:
                yield f"http://127.0.0.1:{runner.addresses[0][1]}"
            finally:
                await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        if (request.method, request.path) == ("POST", "/rollouts"):
            ids = [item["rollout_id"] for item in json.loads(body)["rollouts"]]
            self.asked += [name.rpartition("/train/")[2] for name in ids if "/train/" in name]
        headers = {"X-API-Key": request.headers["X-API-Key"], "Content-Type": "application/json"}
        url = task_app() + request.path_qs
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            text, status = await answer.text(), answer.status
        if self.spoil is not None and (request.method, request.path) == ("GET", "/rollouts"):
            page = json.loads(text)
            for rollout in page["rollouts"]:
                if "/train/" in rollout["rollout_id"] and not rollout["sibling"]:
                    self.spoil(rollout["trajectory"])
            text = json.dumps(page)
        return web.Response(text=text, status=status, content_type="application/json")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("spoil", "error", "told"),
    [
        (without_outcome, TooManyLost, r"2 of 8 rollouts lost: .*its outcome_reward is nan"),
        (with_unknown_ids, SegmentError, r"token id 1000000, but the actor knows the ids 0 to \d+"),
    ],
)
async def test_what_no_honest_task_app_sends_ends_the_run_and_an_honest_one_takes_it_to_its_end(
    trained: Any,
    tmp_path: Path,
    spoil: Callable[[dict[str, Any]], None],
    error: type[TrainerError],
    told: str,
):
    proxy, reporter = Proxy(), ListReporter()
    async with proxy.served() as url:
        job = at_the_task_app(tiny_job(**JOB, **warmed_up(trained)), url)
        run = create_run(job, tmp_path / "run")
        proxy.spoil = spoil
        with pytest.raises(error, match=told):
            await run_job(job, run, reporter, resume=False)
        # Each spoiled one was planned once more, with the same seeds.
        assert sorted(name for name in proxy.asked if ":" in name) == ["1/0/0:1", "1/1/0:1"]
        assert run.rejected_file("iteration_1").exists() == (spoil is with_unknown_ids)
        proxy.spoil, proxy.asked = None, []
        progress, _ = await run_job(job, run, reporter, resume=True)
    assert progress.iteration == 1
    assert sorted(proxy.asked) == ["1/0/0", "1/1/0"], "the other six are in the spool"
    (row,) = rows_of(run, "iteration")
    assert (row["rollout/finished"], row["rollout/failed"]) == (8.0, 0.0)
