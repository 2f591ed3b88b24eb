"""Pages of continuations: one finds the turn that lost an episode, and one shows a continuation turn by turn."""

from __future__ import annotations

import asyncio
import secrets
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from starpod.serving.sockets import parse_whole
from starpod.trainer.output.words import remarks
from starpod.ui.continuing import COUNTS, Branches, Continuing, PlayedBranch
from starpod.ui.fleet import continuation, continuing_of, jobs_of, named_episode, posted, to_game
from starpod.ui.jobs import TurnValues
from starpod.ui.page import LiveSite, continuation_link, query, render
from starpod.ui.policies import CHECKPOINT
from starpod.ui.saving import held_out, save_demonstration, saved


async def start_job(site: LiveSite, request: Request) -> Response:
    """Start continuations from each turn of an episode. Their page fills while they are played."""
    form = await posted(site, request, "fork")
    episode, task, link = await asyncio.to_thread(named_episode, site, form)
    continuing, folder = continuing_of(site), site.folder(form["run"])
    policies = continuing.policies.choices(run=folder)
    policy, count = continuation(form, policies)
    job = TurnValues(
        secrets.token_urlsafe(9), episode, task, link, form["run"], folder, policy, policies[policy], count
    )
    return RedirectResponse(job_link(jobs_of(site).start(job)), 303)


def job_link(job: TurnValues) -> str:
    return f"/turns/{quote(job.id)}"


async def jobs_page(site: LiveSite, request: Request) -> Response:
    """List the jobs that run, wait or have ended, newest first."""
    jobs = jobs_of(site).all()
    return render("jobs.html", site=site, jobs=jobs, job_link=job_link, live=any(not job.done for job in jobs))


async def job_page(site: LiveSite, request: Request) -> Response:
    """Show the success of continuations from each turn of an episode, while they are played and afterwards."""
    job = jobs_of(site).get(request.path_params["job"])
    verdict, worst_turn = _verdict(job) if job.done and job.trees else ("", -1)
    whose = "the episode's" if job.policy.startswith(CHECKPOINT) else "new"
    return render(
        "turns.html", site=site, job=job, verdict=verdict, worst=worst_turn, token=site.guard.token("turns"),
        seeds=f"with {whose} random seeds",
    )  # fmt: skip


async def job_action(site: LiveSite, request: Request) -> Response:
    """Stop a job."""
    await posted(site, request, "turns")
    jobs = jobs_of(site)
    job = jobs.get(request.path_params["job"])
    if request.path_params["what"] != "stop":
        raise HTTPException(404)
    jobs.stop(job)
    return RedirectResponse(job_link(job), 303)


def _verdict(job: TurnValues) -> tuple[str, int]:
    """Say which turn reduced the success of continuations most, and return its index as well.

    After the last turn, the episode's own outcome counts as the success.
    """
    states, episode = job.trees, job.episode
    if not any(state.solved for state in states):
        return "No continuation from any turn solved the task: try another policy, or more continuations.", 0
    next_shares = [(state.share, state.interval[1]) for state in states[1:]]
    if not job.problem:
        next_shares.append((float(episode.success is True),) * 2)
    falls = [
        (state.share - share, index) for index, (state, (share, _)) in enumerate(zip(states, next_shares, strict=False))
    ]
    fall, index = max(falls, key=lambda pair: (pair[0], -pair[1]), default=(0.0, 0))
    if fall <= 0:
        return "No turn made success less likely.", 0
    action = " ".join(episode.turns[index].actions) or "no action"
    is_apart = states[index].interval[0] > next_shares[index][1]
    note = "The intervals do not overlap." if is_apart else "The intervals overlap: try more continuations."
    return f"Success falls most at turn {index + 1} ({action}), by {100 * fall:.0f} points. {note}", index


# --- one continuation -------------------------------------------------------------------------------------------------


async def continuation_page(site: LiveSite, request: Request) -> Response:
    """Show a continuation turn by turn, from the start of its episode."""
    continuing = continuing_of(site)
    tree, number, branch = _find_branch(continuing, request)
    game = tree.game
    kept = saved(site.index.folder, "demonstrations", game.spec.id) if "saved" in request.query_params else None
    return render(
        "continuation.html", site=site, tree=tree, branch=branch, number=number, link=continuation_link(tree, number),
        origin=_origin(site, tree), token=site.guard.token("continuation"), saved=kept, remarks=remarks,
        held_out=held_out(branch.episode.seed, game.run), pictures="png" in game.spec.render_modes,
    )  # fmt: skip


async def continuation_picture(site: LiveSite, request: Request) -> Response:
    """Return a picture of the state before a turn of a continuation, drawn by the server."""
    continuing = continuing_of(site)
    tree, number, branch = _find_branch(continuing, request)
    frames = await continuing.games.frames(continuation_link(tree, number), branch.path)
    turn = parse_whole(request.query_params.get("turn", ""), len(frames) - 1)
    if turn is None:
        raise HTTPException(404, "There is no such turn.")
    return Response(frames[turn], media_type="image/png")


async def continuation_action(site: LiveSite, request: Request) -> Response:
    """Open a live session in the state before a turn of a continuation, or save the continuation as a demonstration."""
    form = await posted(site, request, "continuation")
    continuing = continuing_of(site)
    tree, number, branch = _find_branch(continuing, request)
    match request.path_params["what"]:
        case "open":
            turn = parse_whole(form.get("turn", ""), len(branch.episode.turns))
            if turn is None:
                raise HTTPException(400, "The form lacks the turn.")
            return to_game(await continuing.games.keep(await continuing.open(tree.id, number, turn)))
        case "save":
            await asyncio.to_thread(save_demonstration, site.index.folder, branch.episode, tree.game.run)
            return RedirectResponse(query(continuation_link(tree, number), saved=1), 303)
        case _:
            raise HTTPException(404)


def _find_branch(continuing: Continuing, request: Request) -> tuple[Branches, int, PlayedBranch]:
    """Return the set, the number and the continuation that an address names. Raises Impossible, HTTPException."""
    number = parse_whole(request.path_params["number"], max(COUNTS))
    if number is None:
        raise HTTPException(404)
    return (pair := continuing.get(request.path_params["tree"], number))[0], number, pair[1]


def _origin(site: LiveSite, tree: Branches) -> tuple[str, str]:
    """Return link and title of the page that shows all continuations of a set; empty if the page is gone."""
    for job in jobs_of(site).all():
        if tree in job.trees:
            return job_link(job), "Which turn lost it?"
    if tree.game in continuing_of(site).games.all():
        return f"/play/session/{quote(tree.game.id)}", f"{tree.game.spec.id}, seed {tree.game.episode.seed}"
    return "", ""
