"""Turns typed Python functions into tools that a model can call; results have a limited length."""

from task_app.tools.environment import OneCallEnvironment, ToolEnvironment
from task_app.tools.function import ToolRefused, function_tool
from task_app.tools.toolbox import Answer, Toolbox

__all__ = ["Answer", "OneCallEnvironment", "ToolEnvironment", "ToolRefused", "Toolbox", "function_tool"]
