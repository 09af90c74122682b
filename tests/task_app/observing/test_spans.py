"""OpenTelemetry spans of played episodes; none unless they are switched on."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import httpx
import pytest

from task_app.app import create_app
from task_app.observing.spans import Spans, configure_spans
from task_app.settings import Settings
from tests.task_app.captures.test_agents import build_board
from tests.task_app.counting import KEY, boards, rollout
from tests.task_app.fake_inference import calling, fake_inference, says, status
from tests.task_app.rollout_client import play
from tests.task_app.served import served_app

HAS_SDK = find_spec("opentelemetry") is not None and find_spec("opentelemetry.sdk") is not None
needs_sdk = pytest.mark.skipif(not HAS_SDK, reason="opentelemetry-sdk is not installed")


def memory_and_tracer():
    """The ended spans of a tracer, and the tracer."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    return memory, provider.get_tracer("test")


async def spans_of_rollouts(*rollouts):
    """The ended spans of rollouts, and the rollouts by id."""
    memory, tracer = memory_and_tracer()
    app = create_app(Settings(api_keys=(KEY,)), boards=boards(), spans=Spans(tracer))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://app", headers={"X-API-Key": KEY}) as client,
    ):
        with tracer.start_as_current_span("a trainer's request"):
            ended = await play(client, *rollouts)
    (request,) = (span for span in memory.get_finished_spans() if span.name == "a trainer's request")
    spans = [span for span in memory.get_finished_spans() if span is not request]
    for span in spans:
        linked = [link.context.span_id for link in span.links]
        assert linked == ([] if span.parent else [request.context.span_id])
    return spans, ended


def asking(url, **parts):
    config = {"inference_url": url, "model": "tiny", "max_attempts": 1, "temperature": 0.7, "max_tokens": 9}
    return rollout("a", policy={"policy_name": "openai", "config": config}, **parts)


@needs_sdk
async def test_an_episode_is_a_span_with_its_model_calls_and_environment_calls_below_it():
    async with fake_inference(calling("a")) as server:
        spans, ended = await spans_of_rollouts(asking(server.url, limits={"max_decisions": 2}))
    *below, episode = spans
    assert [span.name for span in spans] == [
        "chat tiny", "execute_tool add", "chat tiny", "execute_tool add", "invoke_agent openai",
    ]  # fmt: skip
    assert {span.parent.span_id for span in below} == {episode.context.span_id} and episode.parent is None
    assert [span.kind.name for span in below[:2]] == ["CLIENT", "INTERNAL"]
    assert all(span.end_time >= span.start_time for span in spans)
    trajectory = ended["a"].trajectory
    chat, tool = dict(below[0].attributes), dict(below[1].attributes)
    assert chat.items() >= {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.7, "gen_ai.request.max_tokens": 9,
        "gen_ai.response.model": "job/actor", "gen_ai.usage.input_tokens": 4, "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop",), "turnwise.turn": 1,
    }.items()  # fmt: skip
    assert tool.items() >= {
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": trajectory.steps[0].tool_calls[0].id, "turnwise.reward": 1.0,
        "turnwise.env_steps": 1,
    }.items()  # fmt: skip
    assert dict(episode.attributes).items() >= {
        "gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "openai", "gen_ai.conversation.id": "a",
        "turnwise.env_name": "counting", "turnwise.outcome_reward": trajectory.outcome_reward,
        "turnwise.stop_reason": "max_decisions", "turnwise.decisions": 2, "turnwise.env_steps": 2,
    }.items()  # fmt: skip


# Two calls at once, which arrive by connections of their own.
TWO_CALLS = """
def one(number):
    ask(f"Go {number}.")


threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


async def spans_of_an_agent(folder, script, *answers):
    """The ended spans of a rollout whose agent is this script, and the rollout."""
    memory, tracer = memory_and_tracer()
    async with (
        fake_inference(*answers) as server,
        served_app(build_board(folder, script), spans=Spans(tracer)) as (client, _),
    ):
        ended = await play(
            client, asking(server.url, env={"env_name": "agent:a"}, limits={"timeout_s": 20.0})
        )
    return memory.get_finished_spans(), ended["a"]


@needs_sdk
async def test_captured_calls_of_an_agent_stand_below_its_episode(tmp_path):
    (*calls, episode), ended = await spans_of_an_agent(tmp_path, TWO_CALLS, says("Yes."))
    assert [span.name for span in (*calls, episode)] == ["chat tiny", "chat tiny", "invoke_agent openai"]
    assert {span.parent.span_id for span in calls} == {episode.context.span_id} and episode.parent is None
    assert [span.attributes["turnwise.turn"] for span in calls] == [1, 2]
    assert episode.attributes["turnwise.decisions"] == 2 == len(ended.trajectory.steps)


@needs_sdk
async def test_a_captured_call_without_an_answer_has_no_turn(tmp_path):
    (call, *_), _ = await spans_of_an_agent(tmp_path, 'ask("Go.")', status(500, {}))
    assert call.name == "chat tiny" and call.attributes["error.type"]
    assert "turnwise.turn" not in call.attributes


@needs_sdk
async def test_calls_of_a_capture_opened_by_hand_are_traces_that_its_id_holds_together():
    memory, tracer = memory_and_tracer()
    async with (
        fake_inference(says("Yes.")) as server,
        served_app(boards(), spans=Spans(tracer)) as (client, _),
    ):
        policy = {"policy_name": "openai", "config": {"inference_url": server.url, "model": "tiny"}}
        capture = (await client.post("/captures", json={"policy": policy})).json()
        path = f"/captures/{capture['capture_id']}/v1/chat/completions"
        for _ in range(2):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "Go."}]}
            assert (await client.post(path, json=body)).status_code == 200
    calls = memory.get_finished_spans()
    assert [span.name for span in calls] == ["chat tiny"] * 2
    assert [span.attributes["turnwise.turn"] for span in calls] == [1, 2]
    assert {span.attributes["gen_ai.conversation.id"] for span in calls} == {capture["capture_id"]}
    assert len({span.context.trace_id for span in calls}) == 2


@needs_sdk
async def test_siblings_at_the_same_time_have_traces_of_their_own():
    spans, _ = await spans_of_rollouts(*(rollout(f"a/{number}") for number in range(3)))
    episodes = {span.context.trace_id for span in spans if span.name.startswith("invoke_agent")}
    assert len(episodes) == 3 and {span.context.trace_id for span in spans} == episodes
    assert {span.name.split()[0] for span in spans} == {"invoke_agent", "decide", "execute_tool"}


@needs_sdk
async def test_a_failure_is_told_by_its_code_and_without_its_words():
    async with fake_inference(status(500, {})) as server:
        spans, ended = await spans_of_rollouts(asking(server.url))
    code = ended["a"].failure.code
    assert [span.name for span in spans] == ["chat tiny", "invoke_agent"]
    for span in spans:
        assert (span.status.status_code.name, span.attributes["error.type"]) == ("ERROR", code)
        assert not span.events and span.status.description == code


@needs_sdk
async def test_every_published_name_is_one_of_the_conventions():
    from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes

    known = {value for module in (error_attributes, gen_ai_attributes) for value in vars(module).values()
             if isinstance(value, str)}  # fmt: skip
    async with fake_inference(calling("a"), status(500, {})) as server:
        spans, _ = await spans_of_rollouts(asking(server.url))
    names = {name for span in spans for name in span.attributes if not name.startswith("turnwise.")}
    # `seed` has its name in the specification, and was generated below gen_ai.openai first.
    assert names <= known | {"gen_ai.request.seed"}


@needs_sdk
def test_they_are_off_where_the_standard_variables_do_not_ask_for_them():
    from opentelemetry import trace

    off = [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"},
        {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_TRACES_EXPORTER": "zipkin"},
    ]
    assert [configure_spans(environ).tracer for environ in off] == [None] * 4
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider), "nothing was set up"


@pytest.mark.skipif(HAS_SDK, reason="opentelemetry-sdk is installed")
def test_an_endpoint_without_the_packages_starts_nothing_and_breaks_nothing():
    assert configure_spans({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}).tracer is None


@needs_sdk
def test_an_exporter_in_the_environment_gets_the_spans_of_the_process():
    code = (
        "import os; from task_app.observing.spans import configure_spans\n"
        "from task_app.episode.actions import Action\n"
        "with configure_spans(os.environ).environment('counting', Action(text='x'), 1): pass\n"
    )
    environ = {**os.environ, "OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": "ours"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    span = json.loads(done.stdout[done.stdout.index("{") :])
    assert span["name"] == "answer counting"
    assert span["resource"]["attributes"]["service.name"] == "ours"
