"""Diversity of replies, measured on their text only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import comb

from starpod.trainer.data.episode import Episode, Turn


def diversity(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return metrics of a batch. A key is missing if nothing can be compared. The cost is one pass over the text.

    collect/response_diversity: probability that two members of a group reply differently to their common start
        state. It does not depend on the number of members or groups, because it is a share of pairs, not of distinct
        texts. Steps with a filter or failed episodes are therefore comparable.
    diversity/distinct_reasoning: number of distinct thoughts divided by the number of thoughts, over all turns. It
        falls with the number of turns in a batch.
    diversity/most_common_reasoning: share of turns with the most common thought. Near 1, thoughts are a template.
    diversity/distinct_trigrams: share of distinct word triples within a reply, mean over replies. It is near 0 for
        a reply that repeats itself.
    """
    metrics = {}
    reply_diversity = response_diversity(episodes)
    if reply_diversity is not None:
        metrics["collect/response_diversity"] = reply_diversity
    turns = [turn for episode in episodes for turn in episode.turns]
    thoughts = Counter(normalise(turn.thought) for turn in turns if turn.thought is not None)
    if thoughts:
        count = thoughts.total()
        metrics["diversity/distinct_reasoning"] = len(thoughts) / count
        metrics["diversity/most_common_reasoning"] = max(thoughts.values()) / count
    trigrams = distinct_trigrams(turns)
    if trigrams is not None:
        metrics["diversity/distinct_trigrams"] = trigrams
    return metrics


def normalise(text: str) -> str:
    """Return lower-case text with single spaces, so that replies with a different layout are equal."""
    return " ".join(text.casefold().split())


def response_diversity(episodes: Iterable[Episode]) -> float | None:
    """Return the share of pairs in a group whose first replies differ; None without a pair."""
    replies: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for episode in episodes:
        if episode.turns:
            replies[episode.group][normalise(episode.turns[0].text)] += 1
    pairs = sum(comb(texts.total(), 2) for texts in replies.values())
    equal_pairs = sum(comb(count, 2) for texts in replies.values() for count in texts.values())
    return 1 - equal_pairs / pairs if pairs else None


def distinct_trigrams(turns: Iterable[Turn]) -> float | None:
    """Return the mean share of distinct word triples over replies with at least three words; None without any."""
    shares = []
    for turn in turns:
        words = turn.text.casefold().split()
        if len(words) >= 3:
            shares.append(len(set(zip(words, words[1:], words[2:], strict=False))) / (len(words) - 2))
    return sum(shares) / len(shares) if shares else None
