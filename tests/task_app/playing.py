"""Crafter sessions over HTTP in one line each, for tests of what sessions do."""

from typing import Any

import httpx

ON = {"enabled": True, "mode": "decision_stepwise"}
# In the world of seed 17 the fourth action collects wood; see docs/http.md.
TO_THE_TREE = ["move_right", "move_right", "move_right", "do"]


def act(*actions: str) -> list[dict[str, Any]]:
    return [{"tool": "interact_many", "args": {"actions": list(actions)}}]


async def post(
    client: httpx.AsyncClient, path: str, headers: dict[str, str] | None = None, **body: Any
) -> dict[str, Any]:
    """The answer; any other than 200 fails the test."""
    answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def new_env(client: httpx.AsyncClient, seed: int = 17, **config: Any) -> str:
    made = await post(client, "/env/create", env_name="crafter", seed=seed, config=config)
    return made["env_id"]


async def step(client: httpx.AsyncClient, env_id: str, *actions: str) -> dict[str, Any]:
    return await post(client, "/env/step", env_id=env_id, tool_calls=act(*actions))


async def new_policy(client: httpx.AsyncClient, name: str = "random", **body: Any) -> str:
    return (await post(client, "/policy/create", policy_name=name, **body))["policy_id"]


async def decision(client: httpx.AsyncClient, policy_id: str, **body: Any) -> tuple[Any, dict[str, Any]]:
    """Tool calls and `meta`, without what a clock or an id makes different."""
    answer = await post(client, "/policy/step", policy_id=policy_id, **body)
    return answer["tool_calls"], {name: value for name, value in answer["meta"].items() if name != "policy_s"}


async def refused(
    client: httpx.AsyncClient, path: str, headers: dict[str, str] | None = None, **body: Any
) -> tuple[int, str, str | None, str]:
    """Status, code, where, and the sentence with its hint."""
    answer = await client.post(path, json=body, headers=headers)
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    problem = answer.json()
    told = problem["detail"] + " | " + problem.get("hint", "")
    return answer.status_code, problem["code"], problem.get("where"), told


async def refused_at(client: httpx.AsyncClient, path: str, **body: Any) -> tuple[int, str | None]:
    """Status and where."""
    told = await refused(client, path, **body)
    return told[0], told[2]
