"""OpenTelemetry spans of episodes, model calls and environment calls; OTEL_* variables switch them on.

    invoke_agent POLICY        the episode
      chat MODEL               a model call (`decide POLICY` for a policy without a model)
      execute_tool TOOL        the environment's call

Spans contain no prompts and no answers, because the rollout stores both. If spans are off, OpenTelemetry is
not imported.

Source: semantic conventions for generative AI, https://opentelemetry.io/docs/specs/semconv/gen-ai/ (v1.41).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog

from shared_schemas.trajectory import Sampling, Trajectory
from task_app.episode.actions import Action, Choice
from task_app.protocols import AgentPolicy, DecisionOutcome, policy_name

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

    from task_app.rollouts.results import Record

log = structlog.get_logger("task_app")

_SWITCH, _OFF = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_IDS = ("run_id", "iteration", "group_id", "seed")
_TOTALS = ("outcome_reward", "env_steps", "terminated", "truncated")


# Sampling options for which the conventions define attributes.
_REQUEST = frozenset({"temperature", "top_p", "top_k", "max_tokens", "seed"})


@dataclass(frozen=True, slots=True)
class Notes:
    """Adds attributes to a span. If `span` is None, the methods do nothing."""

    span: Span | None = None

    def answer(self, reply: tuple[Choice, Action] | None, *, turn: int | None = None) -> None:
        """Add the model, the token counts and the sampling options of a policy's reply.

        A `reply` of None means a timeout, which marks the span as failed. `turn` is given if it was not known
        when the span was opened.
        """
        if self.span is None:
            return
        if reply is None:
            _fail(self.span, "deadline")
            return
        facts = reply[0].log_probs
        sampling, finish_reason = facts.get("sampling"), facts.get("finish_reason")
        attributes = {
            "gen_ai.response.model": facts.get("model"),
            "gen_ai.usage.input_tokens": facts.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": facts.get("completion_tokens"),
            "gen_ai.response.finish_reasons": None if finish_reason is None else [finish_reason],
            "turnwise.turn": turn,
        }
        for name in Sampling.model_fields:
            prefix = "gen_ai" if name in _REQUEST else "turnwise"
            attributes[f"{prefix}.request.{name}"] = getattr(sampling, name, None)
        _set_attributes(self.span, attributes)

    def outcome(self, outcome: DecisionOutcome) -> None:
        """Add the number of env steps and the reward of an environment's call, and whether it was refused."""
        if self.span is not None:
            facts = {"env_steps": len(outcome.env_rewards), "reward": float(sum(outcome.env_rewards))}
            facts["is_invalid"] = outcome.invalid_reason is not None
            _set_attributes(self.span, {f"turnwise.{name}": value for name, value in facts.items()})

    def end(self, trajectory: Trajectory) -> None:
        """Add the policy's name, the stop reason and the totals of an episode."""
        if self.span is not None:
            self.span.update_name(f"invoke_agent {trajectory.policy_name}")
            self.span.set_attribute("gen_ai.agent.name", trajectory.policy_name)
            facts = {name: getattr(trajectory, name) for name in _TOTALS}
            facts |= {"stop_reason": str(trajectory.stop_reason), "decisions": len(trajectory.steps)}
            _set_attributes(self.span, {f"turnwise.{name}": value for name, value in facts.items()})


_NOTHING = nullcontext(Notes())


@dataclass(frozen=True, slots=True)
class Spans:
    """Opens the spans of a task app. Without a tracer, nothing is recorded."""

    tracer: Tracer | None = None
    parent: Context | None = None
    """Context of the parent span; None: the parent is the span that is current when a new span is opened."""

    def here(self) -> Spans:
        """Return a copy that opens its spans as children of the span that is current now.

        Model calls of a captured agent need the copy, as they come in requests without this current span.
        """
        if self.tracer is None:
            return self
        from opentelemetry.context import get_current

        return replace(self, parent=get_current())

    def episode(self, record: Record) -> AbstractContextManager[Notes]:
        if self.tracer is None:
            return _NOTHING
        facts = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.conversation.id": record.rollout_id,
            "turnwise.env_name": record.env.env_name,
            **{f"turnwise.{name}": getattr(record, name) for name in _IDS},
        }
        return _open_span(self.tracer, "invoke_agent", facts, is_root=True)

    def decision(
        self, policy: AgentPolicy, turn: int | None, *, conversation: str | None = None
    ) -> AbstractContextManager[Notes]:
        """Open the span of one call of a policy; `turn` is None if it is not known yet.

        The id `conversation` is added only if `parent` is None. Otherwise the parent is the span of an
        episode, which already contains the id.
        """
        if self.tracer is None:
            return _NOTHING
        name, model = policy_name(policy), getattr(getattr(policy, "config", None), "model", None)
        above = conversation if self.parent is None else None
        facts = {"turnwise.turn": turn, "gen_ai.conversation.id": above}
        if not model:
            return _open_span(self.tracer, f"decide {name}", facts, context=self.parent)
        chat = {"operation.name": "chat", "provider.name": name, "request.model": model}
        facts |= {f"gen_ai.{key}": value for key, value in chat.items()}
        return _open_span(self.tracer, f"chat {model}", facts, is_client=True, context=self.parent)

    def environment(self, env_name: str, action: Action, turn: int) -> AbstractContextManager[Notes]:
        if self.tracer is None:
            return _NOTHING
        tools = [request.name for request in action.requests]
        facts: dict[str, Any] = {"turnwise.env_name": env_name, "turnwise.turn": turn}
        if not tools:
            return _open_span(self.tracer, f"answer {env_name}", facts)
        facts |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.type": "function"}
        facts["gen_ai.tool.name"] = ",".join(dict.fromkeys(tools))
        if len(action.tool_calls) == 1:
            facts["gen_ai.tool.call.id"] = action.tool_calls[0].id
        return _open_span(self.tracer, f"execute_tool {facts['gen_ai.tool.name']}", facts)


@contextmanager
def _open_span(
    tracer: Tracer,
    name: str,
    facts: Mapping[str, Any],
    *,
    is_client: bool = False,
    is_root: bool = False,
    context: Context | None = None,
) -> Iterator[Notes]:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanKind, get_current_span

    known = {key: value for key, value in facts.items() if value is not None}
    kind = SpanKind.CLIENT if is_client else SpanKind.INTERNAL
    outer = get_current_span().get_span_context()
    # The exception's text is not recorded, because it may quote a policy or a server.
    with tracer.start_as_current_span(
        name,
        # An episode has its own trace, because one request may post several episodes and ends before they do.
        context=Context() if is_root else context,
        links=[Link(outer)] if is_root and outer.is_valid else None,
        kind=kind,
        attributes=known,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield Notes(span)
        except BaseException as error:
            _fail(span, getattr(error, "code", None) or type(error).__name__)
            raise


def _set_attributes(span: Span, facts: Mapping[str, Any]) -> None:
    for name, value in facts.items():
        if value is not None:
            span.set_attribute(name, value)


def _fail(span: Span, code: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR, code))


def configure_spans(environ: Mapping[str, str]) -> Spans:
    """Return the spans that OpenTelemetry's environment variables ask for.

    Spans are on if OTEL_TRACES_EXPORTER is `otlp` or `console`. If it is not set, an OTLP endpoint switches
    them on. OTEL_SDK_DISABLED = true switches them off. If the process already has a tracer provider, for
    example from `opentelemetry-instrument`, this provider is used. Otherwise a new provider is made, for
    which the SDK reads further OTEL_* variables.
    """
    endpoint = next((environ[name] for name in _ENDPOINTS if environ.get(name)), None)
    exporter = environ.get(_SWITCH) or ("otlp" if endpoint else "none")
    if exporter == "none" or environ.get(_OFF, "").lower() == "true":
        return Spans()
    if exporter not in ("otlp", "console"):
        log.warning("spans_off", reason=f"{_SWITCH} is {exporter!r}; known: otlp, console, none")
        return Spans()
    try:
        return Spans(_make_tracer(exporter))
    except ImportError as exc:
        # Clusters set the endpoint for all containers, including those without the packages.
        log.warning("spans_off", reason=f"{exc}: pip install 'turnwise[otel]'")
        return Spans()


def _make_tracer(exporter: str) -> Tracer:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        sink: SpanExporter
        if exporter == "console":
            sink = ConsoleSpanExporter()
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            sink = OTLPSpanExporter()
        provider = TracerProvider()  # sends remaining spans at the process's end
        provider.add_span_processor(BatchSpanProcessor(sink))
        trace.set_tracer_provider(provider)
    log.info("spans_on", exporter=exporter)
    return trace.get_tracer("turnwise.task_app")
