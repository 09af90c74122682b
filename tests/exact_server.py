"""Somebody else's server that returns exact tokens, in vLLM's words and with vLLM's habits, on a real engine.

It continues token ids, tells ids and log-probs only where a request asks for them, and fills what a request
leaves open from its model's generation config: here top_k 2, as many models have some.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service_kit.server import Listener, ServerThread
from shared_schemas.trajectory import Sampling
from tests.foreign_server import ELSEWHERE, error
from trainer_backend.inference.actor import Extras, Generation
from trainer_backend.inference.engine import LocalEngine, stop_token_ids
from trainer_backend.inference.keys import EngineKeys
from trainer_backend.inference.served_policy import ServedPolicy
from trainer_backend.models.folder import load_model_folder

TOP_K_OF_THE_MODEL = 2
PENALTY_OF_THE_MODEL = 1.05


@dataclass
class ExactServer:
    """
    Attributes:
        processed: its --logprobs-mode: of what it sampled from; else of softmax(logits).
        leaves_out: fields of the reply that this version of it does not have.
        shift: its tokenizer gives each text ids that are so much higher than the actor's.
        answers: how many requests it answers before it is gone; None: all.
    """

    policy: ServedPolicy
    key: str = ""
    processed: bool = False
    leaves_out: frozenset[str] = frozenset()
    shift: int = 0
    answers: int | None = None
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return error(401, f"no such key: {request.headers.get('authorization')}")
        if self.answers is not None and len(self.bodies) >= self.answers:
            return error(503, "the server is shutting down")
        self.bodies.append(body)
        if body.get("repetition_penalty", PENALTY_OF_THE_MODEL) != 1.0:
            return error(400, "the engine of these tests has no penalties")
        prompt, room = body["prompt"], self.policy.engine.max_model_len
        ids = prompt
        if isinstance(prompt, str):
            ids = [token + self.shift for token in self.policy.renderer.encode(prompt)]
        if len(ids) + body["max_tokens"] > room:
            return error(400, f"This model's maximum context length is {room} tokens, and you ask for more.")
        name, extras = str(len(self.bodies)), Extras(processed=self.processed)
        generation = await self.policy.engine.generate(
            ids, self._sampling(body), request_id=name, extras=extras
        )
        return JSONResponse(self._reply(body, ids, generation))

    def _sampling(self, body: dict[str, Any]) -> Sampling:
        return Sampling(
            temperature=body.get("temperature", 1.0),
            top_p=body.get("top_p", 1.0),
            top_k=max(body.get("top_k", TOP_K_OF_THE_MODEL), 0),
            seed=body.get("seed"),
            max_tokens=body["max_tokens"],
        )

    def _reply(self, body: dict[str, Any], ids: list[int], generation: Generation) -> dict[str, Any]:
        told: dict[str, Any] = {"logprobs": None, "token_ids": None, "prompt_token_ids": None}
        if body.get("logprobs") is not None:
            told["logprobs"] = {"token_logprobs": list(generation.logprobs)}
        if body.get("return_token_ids"):
            told |= {"token_ids": list(generation.token_ids), "prompt_token_ids": ids}
        text = self.policy.renderer.decode(generation.token_ids)
        choice = {"index": 0, "text": text, "finish_reason": generation.finish_reason, **told}
        for name in self.leaves_out:
            choice.pop(name, None)
        return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice]}


@contextmanager
def exact_server(
    folder: Path, *, host: str = ELSEWHERE, max_model_len: int = 512, **habits: Any
) -> Iterator[ExactServer]:
    """The model of a folder, on a real port."""
    model, tokenizer = load_model_folder(folder)
    model.set_attn_implementation("sdpa")
    engine = LocalEngine(
        model,
        stop_ids=stop_token_ids(model.generation_config, tokenizer),
        keys=EngineKeys(max_model_len=max_model_len),
    )
    server = ExactServer(ServedPolicy(engine, tokenizer), **habits)
    app = Starlette(routes=[Route("/v1/completions", server.complete, methods=["POST"])])
    engine.start()
    with ServerThread(app, Listener(host, 0)) as server.url:
        yield server
    engine.stop()
