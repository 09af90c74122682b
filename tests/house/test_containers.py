"""The containers, as far as they can be held without a Docker engine: files, flags, keys, health."""

import json
import os
import re
import subprocess
from pathlib import Path

import yaml
from fastapi.testclient import TestClient

from task_app.app import create_app
from task_app.settings import settings_from_environ
from trainer_backend.job import load_job

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def trained_with(folder: Path, **environment: str) -> list[str]:
    """The arguments that docker/train.sh gives to a `turnwise` that only prints them."""
    folder.joinpath("turnwise").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    folder.joinpath("turnwise").chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    printed = subprocess.run(
        ["sh", str(ROOT / "docker" / "train.sh")],
        cwd=folder, env={"PATH": path, **environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return printed.stdout.splitlines()


def test_the_trainers_flags_make_a_job_that_uses_the_other_container(tmp_path):
    environment = COMPOSE["services"]["trainer"]["environment"]
    given = {name: value for name, value in environment.items() if name in ("TASK_URL", "GATEWAY_HOST")}
    words = trained_with(tmp_path, **given)
    assert words[:4] == ["train", "configs/crafter_cpu.toml", "--run", "runs/crafter_cpu"]
    overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    services = load_job(ROOT / words[1], overrides).config.services
    assert services.task_url == ("dns+http://task-app:8001",)
    assert (services.gateway_host, services.gateway_port) == ("trainer", 8100)


def test_a_run_that_exists_is_resumed(tmp_path):
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    assert trained_with(tmp_path, RUN="mine")[:3] == ["train", "--resume", "runs/mine"]


def test_the_task_app_lets_itself_be_sent_to_the_trainers_gateway(tmp_path):
    key = tmp_path / "key"
    key.write_text("a-key\n")
    services = COMPOSE["services"]
    settings = settings_from_environ(
        {**services["task-app"]["environment"], "ENVIRONMENT_API_KEY_FILE": str(key)}
    )
    assert settings.allowed_inference_hosts == (services["trainer"]["hostname"],)
    client = TestClient(create_app(settings))
    assert client.get("/info", headers={"X-API-Key": "a-key"}).status_code == 200
    assert client.get("/info", headers={"X-API-Key": "a-kex"}).status_code == 401


def test_the_first_start_makes_a_key_and_the_second_keeps_it(tmp_path):
    shell, flag, script = COMPOSE["services"]["keys"]["command"]
    here = script.replace("/keys/", f"{tmp_path}/").replace("python -c", "python3 -c")
    subprocess.run([shell, flag, here], check=True)
    made = (tmp_path / "environment_api_key").read_text().strip()
    assert len(made) == 43  # 32 random bytes in base64
    assert (tmp_path / "environment_api_key").stat().st_mode & 0o077 == 0
    subprocess.run([shell, flag, here], check=True)
    assert (tmp_path / "environment_api_key").read_text().strip() == made
    assert sorted(os.listdir(tmp_path)) == ["environment_api_key"]


def test_every_copied_path_exists_and_reaches_the_build():
    ignored_but = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] in ignored_but, source


def test_health_checks_are_programs_that_parse_and_ask_a_route_that_exists():
    checks = re.findall(r"HEALTHCHECK .*\\\n  CMD (\[.*\])", DOCKERFILE)
    assert len(checks) == 2
    for check in checks:
        interpreter, flag, program = json.loads(check)
        assert (interpreter, flag) == ("python", "-c")
        compile(program, "health check", "exec")
    app = create_app(settings_from_environ({"ENVIRONMENT_API_KEY": "a-key"}))
    assert TestClient(app).get("/health").status_code == 200
