"""Idle sessions are forgotten; used ones are not. The clock is the test's."""

import pytest

from task_app.errors import CapacityReached, UnknownId
from task_app.sessions import Sessions


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_a_session_expires_after_its_idle_time_unless_it_is_used():
    clock = Clock()
    sessions = Sessions("env", capacity=9, idle_s=10.0, clock=clock)
    used, idle = sessions.add("used"), sessions.add("idle")
    clock.now_s = 6.0
    assert sessions.get(used, where="env_id") == "used"
    clock.now_s = 10.0
    assert sessions.expire() == {}, "ten seconds are not yet too long"
    clock.now_s = 10.5
    assert sessions.expire() == {idle: "idle"}
    assert sessions.get(used, where="env_id") == "used"
    with pytest.raises(UnknownId, match=idle):
        sessions.get(idle, where="env_id")


def test_an_expired_session_makes_room():
    clock = Clock()
    sessions = Sessions("policy", capacity=1, idle_s=1.0, clock=clock)
    sessions.add("first")
    with pytest.raises(CapacityReached, match="1 policy sessions"):
        sessions.add("second")
    clock.now_s = 2.0
    sessions.expire()
    second = sessions.add("second")
    assert sessions.find(second) == "second"
    assert sessions.remove(second, where="policy_id") == "second"
    assert sessions.find(second) is None
