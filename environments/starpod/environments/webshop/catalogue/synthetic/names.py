"""Made-up names and numbers: brands, lines, people, towns, part numbers. Nobody's trademark is meant."""

from __future__ import annotations

from collections.abc import Callable

from starpod.environments.webshop.catalogue.synthetic.kind import split

_STARTS = split(
    "Al, An, Ar, Bel, Bra, Bri, Cal, Cor, Cre, Da, Del, Dor, El, Er, Fal, Fen, Fi, Gal, Gar, Gre, Hal, Har, Hel, Il, "
    "Is, "
    "Ja, Jor, Kal, Ken, Kor, La, Len, Lor, Lu, Mal, Mar, Mel, Mi, Mor, Nal, Nor, Ol, Or, Pel, Per, Qui, Ral, Ren, Ro, "
    "Sal, "
    "Sel, Sor, Ta, Tel, Tor, Ul, Va, Vel, Vor, Wel, Wil, Xan, Yel, Zan, Zel"
)
_MIDDLES = split(
    "a, ba, be, bri, ca, ci, co, da, di, do, du, fa, fi, ga, go, gu, ha, i, ka, ki, la, le, li, lo, lu, ma, me, mi, "
    "mo, na, "
    "ne, ni, no, nu, pa, pe, po, ra, re, ri, ro, ru, sa, se, si, so, ta, te, ti, to, tu, va, ve, vi, vo, za, zo"
)
_ENDS = split(
    "bel, born, by, cast, cor, da, den, dor, fell, field, gan, gard, ka, kin, lan, land, len, ley, lin, lo, low, man, "
    "mar, "
    "mer, min, mont, mor, na, nak, nel, nor, nova, quin, ra, ran, rel, ren, ric, rin, ro, rock, ron, sen, shaw, sor, "
    "stad, "
    "stan, ta, tan, tek, ten, thal, ton, tor, tra, van, vel, vin, well, wen, wick, win, worth, xa, zel, zen"
)
_LETTERS = "ABCDEFGHJKLMNPRSTVWXYZ"
_ASIN_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PAIRS = tuple(a + b for a in _ASIN_DIGITS for b in _ASIN_DIGITS)
_BITS = 36
_MASK = (1 << _BITS) - 1


def small(random: Callable[[], float]) -> float:
    """Over [0, 1) as well, but the smaller the likelier. A product: powers may differ between machines."""
    return random() * random()


def name(random: Callable[[], float]) -> str:
    """A name of three or four syllables, of several millions."""
    start = _STARTS[int(random() * len(_STARTS))]
    middle = _MIDDLES[int(random() * len(_MIDDLES))]
    if random() < 0.4:
        middle += _MIDDLES[int(random() * len(_MIDDLES))]
    return start + middle + _ENDS[int(random() * len(_ENDS))]


def common_name(random: Callable[[], float]) -> str:
    """A name of two or three syllables, of some tens of thousands: people, towns, lines."""
    middle = int(random() * 16)
    return (
        _STARTS[int(random() * len(_STARTS))]
        + (_MIDDLES[middle] if middle < 8 else "")
        + _ENDS[int(random() * len(_ENDS))]
    )


def code(random: Callable[[], float]) -> str:
    """A model or part number, such as KV-4821 or T730B."""
    drawn = random()
    letters = _LETTERS[int(random() * 22)] + (_LETTERS[int(drawn * 22)] if drawn < 0.7 else "")
    number = int(small(random) * 9900) + 100
    if drawn < 0.3:
        return f"{letters}-{number}"
    return f"{letters}{number}" if drawn < 0.8 else f"{letters}{number}{_LETTERS[int(random() * 22)]}"


def asin(number: int, seed: int) -> str:
    """Ten characters that are never the same for two numbers below 2**36 under one seed."""
    # Odd factors and shifted differences can be undone in 36 bits, so that no two numbers meet.
    mixed = (number + (seed + 1) * 0x9E3779B97) & _MASK
    mixed = (mixed ^ (mixed >> 18)) * 0x5BD1E9955 & _MASK
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6DD & _MASK
    mixed ^= mixed >> 18
    mixed, last = divmod(mixed, 1296)
    mixed, middle = divmod(mixed, 1296)
    mixed, first = divmod(mixed, 1296)
    return f"B0{'789'[number % 3]}{_ASIN_DIGITS[mixed]}{_PAIRS[first]}{_PAIRS[middle]}{_PAIRS[last]}"
