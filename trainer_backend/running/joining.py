"""Fixed policies join a run: their models are loaded beside the actor's, and others' servers are tried."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.protocols import Reporter
from trainer_backend.services.endpoints import sends_key_in_the_open
from trainer_backend.services.fixed_policies import FixedPolicies


async def joined_policies(
    job: JobConfig, folders: Mapping[str, Path], learner: LocalLearner, reporter: Reporter
) -> FixedPolicies:
    """The fixed policies of a job; all of them are known to speak as the actor does.

    Args:
        folders: by name, of those whose model lies here.

    Raises:
        JobError, ModelFolderError: one cannot be mixed with the actor.
    """
    fixed = await asyncio.to_thread(FixedPolicies.of, job, folders, learner)
    for line in fixed.told():
        reporter.say(line)
    for item in fixed.remote:
        reporter.say(await item.probed())
        if sends_key_in_the_open(item.table.inference_url or "", keyed=item.table.api_key_env is not None):
            reporter.say(f"its key goes to {item.table.source} unencrypted; prefer https")
    return fixed
