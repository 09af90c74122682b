"""Facts about the installed release of Turnwise."""

import re
from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as installed

FROM_SOURCE = "0+source"


def version() -> str:
    """Return the version of the installed package, or FROM_SOURCE if Turnwise runs from a source checkout."""
    try:
        return installed("turnwise")
    except PackageNotFoundError:
        return FROM_SOURCE


def modules_of_extra(extra: str) -> frozenset[str]:
    """Return the names of the packages that an optional extra of Turnwise requires.

    The names have the form of module names: lower case, with "_" in place of "-". The result is empty if
    Turnwise runs from a source checkout that is not installed.
    """
    try:
        lines = requires("turnwise") or []
    except PackageNotFoundError:
        return frozenset()
    brought = (re.match(rf"([\w.-]+).*; .*extra == ['\"]{re.escape(extra)}['\"]", line) for line in lines)
    return frozenset(match[1].lower().replace("-", "_") for match in brought if match)
