"""Diversity of replies, from their text alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import comb

from starpod.trainer.data.episode import Episode, Turn


def diversity(episodes: Sequence[Episode]) -> dict[str, float]:
    """Metrics of a batch; a key is left out where nothing can be compared. Costs one pass over the text.

    collect/response_diversity: the chance that two members of a group reply differently to the start state they share.
        A share of pairs, not of distinct texts: it does not depend on how many members or groups there are, so steps
        with a filter or with failed episodes compare with those without.
    diversity/distinct_reasoning: distinct thoughts over thoughts, all turns. Falls with the number of turns in a batch.
    diversity/most_common_reasoning: the share of turns that think the most common thought: a template, near 1.
    diversity/distinct_trigrams: distinct word triples over word triples within a reply, mean over replies: near 0 for a
        reply that runs in circles.
    """
    metrics = {}
    same = response_diversity(episodes)
    if same is not None:
        metrics["collect/response_diversity"] = same
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
    """Lower case, one space between words: replies that differ in layout alone are the same reply."""
    return " ".join(text.casefold().split())


def response_diversity(episodes: Iterable[Episode]) -> float | None:
    """The share of pairs of one group whose first replies differ; None without a pair."""
    replies: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for episode in episodes:
        if episode.turns:
            replies[episode.group][normalise(episode.turns[0].text)] += 1
    pairs = sum(comb(texts.total(), 2) for texts in replies.values())
    equal = sum(comb(count, 2) for texts in replies.values() for count in texts.values())
    return 1 - equal / pairs if pairs else None


def distinct_trigrams(turns: Iterable[Turn]) -> float | None:
    """Mean over replies of at least three words; None without one."""
    shares = []
    for turn in turns:
        words = turn.text.casefold().split()
        if len(words) >= 3:
            shares.append(len(set(zip(words, words[1:], words[2:], strict=False))) / (len(words) - 2))
    return sum(shares) / len(shares) if shares else None
