"""What a long conversation costs beside its template and tokenizer: 100 turns, an edit at every 5th.

    python -m bench.conversation_speed [--limit-ms 20] [--growth 2.5]

A scripted model writes a tool call each turn, the tool answers, and every 5th turn the oldest tool result
that still stands becomes a stub. CPU time of this thread, best of 10:

    view         task_app.episode.history: appending, deleting, and the view of every turn
    gateway      trainer_backend.inference.conversations, without the time inside ChatRenderer
    segments     core.segments over the 100 decisions
    renderer     inside ChatRenderer: the chat template and the tokenizer, for comparison; with it, how often
                 the template ran and how many ids were encoded

view + gateway + segments of the whole episode are held to --limit-ms. Memory is what the gateway remembers of
one conversation, by tracemalloc; doubling the turns may multiply it by at most --growth. `sent` compares the
prompt ids that are sent with the whole prompts. Exit code 1 where a limit is passed.
"""

import json
import sys
import time
import tracemalloc
from dataclasses import dataclass, field
from typing import Any

from bench import kit
from shared_schemas.messages import FunctionCall, Message, ToolCall
from shared_schemas.trajectory import ObservationData, PolicyLogprobs, Sampling, StepData
from task_app.episode.history import Change, History
from trainer_backend.core.segments import build_segments
from trainer_backend.inference.answers import Answer, hash_message
from trainer_backend.inference.conversations import Conversations, Prompt, Turn
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.models import train_tokenizer

ROUNDS = 10
RESULT = "chunk {} of the document says that wood is found where trees grow and stone where tunnels are"
OPENING = (
    Message(role="system", content="You read a document with tools."),
    Message(role="user", content="Where is wood found? The document has 100 chunks."),
)


class TimedRenderer(ChatRenderer):
    """A renderer that adds up the time of its calls."""

    def __init__(self, *args: Any) -> None:
        self.spent_s, self.templates, self.encoded = 0.0, 0, 0
        super().__init__(*args)

    def prompt_text(self, *args: Any, **kwargs: Any) -> str:
        started = time.thread_time()
        text = super().prompt_text(*args, **kwargs)
        self.spent_s += time.thread_time() - started
        self.templates += 1
        return text

    def encode(self, text: str) -> list[int]:
        started = time.thread_time()
        ids = super().encode(text)
        self.spent_s += time.thread_time() - started
        self.encoded += len(ids)
        return ids


@dataclass
class Episode:
    """A played conversation with its costs."""

    renderer: TimedRenderer
    memory: Conversations = field(default_factory=lambda: Conversations(most=1))
    steps: list[StepData] = field(default_factory=list)
    view_s: float = 0.0
    gateway_s: list[float] = field(default_factory=list)
    whole_ids: int = 0
    sent_ids: int = 0

    def play(self, turns: int) -> None:
        history = History.start(OPENING, shows_ids=True)
        for turn in range(turns):
            call = ToolCall(
                id=f"call_{turn}",
                function=FunctionCall(name="readChunk", arguments=f'{{"chunk_id": {turn}}}'),
            )
            started = time.thread_time()
            view = history.view()
            self.view_s += time.thread_time() - started
            self._ask([message.model_dump(exclude_none=True) for message in view], call)
            started = time.thread_time()
            answer = Message(role="assistant", content="", tool_calls=(call,))
            history = history.with_message(answer).with_result(call, RESULT.format(turn))
            if turn % 5 == 4:
                oldest = 3 + 2 * (turn // 5)  # system, user, answer, result, ...
                history = history.with_edit({oldest: Change("deleted", history.stub(oldest))})
            self.view_s += time.thread_time() - started

    def _ask(self, messages: list[dict[str, Any]], call: ToolCall) -> None:
        """Send a prompt and return the answer."""
        raw = raw_answer(call)
        sampled = self.renderer.encode(raw + "<|end|>")
        inside, started = self.renderer.spent_s, time.thread_time()
        prompt = self.memory.prompt("r", messages, [], self.renderer)
        message = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
        answer = Answer(len(messages), hash_message(message), raw, "<|end|>")
        self.memory.remember("r", Turn.of(prompt, answer, sampled, self.renderer))
        self.gateway_s.append(time.thread_time() - started - (self.renderer.spent_s - inside))
        self.whole_ids += len(prompt.ids)
        self.sent_ids += len(prompt.ids) - prompt.reused
        self.steps.append(step(len(self.steps) + 1, prompt, sampled))


def step(turn: int, prompt: Prompt, sampled: list[int]) -> StepData:
    return StepData(
        turn=turn,
        observation_data=ObservationData(),
        action_taken={"type": "text"},
        policy_name="openai",
        sampling=Sampling(),
        policy_logprobs=PolicyLogprobs(
            prompt_ids_reused=prompt.reused,
            prompt_token_ids=tuple(prompt.ids[prompt.reused :]),
            token_ids=tuple(sampled),
            logprobs=(-0.5,) * len(sampled),
            finish_reason="stop",
            versions=((0, 0),),
        ),
    )


def renderer() -> TimedRenderer:
    history = History.start(OPENING, shows_ids=True)
    for turn in range(100):
        answer = Message(role="assistant", content=raw_answer(call_of(turn)), tool_calls=(call_of(turn),))
        history = history.with_message(answer).with_result(call_of(turn), RESULT.format(turn))
    return TimedRenderer(train_tokenizer([message.content or "" for message in history.view()], 1024))


def call_of(turn: int) -> ToolCall:
    function = FunctionCall(name="readChunk", arguments=f'{{"chunk_id": {turn}}}')
    return ToolCall(id=f"call_{turn}", function=function)


def raw_answer(call: ToolCall) -> str:
    """An answer with odd spaces, which no template writes."""
    return f'<tool_call>{{"name":"readChunk",  "arguments":{call.function.arguments}}}</tool_call>'


def measured(turns: int, within: TimedRenderer) -> dict[str, Any]:
    """Milliseconds of one episode."""
    within.spent_s, within.templates, within.encoded = 0.0, 0, 0
    episode = Episode(within)
    episode.play(turns)
    started = time.thread_time()
    segments = build_segments(episode.steps, rollout_id="r")
    segments_ms = 1e3 * (time.thread_time() - started)
    gateway_ms = 1e3 * sum(episode.gateway_s)
    return {
        "total_ms": 1e3 * episode.view_s + gateway_ms + segments_ms,
        "view_ms": 1e3 * episode.view_s,
        "gateway_ms": gateway_ms,
        "gateway_last_ten_ms_each": 1e2 * sum(episode.gateway_s[-10:]),
        "segments_ms": segments_ms,
        "segments": len(segments),
        "renderer_ms": 1e3 * within.spent_s,
        "templates": within.templates,
        "encoded_ids": within.encoded,
        "last_prompt_ids": len(episode.steps) and len(segments[-1]),
        "sent_share_of_whole_prompts": episode.sent_ids / episode.whole_ids,
    }


def remembered_bytes(turns: int, within: TimedRenderer) -> int:
    """Bytes that the gateway holds for a conversation of this many turns."""
    tracemalloc.start()
    try:
        episode = Episode(within)
        episode.play(turns)
        episode.steps.clear()
        held, _ = tracemalloc.get_traced_memory()
        episode.memory = Conversations(most=1)
        left, _ = tracemalloc.get_traced_memory()
        return held - left
    finally:
        tracemalloc.stop()


def main() -> int:
    arguments = kit.options(__doc__, ("--limit-ms", 20.0), ("--growth", 2.5))
    within = renderer()
    best = min((measured(100, within) for _ in range(ROUNDS)), key=lambda found: float(found["total_ms"]))
    held = {turns: remembered_bytes(turns, within) for turns in (50, 100, 200)}
    growth = held[200] / held[100]
    rounded = {name: round(value, 3) for name, value in best.items()}
    print(json.dumps({**rounded, "remembered_bytes": held, "growth_200_to_100": round(growth, 2)}, indent=2))
    return int(best["total_ms"] > arguments.limit_ms or growth > arguments.growth)


if __name__ == "__main__":
    sys.exit(main())
