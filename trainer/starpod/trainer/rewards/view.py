"""View of a turn and its history for reward functions."""

from __future__ import annotations

from dataclasses import dataclass

from starpod.trainer.data.episode import End, Episode, Turn


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn with the earlier turns of its attempt. Other attempts are not visible.

    An attempt is one passage from the start state to an end (`Turn.attempt`). A speaker is one agent (`Turn.agent_id`),
    for example the solver or the verifier of a script, or a player of a game.
    """

    turns: tuple[Turn, ...]
    """The attempt's turns of all speakers, oldest first; `turns[-1]` is the turn itself."""
    environment: str
    """Id of the environment."""
    seed: int
    """Seed of the start state."""
    instructions: str
    """The environment's instructions, which the policy sees once, before the first turn."""
    end: End
    """End of the attempt, if the turn ended it."""
    success: bool | None
    """Success of the attempt, if the turn ended it."""

    @classmethod
    def of(cls, turn: Turn, episode: Episode) -> TurnView:
        """Return the view of one of an episode's turns."""
        position = next(index for index, candidate in enumerate(episode.turns) if candidate is turn)
        turns = tuple(candidate for candidate in episode.turns[: position + 1] if candidate.attempt == turn.attempt)
        return cls(turns, episode.environment, episode.seed, episode.instructions, episode.end, episode.success)

    @property
    def turn(self) -> Turn:
        """The turn itself."""
        return self.turns[-1]

    @property
    def previous(self) -> Turn | None:
        """Previous turn of the same speaker in this attempt; None for the speaker's first turn."""
        return next((turn for turn in reversed(self.turns[:-1]) if turn.agent_id == self.turn.agent_id), None)
