"""A vLLM server as an engine, and replicas behind one: exact tokens, versions, faults, over real HTTP."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared_schemas.trajectory import Sampling
from tests.trainer_backend.inference.fake_vllm import FakeVllm, fake_vllm
from tests.trainer_backend.inference.naive import logprobs_under
from trainer_backend.errors import (
    BadChatRequest,
    RemoteRefused,
    RemoteUnavailable,
    WeightsRefused,
)
from trainer_backend.inference.actor import Extras, Generation, SampledToken
from trainer_backend.inference.servers import Servers
from trainer_backend.inference.stop_strings import StopStrings
from trainer_backend.inference.versions import PolicyVersion, ScoredPrompt
from trainer_backend.inference.vllm_engine import VllmEngine
from trainer_backend.models import build_preset, save_model_folder

PROMPT = [10, 11, 12, 13]
CANARY = tuple(range(20, 36))
NO_FAULTS: Mapping[str, Any] = {}
LIMITS: Any = {"stop_ids": [1], "vocabulary": 512, "max_model_len": 128, "wait_s": 30.0}


@pytest.fixture(scope="module")
def folders(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Model folders of versions 0 and 1."""
    root = tmp_path_factory.mktemp("weights")
    for version in range(2):
        model = build_preset("tiny-0.3m", tokenizer, seed=version + 1)
        (root / str(version)).mkdir()
        save_model_folder(root / str(version), model, tokenizer)
    return [root / "0", root / "1"]


@pytest.fixture(scope="module")
def models(tokenizer: PreTrainedTokenizerFast) -> list[PreTrainedModel]:
    return [build_preset("tiny-0.3m", tokenizer, seed=version + 1).eval() for version in range(2)]


@pytest.fixture(scope="module")
def published(folders: list[Path], models: list[PreTrainedModel]) -> list[PolicyVersion]:
    """Both versions, each with a canary."""
    scored = [tuple(logprobs_under(model, CANARY[:1], CANARY[1:])) for model in models]
    canaries = [ScoredPrompt(ids=CANARY, logprobs=logprobs) for logprobs in scored]
    return [PolicyVersion(number=n, folder=folders[n], prompt=canaries[n]) for n in range(2)]


@asynccontextmanager
async def engine_at(url: str, **settings: Any) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(url, **{**LIMITS, **settings})
    try:
        yield engine
    finally:
        await engine.close()


async def answer_of(engine: VllmEngine, ids: Sequence[int] = PROMPT) -> Generation:
    return await engine.generate(ids, Sampling(max_tokens=2), request_id="a")


async def load(engine: VllmEngine, version: int, folder: Path) -> None:
    """Without a canary."""
    await engine.load_weights(version, folder)
    engine.accept()


@asynccontextmanager
async def loaded_engine(
    folders: list[Path], *, loads: bool = True, faults: Mapping[str, Any] = NO_FAULTS, **settings: Any
) -> AsyncIterator[tuple[VllmEngine, FakeVllm]]:
    """An engine whose server has the weights of version 0, or none of this run."""
    with fake_vllm(folders[0], **faults) as (fake, url):
        async with engine_at(url, **settings) as engine:
            if loads:
                await load(engine, 0, folders[0])
            yield engine, fake


async def test_log_probs_and_versions_are_of_the_weights_that_sampled(folders, models):
    async with loaded_engine(folders, loads=False) as (engine, fake):
        for version in (0, 1):
            await load(engine, version, folders[version])
            generation = await engine.generate(PROMPT, Sampling(max_tokens=12), request_id="a")
            own = logprobs_under(models[version], PROMPT, generation.token_ids)
            assert generation.logprobs == pytest.approx(own, abs=1e-5)
            assert generation.versions == ((0, version),)
    assert fake.paused == ["wait", "wait"]


async def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(folders, tokenizer):
    async with loaded_engine(folders, stop_ids=[]) as (engine, _):
        whole = await engine.generate(PROMPT, Sampling(max_tokens=40, temperature=0.0), request_id="a")
        string = tokenizer.decode(whole.token_ids)[3:6]
        cut = await engine.generate(
            PROMPT, Sampling(max_tokens=40, temperature=0.0), request_id="b",
            extras=Extras(stop=StopStrings(tokenizer.decode, [string])),
        )  # fmt: skip
    assert (cut.stop_string, cut.finish_reason) == (string, "stop")
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert string in tokenizer.decode(cut.token_ids) and string not in tokenizer.decode(cut.token_ids[:-1])


async def test_tokens_are_told_as_they_come_but_the_last(folders):
    async with loaded_engine(folders, stop_ids=[]) as (engine, _):
        tokens: list[SampledToken] = []
        sampling, extras = Sampling(max_tokens=6), Extras(likeliest=2, on_token=tokens.append)
        generation = await engine.generate(PROMPT, sampling, request_id="a", extras=extras)
    assert tokens == generation.sampled()[:-1]
    for tops in generation.likeliest:
        assert len(tops) == 2 and tops[0][1] >= tops[1][1]


CONTEXT = "has a context of 64 tokens, and inference.max_model_len is 128"
RECEIVE = r"(?s)cannot receive weights from the learner.*--weight-transfer-config"


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ({"release": "0.20.1"}, "refuse_unfit", "runs vLLM 0.20.1"),
        ({"release": "gateway"}, "refuse_unfit", "is no vLLM: its version is 'gateway'"),
        ({"max_model_len": 64}, "refuse_unfit", CONTEXT),
        ({"raw": True}, "refuse_unfit", "before the temperature"),
        ({"has_worker": False}, "refuse_unfit", "cannot load weights"),
        ({"lacks": ("/resume",)}, "refuse_unfit", "with VLLM_SERVER_DEV_MODE=1 in its environment"),
        ({"lacks": ("/inference/v1/generate",)}, "refuse_unfit", "Start it with --enable-scale-out"),
        ({"sleeps": False}, "check_sleeper", r"(?s)gives no memory back.*--enable-sleep-mode"),
        ({"receives": False}, "check_receiver", RECEIVE),
    ],
)
async def test_a_server_that_cannot_do_what_a_run_needs_is_refused_with_its_reason(
    folders, fault, check, words
):
    async with loaded_engine(folders, loads=False, faults=fault) as (engine, _):
        with pytest.raises(RemoteRefused, match=words):
            await getattr(engine, check)()


async def test_a_server_that_is_slow_at_its_start_is_not_said_to_lack_our_worker(folders):
    async with loaded_engine(folders, loads=False, faults={"rpc_status": 503}) as (engine, _):
        with pytest.raises(RemoteUnavailable, match="answered 503"):
            await engine.refuse_unfit()


async def test_a_server_that_a_killed_trainer_left_paused_or_asleep_serves_again(folders):
    async with loaded_engine(folders, loads=False) as (engine, fake):
        async with engine_at(engine.url) as theirs, aiohttp.ClientSession() as session:
            await session.post(f"{engine.url}/pause", params={"mode": "keep"})
            assert "vLLM 0.32.0" in await engine.refuse_unfit()
            await theirs.sleep()
            assert "vLLM 0.32.0" in await engine.refuse_unfit()
            assert not fake.asleep
        await engine.check_sleeper()
        await engine.check_receiver()


async def test_a_truncated_sample_is_refused(folders):
    async with engine_at("http://127.0.0.1:9") as engine:
        with pytest.raises(BadChatRequest, match="log-probs of the truncated distribution"):
            await engine.generate(PROMPT, Sampling(max_tokens=2, top_p=0.5), request_id="a")


async def test_after_a_load_that_failed_a_server_answers_and_nothing_of_it_is_used_before_the_next(
    folders, tmp_path
):
    """The pause is taken back whatever happens: a server that stays paused would hang every rollout."""
    async with loaded_engine(folders) as (engine, _):
        half = tmp_path / "half"
        half.mkdir()
        (half / "model.safetensors").write_bytes((folders[1] / "model.safetensors").read_bytes()[:-100])
        with pytest.raises(WeightsRefused):
            await engine.load_weights(1, half)
        with pytest.raises(RemoteUnavailable, match="none of this run's"):
            await answer_of(engine)
        await load(engine, 0, folders[0])
        generation = await answer_of(engine)
    assert generation.versions == ((0, 0),)


async def test_a_server_that_does_not_see_the_folder_is_refused_with_what_would_help(folders):
    async with loaded_engine(folders, loads=False, faults={"sees_folders": False}) as (engine, _):
        with pytest.raises(WeightsRefused, match=r"does not see the folder: put job\.runs_dir on a disk"):
            await load(engine, 0, folders[0])


@pytest.mark.parametrize("stops", [False, True])
async def test_weights_that_another_run_loads_are_noticed_at_the_next_sample(folders, tokenizer, stops):
    async with loaded_engine(folders, stop_ids=[]) as (ours, fake), engine_at(ours.url) as theirs:
        sampling = Sampling(max_tokens=8, temperature=0.0)
        whole = await ours.generate(PROMPT, sampling, request_id="a")
        await load(theirs, 0, folders[0])  # the same tokens, so that the stop string is met
        fake.streams_wait = True
        rule = StopStrings(tokenizer.decode, [tokenizer.decode(whole.token_ids)[2:4]])
        extras = Extras(stop=rule if stops else None)
        with pytest.raises(RemoteUnavailable, match="another run loads weights into it"):
            await ours.generate(PROMPT, sampling, request_id="b", extras=extras)


async def test_a_sample_may_take_long_and_a_server_that_answers_no_one_is_noticed(folders):
    async with loaded_engine(folders) as (engine, fake):
        engine.silence_s = 0.5  # a probe is answered within it on a busy machine too
        fake.holds.clear()
        sample = asyncio.ensure_future(answer_of(engine))
        while fake.probes < 2:
            await asyncio.sleep(0.01)
        fake.holds.set()
        assert (await sample).versions == ((0, 0),)
        fake.wedged, engine.silence_s = True, 0.2
        with pytest.raises(RemoteUnavailable, match=r"gave no answer within 0\.2 s"):
            await answer_of(engine)


async def test_a_full_queue_before_a_sample_is_no_silence(folders):
    async with loaded_engine(folders) as (engine, fake):
        engine.silence_s = 0.5  # one of the others ends within it on a busy machine too
        fake.full, fake.slow_prompt = True, PROMPT
        fake.holds.clear()
        slow = asyncio.ensure_future(answer_of(engine))
        while not fake.probes:
            await asyncio.sleep(0.01)
        for turn in range(12):  # longer than the probe's deadline
            await answer_of(engine, [*PROMPT, turn])
            await asyncio.sleep(0.05)
        assert not slow.done()
        fake.goes_on, probes = True, fake.probes
        while fake.probes < probes + 2:  # now nothing ends any more, and no probe is answered
            await asyncio.sleep(0.01)
        assert not slow.done()
        fake.holds.set()
        assert (await slow).versions == ((0, 0),)


async def test_a_load_that_a_server_does_not_end_in_time_is_refused(folders):
    async with loaded_engine(folders, wait_s=1.0) as (engine, fake):
        fake.may_load.clear()
        with pytest.raises(WeightsRefused, match="has not loaded version 1 within 1 s"):
            await engine.load_weights(1, folders[1])


@asynccontextmanager
async def open_pool(
    published: list[PolicyVersion], count: int = 1, *, weight_update: str = "wait", **settings: Any
) -> AsyncIterator[tuple[Servers, list[FakeVllm]]]:
    """A pool of `count` replicas that have no weights yet, and their servers."""
    limits, settings = {**LIMITS, "weight_update": weight_update}, {"tell": str, "wait_s": 30.0, **settings}
    folder = published[0].folder
    with ExitStack() as stack:
        fakes, urls = zip(*(stack.enter_context(fake_vllm(folder)) for _ in range(count)), strict=True)
        pool = Servers([VllmEngine(url, **limits) for url in urls], canary_limit=1e-4, **settings)
        try:
            yield pool, list(fakes)
        finally:
            await pool.close()


@asynccontextmanager
async def serving_pool(
    published: list[PolicyVersion], count: int = 1, **settings: Any
) -> AsyncIterator[tuple[Servers, list[FakeVllm]]]:
    """A pool whose replicas serve version 0."""
    async with open_pool(published, count, **settings) as (pool, fakes):
        await pool.load(published[0])
        yield pool, fakes


async def brought_back(pool: Servers, number: int) -> None:
    watch = asyncio.ensure_future(pool.look_after())
    while pool.replicas[number].state != "serving":
        await asyncio.sleep(0.01)
    watch.cancel()


async def sample(pool: Servers, session: str, turn: int = 0) -> Any:
    name, extras = f"{session}.{turn}", Extras(session=session)
    return await pool.generate([*PROMPT, turn], Sampling(max_tokens=2), request_id=name, extras=extras)


async def test_replicas_sleep_from_a_release_to_the_next_load_and_wake_with_its_weights(published, models):
    async with serving_pool(published, 2, sleeps=True) as (pool, fakes):
        await sample(pool, "a")
        await pool.release()
        await pool.release()  # another round of an iteration: they sleep already
        assert [fake.asleep for fake in fakes] == [{"weights", "kv_cache"}] * 2
        waiting = asyncio.ensure_future(sample(pool, "a", 1))
        await asyncio.sleep(0)
        await pool.load(published[1])
        answer = await waiting
        assert answer.versions == ((0, 1),)
        # vLLM is given no seed, and a sampled answer may end after one token.
        own = logprobs_under(models[1], [*PROMPT, 1], answer.token_ids)
        assert answer.logprobs == pytest.approx(own, abs=1e-5)
        counts = pool.totals()
    for fake in fakes:
        assert fake.turns == ["load", "sleep 2", "wake weights", "load", "wake kv_cache"]
    assert counts["sleep_s"] > 0 and counts["wake_s"] > 0


async def test_a_replica_that_does_not_fall_asleep_is_lost_and_the_runs_own_is_killed(published):
    killed: list[str] = []
    lines: list[str] = []
    settings = {"tell": lines.append, "renew": killed.append, "sleeps": True}
    async with serving_pool(published, 2, **settings) as (pool, fakes):
        fakes[1].may_sleep = False
        await pool.release()
        assert [replica.state for replica in pool.replicas] == ["asleep", "lost"]
        assert killed == [pool.replicas[1].engine.url] and "did not fall asleep" in lines[0]
        await pool.load(published[1])
        assert [replica.state for replica in pool.replicas] == ["serving", "serving"]


async def test_a_replica_whose_load_fails_while_it_wakes_does_not_go_on_without_its_cache(folders):
    async with loaded_engine(folders) as (engine, fake):
        await engine.sleep()
        fake.loads_at_most = 1
        with pytest.raises(WeightsRefused, match="no space left"):
            await engine.load_weights(1, folders[1])
        assert fake.asleep == {"kv_cache"}  # and nothing was resumed, which the fake would refuse
        fake.loads_at_most = 2
        await engine.refuse_unfit()
        await load(engine, 1, folders[1])
        assert (await answer_of(engine)).versions == ((0, 1),)


async def test_what_a_lost_replica_had_is_sampled_elsewhere_and_it_returns_with_new_weights(published):
    lines: list[str] = []
    states: list[tuple[str, int | None]] = []
    async with open_pool(published, 2, tell=lines.append) as (pool, fakes):
        second = pool.replicas[1]

        def report(name: str, *, state: str, version: int | None, **facts: Any) -> None:
            if name in second.engine.url:
                states.append((state, version))

        pool.watch(report)
        await pool.load(published[0])
        await asyncio.gather(*(sample(pool, f"r{name}") for name in range(4)))
        fakes[1].down = True
        generations = await asyncio.gather(*(sample(pool, f"r{name}", 1) for name in range(4)))
        assert [generation.versions for generation in generations] == [((0, 0),)] * 4
        assert [replica.state for replica in pool.replicas] == ["serving", "lost"]
        await pool.load(published[1])
        assert [replica.state for replica in pool.replicas] == ["serving", "lost"]
        fakes[1].down = False
        await brought_back(pool, 1)
        fakes[0].down = True
        generation = await sample(pool, "r9")
    assert generation.versions == ((0, 1),)
    assert "is lost" in lines[0] and "answered 500" in lines[0] and "EngineCore died" in lines[0]
    assert [state for state, _ in itertools.groupby(states)] == [
        ("starting", None), ("serving", 0), ("lost", None), ("serving", 1),
    ]  # fmt: skip


async def test_a_version_that_cannot_be_read_loses_a_replica_and_leaves_it_looked_after(published, tmp_path):
    async with open_pool(published, wait_s=0.0) as (pool, _):
        unreadable = published[0].model_copy(update={"folder": tmp_path / ("x" * 300)})
        with pytest.raises(WeightsRefused, match=r"no replica serves version 0: .*File name too long"):
            await pool.load(unreadable)
        watch = asyncio.ensure_future(pool.look_after())
        await pool.load(published[0])
        assert (await sample(pool, "r")).versions == ((0, 0),)
        watch.cancel()


async def test_a_replica_that_stays_away_is_restarted_where_the_run_can(published):
    renewed: list[str] = []

    def renew(url: str) -> None:
        renewed.append(url)
        fakes[[replica.engine.url for replica in pool.replicas].index(url)].down = False

    async with serving_pool(published, 2, wait_s=2.0, renew=renew) as (pool, fakes):
        fakes[0].down = True
        await asyncio.gather(*(sample(pool, f"r{name}") for name in range(2)))
        await brought_back(pool, 0)
        assert renewed == [pool.replicas[0].engine.url]


async def test_a_server_that_was_placed_elsewhere_is_asked_there_once_it_has_the_weights(published):
    with fake_vllm(published[0].folder) as (elsewhere, new_url):
        async with serving_pool(published) as (pool, fakes):
            urls = [pool.replicas[0].engine.url, new_url]
            states: list[tuple[str, str]] = []
            pool.watch(lambda name, *, state, **facts: states.append((name, state)))
            pool.move(*urls)
            watch = asyncio.ensure_future(pool.look_after())
            assert (await sample(pool, "r")).versions == ((0, 0),)
            watch.cancel()
    assert (len(fakes[0].served), len(elsewhere.served)) == (0, 1)
    first, second = (url.removeprefix("http://") for url in urls)
    assert states == [(first, "serving"), (first, "gone"), (second, "lost"), (second, "serving")]


async def test_a_replica_that_is_brought_back_amid_a_publish_never_serves_the_version_before(published):
    async with serving_pool(published) as (pool, [fake]):
        (replica,) = pool.replicas
        replica.state = "lost"
        fake.may_load.clear()
        watch = asyncio.ensure_future(pool.look_after())
        while replica.task.done():
            await asyncio.sleep(0.01)
        publishing = asyncio.ensure_future(pool.load(published[1]))
        answer = asyncio.ensure_future(sample(pool, "r"))
        await asyncio.sleep(0)
        fake.may_load.set()
        await publishing
        watch.cancel()
        assert (await answer).versions == ((0, 1),)
    assert fake.loads[-2:] == [str(version.folder) for version in published]


async def test_a_load_that_leaves_the_head_as_it_was_is_refused_by_the_canary(published):
    async with serving_pool(published, wait_s=0.0) as (pool, [fake]):
        fake.forgets_head = True
        with pytest.raises(WeightsRefused, match="log-probs of the canary differ by"):
            await pool.load(published[1])
        with pytest.raises(RemoteUnavailable, match="weights that have not passed the canary"):
            await answer_of(pool.replicas[0].engine)


async def test_a_streamed_request_is_not_sampled_again_elsewhere(published):
    async with serving_pool(published, 2) as (pool, fakes):
        for fake in fakes:
            fake.down = True
        with pytest.raises(RemoteUnavailable):
            await pool.generate(
                PROMPT, Sampling(max_tokens=2), request_id="s", extras=Extras(on_token=lambda token: None)
            )


async def test_a_busy_replica_is_asked_again_and_not_lost(published):
    async with serving_pool(published) as (pool, [fake]):
        fake.busy = 1
        assert (await sample(pool, "r")).versions == ((0, 0),)
        assert pool.replicas[0].state == "serving"
        assert len(fake.served) == 1


async def test_a_failure_of_before_a_load_says_nothing_of_the_replica_since(published):
    async with serving_pool(published) as (pool, [fake]):
        fake.holds.clear()
        answer = asyncio.ensure_future(sample(pool, "r"))
        while not fake.served:
            await asyncio.sleep(0.01)
        await pool.load(published[1])
        fake.fails_once = True
        fake.holds.set()
        assert (await answer).versions == ((0, 1),)
        assert pool.replicas[0].last_error == ""


async def test_weights_that_change_under_a_stop_string_lose_no_replica(published, tokenizer):
    async with serving_pool(published, weight_update="keep") as (pool, [fake]):
        fake.holds.clear()
        sampling = Sampling(max_tokens=8, temperature=0.0)
        extras = Extras(stop=StopStrings(tokenizer.decode, [" "]))
        answer = asyncio.ensure_future(pool.generate(PROMPT, sampling, request_id="r", extras=extras))
        while not fake.served:
            await asyncio.sleep(0.01)
        await pool.load(published[1])
        fake.holds.set()
        generation = await answer
        assert generation.versions[0] == (0, 0) and pool.replicas[0].state == "serving"
