"""Tokenisation of text as by Lucene 8's StandardTokenizer: annex 29 of Unicode 9, and the sequences of Emoji 11."""

from __future__ import annotations

import functools
import re
from importlib import resources

LONGEST = 255
"""Maximum number of UTF-16 units of a word. Longer runs are split."""

_ASCII, _BASIC, _ALL = 0x80, 0x10000, 0x110000


def words(text: str) -> list[str]:
    """Return the words of a text in order, unchanged.

    A word is the longest match of the grammar at its position: letters and digits with the characters that join them,
    a run of katakana or of a South-East Asian script, one ideograph, one hiragana, or one emoji sequence. Other
    characters are left out.
    """
    if text.isascii():
        grammar = _grammar(_ASCII)
    elif _LETTER_OR_EMOJI.search(text):
        return _longest(text)
    else:
        grammar = _grammar(_ALL if len(text.encode("utf-16-le", "surrogatepass")) > 2 * len(text) else _BASIC)
    matches: list[str] = grammar.findall(text)
    return matches if max(map(len, matches), default=0) <= LONGEST // 2 else _longest(text)


# These characters begin both words and emoji sequences, and either can be the longer match.
_LETTER_OR_EMOJI = re.compile("[\u2139\u24c2\U0001f170\U0001f171\U0001f17e\U0001f17f]")


def _longest(text: str) -> list[str]:
    """Return the words of any text: at each position the longer match of the grammar and the emoji rule.

    Words are cut at LONGEST. This is slower than one `findall`.
    """
    grammar, emoji = _grammar(_ALL), re.compile(_emoji(_ALL))
    result = []
    position = 0
    while position < len(text):
        match = grammar.search(text, position, position + 2 * LONGEST)
        if not match:
            position += LONGEST  # a word that begins before would have fitted the window
            continue
        start = match.start()
        end = _reach(text, start)
        ends = [hit.end() for rule in (grammar, emoji) if (hit := rule.match(text, start, end))]
        position = max(ends, default=start + 1)
        if ends:
            result.append(text[start:position])
    return result


def _reach(text: str, start: int) -> int:
    """Return the end of the longest slice from `start` that has at most LONGEST UTF-16 units."""
    units = 0
    for index in range(start, min(start + LONGEST, len(text))):
        units += 1 if text[index] < "\U00010000" else 2
        if units > LONGEST:
            return index
    return min(start + LONGEST, len(text))


# --- the grammar -------------------------------------------------------------------------------------------------
# The first match of each rule is its longest one, so there is no backtracking. Runs that must be followed by something
# are bounded by LONGEST, so that the time stays linear.

_JOINED = ("Extend", "Format", "ZWJ")
"""Properties of characters that belong to the preceding character (WB4)."""
_FIRST = (
    *("ALetter", "Hebrew_Letter", "Numeric", "Katakana", "ExtendNumLet", "Complex_Context", "Han", "Hiragana"),
    *("Extended_Pictographic", "Emoji_Modifier", "Emoji_Keycap_Base", "Regional_Indicator", "ZWJ"),
)
"""Properties of characters that can begin a word."""
_PLAIN = r"[A-Za-z]++(?![^\x00-\x26\x28-\x2d/<-@\[-^`{-\x7f])"
"""A fast rule for most words: ASCII letters that are followed by an ASCII character outside of words."""


@functools.cache
def _grammar(limit: int) -> re.Pattern[str]:
    """Return the grammar for texts whose characters are below the limit. Smaller character sets are faster."""
    if limit == _ASCII:
        return re.compile(f"{_PLAIN}|{_word(limit)}")
    asian, han, hiragana = (_set(limit, name) for name in ("Complex_Context", "Han", "Hiragana"))
    more = _set(limit, *_JOINED)
    runs = f"{asian}{_set(limit, 'Complex_Context', *_JOINED)}*+|{han}{more}*+|{hiragana}{more}*+"
    return re.compile(f"{_PLAIN}|(?={_set(limit, *_FIRST)})(?:{_word(limit)}|{runs}|{_emoji(limit)})")


def _word(limit: int) -> str:
    """Return the rule for letters, digits, katakana and connectors (WB4 to WB13b)."""

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
    """Return the rule for joined, modified or tagged pictographs, keycaps and flags."""
    pictograph, modifier, base = (
        _set(limit, name) for name in ("Extended_Pictographic", "Emoji_Modifier", "Emoji_Modifier_Base")
    )
    style, joiner, many = "\ufe0f", "\u200d", f"{{0,{LONGEST - 1}}}+"
    more = f"(?![\ufe0e\ufe0f]){_set(limit, *_JOINED)}"
    # The rest ends before a joiner that joins the next element.
    rest = f"(?:(?!{joiner}(?:{joiner}{many}{pictograph}|{modifier})){more})*+"
    element = f"(?:(?:{joiner}{many}{base}(?:{more})*)?{modifier}{rest}|{joiner}{many}{pictograph}{rest}{style}?+)"
    tags = "[\U000e0020-\U000e007e]++\U000e007f"
    keycap = f"{_set(limit, 'Emoji_Keycap_Base')}(?:{more})*{style}?\u20e3(?:{more})*"
    letter = _set(limit, "Regional_Indicator") + _set(limit, *_JOINED) + "*+"
    return f"{element}(?:(?:{joiner}{element})++|{tags})?+|{keycap}|{letter}{letter}"


@functools.cache
def _set(limit: int, *properties: str) -> str:
    """Return a character class for regular expressions: all code points below `limit` with any of the properties."""
    ranges = [bounds for name in properties for bounds in _properties()[name] if bounds[0] < limit]
    inside = "".join(f"{re.escape(chr(low))}-{re.escape(chr(min(high, limit - 1)))}" for low, high in ranges)
    return f"[{inside}]" if inside else "(?!)"


@functools.cache
def _properties() -> dict[str, list[tuple[int, int]]]:
    """Return for each property the ranges of characters that have it, each as first and last character."""
    properties: dict[str, list[tuple[int, int]]] = {}
    name = ""
    for line in resources.files(__package__).joinpath("characters.txt").read_text("ascii").splitlines():
        if line.startswith("#"):
            continue
        fields = line.split()
        if not line.startswith(" "):
            name = fields.pop(0)
            properties[name] = []
        for field in fields:
            low, _, high = field.partition("-")
            properties[name].append((int(low, 16), int(high or low, 16)))
    return properties
