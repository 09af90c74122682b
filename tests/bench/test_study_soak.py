"""The soak study: its clients see a step that was lost, and its judge what leaked."""

import argparse

from bench import study_soak
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.plugins import EnvironmentPlugin, PlugBoards, default_plug_boards
from task_app.protocols import ToolRequest
from tests.task_app.counting import KEY
from tests.task_app.served import served_app

NOTHING = [ToolRequest("interact_many", {"actions": ["noop"]})]
SIZE = study_soak.Size(seconds=9.0, idle_s=3.0, max_sessions=60)


class Forgetful(CrafterEnvironment):
    """Does nothing in its third decision."""

    decisions = 0

    def step(self, calls, *, invalid_reason=None):
        self.decisions += 1
        return super().step(NOTHING if self.decisions == 3 else calls, invalid_reason=invalid_reason)


async def tally(boards, monkeypatch, *, seconds):
    monkeypatch.setenv("ENVIRONMENT_API_KEY", KEY)
    async with served_app(boards) as (client, _):
        url = str(client.base_url)
        options = argparse.Namespace(client=url, seed=1, seconds=seconds, idle_s=60.0)
        return await study_soak.play_sessions(options)


async def test_clients_that_hang_up_and_ask_twice_find_no_step_lost_or_doubled(monkeypatch):
    found = await tally(default_plug_boards(), monkeypatch, seconds=1.0)
    assert found.wrong == []
    assert found.counts["steps"] > 0


async def test_clients_find_what_an_environment_lost(monkeypatch):
    ours = default_plug_boards()
    crafter = EnvironmentPlugin(CrafterConfig, Forgetful)
    boards = PlugBoards({**ours.environments, "crafter": crafter}, ours.policies)
    # They stop at the first finding, which is long before.
    found = await tally(boards, monkeypatch, seconds=60.0)
    assert "differs from the same environment in this process" in found.wrong[0]


def judged(**harm):
    found = study_soak.Found(memory=[(float(second), 100) for second in range(9)])
    left = {"at_the_end": 5, "after_idle_expiry": 0, "new_sessions_that_fit": 60}
    if "wrong" in harm:
        found.wrong.append(harm["wrong"])
    if "memory" in harm:
        found.memory[6:] = [(float(second), harm["memory"]) for second in (6, 7, 8)]
    left |= harm.get("left", {})
    return study_soak.results(SIZE, found, [1.0, 2.0, 3.0], left)


def test_what_was_lost_or_leaked_or_grew_does_not_hold():
    untouched = judged()
    assert untouched["step_ms"] == {"p50": 2.0, "p99": 3.0, "steps": 3}
    assert list(untouched["holds"].values()) == [True] * 3
    for harm, broken in (
        ({"wrong": "a step was lost"}, "no step lost or doubled, no answer differs"),
        ({"left": {"after_idle_expiry": 1}}, "no session leaked"),
        ({"left": {"new_sessions_that_fit": 59}}, "no session leaked"),
        ({"memory": 111}, "memory flat"),
    ):
        assert [name for name, holds in judged(**harm)["holds"].items() if not holds] == [broken]
