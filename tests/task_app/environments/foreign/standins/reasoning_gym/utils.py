"""Where the package reads answers."""

from reasoning_gym import extract_answer as extract_answer
