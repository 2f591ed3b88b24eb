"""Text into words as Lucene 8's StandardTokenizer does it: annex 29 of Unicode 9, and the sequences of Emoji 11."""

from __future__ import annotations

import functools
import re
from importlib import resources

LONGEST = 255
"""UTF-16 units of a word. What a longer run goes on with is the next word."""

_ASCII, _BASIC, _ALL = 0x80, 0x10000, 0x110000


def words(text: str) -> list[str]:
    """The words of a text, in order, as they stand there.

    A word is the longest that the grammar allows at its place: letters and digits with what joins them, a run of
    katakana or of a South-East Asian script, one ideograph, one hiragana, one emoji sequence. Characters between words
    are left out.
    """
    if text.isascii():
        grammar = _grammar(_ASCII)
    elif _LETTER_OR_EMOJI.search(text):
        return _longest(text)
    else:
        grammar = _grammar(_ALL if len(text.encode("utf-16-le", "surrogatepass")) > 2 * len(text) else _BASIC)
    found: list[str] = grammar.findall(text)
    return found if max(map(len, found), default=0) <= LONGEST // 2 else _longest(text)


# They begin words and emoji sequences, and either may be the longer.
_LETTER_OR_EMOJI = re.compile("[\u2139\u24c2\U0001f170\U0001f171\U0001f17e\U0001f17f]")


def _longest(text: str) -> list[str]:
    """The words of any text, one at a time: no word above LONGEST, and every rule has its try."""
    grammar, emoji = _grammar(_ALL), re.compile(_emoji(_ALL))
    found = []
    place = 0
    while place < len(text):
        match = grammar.search(text, place, place + 2 * LONGEST)
        if not match:
            place += LONGEST  # a word that began before would have been seen whole
            continue
        start = match.start()
        end = _reach(text, start)
        ends = [each.end() for rule in (grammar, emoji) if (each := rule.match(text, start, end))]
        place = max(ends, default=start + 1)
        if ends:
            found.append(text[start:place])
    return found


def _reach(text: str, start: int) -> int:
    """The end of the LONGEST UTF-16 units from the start."""
    units = 0
    for place in range(start, min(start + LONGEST, len(text))):
        units += 1 if text[place] < "\U00010000" else 2
        if units > LONGEST:
            return place
    return min(start + LONGEST, len(text))


# --- the grammar -------------------------------------------------------------------------------------------------
# In every rule the first match is the longest one, so that nothing is tried twice. Runs that need something after them
# are bounded by LONGEST, so that no text takes quadratic time.

_JOINED = ("Extend", "Format", "ZWJ")
"""Properties of characters that belong to the one before (WB4)."""
_FIRST = (
    *("ALetter", "Hebrew_Letter", "Numeric", "Katakana", "ExtendNumLet", "Complex_Context", "Han", "Hiragana"),
    *("Extended_Pictographic", "Emoji_Modifier", "Emoji_Keycap_Base", "Regional_Indicator", "ZWJ"),
)
"""Properties of the characters that words begin with."""
_PLAIN = r"[A-Za-z]++(?![^\x00-\x26\x28-\x2d/<-@\[-^`{-\x7f])"
"""Letters, and then a character of ASCII that joins none: most words, found by their first rule."""


@functools.cache
def _grammar(limit: int) -> re.Pattern[str]:
    """Any word of a text whose characters are below the limit: the fewer there are, the faster it is."""
    if limit == _ASCII:
        return re.compile(f"{_PLAIN}|{_word(limit)}")
    asian, han, hiragana = (_set(limit, name) for name in ("Complex_Context", "Han", "Hiragana"))
    more = _set(limit, *_JOINED)
    runs = f"{asian}{_set(limit, 'Complex_Context', *_JOINED)}*+|{han}{more}*+|{hiragana}{more}*+"
    return re.compile(f"{_PLAIN}|(?={_set(limit, *_FIRST)})(?:{_word(limit)}|{runs}|{_emoji(limit)})")


def _word(limit: int) -> str:
    """Letters, digits, katakana and connectors (WB4 to WB13b)."""

    def run(name: str, rest: str = "*+") -> str:
        return _set(limit, name) + _set(limit, name, *_JOINED) + rest

    more = _set(limit, *_JOINED) + "*+" if limit > _ASCII else ""
    hebrew = _set(limit, "Hebrew_Letter") + more
    quoted = f"{hebrew}(?:'{more}|\"{more}{hebrew})"  # WB7a to WB7c
    letters = f"(?:{run('ALetter')}|{hebrew})"
    between = _set(limit, "MidLetter", "MidNumLet", "Single_Quote") + more
    text = f"{letters}(?:{between}{letters}|(?!{quoted}){letters})*+"
    number = f"{run('Numeric')}(?:{_set(limit, 'MidNum', 'MidNumLet', 'Single_Quote')}{more}{run('Numeric')})*+"
    part = f"(?:{run('Katakana')}|(?:{quoted}|{number}|{text})++)"
    before, connector = run("ExtendNumLet", f"{{0,{LONGEST - 1}}}+"), run("ExtendNumLet")
    return f"(?:{before})?+{part}(?:{connector}{part})*+(?:{connector})?+"


def _emoji(limit: int) -> str:
    """Pictographs joined, modified or tagged; keycaps; flags."""
    pictograph, modifier, base = (
        _set(limit, name) for name in ("Extended_Pictographic", "Emoji_Modifier", "Emoji_Modifier_Base")
    )
    style, joiner, many = "\ufe0f", "\u200d", f"{{0,{LONGEST - 1}}}+"
    more = f"(?![\ufe0e\ufe0f]){_set(limit, *_JOINED)}"
    # Up to a joiner that what follows can be joined by.
    rest = f"(?:(?!{joiner}(?:{joiner}{many}{pictograph}|{modifier})){more})*+"
    element = f"(?:(?:{joiner}{many}{base}(?:{more})*)?{modifier}{rest}|{joiner}{many}{pictograph}{rest}{style}?+)"
    tags = "[\U000e0020-\U000e007e]++\U000e007f"
    keycap = f"{_set(limit, 'Emoji_Keycap_Base')}(?:{more})*{style}?\u20e3(?:{more})*"
    letter = _set(limit, "Regional_Indicator") + _set(limit, *_JOINED) + "*+"
    return f"{element}(?:(?:{joiner}{element})++|{tags})?+|{keycap}|{letter}{letter}"


@functools.cache
def _set(limit: int, *properties: str) -> str:
    """The characters below the limit that have one of the properties, as a set of a regular expression."""
    ranges = [bounds for name in properties for bounds in _properties()[name] if bounds[0] < limit]
    inside = "".join(f"{re.escape(chr(low))}-{re.escape(chr(min(high, limit - 1)))}" for low, high in ranges)
    return f"[{inside}]" if inside else "(?!)"


@functools.cache
def _properties() -> dict[str, list[tuple[int, int]]]:
    """First and last characters of the ranges that have a property."""
    known: dict[str, list[tuple[int, int]]] = {}
    name = ""
    for line in resources.files(__package__).joinpath("characters.txt").read_text("ascii").splitlines():
        if line.startswith("#"):
            continue
        fields = line.split()
        if not line.startswith(" "):
            name = fields.pop(0)
            known[name] = []
        for field in fields:
            low, _, high = field.partition("-")
            known[name].append((int(low, 16), int(high or low, 16)))
    return known
