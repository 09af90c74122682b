"""The recipes of docs/cluster.md, as far as they can be held without a cluster: names, ports, flags."""

from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.house.sources import ROOT
from trainer_backend.inference.keys import CONTRACT
from trainer_backend.job.load import load_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.learner.calls import LEARNER_KEY

KUBERNETES = ROOT / "docker" / "kubernetes"
EXTERNAL = list(yaml.safe_load_all((KUBERNETES / "external.yaml").read_text()))
RANKS = yaml.safe_load((ROOT / "docker-compose.ranks.yml").read_text())["services"]


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = [item for item in EXTERNAL if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return found["spec"]


def container(kind: str, name: str) -> dict[str, Any]:
    (found,) = one(kind, name)["template"]["spec"]["containers"]
    return found


def words_of(arguments: list[str]) -> dict[str, str]:
    return dict(word.removeprefix("--").partition("=")[::2] for word in arguments)


@pytest.fixture
def kubernetes_job() -> JobConfig:
    """The job that docs/cluster.md gives to `external.yaml`."""
    return load_job(KUBERNETES / "job.toml").config


def test_the_addresses_of_the_job_are_services_of_the_manifests(kubernetes_job: JobConfig):
    learner, (task_app,) = urlsplit(kubernetes_job.learner.url), kubernetes_job.services.task_url
    host = f"turnwise-learner-0.{one('StatefulSet', 'turnwise-learner')['serviceName']}"
    ports = {
        item["metadata"]["name"]: {port["port"] for port in item["spec"]["ports"]}
        for item in EXTERNAL
        if item["kind"] == "Service"
    }
    assert (learner.hostname, learner.port) == (host, 9000) and 9000 in ports["turnwise-learner"]
    assert urlsplit(task_app).hostname == "turnwise-task-app" and 8001 in ports["turnwise-task-app"]
    assert kubernetes_job.services.gateway_host in ports
    vllm = one("StatefulSet", "turnwise-vllm")
    assert [urlsplit(url).netloc for url in kubernetes_job.inference.urls] == [
        f"turnwise-vllm-{number}.{vllm['serviceName']}:8000" for number in range(vllm["replicas"])
    ]
    pod = one("Job", "turnwise-run")["template"]["spec"]
    assert pod["hostname"] == pod["subdomain"] == kubernetes_job.services.gateway_host
    allowed = {"name": "TURNWISE_ALLOWED_INFERENCE_HOSTS", "value": kubernetes_job.services.gateway_host}
    assert allowed in container("Deployment", "turnwise-task-app")["env"]


def test_a_learner_has_a_pod_for_each_node_and_the_first_listens(kubernetes_job: JobConfig):
    words, learner = words_of(container("StatefulSet", "turnwise-learner")["args"]), kubernetes_job.learner
    assert (int(words["nnodes"]), int(words["nproc-per-node"])) == (learner.nnodes, learner.nproc_per_node)
    assert int(words["nnodes"]) == one("StatefulSet", "turnwise-learner")["replicas"]
    assert words["master-addr"] == "turnwise-learner-0.turnwise-learner" and words["port"] == "9000"
    limits = container("StatefulSet", "turnwise-learner")["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == int(words["nproc-per-node"])
    assert words["max-restarts"] == words_of(RANKS["learner"]["command"])["max-restarts"] == "0"


def test_vllm_is_started_as_a_run_starts_its_own(kubernetes_job: JobConfig):
    vllm = container("StatefulSet", "turnwise-vllm")
    words = words_of(vllm["args"])
    for name, value in CONTRACT.items():
        assert words[name.replace("_", "-")] == ("" if value is True else str(value))
    assert int(words["max-model-len"]) >= kubernetes_job.inference.max_model_len
    assert words["model"] == kubernetes_job.model.name
    assert {"name": "VLLM_SERVER_DEV_MODE", "value": "1"} in vllm["env"]


def test_pods_of_a_run_see_one_disk_and_nothing_else_reaches_them():
    for kind, name in (
        ("StatefulSet", "turnwise-vllm"),
        ("StatefulSet", "turnwise-learner"),
        ("Job", "turnwise-run"),
    ):
        assert {"name": "runs", "mountPath": "/app/runs"} in container(kind, name)["volumeMounts"]
    ours = one("NetworkPolicy", "turnwise-run")
    for item in EXTERNAL:
        if "template" in item["spec"]:
            labels = item["spec"]["template"]["metadata"]["labels"]
            assert ours["podSelector"]["matchLabels"].items() <= labels.items()


def test_both_sides_of_a_learner_have_its_key():
    for name, variable in ((LEARNER_KEY, "turnwise-learner"), (LEARNER_KEY, "turnwise-run")):
        kind = "Job" if variable == "turnwise-run" else "StatefulSet"
        assert name in {item["name"] for item in container(kind, variable)["env"]}
    paths = {RANKS[name]["environment"][f"{LEARNER_KEY}_FILE"] for name in ("learner", "trainer-backend")}
    assert paths == {"/keys/trainer/key"}
