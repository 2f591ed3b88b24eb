"""Reward for telling where things are: the blocks description and prediction against the state, by F1 (VAGEN).

A relation is where a thing lies as the player sees it: above, below or level, and left, right or level (arXiv
2510.16907). Unlike true claims (`rewards.reasoning`) it pays for completeness: what is left out counts as much as what
is made up.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import Field, model_validator

from starpod.client import Transition
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.rewards.claims import DIRECTIONS, NOUNS
from starpod.trainer.rewards.scene import CannotRead, Scene, family_of, legend_of, read_scene
from starpod.trainer.rewards.view import TurnView
from starpod.trainer.section import Section

Relation = tuple[str, str]
"""Vertical and horizontal way from the player to a thing; "-" for level."""

_KINDS = {"frozen_lake": {"goal": 0.7, "hole": 0.3}, "sokoban": {"target": 0.5, "box": 0.5}}
"""Things that are compared, and their weights."""

_WORD = re.compile(r"[A-Za-z']+|\S")

_REPEATED = 5
"""Texts of a collection that count as the most repeated ones."""
_MOSTLY_RIGHT = 0.7
"""Score from which on a text may be repeated."""


class RelationsConfig(Section):
    """Pays for the blocks description and prediction, in frozen_lake and sokoban. Off with weights 0."""

    description: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Paid for where things are, times the F1 of the block."
    )
    prediction: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="The same for where things are after the turn."
    )
    intended: bool = Field(
        default=False,
        description="A prediction is of where the actions lead on ice that does not slip: nobody can foresee luck.",
    )
    repetition: float = Field(
        default=0.0,
        le=0,
        allow_inf_nan=False,
        description="The score of a block, instead of its F1, whose text is among the five that a collection repeats "
        "most and is right by less than 0.7; 0: off.",
    )

    @model_validator(mode="after")
    def _is_paid(self) -> RelationsConfig:
        if self.intended and not self.prediction:
            raise ValueError(
                "rewards.relations.intended says what predictions are compared with, and nothing is paid for them: "
                "give rewards.relations.prediction, or drop it"
            )
        if self.repetition and not (self.description or self.prediction):
            raise ValueError(
                "rewards.relations.repetition is a score of blocks that nothing is paid for: give "
                "rewards.relations.description or prediction, or drop it"
            )
        return self


def score_relations(config: RelationsConfig, view: TurnView, transition: Transition | None, block: str) -> float:
    """0 to 1 for the block `description` of the state before a turn, or `prediction` of that after it.

    0 in a reply that is not well-formed, and for a prediction of a turn that was not played. Raises CannotRead for an
    environment or an observation format that is not known, or that does not show all things.
    """
    turn, family = view.turn, family_of(view.environment)
    scene = read_scene(view.environment, view.instructions, turn.observation)
    if block == "prediction" and transition is not None:
        scene = _after(scene, turn.actions, transition.observation.text, view, intended=config.intended)
    if not turn.well_formed or (block == "prediction" and transition is None):
        return 0.0
    said = read_relations(turn.blocks.get(block, ""), family, legend_of(family, view.instructions))
    return compare(family, said, relations(scene, family))


def relations(scene: Scene, family: str) -> dict[str, list[Relation]]:
    """Those of a scene, by kind. Raises CannotRead where the observation does not show all things of a kind."""
    found: dict[str, list[Relation]] = {}
    for kind in _KINDS[family]:
        if kind not in scene.places:
            raise CannotRead(
                f"relations are of all things of the kind {kind}, and the observation shows some of them: set "
                "environment.options.observation to grid"
            )
        row, column = scene.player
        found[kind] = sorted(
            (("Up", "-", "Down")[_sign(there[0] - row) + 1], ("Left", "-", "Right")[_sign(there[1] - column) + 1])
            for there in scene.places[kind]
        )
    return found


def describe(scene: Scene, family: str) -> str:
    """The relations of a scene in words that `read_relations` reads. Raises CannotRead."""
    told = relations(scene, family)
    return " ".join(f"{kind} {vertical} {horizontal}" for kind, own in told.items() for vertical, horizontal in own)


def _after(
    scene: Scene, actions: Sequence[str], observation: str, played: Episode | TurnView, *, intended: bool
) -> Scene:
    """The scene after a turn: as observed, or where its actions were to lead. Only in a lake these two differ."""
    if not intended or family_of(played.environment) != "frozen_lake":
        return read_scene(played.environment, played.instructions, observation)
    for action in actions:
        if scene.holds(scene.player, "hole") or scene.holds(scene.player, "goal"):
            break
        direction = DIRECTIONS.get(action.lower())
        if direction and not scene.blocked(direction):
            scene = replace(scene, player=scene.beside(direction))
    return scene


def describe_turn(episode: Episode, turn: Turn, after: str) -> dict[str, str]:
    """What can be told of a turn: the relations before and after it, and those that it was to lead to.

    after: what the environment showed then. Raises CannotRead.
    """
    family = family_of(episode.environment)
    before = read_scene(episode.environment, episode.instructions, turn.observation)
    return {
        "relations": describe(before, family),
        "next_relations": describe(_after(before, turn.actions, after, episode, intended=False), family),
        "intended_relations": describe(_after(before, turn.actions, after, episode, intended=True), family),
    }


def fine_repetition(config: RelationsConfig, episodes: Sequence[Episode]) -> None:
    """Gives what a collection's episodes repeat most, and get wrong, the score `repetition` instead of its F1.

    A constant phrase is right now and then, and judges that are models have been won over by it (arXiv 2510.16907).
    """
    for block in ("description", "prediction") if config.repetition else ():
        weight = getattr(config, block)
        turns = [turn for each in episodes for turn in each.own_turns if block in turn.parts and block in turn.blocks]
        counts = Counter(turn.blocks[block] for turn in turns)
        repeated = {text for text, count in counts.most_common(_REPEATED) if count > 1}
        for turn in turns:
            if turn.blocks[block] in repeated and turn.parts[block] < _MOSTLY_RIGHT * weight:
                turn.pay({block: weight * config.repetition})


def read_relations(text: str, family: str, legend: Mapping[str, frozenset[str]]) -> dict[str, list[Relation]]:
    """The relations that a text tells: each name or symbol of a thing, with the directions that follow it.

    legend: the symbols in use. An axis without a direction is level.
    """
    alias = {"target": "goal"} if family == "frozen_lake" else {"goal": "target"}
    things: list[tuple[frozenset[str], dict[str, str]]] = []
    for word in _WORD.findall(text):
        direction, noun = DIRECTIONS.get(word.lower()), NOUNS.get(word.lower())
        if direction:
            if things:
                things[-1][1]["vertical" if direction in ("Up", "Down") else "horizontal"] = direction
        elif noun:
            things.append((frozenset({alias.get(noun, noun)}), {}))
        elif kinds := legend.get(word):
            things.append((kinds, {}))
    return {
        kind: [(way.get("vertical", "-"), way.get("horizontal", "-")) for kinds, way in things if kind in kinds]
        for kind in _KINDS[family]
    }


def compare(family: str, said: Mapping[str, Sequence[Relation]], true: Mapping[str, Sequence[Relation]]) -> float:
    """F1 of each kind of thing, weighted over the kinds that are there or are told of; 1 where there are none.

    In a lake a relation that is right on one axis counts half, and relations are paired so that most are right; in a
    room it must be right on both.
    """
    scores = {}
    for kind in _KINDS[family]:
        told, there = said.get(kind, ()), true.get(kind, ())
        if told or there:
            right: float = (Counter(told) & Counter(there)).total()
            if family == "frozen_lake":
                rest = Counter(told) - Counter(there), Counter(there) - Counter(told)
                right += _half_right(*(list(each.elements()) for each in rest)) / 2
            scores[kind] = 2 * right / (len(told) + len(there))
    total = sum(_KINDS[family][kind] for kind in scores)
    return sum(_KINDS[family][kind] * score for kind, score in scores.items()) / total if scores else 1.0


def _half_right(told: list[Relation], there: list[Relation]) -> int:
    """Most pairs that agree on an axis. To pair equal relations first loses nothing: an axis is a metric."""
    partner: dict[int, int] = {}

    def place(one: int, tried: set[int]) -> bool:
        for other, true in enumerate(there):
            if other not in tried and any(map(str.__eq__, told[one], true)):
                tried.add(other)
                if other not in partner or place(partner[other], tried):
                    partner[other] = one
                    return True
        return False

    return sum(place(one, set()) for one in range(len(told)))


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
