"""A conversation that grows: what the model wrote, then the result of each call, or what the user answers.

The states of source 3: PENDING is `prompt`, PROCESSING_TOOLS and INTERACTING are `carry_out`. Tools come
first; who answers as the user speaks where no call is left (DESIGN.md 4.11, 4.12).
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

import structlog

from shared_schemas.json_text import encodable
from shared_schemas.messages import Message
from shared_schemas.rewards import RewardPart
from shared_schemas.rollouts import MultiTurn
from shared_schemas.trajectory import StepData, UserAnswer
from task_app.episode.actions import Choice, ReadAction
from task_app.episode.context_tools import Budget, apply, context_specs
from task_app.episode.history import Change, History
from task_app.episode.prompts import Carried, Execute, Prompt, opened_with
from task_app.errors import CriticalError, boundary
from task_app.interactions.replies import InteractionReply
from task_app.protocols import ConversationalEnvironment, DecisionOutcome, Observation, PastDecision

log = structlog.get_logger("task_app")

NOT_RUN = "error: not carried out: the episode had ended before"
LAST_SCORE = "last turn score: of the last answer, by the interaction"


class Answering(Protocol):
    """An interaction at work: `task_app.interactions.live.LiveInteraction`."""

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """Answer the last assistant message as the user, and score it."""


class Conversation:
    """A conversational environment, its history, and who answers as the user.

    Args:
        environment: opens the conversation; its calls have a result each.
        multi_turn: limits, and whether the model may edit its context.
        interaction: answers where no call is left, opened for this episode; None: the environment, or nobody.
        opening: messages of the task, before those that the environment opens with.
        clock: seconds that only grow.
    """

    past: Sequence[PastDecision] = ()

    def __init__(
        self,
        environment: ConversationalEnvironment,
        multi_turn: MultiTurn,
        interaction: AbstractAsyncContextManager[Answering] | None = None,
        opening: Sequence[Message] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._environment = environment
        self._opening = opening
        self._clock = clock
        self._multi_turn = multi_turn
        self.context_length_penalty = multi_turn.context_length_penalty
        self._binding = interaction
        self._interaction: Answering | None = None
        self._context_tools = multi_turn.context_tools if multi_turn.statelm_enabled else ()
        self.tools = environment.tools() + context_specs(self._context_tools)
        self._user_turns = 0
        self._last_score = 0.0
        self.history: History
        # What the last prompt showed.
        self._shown = 0
        self._changes: Mapping[int, Change] = {}

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        if self._binding is None:
            yield
            return
        async with self._binding as self._interaction:
            yield

    def begin(self, past: Sequence[PastDecision]) -> None:
        with boundary("environment.opening"):
            opening = opened_with(self._opening, self._environment.opening())
            self.history = History.opened(opening, shows_ids=self._multi_turn.statelm_enabled)

    def prompt(self, observation: Observation) -> Prompt:
        messages, changes = self.history.view(), self.history.changes()
        ids = (self._changes.keys() | changes.keys()) & set(range(self._shown))
        changed = {
            number: messages[number]
            for number in sorted(ids)
            if self._changes.get(number) is not changes.get(number)
        }
        found = Prompt(messages, self._shown, changed, self.history.view)
        self._shown, self._changes = len(messages), changes
        return found

    async def carry_out(
        self, choice: Choice, read: ReadAction, before: Observation, execute: Execute, budget: Budget
    ) -> Carried:
        own = tuple(call for call in read.requests if not self._is_the_loops(call.name))
        if own or not read.requests:
            outcome = await execute(replace(read, requests=own))
        else:
            outcome = DecisionOutcome(replace(before, reward_last_step=0.0), env_rewards=())
        self.history = self.history.with_message(_spoken(choice, read))
        if read.requests:
            return Carried(self._answer_calls(read, outcome, budget))
        if read.terminate:
            return Carried(outcome)
        return await self._answer_text(outcome)

    def remember(self, step: StepData, before: StepData | None) -> None:
        step.recall(self.history.full_history)

    def outcome(self) -> tuple[float, str]:
        return self._last_score, LAST_SCORE

    def kept(self) -> dict[str, Any]:
        return {
            "full_history": self.history.full_history(),
            "deleted_msg_ids": self.history.deleted_msg_ids,
            "had_delete_operation": self.history.had_delete_operation,
        }

    def _is_the_loops(self, tool: str) -> bool:
        return tool in self._context_tools

    def _answer_calls(self, read: ReadAction, outcome: DecisionOutcome, budget: Budget) -> DecisionOutcome:
        """Give every call its result, in order; the environment's calls were carried out before."""
        results, texts = self._results(read, outcome), []
        invalid_reason = outcome.invalid_reason
        ended_by = _ended_by(results) if outcome.terminated or outcome.truncated else None
        for index, (call, request) in enumerate(zip(read.tool_calls, read.requests, strict=True)):
            fields = None
            if index in results:
                text = results[index]
            elif ended_by is not None and index > ended_by:
                text = NOT_RUN
            else:
                applied = apply(self.history, request, budget=budget)
                self.history, text, fields = applied.history, applied.text, applied.fields
                invalid_reason = invalid_reason or applied.refused
                if applied.edited:
                    log.info("context_edited", tool=request.name, result=text, used_tokens=budget.used_tokens)
            self.history = self.history.with_result(call, text, fields=fields)
            texts.append(text)
        return replace(outcome, invalid_reason=invalid_reason, results=tuple(texts))

    def _results(self, read: ReadAction, outcome: DecisionOutcome) -> dict[int, str]:
        """The environment's result of each of its own calls, by the call's place in the message."""
        own = [i for i, request in enumerate(read.requests) if not self._is_the_loops(request.name)]
        if len(own) != len(outcome.results):
            raise CriticalError(
                f"environment {self._environment.name!r} gave {len(outcome.results)} results for {len(own)} "
                "calls; step() owes each call one text in DecisionOutcome.results"
            )
        return dict(zip(own, outcome.results, strict=True))

    async def _answer_text(self, outcome: DecisionOutcome) -> Carried:
        """The environment where it refuses the text, else the interaction, else the environment."""
        over = outcome.terminated or outcome.truncated
        if outcome.invalid_reason is not None:
            self._say(f"error: {outcome.invalid_reason}")
            return Carried(outcome)
        if self._interaction is not None:
            return await self._interact(outcome, self._interaction)
        if outcome.result and not over:
            return Carried(outcome, user_is_silent=not self._speaks(outcome.result))
        return Carried(outcome if over else replace(outcome, terminated=True))

    async def _interact(self, outcome: DecisionOutcome, interaction: Answering) -> Carried:
        """Every answer is scored, also that after which nobody speaks any more (DESIGN.md 4.11)."""
        asked_s = self._clock()
        reply = await interaction.respond([entry.message for entry in self.history])
        took_s = self._clock() - asked_s
        self._last_score = reply.score if reply.score is not None else self._last_score
        parts = () if reply.score is None else (RewardPart(source="interaction", value=reply.score),)
        shown = not reply.should_terminate and self._speaks(reply.response)
        unshown = None if shown or not reply.response else reply.response
        told = UserAnswer(metadata=reply.metadata, unshown=unshown) if reply.metadata or unshown else None
        silent = not shown and not reply.should_terminate
        return Carried(outcome, parts, reply.should_terminate, silent, told, took_s)

    def _speaks(self, text: str) -> bool:
        """Add an answer of the user, whoever plays the user; False if no more answers are allowed."""
        limit = self._multi_turn.max_user_turns
        if limit is not None and self._user_turns >= limit:
            return False
        self._user_turns += 1
        self._say(text)
        return True

    def _say(self, text: str) -> None:
        self.history = self.history.with_message(Message(role="user", content=text))


def _ended_by(results: Mapping[int, str]) -> int:
    """The place of the call that ended the episode: what comes after an end is refused."""
    carried_out = [index for index, text in results.items() if not text.startswith("error: ")]
    return max(carried_out or results)


def _spoken(choice: Choice, read: ReadAction) -> Message:
    """What the model wrote, as the server gave it out: sent back like that, it is the same tokens."""
    content = read.text if read.text is not None else encodable(choice.action.get("content") or "")
    return Message(role="assistant", content=content, tool_calls=read.tool_calls or None)
