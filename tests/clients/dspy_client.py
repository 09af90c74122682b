"""The package `dspy`, with each of its adapters."""

import dspy
import litellm
from script import CALL, add, main, script

litellm.suppress_debug_info = True
dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=False)


class Sum(dspy.Signature):
    """Adds."""

    question: str = dspy.InputField()
    total: int = dspy.OutputField()


MARKED = "[[ ## total ## ]]\n5\n\n[[ ## completed ## ]]"


def _models(server, **options):
    options = {"num_retries": 0, "cache": False, **options}
    yield dspy.LM(f"openai/{server.model}", **options)
    if server.kind == "capture":
        yield dspy.LM(f"anthropic/{server.claude}", **options)
        yield dspy.LM(
            f"openai/{server.model}",
            api_base=server.openai_url,
            api_key=server.key,
            model_type="responses",
            **options,
        )


def _each(server, adapter=None, **options):
    """With each model as dspy's own."""
    for model in _models(server, **options):
        with dspy.context(lm=model, adapter=adapter):
            yield model


def plain(server):
    for model in _models(server, temperature=0.7, max_tokens=100):
        (reply,) = model(script("Two."))
        assert (reply["text"] if isinstance(reply, dict) else reply) == "Two."


def structured_by_schema(server):
    """JSONAdapter sends a JSON Schema, or JSON mode."""
    for _ in _each(server, dspy.JSONAdapter()):
        assert dspy.Predict(Sum)(question=script('{"total": 5}')).total == 5


def falls_back_to_json(server):
    """An answer without marks is asked for again as JSON."""
    for _ in _each(server):
        assert dspy.Predict(Sum)(question=script("five", '{"total": 5}')).total == 5


def reasoning(server):
    answer = f"[[ ## reasoning ## ]]\nI add.\n\n{MARKED}"
    for _ in _each(server):
        assert dspy.ChainOfThought(Sum)(question=script(answer)).total == 5


def react(server):
    parts = (
        "[[ ## next_thought ## ]]\nI think.",
        "[[ ## next_tool_name ## ]]\n{}",
        "[[ ## next_tool_args ## ]]\n{}",
    )
    thought = "\n\n".join([*parts, "[[ ## completed ## ]]"])
    answers = (
        thought.format("add", '{"a": 2, "b": 3}'),
        thought.format("finish", "{}"),
        f"[[ ## reasoning ## ]]\nI added.\n\n{MARKED}",
    )
    for _ in _each(server):
        assert dspy.ReAct(Sum, tools=[add], max_iters=3)(question=script(*answers)).total == 5


def native_tools(server):
    """Function calls of the API."""

    class Ask(dspy.Signature):
        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        outputs: dspy.ToolCalls = dspy.OutputField()

    for _ in _each(server, dspy.ChatAdapter(use_native_function_calling=True)):
        result = dspy.Predict(Ask)(question=script(CALL), tools=[dspy.Tool(add)])
        assert result.outputs.tool_calls[0].args == {"a": 2, "b": 3}


async def streaming(server):
    answer = "[[ ## answer ## ]]\nIt is five.\n\n[[ ## completed ## ]]"
    model, *_ = _models(server)
    with dspy.context(lm=model):
        listeners = [dspy.streaming.StreamListener(signature_field_name="answer")]
        program = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=listeners)
        parts = [part async for part in program(question=script(answer))]
    assert parts[-1].answer == "It is five.", parts


if __name__ == "__main__":
    main(globals())
