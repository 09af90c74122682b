"""`python -m tests.trainer_backend.jobs.acted_service DATA_DIR DATABASE_URL`: a trainer service as a
process of its own, with actors for jobs, which waits half a second for its store and for ever for a job."""

import sys
from pathlib import Path

from tests.trainer_backend.jobs.served import acted, settings_for
from trainer_backend.jobs.server import serve_trainer


def main(folder: str, url: str) -> None:
    found = settings_for(Path(folder), port=0, max_jobs=3, stop_grace_s=1e6, database_url=url)
    serve_trainer(
        found.model_copy(update={"store_s": 0.5}), lambda line: print(line, flush=True), command=acted
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
