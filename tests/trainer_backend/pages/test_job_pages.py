"""The job form, and what is asked of a job: by the same rules as the API, which is given here."""

import asyncio
import re
from dataclasses import replace

from tests.trainer_backend.pages.shown import NOON, Shown


def test_the_form_begins_from_an_example_or_from_another_job(shown: Shown, tmp_path):
    job_id = shown.small(tmp_path / "tiny")
    assert "[model]\n</textarea>" in shown.page("/new")
    assert "# other\n</textarea>" in shown.page("/new?like=other")
    text = shown.page(f"/new?like={job_id}")
    assert "preset = &#34;tiny-0.3m&#34;" in text and "entropy_coef" not in text  # as it is by itself
    assert "the job tiny" in text


def test_what_is_written_is_checked_and_each_finding_leads_to_its_line(shown: Shown):
    def told(toml):
        return shown.client.post("/new/check", data={"toml": toml}).text

    assert "This job can start" in told("[model]\n")
    assert "[compute] is not read" in told("[compute]\n")
    found = told("\nwrong = 1")
    assert "1 to mend" in found and 'data-line="2"' in found
    assert "wrong &lt;b&gt;is&lt;/b&gt; not a key" in found
    # They come into a region that stays.
    assert '<div id="findings" aria-live="polite">' in shown.page("/new") and "aria-live" not in found


def test_a_job_is_begun_and_shown_or_refused_with_all_that_was_written(shown: Shown):
    answer = shown.client.post("/new", data={"toml": "[model]\r\nx = 1\r\n"})
    assert answer.status_code == 303 and answer.headers["location"].startswith("/runs/")
    for tab in ("", "/rollouts", "/config", "/log"):  # it has no run directory yet
        assert "queued" in shown.page(answer.headers["location"] + tab)
    assert shown.desk.submitted == [("[model]\nx = 1\n", "")]  # a form's line ends are not the file's
    refused = shown.client.post("/new", data={"toml": "wrong & <more>"})
    assert refused.status_code == 400
    assert "wrong &amp; &lt;more&gt;" in refused.text and "wrong is not a key" in refused.text


def test_each_form_is_sent_under_a_name_of_its_own(shown: Shown):
    names = [re.search(r'name="form" value="(\w+)"', shown.page("/new"))[1] for _ in range(2)]
    assert names[0] != names[1]
    for _ in range(2):  # a double click
        shown.client.post("/new", data={"toml": "[model]\n", "form": names[0]})
    assert shown.desk.submitted == [("[model]\n", names[0])] * 2
    assert shown.client.post("/new", data={"toml": "[model]\n", "form": "no hex"}).status_code == 400


def test_the_head_is_read_on_a_thread_and_not_where_requests_are_taken(shown: Shown, tmp_path):
    job_id = shown.small(tmp_path / "tiny", state="running")
    loops = []

    def clock():
        try:
            loops.append(asyncio.get_running_loop())
        except RuntimeError:
            loops.append(None)
        return NOON

    shown.client.app.state.dashboard = replace(shown.dashboard, clock=clock)
    shown.client.post(f"/runs/{job_id}/pause", headers={"HX-Request": "true"})
    assert loops == [None]


def test_buttons_ask_and_show_the_head_as_it_is_then_or_why_that_makes_no_sense(shown: Shown, tmp_path):
    job_id = shown.small(tmp_path / "tiny", state="running")
    plain = shown.client.post(f"/runs/{job_id}/pause")
    assert (plain.status_code, plain.headers["location"]) == (303, f"/runs/{job_id}")
    by_htmx = shown.client.post(f"/runs/{job_id}/cancel", headers={"HX-Request": "true"})
    assert by_htmx.status_code == 200 and by_htmx.text.strip().startswith('<div id="head"')
    assert shown.desk.asked == [(job_id, "pause"), (job_id, "cancel")]
    ended = shown.small(tmp_path / "ended")
    answer = shown.client.post(f"/runs/{ended}/pause")
    assert answer.status_code == 409 and "there is nothing to pause" in answer.text
    assert shown.client.post(f"/runs/{ended}/explode").status_code == 400


def test_a_service_that_only_shows_offers_no_form_and_takes_no_job(tmp_path):
    shown = Shown(tmp_path, runs_jobs=False)
    job_id = shown.small(tmp_path / "tiny", state="running")
    assert "/new" not in shown.page("/")
    assert "Pause" not in shown.page(f"/runs/{job_id}")
    assert "begins none" in shown.page("/new", 403)
    for address in ("/new", "/new/check", f"/runs/{job_id}/pause"):
        assert shown.client.post(address, data={"toml": ""}).status_code == 403
    shown.store.close()
