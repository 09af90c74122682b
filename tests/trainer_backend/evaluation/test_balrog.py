"""`configs/crafter_balrog.toml` over HTTP: the server gets the requests that BALROG would send."""

import asyncio
import json
from hashlib import blake2b
from pathlib import Path

from tests.conftest import at_the_task_app
from tests.foreign_server import foreign_server, words
from trainer_backend.collect.plan import Inference
from trainer_backend.evaluation.play import evaluate
from trainer_backend.job.load import load_job

ROOT = Path(__file__).parents[3]
GAMES = json.loads((ROOT / "tests/task_app/environments/crafter/balrog_games.json").read_text())["games"]


def test_a_server_gets_the_requests_of_balrog_and_the_figures_are_its_progress():
    game = next(game for game in GAMES if game["seed"] == 61)  # most of its answers are empty
    turns = len(game["answers"])
    job = load_job(
        ROOT / "configs/crafter_balrog.toml",
        [f"evaluation.seeds=[{game['seed']}]", f"rollout.max_turns={turns}"],
    ).config
    with foreign_server(*map(words, game["answers"])) as server:
        result = asyncio.run(evaluate(at_the_task_app(job), Inference(server.url, "their-model", None)))
    prompts = [
        [[message["role"], message["content"]] for message in body.pop("messages")] for body in server.bodies
    ]
    assert [blake2b(json.dumps(prompt).encode(), digest_size=8).hexdigest() for prompt in prompts] == game[
        "digests"
    ]
    assert server.bodies == [{"model": "their-model", "temperature": 1.0, "max_tokens": 8192}] * turns
    assert result.outcome.mean / 22 == game["progression"]
    assert result.endings == {"max_decisions": 1}
    assert result.invalid_frac == game["answers"].count("") / turns


def test_the_limits_are_those_of_balrog():
    job = load_job(ROOT / "configs/crafter_balrog.toml").config
    assert (job.rollout.max_turns, job.evaluation.instances) == (2_000, 10)
    assert job.rollout.env_config == {"text": "balrog"}
