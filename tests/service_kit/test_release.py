"""Which release says it is running."""

import subprocess
import sys
from pathlib import Path

from service_kit import release


def test_a_checkout_that_was_never_installed_says_so_and_does_not_fail():
    code = f"{Path(release.__file__).read_text()}\nprint(version())"
    # without site-packages, and without the folder of today
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == release.FROM_SOURCE
