"""Which release says it is running."""

import subprocess
import sys
from pathlib import Path

from service_kit import release


def said(*isolation: str) -> str:
    code = f"{Path(release.__file__).read_text()}\nprint(version())"
    done = subprocess.run(
        [sys.executable, *isolation, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_checkout_that_was_never_installed_says_so_and_does_not_fail():
    assert said("-I", "-S") == release.FROM_SOURCE  # without site-packages, and without the folder of today
    assert release.version() != release.FROM_SOURCE
