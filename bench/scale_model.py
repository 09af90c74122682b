"""What costs time in bench/scale.py: processes on cores, vLLM replicas, a learner. In virtual time.

A process is a core that serves one decision after the other. A replica decodes its rows together:

    seconds of a step = max(bytes of the weights / bandwidth, rows * FLOPs of a token / compute)
                        + tokens in the cache of its rows * bytes of one / bandwidth

Prompt tokens that are not in its cache hold all its rows up for their FLOPs / compute. A conversation between
two decisions leaves its keys and values, until others need the room: the oldest go first. A row counts with
its last length from the start on; siblings share no prefix here. Nothing is measured by this file.

Source: `model_flops` for the bytes and FLOPs; the rules of sharing out are the code that runs use.
"""

import asyncio
import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from math import log2
from pathlib import Path

from bench.model_flops import Peak, layer_weights, update_flops
from shared_schemas.trajectory import Sampling
from trainer_backend.inference.actor import NO_EXTRAS, Extras, Generation
from trainer_backend.inference.versions import WeightAddress
from trainer_backend.learner.shapes import BFLOAT16, ModelShape

Table = Mapping[str, float]


class Core:
    """A CPU core of one process: what it is given waits for what it was given before.

    Attributes:
        busy_s: seconds of work so far.
    """

    def __init__(self) -> None:
        self.busy_s = self._free_at = 0.0

    async def use(self, seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + seconds
        self.busy_s += seconds
        await asyncio.sleep(self._free_at - now)


@dataclass(frozen=True, slots=True)
class CpuCost:
    """What a process spends on a decision, and on each token that is new with it."""

    decision_us: float
    token_us: float

    def seconds(self, tokens: float, decisions: float = 1.0) -> float:
        return 1e-6 * (self.decision_us * decisions + self.token_us * tokens)


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that a replica needs.

    Attributes:
        weights_s: to read all weights.
        row_s: to compute a token that is sampled; `prompt_s`: one of a prompt.
        cached_s: to read the keys and values of a token.
        room: tokens that fit its cache.
        max_running: rows of a step.
        load_s: of new weights.
    """

    weights_s: float
    row_s: float
    prompt_s: float
    cached_s: float
    room: float
    max_running: int
    load_s: float

    def step_s(self, rows: int, cached: float) -> float:
        """Of a step in which each row gets a token."""
        return max(self.weights_s, rows * self.row_s) + cached * self.cached_s


def compute_speed(
    shape: ModelShape, gpu: Table, replica: Table, *, memory_share: float, load_s: float
) -> Speed:
    """By the arithmetic of the module's docstring."""
    bandwidth = 1e12 * gpu["bandwidth_tb_s"] * replica["bandwidth_share"]
    weights = layer_weights(shape) + shape.vocabulary * shape.width
    token_bytes = BFLOAT16 * shape.cached_numbers
    row_s = 2 * weights / (1e12 * gpu["tflops"] * replica["compute_share"])
    room = 1e9 * gpu["memory_gb"] * memory_share - BFLOAT16 * shape.parameters
    return Speed(
        weights_s=BFLOAT16 * weights / bandwidth,
        row_s=row_s,
        prompt_s=row_s,
        cached_s=token_bytes / bandwidth,
        room=room / token_bytes,
        max_running=int(replica["max_running"]),
        load_s=load_s,
    )


def update_s(shape: ModelShape, lengths: Sequence[int], sampled: int, *, peak: Peak, mfu: float) -> float:
    """Seconds of an update on one GPU."""
    return update_flops(shape, lengths, sampled) / (peak.flops * mfu)


def scale_mfu(learner: Table, ranks: int) -> float:
    """The share of its peak that each rank reaches: less with each doubling beyond eight."""
    return learner["mfu"] * (1.0 - learner["loss_of_doubling"] * max(0.0, log2(ranks / 8)))


@dataclass(slots=True, eq=False)
class Row:
    """A request in a replica.

    Attributes:
        length: its prompt and answer together.
        reused: of its prompt, what was in the cache.
        ends_at: the replica's progress, in tokens of each row, with which it ends.
    """

    session: str
    prompt: int
    answer: int
    done: asyncio.Future[None]
    ends_at: float = 0.0
    reused: int = 0

    @property
    def length(self) -> int:
        return self.prompt + self.answer


@dataclass
class Prefixes:
    """What conversations left in a replica's cache, the oldest first."""

    tokens: int = 0
    _by_session: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def take(self, session: str) -> int:
        tokens = self._by_session.pop(session, 0)
        self.tokens -= tokens
        return tokens

    def put(self, session: str, tokens: int) -> None:
        self.take(session)
        self._by_session[session] = tokens
        self.tokens += tokens

    def shrink(self, room: float) -> None:
        while self._by_session and self.tokens > room:
            self.tokens -= self._by_session.popitem(last=False)[1]


class SimulatedReplica:
    """A stand-in for `VllmEngine` that takes the time of a vLLM server and samples nothing.

    Args:
        keeps: whether requests go on with new weights ("keep"), or end before them ("wait").

    Attributes:
        busy_s: seconds with a row.
        prompt_tokens, reused_tokens: of its requests.
    """

    max_model_len = 10**9

    def __init__(self, url: str, speed: Speed, *, keeps: bool = False) -> None:
        self.url, self.version, self._speed, self._keeps = url, 0, speed, keeps
        self.busy_s, self.prompt_tokens, self.reused_tokens = 0.0, 0, 0
        self.breakdown: Future[str] = Future()
        self._rows: list[tuple[float, int, Row]] = []
        self._waiting: deque[Row] = deque()
        self._prefixes, self._cached = Prefixes(), 0
        self._progress = self._prefill_s = self._last = 0.0
        self._paused, self._empty = False, asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._number = count()

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        loop, answer = asyncio.get_running_loop(), sampling.max_tokens
        row = Row(extras.session, len(ids), answer, loop.create_future())
        self._waiting.append(row)
        self._turn()
        await row.done
        tokens = (0,) * answer
        return Generation(tokens, (), "length", ((0, self.version),), prompt_tokens_reused=row.reused)

    async def load_weights(
        self, version: int, source: Path | WeightAddress, base: Path | None = None
    ) -> None:
        self._paused = True
        if not self._keeps:
            while self._rows:
                self._empty.clear()
                await self._empty.wait()
        self._turn()  # what ran until now
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.sleep(self._speed.load_s)
        self._last = asyncio.get_running_loop().time()
        self._prefixes = Prefixes()
        self._prefill_s += self._cached * self._speed.prompt_s
        self.version, self._paused = version, False
        self._turn()

    def accept(self) -> None: ...

    async def refuse_unfit(self) -> str:
        return ""

    async def score(self, ids: Sequence[int]) -> list[float]:
        return [0.0] * (len(ids) - 1)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    async def close(self) -> None: ...

    @property
    def _step_s(self) -> float:
        return self._speed.step_s(len(self._rows), self._cached)

    def _turn(self) -> None:
        """Account for the time since the last turn, end what is done, admit what fits, and set the timer."""
        loop = asyncio.get_running_loop()
        elapsed, self._last = loop.time() - self._last, loop.time()
        if self._rows and not (self._paused and self._keeps):
            self.busy_s += elapsed
            prefill_s = min(elapsed, self._prefill_s)
            self._prefill_s -= prefill_s
            self._progress += (elapsed - prefill_s) / self._step_s
        while self._rows and self._rows[0][0] <= self._progress + 1e-6:
            self._end(heapq.heappop(self._rows)[2])
        while self._waiting and not self._paused and self._fits(self._waiting[0]):
            self._admit(self._waiting.popleft())
        if self._timer is not None:
            self._timer.cancel()
        if self._rows:
            wait_s = self._prefill_s + (self._rows[0][0] - self._progress) * self._step_s
            self._timer = loop.call_later(max(wait_s, 1e-9), self._turn)
        else:
            self._empty.set()

    def _fits(self, row: Row) -> bool:
        full = len(self._rows) >= self._speed.max_running
        return not self._rows or not (full or self._cached + row.length > self._speed.room)

    def _admit(self, row: Row) -> None:
        row.reused = min(self._prefixes.take(row.session), row.prompt)
        row.ends_at = self._progress + row.answer
        self.prompt_tokens += row.prompt
        self.reused_tokens += row.reused
        self._cached += row.length
        self._prefixes.shrink(self._speed.room - self._cached)
        self._prefill_s += (row.prompt - row.reused) * self._speed.prompt_s
        heapq.heappush(self._rows, (row.ends_at, next(self._number), row))

    def _end(self, row: Row) -> None:
        self._cached -= row.length
        self._prefixes.put(row.session, row.length)
        self._prefixes.shrink(self._speed.room - self._cached)
        if not row.done.done():
            row.done.set_result(None)


@dataclass(frozen=True, slots=True)
class Turn:
    """A decision: tokens of the observation and of the answer, and how long the environment then takes."""

    observation: int
    answer: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """What episodes are like: medians, and the sigma of the log-normals around them."""

    decisions: float
    first_tokens: float
    observation_tokens: float
    answer_tokens: float
    wait_s: float
    spread: float
    most_decisions: float

    def turns(self, seed: str) -> list[Turn]:
        """Those of one episode: the same for the same seed."""
        draw = random.Random(seed)

        def about(median: float) -> float:
            return median * draw.lognormvariate(0.0, self.spread) if median else 0.0

        decisions = min(max(1, round(about(self.decisions))), int(self.most_decisions))
        return [
            Turn(
                observation=round(self.observation_tokens + (0 if number else self.first_tokens)),
                answer=max(1, round(about(self.answer_tokens))),
                wait_s=about(self.wait_s),
            )
            for number in range(decisions)
        ]


def count_tokens(turns: Iterable[Turn]) -> int:
    """Tokens of a conversation that only grows."""
    return sum(turn.observation + turn.answer for turn in turns)
