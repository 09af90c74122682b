"""Which release of Turnwise this is."""

import re
from importlib.metadata import PackageNotFoundError, requires
from importlib.metadata import version as installed

FROM_SOURCE = "0+source"


def version() -> str:
    """Return the installed version; FROM_SOURCE where a checkout runs without having been installed."""
    try:
        return installed("turnwise")
    except PackageNotFoundError:
        return FROM_SOURCE


def modules_of_extra(extra: str) -> frozenset[str]:
    """Return the top modules of the packages that an extra brings: their names, with _ for -.

    It is empty where a checkout runs without having been installed.
    """
    try:
        lines = requires("turnwise") or []
    except PackageNotFoundError:
        return frozenset()
    brought = (re.match(rf"([\w.-]+).*; .*extra == ['\"]{re.escape(extra)}['\"]", line) for line in lines)
    return frozenset(match[1].lower().replace("-", "_") for match in brought if match)
