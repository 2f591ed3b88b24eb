"""What the reward makes of colours: the first word of a fixed list that occurs anywhere in a value."""

from __future__ import annotations

from functools import lru_cache

COLOURS = tuple(
    """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
    caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
    dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
    ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
    mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand
    sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
    wheat white wine yellow
    """.split()
)


@lru_cache(maxsize=1 << 14)
def normalise(value: str) -> str:
    """The first of `COLOURS` that is a part of the value, the value itself if none is: 'stand' -> 'tan'."""
    return next((colour for colour in COLOURS if colour in value), value)


def normalise_pair(name: str, value: str) -> str:
    """What becomes of an option of a synthetic goal, which is compared as the pair it is kept as.

    Only a name or value that IS a colour counts as one; any other pair is compared as Python writes it.
    """
    return next((colour for colour in COLOURS if colour in (name, value)), str((name, value)))
