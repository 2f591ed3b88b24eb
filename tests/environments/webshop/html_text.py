"""Reads html in tests: the visible texts as the original's text environment takes them, the forms, the elements."""

from html.parser import HTMLParser

_VOID = {"meta", "input", "img", "br", "link", "hr", "path", "circle", "rect"}
_UNSEEN = {"style", "script", "head", "title", "noscript"}


class Reader(HTMLParser):
    """texts: the visible text nodes, stripped. tags: (tag, attributes) of all. Fails on tags that do not nest.

    A node that is only blanks with a line break is no text; other blanks are an empty one.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self._text = ""
        self.feed(page)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._end_text()
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute is given twice: {attrs}"
        assert tag != "form" or "form" not in self._open, "a form in a form"
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._end_text()
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self._end_text()
        assert self._open and self._open[-1] == tag, f"</{tag}> in {self._open}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._text += data

    def _end_text(self) -> None:
        text, self._text = self._text, ""
        if text and not _UNSEEN & set(self._open) and (text.strip(" \t\n\f\r") or "\n" not in text):
            self.texts.append(text.strip())

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        """The attributes of the elements with this tag and these attributes (`class_` for class, as one of several)."""
        name = wanted.pop("class_", "")
        return [
            attrs
            for found, attrs in self.tags
            if found == tag
            and (not name or name in (attrs.get("class") or "").split())
            and all(attrs.get(key) == value for key, value in wanted.items())
        ]

    def buttons(self) -> list[str]:
        """The actions that can be clicked, in order."""
        return [str(attrs["value"]) for attrs in self.all("button", name="action") if "disabled" not in attrs]
