"""What a token id says, by the tokenizer of a checkpoint: without torch, which a page must not wait for."""

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

_FILE = "tokenizer.json"


def token_texts(folders: list[Path]) -> Callable[[int], str] | None:
    """Decodes one id, by the first folder that holds a tokenizer; None where none does.

    A byte of a character that needs several is shown as the replacement character: alone it is no text.
    """
    path = next((folder / _FILE for folder in folders if (folder / _FILE).exists()), None)
    if path is None:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # the library raises nothing more precise for a file that is none
        return None

    def decode(token_id: int) -> str:
        return str(tokenizer.decode([token_id], skip_special_tokens=False)) or f"[{token_id}]"

    return decode
