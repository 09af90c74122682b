"""A harness for `verifiers`: the loop in which an agent chats with the model and calls the taskset's tools.

The package's own harnesses start a program with `uv`. This harness runs its loop in the process instead. The
package allows this "as long as every model call goes through `endpoint` + `secret`"
(verifiers/v1/harness.py). Stop conditions, limits and the taskset's hooks then apply to each call.
"""

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

DONE = ProgramResult(exit_code=0, stdout="", stderr="")


class TurnwiseHarness(vf.Harness[HarnessConfig]):  # type: ignore[misc]  # the base class is untyped here
    """Calls the model and executes its tool calls in a loop, until the model answers without a tool call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt]
        async with AsyncExitStack() as stack:
            servers_config = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            tools, homes, servers = await connect_mcp(servers_config, stack)
            http = await stack.enter_async_context(
                httpx.AsyncClient(
                    timeout=None, trust_env=False, headers={"Authorization": f"Bearer {secret}"}
                )
            )
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                response = await http.post(f"{endpoint}/chat/completions", json=body)
                if not response.is_success:  # a stop condition, or a failure that verifiers has recorded
                    return ProgramResult(exit_code=1, stdout="", stderr=response.text)
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return DONE
                for call in message["tool_calls"]:
                    content = await self._call_tool(call["function"], homes, servers)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    async def _call_tool(self, function: dict[str, Any], homes: Any, servers: Any) -> Any:
        try:
            return await call_mcp(servers, homes, function["name"], json.loads(function["arguments"]))
        except Exception as exc:  # a tool's error is its result, as in the package's own harnesses
            return f"error: {exc}"


__all__ = ["TurnwiseHarness"]
