"""[inference] of a job TOML: how what is asked of the policy is answered."""

from pydantic import Field

from trainer_backend.jobfile.table import Table


class InferenceTable(Table):
    """[inference]"""

    threads: int = Field(default=1, ge=1, le=256, description="torch threads while rollouts are collected")
    max_running: int = Field(default=64, ge=1, le=4096, description="requests decoded together")
    max_model_len: int = Field(default=1024, ge=32, description="prompt + response, in tokens")
    kept_prefixes: int | None = Field(
        default=None,
        ge=0,
        le=4096,
        description="ended prompts + responses whose keys and values stay for prompts that begin like them; "
        "absent: as many as max_running; 0: every prompt is computed anew",
    )
    deterministic: bool = Field(
        default=False,
        description="one request at a time whatever max_running says, and nothing kept of ended ones: "
        "slower, and on a CPU a run that was killed and resumed has bit for bit an unbroken one's weights",
    )

    @property
    def slots(self) -> int:
        """Requests decoded together: what else is in a batch changes the last bits of a number."""
        return 1 if self.deterministic else self.max_running

    @property
    def kept(self) -> int:
        """Ended prompts + responses that stay: which of them are there depends on what ended when."""
        if self.deterministic:
            return 0
        return self.max_running if self.kept_prefixes is None else self.kept_prefixes
