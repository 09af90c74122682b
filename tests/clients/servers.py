"""A task app and a gateway with a scripted engine, on real ports.

The model writes what a client's script asks it to, wherever that stands in the prompt (see `script.py`), so
every client meets the real services, and knows what a good model would have answered.
"""

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service_kit.server import Listener, ServerThread
from task_app.app import create_app
from task_app.held import Held
from task_app.settings import Settings
from tests.model_folders import make_qwen3, training_texts
from tests.task_app.counting import boards
from trainer_backend.errors import ContextLengthExceeded, EngineBusy
from trainer_backend.inference.actor import NO_EXTRAS, Extras, Generation, SampledToken
from trainer_backend.inference.chat_request import OF_LIBRARIES
from trainer_backend.inference.gateway_app import GatewayLimits, create_gateway
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.models.folder import load_tokenizer

KEY = "the-key-of-the-clients"
MODEL = "job/actor"
LONGEST = 24_000
_SCRIPT = re.compile(r"SCRIPT-(\w+)-([A-Za-z0-9+/=]+)-END")

Answer = Mapping[str, Any]


class ScriptedModel:
    """Writes the k-th answer of a script when a prompt holds it for the k-th time; the last one for ever."""

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}

    def answer(self, prompt: str) -> Answer:
        scripts = _SCRIPT.findall(prompt)
        if not scripts:
            return {"calls": [["add", {"names": ["a"]}]]}  # of a rollout in the environment `counting`
        name, code = scripts[-1]
        answers = json.loads(base64.b64decode(code))
        place = self._asked[name] = self._asked.get(name, 0) + 1
        answer: Answer = answers[min(place, len(answers)) - 1]
        return answer


class ScriptedEngine:
    """The model as an engine, in Qwen's words. It continues a call whose opening stands in the prompt."""

    version, max_model_len = 0, LONGEST

    def __init__(self, renderer: ChatRenderer, model: ScriptedModel) -> None:
        self._renderer, self._model = renderer, model
        self.breakdown: Future[str] = Future()
        self._is_overloaded = False

    def overload(self, is_overloaded: bool) -> None:
        self._is_overloaded = is_overloaded

    async def generate(
        self, ids: list[int], sampling: Any, *, request_id: str, extras: Extras = NO_EXTRAS
    ) -> Generation:
        if self._is_overloaded:
            raise EngineBusy("too many requests wait")
        prompt = self._renderer.decode(ids)
        if len(ids) + sampling.max_tokens > LONGEST:
            raise ContextLengthExceeded(
                prompt_tokens=len(ids), max_tokens=sampling.max_tokens, max_model_len=LONGEST, whose="its own"
            )
        text = _written(self._model.answer(prompt))
        opened = max(length for length in range(len(text) + 1) if prompt.endswith(text[:length]))
        whole = self._renderer.encode(text[opened:] + "<|im_end|>")
        sampled = whole[: sampling.max_tokens]
        tokens = [SampledToken(token, -0.5, ((token, -0.5),) * extras.likeliest) for token in sampled]
        for place, token in enumerate(tokens):
            if extras.stop is not None and (stop := extras.stop.take(token.token_id)) is not None:
                return _generation(tokens[: place + 1], "stop", stop)
            if extras.on_token is not None and place + 1 < len(tokens):
                extras.on_token(token)
        return _generation(tokens, "stop" if len(sampled) == len(whole) else "length")

    def start(self) -> None: ...

    def stop(self) -> None: ...

    async def close(self) -> None: ...


def _written(answer: Answer) -> str:
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in answer.get("calls", ())
    ]
    return "\n".join([*([answer["say"]] if answer.get("say") else []), *calls])


@dataclass
class Recorder:
    """ASGI middleware below /s/NAME/, which keeps what NAME asked.

    Of the scenario `retries` the first call of each dialect meets an overloaded service.

    Attributes:
        overload: whether the service has room, to be set.
    """

    app: ASGIApp
    overload: Callable[[bool], None]
    asked: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/s/"):
            await self.app(scope, receive, send)
            return
        name, _, rest = scope["path"].removeprefix("/s/").partition("/")
        path, asked = f"/{rest}", self.asked.setdefault(name, [])
        is_first = "/v1/" in path and path not in [one["path"] for one in asked]
        record: dict[str, Any] = {"method": scope["method"], "path": path, "status": None}
        asked.append(record)
        body, answer = bytearray(), bytearray()

        async def received() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                record["status"] = message["status"]
            answer.extend(message.get("body", b""))
            await send(message)

        self.overload(name.endswith(".retries") and is_first)
        await self.app({**scope, "path": path, "raw_path": path.encode()}, received, sent)
        self.overload(False)
        record["body"], record["answer"] = _json(bytes(body)), _json(bytes(answer))


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")


def _generation(tokens: list[SampledToken], reason: str, stop: str | None = None) -> Generation:
    ids, logprobs = [token.token_id for token in tokens], [token.logprob for token in tokens]
    likeliest = tuple(token.likeliest for token in tokens)
    return Generation(tuple(ids), tuple(logprobs), reason, ((0, 0),), stop, likeliest=likeliest)


@dataclass(frozen=True)
class Service:
    """What a client's process is told of a service, and who keeps what it asked.

    Attributes:
        setting: see `script.py`.
    """

    setting: Mapping[str, Any]
    recorder: Recorder


@contextmanager
def services(folder: Path) -> Iterator[Mapping[str, Service]]:
    """A task app whose captures ask a run's gateway, and a gateway as `turnwise serve` serves it.

    Both have a scripted engine with a tokenizer and a template in Qwen3's form.
    """
    make_qwen3(folder, training_texts())
    tokenizer = load_tokenizer(folder)
    engine = ScriptedEngine(ChatRenderer(tokenizer), ScriptedModel())
    policies = {MODEL: ServedPolicy(engine, tokenizer)}
    limits = GatewayLimits(leaves_out=OF_LIBRARIES)
    served = Recorder(create_gateway(policies, key=KEY, limits=limits), engine.overload)
    app = create_app(Settings(api_keys=(KEY,)), boards=boards())
    held: Held = app.state.services.captures.held
    most = held.most

    def fill(is_full: bool) -> None:
        held.most = 0 if is_full else most

    captured = Recorder(app, fill)
    with (
        ServerThread(create_gateway(policies, key=KEY), Listener("127.0.0.1", 0)) as inference_url,
        ServerThread(served, Listener("127.0.0.1", 0)) as serve_url,
        ServerThread(captured, Listener("127.0.0.1", 0)) as capture_url,
    ):
        config = {"inference_url": inference_url, "model": MODEL, "max_tokens": 1_000}
        policy = {"policy_name": "openai", "config": config, "inference_key": KEY}
        capture = {"kind": "capture", "url": capture_url, "key": KEY, "model": "gpt-4o", "policy": policy}
        serve = {"kind": "serve", "url": serve_url, "key": KEY, "model": MODEL}
        yield {"capture": Service(capture, captured), "serve": Service(serve, served)}
