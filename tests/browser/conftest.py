"""Chromium, for all tests of a file."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.watched import CHROMIUM


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium here; `apt-get install chromium`")
    with sync_api.sync_playwright() as started:
        # Root in a container has no sandbox; the pages under test are our own.
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """Its pages close with the test: an open one goes on asking."""
    yield chromium
    for context in chromium.contexts:
        context.close()
