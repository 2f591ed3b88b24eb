"""Stemming of English words by Porter's algorithm, in the variant that Lucene uses."""

from __future__ import annotations

import re
import threading

import Stemmer

_stemmer = Stemmer.Stemmer("porter", 0)
_lock = threading.Lock()  # a Stemmer is not thread-safe

_VOWEL = re.compile("[aeiou]|.y")
_VOWEL_CONSONANT = re.compile("(?:[aeiou]|.y)[^aeiou]")
_BLI_LOGI = re.compile("(.+)(bl|log)(?:ies|[iy](?:ed|ing)?s?)")
_DOUBLE = re.compile(r"(.*([^aeioubdfglmnprstz]))\2(?:ed|ing)s?")


def stem(word: str) -> str:
    """Return the stem of a lower-case word. A letter above U+FFFF counts as two, as in Java.

    The library implements the algorithm of 1980. Lucene's algorithm differs in three points, so the word is changed
    before the library stems it: words of up to two letters are not stemmed; step 1b halves every double consonant
    except l, s and z, not only the nine that are common in English; step 2 replaces bli by ble and logi by log.
    """
    if not word.isascii() and max(word) > "\uffff":
        return _from_units(stem(_to_units(word)))
    if len(word) <= 2:
        return word
    if match := _DOUBLE.fullmatch(word):
        root, letter = match.groups()
        if _VOWEL.search(root + letter) and (letter != "y" or _ends_in_consonant_y(root + letter)):
            word = root
    if match := _BLI_LOGI.fullmatch(word):
        prefix, ending = match.groups()
        if _VOWEL_CONSONANT.search(prefix):
            word = prefix + ("ble" if ending == "bl" else ending)
    with _lock:
        stemmed: str = _stemmer.stemWord(word)
    return stemmed


def _ends_in_consonant_y(word: str) -> bool:
    """Return whether the last y of a word is a consonant. In a run of y, every second one is."""
    run = re.search("[aeiou]?y+$", word)
    return run is not None and len(run[0].strip("aeiou")) % 2 == (run[0][0] != "y" or run.start() == 0)


# Surrogates are mapped to private-use characters. The algorithm treats these, like all unknown letters, as consonants.


def _to_units(word: str) -> str:
    units = memoryview(word.encode("utf-16-le")).cast("H")
    return "".join(chr(unit + 0x800 if 0xD800 <= unit < 0xE000 else unit) for unit in units)


def _from_units(units: str) -> str:
    characters = "".join(chr(ord(unit) - 0x800) if "\ue000" <= unit < "\ue800" else unit for unit in units)
    return characters.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
