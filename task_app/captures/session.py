"""Records the model calls of one agent (a capture) as the decisions of one episode.

Each conversation of the agent is a *branch*. A call continues a branch if its messages begin with the
messages and the answer of the branch's last call, and no other call of the branch is running. Any other call
opens a new branch: for example the first call, a sub-agent's call, or a call after a compaction or with
another system prompt. Each branch has its own policy object, and therefore its own conversation at our
gateway, so that its token ids stay exact. Decisions are recorded in the order in which calls are answered.
"""

import asyncio
import json
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pydantic_core import to_json

from shared_schemas.chat import RESPONSE_FORMAT
from shared_schemas.messages import Message, ToolCall, ToolSpec
from shared_schemas.plain_text import encodable
from shared_schemas.rewards import StepRewards
from shared_schemas.rollouts import RolloutLimits
from shared_schemas.trajectory import RewardPart, StepData, StopReason, Trajectory
from task_app.captures.calls import Answer, Call, arguments_object
from task_app.episode.actions import Action, Choice
from task_app.episode.prompts import DecisionEffect, Prompt
from task_app.episode.records import Decision, mark_end, step_data
from task_app.episode.state_keys import EpisodeStateKeys
from task_app.episode.worker import ask
from task_app.errors import (
    ContextLengthExceeded,
    EpisodeFailed,
    EpisodeOver,
    InvalidRequest,
    PromptRefused,
    RewardConflict,
    TaskAppError,
    UnknownId,
    UnknownName,
    boundary,
)
from task_app.held import Held
from task_app.observing.spans import Spans
from task_app.policies.replies import count_shared
from task_app.protocols import (
    AgentPolicy,
    CountsTokens,
    DecisionOutcome,
    FollowsOptions,
    Observation,
    PolicyObservation,
    RestorablePolicy,
    policy_name,
)
from task_app.sessions.registry import SessionLock

OUTCOME = "reward: sum of the rewards that were given to the episode and to its calls"
_NOTHING_SEEN = Observation(text="", data={})
_EFFECT = DecisionEffect(DecisionOutcome(_NOTHING_SEEN, env_rewards=()))

# Largest sizes in a trajectory's JSON, in bytes: of everything but the decisions; of one decision's reward.
_AROUND_BYTES, _REWARD_BYTES = 1_024, 64

# Builds the policy of a branch; the argument is the branch's number, from 0.
MakePolicy = Callable[[int], AgentPolicy]


@dataclass(slots=True, eq=False)
class Branch:
    """A conversation of the agent, and the policy that answers its calls."""

    policy: AgentPolicy
    keys: tuple[int, ...] = ()
    """Hashes of the messages of the branch's last answered call, and of the answer to that call."""
    token_ids: tuple[int, ...] = ()
    """Token ids of the branch's last prompt and answer; empty if the policy returns no token ids."""
    size: int = 0
    """Size of the conversation's messages as JSON, in bytes."""
    is_busy: bool = True


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """The settings of a new capture."""

    env_name: str
    """Name of the environment that the trajectory reports."""
    make_policy: MakePolicy
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    seed: int = 0
    models: tuple[str, ...] = ()
    """Model names that the agent may request; empty allows any name."""
    state_keys: EpisodeStateKeys = field(default_factory=lambda: EpisodeStateKeys({}))
    spans: Spans = field(default_factory=Spans)
    max_bytes: int | None = None
    """Size limit of the trajectory. If set, calls are also refused while the service can hold no more bytes.
    None for the capture of a rollout, which has been accepted already and must be able to finish."""


class Capture:
    """Answers the model calls of one agent from the policy, and records them as one episode.

    `held` counts the bytes of all captures and rollouts of the service. If `rejects_form` is true, a call
    whose `response_format` the policy does not follow is refused; otherwise that setting is ignored.
    """

    def __init__(self, spec: CaptureSpec, held: Held, *, rejects_form: bool = False) -> None:
        self._rejects_form = rejects_form
        self.key = secrets.token_urlsafe(24)
        self.lock = SessionLock()
        self.capture_id = ""
        self.failure: TaskAppError | None = None
        # The last error about a prompt that was too long. Such an error does not fail the capture.
        self.too_long: ContextLengthExceeded | None = None
        self.over = asyncio.Event()
        self.stop_reason: StopReason | None = None
        self.steps: list[StepData] = []
        self.held_bytes, self._trajectory_bytes = 0, _AROUND_BYTES
        self._spec, self._held, self._start_s = spec, held, time.monotonic()
        self._wall_s = 0.0
        self._model = self._policy_name = ""
        self._branches: list[Branch] = []
        self._running = 0
        # All tool calls of the policy; `_call_key` makes the keys of this table.
        self._calls: dict[tuple[str, str, str], ToolCall] = {}
        self._call_ids: set[str] = set()
        self._tools: dict[str, ToolSpec] = {}
        self._ignored: dict[str, None] = {}
        # The limit because of which the last call was refused; None if the last call was answered.
        self.refused: StopReason | None = None
        self._rewards: dict[int, float] = {}
        self._episode_reward: float | None = None
        self._outcome_reward = 0.0
        # Message hashes and token ids of the last recorded decision.
        self._prompt_keys: tuple[int, ...] = ()
        self._token_ids: tuple[int, ...] = ()
        self.conversations: list[list[Message]] = []

    @property
    def models(self) -> tuple[str, ...]:
        return self._spec.models or ("policy",)

    async def call(self, call: Call) -> Answer:
        """Let the policy answer a model call, and record the answer as a decision.

        Raises:
            EpisodeOver: the capture has ended, or its decisions, time or bytes are used up.
            CapacityReached: this service can hold no more bytes.
            ContextLengthExceeded: the prompt is too long; the agent may continue with a shorter one.
            PromptRefused: the model's server refuses the prompt; the agent may continue with another one.
            UnknownName: the agent may not request this model.
            InvalidRequest: `rejects_form` is true, and the policy does not follow the call's response_format.
            EpisodeFailed: the policy could not be called. This error also fails the capture.
        """
        self._refuse(call)
        if self._calls:
            call = replace(call, messages=tuple(map(self._restore_calls, call.messages)))
        keys = tuple(map(_hash_message, call.messages))
        branch = self._find_branch(keys)
        self._running += 1
        try:
            start_s = time.monotonic()
            if dropped := self._options_without_effect(branch.policy, call):
                call = replace(call, ignored=(*call.ignored, *dropped))
            choice, action = await self._ask(branch, call)
            if left_out := choice.log_probs.get("ignored"):  # settings that our gateway did not apply
                call, dropped = replace(call, ignored=(*call.ignored, *left_out)), (*dropped, *left_out)
            with boundary("the record of a call"):
                answer = self._record(branch, call, keys, choice, action, time.monotonic() - start_s)
            return replace(answer, dropped=dropped) if dropped else answer
        except BaseException as exc:
            # The gateway may have stored an answer that did not arrive here. Therefore the branch's next call
            # uses a new policy object, which sends all token ids again and continues the sequence of seeds.
            policy, before = self._spec.make_policy(self._branches.index(branch)), branch.policy
            if isinstance(policy, RestorablePolicy) and isinstance(before, RestorablePolicy):
                policy.restore(before.snapshot())
            branch.policy = policy
            if isinstance(exc, EpisodeFailed) and not isinstance(exc, ContextLengthExceeded | PromptRefused):
                self.fail(exc)
            raise
        finally:
            self._running -= 1
            branch.is_busy = False

    async def count_tokens(self, call: Call) -> int:
        """Return the number of tokens of a call's prompt, without recording a decision.

        Raises:
            InvalidRequest: the policy cannot count tokens.
            UnknownName, EpisodeOver, EpisodeFailed: as in `call`, but the capture does not fail.
        """
        self._refuse_after_end()
        self.refuse_model(call.model)
        policy = self._spec.make_policy(0)
        if not isinstance(policy, CountsTokens):
            raise InvalidRequest(f"the policy {policy_name(policy)!r} counts no tokens", where="model")
        tools = [tool.model_dump(mode="json") for tool in call.tools]
        return await policy.count_tokens(call.messages, tools)

    def reward(self, value: float, *, turn: int | None = None, response_id: str | None = None) -> int | None:
        """Store a reward for the call that `turn` or `response_id` names, and return the call's turn.

        If neither is given, store the reward for the whole episode, and return None.

        Raises:
            UnknownId: `turn` or `response_id` names no answered call.
            RewardConflict: the call or the episode has a reward already.
            InvalidRequest: the sum of the rewards would not be finite.
            EpisodeOver: the capture has ended.
        """
        if self.stop_reason is not None or self.failure is not None:
            raise EpisodeOver("the capture has ended; rewards come before its end", hint=None)
        if response_id is not None:
            head, _, number = response_id.rpartition("-")
            is_ours = head.endswith(self.capture_id) and number.isdecimal()
            turn = int(number[:9]) if is_ours else 0
        outcome_reward = self._outcome_reward + value
        if not math.isfinite(outcome_reward):
            raise InvalidRequest(
                f"with {value:g} the rewards of this episode would add up to no finite number", where="reward"
            )
        if turn is None:
            _refuse_second(self._episode_reward, "the episode")
            self._episode_reward, self._outcome_reward = value, outcome_reward
            return None
        if not 1 <= turn <= len(self.steps):
            named, where = (response_id, "response_id") if response_id is not None else (str(turn), "turn")
            count = len(self.steps)
            known = f"turns 1 to {count}; ids end with -1 to -{count}" if count else "none so far"
            raise UnknownId("call", named, where=where, hint=f"answered: {known}")
        _refuse_second(self._rewards.get(turn), f"turn {turn}")
        self._rewards[turn], self._outcome_reward = value, outcome_reward
        return turn

    def end(self, reason: StopReason) -> None:
        """End the capture, so that later calls and rewards are refused; no effect if it is over already."""
        if self.stop_reason is None and self.failure is None:
            self.stop_reason = reason
            self._wall_s = time.monotonic() - self._start_s
            self.over.set()

    def fail(self, failure: TaskAppError) -> None:
        if self.stop_reason is None and self.failure is None:
            self.failure = failure
            self.over.set()

    def hold(self, size: int) -> None:
        """Add `size` bytes of JSON to the counts of this capture and of the service."""
        self.held_bytes += size
        self._held.total += size

    def trajectory(self) -> Trajectory:
        """Return the episode. The capture must have ended, with at least one decision."""
        reason = self.stop_reason
        assert reason is not None and self.steps, "it has ended, and made a call"
        steps = [_add_reward(step, self._rewards.get(step.turn)) for step in self.steps]
        steps[-1] = mark_end(
            _add_reward(steps[-1], self._episode_reward), reason, environment_truncated=False
        )
        warnings = []
        if self._ignored:
            names = ", ".join(sorted(self._ignored))
            warnings.append(f"settings of the agent without effect, since the policy's apply: {names}")
        if not self._rewards and self._episode_reward is None:
            warnings.append("neither this episode nor one of its calls has a reward")
        return Trajectory(
            env_name=self._spec.env_name,
            policy_name=self._policy_name,
            model=encodable(self._model),
            seed=self._spec.seed,
            tools=tuple(self._tools.values()),
            steps=tuple(steps),
            outcome_reward=self._outcome_reward,
            outcome_definition=OUTCOME,
            env_steps=0,
            terminated=steps[-1].terminated,
            truncated=steps[-1].truncated,
            stop_reason=reason,
            wall_s=self._wall_s,
            warnings=tuple(warnings),
        )

    def refuse_model(self, name: str) -> None:
        """Raise UnknownName if the agent may not request this model."""
        if self._spec.models and name not in self._spec.models:
            raise UnknownName("model", name, self._spec.models, where="model")

    def _refuse(self, call: Call) -> None:
        self._refuse_after_end()
        self.refuse_model(call.model)
        most = self._spec.limits.max_decisions
        if len(self.steps) + self._running >= most:
            self.refused = StopReason.MAX_DECISIONS
            raise EpisodeOver(f"all {most} calls of this episode are used up", hint="end it now")
        if self._spec.max_bytes is not None:
            self._held.check_room()

    def _restore_calls(self, message: Message) -> Message:
        """Replace the tool calls of a message by the policy's original tool calls.

        Clients may reformat the JSON text of the arguments, which would change hashes and token ids.
        """
        calls = tuple(self._calls.get(_call_key(call), call) for call in message.tool_calls or ())
        is_same = calls == (message.tool_calls or ())
        return message if is_same else message.model_copy(update={"tool_calls": calls})

    def _make_id_unique(self, call: ToolCall, turn: int) -> ToolCall:
        """Give the tool call a new id if an earlier one has the same id, because agents find calls by id."""
        while call.id in self._call_ids:
            call = call.model_copy(update={"id": f"{call.id}_{turn}"})
        self._call_ids.add(call.id)
        return call

    def _find_branch(self, keys: tuple[int, ...]) -> Branch:
        """Return the branch that a call continues, or a new one; `keys` are hashes of the call's messages.

        If the call continues several idle branches, the longest of them is returned.
        """
        candidates = [
            branch
            for branch in self._branches
            if not branch.is_busy and len(branch.keys) < len(keys) and keys[: len(branch.keys)] == branch.keys
        ]
        branch = max(candidates, key=lambda branch: len(branch.keys), default=None)
        if branch is None:
            branch = Branch(self._spec.make_policy(len(self._branches)))
            self._branches.append(branch)
            self.conversations.append([])
        branch.is_busy = True
        return branch

    def _options_without_effect(self, policy: AgentPolicy, call: Call) -> tuple[str, ...]:
        if not call.options:  # return early for most calls, because isinstance with a protocol is slow
            return ()
        followed = policy.call_options if isinstance(policy, FollowsOptions) else frozenset()
        dropped = sorted(call.options.keys() - followed)
        if RESPONSE_FORMAT in dropped and self._rejects_form:
            raise InvalidRequest(
                "no form of the answer is enforced: a grammar would change the distribution that is trained",
                where=RESPONSE_FORMAT,
                hint="ask for it in the prompt, or let the operator set TURNWISE_STRUCTURED_OUTPUT=drop",
            )
        return tuple(dropped)

    async def _ask(self, branch: Branch, call: Call) -> tuple[Choice, Action]:
        observation = PolicyObservation(
            call.messages, {}, max_tokens=call.max_tokens, stop=call.stop, options=call.options
        )
        tools = [tool.model_dump(mode="json") for tool in call.tools]
        rest_s = self._spec.limits.timeout_s - (time.monotonic() - self._start_s)
        try:
            with self._spec.spans.decision(branch.policy, None, conversation=self.capture_id) as notes:
                reply = await ask(branch.policy, observation, tools, timeout_s=rest_s)
                # The turn is known only now: of several waiting calls, the first to be answered is the next.
                notes.answer(reply, turn=len(self.steps) + 1)
        except ContextLengthExceeded as exc:
            self.refused, self.too_long = StopReason.CONTEXT_LENGTH, exc
            raise
        if reply is None:
            self.refused = StopReason.DEADLINE
            raise EpisodeOver("limits.timeout_s passed before the policy had answered", hint=None)
        self._refuse_after_end()
        return reply

    def _refuse_after_end(self) -> None:
        if self.failure is not None or self.stop_reason is not None:
            raise EpisodeOver("the capture has ended, and answers no more calls", hint=None)

    def _record(
        self,
        branch: Branch,
        call: Call,
        keys: tuple[int, ...],
        choice: Choice,
        action: Action,
        policy_s: float,
    ) -> Answer:
        turn = len(self.steps) + 1
        if action.tool_calls:
            calls = tuple(self._make_id_unique(tool_call, turn) for tool_call in action.tool_calls)
            action = replace(action, tool_calls=calls)
        choice, ids = self._rebase_ids(branch, choice)
        prompt = Prompt(call.messages, count_shared(keys, self._prompt_keys))
        decision = Decision(
            turn=turn,
            before=_NOTHING_SEEN,
            prompt=prompt,
            choice=choice,
            action=action,
            effect=_EFFECT,
            state_keys=self._spec.state_keys.next(_NOTHING_SEEN, prompt),
            policy_s=policy_s,
        )
        self._policy_name = policy_name(branch.policy)
        step = step_data(decision, policy_name=self._policy_name, step_rewards=StepRewards())
        tools = {tool.function.name: tool for tool in call.tools}
        new_tools = [tool for name, tool in tools.items() if name not in self._tools]
        self._hold_step(step, [*new_tools, *(set(call.ignored) - self._ignored.keys())])
        self.steps.append(step)
        self._token_ids, branch.token_ids = ids, ids or branch.token_ids
        if self.refused not in (StopReason.MAX_DECISIONS, StopReason.DEADLINE):  # a shorter prompt may fit
            self.refused = None
        self._prompt_keys = keys
        self._tools |= tools
        self._ignored |= dict.fromkeys(call.ignored)
        self._calls |= {_call_key(tool_call): tool_call for tool_call in action.tool_calls}
        self._model = choice.log_probs.get("model") or self._model
        text = encodable(choice.action.get("content") or "")
        message = Message(role="assistant", content=text, tool_calls=action.tool_calls or None)
        branch.keys = (*keys, _hash_message(message))
        self.conversations[self._branches.index(branch)] = conversation = [*call.messages, message]
        before, branch.size = branch.size, len(to_json(conversation))
        self.hold(branch.size - before)
        return self._make_answer(turn, call, text, action, choice)

    def _make_answer(self, turn: int, call: Call, text: str, action: Action, choice: Choice) -> Answer:
        ending = "tool_calls" if action.tool_calls else "stop"
        is_cut = choice.log_probs.get("finish_reason") == "length" and not action.tool_calls
        return Answer(
            call_id=f"{self.capture_id}-{turn}",
            turn=turn,
            created=int(time.time()),
            model=call.model or self._model,
            text=text,
            tool_calls=action.tool_calls,
            finish_reason="length" if is_cut else ending,
            prompt_tokens=choice.log_probs.get("prompt_tokens") or 0,
            completion_tokens=choice.log_probs.get("completion_tokens") or 0,
            ignored=call.ignored,
        )

    def _hold_step(self, step: StepData, others: Sequence[ToolSpec | str]) -> None:
        """Count the bytes of a decision, and of `others`: its tools and ignored settings, if they are new.

        Raise EpisodeOver if the trajectory would exceed the limit `max_bytes`.
        """
        size = len(to_json([step, *others]))
        total, most = self._trajectory_bytes + size + _REWARD_BYTES, self._spec.max_bytes
        if most is not None and total > most:
            raise EpisodeOver(
                f"with this answer the trajectory would have {total} bytes, of max_reply_bytes = {most}",
                hint="end it now, and read it",
            )
        self._trajectory_bytes = total
        self.hold(size)

    def _rebase_ids(self, branch: Branch, choice: Choice) -> tuple[Choice, tuple[int, ...]]:
        """Encode the prompt's token ids relative to the previous decision of the episode.

        The policy returns the prompt without the ids that it shares with the last call of its branch. A
        trajectory stores the prompt without the ids that it shares with the previous decision, which may
        belong to another branch. Return the changed choice, and all token ids of prompt and answer.
        """
        tokens = choice.log_probs
        if tokens.get("prompt_token_ids") is None or tokens.get("token_ids") is None:
            return choice, ()
        whole = (*branch.token_ids[: tokens.get("prompt_ids_reused") or 0], *tokens["prompt_token_ids"])
        reused = count_shared(whole, self._token_ids)
        fields = {"prompt_ids_reused": reused, "prompt_token_ids": whole[reused:]}
        return replace(choice, log_probs={**tokens, **fields}), (*whole, *tokens["token_ids"])


def _refuse_second(earlier: float | None, whose: str) -> None:
    if earlier is not None:
        raise RewardConflict(
            f"{whose} has the reward {earlier:g} already; a second one does not replace it or add to it",
            where="turn",
            hint="a retry sends the same Idempotency-Key; parts of a reward are added up before",
        )


def _hash_message(message: Message) -> int:
    """Return a hash of a message, without the ids of its tool calls; it is valid in this process only."""
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    name = (message.role, message.content or "", message.name, message.tool_call_id)
    return hash((*name, *calls))


def _call_key(call: ToolCall) -> tuple[str, str, str]:
    return call.id, call.function.name, json.dumps(arguments_object(call), sort_keys=True)


def _add_reward(step: StepData, value: float | None) -> StepData:
    if value is None:
        return step
    parts = (*step.reward_parts, RewardPart(source="user", value=value))
    return step.model_copy(update={"reward_parts": parts})
