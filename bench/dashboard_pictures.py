"""Takes the pictures of docs/dashboard.md with Chromium, from the runs of a data directory.

    python -m bench.dashboard_pictures runs crafter_cpu --other crafter_gigpo --other crafter_gae
        [--talk documents_statelm] [--to docs/img]

A trainer service is started on the directory. It would continue unfinished jobs, so pass a copy without its
database. Pictured are the run's page, its list of rollouts, a decision that unlocked something, and a
comparison with each `--other`. `--talk` is a run whose model deletes messages, for one more picture.
"""

import io
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

from bench import kit
from tests.browser.watched import CHROMIUM
from tests.processes import service

DESK, TALL, PHONE = (1280, 800), (1280, 1000), (390, 844)
READ_S = 120.0  # for the service to read the runs


class Camera:
    """A browser that visits pages and saves pictures of them."""

    def __init__(self, browser: Any, url: str, folder: Path) -> None:
        self._browser, self._url, self._folder = browser, url, folder

    @contextmanager
    def at(self, path: str, size: tuple[int, int] = DESK, scheme: str = "light") -> Iterator[Any]:
        context = self._browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            device_scale_factor=2 if size == PHONE else 1,
        )
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.goto(self._url + path)
        yield page
        context.close()

    def take(self, name: str, page: Any) -> None:
        """Save a picture of the window once everything is loaded."""
        page.wait_for_selector("[aria-busy=true]", state="detached")
        page.locator(".frames img").evaluate_all("all => Promise.all(all.map(one => one.decode()))")
        seen = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        # 256 colours: a third of the bytes, with no visible difference.
        file = self._folder / f"dashboard-{name}.png"
        seen.quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
        print(f"dashboard-{name}.png: {page.url}")


def run_pages(camera: Camera, run: str, others: Sequence[str]) -> None:
    for name, path, size, scheme in (
        ("runs", "/", DESK, "light"),
        ("run", f"/runs/{run}", TALL, "light"),
        ("phone", f"/runs/{run}", PHONE, "light"),
        ("rollouts", f"/runs/{run}/rollouts?stage=train&sort=outcome_reward", DESK, "light"),
        ("compare", f"/runs/{run}?" + "&".join(f"with={other}" for other in others), DESK, "dark"),
        ("new", f"/new?like={run}", DESK, "light"),
    ):
        with camera.at(path, size, scheme) as page:
            if name == "new":
                page.locator("#findings .state").wait_for()
            camera.take(name, page)


def decision(camera: Camera, run: str) -> None:
    """Picture the last decision of the best episode that unlocked something, for a desk and a phone."""
    with camera.at(f"/runs/{run}/rollouts?stage=train&sort=outcome_reward", TALL) as page:
        page.locator("tbody .name a").first.click()
        page.locator(".decisions tr", has=page.locator(".won")).last.locator("a").click()
        page.locator("#shown", has_text="Decision").wait_for(state="attached")
        camera.take("decision", page)
        path = page.evaluate("location.pathname + location.search")
    with camera.at(path, PHONE) as page:
        page.evaluate("document.getElementById('decision').scrollIntoView()")
        camera.take("decision-phone", page)


def deleted(camera: Camera, run: str) -> None:
    """Picture the first decision, from the newest rollouts on, whose prompt shows a deleted message."""
    with camera.at(f"/runs/{run}/rollouts", (1280, 900)) as page:
        found = page.locator("tbody .name a").evaluate_all("all => all.map(one => one.pathname)")
    for path in found:
        with camera.at(path, (1280, 900)) as page:
            while page.locator("a[rel=next]").count() and not page.locator(".message.edited").count():
                page.goto(page.locator("a[rel=next]").evaluate("one => one.href"))
            if page.locator(".message.edited").count():
                camera.take("context", page)
                return
    raise SystemExit(f"no rollout of {run} on the first page of them shows a deleted message")


def wait_for_runs(url: str, names: Sequence[str]) -> list[str]:
    """Return the ids of runs by their folders' names, once the service has read their metrics."""
    until = time.monotonic() + READ_S
    while time.monotonic() < until:
        jobs = httpx.get(f"{url}/jobs", params={"limit": 200}).raise_for_status().json()["jobs"]
        ids = {Path(job["run_dir"]).name: job["id"] for job in jobs if job["run_dir"]}
        found = [ids[name] for name in names if name in ids]
        rows = [httpx.get(f"{url}/jobs/{one}/metrics", params={"names": "episode/*"}).json() for one in found]
        if len(found) == len(names) and all(row["series"] for row in rows):
            return found
        time.sleep(0.5)
    raise SystemExit(f"not all of {', '.join(names)} are runs with metrics in that directory")


def main() -> int:
    options = kit.options(
        __doc__, ("data_dir", str, "of the runs"), ("run", str, "by its folder's name"),
        ("--other", [], "likewise; may be repeated"), ("--talk", "", "likewise"), ("--to", Path("docs/img")),
    )  # fmt: skip
    words = ("trainer", "--data-dir", options.data_dir, "--port", "0")
    with service("trainer_backend", *words) as (_, url), sync_playwright() as started:
        talks = [options.talk] if options.talk else []
        run, *others = wait_for_runs(url, [options.run, *options.other, *talks])
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        camera = Camera(browser, url, options.to)
        run_pages(camera, run, others[: len(options.other)])
        decision(camera, run)
        for talk in others[len(options.other) :]:
            deleted(camera, talk)
    return 0


if __name__ == "__main__":
    sys.exit(main())
