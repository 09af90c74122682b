"""The package `instructor`, in each of its modes."""

import warnings

import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, field_validator
from script import CITY, CITY_CALL, main, on, script

warnings.simplefilter("ignore")
VALUES = {"name": "Ulm", "people": 130}
ULM = [("name", "Ulm"), ("people", 130)]


class City(BaseModel):
    name: str
    people: int

    @field_validator("people")
    @classmethod
    def _few(cls, value):
        assert value < 1_000, "too many"
        return value


def _asked(server, *answers, **more):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": script(*answers)}]
    return {"model": server.model, "messages": messages, "response_model": City, **more}


def modes(server):
    of_responses = [("RESPONSES_TOOLS", CITY_CALL)] if server.kind == "capture" else []
    by_text = [(name, CITY) for name in ("JSON", "JSON_SCHEMA", "JSON_O1")]
    fenced = ("MD_JSON", f"```json\n{CITY}\n```")
    for name, answer in (("TOOLS", CITY_CALL), ("TOOLS_STRICT", CITY_CALL), *by_text, fenced, *of_responses):
        client = instructor.from_openai(OpenAI(max_retries=0), mode=instructor.Mode[name])
        assert list(client.chat.completions.create(**_asked(server, answer))) == ULM, name


def mode_parallel_tools(server):
    from collections.abc import Iterable

    client = instructor.from_openai(OpenAI(max_retries=0), mode=instructor.Mode.PARALLEL_TOOLS)
    two = {"calls": [["City", VALUES], ["City", {"name": "Bonn", "people": 330}]]}
    cities = client.chat.completions.create(**_asked(server, two) | {"response_model": Iterable[City]})
    assert [city.name for city in cities] == ["Ulm", "Bonn"]


@on("capture")
def modes_of_anthropic(server):
    for name, answer in (("ANTHROPIC_TOOLS", CITY_CALL), ("ANTHROPIC_JSON", CITY)):
        client = instructor.from_anthropic(Anthropic(max_retries=0), mode=instructor.Mode[name])
        assert list(client.chat.completions.create(**_asked(server, answer, max_tokens=200))) == ULM, name


def asks_again(server):
    """A wrong answer is sent back with its error."""
    many = {"calls": [["City", {"name": "Ulm", "people": 13_000}]]}
    for mode, wrong, right in (
        (instructor.Mode.TOOLS, many, CITY_CALL),
        (instructor.Mode.JSON, CITY.replace("130", "13000"), CITY),
    ):
        client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
        assert list(client.chat.completions.create(**_asked(server, wrong, right, max_retries=2))) == ULM


def streaming_parts(server):
    client = instructor.from_openai(OpenAI(max_retries=0))
    call = {"calls": [["PartialCity", VALUES]]}
    *_, last = client.chat.completions.create_partial(**_asked(server, call))
    assert last.people == 130


def streaming_list(server):
    client = instructor.from_openai(OpenAI(max_retries=0))
    answer = {"calls": [["IterableCity", {"tasks": [VALUES, VALUES]}]]}
    assert len(list(client.chat.completions.create_iterable(**_asked(server, answer)))) == 2


@on("capture")
def by_variables(server):
    for name in (f"openai/{server.model}", "openai/gpt-5", f"anthropic/{server.claude}"):
        client, asked = instructor.from_provider(name), _asked(server, CITY_CALL, max_tokens=200)
        del asked["model"]
        assert list(client.chat.completions.create(**asked)) == ULM


if __name__ == "__main__":
    main(globals())
