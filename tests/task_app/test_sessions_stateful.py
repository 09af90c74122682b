"""Whatever is done to sessions, in whatever order: the service answers what plain sessions would.

The plain ones know no snapshots: a copy of theirs plays the whole log again (plain_sessions.py).
"""

import asyncio
import json
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, rule

from task_app.plugins import default_plug_boards
from tests.task_app.counting import running_app
from tests.task_app.plain_sessions import PlainEnvironment, PlainPolicy, told
from tests.task_app.playing import ON, act

CAPACITY = 8
LENGTH = 30
SEEDS = st.integers(0, 3)
ACTIONS = st.lists(
    st.sampled_from(["noop", "move_left", "move_right", "move_up", "move_down", "do", "sleep", "fly"]),
    min_size=1,
    max_size=8,
)


class Sessions(RuleBasedStateMachine):
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


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=10,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
