"""ATIF v1.7 as a JSON Schema, and what it cannot say.

Written down from RFC 0001 of harbor-framework/harbor (https://harborframework.com/docs/trajectory-format) and
compared with the models of harbor 0.25.0; what no export of ours has (images, files, times, costs, reasoning)
is left out.
"""

from typing import Any

import jsonschema

Json = dict[str, Any]
TEXT, INTEGER, NUMBER, EXTRA = ({"type": kind} for kind in ("string", "integer", "number", "object"))


def _body(required: Json, **optional: Json) -> Json:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": {**required, **optional},
    }


def _list(items: Json, least: int = 0) -> Json:
    return {"type": "array", "items": items, "minItems": least}


COUNT = {"type": "integer", "minimum": 0}
CALL = _body({"tool_call_id": TEXT, "function_name": TEXT, "arguments": EXTRA}, extra=EXTRA)
REFERENCES = _list(_body({"trajectory_id": TEXT}), least=1)
RESULT = _body({}, source_call_id=TEXT, content=TEXT, subagent_trajectory_ref=REFERENCES, extra=EXTRA)
METRICS = _body(
    {},
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    prompt_token_ids=_list(INTEGER),
    completion_token_ids=_list(INTEGER),
    logprobs=_list(NUMBER),
    extra=EXTRA,
)
STEP = _body(
    {
        "step_id": {"type": "integer", "minimum": 1},
        "source": {"enum": ["system", "user", "agent"]},
        "message": TEXT,
    },
    tool_calls=_list(CALL),
    observation=_body({"results": _list(RESULT)}),
    metrics=METRICS,
    is_copied_context={"type": "boolean"},
    llm_call_count=COUNT,
    extra=EXTRA,
)
TRAJECTORY = _body(
    {
        "schema_version": {"const": "ATIF-v1.7"},
        "agent": _body(
            {"name": TEXT, "version": TEXT}, model_name=TEXT, tool_definitions=_list(EXTRA), extra=EXTRA
        ),
        "steps": _list(STEP, least=1),
    },
    session_id=TEXT,
    trajectory_id=TEXT,
    final_metrics=_body(
        {},
        total_prompt_tokens=INTEGER,
        total_completion_tokens=INTEGER,
        total_steps=COUNT,
        extra=EXTRA,
    ),
    subagent_trajectories=_list(EXTRA, least=1),
    extra=EXTRA,
)


def check(document: Json) -> None:
    """Fail where a document, or one that is embedded in it, is no trajectory in ATIF v1.7."""
    jsonschema.validate(document, TRAJECTORY)
    assert [step["step_id"] for step in document["steps"]] == list(range(1, len(document["steps"]) + 1))
    for step in document["steps"]:
        if step["source"] != "agent":
            assert not step.keys() & {"tool_calls", "metrics"}
        elif step.get("llm_call_count") == 0:
            assert "metrics" not in step
        calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        results = step.get("observation", {}).get("results", ())
        assert {result["source_call_id"] for result in results if "source_call_id" in result} <= calls
    embedded = document.get("subagent_trajectories", [])
    ids = [sub["trajectory_id"] for sub in embedded]
    assert len(set(ids)) == len(ids)
    for sub in embedded:
        check(sub)


def refs(*documents: Json) -> set[str]:
    """The embedded documents that their results refer to."""
    results = [
        result
        for document in documents
        for step in document["steps"]
        for result in step.get("observation", {}).get("results", ())
    ]
    return {ref["trajectory_id"] for result in results for ref in result.get("subagent_trajectory_ref", ())}
