"""Picture of the desk: calendar, files, sent mails and checklist."""

from __future__ import annotations

from collections.abc import Mapping

from starpod.env_server import Canvas

from .office import CLOSES, DAYS, OPENS, Event
from .tasks import Changes

_INK, _PAPER, _LINE = (40, 44, 56), (253, 252, 248), (214, 210, 200)
_DAY, _HOUR, _TOP = 112, 34, 56


def draw(changes: Changes, new_files: frozenset[str], kept: frozenset[int], criteria: Mapping[str, bool]) -> bytes:
    """Draw a PNG of 880 x 470 pixels.

    Args:
        new_files: files that were added; they are highlighted.
        kept: numbers of the initial meetings; others are highlighted.
    """
    canvas = Canvas(880, 470, (176, 140, 104))
    canvas.box(14, 14, 614, 356, _PAPER, radius=10)
    for column, day in enumerate(DAYS):
        canvas.text(48 + column * _DAY + _DAY / 2, 36, day, _INK, size=15)
    for hour in range(OPENS, CLOSES):
        y = _TOP + (hour - OPENS) * _HOUR
        canvas.text(32, y + 8, str(hour), (130, 126, 120), size=12)
        canvas.box(48, y, 608, y + 1, _LINE)
    for number, event in changes.events.items():
        _draw_event(canvas, event, (96, 136, 196) if number in kept else (72, 168, 110))
    canvas.box(628, 14, 866, 176, _PAPER, radius=10)
    canvas.text(747, 32, "Files", _INK, size=15)
    for row, name in enumerate(list(changes.files)[-7:]):
        colour = (40, 140, 84) if name in new_files else _INK
        canvas.text(747, 54 + row * 18, _clean(name), colour, size=13, width=220)
    canvas.box(628, 188, 866, 356, _PAPER, radius=10)
    canvas.text(747, 206, "Sent", _INK, size=15)
    for row, mail in enumerate(changes.sent[-4:]):
        canvas.text(747, 230 + row * 32, _clean(mail.other), (96, 100, 110), size=11, width=220)
        canvas.text(747, 244 + row * 32, _clean(mail.body), _INK, size=12, width=220)
    canvas.box(14, 370, 866, 456, (248, 240, 186), radius=4)
    for index, (name, is_met) in enumerate(criteria.items()):
        x, y = 40 + index % 5 * 168, 396 + index // 5 * 34
        canvas.box(x - 14, y - 8, x + 2, y + 8, (60, 150, 90) if is_met else (206, 200, 170), radius=4)
        canvas.text(x + 78, y, name.replace("_", " "), _INK, size=12, width=140)
    return canvas.png()


def _draw_event(canvas: Canvas, event: Event, colour: tuple[int, int, int]) -> None:
    left = 48 + DAYS.index(event.day) * _DAY
    top = _TOP + (event.start - OPENS) * _HOUR
    canvas.box(left + 3, top + 2, left + _DAY - 3, top + event.hours * _HOUR - 2, colour, radius=5)
    canvas.text(left + _DAY / 2, top + 12, _clean(event.title), (255, 255, 255), size=12, width=_DAY - 12)
    canvas.text(left + _DAY / 2, top + 25, _clean(event.attendee), (232, 238, 246), size=10, width=_DAY - 12)


def _clean(text: str) -> str:
    clean_text = "".join(character if character.isprintable() else " " for character in text)
    return clean_text if len(clean_text) <= 40 else clean_text[:39] + "…"
