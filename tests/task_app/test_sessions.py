"""Sessions: how idle ones are forgotten; and whatever is done to some, in whatever order.

The service answers what plain sessions would. These know no snapshots: a copy plays the whole log again.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, rule

from shared_schemas.rewards import decision_rewards
from task_app.environments.crafter.environment import CrafterConfig, CrafterEnvironment
from task_app.errors import CapacityReached, UnknownId
from task_app.plugins import default_plug_boards
from task_app.policies.random_calls import random_call
from task_app.protocols import PastDecision, ToolRequest
from task_app.sessions.registry import SessionLock, Sessions
from tests.task_app.counting import Clock, running_app
from tests.task_app.playing import ON, act


class Session:
    def __init__(self):
        self.lock = SessionLock()


async def test_a_session_expires_after_its_idle_time_unless_it_is_used_or_held():
    clock = Clock()
    sessions = Sessions("env", capacity=9, idle_s=10.0, clock=clock)
    added = {sessions.add(session): session for session in (Session(), Session(), Session())}
    used, held, idle = added
    async with added[held].lock:
        clock.now_s = 6.0
        assert sessions.get(used, where="env_id") is added[used]
        clock.now_s = 10.0
        assert sessions.expire() == {}, "ten seconds are not yet too long"
        clock.now_s = 10.5
        assert sessions.expire() == {idle: added[idle]}
        assert sessions.get(used, where="env_id") is added[used]
        with pytest.raises(UnknownId, match=idle):
            sessions.get(idle, where="env_id")
        clock.now_s = 35.0
        assert sessions.expire() == {used: added[used]}, "a session in use stays"
    clock.now_s = 45.0
    assert sessions.expire() == {}, "ten seconds since its release are not yet too long"
    clock.now_s = 45.5
    assert sessions.expire() == {held: added[held]}


def test_an_expired_session_makes_room():
    clock = Clock()
    sessions = Sessions("policy", capacity=1, idle_s=1.0, clock=clock)
    sessions.add(Session())
    with pytest.raises(CapacityReached, match="1 policy sessions"):
        sessions.add(Session())
    clock.now_s = 2.0
    sessions.expire()
    session = Session()
    second = sessions.add(session)
    assert sessions.find(second) is session
    assert sessions.remove(second, where="policy_id") is session
    assert sessions.find(second) is None


PAST_SHOWN = 3


@dataclass
class PlainEnvironment:
    """An environment session. `log` is all that was done since the reset; a copy does it again."""

    config: dict[str, Any]
    seed: int
    emits: bool = False
    log: list[tuple[str, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.over, self.step_idx, self.metadata = False, 0, {}
        self._environment = CrafterEnvironment(CrafterConfig(**self.config))
        self.observation = self._environment.reset(self.seed)
        self._past: list[PastDecision] = []
        log, self.log = self.log, []
        for actions in log:
            self.step(actions)

    def copy(self) -> "PlainEnvironment":
        # Its switches are its own from here on, and what was told of the last decision stays told.
        copied = PlainEnvironment(self.config, self.seed, self.emits, list(self.log))
        copied.metadata = self.metadata
        return copied

    def step(self, actions: Sequence[str]) -> dict[str, Any]:
        """The parts of POST /env/step's answer that tell everything that happened."""
        request = ToolRequest("interact_many", {"actions": list(actions)}, "")
        outcome = self._environment.step([request])
        self.log.append(tuple(actions))
        turn, before, after = len(self.log), self.observation, outcome.observation
        self.metadata = {}
        if self.emits:
            record = decision_rewards(before.achievements_counts, after.achievements_counts, turn=turn)
            self.metadata = {"decision_rewards": record.model_dump(mode="json")}
        self.observation = after
        self.over = outcome.terminated or outcome.truncated
        self.step_idx += len(outcome.env_rewards)
        self._past.append(PastDecision((request,), outcome))
        return self.shown() | {
            "done": self.over,
            "env_rewards": list(outcome.env_rewards),
            "turn": turn,
            "invalid_reason": outcome.invalid_reason,
        }

    def shown(self) -> dict[str, Any]:
        """What a session shows at any time."""
        return {
            "text": self.observation.text,
            "data": self.observation.data,
            "counts": self.observation.achievements_counts,
            "reward_last_step": self.observation.reward_last_step,
            "step_idx": self.step_idx,
            "metadata": self.metadata,
        }

    def prompt(self) -> list[dict[str, Any]]:
        """The messages of the next decision."""
        messages = self._environment.messages(self.observation, self._past[-PAST_SHOWN:])
        return [message.model_dump(mode="json", exclude_none=True) for message in messages]

    def tools(self) -> list[dict[str, Any]]:
        return [tool.model_dump(mode="json") for tool in self._environment.tools()]


@dataclass
class PlainPolicy:
    """A session of the random policy: its seed, and how often it decided."""

    seed: int
    env_id: str
    decisions: int = 0

    def next_actions(self, environment: PlainEnvironment) -> list[str]:
        """Drawn from the start every time: the tool is always the same, so is the number of draws."""
        source = random.Random(self.seed)
        for _ in range(self.decisions + 1):
            _, arguments = random_call(environment.tools(), source, longest=8)
        self.decisions += 1
        return arguments["actions"]


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """The same parts of what the service answered."""
    observation, info = answer["observation"], answer["info"]
    parts = {
        "text": observation["text"],
        "data": observation["data"],
        "counts": observation["achievements_counts"],
        "reward_last_step": observation["reward_last_step"],
        "step_idx": answer["step_idx"],
        "metadata": answer["metadata"],
    }
    if "env_rewards" in answer:
        parts |= {
            "done": answer["done"],
            "env_rewards": answer["env_rewards"],
            "turn": info["turn"],
            "invalid_reason": info["invalid_reason"],
        }
    return parts


CAPACITY = 8
LENGTH = 30
SEEDS = st.integers(0, 3)
ACTIONS = st.lists(
    st.sampled_from(["noop", "move_left", "move_right", "move_up", "move_down", "do", "sleep", "fly"]),
    min_size=1,
    max_size=8,
)


class AnyOrder(RuleBasedStateMachine):
    """Every rule asks the service and the plain sessions, and compares; refusals are foretold too."""

    env_ids = Bundle("env_ids")
    policy_ids = Bundle("policy_ids")
    env_snapshots = Bundle("env_snapshots")
    policy_snapshots = Bundle("policy_snapshots")

    def __init__(self) -> None:
        super().__init__()
        self.environments: dict[str, PlainEnvironment] = {}
        self.policies: dict[str, PlainPolicy] = {}
        self.loop = asyncio.new_event_loop()
        self.app = running_app(default_plug_boards(), max_sessions=CAPACITY, log_level="error")
        self.client: httpx.AsyncClient = self.loop.run_until_complete(self.app.__aenter__())

    def teardown(self) -> None:
        self.loop.run_until_complete(self.app.__aexit__(None, None, None))
        self.loop.close()

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        answer = self.loop.run_until_complete(self.client.post(path, json=body))
        return answer.status_code, answer.json()

    def has_room(self, sessions: dict[str, Any], status: int, new: int = 1) -> bool:
        """Whether `new` more fit; if not, the answer must say so."""
        full = len(sessions) + new > CAPACITY
        assert (status == 429) is full
        return not full

    def look(self, env_id: str) -> None:
        """The prompt of the next decision, through a policy that is there for that alone."""
        plain = self.environments[env_id]
        if plain.over or len(self.policies) == CAPACITY:
            return
        _, made = self.post("/policy/create", policy_name="random", bound_env_id=env_id)
        _, answer = self.post("/policy/step", policy_id=made["policy_id"], dry_run=True)
        assert answer["meta"]["messages"] == plain.prompt()
        assert answer["meta"].get("decision_rewards") == plain.metadata.get("decision_rewards")
        self.post("/policy/terminate", policy_id=made["policy_id"])

    @initialize(target=env_ids, seed=SEEDS)
    def first(self, seed: int) -> Any:
        return self.create(seed, True, "full")

    @rule(target=env_ids, seed=SEEDS, emits=st.booleans(), text=st.sampled_from(["full", "compact"]))
    def create(self, seed: int, emits: bool, text: str) -> Any:
        config = {"text": text, "length": LENGTH}
        switches = {"step_rewards": ON} if emits else {}
        status, answer = self.post("/env/create", env_name="crafter", seed=seed, config=config | switches)
        if not self.has_room(self.environments, status):
            return multiple()
        plain = PlainEnvironment(config, seed, emits)
        assert told({**answer, "metadata": {}}) == plain.shown()
        self.environments[answer["env_id"]] = plain
        return answer["env_id"]

    @rule(env_id=env_ids, actions=ACTIONS)
    def step(self, env_id: str, actions: list[str]) -> None:
        status, answer = self.post("/env/step", env_id=env_id, tool_calls=act(*actions))
        plain = self.environments.get(env_id)
        if plain is None or plain.over:
            assert status == (404 if plain is None else 409)
        else:
            assert told(answer) == plain.step(actions)

    @rule(env_id=env_ids, seed=SEEDS)
    def reset(self, env_id: str, seed: int) -> None:
        status, answer = self.post("/env/reset", env_id=env_id, seed=seed)
        if env_id not in self.environments:
            assert status == 404
            return
        old = self.environments[env_id]
        self.environments[env_id] = plain = PlainEnvironment(old.config, seed, old.emits)
        assert told({**answer, "metadata": {}}) == plain.shown()

    @rule(env_id=consumes(env_ids))
    def terminate(self, env_id: str) -> None:
        self.post("/env/terminate", env_id=env_id)
        self.environments.pop(env_id, None)

    @rule(target=env_snapshots, env_id=env_ids)
    def snapshot(self, env_id: str) -> Any:
        status, answer = self.post("/env/snapshot", env_id=env_id)
        if env_id not in self.environments:
            assert status == 404
            return multiple()
        return answer["snapshot_id"], answer["snapshot"], self.environments[env_id].copy()

    @rule(target=env_ids, kept=env_snapshots, by_id=st.booleans())
    def restore(self, kept: tuple[str, str, PlainEnvironment], by_id: bool) -> Any:
        snapshot_id, snapshot, plain = kept
        body = {"snapshot_id": snapshot_id} if by_id else {"snapshot": snapshot}
        status, answer = self.post("/env/restore", **body)
        if not self.has_room(self.environments, status):
            return multiple()
        assert told(answer) == plain.shown()
        self.environments[answer["env_id"]] = plain.copy()
        self.look(answer["env_id"])
        return answer["env_id"]

    @rule(target=env_ids, env_id=env_ids, children=st.integers(1, 3))
    def branch(self, env_id: str, children: int) -> Any:
        status, answer = self.post("/branch", env_ids=[env_id], num_children=children)
        if env_id not in self.environments:
            assert status == 404
            return multiple()
        if not self.has_room(self.environments, status, children):
            return multiple()
        made = answer["env_branches"][env_id]
        self.environments |= {child: self.environments[env_id].copy() for child in made}
        self.look(made[-1])
        return multiple(*made)

    @rule(target=policy_ids, env_id=env_ids, seed=SEEDS)
    def make_policy(self, env_id: str, seed: int) -> Any:
        body = {"policy_name": "random", "config": {"seed": seed}, "bound_env_id": env_id}
        status, answer = self.post("/policy/create", **body)
        if not self.has_room(self.policies, status):
            return multiple()
        if env_id not in self.environments:
            assert status == 404
            return multiple()
        self.policies[answer["policy_id"]] = PlainPolicy(seed, env_id)
        return answer["policy_id"]

    @rule(policy_id=policy_ids)
    def decide(self, policy_id: str) -> None:
        """Look at the prompt, ask the policy, and let its environment carry the calls out."""
        policy = self.policies[policy_id]
        plain = self.environments.get(policy.env_id)
        status, answer = self.post("/policy/step", policy_id=policy_id, dry_run=True)
        if plain is None or plain.over:
            assert status == (404 if plain is None else 409)
            return
        assert answer["meta"]["messages"] == plain.prompt()
        assert answer["meta"].get("decision_rewards") == plain.metadata.get("decision_rewards")
        _, answer = self.post("/policy/step", policy_id=policy_id)
        actions = policy.next_actions(plain)
        assert answer["meta"]["turn"] == policy.decisions
        assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"actions": actions}
        self.step(policy.env_id, actions)

    @rule(policy_id=consumes(policy_ids))
    def forget_policy(self, policy_id: str) -> None:
        assert self.post("/policy/terminate", policy_id=policy_id)[0] == 200
        del self.policies[policy_id]

    @rule(target=policy_snapshots, policy_id=policy_ids)
    def snapshot_policy(self, policy_id: str) -> Any:
        _, answer = self.post("/policy/snapshot", policy_id=policy_id)
        policy = self.policies[policy_id]
        return answer["snapshot"], PlainPolicy(policy.seed, policy.env_id, policy.decisions)

    @rule(target=policy_ids, kept=policy_snapshots, env_id=env_ids)
    def restore_policy(self, kept: tuple[str, PlainPolicy], env_id: str) -> Any:
        snapshot, policy = kept
        status, answer = self.post("/policy/restore", snapshot=snapshot, bound_env_id=env_id)
        if not self.has_room(self.policies, status):
            return multiple()
        if env_id not in self.environments:
            assert status == 404
            return multiple()
        assert answer["turn"] == policy.decisions
        self.policies[answer["policy_id"]] = PlainPolicy(policy.seed, env_id, policy.decisions)
        return answer["policy_id"]

    @rule(targets=(policy_ids,), policy_id=policy_ids, children=st.integers(1, 2))
    def branch_both(self, policy_id: str, children: int) -> Any:
        """A policy with its environment: child by child, they belong together."""
        policy = self.policies[policy_id]
        body = {"env_ids": [policy.env_id], "policy_ids": [policy_id], "num_children": children}
        status, answer = self.post("/branch", **body)
        if policy.env_id not in self.environments:
            assert status == 404
            return multiple()
        if max(len(self.environments), len(self.policies)) + children > CAPACITY:
            assert status == 429
            return multiple()
        env_ids, policy_ids = answer["env_branches"][policy.env_id], answer["policy_branches"][policy_id]
        for env_id, child in zip(env_ids, policy_ids, strict=True):
            self.environments[env_id] = self.environments[policy.env_id].copy()
            self.policies[child] = PlainPolicy(policy.seed, env_id, policy.decisions)
        return multiple(*policy_ids)


TestSessions = AnyOrder.TestCase
TestSessions.settings = settings(
    max_examples=10,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
