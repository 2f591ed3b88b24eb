"""Reward for describing where things are: F1 score of the relations in the blocks `description` and `prediction`.

A relation is the direction from the player to a thing: above, below or level, and left, right or level (VAGEN, arXiv
2510.16907). Unlike the reward for true claims (boards/reasoning.py), this one requires completeness: an omitted
relation costs as much as an invented one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from starpod.boards.claims import DIRECTIONS, NOUNS
from starpod.boards.scene import CannotRead, Scene, family_of, legend_of, read_scene
from starpod.client import Transition
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.rewards.view import TurnView

Relation = tuple[str, str]
"""Vertical and horizontal direction from the player to a thing; "-" for level."""

_KINDS = {"frozen_lake": {"goal": 0.7, "hole": 0.3}, "sokoban": {"target": 0.5, "box": 0.5}}
"""Kinds of things whose relations are compared, and the weight of each kind in the score."""

_WORD = re.compile(r"[A-Za-z']+|\S")


def description(turn: Turn, transition: Transition | None, view: TurnView) -> float:
    """Score the block `description` of a turn from 0 to 1 against the state before the turn; see `_score`.

    Args:
        view: provides the environment's id and its instructions.
    """
    return _score("description", turn, read_scene(view.environment, view.instructions, turn.observation), view)


def prediction(turn: Turn, transition: Transition | None, view: TurnView, *, intended: bool = False) -> float:
    """Score the block `prediction` of a turn from 0 to 1 against the state after the turn; see `_score`.

    The score is 0 if the turn was not played (`transition` is None).

    Args:
        intended: compare with the state to which the actions would lead on ice that is not slippery.
    """
    scene = read_scene(view.environment, view.instructions, turn.observation)
    if transition is None:
        return 0.0
    next_scene = _next_scene(scene, turn.actions, transition.observation.text, view, intended=intended)
    return _score("prediction", turn, next_scene, view)


def _score(block: str, turn: Turn, scene: Scene, view: TurnView) -> float:
    """Return the F1 of the relations in a block; 0 if the reply is not well-formed.

    Raises CannotRead for an unknown environment or observation format, or if the format does not show all things.
    """
    family = family_of(view.environment)
    if not turn.well_formed:
        return 0.0
    stated_relations = read_relations(turn.blocks.get(block, ""), family, legend_of(family, view.instructions))
    return relations_f1(family, stated_relations, relations(scene, family))


def relations(scene: Scene, family: str) -> dict[str, list[Relation]]:
    """Return the relations of a scene by kind. Raises CannotRead if the observation does not show all things."""
    by_kind: dict[str, list[Relation]] = {}
    for kind in _KINDS[family]:
        if kind not in scene.places:
            raise CannotRead(
                f"relations need all things of the kind {kind}, but the observation shows only some of them: set "
                "environment.options.observation to grid"
            )
        row, column = scene.player
        by_kind[kind] = sorted(
            (("Up", "-", "Down")[_sign(cell[0] - row) + 1], ("Left", "-", "Right")[_sign(cell[1] - column) + 1])
            for cell in scene.places[kind]
        )
    return by_kind


def describe(scene: Scene, family: str) -> str:
    """Return the relations of a scene as text that `read_relations` can read. Raises CannotRead as `relations` does."""
    by_kind = relations(scene, family)
    return " ".join(
        f"{kind} {vertical} {horizontal}" for kind, pairs in by_kind.items() for vertical, horizontal in pairs
    )


def _next_scene(
    scene: Scene, actions: Sequence[str], observation: str, view: Episode | TurnView, *, intended: bool
) -> Scene:
    """Return the observed scene after a turn or, if `intended`, the scene without slipping on the ice."""
    if not intended or family_of(view.environment) != "frozen_lake":
        return read_scene(view.environment, view.instructions, observation)
    for action in actions:
        if scene.holds(scene.player, "hole") or scene.holds(scene.player, "goal"):
            break
        direction = DIRECTIONS.get(action.lower())
        if direction and not scene.blocked(direction):
            scene = replace(scene, player=scene.beside(direction))
    return scene


def describe_turn(episode: Episode, turn: Turn, after: str) -> dict[str, str]:
    """Return the relations before a turn, after it, and where its actions were meant to lead, each as text.

    Args:
        after: observation after the turn.

    Returns:
        Texts by name: `relations`, `next_relations` and `intended_relations`.

    Raises:
        CannotRead: the environment or the observation format is unknown, or the format does not show all things.
    """
    family = family_of(episode.environment)
    scene = read_scene(episode.environment, episode.instructions, turn.observation)
    return {
        "relations": describe(scene, family),
        "next_relations": describe(_next_scene(scene, turn.actions, after, episode, intended=False), family),
        "intended_relations": describe(_next_scene(scene, turn.actions, after, episode, intended=True), family),
    }


def read_relations(text: str, family: str, legend: Mapping[str, frozenset[str]]) -> dict[str, list[Relation]]:
    """Return the relations in a text: each name or symbol of a thing, with the directions that follow it.

    An axis without a direction is level.

    Args:
        text: text that a policy wrote, such as "goal Up Left".
        family: "frozen_lake" or "sokoban".
        legend: kinds of things that each symbol shows.

    Returns:
        Relations by kind of thing, with an entry for every kind that is scored in the family.
    """
    alias = {"target": "goal"} if family == "frozen_lake" else {"goal": "target"}
    entities: list[tuple[frozenset[str], dict[str, str]]] = []
    for word in _WORD.findall(text):
        direction, noun = DIRECTIONS.get(word.lower()), NOUNS.get(word.lower())
        if direction:
            if entities:
                entities[-1][1]["vertical" if direction in ("Up", "Down") else "horizontal"] = direction
        elif noun:
            entities.append((frozenset({alias.get(noun, noun)}), {}))
        elif kinds := legend.get(word):
            entities.append((kinds, {}))
    return {
        kind: [(axes.get("vertical", "-"), axes.get("horizontal", "-")) for kinds, axes in entities if kind in kinds]
        for kind in _KINDS[family]
    }


def relations_f1(
    family: str, stated: Mapping[str, Sequence[Relation]], actual: Mapping[str, Sequence[Relation]]
) -> float:
    """Return the mean F1 over kinds of things, weighted as in _KINDS. Kinds that are in neither mapping are left out.

    In Frozen Lake, a relation that is right on only one axis counts as half, and stated relations are matched with true
    ones so that the score is highest. In Sokoban, both axes must be right. The result is 1 if both mappings are empty.
    """
    scores = {}
    for kind in _KINDS[family]:
        claims, facts = stated.get(kind, ()), actual.get(kind, ())
        if claims or facts:
            right: float = (Counter(claims) & Counter(facts)).total()
            if family == "frozen_lake":
                unmatched = Counter(claims) - Counter(facts), Counter(facts) - Counter(claims)
                right += _half_right(*(list(counter.elements()) for counter in unmatched)) / 2
            scores[kind] = 2 * right / (len(claims) + len(facts))
    total = sum(_KINDS[family][kind] for kind in scores)
    return sum(_KINDS[family][kind] * score for kind, score in scores.items()) / total if scores else 1.0


def _half_right(claims: list[Relation], facts: list[Relation]) -> int:
    """Return the maximum number of pairs of a stated and a true relation that agree on one axis (bipartite matching).

    `relations_f1` has already removed pairs that agree on both axes. Doing so first never lowers the score.
    """
    partner: dict[int, int] = {}

    def pair(claim: int, visited: set[int]) -> bool:
        for index, relation in enumerate(facts):
            if index not in visited and any(map(str.__eq__, claims[claim], relation)):
                visited.add(index)
                if index not in partner or pair(partner[index], visited):
                    partner[index] = claim
                    return True
        return False

    return sum(pair(index, set()) for index in range(len(claims)))


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
