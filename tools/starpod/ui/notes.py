"""Tags and a note that people write on the page of a run. They are kept in notes.json in its folder."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from starpod.remote.game import Impossible
from starpod.trainer.output.files import CannotWrite, write_atomic
from starpod.trainer.output.run_folder import RunFolder
from starpod.ui.fleet import posted
from starpod.ui.page import LiveSite, run_link
from starpod.ui.reading import LONGEST_NOTE, LONGEST_TAG, MOST_TAGS

_writing = threading.Lock()


async def save_notes(site: LiveSite, request: Request) -> Response:
    """Save the tags and the note from the form of a run's page."""
    form = await posted(site, request, "notes")
    path, note = form.get("run", ""), form.get("note", "").replace("\r\n", "\n").strip()
    tags = [" ".join(tag.split()) for tag in form.get("tags", "").split(",") if tag.strip()]
    if len(tags) > MOST_TAGS or any(len(tag) > LONGEST_TAG for tag in tags):
        raise HTTPException(
            400, f"A run has at most {MOST_TAGS} tags of {LONGEST_TAG} characters, with commas between them."
        )
    if len(note) > LONGEST_NOTE:
        raise HTTPException(400, f"A note has at most {LONGEST_NOTE:,} characters; this one has {len(note):,}.")
    await asyncio.to_thread(_write, site, path, json.dumps({"tags": tags, "note": note}, ensure_ascii=False) + "\n")
    return RedirectResponse(run_link(path), 303)


def _write(site: LiveSite, path: str, text: str) -> None:
    """Write the notes of a run. Raises HTTPException 404, Impossible."""
    site.run(path)
    file: Path = RunFolder(site.folder(path)).notes
    try:
        with _writing:
            write_atomic(file, text)
    except CannotWrite as error:
        raise Impossible(f"{file} cannot be written: {error.strerror}.") from None
