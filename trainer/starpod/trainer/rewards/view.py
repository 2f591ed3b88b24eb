"""A turn as rewards see it."""

from __future__ import annotations

from dataclasses import dataclass

from starpod.trainer.data.episode import End, Episode, Turn


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn with what led to it in its attempt, and nothing of other attempts.

    An attempt is one passage from the start state to an end (`Turn.attempt`). A speaker is one agent (`Turn.agent_id`),
    such as the solver and the verifier of a script, or the players of a game.

    turns: the attempt's turns up to this one, all speakers', in their order: `turns[-1]` is the turn.
    environment, seed, instructions: as in `Episode`. end, success: of the attempt, where the turn ended it.
    """

    turns: tuple[Turn, ...]
    environment: str
    seed: int
    instructions: str
    end: End
    success: bool | None

    @classmethod
    def of(cls, turn: Turn, episode: Episode) -> TurnView:
        """The view of one of an episode's turns."""
        place = next(index for index, each in enumerate(episode.turns) if each is turn)
        turns = tuple(each for each in episode.turns[: place + 1] if each.attempt == turn.attempt)
        return cls(turns, episode.environment, episode.seed, episode.instructions, episode.end, episode.success)

    @property
    def turn(self) -> Turn:
        """The turn itself."""
        return self.turns[-1]

    @property
    def previous(self) -> Turn | None:
        """The turn before it by the same speaker in the same attempt; None if this is the speaker's first one there."""
        return next((each for each in reversed(self.turns[:-1]) if each.agent_id == self.turn.agent_id), None)
