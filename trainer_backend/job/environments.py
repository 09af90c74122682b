"""The names of environments, as a trainer knows them without asking a task app."""

from service_kit.plugin_file import entry_points_of
from shared_schemas.state_keys import OF_ENVIRONMENT


def environment_names() -> frozenset[str]:
    """Return the built-in environments, and those of installed packages."""
    return frozenset({*OF_ENVIRONMENT, *entry_points_of("turnwise.environments").names})
