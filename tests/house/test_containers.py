"""The containers, as far as they can be held without a Docker engine: files, scripts, keys, health."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from fastapi.testclient import TestClient

from service_kit.server import Listener, ServerThread
from service_kit.settings import read_settings
from task_app.app import create_app
from task_app.settings import Settings
from tests.house.sources import PACKAGES, ROOT
from trainer_backend.inference.keys import CONTRACT
from trainer_backend.job.load import load_job
from trainer_backend.jobs.settings import Settings as TrainerSettings
from trainer_backend.processes.vllm_servers import arguments

COMPOSE_TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE = yaml.safe_load(COMPOSE_TEXT)
GPU = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES = COMPOSE["services"]


def printed_by(script: str, folder: Path, **environment: str) -> tuple[dict[str, str], list[str]]:
    """The environment that a script gives to a `turnwise` that only prints it, and its arguments."""
    folder.joinpath("turnwise").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done; echo; env\n')
    folder.joinpath("turnwise").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        ["sh", str(ROOT / "docker" / script)],
        cwd=folder, env={"PATH": path, **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words, _, given = run.stdout.partition("\n\n")
    return dict(line.split("=", 1) for line in given.splitlines()), words.splitlines()


def key_made(folder: Path) -> dict[str, str]:
    """What make-keys.sh leaves in the three volumes of a first start."""
    for name in ("task-app", "trainer", "database"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "python").write_text('#!/bin/sh\nexec python3 "$@"\n')
    (folder / "python").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    script = ["sh", str(ROOT / "docker" / "make-keys.sh")]
    subprocess.run(script, env={"KEYS": str(folder), "PATH": path}, check=True)
    return {file.parent.name: file.read_text().strip() for file in folder.glob("*/key")}


def test_the_first_start_makes_three_keys_and_the_second_keeps_them(tmp_path):
    made = key_made(tmp_path)
    assert made.keys() == {"task-app", "trainer", "database"}
    assert len(set(made.values())) == 3
    assert all(re.fullmatch(r"[\w-]{43}", key) for key in made.values())  # 32 random bytes in base64
    assert key_made(tmp_path) == made
    for name in ("task-app", "trainer"):
        assert (tmp_path / name / "key").stat().st_mode & 0o077 == 0
    assert (tmp_path / "database" / "key").stat().st_mode & 0o044, "PostgreSQL is another user"


def test_each_volume_of_a_key_is_mounted_by_those_who_read_it_alone():
    readers = {
        name: {
            volume.partition(":")[0]
            for volume in service.get("volumes", ())
            if volume.partition(":")[0].endswith("-key")
        }
        for name, service in SERVICES.items()
        if name != "keys"
    }
    assert readers == {
        "task-app": {"task-app-key"},
        "database": {"database-key"},
        "trainer-backend": {"task-app-key", "trainer-key", "database-key"},
        "demo": {"trainer-key"},
    }
    for name in readers:
        mounted = [volume for volume in SERVICES[name]["volumes"] if "-key:" in volume]
        assert all(volume.endswith(":ro") for volume in mounted), name


def test_no_key_and_no_password_has_a_default():
    written = [*SERVICES.values(), *GPU["services"].values()]
    given = [item for service in written for item in service.get("environment", {}).items()]
    for name, value in given:
        if re.search("KEY|PASSWORD", name) and name != "KEY_COMMAND":
            assert name.endswith("_FILE"), name
            assert value.startswith("/keys/"), name


def test_the_trainer_is_started_with_its_database_and_the_flags_that_it_knows(tmp_path):
    (tmp_path / "password").write_text("p-w_1\n")
    given = {
        name: value
        for name, value in SERVICES["trainer-backend"]["environment"].items()
        if name.startswith(("DATABASE_H", "GATEWAY", "TASK_URL"))
    }
    passwords = tmp_path / "pgpass"
    given |= {
        "DATABASE_PASSWORD_FILE": str(tmp_path / "password"), "MAX_JOBS": "2", "PGPASSFILE": str(passwords)
    }  # fmt: skip
    environment, words = printed_by("trainer.sh", tmp_path, **given)
    assert environment["TURNWISE_DATABASE_URL"] == "postgresql://turnwise@database/turnwise"
    assert "p-w_1" not in str(environment), "who may look at processes would read it"
    assert (passwords.read_text(), passwords.stat().st_mode & 0o777) == ("*:*:*:*:p-w_1\n", 0o600)
    assert words[0] == "trainer"
    flags = dict(zip(words[1::2], words[2::2], strict=True))
    assert flags == {
        "--host": "0.0.0.0",
        "--port": "8100",
        "--data-dir": "runs",
        "--allow-root": "configs",
        "--max-jobs": "2",
    }
    _, words = printed_by("trainer.sh", tmp_path, ALLOW_MODEL="Qwen/*", ALLOW_CLUSTER="http://l:9", **given)
    assert words[-4:] == ["--allow-model", "Qwen/*", "--allow-cluster", "http://l:9"]
    key = {"TRAINER_API_KEY": "a-key", "TASK_URL": given["TASK_URL"]}
    settings = read_settings(TrainerSettings, key, host=flags["--host"], gateway_host=given["GATEWAY_HOST"])
    assert settings.default_urls == ("dns+http://task-app:8001",)


def test_the_demo_is_posted_once_as_long_as_its_job_is_the_same(tmp_path):
    (tmp_path / "configs").mkdir()
    job = tmp_path / "configs/crafter_cpu.toml"
    job.write_bytes((ROOT / "configs/crafter_cpu.toml").read_bytes())
    posted = [printed_by("demo.sh", tmp_path, TRAINER_API_KEY_FILE="/keys/key") for _ in range(2)]
    assert posted[0][1] == posted[1][1]
    environment, words = posted[0]
    assert "TRAINER_API_KEY" not in environment, "the command reads the file by itself"
    assert words[:4] == ["jobs", "submit", "configs/crafter_cpu.toml", "--idempotency-key"]
    load_job(tmp_path / words[2])
    job.write_text(job.read_text() + "\n# mine\n")
    assert printed_by("demo.sh", tmp_path)[1][4] != words[4]


def test_the_task_app_lets_itself_be_sent_to_the_trainers_gateway(tmp_path):
    key = tmp_path / "key"
    key.write_text("a-key\n")
    settings = read_settings(
        Settings, {**SERVICES["task-app"]["environment"], "ENVIRONMENT_API_KEY_FILE": str(key)}
    )
    assert settings.allowed_inference_hosts == (SERVICES["trainer-backend"]["hostname"],)
    client = TestClient(create_app(settings))
    assert client.get("/info", headers={"X-API-Key": "a-key"}).status_code == 200
    assert client.get("/info", headers={"X-API-Key": "a-kex"}).status_code == 401


@pytest.mark.parametrize("name", SERVICES)
def test_no_container_writes_outside_its_volumes_or_gains_rights(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    if name == "database":
        assert service["user"] == "postgres"
    else:
        assert re.search(rf"AS {service['build']['target']}\n(?:.*\n)*?USER turnwise", DOCKERFILE)


def test_ports_are_published_on_this_machine_alone():
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_what_is_ours_is_built_and_never_pulled():
    # With `image` next to it compose v2 asks a registry first, and two builds of one tag at a time fail.
    for name, service in SERVICES.items():
        assert ("image" in service) != ("build" in service), name
        if name != "database":
            assert service["build"]["args"]["PIP_EXTRA_INDEX_URL"] == "${PIP_EXTRA_INDEX_URL:-}"
    assert SERVICES["keys"]["build"] == SERVICES["task-app"]["build"]
    assert SERVICES["demo"]["build"] == SERVICES["trainer-backend"]["build"]


def test_every_stage_that_installs_knows_the_package_index():
    # The classic builder forgets an ARG at the end of its stage.
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.M)[1:]
    installing = [stage for stage in stages if "pip install" in stage]
    assert len(installing) == 2
    for stage in installing:
        for name in ("PIP_EXTRA_INDEX_URL\n", "EXTRAS=babyai,gym\n"):
            assert f"ARG {name}" in stage.partition("pip install")[0]


def test_a_change_of_the_code_installs_no_dependency_again():
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.M)[2:]:
        installed, copied, again = re.search(
            r"(pip install .*)\n((?:COPY \w+ \w+\n)+)COPY README.md LICENSE ./\nRUN (pip install .*)", stage
        ).groups()
        assert "--no-deps" not in installed and "--no-deps" in again
        # A link in trainer_backend leads to configs.
        assert re.findall(r"COPY (\w+) ", copied) == [*PACKAGES, "configs"]


def test_containers_run_what_pip_has_compiled_and_not_the_sources_that_it_is_built_from():
    base, *stages = re.split(r"^FROM ", DOCKERFILE, flags=re.M)[1:]
    sources = re.findall(r"^WORKDIR (\S+)", base, re.M)[-1]
    for stage in stages:
        last_copy = stage.rindex("COPY turnwise")
        (place,) = re.findall(r"^WORKDIR (\S+)", stage, re.M)
        assert place != sources and stage.index(f"WORKDIR {place}") > last_copy


def test_models_of_the_hub_are_kept_in_a_volume_that_the_user_may_write():
    home = re.search(r"^ENV HF_HOME=(\S+)", DOCKERFILE, re.M)[1]
    assert f"models:{home}" in SERVICES["trainer-backend"]["volumes"]
    assert re.search(rf"mkdir -p .* {home} ", DOCKERFILE)
    assert re.search(rf"chown -R turnwise .* {home}\n", DOCKERFILE)


def test_the_database_is_healthy_when_it_answers_others():
    # While a new volume is set up, it answers on its socket alone.
    assert SERVICES["database"]["healthcheck"]["test"][1:4] == ["pg_isready", "-h", "127.0.0.1"]


def test_every_file_of_the_packages_is_in_the_wheel():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(
        [*listed, *PACKAGES, "configs/*.toml"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    # A link to configs/ puts its jobs into the wheel.
    data = [Path(name) for name in files if not name.endswith(".py") and not (ROOT / name).is_dir()]
    assert len(data) > 30
    assert [path for path in data if not any(path.match(pattern) for pattern in patterns)] == []


def test_the_page_scrapes_both_services_by_the_names_and_keys_that_compose_gives_them():
    page = (ROOT / "docs/operations.md").read_text()
    (scraped,) = [
        yaml.safe_load(text) for text in re.findall(r"```yaml\n(scrape_configs:.*?)```", page, re.S)
    ]
    given = {
        name: service["environment"][variable]
        for name, variable in (
            ("task-app", "ENVIRONMENT_API_KEY_FILE"),
            ("trainer-backend", "TRAINER_API_KEY_FILE"),
        )
        for service in [SERVICES[name]]
    }
    assert {
        one["static_configs"][0]["targets"][0].partition(":")[0]: one["authorization"]["credentials_file"]
        for one in scraped["scrape_configs"]
    } == given


def test_the_vllm_service_is_started_as_a_run_starts_its_own_and_publishes_no_port():
    vllm, trainer = GPU["services"]["vllm"], SERVICES["trainer-backend"]
    words = dict(word.removeprefix("--").partition("=")[::2] for word in vllm["command"])
    for name, value in CONTRACT.items():
        assert words[name.replace("_", "-")] == ("" if value is True else str(value))
    assert "ports" not in vllm and vllm["profiles"] == ["vllm"]
    assert vllm["environment"]["VLLM_SERVER_DEV_MODE"] == "1"
    # The worker's folder, and the runs under the trainer's path, as the trainer's user.
    mounts = dict(volume.split(":")[:2] for volume in vllm["volumes"])
    worker = next(name for name in mounts if name.startswith("./"))
    assert (ROOT / worker / "turnwise_vllm.py").is_file()
    assert vllm["environment"]["PYTHONPATH"] == mounts[worker]
    assert f"runs:{mounts['runs']}" in trainer["volumes"]
    assert f"useradd --uid {vllm['user']} " in DOCKERFILE
    assert vllm["read_only"] is True and vllm["cap_drop"] == ["ALL"]


def test_the_page_starts_a_vllm_server_as_a_run_starts_its_own():
    (command,) = re.findall(r"api_server \\\n(.*?)```", (ROOT / "docs/vllm.md").read_text(), re.S)
    words = " ".join(command.replace("\\\n", " ").split())
    assert " ".join(arguments(CONTRACT)) in words


def test_compose_1_29_reads_it_too():
    assert not {"name", "version"} & COMPOSE.keys()
    assert "# syntax=" not in DOCKERFILE
    for service in (*SERVICES.values(), *GPU["services"].values()):
        assert "develop" not in service
        assert not isinstance(service.get("env_file"), dict)
    assert "RUN --mount" not in DOCKERFILE, "BuildKit is no default there"


def test_every_copied_path_exists_and_reaches_the_build():
    ignored_but = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] in ignored_but, source


def test_every_script_that_is_started_is_copied_to_where_it_is_started_from():
    copied = set(re.findall(r"^COPY docker/\S+ (\S+)$", DOCKERFILE, re.M))
    started = set(re.findall(r'\["sh", "(\S+?)"\]', DOCKERFILE + COMPOSE_TEXT))
    assert started | {"/usr/local/bin/health.py"} == copied


def test_the_health_check_asks_a_route_that_exists_and_imports_little(tmp_path):
    checks = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", DOCKERFILE, re.M)
    assert len(checks) == 2
    settings = read_settings(Settings, {"ENVIRONMENT_API_KEY": "a-key"})
    with ServerThread(create_app(settings), Listener("127.0.0.1", 0)) as url:
        port = url.rpartition(":")[2]
        for check in checks:
            interpreter, flags, program, _ = json.loads(check)
            assert (interpreter, flags) == ("python", "-IS")
            command = [sys.executable, flags, "-X", "importtime", str(ROOT / "docker" / Path(program).name)]
            done = subprocess.run([*command, port], capture_output=True, text=True, check=True)
            assert not re.search(r"\| +(urllib|http|ssl|asyncio|email)", done.stderr), "a tenth of a second"
    assert subprocess.run([*command, port], capture_output=True, check=False).returncode != 0


def test_base_images_are_pinned_to_minor_versions():
    given = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE, re.M)[1], SERVICES["database"]["image"]
    assert given == ("python:3.12-slim-bookworm", "${POSTGRES_IMAGE:-postgres:17.6-alpine}")
    assert SERVICES["keys"]["build"]["args"]["PYTHON_IMAGE"] == f"${{PYTHON_IMAGE:-{given[0]}}}"


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker-compose.gpu.yml", "docker-compose.ranks.yml"])
def test_what_a_container_may_take_is_bounded_and_can_be_set(file):
    text = (ROOT / file).read_text()
    page = (ROOT / "docs/operations.md").read_text()
    for name in re.findall(r"\$\{([A-Z_]+)[:}-]", text):
        if not name.startswith(("VLLM_M", "VLLM_G")) or name == "VLLM_MEMORY":
            assert f"`{name}`" in page, f"docs/operations.md does not explain {name}"
    for name, service in yaml.safe_load(text)["services"].items():
        if service.get("restart") == "unless-stopped":
            assert {"mem_limit", "pids_limit"} <= service.keys(), name
            assert service["logging"]["options"]["max-size"], name
        for mount in service.get("tmpfs", ()):
            assert "size=" in mount, (name, mount)


def test_kernels_can_be_compiled_and_loaded_in_the_trainers_image():
    trainer = DOCKERFILE.partition("FROM base AS trainer")[2]
    assert "gcc libc6-dev" in trainer
    cache = re.search(r"TRITON_CACHE_DIR=(\S+)", trainer)[1]
    # Not on a tmpfs, which Docker mounts noexec, and in a volume that the learner has too.
    learner = yaml.safe_load((ROOT / "docker-compose.ranks.yml").read_text())["services"]["learner"]
    for service in (SERVICES["trainer-backend"], learner):
        assert any(cache.startswith(volume.split(":")[1]) for volume in service["volumes"])


def test_one_gpu_and_two_can_be_given_by_variables():
    found = {
        name: service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, service in GPU["services"].items()
    }
    assert found == {"trainer-backend": ["${TRAINER_GPU:-0}"], "vllm": ["${VLLM_GPU:-1}"]}
