"""The tools of the episode loop: a model edits its own context, and asks how much of it is left."""

from task_app.context_tools.apply import CONTEXT_TOOLS, Applied, apply, context_specs
from task_app.context_tools.editor import Budget

__all__ = ["CONTEXT_TOOLS", "Applied", "Budget", "apply", "context_specs"]
