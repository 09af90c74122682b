"""[services] of a job TOML: the task apps that are asked, and the gateway that they ask back."""

from collections import Counter
from pathlib import Path

from pydantic import Field, SecretStr, field_validator, model_validator

from trainer_backend.collect.addresses import fault_in
from trainer_backend.jobfile.table import Table


class ServicesTable(Table):
    """[services]"""

    # No repr: a user name and password may stand in it by mistake, which no error may repeat.
    task_url: tuple[str, ...] = Field(
        default=(),
        max_length=256,
        repr=False,
        description="task apps, one URL or a list; `dns+http://name:port` is all addresses of a name "
        "(docs/operations.md); absent: the job starts one of its own",
    )
    task_api_key: SecretStr | None = Field(
        default=None,
        description="their key; absent: the environment variable ENVIRONMENT_API_KEY, or the file that "
        "ENVIRONMENT_API_KEY_FILE names",
    )
    task_plugins: tuple[Path, ...] = Field(
        default=(),
        max_length=64,
        description="Python files with environments or policies of your own, for the task app that the job "
        "starts (docs/plugins.md)",
    )
    gateway_host: str = Field(
        default="127.0.0.1", description="address that the job's own gateway listens on"
    )
    gateway_port: int = Field(default=0, ge=0, le=65535, description="0 takes a free port")
    request_timeout_s: float = Field(default=60.0, gt=0, description="of one control request to a task app")
    iteration_timeout_s: float = Field(default=1800.0, gt=0, description="of collecting one iteration")
    task_app_wait_s: float = Field(
        default=60.0,
        ge=0,
        le=86_400,
        description="how long to wait for a task app of task_url to come back when none answers any more",
    )

    @field_validator("task_url")
    @classmethod
    def _each_address_once(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if fault := fault_in(url):
                raise ValueError(f"task_url {fault}")
        twice = [url for url, count in Counter(url.rstrip("/") for url in urls).items() if count > 1]
        if twice:
            raise ValueError(f"task_url names {twice[0]} twice, and each task app is asked once")
        return urls

    @model_validator(mode="after")
    def _plugins_are_for_our_own(self) -> "ServicesTable":
        if self.task_url and self.task_plugins:
            raise ValueError(
                "task_plugins are for the task app that the job starts itself, and task_url names others: "
                "start those with `turnwise task-app --plugins FILE`"
            )
        return self
