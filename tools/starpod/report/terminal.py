"""What others wrote, on a terminal: seen as it is, never obeyed.

Observations, actions, titles and errors come from environments, models and servers. An escape sequence among them could
clear the screen, write the clipboard, or show another action than the one that was played.
"""

from __future__ import annotations

# The pictures that Unicode has for control characters; and what turns text around or hides it.
_SEEN = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_SEEN |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
_SEEN |= dict.fromkeys((0x200E, 0x200F, 0x061C, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)
_SEEN |= dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)


def visible(text: str) -> str:
    """The text with every control character replaced by a picture of it; line breaks and tabs stay."""
    return text.translate(_SEEN)
