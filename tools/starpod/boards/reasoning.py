"""Reward for reasoning that agrees with the state: compares the claims of a thought with the observation.

Without it, a right move earns the same whether the thought describes the real board or an invented one, and reasoning
decays into empty phrases (RAGEN, arXiv 2504.20073, section 4.3).
"""

from __future__ import annotations

from starpod.boards.claims import Claim, Topic, read_claims
from starpod.boards.scene import Cell, Scene, family_of, legend_of, read_scene
from starpod.client import Transition
from starpod.trainer.data.episode import Turn
from starpod.trainer.rewards.view import TurnView


def reasoning(turn: Turn, transition: Transition | None, view: TurnView, *, claims: int = 2) -> float:
    """Score the claims of a thought: from -1 (all false) to 1 (enough of them, all true).

    The score is (true topics - false topics) / max(`claims`, number of topics). Several claims on a topic count once,
    and the topic is false if one of its claims is. Claims about the state after the turn are compared with the next
    observation. True positions of walls do not count. The score is 0 without a claim that can be checked, or if the
    reply is not well-formed.

    Args:
        claims: number of true topics that earn 1.

    Raises:
        CannotRead: the environment or the observation format is unknown.
    """
    before = read_scene(view.environment, view.instructions, turn.observation)
    if not turn.thought or not turn.well_formed:
        return 0.0
    family = family_of(view.environment)
    all_claims = read_claims(turn.thought, family, legend_of(family, view.instructions))
    after: Scene | None = None
    if transition is not None and any(claim.topic[0] == "after" for claim in all_claims):
        after = read_scene(view.environment, view.instructions, transition.observation.text)
    verdicts: dict[Topic, bool] = {}
    for claim in all_claims:
        verdict = judge(claim, before, after)
        # Everybody knows where the border is: "wall at (0, 0)" is true in every room.
        is_trivial = verdict and claim.topic[:2] == ("at", "wall")
        if verdict is not None and not is_trivial:
            verdicts[claim.topic] = verdict and verdicts.get(claim.topic, True)
    true_count = sum(verdicts.values())
    return (2 * true_count - len(verdicts)) / max(claims, len(verdicts))


def judge(claim: Claim, before: Scene, after: Scene | None) -> bool | None:
    """Return whether a claim is true; None if the observations do not show it.

    Args:
        after: scene after the turn; None: claims about it cannot be judged.
    """
    match claim.topic:
        case ("at", "player"):
            return claim.value == before.player
        case ("at", kind):
            return claim.value in before.places[str(kind)] if kind in before.places else None
        case ("at", kind, (int(row), int(column))):
            return before.holds((row, column), str(kind))
        case ("way", origin, to, axis):
            return _points(before, str(origin), str(to), str(axis), str(claim.value))
        case ("beside", direction):
            return _is_beside(before, str(direction), str(claim.value))
        case ("after", "player"):
            return None if after is None else claim.value == after.player
        case ("after", "moves"):
            return None if after is None else claim.value == (after.player != before.player)
        case ("after", kind, (int(row), int(column))):
            return None if after is None else after.holds((row, column), str(kind))
    return None


def _points(scene: Scene, origin: str, to: str, axis: str, value: str) -> bool | None:
    """Return whether the direction from `origin` to `to` on an axis is `value`; None if a thing is missing.

    If there are several things of a kind, only the pairs at the smallest distance count.
    """
    starts, ends = _cells(scene, origin), _cells(scene, to)
    if scene.towards == "box":
        # As in observations of the format `local`, boxes on targets and targets with boxes do not count.
        starts = scene.loose() or starts if origin == "box" else starts
        ends = scene.loose() or ends if to == "box" else ends
        if origin == "box" and to == "target":
            ends = ends - scene.places["box"] or ends
    paths = [(abs(b[0] - a[0]) + abs(b[1] - a[1]), b[0] - a[0], b[1] - a[1]) for a in starts for b in ends]
    if not paths:
        return None
    distance = min(paths)[0]
    names = ("Up", "-", "Down") if axis == "vertical" else ("Left", "-", "Right")
    offsets = [path[1 if axis == "vertical" else 2] for path in paths if path[0] == distance]
    return any(value == names[(offset > 0) - (offset < 0) + 1] for offset in offsets)


def _cells(scene: Scene, kind: str) -> frozenset[Cell]:
    return frozenset({scene.player}) if kind == "player" else scene.places.get(kind, frozenset())


def _is_beside(scene: Scene, direction: str, value: str) -> bool | None:
    cell = scene.beside(direction)
    match value:
        case "blocked":
            return scene.blocked(direction)
        case "plain":
            return not scene.cells[cell] if cell in scene.cells else None
        case "free":
            is_blocked = scene.blocked(direction)
            return None if is_blocked is None else not is_blocked and not scene.holds(cell, "hole")
    return scene.holds(cell, value)
