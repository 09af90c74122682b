"""The dashboard in Chromium: every page, a run that goes on, an episode paged through, a job written."""

import shutil
from pathlib import Path

import httpx
import pytest

from tests.browser.watched import DESKTOP, PHONE, Watched
from tests.conftest import TASK_APP_KEY, at_the_task_app, tiny_job
from tests.trainer_backend.jobs.on_a_port import on_a_port
from tests.trainer_backend.jobs.served import settings_for
from tests.trainer_backend.pages.hand_made import empty_run, small_run
from tests.trainer_backend.pages.shown import numbered_run
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.state import RunState, write_state
from trainer_backend.store import jobs

JOB = '[job]\nname = "waiting"\n[model]\npreset = "tiny-0.3m"\n'


@pytest.fixture(scope="module")
def service(chromium, tmp_path_factory, trained):
    """A run that was trained for real, one whose texts are attacks, and one with long words that failed."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copytree(trained[0].path, folder / "trained")
    numbered_run(folder / "attacks")
    small_run(tiny_job(job={"name": "tiny", "seed": 9}), folder / "seed_9")
    word = "a_word_without_a_blank" * 6
    empty_run(tiny_job(job__name=word[:50], services__task_plugins=[f"/{word}.py"]), folder / "long")
    write_state(folder / "long", RunState("failed", 17, code="advantage_undefined", detail=f"{word}: {word}"))
    run = open_run(folder / "trained")
    run.replace_job(at_the_task_app(run.job()))  # plays its episodes again; one of its own takes seconds
    with pytest.MonkeyPatch.context() as environ, on_a_port(settings_for(folder)) as (url, service):
        environ.setenv("ENVIRONMENT_API_KEY", TASK_APP_KEY.get_secret_value())
        service.watcher.look(everything=True)
        yield url, service


@pytest.fixture(scope="module")
def ids(service):
    found = jobs.find(service[1].store, origin="cli").items
    return {job.run_dir.rpartition("/")[2]: job.id for job in found}


def test_every_page_fits_its_window_without_complaints_and_asks_no_other_server(browser, service, ids):
    run = f"/runs/{ids['trained']}"
    paths = [
        "/", run, f"{run}/rollouts", f"{run}/rollouts/train/1/0/0?turn=2", f"{run}/config", f"{run}/log",
        f"{run}?with={ids['attacks']}&with={ids['seed_9']}&pin={ids['trained']}",
        f"{run}?x=hours&smooth=0.9&log=on",
        f"/?state=ended&sort=name&run={ids['long']}&run={ids['trained']}",
        f"/compare/numbers?run={ids['trained']}&run={ids['long']}", f"{run}/rollouts?lost=1",
        f"/runs/{ids['long']}", f"/runs/{ids['long']}/config",
        "/new", "/runs/no",
    ]  # fmt: skip
    seen = Watched(browser, service[0], viewport=PHONE, color_scheme="dark", refused=(404,))
    for path in paths:
        seen.page.set_viewport_size(PHONE)
        seen.page.emulate_media(color_scheme="dark")
        seen.go(path)
        seen.page.wait_for_load_state("networkidle")
        assert seen.fits() and seen.too_small() == [], path
        assert seen.page.locator("h1").count() == 1, path
        seen.page.set_viewport_size(DESKTOP)
        seen.page.emulate_media(color_scheme="light")
        assert seen.fits(), path
    assert (seen.complaints, seen.elsewhere) == ([], [])


def test_all_advantages_of_an_episode_are_drawn_from_one_zero_on_one_scale(browser, service, ids):
    for viewport in (DESKTOP, PHONE):
        seen = Watched(browser, service[0], viewport=viewport)
        seen.go(f"/runs/{ids['trained']}/rollouts/train/1/0/0")
        at = "all => all.map(one => one.getBoundingClientRect()).map(box => [box.left, box.width])"
        bars = seen.page.locator(".advantage rect").evaluate_all(at)
        numbers = seen.page.locator("tr:has(.advantage) td:last-child").all_inner_texts()
        assert len({len(number) for number in numbers}) > 1
        values = [float(number.replace("\N{MINUS SIGN}", "-")) for number in numbers]
        longest, half = max(map(abs, values)), max(width for _, width in bars)
        line = seen.page.locator(".spread").first.evaluate(
            "one => one.getBoundingClientRect().left + parseFloat(getComputedStyle(one).backgroundPositionX)"
        )
        for value, (left, width) in zip(values, bars, strict=True):
            assert left + width * (value < 0) == pytest.approx(line, abs=1)
            assert width / half == pytest.approx(abs(value) / longest, abs=0.02)


def test_what_a_rollout_says_is_shown_and_never_run(browser, service, ids):
    seen = Watched(browser, service[0])
    seen.go(f"/runs/{ids['attacks']}/rollouts/train/1/0/0")
    assert "<script>alert('saw')</script>" in seen.page.locator(".message pre").first.inner_text()
    seen.page.locator(
        ".frames .note, .frames img"
    ).first.wait_for()  # a hand-made episode cannot be played again
    assert seen.complaints == []


def test_charts_are_drawn_and_can_be_read_with_the_keyboard_and_as_tables(browser, service, ids):
    seen = Watched(browser, service[0])
    seen.go(f"/runs/{ids['trained']}")
    figure = seen.page.locator("[data-chart=outcome]")
    figure.locator("canvas").wait_for()
    plot = figure.locator(".plot")
    assert plot.get_attribute("aria-label").startswith("Unique achievements an episode. training: ")
    plot.focus()
    plot.press("ArrowRight")
    assert figure.locator("[aria-live]").inner_text().startswith("iteration 0: training")
    plot.press("End")
    assert figure.locator("[aria-live]").inner_text().startswith("iteration 2: training")
    figure.locator("summary").click()
    assert figure.locator("tbody tr").first.inner_text().startswith("2")
    assert seen.complaints == []


def test_what_a_reader_chooses_is_drawn_at_once_and_kept_in_the_address(browser, service, ids):
    seen = Watched(browser, service[0])
    page = seen.page
    seen.go(f"/runs/{ids['seed_9']}")
    figure = page.locator("[data-chart=reward]")
    figure.locator("canvas").wait_for()
    words = "Reward an episode. reward: 1 at iteration 1, 2 at 2, between 1 and 2."
    assert figure.locator(".plot").get_attribute("aria-label") == words
    first = figure.locator("canvas").evaluate("one => one.toDataURL()")
    page.locator("input[name=smooth]").fill("0.5")
    figure.locator(".legend b", has_text="1.67").wait_for()  # of 1 and 2: (1 / 4 + 2 / 2) / (3 / 4)
    page.locator("input[name=log]").check()
    assert page.url.endswith(f"/runs/{ids['seed_9']}?smooth=0.5&log=on")
    assert figure.locator("canvas").evaluate("one => one.toDataURL()") != first
    seen.go(f"/runs/{ids['trained']}?x=steps&smooth=0.5")
    page.locator("[data-chart=outcome] canvas").wait_for()
    page.locator("[data-chart=outcome] .plot").press("End")
    steps = page.locator("[data-chart=outcome] [aria-live]", has_text="env steps")
    steps.wait_for(state="attached")
    assert page.locator("select[name=x]").input_value() == "steps"
    page.locator("[data-chart=outcome] summary").click()
    page.locator("[data-chart=outcome] thead", has_text="env steps").wait_for()
    assert (page.locator("output").inner_text(), seen.complaints) == ("0.5", [])


def test_without_scripts_the_form_of_the_charts_sends_itself(browser, service, ids):
    seen = Watched(browser, service[0], java_script_enabled=False)
    seen.go(f"/runs/{ids['trained']}?with={ids['seed_9']}")
    seen.page.locator("select[name=x]").select_option("steps")
    seen.page.locator("select[name=pin]").select_option(ids["seed_9"])
    seen.page.get_by_role("button", name="Draw").click()
    assert f"with={ids['seed_9']}" in seen.page.url and "x=steps" in seen.page.url
    assert seen.page.locator("select[name=x]").input_value() == "steps"
    assert "pinned" in seen.page.locator("#last tr[aria-current]").inner_text()
    seen.go(f"/runs/{ids['trained']}/values?panel=reward&x=steps")
    assert "env steps" in seen.page.locator("thead").inner_text()


def test_seeds_of_one_setting_are_one_line_or_several_and_the_others_are_told_from_the_pinned_run(
    browser, service, ids
):
    seen = Watched(browser, service[0])
    page = seen.page
    seen.go(f"/runs/{ids['attacks']}?with={ids['seed_9']}")
    names = page.locator("[data-chart=reward] .legend li:not(.where)")
    names.first.wait_for()
    assert [text.startswith("attacks (2 seeds)") for text in names.all_inner_texts()] == [True]
    assert page.locator("#last tbody tr").count() == 1
    page.locator("input[name=seeds]").check()
    names.nth(1).wait_for()
    page.locator("#last tbody tr").nth(1).wait_for()
    page.locator("select[name=pin]").select_option(ids["attacks"])
    page.locator("#last tr[aria-current]", has_text="pinned").wait_for()
    assert page.url.endswith(f"&seeds=apart&pin={ids['attacks']}")
    assert seen.complaints == []


def test_links_to_the_parts_of_a_page_stay_in_view_and_lead_to_them(browser, service, ids):
    for viewport in (DESKTOP, PHONE):
        seen = Watched(browser, service[0], viewport=viewport)
        seen.go(f"/runs/{ids['trained']}")
        seen.page.locator("canvas").first.wait_for()
        seen.page.locator(".contents a", has_text="Speed").click()
        place = "one => one.getBoundingClientRect().top"
        bar, heading = (
            seen.page.locator(one).evaluate(place) for one in (".contents", "summary:has-text('Speed')")
        )
        assert bar == 0 and 0 < heading < viewport["height"] / 2


def test_seeds_are_averaged_and_runs_placed_on_an_axis_as_worked_by_hand(browser, service):
    seen = Watched(browser, service[0])
    seen.go("/")
    shown = seen.page.evaluate(
        """async ([chart, data, choice]) => {
          const base = document.querySelector("script[type=module]").src.replace("turnwise.js", "curves.js");
          return (await import(base)).shown(chart, data, choice);
        }""",
        [
            {
                "unit": "iteration", "x": [0, 1, 2],
                "curves": [{"run": run, "y": y} for run, y in ((0, [1, 2, None]), (1, [3, 6, 8]))],
            },
            {
                "groups": [{"name": "both", "runs": [0, 1]}], "at": [0, 1, 2],
                "axes": {"hours": {"name": "hours", "x": [[0, 1, 1], [0, 2, 5]]}},
            },
            {"x": "hours", "smooth": 0, "log": True},
        ],
    )  # fmt: skip
    (curve,) = shown["curves"]
    # the second seed alone has a third value, 5 hours after its start
    assert (shown["unit"], shown["x"], shown["log"]) == ("hours", [0, 1.5, 5], True)
    assert [curve[key] for key in ("label", "y", "low", "high")] == ["both", [2, 4, 8], [1, 2, 8], [3, 6, 8]]


def test_an_episode_is_paged_through_with_its_pictures_and_tokens(browser, service, ids):
    seen = Watched(browser, service[0])
    seen.go(f"/runs/{ids['trained']}/rollouts?stage=train&iteration=1")
    seen.page.locator("tbody a").first.click()
    page = seen.page
    page.locator(".frames img").nth(1).wait_for()  # the job's task app plays it again
    widths = page.locator(".frames img").evaluate_all(
        "all => all.map(image => image.complete && image.naturalWidth)"
    )
    assert widths == [144, 144]
    page.keyboard.press("ArrowRight")
    page.locator("[data-turn='2']").wait_for()
    assert page.url.endswith("?turn=2")
    assert page.locator("#turn-2").get_attribute("aria-current") == "true"
    page.locator(".pager a[rel=prev]").click()
    page.locator("[data-turn='1']").wait_for()
    page.go_back()
    page.locator("[data-turn='2']").wait_for()
    colour = "token => getComputedStyle(token).backgroundColor"
    token = page.locator(".tokens .m1").first
    page.locator("input[value=mask]").check()
    masked = token.evaluate(colour)
    page.locator("input[value=logprob]").check()
    assert masked != token.evaluate(colour)
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    assert "log-prob" in page.locator(".readout").inner_text()
    assert page.url.endswith("?turn=2")  # the arrows walked through tokens
    assert seen.complaints == []


def test_turning_a_page_keeps_the_focus_and_the_colours_and_says_where_one_is(browser, service, ids):
    seen = Watched(browser, service[0])
    seen.go(f"/runs/{ids['trained']}/rollouts/train/1/0/0")
    page, focused = seen.page, "document.activeElement.id"
    count = int(page.locator("#decision-title .soft").inner_text().removeprefix("of "))
    page.locator("input[value=mask]").check()
    page.locator("#pager-next").focus()
    for turn in range(2, count + 1):
        page.keyboard.press("Enter")
        page.locator(f"[data-turn='{turn}']").wait_for()
        page.locator("#shown", has_text=f"Decision {turn} of {count}").wait_for(state="attached")
        assert page.evaluate(focused) == "pager-next"  # at the end too, where it leads no further
        assert page.locator("input[value=mask]").is_checked()
    page.locator("#turn-1 a").focus()
    page.keyboard.press("Enter")
    page.locator("[data-turn='1']").wait_for()
    assert page.evaluate("document.activeElement.closest('tr').id") == "turn-1"
    assert seen.complaints == []


def test_a_filter_keeps_the_order_and_sorting_keeps_the_focus(browser, service, ids):
    seen = Watched(browser, service[0])
    seen.go(f"/runs/{ids['trained']}/rollouts")
    page = seen.page
    page.locator("#sort-outcome_reward").focus()
    page.keyboard.press("Enter")
    page.locator("th[aria-sort=descending]", has_text="outcome").wait_for()
    assert page.evaluate("document.activeElement.id") == "sort-outcome_reward"
    page.keyboard.press("Enter")
    page.locator("th[aria-sort=ascending]", has_text="outcome").wait_for()
    page.locator("select[name=stage]").select_option("evaluation")
    page.locator("caption", has_text="of 8 rollouts, by outcome reward, lowest first").wait_for()
    page.locator("#shown", has_text="of 8 rollouts").wait_for(state="attached")
    assert "sort=outcome_reward" in page.url and "down=0" in page.url and "stage=evaluation" in page.url
    assert seen.complaints == []


def test_runs_are_narrowed_sorted_and_ticked_in_the_address_and_then_stand_side_by_side(
    browser, service, ids
):
    seen = Watched(browser, service[0])
    seen.go("/")
    page = seen.page
    page.locator(f"#choose-{ids['trained']}").check()
    page.locator(".pages", has_text="1 chosen: tiny").wait_for()
    page.locator("select[name=state]").select_option("failed")
    page.locator(f"#run-{ids['attacks']}").wait_for(state="detached")
    assert page.url == f"{service[0]}/?state=failed&sort=created&down=1&run={ids['trained']}"
    page.locator(f"#choose-{ids['long']}").focus()
    page.keyboard.press("Space")
    page.locator(".pages", has_text="2 chosen").wait_for()
    assert page.evaluate("document.activeElement.id") == f"choose-{ids['long']}"
    page.locator("input[name=text]").fill("no such run")
    page.keyboard.press("Enter")
    page.locator(".empty", has_text="No run is like that").wait_for()
    page.locator("a", has_text="Numbers side by side").click()
    page.locator("h1", has_text="2 runs side by side").wait_for()
    page.locator("a", has_text="Choose others").click()
    assert page.locator(f"#choose-{ids['trained']}").is_checked()
    page.locator("#sort-name").click()
    page.locator("th[aria-sort=descending]", has_text="run").wait_for()
    assert page.locator("tbody .name a").all_inner_texts()[-1].startswith("a_word")
    assert page.locator(f"#choose-{ids['long']}").is_checked() and "sort=name" in page.url
    assert seen.complaints == []


def test_lost_rollouts_are_shown_alone_and_others_by_their_length(browser, service, ids):
    seen = Watched(browser, service[0], viewport=PHONE)
    seen.go(f"/runs/{ids['attacks']}/rollouts")
    page = seen.page
    page.locator("input[name=lost]").check()
    page.locator(".losses", has_text="1 of 5").wait_for()
    page.locator(".empty", has_text="No rollout is like that").wait_for()
    assert "lost=1" in page.url
    held = []  # an answer that is slow: what is chosen after its question counts
    page.route("**/rollouts?*", lambda route: held.append(route) if not held else route.continue_())
    with page.expect_request("**/rollouts?*"):
        page.locator("input[name=lost]").uncheck()
    page.locator("input[name=min_decisions]").fill("3")
    page.locator("select[name=sort]").select_option("decisions")
    page.locator("caption", has_text="of 1 rollouts, by decisions, highest first").wait_for()
    assert seen.complaints == []


def test_without_scripts_runs_are_narrowed_and_compared_and_pages_read(browser, service, ids):
    seen = Watched(browser, service[0], java_script_enabled=False)
    seen.go("/?sort=name")
    page = seen.page
    for name in ("trained", "long"):
        page.locator(f"#choose-{ids[name]}").check()
    page.locator("select[name=state]").select_option("failed")
    page.locator("button", has_text="Show").click()
    assert page.locator("tbody .name a").count() == 1 and "sort=name" in page.url
    page.locator("noscript button").first.click()
    assert page.locator("h1").inner_text() == "2 runs side by side"
    seen.go(f"/runs/{ids['trained']}/rollouts/train/1/0/0")
    page.locator(".pager a[rel=next]").click()
    assert page.locator("#decision-title").inner_text().startswith("Decision 2")


def test_a_job_is_checked_while_it_is_written_begun_followed_and_cancelled(browser, service):
    url, behind = service
    seen = Watched(browser, url, viewport=PHONE)
    page = seen.page
    seen.go("/new")
    page.locator("text=This job can start").wait_for()
    assert "`turnwise init`" in page.locator("textarea").input_value()
    page.locator("textarea").fill(JOB + "[training]\niteration = 3\n")
    page.locator("[data-line='6']").click()
    chosen = "text => text.value.slice(text.selectionStart, text.selectionEnd)"
    assert page.locator("textarea").evaluate(chosen) == "iteration = 3"
    page.locator("textarea").fill(JOB + "[training]\niterations = 3\n")
    page.locator("text=This job can start").wait_for()
    page.locator("text=Start the job").click()
    page.locator(".state.running").wait_for()
    job = jobs.get(behind.store, page.url.rpartition("/")[2])
    for number in (1, 2):  # without a reload: the page follows
        with open(f"{job.run_dir}/iterate", "w"):
            pass
        page.locator("#head", has_text=f"{number} of 3 iterations").wait_for()
        page.locator("[data-chart=outcome] .legend b", has_text=f"{number}.5").wait_for()
    assert seen.fits() and seen.too_small() == []
    page.get_by_role("button", name="Cancel").click()  # the question whether to is answered with yes
    page.locator(".state.cancelled").wait_for()
    assert seen.complaints == ["Cancel this job? What it has trained so far stays."]
    page.get_by_role("button", name="Resume").click()
    page.locator(".state.running").wait_for()


def test_a_stream_that_was_refused_comes_back_and_meanwhile_the_page_says_that_it_is_behind(
    browser, tmp_path
):
    with on_a_port(settings_for(tmp_path)) as (url, behind), httpx.Client(base_url=url) as http:
        job_id = http.post("/jobs", json={"toml": JOB}).json()["id"]
        seen = Watched(browser, url, refused=(503,))
        page = seen.page
        page.route("**/events?*", lambda route: route.fulfill(status=503))
        seen.go(f"/runs/{job_id}")
        page.locator("#told", has_text="This page is behind").wait_for()
        page.unroute("**/events?*")
        page.locator(".state.running").wait_for()
        Path(jobs.get(behind.store, job_id).run_dir, "iterate").touch()
        page.locator("#head", has_text="1 of ").wait_for()
        page.wait_for_function("document.querySelector('#told').innerText === ''")
        assert seen.complaints == []


def test_runs_that_are_laid_over_one_another_go_on_while_one_of_them_does(browser, tmp_path):
    with on_a_port(settings_for(tmp_path)) as (url, behind), httpx.Client(base_url=url) as http:
        quick, waiting = (
            http.post("/jobs", json={"toml": JOB.replace("waiting", name)}).json()["id"]
            for name in ("quick", "waiting")
        )
        seen = Watched(browser, url)
        page = seen.page
        seen.go(f"/runs/{waiting}")
        page.locator(".state.running").wait_for()
        run_dir = Path(jobs.get(behind.store, waiting).run_dir)
        (run_dir / "iterate").touch()
        page.locator("#head", has_text="1 of ").wait_for()
        page.clock.install()
        seen.go(f"/runs/{quick}?with={waiting}")
        last = (
            "last => [...document.querySelectorAll('[data-chart=outcome] .legend li b')]"
            ".map(one => one.textContent).join() === last"
        )
        page.wait_for_function(last, arg="2.5,1.5")
        page.locator("input[name=log]").check()
        page.locator("select[name=pin]").select_option(waiting)
        (run_dir / "iterate").touch()
        page.wait_for_function(
            "async id => (await (await fetch(`/jobs/${id}/metrics?names=episode/*`)).text()).includes('2.5')",
            arg=waiting,
        )
        page.clock.fast_forward(10_000)
        page.wait_for_function(last, arg="2.5,2.5")
        assert page.url.endswith(f"?with={waiting}&log=on&pin={waiting}")
        assert page.locator("input[name=log]").is_checked()  # what is new comes into the chosen view
        assert "pinned" in page.locator("#last tr[aria-current]").inner_text()
        assert seen.complaints == []


def test_where_there_is_a_key_a_person_logs_in_with_it_and_again_after_the_session(browser, tmp_path):
    key = "a-key-of-forty-characters-or-something"
    with on_a_port(settings_for(tmp_path, environ={"TRAINER_API_KEY": key})) as (url, _):
        seen = Watched(browser, url, refused=(401,), viewport=PHONE)
        seen.go("/?state=ended")
        assert seen.fits() and seen.too_small() == []
        seen.page.locator("input[name=key]").fill("wrong")
        seen.page.locator("button").click()
        assert "not the key" in seen.page.locator("[role=alert]").inner_text()
        seen.page.locator("input[name=key]").fill(key)
        seen.page.locator("button").click()
        seen.page.locator("h1", has_text="Runs").wait_for()
        assert seen.page.url.endswith("/?state=ended")
        with httpx.Client(base_url=url, headers={"X-API-Key": key}) as http:
            job_id = http.post("/jobs", json={"toml": JOB}).json()["id"]
        seen.go(f"/runs/{job_id}")
        seen.page.locator(".state.running").wait_for()
        seen.page.context.clear_cookies()
        seen.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # who comes back to it
        seen.page.locator("input[name=key]").wait_for()
        assert seen.complaints == []
