"""Idle sessions are forgotten; used ones are not. The clock is the test's."""

import pytest

from task_app.errors import CapacityReached, UnknownId
from task_app.sessions.registry import SessionLock, Sessions
from tests.task_app.counting import Clock


class Session:
    def __init__(self):
        self.lock = SessionLock()


def test_a_session_expires_after_its_idle_time_unless_it_is_used():
    clock = Clock()
    sessions = Sessions("env", capacity=9, idle_s=10.0, clock=clock)
    session, other = Session(), Session()
    used, idle = sessions.add(session), sessions.add(other)
    clock.now_s = 6.0
    assert sessions.get(used, where="env_id") is session
    clock.now_s = 10.0
    assert sessions.expire() == {}, "ten seconds are not yet too long"
    clock.now_s = 10.5
    assert sessions.expire() == {idle: other}
    assert sessions.get(used, where="env_id") is session
    with pytest.raises(UnknownId, match=idle):
        sessions.get(idle, where="env_id")


async def test_a_session_that_is_held_does_not_expire_and_is_idle_from_its_release_on():
    clock = Clock()
    sessions = Sessions("env", capacity=9, idle_s=10.0, clock=clock)
    session = Session()
    env_id = sessions.add(session)
    async with session.lock:
        clock.now_s = 30.0
        assert sessions.expire() == {}, "a session in use stays"
        clock.now_s = 35.0
    clock.now_s = 45.0
    assert sessions.expire() == {}, "ten seconds since its release are not yet too long"
    clock.now_s = 45.5
    assert sessions.expire() == {env_id: session}


def test_an_expired_session_makes_room():
    clock = Clock()
    sessions = Sessions("policy", capacity=1, idle_s=1.0, clock=clock)
    sessions.add(Session())
    with pytest.raises(CapacityReached, match="1 policy sessions"):
        sessions.add(Session())
    clock.now_s = 2.0
    sessions.expire()
    session = Session()
    second = sessions.add(session)
    assert sessions.find(second) is session
    assert sessions.remove(second, where="policy_id") is session
    assert sessions.find(second) is None
