"""Questions that need several articles, which the agent finds one after another with a search engine."""

from __future__ import annotations

import random
import re
from typing import Any, Literal

from pydantic import Field, model_validator

from starpod.env_server import INVALID, Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome, digest
from starpod.environments.webshop.search.bm25 import TooManyTerms

from .answers import exact_match, f1
from .encyclopedia import Encyclopedia, encyclopedia
from .picture import draw
from .questions import draw_question

MAX_LENGTH = 1_000
"""Maximum number of characters of an action."""

_MOVE = re.compile(r"\s*(search|finish)\s*\[(.*)\]\s*", re.IGNORECASE | re.DOTALL)


class SearchQAOptions(EnvironmentOptions):
    """Options for the questions, the search results, and the reward."""

    min_hops: int = Field(default=2, ge=1, le=4, description="Minimum number of articles that a question needs.")
    max_hops: int = Field(default=2, ge=1, le=4, description="Maximum number of articles that a question needs.")
    split: Literal["all", "train", "test"] = Field(
        default="all", description="train: questions that begin at four in five articles; test: at the others."
    )
    results: int = Field(default=3, ge=1, le=10, description="Number of articles that a search shows.")
    reward: Literal["f1", "exact"] = Field(
        default="f1",
        description="f1: 1 for the right answer, else the F1 of its words if that is at least 0.3; exact: 1 or 0.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> SearchQAOptions:
        if self.min_hops > self.max_hops:
            raise ValueError(f"min_hops {self.min_hops} is above max_hops {self.max_hops}; lower it")
        return self


class SearchQA(Environment):
    """Search and answer. The seed determines the question; the transitions are deterministic."""

    spec = EnvironmentSpec(
        id="search_qa-v1",
        version="1.0.0",
        title="Search and answer: questions over several articles",
        instructions=(
            "Answer the question. Each action is either search[words], which shows the best articles of an "
            "encyclopedia, or finish[answer], which ends the episode. The world is invented: what you know of the real "
            "one does not help. Answer with a name, a year or a word alone."
        ),
        grammar="search[words] or finish[answer]",
        render_modes=("text", "png"),
        limits=Limits(max_turns=10, max_actions_per_turn=1, max_actions=10),
    )
    Options = SearchQAOptions
    options: SearchQAOptions

    question: str
    articles: tuple[int, ...]
    answer: str
    seen: frozenset[int]
    """Articles that were shown so far."""
    query: str
    found: list[int] | None
    """Results of the last action if that was a search, else None."""
    verdict: str

    @classmethod
    def prepare(cls) -> None:
        encyclopedia().index.search("town", 1)  # compiles the search

    def reset(self, rng: random.Random) -> None:
        options = self.options
        hops = rng.randint(options.min_hops, options.max_hops)
        remainder = {"all": None, "train": 1, "test": 0}[options.split]
        self.question, self.articles, self.answer = draw_question(rng, encyclopedia(), hops, remainder)
        self.seen = frozenset()
        self.query = ""
        self.found = None
        self.verdict = ""

    def step(self, action: Any) -> Outcome:
        move = _MOVE.fullmatch(action) if isinstance(action, str) and len(action) <= MAX_LENGTH else None
        self.query, self.found = "", None
        if move is None or not move[2].strip():
            return INVALID
        if move[1].lower() == "finish":
            return self._finish(move[2])
        try:
            results = encyclopedia().index.search(move[2], self.options.results)
        except TooManyTerms:
            return INVALID
        before = self.seen
        self.query, self.found = move[2].strip(), results
        self.seen |= frozenset(results)
        return Outcome(effective=self.seen != before, criteria=self._criteria())

    def _finish(self, answer: str) -> Outcome:
        is_exact, overlap = exact_match(answer, self.answer), f1(answer, self.answer)
        self.verdict = "right" if is_exact else "wrong"
        partial_reward = overlap if self.options.reward == "f1" and overlap >= 0.3 else 0.0
        return Outcome(
            1.0 if is_exact else partial_reward,
            terminated=True,
            success=is_exact,
            criteria=self._criteria() | {"exact_match": is_exact},
            info={"answer": self.answer, "f1": overlap},
        )

    def _criteria(self) -> dict[str, bool]:
        return {f"article_{hop}": article in self.seen for hop, article in enumerate(self.articles, 1)}

    def observe(self) -> str:
        if self.verdict:
            return f"Your answer is {self.verdict}."
        if self.found is None:
            return self.question if not self.seen else "Write search[words] or finish[answer]."
        return _list_articles(encyclopedia(), self.found) or "Nothing was found."

    def state_key(self) -> bytes:
        return digest(repr((self.question, sorted(self.seen), self.verdict)))

    def expert_action(self) -> str | None:
        if self.verdict:
            return None
        articles = (article for article in self.articles if article not in self.seen)
        article = next(articles, None)
        return f"finish[{self.answer}]" if article is None else f"search[{encyclopedia().articles[article].title}]"

    def score(self) -> float:
        """Return 0.9 * the share of the question's articles that were shown; after the answer, 1 or 0."""
        if self.verdict:
            return float(self.verdict == "right")
        return 0.9 * len(self.seen & set(self.articles)) / len(self.articles)

    def render(self, mode: str = "text") -> str | bytes:
        book = encyclopedia()
        if mode == "png":
            cards = [(book.articles[number].title, book.articles[number].text) for number in self.found or ()]
            return draw(self.question, self.query, cards, self.verdict)
        results = [f"search[{self.query}]", _list_articles(book, self.found)] if self.found is not None else []
        return "\n".join([self.question, *results, *([self.verdict] if self.verdict else [])])


def _list_articles(book: Encyclopedia, articles: list[int]) -> str:
    return "\n".join(f"{book.articles[number].title}: {book.articles[number].text}" for number in articles)
