"""The package `crewai`."""

import os

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "CREWAI_TESTING": "true",
}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from script import CALL, CITY, ULM, City, add, main, script

ADD = tool("add")(add)


def _models(server, **options):
    # A name that it does not know needs the address.
    address = {"base_url": server.openai_url, "api_key": server.key} if server.kind == "serve" else {}
    yield LLM(model=f"openai/{server.model}", **address, **options)
    if server.kind == "capture":
        yield LLM(model=f"openai/{server.model}", api="responses", **options)
        yield LLM(model=f"anthropic/{server.claude}", max_tokens=200, **options)


def _crew(model, *answers, tools=(), **task):
    agent = Agent(
        role="adder",
        goal="add",
        backstory="An adder.",
        llm=model,
        tools=list(tools),
        verbose=False,
        max_retry_limit=0,
    )
    job = Task(description=script(*answers), expected_output="A sum.", agent=agent, **task)
    return Crew(agents=[agent], tasks=[job], verbose=False)


def plain(server):
    for model in _models(server, temperature=0.2):
        assert model.call([{"role": "user", "content": script("Two.")}]) == "Two."


def tools(server):
    for model in _models(server):
        assert "5" in _crew(model, CALL, "It is 5.", tools=[ADD]).kickoff().raw


def structured(server):
    for model in _models(server):
        assert _crew(model, CITY, CITY, output_pydantic=City).kickoff().pydantic == ULM


def structured_call(server):
    for model in _models(server, response_format=City):
        reply = model.call([{"role": "user", "content": script(CITY)}])
        city = reply if isinstance(reply, City) else City.model_validate_json(reply)
        assert city.people == 130


def structured_after_tools(server):
    for model in _models(server):
        result = _crew(model, CALL, CITY, CITY, tools=[ADD], output_pydantic=City).kickoff()
        assert result.pydantic == ULM


def stop_words(server):
    for model in _models(server, stop=["\nObservation:"]):
        assert model.call([{"role": "user", "content": script("Two.")}]) == "Two."


def streaming(server):
    for model in _models(server, stream=True):
        assert model.call([{"role": "user", "content": script("One, two.")}]) == "One, two."


if __name__ == "__main__":
    main(globals())
