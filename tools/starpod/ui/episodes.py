"""Episodes: the list with its filters, the members of a group side by side, and one episode turn by turn."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import stdev
from typing import Any

from fastapi import Request, Response
from starlette.exceptions import HTTPException

from starpod.trainer.algorithms.filters import Verdict, filter_groups, verdicts
from starpod.trainer.algorithms.sections import FilterConfig
from starpod.trainer.data.episode import Episode, Group, Turn
from starpod.trainer.data.files import BadEpisodes, read_episodes
from starpod.trainer.data.updates import ABOVE, BELOW, TRAINED, TokenRecord, read_tokens, read_verdicts, update_file
from starpod.trainer.rollout.environment import server_words
from starpod.ui.games import COUNTS, remarks
from starpod.ui.index import COUNTED, OUTCOMES, SORTS, Filter
from starpod.ui.page import Site, number, query, render
from starpod.ui.reading import kept_pictures, mapping, read_episode

PAGE = 50
"""Episodes on a page of the list."""
MOST_TOKENS = 1000
"""Rows of a turn's table of tokens."""
KINDS = {"train": "training", "eval": "evaluation", "final": "final evaluation"}


def episodes_page(site: Site, request: Request) -> Response:
    """The episodes of a run that fit a filter."""
    asked = request.query_params
    run = site.run(asked.get("run", ""))
    step = number(request, "step") if asked.get("step") else None
    facets = site.index.facets(run["run"])
    wanted = Filter(
        run["run"], outcome=asked.get("outcome", ""), kind=asked.get("kind", ""), step=step,
        environment=asked.get("environment", ""), seed=asked.get("seed", "").strip(), malformed="malformed" in asked,
        truncated="truncated" in asked, text=asked.get("text", "").strip(), sort=asked.get("sort", "newest"),
        **_part_bits(facets["parts"], asked.get("part", "")),
    )  # fmt: skip
    page = number(request, "page", 1, least=1)
    place = {"first": (page - 1) * PAGE, "most": PAGE}
    if wanted.text:
        rows, count = site.index.search(wanted, **place)
    else:
        count = site.index.count(wanted)
        rows = site.index.episodes(wanted, **place, count=count)
    kept = {name: value for name, value in asked.items() if name not in ("page",) and value}
    return render(
        "episodes.html", site=site, run=run, rows=rows, count=count, page=page, pages=-(-count // PAGE), wanted=wanted,
        many=bool(wanted.text) and count > COUNTED,
        pages_url=lambda place: query("/episodes", **kept, page=place), facets=facets, part=asked.get("part", ""),
        outcomes=OUTCOMES, sorts=SORTS, kinds=KINDS, link=episode_link, group_link=group_link,
    )  # fmt: skip


def _part_bits(parts: Sequence[tuple[str, int]], asked: str) -> dict[str, int]:
    """The fields of a filter for `paid NAME` or `fined NAME`, as the page gives it; none for what the run has not."""
    sign, _, name = asked.partition(" ")
    bit = dict(parts).get(name)
    return {sign: 1 << bit} if sign in ("paid", "fined") and bit is not None else {}


def episode_link(run: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    return query("/episode", run=run["path"], file=row["name"], group=row["grp"], member=row["member"])


def group_link(run: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    return query("/group", run=run["path"], file=row["name"], group=row["grp"])


# --- a group ----------------------------------------------------------------------------------------------------------


def group_page(site: Site, request: Request) -> Response:
    """The members of a group side by side, and where each leaves the way of the first."""
    run = site.run(request.query_params.get("run", ""))
    name, grp = request.query_params.get("file", ""), number(request, "group")
    rows = site.index.group(run["run"], name, grp)
    if not rows:
        raise HTTPException(404, f"There is no group {grp} in {name or 'no file'}: the oldest rollouts are removed.")
    path = site.folder(run["path"]) / "episodes" / rows[0]["name"]
    members = [{**row, "episode": read_episode(path, row["start"])} for row in rows]
    first = members[0]["episode"]["turns"]
    for member in members:
        turns = member["episode"]["turns"]
        member["parts_at"], member["parts_by"] = _parting(first, turns)
    verdict, kept, groups = _filter_verdict(path, grp) if rows[0]["kind"] == "train" else (None, 0, 0)
    return render(
        "group.html", site=site, run=run, name=name, grp=grp, members=members, link=episode_link,
        verdict=verdict, kept=kept, groups=groups,
        kind=KINDS.get(rows[0]["kind"], rows[0]["kind"]),
        deviation=stdev(row["reward"] for row in rows) if len(rows) > 1 else 0.0,
    )  # fmt: skip


def _parting(first: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]) -> tuple[int | None, str]:
    """The place of the turn at which a member leaves the way of the first, and by what; None where it does not."""
    for place, (one, other) in enumerate(zip(first, turns, strict=False)):
        if one["observation"] != other["observation"]:
            return place, "another state"
        if one["actions"] != other["actions"]:
            return place, "another action"
    return None, ""


def _filter_verdict(path: Path, grp: int) -> tuple[Verdict | None, int, int]:
    """What the run's filter made of the group, and how many groups of its file it kept, of how many.

    As it was noted in training; computed again where it was not, for a run that was cut off in its update.
    """
    found = read_verdicts(update_file(path))
    try:
        if not found:
            config = FilterConfig(**mapping(path.parent.parent / "config.yaml", [])["algorithm"]["filter"])
            groups: dict[int, Group] = {}
            for episode in read_episodes(path):
                group = groups.setdefault(episode.group, Group(episode.group, []))
                (group.failed if episode.failed else group.episodes).append(episode)
            found = verdicts(config, list(groups.values()), filter_groups(config, list(groups.values())))
    except (BadEpisodes, KeyError, TypeError, ValueError):
        return None, 0, 0
    return found.get(grp), sum(verdict.kept for verdict in found.values()), len(found)


# --- an episode -------------------------------------------------------------------------------------------------------


def episode_page(site: Site, request: Request) -> Response:
    """One episode, turn by turn, and its sampled tokens."""
    run = site.run(request.query_params.get("run", ""))
    name = request.query_params.get("file", "")
    grp, member = number(request, "group"), number(request, "member")
    row = site.index.episode(run["run"], name, grp, member)
    if row is None:
        raise HTTPException(404, f"There is no such episode in {name or 'no file'}: the oldest rollouts are removed.")
    folder = site.folder(run["path"])
    episode = Episode.from_json(read_episode(folder / "episodes" / row["name"], row["start"]))
    tokenizer = _tokenizer(folder)
    learnt = (
        read_tokens(update_file(folder / "episodes" / row["name"]), grp, member) if row["kind"] == "train" else None
    )
    turns, total, before = [], 0.0, 0
    for place, turn in enumerate(episode.turns):
        total += turn.reward
        own = place >= episode.shared  # the turns of a parent are trained on there
        tokens = _tokens(turn, before, tokenizer, learnt if own else None)
        before += len(turn.reply) if own else 0
        parts = {part: value for part, value in turn.parts.items() if value}
        clipped = sum(bool(token["clipped"]) for token in tokens)
        turns.append(
            {
                "turn": turn,
                "total": total,
                "tokens": tokens,
                "clipped": clipped,
                "learnt": bool(tokens) and "ratio" in tokens[0],
                "parts": parts,
                "remarks": remarks(turn),
            }
        )
    siblings = site.index.group(run["run"], name, grp)
    update = "" if row["kind"] != "train" else _update(folder / "episodes" / row["name"], grp, learnt)
    place = next(index for index, each in enumerate(siblings) if each["member"] == member)
    return render(
        "episode.html", site=site, run=run, row=row, episode=episode, turns=turns,
        kind=KINDS.get(row["kind"], row["kind"]),
        members=len(siblings), before=siblings[place - 1] if place else None,
        after=siblings[place + 1] if place + 1 < len(siblings) else None, link=episode_link, group_link=group_link,
        readable=tokenizer is not None, update=update, most_tokens=MOST_TOKENS,
        pictures=site.games is not None or bool(kept_pictures(folder, row["name"], grp, member)),
        token=site.guard.token("fork") if site.games else "",
        policies=site.games.policies(checkpoint=row["tokens"] > 0) if site.games else {}, counts=COUNTS,
        call=_call(site.index.folder, folder, episode),
    )  # fmt: skip


def _call(runs: Path, folder: Path, episode: Episode) -> str:
    """The call of `starpod ui` that has a server of the episode's environment."""
    config = mapping(folder / "config.yaml", [])
    environment = (config.get("environments") or {}).get(episode.task) or config.get("environment") or {}
    addresses, serve = environment.get("addresses") or [], environment.get("serve") or []
    server = f"--address {','.join(addresses)}" if addresses else server_words(episode.environment, serve)
    return f"starpod ui {shlex.quote(str(runs))} {server}"


def _update(path: Path, grp: int, learnt: TokenRecord | None) -> str:
    """Says what the update of its step made of a training episode; empty where that is not known."""
    if learnt is not None:
        return "trained on"
    verdict = read_verdicts(update_file(path)).get(grp)
    return "" if verdict is None or verdict.kept else "left out of the update"


def _tokens(turn: Turn, before: int, tokenizer: Any, learnt: TokenRecord | None) -> list[dict[str, Any]]:
    """The sampled tokens of a turn. before: those of earlier turns. learnt: what the update made of the episode."""
    found = []
    for place, (token, logprob, version) in enumerate(zip(turn.reply, turn.logprobs, turn.versions, strict=False)):
        known: dict[str, Any] = {
            "id": token,
            "text": tokenizer.decode([token], skip_special_tokens=False) if tokenizer else str(token),
            "probability": math.exp(min(logprob, 0.0)),
            "version": version,
            "clipped": "",
        }
        if learnt is not None and before + place < len(learnt.marks):
            marks = int(learnt.marks[before + place])
            known |= {
                "advantage": float(learnt.advantages[before + place]),
                "ratio": float(learnt.ratios[before + place]),
                "clipped": "below" if marks & BELOW else "above" if marks & ABOVE else "",
                "trained": bool(marks & TRAINED),
            }
        found.append(known)
    return found


def _tokenizer(folder: Path) -> Any:
    """Loads the tokenizer of the run's model; None where the run has none of its own, or it cannot be read here."""
    for path in [folder / "initial" / "tokenizer.json", *sorted(folder.glob("checkpoints/*/**/tokenizer.json"))[-1:]]:
        try:
            return _load_tokenizer(str(path), path.stat().st_mtime_ns)
        except (OSError, ImportError):
            continue
    return None


@lru_cache(maxsize=8)
def _load_tokenizer(path: str, changed: int) -> Any:
    from tokenizers import Tokenizer  # in the extra `trainer`; without it tokens are numbers

    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # what the library raises for a damaged file
        raise OSError(str(error)) from error
