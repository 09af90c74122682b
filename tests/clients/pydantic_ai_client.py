"""The package `pydantic-ai`."""

from functools import partial

from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelContextWindowExceededError, ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from script import CALL, CITY, LONG, ULM, City, add, main, on, refused, script


def _models(server):
    yield OpenAIChatModel(server.model)
    if server.kind == "capture":
        yield OpenAIResponsesModel(server.model)
        yield AnthropicModel(server.claude)


def _agents(server, **options):
    for model in _models(server):
        yield Agent(model, **options)


def plain(server):
    for agent in _agents(server, instructions="Be short.", model_settings={"max_tokens": 100}):
        assert agent.run_sync(script("Two.")).output == "Two."


def tools(server):
    for agent in _agents(server):
        agent.tool_plain(add)
        result = agent.run_sync(script(CALL, "5"))
        assert result.output == "5"
        again = agent.run_sync(script("Six."), message_history=result.all_messages())
        assert again.output == "Six."


def structured(server):
    """By its default, for which the output is a tool and a call is required, and by the other ways."""
    by_call = [["final_result", ULM.model_dump()]], [["city", ULM.model_dump()]]
    for form, answer in (
        (City, {"calls": by_call[0]}),
        (ToolOutput(City, name="city", strict=True), {"calls": by_call[1]}),
        (NativeOutput(City), CITY),
        (PromptedOutput(City), CITY),
    ):
        for agent in _agents(server, output_type=form):
            assert agent.run_sync(script(answer)).output == ULM, form


def tools_and_structured(server):
    for agent in _agents(server, output_type=City):
        agent.tool_plain(add)
        assert (
            agent.run_sync(script(CALL, {"calls": [["final_result", ULM.model_dump()]]})).output.people == 130
        )


def retries_of_the_library(server):
    """A wrong output is answered with its error, and asked again."""
    wrong, right = (
        {"calls": [["final_result", {"name": "Ulm", "people": people}]]} for people in ("many", 130)
    )
    for agent in _agents(server, output_type=City):
        assert agent.run_sync(script(wrong, right)).output.people == 130


async def streaming(server):
    for agent in _agents(server):
        agent.tool_plain(add)
        async with agent.run_stream(script(CALL, "It is 5.")) as run:
            parts = [part async for part in run.stream_text(delta=True)]
        assert "".join(parts) == "It is 5."


async def streaming_structured(server):
    for form, answer in ((City, {"calls": [["final_result", ULM.model_dump()]]}), (NativeOutput(City), CITY)):
        for agent in _agents(server, output_type=form):
            async with agent.run_stream(script(answer)) as run:
                assert await run.get_output() == ULM


def unknown_model(server):
    for kind in [type(model) for model in _models(server)]:
        error = refused(ModelHTTPError, partial(Agent(kind("no-such")).run_sync, "x"))
        assert error.status_code == 404, error


@on("capture")
def by_variables(server):
    names = "openai:gpt-4o", "openai-chat:gpt-5", "openai-responses:gpt-5", f"anthropic:{server.claude}"
    for name in names:
        agent = Agent(name)
        agent.tool_plain(add)
        assert agent.run_sync(script(CALL, "5")).output == "5"


def too_long(server):
    for agent in _agents(server):
        refused(ModelContextWindowExceededError, partial(agent.run_sync, script("x", text=LONG)))


if __name__ == "__main__":
    main(globals())
