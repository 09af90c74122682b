"""The package `smolagents`: agents that call tools, and agents that write code."""

from script import CALL, main, script
from smolagents import CodeAgent, LiteLLMModel, LogLevel, OpenAIServerModel, ToolCallingAgent, tool

FIVE = {"calls": [["final_answer", {"answer": "5"}]]}


@tool
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def _models(server):
    yield OpenAIServerModel(server.model)
    if server.kind == "capture":
        yield LiteLLMModel(f"anthropic/{server.claude}")


def _messages(*answers):
    return [{"role": "user", "content": [{"type": "text", "text": script(*answers)}]}]


def _agent(kind, model, tools=(add,), **options):
    return kind(tools=list(tools), model=model, verbosity_level=LogLevel.OFF, max_steps=3, **options)


def tool_calling_agent(server):
    for model in _models(server):
        agent = _agent(ToolCallingAgent, model)
        assert agent.run(script(CALL, FIVE)) == "5"


def code_agent(server):
    code = "Thought: I add.\n<code>\nfinal_answer(add(2, 3))\n</code>"
    for model in _models(server):
        agent = _agent(CodeAgent, model)
        assert agent.run(script(code)) == 5


def code_agent_structured(server):
    """Its answers are JSON with a thought and code, by a schema."""
    answer = '{"thought": "I add.", "code": "final_answer(add(2, 3))"}'
    for model in _models(server):
        agent = _agent(CodeAgent, model, use_structured_outputs_internally=True)
        assert agent.run(script(answer)) == 5


def planning(server):
    for model in _models(server):
        agent = _agent(ToolCallingAgent, model, planning_interval=2)
        assert agent.run(script("A plan. <end_plan>", CALL, FIVE)) == "5"


def streaming(server):
    for model in _models(server):
        parts = list(model.generate_stream(_messages("One, two.")))
        assert "".join(part.content or "" for part in parts) == "One, two."


def streaming_agent(server):
    for model in _models(server):
        agent = _agent(ToolCallingAgent, model, stream_outputs=True)
        assert list(agent.run(script(CALL, FIVE), stream=True))[-1].output == "5"


def managed_agent(server):
    for model in _models(server):
        helper = _agent(ToolCallingAgent, model, name="helper", description="Adds.")
        agent = _agent(ToolCallingAgent, model, tools=[], managed_agents=[helper])
        ask = {"calls": [["helper", {"task": script(CALL, FIVE)}]]}
        assert agent.run(script(ask, FIVE)) == "5"


if __name__ == "__main__":
    main(globals())
