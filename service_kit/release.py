"""Which release of Turnwise this is."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

FROM_SOURCE = "0+source"


def version() -> str:
    """Return the installed version; FROM_SOURCE where a checkout runs without having been installed."""
    try:
        return installed("turnwise")
    except PackageNotFoundError:
        return FROM_SOURCE
