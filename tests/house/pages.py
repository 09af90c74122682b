"""The commands of a page of the docs, and what it shows of their answers, for tests that send them."""

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

KINDS = {".html": "text/html", ".png": "image/png", ".gif": "image/gif"}


@dataclass
class Command:
    """One `ask` or `curl -s`, and what is shown of its answer: JSON, lines of text, or a file's kind."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    body: str | None = None
    shown: Any = None

    def asks(self, method: str, path: str) -> bool:
        """Is this a request of that operation of an OpenAPI document?"""
        pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path))
        return self.method == method and re.fullmatch(pattern, self.path.partition("?")[0]) is not None


@dataclass(frozen=True)
class Reader:
    """What commands leave out: the address that `curl` names in full, and the headers that `ask` sends."""

    address: str
    headers: Mapping[str, str]

    def commands(self, text: str) -> list[Command]:
        """In order. A block of answers belongs to the last commands of the block above it, one to one."""
        found: list[Command] = []
        for language, block in re.findall(r"```(console|json|text)\n(.*?)```", text, re.S):
            if language == "console":
                lines = block.removeprefix("$ ").split("\n$ ")
                found += [one for line in lines if (one := self._command(line))]
                continue
            answers = list(documents(block)) if language == "json" else [block.splitlines()]
            assert len(answers) <= len(found), f"more answers than commands: {block}"
            for one, answer in zip(found[len(found) - len(answers) :], answers, strict=True):
                assert one.shown is None, f"{one.path} has two answers"
                one.shown = answer
        return found

    def _command(self, line: str) -> Command | None:
        words = iter(shlex.split(line.replace("\\\n", "")))
        first = next(words)
        if first == "curl" and next(words) == "-s":
            found = Command("GET", next(words).removeprefix(self.address))
        elif first == "ask":
            found = Command("GET", next(words), dict(self.headers))
        else:
            return None
        for option in words:
            value = next(words)
            match option:
                case "-d":
                    found.body, found.method = value, "POST"
                case "-X":
                    found.method = value
                case "-H":
                    found.headers |= [value.split(": ", 1)]
                case "-u":
                    found.user = value
                case "-o":
                    found.shown = KINDS[Path(value).suffix]
                case _:
                    raise AssertionError(f"{line}: what is {option}?")
        return found


async def play(
    client: httpx.AsyncClient, commands: Collection[Command], names: Collection[str], *, key: str = ""
) -> list[tuple[Command, httpx.Response, Any]]:
    """Each command with its answer, and what the page shows of it.

    Args:
        names: what an answer tells, for a later command or answer that has it as `<name>`.
        key: stands for `$ENVIRONMENT_API_KEY`.
    """
    told: dict[str, Any] = {}
    found = []
    for one in commands:
        answer = await client.request(
            one.method,
            _filled(one.path, told),
            headers=one.headers,
            auth=tuple(one.user.replace("$ENVIRONMENT_API_KEY", key).split(":")) if one.user else None,
            content=_filled(one.body, told) if one.body is not None else None,
        )
        if "json" in answer.headers["content-type"] and isinstance(answer.json(), dict):
            known = answer.json() | (answer.json().get("metadata") or {})
            told |= {name: known[name] for name in names if name in known}
        found.append((one, answer, json.loads(_filled(json.dumps(one.shown), told))))
    return found


def has_status(answer: httpx.Response, shown: Any) -> bool:
    """Whether its status is the one shown: any of an error in a library's form, else that of a success."""
    words = shown if isinstance(shown, dict) else {}
    if isinstance(words.get("status"), int):
        return bool(answer.status_code == words["status"])
    return answer.is_client_error if "error" in words else answer.is_success


def documents(block: str) -> Iterator[Any]:
    """A block may hold several answers, one after the other."""
    text = block.strip()
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        yield value
        text = text[end:].strip()


def _filled(text: str, told: Mapping[str, Any]) -> str:
    for name, value in told.items():
        text = text.replace(f"<{name}>", value if isinstance(value, str) else json.dumps(value))
    return text


def cut(shown: Any, answer: Any) -> Any:
    """The answer, as little of it as the page shows."""
    if isinstance(shown, dict) and isinstance(answer, dict):
        return {key: cut(part, answer[key]) for key, part in shown.items() if key in answer}
    if isinstance(shown, list) and isinstance(answer, list):
        if shown[-1:] == ["..."]:
            return [*map(cut, shown[:-1], answer), "..."]
        return [*map(cut, shown, answer)] if len(shown) == len(answer) else answer
    if isinstance(shown, str) and isinstance(answer, str):
        is_name = re.fullmatch("<[a-z_]+>", shown)
        begins_so = shown.endswith("...") and answer.startswith(shown.removesuffix("..."))
        return shown if is_name or begins_so else answer
    return answer
