"""What a posted job may name, and what it may not: nothing of the operator's that it was not given. Which
line a message is about."""

from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from service_kit.settings import read_settings
from trainer_backend.errors import JobError
from trainer_backend.job.load import dump_job, load_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.job.tables import TASK_APP_SETTINGS
from trainer_backend.jobs.posted import check, find_line, list_lines, list_paths, parse_document, validate_job
from trainer_backend.jobs.settings import Bounds, Settings

MODEL: dict[str, Any] = {"model": {"preset": "tiny-0.3m"}}


@pytest.fixture
def bounds(tmp_path: Path) -> Bounds:
    (tmp_path / "runs").mkdir()
    (tmp_path / "configs").mkdir()
    return Bounds(data_dir=tmp_path / "runs", roots=(tmp_path / "configs",))


def posted(bounds: Bounds, **tables: Any):
    return validate_job({**MODEL, **tables}, bounds)


def refused(bounds: Bounds, **tables: Any) -> str:
    with pytest.raises(JobError) as error:
        posted(bounds, **tables)
    return str(error.value)


def test_a_job_that_names_nothing_gets_the_operators_addresses_and_folder(bounds):
    given = Bounds(
        data_dir=bounds.data_dir,
        default_urls=("dns+http://task-app:8001",),
        task_urls=frozenset({"dns+http://task-app:8001"}),
        gateway_host="trainer",
    )
    config = posted(given)[0].config
    assert config.services.task_url == ("dns+http://task-app:8001",)
    assert config.services.gateway_host == "trainer"
    assert config.job.runs_dir == bounds.data_dir


@pytest.mark.parametrize("url", ["", "dns+http://task-app:8001"], ids=["alone", "Compose"])
def test_every_job_of_configs_can_be_posted(tmp_path, url):
    bounds = read_settings(Settings, {"TASK_URL": url}, data_dir=tmp_path).bounds
    refused = {}
    for path in sorted(Path("configs").glob("*.toml")):
        try:
            found = validate_job(parse_document(path.read_text()), bounds)[0].config
        except JobError as error:
            refused[path.name] = str(error)
            continue
        own = load_job(path).config
        assert (found.model, found.data, found.multi_turn) == (own.model, own.data, own.multi_turn)
        # One with keys of task apps that it starts itself does so, whatever the service has.
        of_its_own = own.services.task_apps > 1 or own.multi_turn.interaction_config_path is not None
        assert found.services.task_url == (() if of_its_own or not url else (url,)), path
    # They name a model that has to be trained or fetched first; docs/operations.md says so.
    page = Path("docs/operations.md").read_text()
    assert refused.keys() == {"crafter_mixture.toml", "crafter_online.toml", "qwen35_lora.toml"}
    assert all(name in page and "outside of what posted jobs may read" in refused[name] for name in refused)


def test_a_relative_path_is_one_from_the_root_that_has_it(bounds):
    root = files(bounds)["root"]
    data = posted(bounds, data={"path": "file", "evaluation_split": "test"})[0].config.data
    assert data is not None and data.path == root / "file"
    assert "outside" in refused(bounds, data={"path": "../outside/file", "evaluation_split": "test"})


def files(bounds: Bounds) -> dict[str, Path]:
    """A model folder, or a file, of each kind: in a root, in the data directory, and outside."""
    found = {"root": bounds.roots[0], "data": bounds.data_dir, "outside": bounds.data_dir.parent / "outside"}
    for folder in found.values():
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text("{}")
        (folder / "file").write_text("")
    return found


def naming(key: str, path: Path) -> dict[str, Any]:
    model = path.parent / "model"
    return {
        "model.path": {"model": {"path": str(model)}},
        "data.path": {"data": {"path": str(path), "evaluation_split": "test"}},
        "data.evaluation_path": {"data": {"path": str(path), "evaluation_path": str(path)}},
        "services.task_plugins": {"services": {"task_plugins": [str(path)]}},
        "multi_turn.interaction_config_path": {
            "multi_turn": {"enable": True, "interaction_config_path": str(path)}
        },
    }.get(key, {})


CODE = ("services.task_plugins", "multi_turn.interaction_config_path")
PATHS = ("model.path", "data.path", "data.evaluation_path", *CODE)


def path_keys(model: type[BaseModel], inside: str = "") -> set[str]:
    """Every key of the schema whose type holds a Path."""
    found = set()
    for name, field in model.model_fields.items():
        parts = [field.annotation, *get_args(field.annotation)]
        parts += [inner for part in parts for inner in get_args(part)]
        tables = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        found |= {f"{inside}{name}"} if Path in parts else set()
        for table in tables:
            found |= path_keys(table, f"{inside}{name}.")
    return found


def test_every_path_of_the_schema_is_judged():
    known = path_keys(JobConfig) - {"job.runs_dir"}
    assert known >= set(PATHS)
    assert {key.count(".") for key in known} == {1}, "list_paths looks into tables, not below"


@pytest.mark.parametrize("key", PATHS)
def test_a_file_of_a_root_may_be_named_one_that_a_run_wrote_is_not_code_and_no_other_may_be(bounds, key):
    folders = files(bounds)
    assert dict(list_paths(posted(bounds, **naming(key, folders["root"] / "file"))[0].config))
    outside = f"{key} names a file outside of what posted jobs may read"
    assert outside in refused(bounds, **naming(key, folders["outside"] / "file"))
    of_a_run = naming(key, folders["data"] / "file")
    if key in CODE:
        assert outside in refused(bounds, **of_a_run)
    else:
        posted(bounds, **of_a_run)


@pytest.mark.parametrize("key", TASK_APP_SETTINGS)
def test_no_posted_job_says_what_its_task_app_imports_starts_or_reaches(bounds, key):
    file = str(files(bounds)["root"] / "file")
    is_path = key.endswith("_python") or key == "mcp_servers"
    told = refused(bounds, services={key: file if is_path else ["antigravity"]})
    assert f"services.{key} is for jobs of `turnwise train`" in told


def test_code_in_the_data_directory_is_not_run_even_where_a_root_holds_that(bounds):
    wide = Bounds(data_dir=bounds.data_dir, roots=(bounds.data_dir.parent,))
    tables = naming("services.task_plugins", files(bounds)["data"] / "file")
    assert "services.task_plugins names a file outside" in refused(wide, **tables)


@pytest.mark.parametrize("way", ["{root}/../outside/file", "{root}/link/file", "{root}/../configs2/file"])
def test_no_way_leads_out_of_a_root(bounds, way):
    root = files(bounds)["root"]
    (root / "link").symlink_to(root.parent / "outside")
    (root.parent / "configs2").mkdir()
    path = Path(way.format(root=root))
    assert "data.path names a file outside" in refused(
        bounds, data={"path": str(path), "evaluation_split": "x"}
    )


def test_no_link_inside_of_a_folder_leads_out_of_a_root(bounds):
    folders = files(bounds)
    root = folders["root"]
    link = root / "set" / "data" / "train"
    (root / "set" / "data").mkdir(parents=True)
    tables = {"data": {"path": str(root / "set"), "evaluation_split": "test"}}
    link.symlink_to(root / "file")
    posted(bounds, **tables)
    link.unlink()
    link.symlink_to(folders["outside"] / "file")
    assert "data.path holds a link, 'train', that leads outside" in refused(bounds, **tables)
    link.unlink()
    (root / "model" / "vocab.json").symlink_to("/etc/passwd")
    assert "model.path holds a link, 'vocab.json'" in refused(bounds, model={"path": str(root / "model")})


def test_whether_a_foreign_file_is_there_is_not_told(bounds):
    outside = bounds.data_dir.parent / "outside"
    gone = refused(bounds, model={"path": str(outside / "gone")})
    files(bounds)
    there = refused(bounds, model={"path": str(outside / "model")})
    assert gone == there


# The operator's key is sent to the process that listens there, on this machine too.
@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8001", "http://[::1]:8001", "http://task-app:8001", "dns+http://task-app:8001"]
)
def test_a_task_app_may_be_named_only_if_the_operator_allowed_it(bounds, url):
    told = refused(bounds, services={"task_url": url})
    assert "that the service's key may not be sent to (TASK_URL or --allow-task-url: none)" in told
    allowed = Bounds(data_dir=bounds.data_dir, task_urls=frozenset({url}))
    posted(allowed, services={"task_url": f"{url}/" if "dns" not in url else url})


@pytest.mark.parametrize(
    ("address", "tables"),
    [
        ("http://node:9000", {"cluster": {"launcher": "external"}, "learner": {"url": "http://node:9000"}}),
        ("head:6379", {"cluster": {"launcher": "ray", "ray_address": "head:6379"}}),
        ("auto", {"cluster": {"launcher": "ray"}}),
    ],
)
def test_a_posted_job_starts_processes_elsewhere_only_where_the_operator_allowed_it(bounds, address, tables):
    told = refused(bounds, **tables)
    assert f"is {address!r}, where posted jobs may start nothing (--allow-cluster: none)" in told
    posted(Bounds(data_dir=bounds.data_dir, clusters=frozenset({address})), **tables)


def test_a_model_of_the_hub_may_be_named_only_if_the_operator_allowed_it(bounds):
    named = {"name": "org/model"}
    assert "may not have fetched (--allow-model: none)" in refused(bounds, model=named)
    for pattern in ("org/model", "org/*", "*"):
        posted(Bounds(data_dir=bounds.data_dir, models=("some/other", pattern)), model=named)
    for pattern in ("ORG/*", "org/mod", "other/*"):
        others = Bounds(data_dir=bounds.data_dir, models=("some/other", pattern))
        assert f"(--allow-model: some/other, {pattern})" in refused(others, model=named)


def test_a_variable_is_read_and_a_server_asked_only_if_the_operator_allowed_it(bounds):
    warmup = {"policy_config": {"inference_url": "http://LLM:8000/v1"}, "api_key_env": "LLM_KEY"}
    told = refused(bounds, warmup=warmup)
    assert "warmup.api_key_env names a variable" in told and "LLM_KEY" not in told
    for host, is_asked in (("llm", True), ("llm:8000", True), ("llm:80", False), ("other", False)):
        hosts, keys = frozenset({host}), frozenset({"LLM_KEY"})
        given = Bounds(data_dir=bounds.data_dir, key_variables=keys, inference_hosts=hosts)
        if is_asked:
            posted(given, warmup=warmup)
        else:
            assert "names a server that posted jobs may not ask" in refused(given, warmup=warmup)


def test_a_fixed_policy_s_server_key_and_folder_are_bounded_as_all_others_are(bounds, tmp_path):
    schedule = {"type": "constant", "alpha": 0.5}
    server = {"inference_url": "http://llm:8000/v1", "model": "m", "api_key_env": "LLM_KEY"}
    named = {"name": "org/model"}
    told = refused(bounds, model=named, rollout_only=[server], rollout_allocation_schedule=schedule)
    assert "rollout_only.api_key_env names a variable" in told and "LLM_KEY" not in told
    assert "names a server that posted jobs may not ask" in told
    replica = {"engine": "vllm", "urls": ["http://llm:8000"]}
    for table in (replica, {"engine": "vllm", "vllm_python": "/bin/sh"}):
        told = refused(bounds, model=named, inference=table)
        assert "a posted job may start and control no vLLM server" in told
    folder = {"model_path": str(tmp_path.parent)}
    told = refused(bounds, rollout_only=folder, rollout_allocation_schedule=schedule)
    assert "rollout_only.model_path names a file outside of what posted jobs may read" in told


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        (
            {"services": {"task_api_key": "s3cret-key"}},
            "services.task_api_key is a key, and a posted job may",
        ),
        ({"job": {"runs_dir": "/tmp/elsewhere"}}, "job.runs_dir is the service's own to choose"),
        ({"services": {"gateway_host": "10.0.0.9"}}, "services.gateway_host is the service's own"),
        ({"sinks": {"wandb": {"project": "theirs"}}}, "sinks.wandb would use the service's account"),
        (
            {"sinks": {"trackio": {"project": "x", "space_id": "me/x"}}},
            "space_id would use the service's acc",
        ),
        ({"services": {"gateways": 9}, "cluster": {}}, "services.gateways is 9; a posted job may have 8"),
        ({"learner": {"nproc_per_node": 9}, "cluster": {}}, "learner.nproc_per_node is 9; a posted job may"),
        ({"services": "x"}, "services is 'x', but it is a table"),
        ({"tags": {"a": ["list"]}}, "tags.a is no text"),
        ({"tags": {str(i): "x" for i in range(33)}}, "[tags] holds 33 tags; at most 32"),
    ],
)
def test_what_is_the_operators_to_decide_is_refused_and_no_error_repeats_a_key(bounds, tables, told):
    error = refused(bounds, **tables)
    assert told in error and "s3cret" not in error


def test_all_that_is_wrong_is_told_at_once(bounds):
    told = refused(
        bounds,
        job={"runs_dir": "/tmp/elsewhere"},
        services={"task_url": "http://far:1", "gateway_host": "10.0.0.9"},
    )
    assert len(told.splitlines()) == 3


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def test_tables_in_one_another_may_be_32_deep(bounds):
    found = posted(bounds, rollout={"env_config": nested(31)})[0].config  # and [rollout] around it
    assert found.rollout.env_config == nested(31)
    assert parse_document(dump_job(found))["rollout"]["env_config"] == nested(31)
    for depth in (32, 5_000):
        told = refused(bounds, rollout={"env_config": nested(depth)})
        assert told == "the posted job: rollout holds tables or lists in one another, more than 32 deep"


@pytest.mark.parametrize("number", ["9223372036854775808", "-9223372036854775809", "0x" + "f" * 5_000])
def test_a_number_that_toml_has_not_is_refused(bounds, number):
    with pytest.raises(JobError, match="rollout holds a whole number of more than 64 bits"):
        validate_job(parse_document(f"[rollout]\nenv_config = {{seed = {number}}}"), bounds)


def test_tags_come_from_the_table_and_from_the_post(bounds):
    found = validate_job({**MODEL, "tags": {"team": "a", "n": 3}}, bounds, {"team": "b", "ok": True})
    assert dict(found[1]) == {"team": "b", "n": "3", "ok": "true"}
    assert found[0].warnings == ()


TEXT = """\
# a job
[model]
preset = "tiny-0.3m"

[training]
iterations = 3
"group_size" = 4
rewards.step_rewards_mode = "off"  # deep

[ rollout . env_config ]
length = 100
[[more]]
x = 1
[sinks]
wandb = { project = "p" }
[long]
list = [  # [fake]
  ["]"],
  2,
] # end
text = '''
last = 1
'''
last = 2
"""


def test_keys_and_tables_stand_on_their_lines():
    assert list_lines(TEXT) == {
        "model": 2, "model.preset": 3, "training": 5, "training.iterations": 6, "training.group_size": 7,
        "training.rewards": 8, "training.rewards.step_rewards_mode": 8, "rollout": 10,
        "rollout.env_config": 10, "rollout.env_config.length": 11, "more": 12, "more.x": 13, "sinks": 14,
        "sinks.wandb": 15, "sinks.wandb.project": 15, "long": 16, "long.list": 17, "long.text": 21,
        "long.last": 24,
    }  # fmt: skip


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters='"\\.', exclude_categories=["Cc"]), min_size=1
)
VALUES = st.integers(-9, 9) | st.booleans() | st.text() | st.lists(st.text() | st.dates(), max_size=3)


@given(st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, VALUES, max_size=3), max_size=4), st.booleans())
def test_whatever_stands_in_values_the_keys_of_a_text_are_those_that_a_parser_has(document, multiline):
    text = tomli_w.dumps(document, multiline_strings=multiline)
    names = {name for name, value in document.items()}
    names |= {f"{name}.{key}" for name, value in document.items() if isinstance(value, dict) for key in value}
    lines, rows = list_lines(text), text.split("\n")
    assert lines.keys() == names
    for name, line in lines.items():
        row = rows[line - 1].strip("[").replace('"', "")
        assert row.startswith((name, name.partition(".")[2])), (name, line)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("training.iterations is 'x': not a number", 6),
        ("sinks.wandb.entity is not a key", 15),
        ("sinks.wandb.project is 'p'", 15),
        ("training.nothing is not a key; known: iterations", 5),
        ("data.path names a file outside", None),
        ("model: exactly one of 'preset', 'path' and 'name' must be given", 2),
    ],
)
def test_a_message_is_about_the_first_key_in_it_that_is_there(message, line):
    assert find_line(message, list_lines(TEXT)) == line


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[model]\npreset = "tiny-0.3m"\n', []),
        ("[model]\npreset = \n", [("error", 2, "not valid TOML")]),
        ('[model]\npreset = """\n\n', [("error", 3, "Unterminated string (at end of document)")]),
        ('[model]\npreset = "tiny-0.3"\n', [("error", 2, "model.preset")]),
        (
            '[model]\npreset = "tiny-0.3m"\n[training]\nitrations = 3\ngroup_sise = 2\n',
            [("error", 4, "Did you mean 'iterations'?"), ("error", 5, "Did you mean 'group_size'?")],
        ),
        ('[model]\npreset = "tiny-0.3m"\n[vllm]\nx = 1\n', [("warning", 3, "[vllm] is for other backends")]),
        (
            '[model]\npreset = "tiny-0.3m"\n[services]\ntask_url = "http://far:1"\n',
            [("error", 4, "--allow-task-url")],
        ),
        ("", [("error", None, "model is required")]),
    ],
)
def test_findings_of_a_job_with_their_lines(tmp_path, text, found):
    told = check(text.encode(), Bounds(data_dir=tmp_path))
    assert told.ok == all(severity == "warning" for severity, _, _ in found)
    assert [(one.severity, one.line) for one in told.findings] == [item[:2] for item in found]
    for one, (_, _, part) in zip(told.findings, found, strict=True):
        assert part in one.text
