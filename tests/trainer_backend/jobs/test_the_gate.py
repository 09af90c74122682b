"""Who comes in: with the key, with a session, from this machine; and who does not."""

from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from pydantic import SecretStr

from shared_schemas.problem import PROBLEM_MEDIA_TYPE, Problem
from tests.trainer_backend.jobs.served import serving, settings_for
from trainer_backend.jobs.login import own_path
from trainer_backend.jobs.sessions import COOKIE, SESSION_S, LoginSessions

KEY = "the-key-of-these-tests"
OTHER = "http://evil.example"


@asynccontextmanager
async def with_key(tmp_path: Path):
    async with serving(settings_for(tmp_path, environ={"TRAINER_API_KEY": KEY})) as served:
        yield served.client


def refused(answer: httpx.Response, status: int, code: str) -> bool:
    problem = Problem.model_validate_json(answer.content)
    assert KEY not in answer.text
    assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
    return (answer.status_code, problem.status, problem.code) == (status, status, code)


async def test_nothing_else_opens_even_paths_that_are_not_there_and_the_health_needs_no_key(tmp_path):
    cookies = (f"{COOKIE}=9999999999.{'0' * 64}", f"{COOKIE}={KEY}", f"{COOKIE}=", "\x01=;;")
    async with with_key(tmp_path) as client:
        for headers in ({"Authorization": f"Basic {KEY}"}, *({"Cookie": cookie} for cookie in cookies)):
            for path in ("/jobs", "/nowhere", "/openapi.json", "/runs/x"):
                answer = await client.get(path, headers=headers)
                assert refused(answer, 401, "unauthorised")
                assert answer.headers["www-authenticate"] == "Bearer"
        answer = await client.get("/health")
    assert answer.json() == {"status": "ok", "service": "turnwise-trainer", "store": "up"}


async def test_a_person_is_sent_to_the_log_in_page_and_back_and_has_a_session_for_our_own_pages(tmp_path):
    async with with_key(tmp_path) as client:
        answer = await client.get("/runs/x?with=y&z=1", headers={"Accept": "text/html,*/*"})
        assert answer.status_code == 303
        page = await client.get(answer.headers["location"])
        assert page.status_code == 200 and 'value="/runs/x?with=y' in page.text
        wrong = await client.post("/login", data={"key": KEY + "x", "next": "/jobs"})
        assert wrong.status_code == 401 and "set-cookie" not in wrong.headers and KEY not in wrong.text
        right = await client.post("/login", data={"key": KEY, "next": "/jobs"})
        assert (right.status_code, right.headers["location"]) == (303, "/jobs")
        cookie = right.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=lax" in cookie and KEY not in cookie
        assert (await client.get("/jobs")).status_code == 200, "the client keeps the session"
        assert refused(await client.post("/jobs", headers={"Origin": OTHER}), 403, "forbidden")
        # A program with the key may come from anywhere.
        headers = {"X-API-Key": KEY, "Origin": OTHER, "Host": "trainer.internal"}
        assert (await client.get("/jobs", headers=headers)).status_code == 200


async def test_wrong_keys_from_an_address_never_lock_the_right_one_out(tmp_path):
    async with with_key(tmp_path) as client:
        wrong = [await client.post("/login", data={"key": f"guess {n}"}) for n in range(12)]
        assert [answer.status_code for answer in wrong] == [401] * 10 + [429] * 2
        assert 0 < int(wrong[-1].headers["retry-after"]) <= 60 and "set-cookie" not in wrong[-1].headers
        asked = [await client.get("/jobs", headers={"X-API-Key": f"guess {n}"}) for n in range(50)]
        assert {answer.status_code for answer in asked} == {401}
        assert (await client.get("/jobs", headers={"X-API-Key": KEY})).status_code == 200
        right = await client.post("/login", data={"key": KEY})
        assert right.status_code == 303 and "set-cookie" in right.headers


def test_the_log_in_page_leads_back_to_any_page_of_its_own_and_to_no_other_host():
    others = ("//evil.example", "/\\evil.example", "http://evil.example", "", "jobs", "/\t/x")
    assert [own_path(path) for path in others] == ["/"] * len(others)
    assert own_path("/runs/x?with=y#z") == "/runs/x?with=y#z"


async def test_the_page_of_another_site_can_do_nothing(served):
    for headers in (
        {"Origin": OTHER},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:8101"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:9000"},
    ):
        for path in ("/jobs", "/jobs/x/cancel", "/rl/jobs"):
            answer = await served.client.post(path, headers={**headers, "Content-Type": "text/plain"})
            assert refused(answer, 403, "forbidden")


HOSTS = [
    "evil.example", "127.0.0.1.nip.io:8100", "10.0.0.1", "", "[::2]", "a:b:c", "[::1]evil", "[::1]evil:8100",
    "[::1].evil.example", "x@127.0.0.1", "127.0.0.1:80:80", "localhost:evil", "127.0.0.1/",
]  # fmt: skip


async def test_without_a_key_a_name_that_is_not_this_machines_is_refused(served):
    for host in HOSTS:
        # its owner may have pointed it at 127.0.0.1, and a page from there would count as ours
        answer = await served.client.get("/jobs", headers={"Host": host})
        assert refused(answer, 403, "forbidden"), host


async def test_all_other_refusals_have_the_same_shape(served):
    large = await served.client.post("/jobs", content="x" * ((1 << 20) + 1))
    assert refused(large, 413, "body_too_large") and large.headers["connection"] == "close"
    assert refused(await served.client.get("/nowhere"), 404, "not_found")
    assert refused(await served.client.put("/jobs"), 405, "method_not_allowed")
    assert refused(await served.client.get("/jobs?stat=queued"), 422, "request_invalid")


def headers(cookie: str) -> list[tuple[bytes, bytes]]:
    return [(b"cookie", f"a=b; {COOKIE}={cookie}".encode("latin-1"))]


def test_a_session_ends_after_a_week_and_with_its_key():
    now_s = [1_000_000.0]
    sessions = LoginSessions(SecretStr(KEY), clock=lambda: now_s[0])
    mine = headers(sessions.cookie())
    assert sessions.match(mine)
    assert not LoginSessions(SecretStr("another"), clock=lambda: now_s[0]).match(mine)
    assert not LoginSessions(None).match(mine)
    now_s[0] += SESSION_S
    assert sessions.match(mine)
    now_s[0] += 1
    assert not sessions.match(mine)


def test_a_changed_cookie_is_none():
    sessions = LoginSessions(SecretStr(KEY), clock=lambda: 1_000_000.0)
    cookie = sessions.cookie()
    later = LoginSessions(SecretStr(KEY), clock=lambda: 1_000_001.0).cookie()
    assert later != cookie
    content, _, rest = cookie.partition(".")
    moved = ".".join([*cookie.split(".")[:2], later.split(".")[2]])  # the signature of another time
    for other in (moved, f"other.{rest}", cookie[:-1], f"{cookie}.", content, "", "..", "\xff.\xff.\xff"):
        assert not sessions.match(headers(other)), other
