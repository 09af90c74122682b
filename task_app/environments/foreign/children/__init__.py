"""Programs that run a library's environments with another Python; they do not import Turnwise."""
