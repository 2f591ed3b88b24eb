"""Episodes: the list with its filters, and one episode turn by turn."""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from starpod.client import StarpodError
from starpod.remote.game import Impossible
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.updates import ABOVE, BELOW, TRAINED, TokenRecord, read_tokens, read_verdicts, update_file
from starpod.trainer.output.words import remarks
from starpod.trainer.rollout.environment import server_words
from starpod.ui.continuing import COUNTS
from starpod.ui.fleet import picture
from starpod.ui.index import COUNTED, OUTCOMES, SORTS, Filter
from starpod.ui.page import LiveSite, number, query, render
from starpod.ui.reading import load_episode, mapping

PAGE = 50
"""Number of episodes on a page of the list."""
MOST_TOKENS = 1000
"""Maximum number of rows in a turn's table of tokens."""
PICTURE = 260
"""Maximum width and height of a turn's picture, in pixels."""
PATIENCE = 1.0
"""Seconds that a page waits for its first picture. After that, it links to pictures that may turn out not to exist."""
KINDS = {"train": "training", "eval": "evaluation", "final": "final evaluation"}


def episodes_page(site: LiveSite, request: Request) -> Response:
    """List the episodes of a run that match a filter."""
    values = request.query_params
    run = site.run(values.get("run", ""))
    step = number(request, "step") if values.get("step") else None
    facets = site.index.facets(run["run"])
    choice = Filter(
        run["run"], outcome=values.get("outcome", ""), kind=values.get("kind", ""), step=step,
        environment=values.get("environment", ""), seed=values.get("seed", "").strip(), malformed="malformed" in values,
        truncated="truncated" in values, text=values.get("text", "").strip(), sort=values.get("sort", "newest"),
        **_part_bits(facets["parts"], values.get("part", "")),
    )  # fmt: skip
    page = number(request, "page", 1, minimum=1)
    window = {"first": (page - 1) * PAGE, "limit": PAGE}
    if choice.text:
        rows, count = site.index.search(choice, **window)
    else:
        count = site.index.count(choice)
        rows = site.index.episodes(choice, **window, count=count)
    fields = {name: value for name, value in values.items() if name not in ("page",) and value}
    newest_rows: list[dict[str, Any]] = []
    if run["status"] == "running":  # with this the page notices newer episodes
        is_first_page = choice.sort == "newest" and page == 1
        newest_rows = rows[:1] if is_first_page else site.index.episodes(replace(choice, sort="newest"), limit=1)
    return render(
        "episodes.html", site=site, run=run, rows=rows, count=count, page=page, pages=-(-count // PAGE), wanted=choice,
        many=bool(choice.text) and count > COUNTED, here=query("/episodes", **fields),
        newest=newest_rows[0]["id"] if newest_rows else 0,
        pages_url=lambda target: query("/episodes", **fields, page=target), facets=facets, part=values.get("part", ""),
        outcomes=OUTCOMES, sorts=SORTS, kinds=KINDS, link=episode_link, group_link=group_link,
    )  # fmt: skip


def _part_bits(parts: Sequence[tuple[str, int]], value: str) -> dict[str, int]:
    """Return the filter's field for a form value `paid NAME` or `fined NAME`; empty without such a reward part."""
    sign, _, name = value.partition(" ")
    bit = dict(parts).get(name)
    return {sign: 1 << bit} if sign in ("paid", "fined") and bit is not None else {}


def episode_link(run: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    return query("/episode", run=run["path"], file=row["name"], group=row["grp"], member=row["member"])


def picture_link(run: Mapping[str, Any], row: Mapping[str, Any], turn: int) -> str:
    """Return the address of the picture of the state before a turn, counted from 0."""
    return query("/picture", run=run["path"], file=row["name"], group=row["grp"], member=row["member"], turn=turn)


def group_link(run: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    return query("/group", run=run["path"], file=row["name"], group=row["grp"])


# --- an episode -------------------------------------------------------------------------------------------------------


Page = Callable[[LiveSite, Request, bytes | None], Response]


def with_pictures(page: Page) -> Callable[[LiveSite, Request], Awaitable[Response]]:
    """Return a handler that calls a page with the first picture of its episode or group.

    The picture is None if there are no pictures; the page then links to none. It is empty if drawing takes too long.
    """

    async def draw(site: LiveSite, request: Request) -> bytes | None:
        parameters = {"member": "0", **request.query_params, "turn": "0"}
        try:
            response = await picture(site, Request({**request.scope, "query_string": urlencode(parameters).encode()}))
        except (HTTPException, Impossible, StarpodError):
            return None
        return bytes(response.body)

    async def call(site: LiveSite, request: Request) -> Response:
        drawing = asyncio.ensure_future(draw(site, request))
        done, _ = await asyncio.wait({drawing}, timeout=PATIENCE)
        return await asyncio.to_thread(page, site, request, drawing.result() if done else b"")

    return call


def episode_page(site: LiveSite, request: Request, drawn: bytes | None) -> Response:
    """Show one episode turn by turn, with its sampled tokens.

    Args:
        request: its query names the episode by `run`, `file`, `group` and `member`.
        drawn: the episode's first picture, as in `with_pictures`; None: the page has no pictures.
    """
    run = site.run(request.query_params.get("run", ""))
    name = request.query_params.get("file", "")
    grp, member = number(request, "group"), number(request, "member")
    row = site.index.episode(run["run"], name, grp, member)
    if row is None:
        raise HTTPException(404, f"There is no such episode in {name or 'no file'}: the oldest rollouts are removed.")
    folder = site.folder(run["path"])
    episode = load_episode(folder / "episodes" / row["name"], row["start"])
    tokenizer = _tokenizer(folder)
    learnt = (
        read_tokens(update_file(folder / "episodes" / row["name"]), grp, member) if row["kind"] == "train" else None
    )
    turns, total, before = [], 0.0, 0
    for index, turn in enumerate(episode.turns):
        total += turn.reward
        is_own = index >= episode.shared  # turns shared with a parent are trained on as the parent's
        tokens = _tokens(turn, before, tokenizer, learnt if is_own else None)
        before += len(turn.reply) if is_own else 0
        parts = {name: value for name, value in turn.parts.items() if value}
        clipped_count = sum(bool(token["clipped"]) for token in tokens)
        turns.append(
            {
                "turn": turn,
                "total": total,
                "tokens": tokens,
                "clipped": clipped_count,
                "learnt": bool(tokens) and "ratio" in tokens[0],
                "parts": parts,
                "remarks": remarks(turn),
                "prompt": _decode(turn.prompt, tokenizer),
            }
        )
    siblings = site.index.group(run["run"], name, grp)
    update = "" if row["kind"] != "train" else _update(folder / "episodes" / row["name"], grp, learnt)
    index = next(index for index, sibling in enumerate(siblings) if sibling["member"] == member)
    return render(
        "episode.html", site=site, run=run, row=row, episode=episode, turns=turns,
        kind=KINDS.get(row["kind"], row["kind"]),
        members=len(siblings), before=siblings[index - 1] if index else None,
        after=siblings[index + 1] if index + 1 < len(siblings) else None, link=episode_link, group_link=group_link,
        picture_link=picture_link,
        readable=tokenizer is not None, update=update, most_tokens=MOST_TOKENS,
        size=None if drawn is None else _size(drawn),
        token=site.guard.token("fork") if site.games else "",
        policies=site.continuing.policies.choices(run=folder if row["tokens"] > 0 else None) if site.continuing else {},
        counts=COUNTS, jobs=site.jobs.of_episode(episode_link(run, row)) if site.jobs else (),
        call=_call(site.index.folder, folder, episode),
    )  # fmt: skip


def _size(png: bytes) -> tuple[int, int]:
    """Return the width and height at which to show a picture, in pixels: its own, scaled down to `PICTURE` at most.

    An empty picture has not been drawn yet and gets `PICTURE`.
    """
    width, height = (int.from_bytes(png[offset : offset + 4]) or PICTURE for offset in (16, 20))
    scale = min(1.0, PICTURE / max(width, height))
    return round(width * scale), round(height * scale)


def _call(runs: Path, folder: Path, episode: Episode) -> str:
    """Return a command line of `starpod ui` with a server for the episode's environment."""
    config = mapping(folder / "config.yaml", [])
    environment = (config.get("environments") or {}).get(episode.task) or config.get("environment") or {}
    addresses, serve = environment.get("addresses") or [], environment.get("serve") or []
    server = server_words(episode.environment, serve)
    if addresses:
        server = shlex.join(["--address", ",".join(map(str, addresses))])
    return f"starpod ui {shlex.quote(str(runs))} {server}"


def _update(path: Path, grp: int, record: TokenRecord | None) -> str:
    """Say whether a training episode was part of its step's update; empty if unknown."""
    if record is not None:
        return "trained on"
    verdict = read_verdicts(update_file(path)).get(grp)
    return "" if verdict is None or verdict.kept else "left out of the update"


def _tokens(turn: Turn, before: int, tokenizer: Any, record: TokenRecord | None) -> list[dict[str, Any]]:
    """Describe the sampled tokens of a turn.

    Args:
        before: number of tokens in earlier turns of the episode.
        record: advantages and ratios that the update computed for the episode; None if unknown.
    """
    tokens = []
    for index, (token, logprob, version) in enumerate(zip(turn.reply, turn.logprobs, turn.versions, strict=False)):
        fields: dict[str, Any] = {
            "id": token,
            "text": _decode([token], tokenizer),
            "probability": math.exp(min(logprob, 0.0)),
            "version": version,
            "clipped": "",
        }
        if record is not None and before + index < len(record.marks):
            marks = int(record.marks[before + index])
            fields |= {
                "advantage": float(record.advantages[before + index]),
                "ratio": float(record.ratios[before + index]),
                "clipped": "below" if marks & BELOW else "above" if marks & ABOVE else "",
                "trained": bool(marks & TRAINED),
            }
        tokens.append(fields)
    return tokens


def _decode(ids: Sequence[int], tokenizer: Any) -> str:
    """Return tokens as text, or as numbers if there is no tokenizer."""
    return tokenizer.decode(ids, skip_special_tokens=False) if tokenizer else " ".join(map(str, ids))


def _tokenizer(folder: Path) -> Any:
    """Load the tokenizer of the run's model; None if the run's folder has none, or it cannot be read here."""
    for path in [folder / "initial" / "tokenizer.json", *sorted(folder.glob("checkpoints/*/**/tokenizer.json"))[-1:]]:
        try:
            return _load_tokenizer(str(path), path.stat().st_mtime_ns)
        except (OSError, ImportError):
            continue
    return None


@lru_cache(maxsize=8)
def _load_tokenizer(path: str, modified: int) -> Any:
    from tokenizers import Tokenizer  # in the extra `trainer`; without it tokens are numbers

    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library's exception for a damaged file
        raise OSError(str(error)) from error
