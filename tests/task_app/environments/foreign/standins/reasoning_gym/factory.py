"""Where the package has its registry."""

from reasoning_gym import DATASETS as DATASETS
