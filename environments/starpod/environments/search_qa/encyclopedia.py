"""An encyclopedia of an invented world: about 700 short articles with relations between people, places and things.

It is generated and always the same. Every relation in an article has exactly one value.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field

from starpod.environments.webshop.search.index import SearchIndex

_STARTS = (
    "Al Bel Bran Cor Dal Eld Far Gar Hal Iver Jor Kel Lun Mar Nor Ost Per Quin Ral Sel Tor Ul Ver Wes Yar Zel".split()
)
_MIDDLES = "a e i o u an en ar or is".split()
_PLACE_ENDS = "mere ford holm wick stad burg vale haven gate moor".split()
_SURNAME_ENDS = "sson ova etti inger aki mann doro ell ardo wick".split()
_FIRST_NAMES = (
    "Ada Boris Clara Dmitri Edda Felix Gala Henrik Irma Jasper Katya Leon Mira Noel Orla Pavel Rosa Stefan Thea Viktor"
).split()
_ADJECTIVES = "Amber Broken Crimson Distant Empty Frozen Golden Hollow Iron Last Marble Paper Quiet Salt Silver".split()
_NOUNS = (
    "Bridge Clock Garden Harbour Island Key Lantern Mirror Orchard River Shore Staircase Tower Voyage Window".split()
)
_GOODS = "clocks lenses bicycles paper glass engines pianos ropes lamps ceramics boots telescopes".split()
_TRADES = "novelist engineer botanist composer architect chemist historian painter".split()
_COINS = "crown florin mark shell talent thaler dinar lira ducat kopek".split()
_SEAS = "the Amber Sea,the Grey Ocean,the Bay of Storms,the Strait of Pearls,the Long Gulf".split(",")
_CORPUS_SEED = 20_240_601


@dataclass(slots=True)
class Article:
    """An article of the encyclopedia."""

    kind: str
    title: str
    facts: dict[str, int | str] = field(default_factory=dict)
    """Value of each relation: the number of another article, or a text."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Encyclopedia:
    """The articles, and their search index."""

    articles: list[Article]
    index: SearchIndex

    def name(self, value: int | str) -> str:
        """Return a fact's value as text."""
        return value if isinstance(value, str) else self.articles[value].title


class _UnusedNames:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.used: set[str] = set()

    def make(self, *choices: list[str], form: str) -> str:
        """Return a name that was not used before: `form`, filled with one random piece from each list."""
        while True:
            name = form.format(*(self.rng.choice(pieces) for pieces in choices))
            if name not in self.used:
                self.used.add(name)
                return name


@functools.cache
def encyclopedia() -> Encyclopedia:
    """Return the encyclopedia. It is made once per process, in a fraction of a second."""
    rng = random.Random(_CORPUS_SEED)
    articles = _draw(rng)
    for article in articles:
        article.text = _write(rng, articles, article)
    documents = ((f"{number:05}", f"{article.title} {article.text}") for number, article in enumerate(articles))
    return Encyclopedia(articles, SearchIndex.build(documents))


def _draw(rng: random.Random) -> list[Article]:
    names = _UnusedNames(rng)
    articles: list[Article] = []

    def add(kind: str, count: int, *choices: list[str], form: str) -> range:
        start = len(articles)
        articles.extend(Article(kind, names.make(*choices, form=form)) for _ in range(count))
        return range(start, len(articles))

    countries = add("country", 24, _STARTS, _MIDDLES, ["nia", "land", "via", "ria"], form="{}{}{}")
    rivers = add("river", 40, _STARTS, _MIDDLES, ["n", "l", "r", "ss"], form="the {}{}{}")
    towns = add("town", 140, _STARTS, _MIDDLES, _PLACE_ENDS, form="{}{}{}")
    schools = add("school", 40, _STARTS, _MIDDLES, ["Institute", "Academy", "College"], form="{}{} {}")
    people = add("person", 220, _FIRST_NAMES, _STARTS, _MIDDLES, _SURNAME_ENDS, form="{} {}{}{}")
    companies = add("company", 80, _STARTS, _MIDDLES, ["Works", "Brothers", "Union", "Trading"], form="{}{} {}")
    books = add("book", 150, _ADJECTIVES, _NOUNS, form="The {} {}")
    facts = [article.facts for article in articles]
    capitals = rng.sample(towns, len(countries))
    for country, capital in zip(countries, capitals, strict=True):
        facts[country] |= {"capital": capital, "currency": rng.choice(_COINS)}
        facts[capital]["country"] = country
    for river in rivers:
        facts[river] |= {"source": rng.choice(countries), "mouth": rng.choice(_SEAS)}
    for town in towns:
        facts[town] |= {
            "country": facts[town].get("country", rng.choice(countries)),
            "river": rng.choice(rivers),
            "mayor": rng.choice(people),
            "founded": str(rng.randint(801, 1799)),
        }
    for school in schools:
        facts[school] |= {"town": rng.choice(towns), "founded": str(rng.randint(1400, 1950))}
    for person in people:
        facts[person] |= {
            "birthplace": rng.choice(towns),
            "school": rng.choice(schools),
            "employer": rng.choice(companies),
            "born": str(rng.randint(1860, 1990)),
            "trade": rng.choice(_TRADES),
        }
    for company in companies:
        facts[company] |= {
            "seat": rng.choice(towns),
            "founder": rng.choice(people),
            "product": rng.choice(_GOODS),
            "founded": str(rng.randint(1850, 1995)),
        }
    for book in books:
        facts[book] |= {
            "author": rng.choice(people),
            "publisher": rng.choice(companies),
            "year": str(rng.randint(1890, 2020)),
        }
    return articles


_SENTENCES: dict[str, tuple[tuple[str, ...], ...]] = {
    "country": (
        ("{title} is a country whose capital is {capital}.",),
        ("Its currency is the {currency}.", "People pay with the {currency}."),
    ),
    "river": (
        ("{title} rises in {source}.", "The source of {title} lies in {source}."),
        ("It flows into {mouth}.", "It ends in {mouth}."),
    ),
    "town": (
        ("{title} is a town in {country}.", "The town of {title} lies in {country}."),
        ("It was founded in {founded}.", "Its charter dates from {founded}, the year of its founding."),
        ("It stands on {river}.", "The river that crosses it is {river}."),
        ("The mayor is {mayor}.", "{mayor} has been its mayor for years."),
    ),
    "school": (
        ("{title} is a school in {town}.", "{title} teaches in the town of {town}."),
        ("It was founded in {founded}.",),
    ),
    "person": (
        (
            "{title}, born in {born}, is a {trade} from {birthplace}.",
            "The {trade} {title} was born in {birthplace} in {born}.",
        ),
        ("{title} studied at {school}.", "After years at {school} came the first success."),
        ("The present employer is {employer}.", "{title} works for {employer}."),
    ),
    "company": (
        (
            "{title} is a maker of {product} with its seat in {seat}.",
            "From its seat in {seat}, {title} sells {product}.",
        ),
        ("{founder} founded it in {founded}.", "It was founded in {founded} by {founder}."),
    ),
    "book": (
        ("{title} is a book by {author}.", "{author} wrote {title}."),
        ("{publisher} published it in {year}.", "It appeared in {year} with {publisher}."),
    ),
}


def _write(rng: random.Random, articles: list[Article], article: Article) -> str:
    """Write the text of an article, which mentions each of its facts once."""
    names = {name: value if isinstance(value, str) else articles[value].title for name, value in article.facts.items()}
    sentences = [rng.choice(forms).format(title=article.title, **names) for forms in _SENTENCES[article.kind]]
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)
