"""GiGPO with soft matching: decisions in similar states are compared too, weighted by similarity."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from shared_schemas.rounding import clear_rounding
from trainer_backend.core.advantages.derivation import two_levels
from trainer_backend.core.advantages.episodes import (
    Advantages,
    EpisodeRewards,
    EstimatorPlug,
    refuse_incomplete,
)
from trainer_backend.core.advantages.levels import AdditiveKeys, summed_levels
from trainer_backend.core.advantages.state_graph import StateGraph, return_sizes, returns_to_go, state_graph
from trainer_backend.core.metric import Metric, Row

Matrix = NDArray[np.float64]
_TERM = re.compile(r"\w+")
_MOST_TERMS = 1024  # only the most frequent terms of a group are used, to bound the time for long texts
_ROWS = 1024  # number of texts whose similarities to all others are in memory at once


class SoftKeys(AdditiveKeys):
    """Keys of `gigpo_soft`."""

    similarity_temperature: float = Field(default=0.1, ge=0)
    """gigpo_soft: a higher temperature gives decisions with less similar observations more weight in a
    baseline; 0: only equal observations count"""


METRICS = (
    Row(
        Metric("anchors/effective_others", "how many equal decisions of others a baseline is worth, mean"),
        when="only with `gigpo_soft`",
    ),
)  # fmt: skip


def gigpo_soft(episodes: Sequence[EpisodeRewards], keys: SoftKeys) -> Advantages:
    """Compute `gigpo_additive` with Fnorm 1 and with baselines that weight decisions by similarity of states.

        A_d     = A_E(i) + w * A_S(d),      d = (i, t), w = step_advantage_w, A_E = R_i - mean_j R_j
        A_S(d)  = G_d - sum_e k(d, e) G_e / sum_e k(d, e),      over all decisions e of the group, including d
        k(d, e) = exp((cos(x_d, x_e) - 1) / similarity_temperature)
        x_d     = [tf(term) * (1 + ln((1 + D) / (1 + df(term))))]

    d is decision t of episode i, R_i is the score of an episode, and G_d is the return-to-go of a decision.
    k(d, e) is the similarity of two decisions. x_d is the TF-IDF vector of the text that the policy observed
    before decision d. Terms are runs of letters, digits and _, in lower case, and only the group's 1,024 most
    frequent terms are used. tf is the number of times that a term occurs in the text, D is the number of
    decisions of the group, and df is the number of these decisions whose text contains the term.

    At similarity_temperature 0, k is 1 for equal texts and 0 for different texts, so A_S is that of `gigpo`
    with fnorm "one" and with texts as state keys. A higher temperature moves the baseline towards the group's
    mean. A lone episode gets 0. The part `compared` is the effective number of other decisions in the
    baseline: 1 / (sum of the squared shares of the weights), minus 1.

    Source: Fang et al., ProxMO, arXiv:2602.19225: its soft aggregation, from its authors' code
    (GithubX-F/ProxMO-RL, proxmo/core_proxmo.py). Differences here:
    - ProxMO also weights A_E by the success rate, which requires scores of 0 and 1; this weight is left out;
    - df is counted per group, not per batch, so that groups do not affect each other's credit;
    - terms of one character count, because in a game's compact text they are numbers.
    """
    why = "gigpo_soft compares them by their observations"
    refuse_incomplete(episodes, [episode.texts_T for episode in episodes], "texts", why)
    by_text = [replace(episode, state_keys_T=episode.texts_T) for episode in episodes]
    graph = state_graph(by_text, "gigpo_soft")
    texts_D = [text for episode in episodes for text in episode.texts_T]
    returns_D = returns_to_go(episodes, keys.gamma)
    parts_D = _soft_baselines(graph, texts_D, returns_D, keys.similarity_temperature)
    of_steps_D = [0.0] * len(returns_D)
    sizes_D = return_sizes(episodes, keys.gamma)
    for group in graph.groups:
        size = max(sizes_D[d] for d in group)
        for d in group:
            of_steps_D[d] = clear_rounding(returns_D[d] - parts_D["baseline"][d], size=size)
    met = graph.sizes | {"anchors/effective_others": math.fsum(parts_D["compared"]) / max(len(returns_D), 1)}
    weights, parts_D = (1.0, keys.step_advantage_w), {"return": returns_D, **parts_D}
    return summed_levels(episodes, keys, of_steps_D, parts_D, met, weights=weights)


def _soft_baselines(
    graph: StateGraph, texts_D: Sequence[str], returns_D: Sequence[float], temperature: float
) -> dict[str, list[float]]:
    """Return the [D] parts `baseline` and `compared`; `gigpo_soft` defines both."""
    baselines_D, compared_D = list(returns_D), [0.0] * len(returns_D)
    for group in graph.groups:
        decisions: dict[str, list[int]] = {}
        for d in group:
            decisions.setdefault(texts_D[d], []).append(d)
        texts = sorted(decisions)  # so that the result does not depend on the order of episodes
        counts_U = np.array([len(decisions[text]) for text in texts], dtype=np.float64)
        sums_U = np.array([math.fsum(returns_D[d] for d in decisions[text]) for text in texts])
        baselines_U, others_U = _soft_means(texts, counts_U, sums_U, temperature)
        for text, baseline, others in zip(texts, baselines_U, others_U, strict=True):
            for d in decisions[text]:
                baselines_D[d], compared_D[d] = float(baseline), float(others)
    return {"baseline": baselines_D, "compared": compared_D}


def _soft_means(
    texts: Sequence[str], counts_U: Matrix, sums_U: Matrix, temperature: float
) -> tuple[Matrix, Matrix]:
    """Return, for U distinct texts, the similarity-weighted mean return and the effective number of others.

    `counts_U` contains the number of decisions with each text, and `sums_U` the sum of their returns.
    "Others" are the decisions that a mean contains in addition to the decision itself.
    """
    if temperature == 0.0:
        return sums_U / counts_U, counts_U - 1.0
    vectors = _vectors(texts, counts_U)
    means, others = [], []
    for first in range(0, len(texts), _ROWS):
        cosines = vectors[first : first + _ROWS] @ vectors.T
        own = np.arange(len(cosines))
        cosines[own, first + own] = 1.0  # also for a text without terms, whose vector is 0
        kernel = np.exp((np.minimum(cosines, 1.0) - 1.0) / temperature)
        total = kernel @ counts_U
        means.append((kernel @ sums_U) / total)
        others.append(total**2 / ((kernel**2) @ counts_U) - 1.0)
    return np.concatenate(means), np.concatenate(others)


def _vectors(texts: Sequence[str], counts_U: Matrix) -> NDArray[Any]:
    """Return the [U, terms] TF-IDF vectors of the texts, scaled to length 1.

    The vector of a text without terms is 0.
    """
    terms_U = [Counter(_TERM.findall(text.lower())) for text in texts]
    frequency, documents = Counter[str](), Counter[str]()
    for terms, count in zip(terms_U, counts_U, strict=True):
        for term, times in terms.items():
            frequency[term] += times * int(count)
            documents[term] += int(count)
    kept = sorted(frequency, key=lambda term: (-frequency[term], term))[:_MOST_TERMS]
    column = {term: k for k, term in enumerate(kept)}
    decisions = float(counts_U.sum())
    weights = np.array([1.0 + math.log((1.0 + decisions) / (1.0 + documents[term])) for term in kept])
    vectors = np.zeros((len(texts), len(kept)))
    for u, terms in enumerate(terms_U):
        for term, times in terms.items():
            if term in column:
                vectors[u, column[term]] = times
    vectors *= weights
    lengths = np.sqrt((vectors**2).sum(axis=1, keepdims=True))
    return vectors / np.where(lengths > 0.0, lengths, 1.0)


PLUGS = {
    "gigpo_soft": EstimatorPlug(
        gigpo_soft,
        SoftKeys,
        two_levels(
            ["step_advantage = return - baseline"],
            ("baseline", "mean by similarity, worth {compared} other[s] and itself"),
        ),
        needs_texts=True,
        bias="compares a decision with those of similar states, itself among them",
    )
}
