"""Lists the names of environments that the trainer knows without a request to a task app."""

from collections.abc import Iterator

from service_kit.plugin_file import built_in_environments, find_entry_points
from shared_schemas.prefixes import PREFIXES


def environment_names() -> frozenset[str]:
    """Return the names of the built-in environments and of those that installed packages provide."""
    return frozenset({*built_in_environments(), *find_entry_points("turnwise.environments").names})


def describe_environments() -> Iterator[str]:
    """Yield lines of text that explain every form that the name of an environment may have."""
    yield f"built in: {', '.join(built_in_environments())}"
    packages = find_entry_points("turnwise.environments").names
    yield f"of installed packages: {', '.join(sorted(packages)) or 'none'}"
    yield "of files: what services.task_plugins of a job, or `turnwise task-app --plugins`, names"
    for name, prefix in PREFIXES.items():
        yield f"{name}:{prefix.argument}: {prefix.plays}"
        yield f"    {prefix.how}"
    yield "docs/foreign.md says more on each."
