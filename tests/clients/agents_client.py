"""The package `openai-agents`, in its mode of Chat Completions and of Responses."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from script import CALL, CITY, ULM, City, add, main, on, script

set_tracing_disabled(True)
ADD = function_tool(add)


def _agents(server, **options):
    """An agent of each mode that the server speaks."""
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel)[: 2 if server.kind == "capture" else 1]:
        model = kind(model=server.model, openai_client=AsyncOpenAI(max_retries=1))
        yield Agent(name="adder", model=model, **options)


def _output(agent, *answers):
    return Runner.run_sync(agent, script(*answers), run_config=RunConfig(tracing_disabled=True)).final_output


def tools(server):
    settings = ModelSettings(temperature=0.1, parallel_tool_calls=False)
    for options in ({}, {"model_settings": settings}):
        for agent in _agents(server, instructions="Be short.", tools=[ADD], **options):
            assert _output(agent, CALL, "5") == "5"


def forced_tool(server):
    for choice in ("required", "add"):
        for agent in _agents(server, tools=[ADD], model_settings=ModelSettings(tool_choice=choice)):
            assert _output(agent, CALL, "5") == "5"


def structured_after_tools(server):
    for agent in _agents(server, tools=[ADD], output_type=City):
        assert _output(agent, CALL, CITY) == ULM


async def streaming(server):
    for agent in _agents(server, tools=[ADD]):
        run = Runner.run_streamed(agent, script(CALL, "It is 5."))
        deltas = [
            event.data.delta
            async for event in run.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == run.final_output == "It is 5."


def handoff(server):
    for second in _agents(server, instructions="You are second."):
        first = Agent(name="first", model=second.model, handoffs=[second])
        transfer = {"calls": [["transfer_to_adder", {}]]}
        assert _output(first, transfer, "Second here.") == "Second here."


@on("capture")
def by_variables(server):
    """The library's own default: Responses, and the settings that it has for the model's name."""
    for model in (server.model, "gpt-5"):
        agent = Agent(name="adder", instructions="Be short.", model=model, tools=[ADD])
        assert _output(agent, CALL, "5") == "5"


if __name__ == "__main__":
    main(globals())
