"""One client of the soak study: players that use every kind of session, misbehave, and check what they get.

Run by bench/study_soak.py, which kills it at random. It prints one line of JSON when it ends by itself.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.environments.crafter.rules import ACTIONS
from task_app.episode.actions import requests_from_wire

TEXT = "compact"
# A request that got none of these is sent again with its key: the server was killed, is starting, or is full.
FINAL = (200, 202, 404, 409, 422)
# The longest that a client waits for a server that is being restarted.
PATIENCE_S = 60.0


@dataclass
class Tally:
    """Counts of events, and the times of steps."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)


class Caller:
    """POSTs with an Idempotency-Key until there is an answer, with occasional hang-ups and repeats."""

    def __init__(self, session: aiohttp.ClientSession, chance: random.Random, tally: Tally) -> None:
        self._session = session
        self._chance = chance
        self._tally = tally

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        key, until_s = str(uuid.UUID(int=self._chance.getrandbits(128))), time.monotonic() + PATIENCE_S
        if self._chance.random() < 0.1:
            await self._hang_up(path, body, key)
        if self._chance.random() < 0.1:
            self._tally.counts["asked_twice"] += 1
            answers = await asyncio.gather(
                self._until(path, body, key, until_s), self._until(path, body, key, until_s)
            )
            self._tally.check(answers[0] == answers[1], f"{path}: two answers to one key: {answers}")
            return answers[0]
        return await self._until(path, body, key, until_s)

    async def _until(
        self, path: str, body: dict[str, Any], key: str, until_s: float
    ) -> tuple[int, dict[str, Any]]:
        while True:
            try:
                started_s = time.perf_counter()
                status, answer = await self._once(path, body, key)
                if status in FINAL:
                    if path == "/env/step":
                        self._tally.steps_ms.append(1e3 * (time.perf_counter() - started_s))
                    return status, answer
                self._tally.counts[f"status_{status}"] += 1
            except (aiohttp.ClientError, OSError, TimeoutError):
                self._tally.counts["no_answer"] += 1
            if time.monotonic() > until_s:
                raise SystemExit(f"{path}: no answer within {PATIENCE_S:g} s")
            await asyncio.sleep(0.05)

    async def _hang_up(self, path: str, body: dict[str, Any], key: str) -> None:
        self._tally.counts["hung_up"] += 1
        sent = asyncio.ensure_future(self._once(path, body, key))
        await asyncio.wait({sent}, timeout=self._chance.random() * 0.01)
        sent.cancel()
        await asyncio.gather(sent, return_exceptions=True)

    async def _once(self, path: str, body: dict[str, Any], key: str) -> tuple[int, dict[str, Any]]:
        async with self._session.post(path, json=body, headers={"Idempotency-Key": key}) as response:
            return response.status, json.loads(await response.read())


class Expired(Exception):
    """The session was idle for too long, which a busy machine may cause."""


class Player:
    """Plays an environment over HTTP and an equal one in this process, which must never differ.

    Args:
        call: how to ask.
        chance: of everything that it does.
        tally: where it goes on record.
        idle_s: after which its session may be gone.
    """

    def __init__(self, call: Caller, chance: random.Random, tally: Tally, idle_s: float) -> None:
        self._call, self._chance, self._tally, self._idle_s = call, chance, tally, idle_s
        self._used_s = time.monotonic()
        self._model = CrafterEnvironment(CrafterConfig(text=TEXT))
        self._calls: list[Any] = []
        self._env_id = ""

    async def play(self) -> None:
        try:
            await self._play()
        except Expired:
            self._tally.counts["expired"] += 1

    async def _ask(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked_s, before_s = time.monotonic(), self._used_s
        status, answer = await self._call.post(path, body)
        self._used_s = asked_s
        if status == 404 and time.monotonic() - before_s > self._idle_s:
            raise Expired
        return status, answer

    async def _play(self) -> None:
        seed = self._chance.randrange(20)
        status, made = await self._ask(
            "/env/create", {"env_name": "crafter", "seed": seed, "config": {"text": TEXT}}
        )
        self._tally.check(status == 200, f"create: {made}")
        self._env_id = made["env_id"]
        shown = self._model.reset(seed)
        self._tally.check(made["observation"]["text"] == shown.text, "the first observation differs")
        for _ in range(self._chance.randrange(1, 30)):
            if not await self._act():
                break
        if self._chance.random() < 0.8:  # the rest is left to the idle expiry
            status, _ = await self._ask("/env/terminate", {"env_id": self._env_id})
            self._tally.check(status == 200, f"terminate: {status}")
            self._tally.counts["terminated"] += 1

    async def _act(self) -> bool:
        """Take a step, or sometimes another action; return whether the episode goes on."""
        chosen = self._chance.random()
        if chosen < 0.04:
            await self._restored()
        elif chosen < 0.06:
            seed = self._chance.randrange(20)
            _, answer = await self._ask("/env/reset", {"env_id": self._env_id, "seed": seed})
            shown, self._calls = self._model.reset(seed), []
            self._tally.check(
                answer["observation"]["text"] == shown.text, "an observation after a reset differs"
            )
        return await self._step()

    async def _step(self) -> bool:
        actions = [self._chance.choice(ACTIONS) for _ in range(self._chance.randrange(1, 6))]
        call = [{"tool": "interact_many", "args": {"actions": actions}}]
        status, answer = await self._ask("/env/step", {"env_id": self._env_id, "tool_calls": call})
        if status != 200:
            self._tally.check(False, f"step: {status} {answer}")
            return False
        outcome = self._model.step(requests_from_wire(call))
        self._calls.append(call)
        turn, expected = answer["info"]["turn"], len(self._calls)
        self._tally.check(turn == expected, f"turn {turn}, expected {expected}: a step was lost or doubled")
        same = (answer["observation"]["text"], answer["env_rewards"]) == (
            outcome.observation.text,
            list(outcome.env_rewards),
        )
        self._tally.check(same, f"decision {turn} differs from the same environment in this process")
        self._tally.counts["steps"] += 1
        return not answer["done"]

    async def _restored(self) -> None:
        """Continue in a copy, and end the old session."""
        _, taken = await self._ask("/env/snapshot", {"env_id": self._env_id})
        status, copy = await self._ask("/env/restore", {"snapshot": taken["snapshot"]})
        self._tally.check(status == 200, f"restore: {copy}")
        await self._ask("/env/terminate", {"env_id": self._env_id})
        self._env_id = copy["env_id"]
        self._tally.counts["restored"] += 1


async def rollouts(session: aiohttp.ClientSession, chance: random.Random, tally: Tally) -> None:
    """A small run of scripted episodes, fetched and acknowledged; one whose app was killed is left alone."""
    run_id = uuid.UUID(int=chance.getrandbits(128)).hex
    asked = [
        {"rollout_id": f"{run_id}/{i}", "run_id": run_id, "start": {"seed": chance.randrange(20)},
         "env": {"env_name": "crafter"}, "policy": {"policy_name": "crafter_teacher"},
         "limits": {"max_decisions": 10}}
        for i in range(4)
    ]  # fmt: skip
    try:
        async with session.post("/rollouts", json={"rollouts": asked}) as response:
            if response.status != 202:
                return
        unfinished, found, cursor = len(asked), 0, ""
        while unfinished:
            params = {"run_id": run_id, "cursor": cursor, "wait_s": "5"}
            async with session.get("/rollouts", params=params) as response:
                page = json.loads(await response.read())
                if response.status != 200:
                    return
            ids = [rollout["rollout_id"] for rollout in page["rollouts"]]
            found, unfinished, cursor = found + len(ids), page["unfinished"], page["cursor"]
            await (await session.post("/rollouts/ack", json={"run_id": run_id, "rollout_ids": ids})).read()
        tally.counts["rollouts"] += found
    except (aiohttp.ClientError, OSError, TimeoutError):
        tally.counts["runs_cut"] += 1
        await asyncio.sleep(0.1)


async def client(options: argparse.Namespace) -> Tally:
    tally, until_s = Tally(), time.monotonic() + options.seconds
    headers = {"X-API-Key": os.environ["ENVIRONMENT_API_KEY"]}
    timeout = aiohttp.ClientTimeout(total=30.0)
    async with aiohttp.ClientSession(options.url, headers=headers, timeout=timeout) as session:

        async def loop(number: int) -> None:
            chance = random.Random(f"{options.seed}/{number}")
            call = Caller(session, chance, tally)
            while time.monotonic() < until_s and not tally.wrong:
                if number == 0:
                    await rollouts(session, chance, tally)
                else:
                    await Player(call, chance, tally, options.idle_s).play()

        await asyncio.gather(*(loop(number) for number in range(options.players)))
    return tally


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--idle-s", type=float, required=True, help="the task app's session_idle_s")
    parser.add_argument("--players", type=int, default=6)
    options = parser.parse_args(arguments)
    tally = asyncio.run(client(options))
    print(json.dumps({"counts": tally.counts, "wrong": tally.wrong[:10], "steps_ms": tally.steps_ms}))
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
