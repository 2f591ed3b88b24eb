"""Pages of the live servers: their state, playing in the browser, and continuing from any turn of an episode."""

from __future__ import annotations

import asyncio
import base64
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from starpod.client import BadArgument, EpisodeOver, Limits, OutOfOrder, ToolCall
from starpod.client.pool.replica import Replica
from starpod.remote.catalog import no_answer
from starpod.remote.game import SEPARATOR, Impossible, parse_turn
from starpod.report import form as forms
from starpod.serving.http import refuse_encoding
from starpod.serving.sockets import parse_whole
from starpod.trainer.agents.base import Task
from starpod.trainer.data.episode import Episode
from starpod.trainer.evaluation.folder import EvaluationFolder
from starpod.ui import watching
from starpod.ui.continuing import COUNTS, Continuing
from starpod.ui.evaluation import read_plan
from starpod.ui.games import Games, LiveGame, path_of
from starpod.ui.jobs import TurnJobs
from starpod.ui.page import LiveSite, query, render
from starpod.ui.reading import find_run, in_play, kept_pictures, last_metrics, load_episode, mapping
from starpod.ui.saving import KINDS, Saved, held_out, save, saved
from starpod.v1 import environment_pb2 as pb

KEYS = {"up": "ArrowUp", "down": "ArrowDown", "left": "ArrowLeft", "right": "ArrowRight"}
_MAX_SEED = 2**64 - 1


def games_of(site: LiveSite) -> Games:
    """Return the site's live sessions. Raises HTTPException 404 if the site has no server."""
    return continuing_of(site).games


def continuing_of(site: LiveSite) -> Continuing:
    """Return the site's continuations. Raises HTTPException 404 if the site has no server."""
    if site.continuing is None:
        raise HTTPException(404, "No server was named: start `starpod ui --address HOST:PORT`.")
    return site.continuing


def jobs_of(site: LiveSite) -> TurnJobs:
    """Return the site's jobs. Raises HTTPException 404 if the site has no server."""
    continuing_of(site)
    assert site.jobs is not None
    return site.jobs


async def fleet_page(site: LiveSite, request: Request) -> Response:
    """List the environments that can be played, the servers that host them, and the site's sessions."""
    games = games_of(site)
    fleet = await games.fleet()
    specs = await fleet.describe()
    trips = await watching.round_trips(fleet)
    servers = [_server(replica, games, trips.get(replica.address)) for replica in fleet.replicas]
    return render(
        "fleet.html", site=site, servers=servers, specs=specs, recoveries=fleet.recoveries, games=games.all(),
        running=await asyncio.to_thread(_running, site), jobs=len(jobs_of(site).all()),
    )  # fmt: skip


def _running(site: LiveSite) -> list[tuple[str, float | None]]:
    """Return the runs that are training, each with its number of recovered sessions (None if it reports none)."""
    paths = [run["path"] for run in site.index.runs() if run["status"] == "running"]
    folders = ((path, find_run(site.index.folder, path)) for path in paths)
    return [(path, last_metrics(folder).get("collect/recoveries")) for path, folder in folders if folder]


def _server(replica: Replica, games: Games, seconds: float | None) -> dict[str, Any]:
    """Return what the page shows about a server. seconds: duration of a round trip."""
    description = replica.description or pb.DescribeResponse()
    steps = games.steps(replica.address)
    return {
        "address": replica.address,
        "state": "draining" if replica.draining else "ready" if replica.ready else "away",
        "why": "" if replica.ready or replica.draining else no_answer(replica.address, str(replica.error)),
        "ready": replica.ready,
        "name": f"{description.server_name} {description.server_version}",
        "load": replica.load,
        "most": description.limits.max_sessions,
        "ours": len(replica.sessions),
        "seconds": seconds,
        "lease": description.limits.default_lease_seconds,
        "longest": description.limits.max_lease_seconds,
        "instance": replica.instance_id,
        "steps": len(steps),
        "p50": float(np.percentile(steps, 50)) if steps else None,
        "p99": float(np.percentile(steps, 99)) if steps else None,
    }


async def environment_page(site: LiveSite, request: Request) -> Response:
    """Show the form that starts a game, filled in from the query."""
    return await _form_page(site, request.path_params["environment"], request.query_params)


async def _form_page(site: LiveSite, environment: str, values: Mapping[str, str], problem: str = "") -> Response:
    """Show the form that starts a game. problem: why the submitted values, which are shown again, were refused."""
    spec = await games_of(site).spec(environment)
    return render(
        "environment.html", site=site, status=400 if problem else 200, spec=spec, problem=problem,
        seed=values.get("seed", ""), token=site.guard.token("play"),
        opened=bool(problem) or any(name.startswith("option-") for name in values),
        fields=forms.fill_in(forms.fields(spec.options_schema_json), values, whole=bool(problem)),
    )  # fmt: skip


async def start_game(site: LiveSite, request: Request) -> Response:
    """Open a session with the form's options."""
    form = await posted(site, request, "play")
    environment = request.path_params["environment"]
    games = games_of(site)
    spec = await games.spec(environment)
    try:
        options = forms.changed_options(forms.fields(spec.options_schema_json), form)
    except ValueError as error:
        return await _form_page(site, environment, form, str(error))
    seed = parse_whole(form.get("seed", "").strip(), _MAX_SEED)
    if form.get("seed", "").strip() and seed is None:
        return await _form_page(site, environment, form, "The seed is a whole number from 0 to 2^64 - 1.")
    try:
        game = await games.open(environment, options=options, seed=seed)
    except BadArgument as error:
        return await _form_page(site, environment, form, str(error))
    return to_game(game)


async def game_page(site: LiveSite, request: Request) -> Response:
    """Show a live session: its observation, picture and possible actions."""
    return await _game_page(site, games_of(site).get(request.path_params["game"]), request.query_params)


async def _game_page(site: LiveSite, game: LiveGame, query_values: Mapping[str, str], problem: str = "") -> Response:
    """Show a live session. problem: why the last action was refused; empty if there was none."""
    games, continuing = games_of(site), continuing_of(site)
    picture = await game.picture("png", "text")
    text = game.session.observation.text
    choices = game.choices
    keys = {name: KEYS.get(name.lower(), str(index) if index < 10 else "") for index, name in enumerate(choices, 1)}
    return render(
        "game.html", site=site, status=409 if problem else 200, game=game, session=game.session, seen=text,
        choices=choices, keys=keys,
        image=base64.b64encode(picture).decode() if isinstance(picture, bytes) else "",
        drawn=picture if isinstance(picture, str) and picture.rstrip() != text.rstrip() else "",
        hint=game.hint if "hint" in query_values else "", saved=_saved_file(site, query_values, game),
        notice=problem or _NOTICES.get(query_values.get("notice", ""), ""),
        token=site.guard.token(game.id), python=game.python(games.address), counts=COUNTS,
        policies=continuing.policies.choices(game.spec, game.run), trees=continuing.of(game),
        held_out=held_out(game.episode.seed, game.run),
        free=bool(game.spec.action_space.grammar or game.spec.action_space.tools or not choices),
        tools=[(tool, forms.arguments(tool.parameters_schema_json)) for tool in game.spec.action_space.tools],
    )  # fmt: skip


def _saved_file(site: LiveSite, query_values: Mapping[str, str], game: LiveGame) -> Saved | None:
    kind = query_values.get("saved", "")
    return saved(site.index.folder, kind, game.spec.id) if kind in KINDS else None


_NOTICES = {
    "moved": "The session had changed since the page was loaded, so nothing was done.",
    "over": "The episode is over. Nothing was done.",
}


async def game_action(site: LiveSite, request: Request) -> Response:
    """Carry out a form of the game's page: act, undo, fork, branch, save, again or close."""
    games = games_of(site)
    game = games.get(request.path_params["game"])
    form = await posted(site, request, game.id)
    async with game.lock:
        # After a double click or the back button, the form belongs to an earlier turn.
        if form.get("turn") != str(len(game.turns)):
            return to_game(game, notice="moved")
        command = request.path_params["what"]
        try:
            return await _do(site, games, game, command, form)
        except (Impossible, BadArgument) as error:
            return await _game_page(site, game, {}, str(error))


async def back_to_game(site: LiveSite, request: Request) -> Response:
    """Redirect to the session's page when the page of a refused form is reloaded."""
    return to_game(games_of(site).get(request.path_params["game"]))


async def _do(site: LiveSite, games: Games, game: LiveGame, what: str, form: Mapping[str, str]) -> Response:
    """Carry out one action of a form. Raises HTTPException, Impossible, StarpodError."""
    match what:
        case "act":
            await _act(game, form)
            games.note_step_time(game.session.address, game.episode.turns[-1:])
        case "undo":
            await game.undo(await games.fleet())
        case "fork":
            return to_game(await games.keep(await game.fork()))
        case "again":
            return to_game(await games.open(game.spec.id, options=game.options))
        case "branch":
            continuing = continuing_of(site)
            policy, count = continuation(form, continuing.policies.choices(game.spec, game.run))
            if count == 1:
                await continuing.go_on(game, policy)
            else:
                await continuing.branch(game, policy, count)
        case "save":
            kind = form.get("kind", "")
            if kind not in KINDS:
                raise HTTPException(400, f"Save one of {', '.join(KINDS)}.")
            await save(games, site.index.folder, kind, game)
            return to_game(game, saved=kind)
        case "close":
            await games.forget(game)
            return RedirectResponse("/fleet", 303)
        case _:
            raise HTTPException(404)
    return to_game(game)


async def _act(game: LiveGame, form: Mapping[str, str]) -> None:
    """Play one turn: typed text, or a tool call whose arguments are form fields. Raises Impossible, StarpodError."""
    if not (name := form.get("tool", "")):
        await game.act(parse_turn(form.get("action", "").replace("\r\n", "\n"), game.spec))
        return
    fields = {tool.name: forms.arguments(tool.parameters_schema_json) for tool in game.spec.action_space.tools}
    if (tool_fields := fields.get(name)) is None:
        raise Impossible(f"{game.spec.id} has no tool {name!r} whose arguments are fields.")
    try:
        call = ToolCall(name, forms.changed_options(tool_fields, form))
    except ValueError as error:
        raise Impossible(f"{name}: {error}.") from None
    await game.act([call])


def continuation(form: Mapping[str, str], policies: Mapping[str, str]) -> tuple[str, int]:
    """Return the policy and the number of continuations that a form asks for. Raises HTTPException 400."""
    policy, count = form.get("policy", ""), parse_whole(form.get("count", ""), max(COUNTS))
    if policy not in policies or not count:
        raise HTTPException(400, f"Choose one of {', '.join(policies)} and 1 to {max(COUNTS)} continuations.")
    return policy, count


# --- sessions of others -----------------------------------------------------------------------------------------------


async def sessions_page(site: LiveSite, request: Request) -> Response:
    """List a run's current sessions, with links to watch them. The run reports them while this page is open."""
    run = site.run(request.query_params.get("run", ""))
    info = in_play(site.folder(run["path"])) if run["status"] == "running" else None
    call = ["starpod", "ui", str(site.index.folder), "--address", ",".join(info["servers"])] if info else []
    ours = {replica.address for replica in (await site.games.fleet()).replicas} if site.games and info else set()
    return render(
        "sessions.html", site=site, run=run, activity=info, reached=bool(info and ours & set(info["servers"])),
        call=shlex.join(call),
    )  # fmt: skip


async def watch_page(site: LiveSite, request: Request) -> Response:
    """Show the current state of any session on the servers, given its id."""
    games = games_of(site)
    session = request.query_params.get("session", "").strip()
    if not session:
        return RedirectResponse("/fleet", 303)
    look = await watching.look(await games.fleet(), session)
    return render(
        "watch.html", site=site, seen=look, token=site.guard.token("watch"),
        image=base64.b64encode(look.picture).decode() if look.picture else "",
        choices=list(look.spec.action_space.names) if look.spec else [],
        notice=_NOTICES.get(request.query_params.get("notice", ""), ""), run=request.query_params.get("run", ""),
    )  # fmt: skip


async def watch_action(site: LiveSite, request: Request) -> Response:
    """Carry out a form of the watch page: act in the session, or open a copy of it."""
    form = await posted(site, request, "watch")
    games, session = games_of(site), form.get("session", "")
    if request.path_params["what"] == "copy":
        return to_game(await games.adopt(await watching.copy(await games.fleet(), session)))
    if request.path_params["what"] != "act":
        raise HTTPException(404)
    epoch, index = (parse_whole(form.get(name, ""), 2**32 - 1) for name in ("epoch", "index"))
    if epoch is None or index is None:
        raise HTTPException(400, "The form lacks the session's state.")
    notice = ""
    try:
        actions = [part.strip() for part in form.get("action", "").split(SEPARATOR)]
        await watching.act(await games.fleet(), session, (epoch, index), actions)
    except EpisodeOver:  # a kind of OutOfOrder
        notice = "over"
    except OutOfOrder:
        notice = "moved"
    return RedirectResponse(query("/watch", session=session, run=form.get("run", ""), notice=notice), 303)


# --- from an episode --------------------------------------------------------------------------------------------------


async def fork_episode(site: LiveSite, request: Request) -> Response:
    """Open a live session in the state before a turn of an episode."""
    form = await posted(site, request, "fork")
    episode, task, link = await asyncio.to_thread(named_episode, site, form)
    turn = parse_whole(form.get("turn", ""), len(episode.turns))
    if turn is None:
        raise HTTPException(400, "The form lacks the turn.")
    games = games_of(site)
    game = await games.replay(episode, path_of(episode, task), turn)
    game.origin, game.run = f"{link}#t{turn + 1}", site.folder(form["run"])
    return to_game(await games.keep(game))


async def picture(site: LiveSite, request: Request) -> Response:
    """Return a picture of the state before a turn of an episode: one kept by the run, or one drawn by the server."""
    parameters = request.query_params
    episode, task, link = await asyncio.to_thread(named_episode, site, parameters)
    index = parse_whole(parameters.get("turn", ""), len(episode.turns))
    frames = await asyncio.to_thread(
        kept_pictures, site.folder(parameters["run"]), parameters["file"], episode.group, episode.member
    )
    if not frames:
        frames = await games_of(site).frames(link, path_of(episode, task))
    if index is None or index >= len(frames):
        raise HTTPException(404, "There is no such turn.")
    return Response(frames[index], media_type="image/png")


def named_episode(site: LiveSite, form: Mapping[str, str]) -> tuple[Episode, Task, str]:
    """Return the episode that a form names, its task, and the address of its page. Raises HTTPException, BadFile.

    Call this in a thread, because it may decompress a long file.
    """
    run = site.run(form.get("run", ""))
    grp, member = (parse_whole(form.get(name, ""), 2**53) for name in ("group", "member"))
    row = None
    if grp is not None and member is not None:
        row = site.index.episode(run["run"], form.get("file", ""), grp, member)
    if row is None:
        raise HTTPException(404, "There is no such episode any more: the oldest rollouts are removed.")
    folder = site.folder(run["path"])
    episode = load_episode(folder / "episodes" / row["name"], row["start"])
    link = query("/episode", run=run["path"], file=row["name"], group=row["grp"], member=row["member"])
    if (evaluation := EvaluationFolder(folder)).exists:
        return episode, read_plan(evaluation).environments[episode.kind].task, link
    config = mapping(folder / "config.yaml", [])
    environment = (config.get("environments") or {}).get(episode.task) or config.get("environment") or {}
    evaluated = environment.get("evaluation") or config.get("evaluation") or {}
    options = dict(environment.get("options") or {})
    if row["kind"] != "train":
        options |= evaluated.get("options") or {}
    limits = Limits(*(environment.get(name) for name in ("max_turns", "max_actions_per_turn", "max_actions")))
    return episode, Task(episode.environment, options=options, limits=limits, name=episode.task), link


async def posted(site: LiveSite, request: Request, purpose: str) -> dict[str, str]:
    """Return the fields of a submitted form. Raises HTTPException if the form is not plain UTF-8 from this site."""
    if problem := refuse_encoding(request.scope["headers"]):
        raise HTTPException(415, f"This form cannot be read: {problem}.")
    form = {name: value for name, value in (await request.form()).items() if isinstance(value, str)}
    if not site.guard.admits(purpose, form.get("csrf", ""), request.headers):
        raise HTTPException(403, "This form is too old, or it did not come from this site. Open the page again.")
    return form


def to_game(game: LiveGame, **values: str) -> Response:
    path = f"/play/session/{quote(game.id)}"
    return RedirectResponse(query(path, **values) if values else path, 303)
