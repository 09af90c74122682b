"""Fixed policies join a run: their models are loaded beside the actor's, and others' servers are tried."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_backend.collect.collector import Collector
from trainer_backend.collect.plan import Planner
from trainer_backend.collect.probe import probe_server
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.models.folder import embedding_rows
from trainer_backend.protocols import Reporter
from trainer_backend.services.endpoints import sends_key_in_the_open
from trainer_backend.services.fixed_policies import FixedPolicies


async def joined_policies(
    folders: Mapping[str, Path],
    learner: LocalLearner,
    planner: Planner,
    collector: Collector,
    reporter: Reporter,
) -> FixedPolicies:
    """The fixed policies that are served from here; all of them are known to speak as the actor does.

    Args:
        folders: by name, of those that are served from here.
        planner: knows where the others are asked.

    Raises:
        JobError, ModelFolderError: one cannot be mixed with the actor.
        TaskAppError: the task apps fail.
    """
    job = planner.job
    found = await asyncio.to_thread(FixedPolicies.of, job, folders, learner)
    for line in found.told():
        reporter.say(line)
    renderer = ChatRenderer(learner.tokenizer)

    def encode(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> Sequence[int]:
        return renderer.encode(renderer.prompt_text(messages, tools))

    for table in job.fixed_policies:
        if table.is_remote:
            rows = embedding_rows(learner.model)
            reporter.say(await probe_server(planner, collector, table, encode, vocabulary=rows))
            if sends_key_in_the_open(planner.fixed[table.name]):
                reporter.say(f"its key goes to {table.source} unencrypted; prefer https")
    return found
