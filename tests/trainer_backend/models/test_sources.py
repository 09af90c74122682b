"""Hub names: found in the hub's own cache layout, and told apart when they are not there to be had."""

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from trainer_backend.errors import JobError, ModelFolderError
from trainer_backend.job.load import load_job
from trainer_backend.job.tables import ModelTable
from trainer_backend.learner.loading import load_named
from trainer_backend.rundir.new_job import load_new_job

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """For each (name, revision) a line: what was loaded, or the error."""

    def loaded(*wanted: tuple[str, str], **constants_of_hub: object) -> list[str]:
        for name, value in constants_of_hub.items():
            monkeypatch.setattr(constants, name, value)
        return [line(ModelTable(name=name, revision=revision or None)) for name, revision in wanted]

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()  # the next one reads that
    yield loaded
    close_session()


def line(table: ModelTable) -> str:
    try:
        model, tokenizer = load_named(table)
    except ModelFolderError as error:
        return str(error)
    return f"{type(model).__name__} {len(tokenizer)}"


def cached(cache: Path, name: str, folder: Path) -> Path:
    """Put a folder into a cache as the hub's client does: blobs, snapshots that link to them, refs."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for part in ("blobs", "refs"):
        (repository / part).mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (repository / "refs/main").write_text(COMMIT)
    return snapshot


def test_a_cached_model_is_loaded_without_a_network(
    load: Callable[..., list[str]], model_folders: Mapping[str, Path], tmp_path: Path
):
    cached(tmp_path, "Qwen/Qwen3-Tiny", model_folders["qwen3"])
    half = cached(tmp_path, "mistralai/Half", model_folders["mistral"])
    (half / "model-00003-of-00003.safetensors").unlink()
    by_branch, by_commit, other_branch, unknown, not_whole = load(
        ("Qwen/Qwen3-Tiny", ""),
        ("Qwen/Qwen3-Tiny", COMMIT),
        ("Qwen/Qwen3-Tiny", "v2"),
        ("Qwen/Qwen3-Tinny", ""),
        ("mistralai/Half", ""),
        HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE=True,
    )  # fmt: skip
    assert by_branch == by_commit and by_branch.startswith("Qwen3ForCausalLM")
    assert other_branch.startswith("model.name 'Qwen/Qwen3-Tiny' at 'v2': it is incomplete")
    assert f"({tmp_path}), and the hub cannot be reached" in unknown
    assert "hf download Qwen/Qwen3-Tinny" in unknown and "model.path" in unknown
    assert "1 of 3 shards are missing" in not_whole


class Hub(BaseHTTPRequestHandler):
    """Refuses as the hub does: a model that does not exist, and one behind terms."""

    def do_GET(self) -> None:
        gated = "gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_the_hub_refuses_is_told_apart(load: Callable[..., list[str]], hub: str, tmp_path: Path):
    unknown, gated = load(
        ("org/none", ""), ("org/gated", ""), HF_HUB_CACHE=str(tmp_path), ENDPOINT=hub, HF_HUB_OFFLINE=False
    )
    assert unknown.startswith("model.name 'org/none': the hub has no such model or revision")
    assert gated.startswith("model.name 'org/gated': the hub requires that you accept the model's terms")


def job_file(tmp_path: Path, model: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(f"[model]\n{model}\n")
    return path


def test_a_model_is_told_by_what_names_it():
    assert ModelTable(name="org/x").source == "org/x"
    assert ModelTable(name="org/x", revision="v2").source == "org/x at v2"
    assert ModelTable(path=Path("a/b")).source == "a/b"


def test_a_path_that_looks_like_a_hub_name_is_asked_about(tmp_path: Path):
    path = job_file(tmp_path, 'path = "Qwen/Qwen3-0.6B"')
    with pytest.raises(JobError, match=r"no folder\. Did you mean model\.name = 'Qwen/Qwen3-0\.6B'\?"):
        load_new_job(path)


@pytest.mark.parametrize("name", ["./models/qwen", "/models/qwen", "~/qwen", "a/b/c", "../qwen", "a/", ""])
def test_a_hub_name_that_looks_like_a_path_is_asked_about(name: str, tmp_path: Path):
    with pytest.raises(JobError, match=r"model\.name is .*did you mean model\.path\?"):
        load_job(job_file(tmp_path, f'name = "{name}"'))


def test_a_hub_name_that_is_a_folder_here_is_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "Qwen/Qwen3").mkdir(parents=True)
    (tmp_path / "Qwen/Qwen3/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=r"a folder here\. Did you mean model\.path\?"):
        load_new_job(job_file(tmp_path, 'name = "Qwen/Qwen3"'))
