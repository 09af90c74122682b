"""A `ConversationalEnvironment` that asks a question about a long document, and offers tools to read it.

Source: 3-context-editing-tool-loop.md (`document_content`). The source's tools deleteContext and checkBudget
are in task_app/episode/context_tools.py, because they need the history of the conversation.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from shared_schemas.base import Body
from shared_schemas.documents import MAX_ANSWER_CHARS, MAX_DOCUMENT_CHARS, MAX_QUESTION_CHARS, normalise
from shared_schemas.messages import Message, ToolSpec
from task_app.complaints import state_in
from task_app.environments.documents.chunks import MAX_CHUNKS, cut_into_chunks
from task_app.environments.documents.desk import MAX_CHUNK_CHARS, MAX_NOTES, MAX_TITLE_CHARS, Desk, Note
from task_app.environments.documents.generate import GenerateConfig, Task, generate_task
from task_app.errors import EpisodeOver, started
from task_app.past import past_messages, refuse_decision
from task_app.plugins import EnvironmentPlugin
from task_app.protocols import DecisionOutcome, Observation, PastDecision, ToolRequest
from task_app.tools import Answer, Toolbox, function_tool

ToolName = Literal[
    "analyzeText", "loadDocument", "buildIndex", "readChunk", "searchEngine", "note", "readNote",
    "updateNote", "finish",
]  # fmt: skip
TOOLS: tuple[ToolName, ...] = ToolName.__args__  # type: ignore[attr-defined]  # a Literal's own values
NOT_RUN = Answer.of_refusal("not carried out: the task had ended before")


def _checkable(answer: str) -> str:
    if not normalise(answer):
        raise ValueError("it holds no word or number, so no answer could ever match it")
    return answer


AcceptedAnswer = Annotated[str, Field(max_length=MAX_ANSWER_CHARS), AfterValidator(_checkable)]


class DocumentsConfig(Body):
    """Settings of an episode: a document and a question from a data row, or how to generate both."""

    document_content: str | None = Field(default=None, min_length=1, max_length=MAX_DOCUMENT_CHARS)
    question: str | None = Field(default=None, min_length=1, max_length=MAX_QUESTION_CHARS)
    ground_truth: Annotated[
        tuple[AcceptedAnswer, ...],
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    ] = Field(
        default=(), description="the answer, or a list of accepted answers; case and punctuation are ignored"
    )
    generate: GenerateConfig | None = Field(default=None, description="instead of the three keys above")
    tools: tuple[ToolName, ...] = Field(default=TOOLS, min_length=1, description="on offer")
    text: Literal["full", "compact"] = Field(
        default="full", description="compact: the question alone, for small models"
    )
    chunk_size: int = Field(
        default=4_000, ge=50, le=MAX_CHUNK_CHARS, description="default of buildIndex, in characters"
    )
    indexed: bool = Field(default=False, description="begin with an index of chunk_size")
    max_result_chars: int = Field(default=20_000, ge=100, le=1_000_000, description="of one tool result")

    @model_validator(mode="after")
    def _one_of_two(self) -> "DocumentsConfig":
        values = {name: getattr(self, name) for name in ("document_content", "question", "ground_truth")}
        names = [name for name, value in values.items() if value not in (None, ())]
        if self.generate is not None and names:
            raise ValueError(
                f"{names[0]} and generate are both given; a document comes from a row or is generated"
            )
        missing = [name for name in values if name not in names]
        if names and missing:
            raise ValueError(
                f"{missing[0]} is missing; give document_content, question and ground_truth, or generate"
            )
        if "finish" not in self.tools:
            raise ValueError("tools leaves out finish, without which no answer can be given")
        return self

    @model_validator(mode="after")
    def _a_chunk_is_one_result(self) -> "DocumentsConfig":
        if self.chunk_size > self.max_chunk_chars:
            raise ValueError(
                f"chunk_size is {self.chunk_size}; with its heading at most {self.max_chunk_chars} fit into "
                f"max_result_chars, {self.max_result_chars}, and the end of each chunk could not be read"
            )
        return self

    @property
    def max_chunk_chars(self) -> int:
        """Length in characters of the longest chunk that fits, with its title, into one tool result."""
        return min(MAX_CHUNK_CHARS, self.max_result_chars - MAX_TITLE_CHARS)

    def task(self, seed: int) -> Task:
        """Return the task of the data row, which does not depend on `seed`, or generate one from `seed`."""
        if self.document_content is None or self.question is None:
            return generate_task(self.generate or GenerateConfig(), seed)
        return Task(self.document_content, self.question, self.ground_truth)


class DocumentsEnvironment:
    """Asks one question about one document; equal seeds and calls give equal episodes in every process."""

    name = "documents"
    outcome_definition = "correctness of the answer: 1 when the one of finish is accepted, else 0"
    takes_answers = False

    def __init__(self, config: DocumentsConfig) -> None:
        self.config = config
        self._seed = 0
        self._task: Task | None = None
        self._desk = self._new_desk("")
        self._last_reward = 0.0

    def reset(self, seed: int) -> Observation:
        self._seed, self._task = seed, self.config.task(seed)
        self._desk = self._new_desk(self._task.document)
        if self.config.indexed:
            self._desk.chunks = cut_into_chunks(self._desk.document, size=self.config.chunk_size, overlap=0)
        return self._observe(0.0)

    def opening(self) -> tuple[Message, ...]:
        return opening(self._data(started(self._task)))

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        started(self._task)
        if self._desk.answer is not None:
            raise EpisodeOver()
        reason = invalid_reason or (None if calls else NO_CALL)
        if reason is not None:
            return refuse_decision(self._observe(0.0), calls, reason)
        toolbox = self._toolbox()
        answers: list[Answer] = []
        rewards: list[float] = []
        for call in calls:
            if self._desk.answer is not None:
                answers.append(NOT_RUN)
                continue
            answers.append(toolbox.answer(call))
            rewards.append(self.outcome_reward())
        pairs = zip(answers, calls, strict=True)
        actions = ["noop" if answer.refused else call.name for answer, call in pairs]
        results = tuple(answer.text for answer in answers)
        return DecisionOutcome(
            observation=self._observe(rewards[-1]),
            env_rewards=tuple(rewards),
            terminated=self._desk.answer is not None,
            executed_actions=tuple(actions[: len(rewards)]),
            invalid_reason=next((answer.refused for answer in answers if answer.refused), None),
            result="\n".join(results),
            results=results,
        )

    def answer(self, text: str) -> DecisionOutcome:
        # Only a call of `finish` can answer the question, so a text is a decision without a call.
        return self.step(())

    def tools(self) -> tuple[ToolSpec, ...]:
        return self._toolbox().specs()

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        return (*opening(observation.data), *past_messages(past))

    def outcome_reward(self) -> float:
        """Return 1 if the answer that `finish` was called with is among the accepted answers, else 0."""
        if self._task is None or self._desk.answer is None:
            return 0.0
        return float(normalise(self._desk.answer) in map(normalise, self._task.answers))

    def snapshot(self) -> bytes:
        """Return the episode's state without the document, which config and seed determine."""
        task, desk = started(self._task), self._desk
        state = ReaderState(
            seed=self._seed,
            chars=len(task.document),
            notes=dict(desk.notes),
            index=(desk.chunks.size, desk.chunks.overlap) if desk.chunks else None,
            next_chunk=desk.next_chunk,
            answer=desk.answer,
            reward=self._last_reward,
        )
        return state.model_dump_json().encode()

    def restore(self, state: bytes) -> Observation:
        reader = state_in(ReaderState, state)
        task = self.config.task(reader.seed)
        if reader.chars != len(task.document):
            raise ValueError(
                f"the snapshot's document has {reader.chars} characters, this environment's has "
                f"{len(task.document)}"
            )
        desk = self._new_desk(task.document, reader.notes)
        desk.next_chunk, desk.answer = reader.next_chunk, reader.answer
        if reader.index is not None:
            desk.chunks = cut_into_chunks(task.document, size=reader.index[0], overlap=reader.index[1])
        self._seed, self._task, self._desk = reader.seed, task, desk
        return self._observe(reader.reward)

    def _new_desk(self, document: str, notes: Mapping[str, Note] | None = None) -> Desk:
        config = self.config
        return Desk(
            document, config.chunk_size, dict(notes or {}), max_chunk_chars=config.max_chunk_chars,
            max_result_chars=config.max_result_chars,
        )  # fmt: skip

    def _toolbox(self) -> Toolbox:
        tools = (function_tool(getattr(self._desk, name)) for name in self.config.tools)
        return Toolbox(tools, max_result_chars=self.config.max_result_chars)

    def _observe(self, reward: float) -> Observation:
        self._last_reward = reward
        data = self._data(started(self._task))
        # Show the reader's progress alone, because the results of its calls contain the document's text.
        index = f"{data['chunks']} chunks, next {data['next_chunk']}" if data["chunks"] else "no index"
        notes = f"notes: {', '.join(data['notes'])}" if data["notes"] else "no notes"
        text = f"Question: {data['question']}\n{index}; {notes}"
        return Observation(text=text, data=data, reward_last_step=reward)

    def _data(self, task: Task) -> dict[str, Any]:
        chunks = self._desk.chunks
        return {
            "question": task.question,
            "chars": len(task.document),
            "text": self.config.text,
            "chunks": len(chunks.spans) if chunks else None,
            "next_chunk": self._desk.next_chunk,
            "notes": {key: note.summary for key, note in self._desk.notes.items()},
        }


SYSTEM = """\
You answer a question about a document that is too long to show. Read it with the tools, chunk by chunk or by
searching it, and note what matters. Your context is limited: what you have read and noted can be deleted from
it where the tools for that are offered. When you know the answer, call `finish` with the answer and nothing
else."""

NO_CALL = "no tool call; call one of the tools, and finish with your answer"


def opening(data: Mapping[str, Any]) -> tuple[Message, ...]:
    """Convert `Observation.data` to the messages that precede the first decision."""
    task = Message(role="user", content=data["question"])
    if data["text"] == "compact":
        return (task,)
    text = f"The document has {data['chars']} characters.\n\nQuestion: {data['question']}"
    return Message(role="system", content=SYSTEM), task.model_copy(update={"content": text})


Count = Annotated[int, Field(ge=0, le=2**31 - 1)]


class ReaderState(Body, allow_inf_nan=False):
    """A snapshot of an episode.

    `index` is [chunk_size, overlap]; None if no index was built. `reward` is the reward of the last env step.
    """

    format: Literal[1] = 1
    seed: Count
    chars: Count
    notes: dict[str, Note] = Field(max_length=MAX_NOTES)
    index: tuple[Annotated[int, Field(ge=1, le=MAX_CHUNK_CHARS)], Count] | None
    next_chunk: Annotated[int, Field(ge=0, le=MAX_CHUNKS)]
    answer: Annotated[str, Field(max_length=2_000)] | None
    reward: float


PLUGIN = EnvironmentPlugin(DocumentsConfig, DocumentsEnvironment)
