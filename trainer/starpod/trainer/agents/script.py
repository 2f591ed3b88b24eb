"""Conversation scripts: the next speaker, the text that each speaker sees, and the reply that the environment gets.

All speakers share one policy unless `script.policies` gives each speaker a policy. Speakers have different prompts and
a different `Turn.agent_id`, and credit terms compare each speaker only with itself. Except in self-play, the
environment sees a single agent and does not know of the script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from starpod.client import Observation, Session
from starpod.trainer.agents.base import Agent, Move, Stop, Task
from starpod.trainer.agents.config import ATTEMPT, SOLVER, VERIFIER, ScriptConfig
from starpod.trainer.agents.engine import EngineAgent, EngineAgents
from starpod.trainer.data.episode import Episode, Turn, turns_of
from starpod.trainer.prompts.conversation import Prompt
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.v1.values import action_text

VERDICTS = ACCEPT, REJECT = "Accept", "Reject"
# --- messages ---------------------------------------------------------------------------------------------------------


def proposal_message(observation: str, proposal: Sequence[str]) -> str:
    """Return the verifier's message about a proposal."""
    return f"{observation}\nProposed: {' || '.join(proposal)}"


def rejection_message(observation: str) -> str:
    """Return the solver's message after a rejection."""
    return f"{REJECT}.\n{observation}"


def retry_message(config: ScriptConfig, prompt: PromptConfig, observation: str) -> str:
    """Return the message that begins the second or a later attempt."""
    return f"{'Again.' if prompt.style == 'compact' else config.again}\n{observation}"


def role_of(
    script: ScriptConfig, speaker: str, prompt: PromptConfig, actions: Sequence[str]
) -> tuple[PromptConfig, Sequence[str]]:
    """Return a speaker's prompt and actions. If no system message is configured, its role becomes the system message.

    Args:
        speaker: Name of the speaker; "" if the script has only one.
        actions: Action names of the environment. A verifier's are `VERDICTS` instead.
    """
    if script.name != "solver_verifier" or not speaker:
        return prompt, actions
    actions = VERDICTS if speaker == VERIFIER else actions
    if prompt.style == "compact" or prompt.system is not None:
        return prompt, actions
    return prompt.model_copy(update={"system": {SOLVER: script.solver, VERIFIER: script.verifier}[speaker]}), actions


# --- speakers ---------------------------------------------------------------------------------------------------------


class View(NamedTuple):
    """The turn that a script shows to a speaker."""

    text: str
    """Text that replaces the observation."""
    history: Episode
    """Episode with the turns whose results the speaker sees."""
    fresh: bool
    """Whether the whole context is recorded as the prompt, because another speaker had the previous turn."""


class Speaker(Agent):
    """One speaker of a script, which sets its view before each of its replies. Without a script, there is no view."""

    view: View | None = None

    def see(self, text: str, history: Episode, *, fresh: bool) -> Self:
        """Set what the speaker sees next.

        Args:
            text: Text that replaces the observation.
            history: Episode with the turns whose results the speaker sees.
            fresh: Whether the whole context is recorded as the prompt; see `View`.
        """
        self.view = View(text, history, fresh)
        return self


MakeSpeaker = Callable[[str, int | None], Speaker]
"""Function that makes a speaker. Arguments: its name ("" if there is only one) and `Episode.begun_at` (None: now)."""


class EngineSpeaker(Speaker, EngineAgent):
    """Speaker that samples its replies from an engine."""

    def _ask(self, observation: str, episode: Episode, image: bytes = b"", *, note: str = "") -> Prompt:
        if self.view is None:
            return super()._ask(observation, episode, image, note=note)
        prompt = super()._ask(self.view.text, self.view.history, note=note)
        return Prompt(prompt.context, list(prompt.context), True) if self.view.fresh else prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedAgents(EngineAgents):
    """Agents that share an engine and follow a script."""

    script: ScriptConfig = field(default_factory=ScriptConfig)

    def agent(self, session: Session, task: Task, group: int) -> Agent:
        def make_speaker(name: str, begun_at: int | None) -> Speaker:
            prompt, actions = role_of(self.script, name, self.prompt, task.actions)
            agents = replace(self, prompt=prompt, speaker=name)
            return EngineSpeaker(agents, session, replace(task, actions=tuple(actions)), begun_at)

        return script_agent(self.script, self.prompt, make_speaker)


def engine_agents(script: ScriptConfig, **settings: Any) -> EngineAgents:
    """Return agents that follow a script. The settings are the arguments of `EngineAgents`."""
    return EngineAgents(**settings) if script.name == "solo" else ScriptedAgents(script=script, **settings)


# --- scripts ----------------------------------------------------------------------------------------------------------


def script_agent(script: ScriptConfig, prompt: PromptConfig, make_speaker: MakeSpeaker) -> Agent:
    """Return an agent that plays an episode by a script.

    Args:
        prompt: The run's prompt, whose style decides the messages between attempts.
    """
    match script.name:
        case "solver_verifier":
            return SolverVerifier(script, make_speaker)
        case "attempts":
            return Attempts(script, prompt, make_speaker)
        case "self_play":
            return SelfPlay(make_speaker)
    return make_speaker("", None)


class SolverVerifier(Agent):
    """Agent with two speakers: a solver proposes actions, and a verifier accepts or rejects them.

    Accepted actions are sent. Reward and observation are recorded on the accepted proposal's turn, and a verdict is a
    turn without actions. After a rejection, the solver makes another proposal.
    """

    def __init__(self, script: ScriptConfig, make_speaker: MakeSpeaker) -> None:
        self.replies = 2 * script.proposals - 1
        self._max_proposals = script.proposals
        self._solver, self._verifier = make_speaker(SOLVER, None), make_speaker(VERIFIER, None)
        self._sent_turns: list[int] = []
        self._proposals: list[list[str]] = []
        self._pending = False

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        speaker = self._next(observation, episode)
        move = await speaker.act(observation, episode)
        return move if isinstance(move, Stop) else self._follow(move, len(episode.turns))

    def repeat(self, observation: Observation, episode: Episode, turn: Turn) -> Move | None:
        move = self._next(observation, episode).repeat(observation, episode, turn)
        return None if move is None else self._follow(move, len(episode.turns))

    def unanswered(self, observation: Observation, episode: Episode) -> tuple[list[int], bool]:
        return self._next(observation, episode).unanswered(observation, episode)

    def close(self) -> None:
        self._solver.close()

    def _next(self, observation: Observation, episode: Episode) -> Speaker:
        """Set the view of the next speaker, and return that speaker."""
        history = replace(episode, turns=[episode.turns[index] for index in self._sent_turns])
        if self._pending:
            return self._verifier.see(proposal_message(observation.text, self._proposals[-1]), history, fresh=True)
        text = rejection_message(observation.text) if self._proposals else observation.text
        return self._solver.see(text, history, fresh=True)

    def _follow(self, move: Move, index: int) -> Move:
        """Return the move of turn `index` with the actions to send and the turn that they belong to."""
        actions: list[str] | None
        if self._pending:
            self._pending = False
            if move.actions is None or move.actions[0] != ACCEPT:
                return replace(move, actions=None, agent_id=VERIFIER)
            actions, replies_back = self._proposals[-1], 1
        else:
            self._proposals.append([*map(action_text, move.actions or ())])
            self._pending = bool(move.actions) and len(self._proposals) < self._max_proposals
            if self._pending:
                return replace(move, actions=None, agent_id=SOLVER)
            if len(self._proposals) < self._max_proposals:  # no actions, so there is nothing to judge
                return replace(move, agent_id=SOLVER)
            actions, replies_back = self._proposals[-1] or None, 0
        self._sent_turns.append(index - replies_back)
        self._proposals = []
        return replace(move, actions=actions, of=replies_back, agent_id=VERIFIER if replies_back else SOLVER)


class Attempts(Agent):
    """Agent that plays a start state several times. Each attempt sees the previous attempts but not their success.

    `play` plays all attempts except the last one on forks.
    """

    def __init__(self, script: ScriptConfig, prompt: PromptConfig, make_speaker: MakeSpeaker) -> None:
        self.attempts = script.attempts
        self._script, self._prompt = script, prompt
        self._speaker = make_speaker("", None)
        self._attempt = 0

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        move = await self._see(observation, episode).act(observation, episode)
        return move if isinstance(move, Stop) else self._name_attempt(move, episode)

    def repeat(self, observation: Observation, episode: Episode, turn: Turn) -> Move | None:
        move = self._see(observation, episode).repeat(observation, episode, turn)
        return None if move is None else self._name_attempt(move, episode)

    def unanswered(self, observation: Observation, episode: Episode) -> tuple[list[int], bool]:
        return self._see(observation, episode).unanswered(observation, episode)

    def close(self) -> None:
        self._speaker.close()

    def begin_attempt(self, number: int) -> None:
        self._attempt = number

    def _name_attempt(self, move: Move, episode: Episode) -> Move:
        return replace(move, agent_id=f"{ATTEMPT}{self._attempt + 1}")

    def _see(self, observation: Observation, episode: Episode) -> Speaker:
        attempt = turns_of(episode, f"{ATTEMPT}{self._attempt + 1}")
        starts_retry = self._attempt and not attempt.turns
        text = retry_message(self._script, self._prompt, observation.text) if starts_retry else observation.text
        return self._speaker.see(text, attempt, fresh=False)


class SelfPlay(Agent):
    """Agent that plays all agents of an environment, which says whose turn it is. Each sees only its own turns."""

    def __init__(self, make_speaker: MakeSpeaker) -> None:
        self._make_speaker = make_speaker
        self._speakers: dict[str, Speaker] = {}

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        return await self._see(observation, episode).act(observation, episode)

    def repeat(self, observation: Observation, episode: Episode, turn: Turn) -> Move | None:
        return self._see(observation, episode).repeat(observation, episode, turn)

    def unanswered(self, observation: Observation, episode: Episode) -> tuple[list[int], bool]:
        return self._see(observation, episode).unanswered(observation, episode)

    def close(self) -> None:
        for speaker in self._speakers.values():
            speaker.close()

    def _see(self, observation: Observation, episode: Episode) -> Speaker:
        name = observation.agent_id
        if name not in self._speakers:
            self._speakers[name] = self._make_speaker(name, episode.begun_at)
        return self._speakers[name].see(observation.text, turns_of(episode, name), fresh=True)
