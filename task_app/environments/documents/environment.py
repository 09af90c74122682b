"""Long documents as a `ConversationalEnvironment`: a question, and tools to read what no prompt shows.

Source: 3-context-editing-tool-loop.md (`document_content`). deleteContext and checkBudget belong to the
episode loop (task_app/context_tools): they know the history, which an environment does not.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from shared_schemas.base import Body
from shared_schemas.documents import MAX_ANSWER_CHARS, MAX_DOCUMENT_CHARS, MAX_QUESTION_CHARS
from shared_schemas.messages import Message, ToolSpec
from task_app.complaints import state_in
from task_app.environments.documents import prompt
from task_app.environments.documents.chunks import chunked
from task_app.environments.documents.desk import HEADING_CHARS, MAX_CHUNK_CHARS, Desk
from task_app.environments.documents.generate import Generated, Task, generated_task
from task_app.environments.documents.notes import Notes
from task_app.environments.documents.scoring import correctness, normalised
from task_app.environments.documents.state import ReaderState, desk_of, pack
from task_app.errors import EpisodeOver
from task_app.protocols import DecisionOutcome, Observation, PastDecision, ToolRequest
from task_app.tools import Answer, Toolbox, function_tool

ToolName = Literal[
    "analyzeText",
    "loadDocument",
    "buildIndex",
    "readChunk",
    "searchEngine",
    "note",
    "readNote",
    "updateNote",
    "finish",
]
TOOLS: tuple[ToolName, ...] = ToolName.__args__  # type: ignore[attr-defined]  # a Literal's own values
NOT_RUN = Answer.of_refusal("not carried out: the task had ended before")


def _checkable(answer: str) -> str:
    if not normalised(answer):
        raise ValueError("it holds no word or number, so no answer could ever match it")
    return answer


def _listed(given: Any) -> Any:
    return (given,) if isinstance(given, str) else given


Accepted = Annotated[str, Field(max_length=MAX_ANSWER_CHARS), AfterValidator(_checkable)]


class DocumentsConfig(Body):
    """One document with its question: of a data row, or made from the seed where no row is given."""

    document_content: str | None = Field(default=None, min_length=1, max_length=MAX_DOCUMENT_CHARS)
    question: str | None = Field(default=None, min_length=1, max_length=MAX_QUESTION_CHARS)
    ground_truth: Annotated[tuple[Accepted, ...], BeforeValidator(_listed)] = Field(
        default=(), description="the answer, or a list of all that count; case and punctuation do not"
    )
    generate: Generated | None = Field(default=None, description="instead of the three above")
    tools: tuple[ToolName, ...] = Field(default=TOOLS, min_length=1, description="on offer")
    text: Literal["full", "compact"] = Field(
        default="full", description="compact: the question alone, for small models"
    )
    chunk_size: int = Field(
        default=4_000, ge=50, le=MAX_CHUNK_CHARS, description="characters, where buildIndex is given none"
    )
    indexed: bool = Field(default=False, description="the index of chunk_size is there from the start")
    max_result_chars: int = Field(default=20_000, ge=100, le=1_000_000, description="of one tool result")

    @model_validator(mode="after")
    def _one_of_two(self) -> "DocumentsConfig":
        given = {name: getattr(self, name) for name in ("document_content", "question", "ground_truth")}
        found = [name for name, value in given.items() if value not in (None, ())]
        if self.generate is not None and found:
            raise ValueError(
                f"{found[0]} and generate are both given; a document is a row's or made, not both"
            )
        missing = [name for name in given if name not in found]
        if found and missing:
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
        """What a chunk may have beside its heading, so that one result shows all of it."""
        return min(MAX_CHUNK_CHARS, self.max_result_chars - HEADING_CHARS)

    def task(self, seed: int) -> Task:
        """The document of a seed; a row's is the same for each."""
        if self.document_content is None or self.question is None:
            return generated_task(self.generate or Generated(), seed)
        return Task(self.document_content, self.question, self.ground_truth)


class DocumentsEnvironment:
    """One question about one document. Equal seeds and calls give equal texts in any process."""

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
        self._begin(seed)
        if self.config.indexed:
            self._desk.chunks = chunked(self._desk.document, size=self.config.chunk_size, overlap=0)
        return self._observe(0.0)

    def opening(self) -> tuple[Message, ...]:
        return prompt.opening(self._data(self._started()))

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        self._running()
        reason = invalid_reason or (None if calls else prompt.NO_CALL)
        if reason is not None:
            return self._refused(Answer.of_refusal(reason), len(calls))
        toolbox = self._toolbox()
        answers: list[Answer] = []
        rewards: list[float] = []
        for call in calls:
            if self._desk.answer is not None:
                answers.append(NOT_RUN)
                continue
            answers.append(toolbox.answer(call))
            rewards.append(self.outcome_reward())
        executed = [
            "noop" if answer.refused else call.name for answer, call in zip(answers, calls, strict=True)
        ]
        results = tuple(answer.text for answer in answers)
        return DecisionOutcome(
            observation=self._observe(rewards[-1]),
            env_rewards=tuple(rewards),
            terminated=self._desk.answer is not None,
            executed_actions=tuple(executed[: len(rewards)]),
            invalid_reason=next((answer.refused for answer in answers if answer.refused), None),
            result="\n".join(results),
            results=results,
        )

    def answer(self, text: str) -> DecisionOutcome:
        """Words without a call answer nothing: only `finish` does."""
        return self.step(())

    def tools(self) -> tuple[ToolSpec, ...]:
        return self._toolbox().specs()

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        return prompt.with_past(observation.data, past)

    def outcome_reward(self) -> float:
        """0 until the answer is given."""
        if self._task is None or self._desk.answer is None:
            return 0.0
        return correctness(self._desk.answer, self._task.answers)

    def snapshot(self) -> bytes:
        """What was done so far; raises EpisodeOver when no episode was started."""
        self._started()
        return pack(self._desk, seed=self._seed, reward=self._last_reward)

    def restore(self, state: bytes) -> Observation:
        read = state_in(ReaderState, state)
        task = self.config.task(read.seed)
        desk = desk_of(read, self._new_desk(task.document))
        self._seed, self._task, self._desk = read.seed, task, desk
        return self._observe(read.reward)

    def _begin(self, seed: int) -> None:
        self._seed, self._task = seed, self.config.task(seed)
        self._desk = self._new_desk(self._task.document)

    def _new_desk(self, document: str) -> Desk:
        config = self.config
        notes = Notes(max_read_chars=config.max_result_chars)
        return Desk(document, config.chunk_size, notes, max_chunk_chars=config.max_chunk_chars)

    def _toolbox(self) -> Toolbox:
        offered = (function_tool(getattr(self._desk, name)) for name in self.config.tools)
        return Toolbox(offered, max_result_chars=self.config.max_result_chars)

    def _started(self) -> Task:
        if self._task is None:
            raise EpisodeOver("no episode was started", hint="reset the environment with a seed first")
        return self._task

    def _running(self) -> None:
        self._started()
        if self._desk.answer is not None:
            raise EpisodeOver()

    def _refused(self, answer: Answer, calls: int) -> DecisionOutcome:
        """Nothing of the decision is carried out: one no-op."""
        return DecisionOutcome(
            observation=self._observe(0.0),
            env_rewards=(0.0,),
            executed_actions=("noop",),
            invalid_reason=answer.refused,
            result=answer.text,
            results=(answer.text,) * calls,
        )

    def _observe(self, reward: float) -> Observation:
        self._last_reward = reward
        data = self._data(self._started())
        return Observation(text=prompt.observation_text(data), data=data, reward_last_step=reward)

    def _data(self, task: Task) -> dict[str, Any]:
        chunks = self._desk.chunks
        return {
            "question": task.question,
            "chars": len(task.document),
            "text": self.config.text,
            "chunks": len(chunks.spans) if chunks else None,
            "next_chunk": self._desk.next_chunk,
            "notes": {key: note.summary for key, note in self._desk.notes.all.items()},
        }
