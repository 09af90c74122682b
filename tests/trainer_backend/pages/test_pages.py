"""Every page, over a run that can be worked by hand; the job form, and what is asked of a job: by the same
rules as the API, which is given here."""

import asyncio
import re
from dataclasses import replace

import pytest
from starlette.datastructures import QueryParams

from shared_schemas.rollouts import RolloutFailure
from tests.conftest import tiny_job
from tests.trainer_backend.pages.hand_made import LOST, empty_run, iteration_row, rollout
from tests.trainer_backend.pages.shown import NOON, PNG, Shown, numbered_run
from trainer_backend.pages.run import list_rollouts
from trainer_backend.rundir.rollout_files import Credit, read_rollouts, write_rollouts
from trainer_backend.rundir.state import ProcessRecord, RunState, append_log, write_state
from trainer_backend.store import jobs

ROLLOUT = "r/train/1/1/0"  # of world 2, one decision
FIRST_ROLLOUT = "r/train/1/0/0"


@pytest.fixture(scope="module")
def job_id(shared, tmp_path_factory) -> str:
    return shared.small(tmp_path_factory.mktemp("run") / "tiny")


def addresses(job_id):
    return [
        "/", "/?state=ended", f"/runs/{job_id}", f"/runs/{job_id}/head", f"/runs/{job_id}/rollouts",
        f"/runs/{job_id}/rollouts/{ROLLOUT}", f"/runs/{job_id}/config", f"/runs/{job_id}/log",
        f"/runs/{job_id}/rest", f"/runs/{job_id}/values?panel=reward", "/new", "/new?like=other",
    ]  # fmt: skip


def test_no_page_runs_or_loads_what_is_not_the_dashboard_s_own(shared: Shown, job_id):
    for address in addresses(job_id):
        answer = shared.client.get(address)
        assert answer.status_code == 200, address
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        text = answer.text
        assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|javascript:", text), address
        assert all(
            found.startswith(("/", "#")) for found in re.findall(r'(?:src|href)="([^"]*)"', text) if found
        )


def test_what_a_run_holds_is_text_and_never_markup(shared: Shown, job_id, tmp_path):
    page = shared.page(f"/runs/{job_id}/rollouts/{ROLLOUT}")
    assert "&lt;script&gt;alert(&#39;saw&#39;)&lt;/script&gt;" in page
    assert "<script>alert" not in page
    named = shared.small(tmp_path / "x", name="<b>bold</b>")
    jobs.transition(shared.store, jobs.get(shared.store, named), code="c", detail="<i>why</i>")
    for address in ("/", f"/runs/{named}", f"/runs/{job_id}?with={named}"):
        text = shared.page(address)
        assert "&lt;b&gt;bold" in text and "<b>bold" not in text and "<i>why" not in text


def test_a_run_shows_its_charts_rates_and_checkpoints(shared: Shown, job_id):
    text = shared.page(f"/runs/{job_id}")
    assert 'data-chart="outcome"' in text and 'data-chart="clip"' in text
    assert 'data-chart="critic"' not in text  # it has none
    assert "held-out unique achievements" in text
    assert re.search(r"eat cow.*?100%", text, re.S)
    charts = shared.client.get(f"/runs/{job_id}/charts").json()["charts"]
    by_key = {chart["key"]: chart for chart in charts}
    assert set(by_key) == set(re.findall(r'data-chart="([^"]*)"', text))
    assert by_key["outcome"]["x"] == [0, 1, 2]
    assert by_key["outcome"]["title"] == "Unique achievements an episode" and "unique" not in by_key
    assert by_key["outcome"]["curves"][0]["y"] == [None, 1.0, 2.0]
    assert by_key["time"]["stacked"]
    assert by_key["failures"]["x"] == [0, 1, 2], "warm-up and evaluations count too"


def test_a_run_tells_what_each_stage_lost_and_why(shared: Shown, job_id):
    text = shared.page(f"/runs/{job_id}")
    assert re.search(r"lost rollouts</dt><dd[^>]*>2 of 14 \(14\.3%\)", text), "in the head of each page"
    rows = re.findall(r'<th scope="row">(iteration \d)</th><td class="number">(.*?)</td><td>(.*?)</td>', text)
    assert rows == [(f"iteration {n}", "1 of 5", LOST.replace("<b>", "&lt;b&gt;")) for n in (1, 2)]


def test_what_stands_in_no_chart_is_a_chart_of_its_own_when_it_is_asked_for_and_each_is_a_table_too(
    shared: Shown, job_id
):
    keys = set(re.findall(r'data-chart="([^"]*)"', shared.page(f"/runs/{job_id}/rest")))
    charts = shared.client.get(f"/runs/{job_id}/charts?rest=true").json()["charts"]
    assert keys == {chart["key"] for chart in charts} and "rest:decision/batch_nonzero" in keys
    text = shared.page(f"/runs/{job_id}/values?panel=outcome")
    assert re.findall(r'<th scope="row" class="number">(\d)</th>', text) == ["2", "1", "0"]
    assert "2 (1 to 3)" in text


def test_runs_are_laid_over_one_another_and_asked_for_again_while_one_is_under_way(shared, job_id, tmp_path):
    other = shared.small(tmp_path / "other")
    answer = shared.client.get(f"/compare?run={job_id}&run={other}")
    assert answer.headers["location"] == f"/runs/{job_id}?with={other}"
    text = shared.page(answer.headers["location"])
    assert "2 runs laid over one another" in text
    assert 'data-chart="clip:0"' in text and 'data-chart="clip:1"' in text, "a chart for each line"
    chart = shared.client.get(f"/runs/{job_id}/charts?with={other}").json()["charts"][0]
    assert [curve["label"] for curve in chart["curves"]] == ["tiny", "other"]
    assert f'href="/runs/{job_id}?"' in text  # takes the other away
    running = shared.small(tmp_path / "running", state="running")
    live = f'id="overlaid" data-live="/runs/{job_id}?with={running}" data-every='
    assert "data-every" not in text and live in shared.page(f"/runs/{job_id}?with={running}")


def test_the_list_of_rollouts_follows_as_it_is_filtered_and_sorted(shared: Shown, job_id):
    text = shared.page(f"/runs/{job_id}/rollouts?stage=train&sort=reward&down=0")
    (list_of,) = re.findall(r'<div id="list" data-live="([^"]*)" data-on="metrics">', text)
    assert list_of == f"/runs/{job_id}/rollouts?stage=train&amp;sort=reward&amp;down=0"
    part = text[text.index('<div id="list"') :]
    for name, value in (("sort", "reward"), ("down", "0")):  # what a filter is sent with
        assert re.search(f'name="{name}" form="filters">.*?value="{value}" selected', part)


def test_a_run_that_has_only_begun_has_a_page(shown: Shown, tmp_path):
    run = empty_run(tiny_job(), tmp_path / "new")
    append_log(run.path, "memory: <enough>")
    app = ProcessRecord("task app", "own", "127.0.0.1:8001", "lost", None, "no <answer>", "")
    write_state(run.path, RunState("starting", 1, processes=(app,), notes=("kernels: no <compiler>",)))
    job_id = shown.add(run, state="running")
    text = shown.page(f"/runs/{job_id}")
    assert "No iteration has finished yet" in text
    assert f'data-events="/jobs/{job_id}/events?after=0.{(run.path / "run.log").stat().st_size}"' in text
    assert "memory: &lt;enough&gt;" in text
    assert "memory: &lt;enough&gt;" in shown.page(f"/runs/{job_id}/log")
    assert '<p class="note">kernels: no &lt;compiler&gt;</p>' in shown.page(f"/runs/{job_id}/head")
    (processes,) = re.findall(r'<ul class="processes".*?</ul>', shown.page(f"/runs/{job_id}/head"), re.S)
    assert re.sub(r"<[^>]*>|\s+", " ", processes).split() == [
        "task", "app", "own", "127.0.0.1:8001", "lost", "no", "&lt;answer&gt;",
    ]  # fmt: skip
    assert "No rollouts are stored yet" in shown.page(f"/runs/{job_id}/rollouts")


def test_the_page_of_a_run_that_failed_says_why_and_promises_no_figures(shown: Shown, tmp_path):
    job_id = shown.add(empty_run(tiny_job(), tmp_path / "new"), state="running")
    assert "its figures will stand here." in shown.page(f"/runs/{job_id}")
    why = "no environment of this name"
    job = jobs.get(shown.store, job_id)
    jobs.transition(shown.store, job, state="failed", code="job_invalid", detail=why)
    text = shown.page(f"/runs/{job_id}")
    assert why in text and "job_invalid" in text and why in shown.page("/")
    assert "No iteration has finished yet." in text


def test_of_lost_rollouts_the_list_says_why_each_stage_lost_some(shown: Shown, tmp_path):
    run = numbered_run(tmp_path / "tiny")
    failure = RolloutFailure(code="task_app_lost", detail="away")
    lost = read_rollouts(run.rollouts_file("evaluation_0"))[0].model_copy(
        update={"status": "failed", "trajectory": None, "failure": failure}
    )
    write_rollouts(run.rollouts_file("evaluation_0"), [lost])
    page = list_rollouts(shown.store, shown.add(run), QueryParams("lost=1"))
    assert [row.failure_code for row in page["rows"]] == ["task_app_lost"]
    assert page["losses"] == [(f"iteration {n}", "1 of 5", LOST) for n in (1, 2)]
    assert page["caption"] == "1 of 1 rollouts, newest first"


def test_a_fork_is_drawn_at_the_decision_that_others_play_on_from(shown: Shown, tmp_path):
    run = numbered_run(tmp_path / "tiny")
    group = f"{FIRST_ROLLOUT}/branch-2"
    left = {"parent_rollout_id": FIRST_ROLLOUT, "parent_turn": 1}
    branches = [
        rollout(1, [()], group=group, sibling=k).model_copy(update={"rollout_id": f"{group}/{k}"})
        for k in range(2)
    ]
    write_rollouts(
        run.rollouts_file("branches_1"),
        [b.model_copy(update={"trajectory": b.trajectory.model_copy(update=left)}) for b in branches],
    )
    job_id = shown.add(run)
    text = shown.page(f"/runs/{job_id}/rollouts/{FIRST_ROLLOUT}?turn=2")
    assert f'<a href="/runs/{job_id}/rollouts/{group}/1">continuation 1</a>' in text
    assert "continuation" not in shown.page(f"/runs/{job_id}/rollouts/{FIRST_ROLLOUT}?turn=1")
    assert "after 1 of its decisions" in shown.page(f"/runs/{job_id}/rollouts/{group}/0")


EPISODE = f"/runs/{{}}/rollouts/{FIRST_ROLLOUT}"
REFUSED = [
    ("/?state=lost", 400, "known: active, ended, queued"),
    ("/?tag=red", 400, "must be key=value"),
    ("/runs/none", 404, "there is no job"),
    ("/compare", 400, "no run is chosen"),
    ("/compare/numbers", 400, "no run is chosen"),
    ("/compare/numbers?run=none", 404, "there is no job"),
    ("/new?like=nobody", 404, "there is no job"),
    ("/runs/{}/values?panel=luck", 400, "panel is &#39;luck&#39;"),
    ("/runs/{}/rollouts/g9/9/9", 404, "no rollouts of job"),
    (f"{EPISODE}?turn=3", 404, "has decisions 1 to 2, not 3"),
    (f"{EPISODE}?turn={'9' * 30}", 404, "has decisions 1 to 2, not 9"),
    (f"/runs/{{}}/frames?rollout={FIRST_ROLLOUT}&turn={'9' * 30}", 404, "has no decision 9"),
    (f"/runs/{{}}/frame.png?rollout={FIRST_ROLLOUT}&turn=9", 404, "has no decision 9"),
    ("/static/x/none.css", 404, ""),
    ("/static/x/%2e%2e/pages.py", 404, ""),
    ("/static/x/vendor", 404, ""),
]


def test_what_an_address_does_not_lead_to_is_told_with_its_status(shared: Shown, job_id):
    for address, status, told in REFUSED:
        assert told in shared.page(address.format(job_id), status), address


def test_an_episode_is_shown_decision_by_decision(shared: Shown, job_id):
    text = shared.page(f"/runs/{job_id}/rollouts/{FIRST_ROLLOUT}?turn=2")
    assert 'data-turn="2"' in text and 'id="turn-1"' in text
    assert 'rel="prev"' in text and 'rel="next"' not in text
    assert "collect wood" in text
    assert "Not to be trained on" in text  # played without token ids
    assert "decision-title" in shared.page(f"/runs/{job_id}/rollouts/eval/2/1/0"), "by the end of its id"


def test_decisions_made_in_the_same_state_are_shown_together(shown: Shown, tmp_path):
    run = numbered_run(tmp_path / "tiny")
    path = run.rollouts_file("iteration_1")
    parts = {"return": [1.0, 0.0], "baseline": [-1.0, 0.0], "compared": [2.0, 2.0]}
    credits = [
        Credit([1.0, 0.0], [2.0, 0.0], [1.0, 0.0], "stepwise", parts, state_keys_T=["k", "j"]),
        Credit([3.0], [-1.0], state_keys_T=["k"]),
    ]
    same_group = [
        item.model_copy(update={"group_id": "g", "sibling": i}) for i, item in enumerate(read_rollouts(path))
    ]
    write_rollouts(path, same_group, credits)
    job_id = shown.add(run)
    text = shown.page(f"/runs/{job_id}/rollouts/{FIRST_ROLLOUT}?turn=1")
    anchors = text[text.index("Anchor group") :]
    assert "this one" in anchors and f'/rollouts/{ROLLOUT}?turn=1">1, 1</a>' in anchors
    assert "advantage <b>2</b> = return <b>1</b> \N{MINUS SIGN} baseline <b>\N{MINUS SIGN}1</b>" in text
    assert "baseline: mean of 2 siblings at this turn" in text
    assert "1, 1</a>" not in shown.page(f"/runs/{job_id}/rollouts/{FIRST_ROLLOUT}?turn=2")


def test_pictures_come_when_they_are_asked_for_or_a_sentence_says_why_there_are_none(shown: Shown, tmp_path):
    job_id = shown.small(tmp_path / "tiny")
    episode = f"/runs/{job_id}/rollouts/{FIRST_ROLLOUT}"
    assert "played again to draw it" in shown.page(episode)
    text = shown.page(f"/runs/{job_id}/frames?rollout={FIRST_ROLLOUT}&turn=1")
    assert text.count("<img") == 2 and "turn=0" in text
    assert '<img src="/runs/' in shown.page(episode)  # they are there now
    picture = shown.client.get(f"/runs/{job_id}/frame.png?rollout={FIRST_ROLLOUT}&turn=1")
    assert (picture.content, picture.headers["content-type"]) == (PNG + b"1", "image/png")
    assert "nobody &lt;i&gt;draws&lt;/i&gt; this" in shown.page(
        f"/runs/{job_id}/frames?rollout={ROLLOUT}&turn=1"
    )


def test_without_runs_a_page_says_how_to_begin_one_and_browsers_keep_the_files_that_it_names(shown: Shown):
    text = shown.page("/")
    assert "turnwise train configs/crafter_demo.toml" in text
    (address,) = re.findall(r'href="(/static/[^"]*/turnwise.css)"', text)
    kept = shown.client.get(address)
    assert kept.status_code == 200 and "immutable" in kept.headers["cache-control"]
    assert shown.client.get("/static/old/turnwise.css").headers["cache-control"] == "no-store"


def test_two_lanes_show_when_a_run_collected_and_learned_and_follow_it(shared: Shown, job_id, tmp_path):
    run = numbered_run(tmp_path / "timed")
    for iteration in (3, 4):
        start = 1.8e9 + 30.0 * iteration
        times = {"collect_start": 0.0, "collect_end": 20.0, "learn_start": 20.0, "learn_end": 30.0}
        row = iteration_row(iteration, 1.0) | {
            f"timeline/{name}": start + after for name, after in times.items()
        }
        run.append_metrics(row | {"time/wait_collect_s": 20.0, "time/wait_learner_s": 10.0})
    timed = shared.add(run, state="running")
    assert 'id="timeline"' not in shared.page(f"/runs/{job_id}")  # its rows have no times
    text = shared.page(f"/runs/{timed}")
    (lanes,) = re.findall(r'<figure class="chart timeline".*?</figure>', text, re.S)
    assert f'data-live="/runs/{timed}" data-on="metrics"' in lanes
    assert re.findall(r'<text x="[^"]*" y="\d+">(\d)</text>', lanes) == ["3", "4", "3", "4"]
    assert "They took turns: 67 % of the time was collecting, 33 % learning." in lanes
    assert "rest:timeline" not in shared.page(f"/runs/{timed}/rest")


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
