from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_backend.core.test_segments import step
from trainer_backend.core.emission_views import EmissionView, assistant_turn_boundaries, emission_views
from trainer_backend.core.segments import build_segments


def test_every_answer_has_the_ids_that_it_was_sampled_from():
    # 1 2 | 3 4 and 5 | 6 continue each other; a delete keeps 1 2, and 9 | 8 follows
    steps = [step(1, 0, [1, 2], [3, 4]), step(2, 4, [5], [6]), step(3, 2, [9], [8])]
    assert emission_views(build_segments(steps, rollout_id="r")) == [
        EmissionView(1, 0, (1, 2), (3, 4), 2, 4),
        EmissionView(2, 0, (1, 2, 3, 4, 5), (6,), 5, 6),
        EmissionView(3, 1, (1, 2, 9), (8,), 3, 4),
    ]


def test_answers_that_follow_without_a_token_between_them_stay_two():
    [segment] = build_segments([step(1, 0, [1], [2]), step(2, 2, [], [3])], rollout_id="r")
    assert list(assistant_turn_boundaries(segment)) == [(0, 1, 2), (1, 2, 3)]


def test_a_decision_that_sampled_nothing_has_no_view():
    views = emission_views(build_segments([step(1, 0, [1], []), step(2, 1, [2], [3])], rollout_id="r"))
    assert [view.turn for view in views] == [2]


@st.composite
def conversations(draw):
    ids, steps = [], []
    for turn in range(1, draw(st.integers(1, 6)) + 1):
        reused = draw(st.integers(0, len(ids)))
        prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        response = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        ids = [*ids[:reused], *prompt, *response]
        steps.append((step(turn, reused, prompt, response), ids))
    return steps


@given(conversations())
def test_prompt_and_answer_are_what_the_engine_saw_and_the_mask_is_the_answers(played):
    segments = build_segments([taken for taken, _ in played], rollout_id="r")
    views = emission_views(segments)
    assert [[*view.prompt_ids, *view.answer_ids] for view in views] == [ids for _, ids in played]
    for number, segment in enumerate(segments):
        trained = [i for view in views if view.segment == number for i in range(view.start, view.end)]
        assert trained == segment.sampled_positions.tolist()
