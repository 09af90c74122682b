"""Sessions of a pool at a publish, in virtual time: replicas that take 3 s, or more, to load weights."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from shared_schemas.trajectory import Sampling
from tests.virtual_time import in_virtual_time
from trainer_backend.errors import EngineStopped, WeightsRefused
from trainer_backend.inference.actor import Extras, Generation
from trainer_backend.inference.servers import Servers
from trainer_backend.inference.versions import PolicyVersion, ScoredPrompt, WeightAddress

TOKEN_S = 0.01
CANARY = ScoredPrompt(ids=(1, 2), logprobs=(0.0,))
FIRST, SECOND = (PolicyVersion(number=number, folder="weights", prompt=CANARY) for number in (0, 1))
SESSIONS = ("a", "b", "c", "d")


class Noting:
    """Stands in for a `VllmEngine`: takes time, knows whose requests it had, and may refuse a version."""

    max_model_len = 10**9
    refused = -1

    def __init__(self, url: str, load_s: float) -> None:
        self.url, self.version, self._load_s = url, 0, load_s
        self.breakdown: Future[str] = Future()
        self.sessions = list[str]()

    async def generate(self, ids, sampling, *, request_id, extras):  # type: ignore[no-untyped-def]
        self.sessions.append(extras.session)
        await asyncio.sleep(TOKEN_S * sampling.max_tokens)
        return Generation((0,) * sampling.max_tokens, (), "length", ((0, self.version),))

    async def load_weights(
        self, version: int, source: Path | WeightAddress, base: Path | None = None
    ) -> None:
        await asyncio.sleep(self._load_s)
        self.version = version
        if version == self.refused:
            raise WeightsRefused("no")

    def accept(self) -> None: ...

    def start(self) -> None: ...

    async def refuse_unfit(self) -> str:
        return ""

    async def score(self, ids: Sequence[int]) -> list[float]:
        return [0.0] * (len(ids) - 1)


async def asked(pool: Servers) -> None:
    """A request of each session, all at once."""
    await asyncio.gather(
        *(
            pool.generate(range(9), Sampling(max_tokens=10), request_id="", extras=Extras(session=session))
            for session in SESSIONS
        )
    )


def served(engines: Sequence[Noting]) -> tuple[dict[str, int], float]:
    """Sessions' requests by replica, "0a": those asked before a publish, and those asked while it goes on."""

    async def work() -> dict[str, int]:
        pool = Servers(engines, wait_s=1e9, canary_limit=1e-4, tell=lambda line: None)
        await pool.load(FIRST)
        await asked(pool)
        publish = asyncio.ensure_future(pool.load(SECOND))
        await asyncio.sleep(0.5)
        await asked(pool)
        await publish
        return Counter(
            f"{number}{session}" for number, engine in enumerate(engines) for session in engine.sessions
        )

    return in_virtual_time(work())


def test_a_session_that_asks_during_a_publish_waits_for_its_own_replica():
    found, _ = served([Noting("http://0", 3.0), Noting("http://1", 4.0)])
    assert found == {"0a": 2, "1b": 2, "0c": 2, "1d": 2}, "the first that serves does not get all of them"


def test_a_replica_that_takes_more_than_twice_as_long_as_the_first_loses_its_sessions():
    wedged = Noting("http://1", 3.0)
    engines = [Noting("http://0", 3.0), wedged]

    async def slow(version: int, source: object, base: object = None) -> None:
        await asyncio.sleep(3.0 if version == 0 else 1e6)

    wedged.load_weights = slow  # type: ignore[method-assign, assignment]
    found, seconds = served(engines)
    assert found == {"0a": 2, "1b": 1, "0b": 1, "0c": 2, "1d": 1, "0d": 1}
    # 3 s and 0.1 s of tokens; the first serves after 3 s, and is waited beside for 3 s more: 0.1 s of tokens
    assert seconds == pytest.approx(3.0 + 0.1 + 3.0 + 3.0 + 0.1)


def test_sessions_of_a_replica_that_refuses_a_version_move_at_once():
    refusing = Noting("http://1", 3.5)
    refusing.refused = 1
    found, seconds = served([Noting("http://0", 3.0), refusing])
    assert found == {"0a": 2, "1b": 1, "0b": 1, "0c": 2, "1d": 1, "0d": 1}
    assert seconds < 3.5 + 0.1 + 3.5 + 1.0


def test_a_request_that_was_not_taken_in_time_ends_the_run_by_itself():
    """The one who looks after the replicas may look when this request waits no more."""

    async def work() -> str:
        engine = Noting("http://0", 3.0)
        pool = Servers([engine], wait_s=2.0, canary_limit=1e-4, tell=lambda line: None)
        await pool.load(FIRST)
        engine.refused = 1
        with pytest.raises(WeightsRefused, match="no replica serves version 1"):
            await pool.load(SECOND)
        assert not pool.breakdown.done(), "nobody has asked"
        with pytest.raises(EngineStopped, match=r"no replica has served for 2 s .*http://0: no$"):
            await asked(pool)
        return pool.breakdown.result(timeout=0)

    reason, _ = in_virtual_time(work())
    assert reason.startswith("no replica has served for 2 s")
