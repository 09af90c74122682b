"""What every client's file shares: it runs in the client's own environment, of which it needs pydantic alone.

    python FILE '{"kind": "capture" or "serve", "url": ..., "key": ..., "model": ..., "results": PATH, ...}'

runs the scenarios of FILE in order, and writes a line of JSON to PATH for each: name and error, or null.
Each scenario has an address of its own, and in a capture's case a capture of its own.
"""

import asyncio
import base64
import inspect
import json
import os
import sys
import traceback
import urllib.request
from dataclasses import dataclass
from itertools import count

from pydantic import BaseModel

_NUMBERS = count(1)
# One for all scenarios: some libraries keep their connections, which belong to a loop.
_LOOP = asyncio.new_event_loop()
# The tool of all scenarios, and what it returns for 2 and 3.
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
CALL = {"calls": [["add", {"a": 2, "b": 3}]]}
# More than a model takes.
LONG = "word " * 30_000


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


class City(BaseModel):
    """A city."""

    name: str
    people: int


ULM = City(name="Ulm", people=130)
CITY = '{"name": "Ulm", "people": 130}'
CITY_CALL = {"calls": [["City", ULM.model_dump()]]}


@dataclass(frozen=True)
class Server:
    """Where a scenario's model is.

    Attributes:
        kind: capture or serve.
        url: without /v1, as Anthropic's clients want it.
        model: the name under which it answers.
        claude: another one, since libraries look up what a model of Anthropic's can do.
        service: the address of the whole service, and its key.
    """

    kind: str
    url: str
    key: str
    model: str
    service: str
    service_key: str
    claude = "claude-sonnet-4-5"

    @property
    def openai_url(self):
        return f"{self.url}/v1"

    @property
    def variables(self):
        """The environment variables that clients read."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
        }


def script(*answers, text=""):
    """A prompt for which the model gives these answers one after the other, the last one for ever.

    An answer is a text, or {"calls": [[name, arguments], ...], "say": text}.
    """
    said = [{"say": one} if isinstance(one, str) else one for one in answers]
    code = base64.b64encode(json.dumps(said).encode()).decode()
    return f"{text} SCRIPT-{os.getpid()}x{next(_NUMBERS)}-{code}-END".strip()


def on(*kinds):
    """Mark a scenario that not every server offers."""

    def mark(function):
        function.kinds = kinds
        return function

    return mark


def refused(kind, call):
    """The error of this kind that a call raises."""
    try:
        value = call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, and not {value!r:.300}")


def main(home):
    """Run the scenarios of a file: its public functions with the one argument `server`."""
    setting = json.loads(sys.argv[1])
    chosen = setting.get("only")
    client = os.path.basename(home["__file__"]).removesuffix(".py")
    for name, function in list(home.items()):
        is_scenario = inspect.isfunction(function) and list(inspect.signature(function).parameters) == [
            "server"
        ]
        if not is_scenario or name.startswith("_") or chosen not in (None, name):
            continue
        if setting["kind"] in getattr(function, "kinds", ("capture", "serve")):
            error = _error_of(function, setting, f"{client}.{name}")
            with open(setting["results"], "a", encoding="utf-8") as results:  # libraries print
                results.write(json.dumps({"scenario": name, "error": error}) + "\n")
    os._exit(0)  # threads of some libraries would wait for their telemetry


def _error_of(function, setting, name):
    try:
        server = _server(setting, name)
        os.environ.update(server.variables)
        if inspect.iscoroutinefunction(function):
            _LOOP.run_until_complete(function(server))
        else:
            function(server)
    except BaseException as error:  # a library may raise anything
        where = traceback.format_exc().strip().splitlines()
        return f"{type(error).__name__}: {error}"[:1500] + "\n" + "\n".join(where[-14:])[-2500:]
    return None


def _server(setting, name):
    base = f"{setting['url']}/s/{name}"
    if setting["kind"] == "serve":
        return Server("serve", base, setting["key"], setting["model"], base, setting["key"])
    body = {"policy": setting["policy"], "models": [setting["model"], "gpt-5", Server.claude]}
    opened = post(f"{base}/captures", setting["key"], body)
    url = f"{base}/captures/{opened['capture_id']}"
    return Server("capture", url, opened["key"], setting["model"], base, setting["key"])


def post(url, key, body):
    """POST JSON, and return the JSON of the reply."""
    headers = {"Content-Type": "application/json", "X-API-Key": key}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)
