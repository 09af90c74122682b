"""What is wrong with a job, or worth knowing of it, that shows before anything is started."""

from trainer_backend.data.dataset import data_of
from trainer_backend.jobfile.advice import biases
from trainer_backend.jobfile.schema import JobConfig


def told_before_a_run(job: JobConfig) -> list[str]:
    """A line for each thing worth knowing: what is read of [data], which fixed policies there are, and what
    biases the gradient.

    Raises:
        DataError: a row cannot be used.
        JobError, ModelFolderError: a fixed policy cannot be mixed with the actor.
    """
    data = data_of(job)
    told = list(data.told) if data is not None else []
    if job.fixed_policies:
        # Here alone: it reads tokenizers, and importing what reads them takes seconds.
        from trainer_backend.services.fixed_folders import checked_folders

        folders = checked_folders(job)
        told += [
            f"fixed policy {name!r}: {folder}, which speaks as the actor" for name, folder in folders.items()
        ]
    named = "; ".join(biases(job)) or "nothing that is known"
    return [*told, f"expected policy gradient, biased by: {named} (docs/credit.md)"]
