"""Models and tokenizers: built-in presets, and local Hugging Face folders."""

from trainer_backend.core.presets import PRESETS
from trainer_backend.models.folder import load_model_folder, save_model_folder
from trainer_backend.models.presets import build_preset
from trainer_backend.models.tokenizer import train_tokenizer

__all__ = ["PRESETS", "build_preset", "load_model_folder", "save_model_folder", "train_tokenizer"]
