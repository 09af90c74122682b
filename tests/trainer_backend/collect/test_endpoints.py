import pytest
from pydantic import SecretStr

from tests.conftest import tiny_job
from trainer_backend.collect.endpoints import (
    endpoint,
    hosts_to_call,
    inference_host,
    key_from,
    sends_key_in_the_open,
)
from trainer_backend.collect.plan import Inference
from trainer_backend.errors import JobError
from trainer_backend.job.addresses import shown

KEY = "sk-very-secret-0123456789abcdef"
OPENAI = "https://api.openai.com/v1"


def test_a_key_goes_by_itself_only_to_the_host_that_it_is_for():
    environ = {"OPENAI_API_KEY": KEY, "THEIRS": "another"}
    assert endpoint("m", OPENAI, None, environ).key == SecretStr(KEY)
    assert endpoint("m", "http://api.openai.com", None, environ).key is None  # not encrypted
    assert endpoint("m", "https://api.openai.com.example/v1", None, environ).key is None
    assert endpoint("m", "http://127.0.0.1:8000", None, environ).key is None
    assert endpoint("m", "http://127.0.0.1:8000", "THEIRS", environ).key == SecretStr("another")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("m", None, None), "--model needs --inference-url"),
        ((None, OPENAI, None), "--inference-url needs --model"),
        ((None, None, "THEIRS"), "--api-key-env needs --model and --inference-url"),
        (("m", "ftp://h", None), "--inference-url is 'ftp://h', which is no http or https URL with a host"),
        (("m", "h:8000", None), "which is no http or https URL"),
        (("m", "http://h:99999", None), "which is no http or https URL"),
        # Another parser reads another host in it.
        (("m", "http://[::1]evil.example/v1", None), "which is no http or https URL with a host"),
        (("m", "http://[::1]evil.example:80/v1", None), "which is no http or https URL with a host"),
        (("m", OPENAI, None), "the environment variable OPENAI_API_KEY is not set, or empty"),
    ],
)
def test_flags_that_name_no_server_or_lack_its_key_are_told_before_anything_starts(flags, told):
    with pytest.raises(JobError, match=told):
        endpoint(*flags, {"OPENAI_API_KEY": " "})


@pytest.mark.parametrize("url", [f"http://me:{KEY}@h/v1", f"htp://me:{KEY}@h", f"http://h:x@{KEY}"])
def test_a_key_in_a_url_is_refused_and_not_repeated(url):
    with pytest.raises(JobError, match="a key belongs in the environment") as caught:
        endpoint("m", url, None, {})
    assert KEY not in str(caught.value)


def test_a_key_given_for_a_variables_name_is_refused_and_not_repeated():
    with pytest.raises(JobError, match="--api-key-env takes the name of") as caught:
        key_from(KEY, where="--api-key-env", environ={})
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("value", ["two\nlines", "ключ", "x" * 501])
def test_what_is_no_key_is_refused_and_not_repeated(value):
    with pytest.raises(JobError, match="THEIRS holds no key") as caught:
        key_from("THEIRS", where="--api-key-env", environ={"THEIRS": value})
    assert value not in str(caught.value)


def test_the_host_is_told_with_its_port():
    urls = ("http://h", "https://h/v1", "http://[::1]:8000/v1", OPENAI)
    assert [inference_host(url, where="url") for url in urls] == [
        "h:80", "h:443", "[::1]:8000", "api.openai.com:443"
    ]  # fmt: skip


def test_a_task_app_of_the_jobs_own_may_call_what_the_user_has_named():
    job = tiny_job(warmup__policy_config={"inference_url": "https://teacher/v1", "model": "m"})
    assert hosts_to_call(tiny_job().warmup) == []
    assert hosts_to_call(job.warmup, Inference("http://h:1", "m", None)) == ["h:1", "teacher:443"]
    with pytest.raises(JobError, match=r"warmup.policy_config.inference_url is 'teacher'"):
        hosts_to_call(tiny_job(warmup__policy_config={"inference_url": "teacher"}).warmup)


def test_a_query_is_not_shown_and_an_open_way_is_known():
    assert shown("https://h/v1?api-key=secret") == "https://h/v1"
    assert sends_key_in_the_open("http://10.0.0.7/v1", has_key=True)
    assert not sends_key_in_the_open("http://10.0.0.7/v1", has_key=False)
    for url in ("https://10.0.0.7/v1", "http://127.0.0.1/v1", "http://localhost/v1"):
        assert not sends_key_in_the_open(url, has_key=True)
