"""Tools as plug-ins: a function with a typed signature becomes a schema, a call, and a bounded result."""

from task_app.tools.environment import OneCallEnvironment, ToolEnvironment
from task_app.tools.function import ToolRefused, function_tool
from task_app.tools.toolbox import Answer, Toolbox

__all__ = ["Answer", "OneCallEnvironment", "ToolEnvironment", "ToolRefused", "Toolbox", "function_tool"]
