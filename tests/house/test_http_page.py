"""The commands of docs/http.md, sent as they stand there: the answers are those that the page shows."""

import json
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from task_app.plugins import default_plug_boards
from tests.task_app.counting import running_app

PAGE = (Path(__file__).parents[2] / "docs/http.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def requests(text: str) -> list[tuple[str, dict[str, Any] | None]]:
    """Path and body of every curl command, in order."""
    console = "\n".join(blocks("console", text)).replace("\\\n", "")
    found = []
    for words in map(shlex.split, console.split("$ ")):
        if words[:2] == ["curl", "-s"]:
            url = urlsplit("http://" + words[2])
            body = json.loads(words[words.index("-d") + 1]) if "-d" in words else None
            found.append((f"{url.path}?{url.query}", body))
    return found


def shown(part: Any, answer: Any) -> Any:
    """The answer, cut down to the keys that the page shows."""
    if isinstance(part, dict) and isinstance(answer, dict):
        return {key: shown(part[key], answer[key]) for key in part if key in answer}
    return answer


async def test_the_decisions_by_hand_earn_what_the_page_shows():
    text = section("A decision by hand")
    (create, wanted), *steps = requests(text)
    pages = [json.loads(block) for block in blocks("json", text)]
    async with running_app(default_plug_boards()) as client:
        env_id = (await client.post(create, json=wanted)).json()["env_id"]
        answers = [(await client.post(path, json={**body, "env_id": env_id})).json() for path, body in steps]
    assert [shown(page, answer) for page, answer in zip(pages, answers, strict=True)] == pages
    for answer in answers:
        assert set(answer) <= set(re.findall(r"`(\w+)`", text)), "a key of the answer is not named"
    assert [answer["metadata"]["decision_rewards"]["unique_delta"] for answer in answers] == [1, 0]


async def test_the_rollout_by_hand_finishes_and_is_acknowledged():
    (post, wanted), (poll, _), (ack, ids) = requests(section("A rollout by hand"))
    async with running_app(default_plug_boards()) as client:
        assert (await client.post(post, json=wanted)).status_code == 202
        (rollout,) = (await client.get(poll)).json()["rollouts"]
        acked = (await client.post(ack, json=ids)).json()["acked"]
    assert rollout["status"] == "finished"
    assert acked == [rollout["rollout_id"]]
