"""Questions in words, from chains of relations between articles."""

from __future__ import annotations

import random
from typing import NamedTuple

from .encyclopedia import Encyclopedia

_RELATIONS: dict[tuple[str, str], tuple[str, str, str]] = {
    # kind, relation -> kind of the value ("" for a text), phrase for it in a longer question, the question itself
    ("book", "author"): ("person", "the author of {}", "Who wrote {}?"),
    ("book", "publisher"): ("company", "the publisher of {}", "Which company published {}?"),
    ("book", "year"): ("", "", "In which year did {} appear?"),
    ("person", "birthplace"): ("town", "the town where {} was born", "In which town was {} born?"),
    ("person", "school"): ("school", "the school of {}", "At which school did {} study?"),
    ("person", "employer"): ("company", "the employer of {}", "For which company does {} work?"),
    ("person", "born"): ("", "", "In which year was {} born?"),
    ("company", "seat"): ("town", "the town where {} has its seat", "In which town is the seat of {}?"),
    ("company", "founder"): ("person", "the founder of {}", "Who founded {}?"),
    ("company", "product"): ("", "", "What does {} make?"),
    ("school", "town"): ("town", "the town of {}", "In which town is {}?"),
    ("school", "founded"): ("", "", "In which year was {} founded?"),
    ("town", "country"): ("country", "the country of {}", "In which country is {}?"),
    ("town", "river"): ("river", "the river that crosses {}", "Which river crosses {}?"),
    ("town", "mayor"): ("person", "the mayor of {}", "Who is the mayor of {}?"),
    ("town", "founded"): ("", "", "In which year was {} founded?"),
    ("river", "source"): ("country", "the country where {} rises", "In which country does {} rise?"),
    ("river", "mouth"): ("", "", "Into what does {} flow?"),
    ("country", "capital"): ("town", "the capital of {}", "What is the capital of {}?"),
    ("country", "currency"): ("", "", "What is the currency of {}?"),
}


class SearchQuestion(NamedTuple):
    """A question with its articles and answer."""

    text: str
    articles: tuple[int, ...]
    """Numbers of the articles that are needed, in order."""
    answer: str


def draw_question(rng: random.Random, book: Encyclopedia, hops: int, rest: int | None) -> SearchQuestion:
    """Draw a question over `hops` different articles.

    Args:
        rest: which articles can be the first. 0: numbers divisible by 5 (held out); 1: all other numbers; None: any.
    """
    while True:
        start = rng.randrange(len(book.articles))
        if rest is not None and (start % 5 == 0) != (rest == 0):
            continue
        path, value, phrase = [start], None, book.articles[start].title
        question = ""
        for hop in range(1, hops + 1):
            article = book.articles[path[-1]]
            relations = [(name, relation) for (kind, name), relation in _RELATIONS.items() if kind == article.kind]
            relations = [(name, relation) for name, relation in relations if relation[0] or hop == hops]
            name, (_, part, form) = rng.choice(relations)
            value = article.facts[name]
            question = form.format(phrase)
            phrase = part.format(phrase)
            if hop < hops:
                assert isinstance(value, int)
                path.append(value)
        if len(set(path)) == hops and value not in path:
            assert value is not None
            return SearchQuestion(question, tuple(path), book.name(value))
