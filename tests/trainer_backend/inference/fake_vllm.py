"""The routes of vLLM that we use, on a local engine: real weights from folders, and faults to order."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from service_kit.server import Listener, ServerThread
from shared_schemas.trajectory import Sampling
from trainer_backend.inference.actor import Extras, Generation
from trainer_backend.inference.engine import LocalEngine
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.vllm_worker.turnwise_transfer import Worker, receive
from trainer_backend.inference.vllm_worker.turnwise_weights import tensors
from trainer_backend.models import load_model_folder

SERVED_NAME = "actor"
# Prompts that are none of a rollout.
PROBES = ([1], list(range(1, 17)))


class FakeVllm:
    """The server's state and its faults. Keywords set them; a test may change them while the server runs."""

    release = "0.32.0"
    max_model_len = 256
    lacks: tuple[str, ...] = ()  # routes that it was not started with
    has_worker = True  # it was started with our worker class
    receives = True  # it was started to receive weights from a learner
    sleeps = True  # it was started to give memory back
    may_sleep = True  # a sleep fails without it
    sees_folders = True  # it runs on a machine that has the trainer's disk
    rpc_status = 200  # of calls to its workers
    down = False  # it answers 500 to every sample; `/health` stays 200
    down_after = 1 << 60  # so does it after that many samples
    wedged = False  # samples get no answer; `/health` stays 200
    fails_once = False  # the sample that is held, or the next, is answered with 500
    busy = 0  # so many requests are answered with 429
    full = False  # requests for one token get no answer, as behind a queue
    goes_on = False  # its metrics count further tokens whenever they are read
    slow_prompt: list[int] | None = None  # the samples that `holds` are of it, where there is one
    loads_at_most = 1 << 60  # later loads fail
    forgets_head = False  # it answers 200 to a load and keeps the output head of before
    raw = False  # its log-probs are those before the temperature
    streams_wait = False  # it sends the last token of a stream after the request was aborted
    # The process that finds and removes this file at its third sample dies of it, or is down from then on
    # where the file says so.
    deadly_file: Path | None = None
    version = "default"
    counted = probes = 0

    def __init__(self, folder: Path) -> None:
        model, tokenizer = load_model_folder(folder)
        self.model = model.eval()
        keys = EngineKeys(max_running=8)
        self.engine = LocalEngine(self.model, stop_ids=[tokenizer.eos_token_id], keys=keys)
        # Samples of rollouts, a load, and a pause (as for requests that run) wait for them.
        self.holds, self.may_load, self.may_pause = threading.Event(), threading.Event(), threading.Event()
        self.let_all_go_on()
        self.asleep = set[str]()  # the kinds of memory that it has given back
        self.turns, self.paused = list[str](), list[str]()
        # Versions that it was told, and (prompt ids, version) of every sample.
        self.loads, self.served = list[str](), list[tuple[list[int], str]]()
        self.die: Callable[[], object] = lambda: os._exit(9)  # ends the process that it serves for
        self._updates = False
        self._names = count()
        self._streams: dict[str, asyncio.Event] = {}
        self._running = asyncio.Event()
        self._running.set()

    def let_all_go_on(self) -> None:
        self.wedged = self.full = False
        for event in (self.holds, self.may_load, self.may_pause):
            event.set()

    def app(self) -> Starlette:
        routes = {
            "/version": ("GET", self._version),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._ok),
            "/weight_info": ("GET", self._ok),
            "/metrics": ("GET", self._metrics),
            "/inference/v1/generate": ("POST", self._generate),
            "/inference/v1/abort_requests": ("POST", self._abort_requests),
            "/pause": ("POST", self._pause),
            "/resume": ("POST", self._resume),
            "/sleep": ("POST", self._sleep),
            "/wake_up": ("POST", self._wake_up),
            "/collective_rpc": ("POST", self._collective_rpc),
            "/reset_prefix_cache": ("POST", self._ok),
            "/update_weight_version": ("POST", self._update_weight_version),
            "/start_weight_update": ("POST", self._start_or_finish),
            "/update_weights": ("POST", self._update_weights),
            "/finish_weight_update": ("POST", self._start_or_finish),
        }
        return Starlette(
            routes=[
                Route(path, call, methods=[verb])
                for path, (verb, call) in routes.items()
                if path not in self.lacks
            ]
        )

    async def _ok(self, request: Request) -> Response:
        return Response()

    async def _metrics(self, request: Request) -> Response:
        self.counted += self.goes_on
        return Response(
            "# TYPE vllm:generation_tokens_total counter\n"
            f'vllm:generation_tokens_total{{engine="0",model_name="actor"}} {self.counted:.1f}\n'
            'vllm:prompt_tokens_total{engine="0",model_name="actor"} 1.2e+06\n'
        )

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": self.release})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": SERVED_NAME, "max_model_len": self.max_model_len}]})

    async def _pause(self, request: Request) -> Response:
        await asyncio.to_thread(self.may_pause.wait)
        self.paused.append(request.query_params["mode"])
        self._running.clear()
        if request.query_params["mode"] == "keep":
            await self.engine.pause()
        return JSONResponse({"status": "paused"})

    async def _sleep(self, request: Request) -> Response:
        self.turns.append(f"sleep {request.query_params['level']}")
        if not self.may_sleep:
            return Response("Memory usage increased after sleeping.", status_code=500)
        self._running.clear()
        self.asleep = {"weights", "kv_cache"}
        return JSONResponse({"status": "sleeping"})

    async def _wake_up(self, request: Request) -> Response:
        """Without tags everything wakes, and where all is awake it goes on."""
        tags = request.query_params.getlist("tags")
        self.turns += [f"wake {tag}" for tag in tags]
        self.asleep -= {*tags} or self.asleep
        if not self.asleep:
            await self.engine.resume()
            self._running.set()
        return JSONResponse({"status": "sleeping" if self.asleep else "awake"})

    async def _resume(self, request: Request) -> Response:
        if self.asleep:  # it would step over a cache that has no memory
            return Response("EngineCore died", status_code=500)
        await self.engine.resume()
        self._running.set()
        return JSONResponse({"status": "resumed"})

    async def _collective_rpc(self, request: Request) -> Response:
        body = await request.json()
        if self.rpc_status != 200:
            return Response("try later", status_code=self.rpc_status)
        checks = {
            "turnwise_ready": (self.has_worker, "'CPUWorker' object has no attribute 'turnwise_ready'"),
            "turnwise_receives": (
                self.receives, "turnwise_receives: --weight-transfer-config names no backend of Turnwise",
            ),
            "turnwise_sleeps": (
                self.sleeps, "turnwise_sleeps: it was started without --enable-sleep-mode",
            ),
        }  # fmt: skip
        if body["method"] in checks:
            passes, error = checks[body["method"]]
            return Response() if passes else Response(error, status_code=500)
        if "weights" in self.asleep:
            return Response("EngineCore died", status_code=500)
        folder, files, *adapters = body["args"]
        await asyncio.to_thread(self.may_load.wait)
        if not self.sees_folders:
            error = f"Call to collective_rpc method failed: [Errno 2] No such file or directory: {folder!r}"
            return JSONResponse({"error": {"message": error}}, status_code=500)
        if len(self.loads) >= self.loads_at_most:
            return Response("no space left on device", status_code=500)
        head = self.model.get_output_embeddings().weight.detach().clone()
        number = len(self.loads) + 1
        whole = dict(tensors(Path(folder), files, Path(adapters[0]))) if adapters else folder
        await self.engine.load_weights(number, whole)
        if self.forgets_head:
            self.model.config.tie_word_embeddings = False
            self.model.lm_head.weight = torch.nn.Parameter(head)
        self.turns.append("load")
        self.loads.append(adapters[0] if adapters else folder)
        return JSONResponse({"results": [{"seconds": 0.0}]})

    async def _start_or_finish(self, request: Request) -> Response:
        """An update is started once, and not finished where it has failed."""
        starts = request.url.path == "/start_weight_update"
        if starts == self._updates:
            return Response("no update is to be started or finished now", status_code=500)
        self._updates = starts
        return JSONResponse({})

    async def _update_weights(self, request: Request) -> Response:
        learner = (await request.json())["update_info"]
        weights: dict[str, torch.Tensor] = {}

        def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
            weights.clear()
            weights.update(tensors)

        await asyncio.to_thread(self.may_load.wait)
        address, worker = (learner["host"], learner["port"]), Worker(learner["server"], 0, 1)
        try:
            await asyncio.to_thread(
                receive, address, worker, load, device=torch.device("cpu"), wait_s=learner["wait_s"]
            )
        except (RuntimeError, OSError) as error:
            self._updates = False
            return Response(str(error), status_code=500)
        await self.engine.load_weights(len(self.loads) + 1, weights)
        self.loads.append(learner["server"])
        return JSONResponse({})

    async def _update_weight_version(self, request: Request) -> Response:
        self.version = (await request.json())["new_version"]
        return JSONResponse({"success": True})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        params, ids = body["sampling_params"], body["token_ids"]
        if "prompt_logprobs" in params:
            return JSONResponse({"choices": [], "prompt_logprobs": self._scored(ids)})
        if self.busy:
            self.busy -= 1
            return Response("too many requests", status_code=429)
        if self.down or len(self.served) >= self.down_after:
            return JSONResponse({"error": {"message": "EngineCore died"}}, status_code=500)
        await self._running.wait()
        while self.wedged:
            await asyncio.sleep(0.02)
        began = self.version
        if ids in PROBES:
            self.probes += 1
            while self.full:
                await asyncio.sleep(0.02)
        else:
            self.served.append((ids, began))
            if len(self.served) == 3 and self.deadly_file is not None and self.deadly_file.exists():
                self.down = self.deadly_file.read_text() == "down"
                self.deadly_file.unlink()
                if not self.down:
                    await asyncio.to_thread(self.die)
                return JSONResponse({"error": {"message": "EngineCore died"}}, status_code=500)
            if self.slow_prompt in (None, ids):
                await asyncio.to_thread(self.holds.wait)
            if self.fails_once:
                self.fails_once = False
                return JSONResponse({"error": {"message": "EngineCore died"}}, status_code=500)
        sampling = Sampling(temperature=params["temperature"], max_tokens=params["max_tokens"])
        likeliest = params["logprobs"]
        generation = await self.engine.generate(
            ids, sampling, request_id=str(next(self._names)), extras=Extras(likeliest=likeliest)
        )
        spans = [
            {"start": start, "version": began if place == 0 else self.version}
            for place, (start, _) in enumerate(generation.versions)
        ]
        if not body["stream"]:
            return JSONResponse({"choices": [self._choice(generation, 0, None, spans)]})
        name = f"generate-tokens-{next(self._names)}"
        return StreamingResponse(self._events(generation, spans, name), media_type="text/event-stream")

    async def _abort_requests(self, request: Request) -> Response:
        for name in (await request.json())["request_ids"]:
            self._streams[name].set()
        return Response()

    async def _events(
        self, generation: Generation, spans: list[dict[str, Any]], name: str
    ) -> AsyncIterator[str]:
        """The tokens one by one, and after an abort a last chunk without any."""
        aborted = self._streams[name] = asyncio.Event()
        last = len(generation.token_ids) - 1
        for place in range(len(generation.token_ids)):
            choice = self._choice(generation, place, place + 1, spans if place == last else None)
            if place == last and self.streams_wait:
                await aborted.wait()
            if aborted.is_set():
                choice |= {"token_ids": [], "logprobs": None, "weight_versions": spans}
            choice["finish_reason"] = (
                "abort" if aborted.is_set() else choice["finish_reason"] if place == last else None
            )
            yield f"data: {json.dumps({'request_id': name, 'choices': [choice]})}\n\n"
            if aborted.is_set():
                break
        yield "data: [DONE]\n\n"

    def _choice(
        self, generation: Generation, start: int, end: int | None, spans: list[dict[str, Any]] | None
    ) -> dict[str, Any]:
        tops = generation.likeliest or ((),) * len(generation.token_ids)
        content = [
            {
                "token_id": token_id,
                "logprob": logprob,
                "top_logprobs": [
                    {"token_id": name, "logprob": -1.0 if self.raw else value} for name, value in top
                ],
            }
            for token_id, logprob, top in zip(generation.token_ids, generation.logprobs, tops, strict=True)
        ]
        return {
            "token_ids": list(generation.token_ids[start:end]),
            "logprobs": {"content": content[start:end]},
            "finish_reason": generation.finish_reason,
            "weight_versions": spans,
        }

    def _scored(self, ids: Sequence[int]) -> list[dict[str, Any] | None]:
        with torch.inference_mode():
            logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return [
            None,
            *({str(id_): {"logprob": logprobs[place, id_].item()}} for place, id_ in enumerate(ids[1:])),
        ]


@contextmanager
def fake_vllm(folder: Path, *, port: int = 0, **settings: Any) -> Iterator[tuple[FakeVllm, str]]:
    """A fake that serves a model folder, and its base URL."""
    fake = FakeVllm(folder)
    vars(fake).update(settings)
    fake.engine.start()
    with ServerThread(fake.app(), Listener("127.0.0.1", port)) as url:
        try:
            yield fake, url
        finally:
            fake.let_all_go_on()
    fake.engine.stop()
