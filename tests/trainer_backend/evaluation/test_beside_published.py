import pytest

from shared_schemas.trajectory import StopReason
from tests.trainer_backend.pages.hand_made import WOOD, rollout
from trainer_backend.evaluation.beside_published import beside_published
from trainer_backend.evaluation.published_crafter import PROTOCOLS, PUBLISHED, SOURCES


def episode(env_steps, *, died=True, **changes):
    reason = StopReason.ENVIRONMENT_DONE if died else StopReason.MAX_DECISIONS
    ending = {"env_steps": env_steps, "terminated": died, "truncated": not died, "stop_reason": reason}
    return rollout(1, [WOOD]).trajectory.model_copy(update=ending | changes)


def group(title, *episodes, text="full"):
    groups = beside_published(episodes, text=text)
    return next(found for found in groups if found.title == PROTOCOLS[title].title)


def test_every_published_row_has_a_figure_and_a_source_and_no_other_field_is_wrong():
    assert len(PUBLISHED) == len(set((row.agent, row.learned_from, row.protocol) for row in PUBLISHED))
    for row in PUBLISHED:
        figures = [figure for figure in (row.score, row.reward, row.progress) if figure is not None]
        assert figures, row.agent
        assert all(figure.value > 0 and (figure.spread or 0) >= 0 for figure in figures)
        assert row.score is None or row.score.value <= 100
        assert (
            row.reward is None or row.reward.value <= 22
        )  # one a first unlock, and health at most evens out
        assert row.progress is None or row.progress.value <= 100
        assert row.source in SOURCES and row.protocol in PROTOCOLS
    assert {row.source for row in PUBLISHED} == SOURCES.keys()
    assert {row.protocol for row in PUBLISHED} == PROTOCOLS.keys()
    without_url = [source.title for source in SOURCES.values() if not source.url.startswith("https://")]
    assert without_url == ["LanGoal, second hand: the publication was not found, so nothing is checked"]


@pytest.mark.parametrize(
    ("agent", "score", "reward"),
    [("Human", (50.5, 6.8), (14.3, 2.3)), ("PPO (ResNet)", (15.6, 1.6), (10.3, 0.5))],
)
def test_well_known_rows(agent, score, reward):
    (row,) = (row for row in PUBLISHED if row.agent == agent)
    assert (row.score.value, row.score.spread) == score
    assert (row.reward.value, row.reward.spread) == reward


def test_episodes_to_death_or_to_the_limit_are_as_long_as_published_ones():
    found = group("learning", episode(90), episode(10_000, died=False))
    assert found.comparable
    assert found.differences[0].startswith("episodes: every episode of learning")
    assert len(found.differences) == 2


def test_a_limit_of_ours_makes_figures_too_low():
    found = group("learning", episode(90), episode(200, died=False), episode(150, died=False))
    assert not found.comparable
    assert found.differences[0] == (
        "2 of 3 episodes here were cut short (longest: 200 env steps), and would have gone on to death or to "
        "10,000: figures here are too low"
    )


def test_an_environment_that_ends_early_by_itself_is_a_limit_too():
    # environment_done, but truncated: env_config.length was small
    short = episode(200, terminated=False, truncated=True)
    assert not group("played", short).comparable


def test_where_published_episodes_end_earlier_ours_are_too_long():
    found = group("balrog", episode(90), episode(2_001))
    assert not found.comparable
    assert "1 of 2 episodes here went on beyond 2,000 env steps" in found.differences[0]
    assert group("balrog", episode(90), episode(2_000, died=False)).comparable


def test_another_environment_is_beside_nothing():
    assert beside_published([episode(9, env_name="documents")], text="full") == ()
    assert beside_published([], text="full") == ()


@pytest.mark.parametrize(
    ("text", "here"),
    [
        ("compact", "here the compact text, which finds paths for the policy"),
        ("balrog", "here BALROG's text, as it is since August 2025"),
    ],
)
def test_what_the_policy_saw_is_said_beside_what_others_saw(text, here):
    found = group("balrog", episode(2_000, died=False), text=text)
    assert found.differences[-1].endswith(here)
