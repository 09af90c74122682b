"""What the shell offers after a tab, asked as a shell asks: with the words so far in the environment."""

from typer.testing import CliRunner

from trainer_backend.__main__ import app


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
