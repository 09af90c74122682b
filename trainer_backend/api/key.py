"""The key of a trainer service, as the environment holds it: for the service, and for who asks it."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from trainer_backend.errors import TrainerError

KEY_VARIABLE = "TRAINER_API_KEY"
KEY_FILE_VARIABLE = "TRAINER_API_KEY_FILE"
_LONGEST_KEY = 500


class SettingsError(TrainerError):
    code = "settings_invalid"
    status = 400
    title = "Setting cannot be used"


def key_from_environ(environ: Mapping[str, str]) -> SecretStr | None:
    """What TRAINER_API_KEY holds, or the file that TRAINER_API_KEY_FILE names; None: neither is set.

    Raises:
        SettingsError: the file cannot be read or is empty, or there is no key in what is set.
    """
    value = environ.get(KEY_VARIABLE, "").strip()
    name = environ.get(KEY_FILE_VARIABLE, "")
    if not value and name:
        try:
            value = Path(name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"{KEY_FILE_VARIABLE} names {name!r}, which cannot be read: {error}"
            ) from error
        if not value:  # a file that was named must hold a key, or everybody would get in
            raise SettingsError(f"{KEY_FILE_VARIABLE} names {name!r}, which is empty")
    if not value:
        return None
    if not (value.isascii() and value.isprintable() and len(value) <= _LONGEST_KEY):
        raise SettingsError(
            f"{KEY_VARIABLE} holds no key: a key is at most {_LONGEST_KEY} printable ASCII characters"
        )
    return SecretStr(value)
