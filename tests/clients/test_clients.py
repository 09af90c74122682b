"""The clients that people bring, as they are installed: each plays its scenarios against real servers.

`make test-clients` builds their environments. What is missing there is skipped in `make test`.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared_schemas.trajectory import PolicyLogprobs
from tests.clients.servers import Service, services

HERE = Path(__file__).parent
ENVIRONMENTS = os.environ.get("TURNWISE_TEST_CLIENTS")
# The environment of each client; the pins of two environments differ.
CLIENTS = {
    "openai": "sdk",
    "anthropic": "sdk",
    "agents": "sdk",
    "langchain": "sdk",
    "pydantic_ai": "sdk",
    "litellm": "litellm",
    "dspy": "litellm",
    "smolagents": "litellm",
    "instructor": "instructor",
    "crewai": "crewai",
    "synth": "synth",
}
# A scenario of several calls, and the number of its conversations. dspy and smolagents rewrite their prompts.
CONVERSATIONS = {
    "openai": ("tools", 1),
    "anthropic": ("tool_runner", 1),
    "agents": ("tools", 2),
    "langchain": ("agent", 3),
    "pydantic_ai": ("tools_and_structured", 3),
    "litellm": ("tools", 4),
    "instructor": ("asks_again", 2),
    "crewai": ("structured_after_tools", 3),
}
LONGEST_RUN_S = 220

pytestmark = pytest.mark.skipif(ENVIRONMENTS is None, reason="make test-clients builds their environments")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Service]]:
    with services(tmp_path_factory.mktemp("served") / "model") as both:
        yield both


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_works_at_a_capture(client: str, both: Mapping[str, Service], tmp_path: Path) -> None:
    fail_with(play(client, both["capture"], tmp_path))


@pytest.mark.parametrize("client", CONVERSATIONS)
def test_a_client_continues_a_conversation_by_its_exact_tokens(
    client: str, both: Mapping[str, Service], tmp_path: Path
) -> None:
    scenario, count = CONVERSATIONS[client]
    fail_with(play(client, both["capture"], tmp_path, only=scenario))
    steps = recorded(both["capture"], f"{client}_client.{scenario}")
    pairs = zip([None, *steps], steps, strict=False)
    assert sum(before is None or not continues(before, step) for before, step in pairs) == count < len(steps)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_works_at_the_gateway(client: str, both: Mapping[str, Service], tmp_path: Path) -> None:
    fail_with(play(client, both["serve"], tmp_path))


def fail_with(failures: list[str]) -> None:
    if failures:
        pytest.fail("\n\n".join(failures), pytrace=False)


def recorded(service: Service, name: str) -> list[PolicyLogprobs]:
    """The tokens of the decisions in the last capture of a scenario."""
    path = next(one["path"] for one in reversed(service.recorder.asked[name]) if "/v1/" in one["path"])
    url = service.setting["url"] + path.partition("/v1/")[0]
    state = httpx.post(f"{url}/end", headers={"X-API-Key": service.setting["key"]}).json()
    return [PolicyLogprobs.model_validate(step["policy_logprobs"]) for step in state["trajectory"]["steps"]]


def continues(before: PolicyLogprobs, step: PolicyLogprobs) -> bool:
    whole = before.prompt_ids_reused + len(before.prompt_token_ids) + len(before.token_ids)
    return step.prompt_ids_reused == whole


def play(client: str, service: Service, folder: Path, *, only: str | None = None) -> list[str]:
    """Play the scenarios of a client; each that failed, with its error and its last request and answer."""
    results = folder / "results.jsonl"
    setting = json.dumps({**service.setting, "results": str(results), "only": only})
    command = [f"{ENVIRONMENTS}/{CLIENTS[client]}/bin/python", str(HERE / f"{client}_client.py"), setting]
    process = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LONGEST_RUN_S,
        cwd=folder,
        env=_variables(folder),
        check=False,
    )
    assert process.returncode == 0 and results.exists(), process.stderr[-4000:]
    outcomes = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    failed = [(one["scenario"], one["error"]) for one in outcomes if one["error"] is not None]
    asked = service.recorder.asked
    return [f"{name}: {error}\n{_last(asked.get(f'{client}_client.{name}', ()))}" for name, error in failed]


def _variables(home: Path) -> dict[str, str]:
    """No key of this machine's, and a home for what libraries write."""
    return {"PATH": os.environ["PATH"], "HOME": str(home)}


def _last(asked: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(asked[-1], indent=1)[:3000] if asked else "nothing was asked"
