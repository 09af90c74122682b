"""How long the parts of a document's row may be: the task app takes no more; the trainer sends no more."""

MAX_DOCUMENT_CHARS = 10_000_000
MAX_QUESTION_CHARS = 20_000
MAX_ANSWER_CHARS = 2_000
