"""An engine in a process of its own, a real child: the tokens of an engine of this process, and its death."""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from service_kit.socket_calls import serve_calls
from shared_schemas.trajectory import Sampling
from trainer_backend import errors
from trainer_backend.errors import ContextLengthExceeded, EngineStopped
from trainer_backend.inference.actor import Extras, FrozenEngine, Generation, SampledToken
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.stop_strings import Decode, StopStrings
from trainer_backend.inference.versions import PolicyVersion
from trainer_backend.job.tables import InferenceTable, ModelTable
from trainer_backend.processes import gateway_process
from trainer_backend.processes.engine_calls import ENGINE_CALLS, EngineSetup
from trainer_backend.processes.engine_process import EngineHost
from trainer_backend.processes.gateway_calls import GatewaySetup
from trainer_backend.processes.launching import Role
from trainer_backend.processes.policy_server import engine_of_folder
from trainer_backend.processes.process_engine import EngineLost, ProcessEngine
from trainer_backend.run.fixed_setup import FixedSetup

# One at a time: which requests are decoded together changes the last bits.
KEYS = InferenceTable(max_running=1, kept_prefixes=0, max_model_len=64)
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14]]


async def answered(engine: FrozenEngine, decode: Decode) -> list[Any]:
    """Samples of each kind, at the same time."""
    told: list[list[SampledToken]] = [[], []]

    async def ask(place: int, extras: Extras, **keys: Any) -> Generation:
        sampling = Sampling(max_tokens=12, seed=place, **keys)
        ids = PROMPTS[place % len(PROMPTS)]
        return await engine.generate(ids, sampling, request_id=f"r{place}", extras=extras)

    plain = await asyncio.gather(*(ask(place, Extras()) for place in range(6)))
    text = decode(plain[0].token_ids)
    others = await asyncio.gather(
        ask(0, Extras(stop=StopStrings(decode, (text[3:6],)), on_token=told[0].append)),
        ask(1, Extras(on_token=told[1].append)),
        ask(2, Extras(likeliest=3, processed=True), top_k=5),
        ask(3, Extras(common_draws=True)),
    )
    return [plain, others, told]


def engine_at(folder: Path, version: int = 0) -> ProcessEngine:
    table, first = ModelTable(path=folder, device="cpu"), PolicyVersion(number=version, folder=folder)
    return ProcessEngine(EngineSetup(model=table, keys=KEYS, version=first))


class GatewayEnds(Exception):
    """In place of the end of the gateway's process, which is started again."""


def end_gateway(word: str, error: Exception | None = None) -> None:
    raise GatewayEnds(word)


def test_the_engine_of_a_gateway_samples_what_one_of_this_process_samples_and_its_end_is_the_gateways(
    model_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_process, "_die", end_gateway)
    folder = model_folders["qwen3"]
    table = ModelTable(path=folder, device="cpu")
    local, tokenizer = engine_of_folder(table, folder, KEYS, version=3)
    local.start()
    decode = ChatRenderer(tokenizer).decode

    async def both() -> tuple[list[Any], list[Any]]:
        with pytest.raises(EngineStopped, match="was not started"):
            await engine_at(folder).generate([1], Sampling(max_tokens=1), request_id="0")
        setup = GatewaySetup(
            job_name="tiny",
            model=table,
            inference=KEYS.model_copy(update={"own_process": True}),
            fixed=FixedSetup(),
            run=folder,
            version=PolicyVersion(number=3, folder=folder),
            probes=False,
        )
        engine, _ = await gateway_process.make_engine(setup, lambda event: None)
        assert isinstance(engine, ProcessEngine)
        try:
            ours = await answered(engine, decode)
            assert engine.counters.requests == sum(map(len, ours[:2]))
            await engine.probe()
            with pytest.raises(ContextLengthExceeded):
                await engine.generate([1], Sampling(max_tokens=64), request_id="1")
            with pytest.raises(errors.BadChatRequest, match="prompt ids must lie in"):
                await engine.generate([1 << 20], Sampling(max_tokens=1), request_id="2")
            with pytest.raises(errors.WeightsRefused):
                await engine.load(PolicyVersion(number=4, folder=folder / "none"))
            assert engine.version == 3
            await engine.load(PolicyVersion(number=4, folder=folder))
            after = await engine.generate([5, 6], Sampling(max_tokens=2, seed=0), request_id="3")
            assert (after.versions, engine.version) == (((0, 4),), 4)
            sampling = Sampling(max_tokens=60, seed=1)
            endless = asyncio.ensure_future(engine.generate([5], sampling, request_id="4"))
            await engine.probe()
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGSTOP)
            endless.cancel()
            waiting = asyncio.ensure_future(engine.probe())
            await asyncio.sleep(0)
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineStopped, match="its process has ended"):
                await waiting
            with pytest.raises(GatewayEnds, match="ended with SIGKILL"):
                await gateway_process.look_after(engine)
            with pytest.raises(EngineStopped, match="its process has ended"):
                await engine.probe()
        finally:
            await engine.close()
        return ours, await answered(local, decode)

    try:
        ours, expected = asyncio.run(both())
    finally:
        local.stop()
    assert ours == expected
    stopped = ours[1][0]
    assert stopped.stop_string is not None and len(ours[2][0]) == len(stopped.token_ids) - 1 < 11


class Here:
    """A launcher, and a process that is this one."""

    async def start(self, role: Role) -> "Here":
        connected = socket.socket(fileno=os.dup(role.descriptors[0]))
        self._serves = asyncio.ensure_future(serve_calls(ENGINE_CALLS, EngineHost(), connected))
        return self

    async def ended(self, grace_s: float = 0.0) -> None:
        await asyncio.shield(self._serves)

    end = ended


async def test_a_folder_that_cannot_be_served_is_refused_by_the_error_of_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_backend.processes.process_engine.LOCAL", Here())
    engine = engine_at(tmp_path)
    try:
        with pytest.raises(errors.ModelFolderError, match=f"{tmp_path}: "):
            await engine.begin()
    finally:
        await engine.close()


async def test_a_process_that_ends_before_it_serves_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_backend.processes.engine_calls._MODULE", "this")  # a poem
    engine = engine_at(tmp_path)
    with pytest.raises(EngineLost, match="the engine's process ended with exit code 0"):
        await engine.begin()
    await engine.close()
