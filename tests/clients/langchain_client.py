"""The packages `langchain`, `langchain-openai`, `langchain-anthropic` and `langgraph`."""

import warnings
from functools import partial

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from script import CALL, CITY, CITY_CALL, LONG, ULM, City, add, main, on, refused, script

warnings.simplefilter("ignore")
ADD = tool(add)


def _models(server, **options):
    """A model of each dialect that the server speaks."""
    yield ChatOpenAI(model=server.model, **{"max_retries": 0, **options})
    if server.kind == "capture":
        yield ChatOpenAI(model=server.model, use_responses_api=True, **{"max_retries": 0, **options})
        yield ChatAnthropic(model=server.claude, **{"max_retries": 0, **options})


def plain(server):
    for model in _models(server):
        reply = model.invoke([("system", "Be short."), ("user", script("Two."))])
        assert reply.text == "Two.", reply
        assert reply.usage_metadata is not None


def tools(server):
    for model in _models(server):
        bound, messages = model.bind_tools([ADD]), [("user", script(CALL, "5"))]
        first = bound.invoke(messages)
        assert first.tool_calls[0]["args"] == {"a": 2, "b": 3}
        assert bound.invoke([*messages, first, ADD.invoke(first.tool_calls[0])]).text == "5"


def settings_of_tools(server):
    choices = ("tool_choice", "add"), ("tool_choice", "any")
    for model in _models(server):
        for name, value in (*choices, ("parallel_tool_calls", False), ("strict", True)):
            bound = model.bind_tools([ADD], **{name: value})
            assert bound.invoke(script(CALL)).tool_calls[0]["name"] == "add", name


def structured(server):
    """By its default (JSON Schema at OpenAI's models, a forced call at Anthropic's) and by name."""
    for model in _models(server):
        default = CITY_CALL if isinstance(model, ChatAnthropic) else CITY
        for method, answer in ((None, default), ("function_calling", CITY_CALL), ("json_schema", CITY)):
            bound = model.with_structured_output(City, **({"method": method} if method else {}))
            assert bound.invoke(script(answer)) == ULM, method


def json_mode(server):
    model, *_ = _models(server)
    bound = model.with_structured_output(None, method="json_mode")
    assert bound.invoke(script(CITY, text="JSON")) == {"name": "Ulm", "people": 130}


def streaming(server):
    for model in _models(server):
        parts = list(model.stream(script("One, two.")))
        assert "".join(part.text for part in parts) == "One, two."


def streaming_of_calls(server):
    for model in _models(server):
        first, *rest = model.bind_tools([ADD]).stream(script(CALL))
        for part in rest:
            first += part
        assert first.tool_calls[0]["args"] == {"a": 2, "b": 3}


def batch(server):
    for model in _models(server):
        assert [one.text for one in model.batch([script("a"), script("b")])] == ["a", "b"]


def agent(server):
    for model in _models(server):
        graph = create_agent(model, [ADD], system_prompt="Be short.")
        state = graph.invoke({"messages": [("user", script(CALL, "5"))]})
        assert state["messages"][-1].text == "5"


def agent_structured(server):
    from langchain.agents.structured_output import ProviderStrategy, ToolStrategy

    for model in _models(server):
        for form, answer in ((ToolStrategy(City), CITY_CALL), (ProviderStrategy(City), CITY)):
            graph = create_agent(model, [ADD], response_format=form)
            state = graph.invoke({"messages": [("user", script(CALL, answer))]})
            assert state["structured_response"] == ULM, form


async def agent_streaming(server):
    for model in _models(server):
        graph = create_agent(model, [ADD])
        parts = graph.astream({"messages": [("user", script(CALL, "It is 5."))]}, stream_mode="messages")
        texts = [part.text async for part, _ in parts if type(part).__name__ == "AIMessageChunk"]
        assert "".join(texts) == "It is 5."


def react_agent_structured(server):
    for model in _models(server):
        agent = create_react_agent(model, [ADD], response_format=City)
        answer = CITY_CALL if isinstance(model, ChatAnthropic) else CITY
        state = agent.invoke({"messages": [("user", script(CALL, "5", answer))]})
        assert state["structured_response"] == ULM


@on("serve")
def logprobs(server):
    reply = ChatOpenAI(model=server.model).bind(logprobs=True, top_logprobs=2).invoke(script("Two."))
    assert reply.response_metadata["logprobs"]["content"]


@on("capture")
def count_of_tokens(server):
    *_, claude = _models(server)
    assert claude.get_num_tokens_from_messages([HumanMessage("Two.")]) > 0


@on("capture")
def by_variables(server):
    for name in (f"openai:{server.model}", "openai:gpt-5", f"anthropic:{server.claude}"):
        graph = create_agent(name, [ADD])
        assert graph.invoke({"messages": [("user", script(CALL, "5"))]})["messages"][-1].text == "5"


def too_long(server):
    for model in _models(server):
        refused(ContextOverflowError, partial(model.invoke, script("x", text=LONG)))


if __name__ == "__main__":
    main(globals())
