"""`python -m tests.trainer_backend.jobs.acted_service DATA_DIR DATABASE_URL GRACE_S`: a trainer service as a
process of its own, with actors for jobs, which waits half a second for its store."""

import sys
from pathlib import Path

from tests.trainer_backend.jobs.served import acted, settings_for
from trainer_backend.jobs.server import serve_trainer


def main(folder: str, url: str, grace_s: str) -> None:
    given = {"database_url": url} if url else {}
    found = settings_for(Path(folder), port=0, max_jobs=3, stop_grace_s=float(grace_s), **given)
    serve_trainer(
        found.model_copy(update={"store_s": 0.5}), lambda line: print(line, flush=True), command=acted
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
