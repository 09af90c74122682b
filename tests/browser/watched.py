"""Pages of a browser that keep what went wrong."""

import os
import shutil
from typing import Any

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
FITS = "document.documentElement.scrollWidth <= window.innerWidth"


class Watched:
    """A page of a browser, and what it complained of or asked of others.

    An answer that is an error is a line of the console too; `refused` says which of those are meant. So is a
    question that a newer one replaced.
    """

    def __init__(self, browser: Any, base: str, *, refused: tuple[int, ...] = (), **options: Any) -> None:
        self.base = base
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        self.page = browser.new_context(**options).new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._interrupted)
        self.page.on("console", self._heard)
        self.page.on("request", self._asked)
        self._refused = refused

    def _interrupted(self, dialog: Any) -> None:
        self.complaints.append(dialog.message)
        dialog.accept()

    def _heard(self, line: Any) -> None:
        meant = any(f"status of {status}" in line.text for status in self._refused)
        meant = meant or line.text.startswith(("htmx:afterRequest", "htmx:sendAbort"))
        if line.type in ("error", "warning") and not meant:
            self.complaints.append(line.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(self.base):
            self.elsewhere.append(request.url)

    def go(self, path: str) -> None:
        self.page.goto(self.base + path)

    def fits(self) -> bool:
        """Nothing is wider than the window."""
        return bool(self.page.evaluate(FITS))

    def too_small(self) -> list[str]:
        """The links, buttons and fields that a finger cannot hit: under 24 pixels, WCAG 2.5.8.

        A link in a list of decisions is as large as its row; one in the middle of a text is let off.
        """
        return list(
            self.page.evaluate(
                """() => [...document.querySelectorAll("a, button, select, input, summary, textarea")]
                .filter((one) => one.checkVisibility() && !one.matches(".skip, [type=hidden], .tokens a"))
                .filter((one) => {
                  const { width, height } = (one.closest(".decisions tr") ?? one).getBoundingClientRect();
                  return width < 24 || height < 24;
                }).map((one) => one.outerHTML)"""
            )
        )
