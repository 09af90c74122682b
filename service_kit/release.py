"""The installed release of Turnwise."""

import re
from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as installed

FROM_SOURCE = "0+source"


def version() -> str:
    """Return the installed version; FROM_SOURCE for a checkout that is not installed."""
    try:
        return installed("turnwise")
    except PackageNotFoundError:
        return FROM_SOURCE


def modules_of_extra(extra: str) -> frozenset[str]:
    """Return the names of an extra's packages in the form of module names: in lower case, with _ for -.

    The result is empty for a checkout that is not installed.
    """
    try:
        lines = requires("turnwise") or []
    except PackageNotFoundError:
        return frozenset()
    brought = (re.match(rf"([\w.-]+).*; .*extra == ['\"]{re.escape(extra)}['\"]", line) for line in lines)
    return frozenset(match[1].lower().replace("-", "_") for match in brought if match)
