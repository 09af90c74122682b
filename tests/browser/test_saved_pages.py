"""Saved pages in Chromium, from a file and without a network."""

from functools import partial

import pytest

from tests.browser.watched import DESKTOP, PHONE, Watched
from tests.conftest import tiny_job
from tests.trainer_backend.pages.hand_made import small_run
from tests.trainer_backend.pages.test_report import grey_frames
from trainer_backend.credit.recredit import agreement_page
from trainer_backend.pages.compare import read_sides, write_comparison
from trainer_backend.pages.report import write_report

BLANK = "all => all.filter(c => !c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(Boolean))"
SIZE = "all => all.map(canvas => canvas.width / canvas.clientWidth)"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """By what it shows, the address of each saved page."""
    folder = tmp_path_factory.mktemp("saved")
    run, other = (small_run(tiny_job(), folder / name) for name in ("run", "other"))
    agreement = folder / "agreement.html"
    agreement.write_bytes(agreement_page({"gae": [0.5, -1.0, 2.0], "grpo": [1.0, -1.0, 1.0]}))
    return {
        "run": write_report(run, frames=grey_frames).as_uri(),
        "comparison": write_comparison(read_sides([run.path, other.path]), folder / "out").as_uri(),
        "agreement": agreement.as_uri(),
    }


@pytest.fixture
def watched(browser):
    return partial(Watched, browser, "", offline=True)


@pytest.mark.parametrize("name", ["run", "comparison", "agreement"])
def test_a_saved_page_draws_all_its_charts_from_the_file_alone_in_every_scheme_and_on_paper(
    watched, pages, name
):
    for viewport, scheme in ((DESKTOP, "light"), (PHONE, "dark")):
        seen = watched(viewport=viewport, color_scheme=scheme)
        asked = []
        seen.page.on("request", lambda request, asked=asked: asked.append(request.url[:5]))
        seen.go(pages[name])
        canvases = seen.page.locator(".chart canvas")
        canvases.first.wait_for()
        count = seen.page.locator(".chart").count()
        assert canvases.count() == count > 0
        assert seen.fits() and (viewport == DESKTOP or seen.too_small() == [])
        assert set(asked) <= {"file:", "data:"}
        seen.page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
        seen.page.pdf()
        assert canvases.count() == count
        assert canvases.evaluate_all(BLANK) == [], "drawn again in the other colours"
        assert seen.complaints == []


def test_on_paper_a_chart_is_finer_and_dark_on_white(watched, pages):
    seen = watched(viewport=DESKTOP, color_scheme="dark")
    seen.go(pages["run"])
    canvas = seen.page.locator("[data-chart=outcome] canvas")
    canvas.wait_for()
    ground = "getComputedStyle(document.body).backgroundColor"
    assert seen.page.evaluate(ground) != "rgb(255, 255, 255)"
    seen.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    seen.page.emulate_media(media="print")
    assert seen.page.evaluate(ground) == "rgb(255, 255, 255)"
    assert min(canvas.evaluate_all(SIZE)) > 1.5
    seen.page.emulate_media(media="screen")
    seen.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert max(canvas.evaluate_all(SIZE)) == 1.0
