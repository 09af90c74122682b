"""What the dashboard asks of the service: jobs of its form, and those that the form can begin from."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.trainer_backend.jobs.served import serving, settings_for
from trainer_backend.jobs.posted import Checked
from trainer_backend.jobs.submission import JobsForPages, build_dashboard, examples_in
from trainer_backend.terminal.templates import Choices, write_job

TOML = '[job]\nname = "waiting"\n[model]\npreset = "tiny-0.3m"\n'


async def test_a_form_that_is_sent_twice_is_one_job_and_another_text_another(served):
    desk = JobsForPages(served.service)
    first, again = await desk.submit(TOML, "ab12"), await desk.submit(TOML, "ab12")
    assert first.id == again.id
    other_text = await desk.submit(TOML + "[training]\niterations = 3\n", "ab12")
    other_form = await desk.submit(TOML, "ab13")
    assert len({first.id, other_text.id, other_form.id}) == 3


def test_examples_are_those_of_the_operator_s_folders_and_what_is_none_is_left_out(tmp_path):
    mine, yours = tmp_path / "mine", tmp_path / "yours"
    for folder in (mine, yours):
        folder.mkdir()
        (folder / "both.toml").write_text(f"# {folder.name}\n")
    (mine / "alone.toml").write_text("# alone\n")
    (mine / "latin.toml").write_bytes(b"# \xe9\n")
    (mine / "folder.toml").mkdir()
    with capture_logs() as logs:
        found = examples_in([mine, yours, tmp_path / "none"])
    assert found == (
        ("alone", "# alone\n"),
        (str(mine / "both.toml"), "# mine\n"),
        (str(yours / "both.toml"), "# yours\n"),
    )
    assert [line["file"] for line in logs] == [str(mine / "folder.toml"), str(mine / "latin.toml")]


@pytest.mark.parametrize("environ", [{}, {"TASK_URL": "http://127.0.0.1:9"}])
async def test_the_form_opens_with_what_init_writes_and_that_can_start(tmp_path, environ):
    write_job(tmp_path / "job.toml", Choices())
    async with serving(settings_for(tmp_path / "data", environ=environ)) as served:
        (name, text), *others = build_dashboard(served.service).examples
        assert (name, text) == ("turnwise init", (tmp_path / "job.toml").read_text())
        assert await JobsForPages(served.service).check(text) == Checked(ok=True, findings=())
        assert {name for name, _ in others} == {file.stem for file in Path("configs").glob("*.toml")}
