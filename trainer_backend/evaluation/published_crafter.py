"""Published results on Crafter, each with its source and its protocol. Data only.

Figures of other engines (Craftax-classic's percent of the maximum) have another scale and are left out.
"Second hand" means not verified at the source; look there before you quote it.
"""

from dataclasses import dataclass
from typing import Literal

FULL_LENGTH = 10_000  # env steps after which stock Crafter cuts an episode
ProtocolName = Literal["learning", "learned", "played", "verlog", "balrog"]
SourceName = Literal["crafter", "causal", "langoal", "emerald", "dojo", "verlog", "runs", "balrog"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A value with its published spread (a standard deviation or error), if any."""

    value: float
    spread: float | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where a figure is published; an empty `url` means that the publication itself was not found."""

    title: str
    url: str


@dataclass(frozen=True, slots=True)
class Protocol:
    """The protocol of a measurement."""

    title: str
    """The title in a few words."""
    max_env_steps: int
    """An episode ends with death or at this number of env steps."""
    counted: str
    """The episodes behind the figures."""
    sees: str
    """The policy's observations."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A published row."""

    agent: str
    protocol: ProtocolName
    source: SourceName
    learned_from: str
    """Env steps of learning."""
    score: Figure | None = None
    """Crafter score in percent."""
    reward: Figure | None = None
    """The environment's reward, summed over an episode."""
    progress: Figure | None = None
    """Mean share of the 22 achievements, in percent; its spread is a standard error."""


SOURCES: dict[SourceName, Source] = {
    "crafter": Source("README and scores of danijar/crafter", "https://github.com/danijar/crafter"),
    "causal": Source(
        "README of Causal-aware LLMs (arXiv 2505.24710)", "https://github.com/DMIRLAB-Group/Causal-aware_LLMs"
    ),
    "langoal": Source("LanGoal, second hand: the publication was not found, so nothing is checked", ""),
    "emerald": Source("EMERALD (ICML 2025), its tables second hand", "https://arxiv.org/abs/2507.04075"),
    "dojo": Source("CrafterDojo, its table second hand", "https://arxiv.org/abs/2508.13530"),
    "verlog": Source("Verlog's blog", "https://wentsechen.github.io/Verlog_blogpost"),
    "runs": Source("the runs submitted to BALROG", "https://github.com/balrog-ai/experiments"),
    "balrog": Source("BALROG's leaderboard, second hand, 2026-08-03", "https://balrogai.com"),
}

PROTOCOLS: dict[ProtocolName, Protocol] = {
    "learning": Protocol(
        "agents that learn",
        FULL_LENGTH,
        "every episode of learning, the first ones too",
        "64x64 pixels, or texts made of the game's state",
    ),
    "learned": Protocol(
        "agents after learning",
        FULL_LENGTH,
        "games of the finished agent (EMERALD's table: 256 of them; C-VPT: 100)",
        "64x64 pixels (C-VPT: 144x144)",
    ),
    "played": Protocol(
        "people, and models that do not learn here",
        FULL_LENGTH,
        "whole games (people: 100 of them; their score and reward are means of five groups of 20)",
        "pixels (people), a text and Crafter's paper (SPRING)",
    ),
    "verlog": Protocol(
        "a language model trained by RL",
        2_000,  # the limit of BALROG, whose environment it plays
        "episodes of 172 env steps on average before, 196 after",
        "BALROG's text",
    ),
    "balrog": Protocol(
        "language models as they are",
        2_000,
        "10 episodes",
        "BALROG's text and its last 16 observations (models before August 2025: an earlier wording)",
    ),
}


def _readme(
    agent: str,
    score: Figure | None,
    reward: Figure | None,
    *,
    progress: Figure | None = None,
    learned_from: str = "1M",
    protocol: ProtocolName = "learning",
) -> PublishedRow:
    return PublishedRow(agent, protocol, "crafter", learned_from, score, reward, progress)


def _causal(agent: str, value: float, spread: float, *, learned_from: str = "1M") -> PublishedRow:
    return PublishedRow(agent, "learning", "causal", learned_from, score=Figure(value, spread))


def _learned(agent: str, source: SourceName, score: Figure, *, learned_from: str = "10M") -> PublishedRow:
    return PublishedRow(agent, "learned", source, learned_from, score=score)


def _run(agent: str, value: float, spread: float) -> PublishedRow:
    return PublishedRow(agent, "balrog", "runs", "0", progress=Figure(value, spread))


def _board(agent: str, value: float, spread: float | None) -> PublishedRow:
    return PublishedRow(agent, "balrog", "balrog", "0", progress=Figure(value, spread))


PUBLISHED: tuple[PublishedRow, ...] = (
    # Progress: computed as BALROG does, from the 100 games in scores/crafter_reward-human.json. Four of them
    # are longer than BALROG's 2,000 env steps.
    _readme(
        "Human",
        Figure(50.5, 6.8),
        Figure(14.3, 2.3),
        progress=Figure(63.2, 1.5),
        learned_from="unknown",
        protocol="played",
    ),
    _readme("SPRING (GPT-4)", Figure(27.3, 1.2), Figure(12.3, 0.7), learned_from="0", protocol="played"),
    _readme("Achievement Distillation", Figure(21.8, 1.4), Figure(12.6, 0.3)),
    _readme("Curious Replay", Figure(19.4, 1.6), None),
    _readme("PPO (ResNet)", Figure(15.6, 1.6), Figure(10.3, 0.5)),
    _readme("DreamerV3", Figure(14.5, 1.6), Figure(11.7, 1.9)),
    _readme("DreamerV2", Figure(10.0, 1.2), Figure(9.0, 1.7)),
    _readme("PPO (SB3)", Figure(4.6, 0.3), Figure(4.2, 1.2)),
    _readme("Rainbow", Figure(4.3, 0.2), Figure(6.0, 1.3)),
    _readme("Plan2Explore", Figure(2.1), Figure(2.1)),
    _readme("RND", Figure(2.0), Figure(0.7)),
    _readme("Random", Figure(1.6), Figure(2.1, 1.3)),
    _readme("ELLM", None, Figure(6.0, 0.4), learned_from="5M"),
    _causal("Causal-aware LLMs", 18.9, 0.53),
    _causal("Causal-aware LLMs", 33.6, 0.02, learned_from="5M"),
    _causal("AdaRefiner", 15.8, 1.4),
    _causal("AdaRefiner", 28.2, 1.8, learned_from="5M"),
    _causal("Reflexion (GPT-4)", 11.7, 1.4),
    _causal("ReAct (GPT-4)", 8.3, 1.2),
    PublishedRow("LanGoal", "learning", "langoal", "1M", score=Figure(24.0)),
    PublishedRow("LanGoal", "learning", "langoal", "unknown", score=Figure(32.7)),
    _learned("C-VPT (large)", "dojo", Figure(61.4, 4.7), learned_from="imitation of an RL expert"),
    _learned("EMERALD", "emerald", Figure(58.1)),
    _learned("Delta-IRIS", "emerald", Figure(42.5)),
    _learned("DreamerV3 (XL)", "emerald", Figure(39.6)),
    PublishedRow("Qwen2.5-7B-Instruct", "verlog", "verlog", "0", reward=Figure(5.80)),
    PublishedRow("the same after Verlog's PPO", "verlog", "verlog", "170 updates", reward=Figure(10.44)),
    _board("Gemini-3-Pro", 57.3, 4.4),
    _run("Grok-4", 57.3, 3.9),
    _run("Gemini-2.5-Pro", 55.0, 6.0),
    _board("Claude-Opus-4.5", 49.5, 3.1),
    _board("Claude-Opus-4.5 thinking", 48.6, 3.2),
    _board("Gemini-3.1-Pro", 46.8, None),
    _board("Gemini-3-Flash", 45.0, 6.3),
    _board("GPT-5 (minimal think)", 39.1, 4.1),
    _run("DeepSeek-R1 (chain of thought)", 36.4, 3.8),
    _run("GPT-4o", 33.1, 2.3),
    _run("Claude-3.5-Sonnet", 32.7, 3.2),
    _run("Llama-3.1-8B", 25.5, 3.2),
    _run("Qwen2.5-7B", 16.4, 3.0),
    _run("Llama-3.2-1B", 12.7, 1.9),
)
