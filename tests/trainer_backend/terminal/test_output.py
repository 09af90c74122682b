"""Stored text on a terminal: shown, never obeyed. What the shell offers after a tab."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest
import structlog
import typer
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from service_kit.logs import configure_logs
from shared_schemas.plain_text import visible
from task_app.__main__ import app as task_app
from tests.conftest import tiny_job
from tests.trainer_backend.dialogues import dialogue, finished
from tests.trainer_backend.pages.hand_made import empty_run
from trainer_backend.__main__ import app
from trainer_backend.rundir.rollout_files import write_rollouts
from trainer_backend.terminal.output import TextConsole, tell

# Clears the screen, sets the title, C1's CSI, and turns the line around.
COMMANDS = "\x1b[2J\x1b]0;title\x07 \x9b31m \u202eemit"
SHOWN = r"\x1b[2J\x1b]0;title"


def test_every_control_character_but_tab_and_line_break_is_shown():
    assert visible("a\tb\n\x1b[0m\r\x7f\x9b\u202e é😀") == "a\tb\n\\x1b[0m\\r\\x7f\\x9b\\u202e é😀"


def test_a_console_shows_what_would_command_it_and_its_tables_keep_their_width():
    out = io.StringIO()
    console = TextConsole(file=out, force_terminal=True, width=60)
    table = Table(box=None, pad_edge=False)
    table.add_column(Text("name"))
    table.add_column(Text("state"))
    table.add_row(Text(COMMANDS), Text("x"))
    table.add_row(Text("other"), Text("y"))
    tell(console, COMMANDS)
    console.print(table)
    told = out.getvalue()
    for command in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e"):
        assert command not in told
    assert told.count(SHOWN) == 2


def test_a_console_reads_no_markup_in_strings():
    out = io.StringIO()
    console = TextConsole(file=out, width=60)
    table = Table("[name]", box=None)
    table.add_row("[red]row[/red]")
    console.print("[data] [/x] :smile:", table)
    assert out.getvalue().split() == ["[data]", "[/x]", ":smile:", "[name]", "[red]row[/red]"]


def helps(group: typer.Typer, *words: str) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """The words of each command, and the texts of its help as they are written."""
    for sub in group.registered_groups:
        if sub.typer_instance is not None:
            yield from helps(sub.typer_instance, *words, str(sub.name))
    for command in group.registered_commands:
        callback = command.callback
        assert callback is not None
        options = [
            option.help
            for parameter in signature(callback).parameters.values()
            for option in getattr(parameter.annotation, "__metadata__", ())
        ]
        name = command.name or callback.__name__
        yield (*words, name), [text for text in (callback.__doc__, *options) if text]


@pytest.mark.parametrize(("words", "texts"), [pytest.param(*one, id=" ".join(one[0])) for one in helps(app)])
def test_help_shows_every_text_as_it_is_written(words: tuple[str, ...], texts: list[str]):
    program, arguments = app, words
    if words == ("task-app",):  # it hands --help on to a process of its own
        program, arguments = task_app, ()
        ((_, texts),) = helps(task_app)
    shown = CliRunner().invoke(program, [*arguments, "--help"], env={"COLUMNS": "1000"}).stdout
    for text in texts:
        assert " ".join(text.split()) in " ".join(shown.split())


def test_inspect_shows_the_commands_that_a_model_wrote(tmp_path):
    run = empty_run(tiny_job(), tmp_path / "run")
    episode = dialogue(1.0)
    (step,) = episode.steps
    said = step.model_copy(
        update={"raw_policy_output": COMMANDS, "action_taken": {"type": "text", "content": COMMANDS}}
    )
    history = [one.model_copy(update={"content": COMMANDS}) for one in episode.full_history]
    episode = episode.model_copy(update={"steps": (said,), "full_history": tuple(history)})
    played = finished(episode, 1)
    write_rollouts(run.rollouts_file("iteration_1"), [played])
    arguments = ["inspect", played.rollout_id, "--run", str(run.path)]
    told = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert SHOWN in told
    assert "\x1b" not in told


def test_a_log_for_people_shows_them_too(capsys):
    before = structlog.get_config()
    try:
        configure_logs()
        try:
            raise ValueError(COMMANDS)
        except ValueError:
            structlog.get_logger("x").exception("boundary", what=COMMANDS)
    finally:
        structlog.configure(**before)
    told = capsys.readouterr().err
    assert told.count(SHOWN) == 2
    assert "\x1b" not in told


SPEAKER = """
import sys
from pathlib import Path
from rich.live import Live
from trainer_backend.terminal.output import LastingStreams, TextConsole, tell

out, err, log = TextConsole(force_terminal=True), TextConsole(stderr=True), Path(sys.argv[1])
with LastingStreams.opened() as streams:
    tell(out, "first")
    sys.stdin.readline()  # until there is no reader
    streams.when_lost(lambda: log.write_text("lost"))
    with Live("a table", console=out):
        for line in range(3):
            tell(out, "line")
            tell(err, "line")
            print("a library", file=sys.stderr)
    log.write_text(log.read_text() + ", done")
"""


@pytest.mark.parametrize("closed", ["", ">&- 2>&-"])
def test_a_process_whose_output_is_closed_goes_on_and_ends_well(tmp_path: Path, closed: str):
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", SPEAKER, str(tmp_path / "log")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == (b"" if closed else b"first\n")
        process.stdout.close()
        process.stdin.close()
    assert process.returncode == 0
    assert (tmp_path / "log").read_text() == "lost, done"


def offered(words: str) -> list[str]:
    environment = {
        "_TURNWISE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    return CliRunner().invoke(app, [], prog_name="turnwise", env=environment).stdout.split()


def test_a_shell_is_offered_commands_presets_and_estimators():
    assert {"train", "init", "new", "report"} <= set(offered("turnwise "))
    assert offered("turnwise init --preset tiny-0.8") == ["tiny-0.8m"]
    assert offered("turnwise recredit --advantage rl") == ["rloo"]
    assert offered("turnwise report ") == [], "the shell completes paths itself"
