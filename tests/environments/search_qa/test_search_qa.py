"""search_qa-v1: the encyclopedia, questions that its articles answer, the comparison of answers, hostile actions."""

import functools
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.env_server.episodes.live_episode import Want
from starpod.environments.search_qa import SearchQA
from starpod.environments.search_qa.answers import exact_match, f1, normalise_answer
from starpod.environments.search_qa.encyclopedia import encyclopedia
from tests.environments import episodes

start = functools.partial(episodes.start, SearchQA)
SEEDS = st.integers(0, 2**64 - 1)


def test_every_article_contains_its_facts_and_is_found_by_its_title() -> None:
    book = encyclopedia()
    assert len({article.title for article in book.articles}) == len(book.articles) > 600
    for number, article in enumerate(book.articles):
        assert all(book.name(value) in article.text for value in article.facts.values()), article
        assert number in book.index.search(article.title, 3), article.title


@given(seed=SEEDS, hops=st.integers(1, 4), split=st.sampled_from(["all", "train", "test"]))
def test_the_articles_answer_the_question_one_leading_to_the_next(seed: int, hops: int, split: str) -> None:
    book = encyclopedia()
    environment = start(seed, min_hops=hops, max_hops=hops, split=split).environment
    articles = [book.articles[number] for number in environment.articles]
    assert len(set(environment.articles)) == hops
    assert articles[0].title in environment.question
    for article, following in itertools.pairwise(articles):
        assert following.title in article.text
        assert following.title not in environment.question
    assert environment.answer in articles[-1].text
    assert environment.answer not in environment.question
    assert split == "all" or (environment.articles[0] % 5 == 0) == (split == "test")


@given(seed=SEEDS)
def test_the_expert_finds_the_answer_and_its_score_rises(seed: int) -> None:
    episode = start(seed, min_hops=1, max_hops=4)
    played = episodes.play_expertly(episode)
    assert played[-1].reward == 1 and len(played) <= 5


@pytest.mark.parametrize(
    ("answer", "truth", "exact", "overlap"),
    [
        ("The Seler.", "the Seler", True, 1),
        ("seler", "the Seler", True, 1),
        ("Leon Quinanwick", "leon  quinanwick!", True, 1),
        ("Leon", "Leon Quinanwick", False, 2 / 3),
        ("Leon Leon Leon", "Leon Quinanwick", False, 0.4),
        ("1958", "1959", False, 0),
        ("", "a", True, 0),
    ],
)
def test_answers_are_compared_as_in_squad(answer: str, truth: str, exact: bool, overlap: float) -> None:
    assert exact_match(answer, truth) is exact
    assert f1(answer, truth) == pytest.approx(overlap)
    assert normalise_answer(normalise_answer(answer)) == normalise_answer(answer)


def test_an_answer_pays_for_the_words_that_are_right() -> None:
    for reward, paid in (("f1", 2 / 3), ("exact", 0.0)):
        episode = next(
            e for seed in range(99) if re.fullmatch(r"\w+ \w+", (e := start(seed, reward=reward)).environment.answer)
        )
        transition = episode.turn([f"finish[{episode.environment.answer.split()[0]}]"], Want())
        assert transition.reward == pytest.approx(paid)
        assert (transition.success, episode.environment.score()) == (False, 0)


def test_a_search_shows_the_best_articles_and_then_only_news_is_effective() -> None:
    episode = start(1, results=2)
    title = encyclopedia().articles[7].title
    first, again, nothing = (episode.turn([f"search[{words}]"], Want()) for words in (title, title.upper(), "zzzz"))
    assert isinstance(first.parts, str) and first.parts.count("\n") == 1 and first.parts.startswith(f"{title}: ")
    assert again.parts == first.parts
    assert [t.outcomes[0].effective for t in (first, again, nothing) if t.outcomes[0]] == [True, False, False]
    assert nothing.parts == "Nothing was found."
