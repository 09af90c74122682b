"""inference_url: every known spelling, and nothing that the operator did not allow."""

import pytest

from task_app.errors import HostNotAllowed, InvalidRequest
from task_app.policies.openai_config import chat_completions_url

HERE = ("127.0.0.1", "localhost", "::1")


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("http://127.0.0.1:1", "http://127.0.0.1:1/v1/chat/completions"),
        ("http://127.0.0.1:1/", "http://127.0.0.1:1/v1/chat/completions"),
        ("http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1/chat/completions"),
        ("http://127.0.0.1:1/v1/", "http://127.0.0.1:1/v1/chat/completions"),
        ("http://127.0.0.1:1/v1/chat", "http://127.0.0.1:1/v1/chat/completions"),
        ("http://127.0.0.1:1/v1/chat/completions", "http://127.0.0.1:1/v1/chat/completions"),
        ("http://127.0.0.1:1/x?cid=7&a=b", "http://127.0.0.1:1/x/v1/chat/completions?cid=7&a=b"),
        ("https://LOCALHOST/v1#part", "https://LOCALHOST/v1/chat/completions"),
        ("http://[::1]:9", "http://[::1]:9/v1/chat/completions"),
    ],
)
def test_a_base_url_is_completed_and_its_query_kept(given, full):
    assert chat_completions_url(given, allowed_hosts=HERE) == full


@pytest.mark.parametrize(
    "given",
    [
        "http://169.254.169.254/latest",
        "http://127.0.0.1.evil.example/",
        "http://localhost.evil.example",
        "http://evil.example/?h=localhost",
        "http://evil.example#localhost",
        "http://0.0.0.0:1",
        # Other spellings of loopback: an operator who lists none of them allows none of them.
        "http://2130706433/",
        "http://0x7f000001/",
        "http://017700000001/",
        "http://127.1/",
        "http://[::ffff:127.0.0.1]/",
        "http://[0:0:0:0:0:0:0:1]/",
        "http://[::1%25eth0]/",
        "http://localhost./",
        "http://①27.0.0.1/",
        # What another parser might take for a listed host.
        "http://127.0.0.1\t.evil.example",
        "http://127.0.0.1\\.evil.example",
        "http://127.0.0.1%2eevil.example",
        "http://evil.example#@127.0.0.1",
        "http://evil.example?@127.0.0.1",
    ],
)
def test_a_host_that_is_not_listed_is_refused(given):
    with pytest.raises(HostNotAllowed, match="not on this task app's list"):
        chat_completions_url(given, allowed_hosts=HERE)


@pytest.mark.parametrize(
    "given",
    ["", "localhost:1", "ftp://localhost", "file:///etc/passwd", "http://", "http://localhost:x", "http://[::1",
     "http://localhost:0", " http://localhost", "http://user:secret@localhost", "http://[::1]evil.example/",
     "http://127.0.0.1\\@evil.example", "http:127.0.0.1", "http://127.0.0.1:65536"],
)  # fmt: skip
def test_what_is_no_url_is_refused_without_repeating_it(given):
    with pytest.raises(InvalidRequest) as caught:
        chat_completions_url(given, allowed_hosts=HERE)
    assert "secret" not in caught.value.detail


def test_the_operator_may_name_a_port():
    allowed = ("gpu-7:8000",)
    assert chat_completions_url("http://gpu-7:8000", allowed_hosts=allowed).startswith("http://gpu-7:8000/")
    with pytest.raises(HostNotAllowed):
        chat_completions_url("http://gpu-7:8001", allowed_hosts=allowed)
