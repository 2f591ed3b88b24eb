"""Conversation scripts: the next speaker, the text that each speaker sees, and the reply that the environment gets.

All speakers share one policy unless `script.policies` gives each speaker a policy. Speakers have different prompts and
a different `Turn.agent_id`, and credit terms compare each speaker only with itself. Except in self-play, the
environment sees a single agent and does not know of the script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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


def role_prompt(script: ScriptConfig, prompt: PromptConfig, speaker: str) -> PromptConfig:
    """Return a speaker's prompt. If no system message is configured, the speaker's role becomes the system message."""
    role = {SOLVER: script.solver, VERIFIER: script.verifier}.get(speaker, "")
    if not role or prompt.style == "compact" or prompt.system is not None:
        return prompt
    return prompt.model_copy(update={"system": role})


# --- agents -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedAgents(EngineAgents):
    """Agents that share an engine and follow a script."""

    script: ScriptConfig = field(default_factory=ScriptConfig)

    def agent(self, session: Session, task: Task, group: int) -> Agent:
        kinds: dict[str, type[SolverVerifier] | type[Attempts] | type[SelfPlay]] = {
            "solver_verifier": SolverVerifier,
            "attempts": Attempts,
            "self_play": SelfPlay,
        }
        kind = kinds.get(self.script.name)
        return EngineAgents.agent(self, session, task, group) if kind is None else kind(self, session, task)


class Speaker(EngineAgent):
    """One speaker of a script. `see` sets its view before each of its replies."""

    def see(self, text: str, history: Episode, *, fresh: bool) -> Speaker:
        """Set what the speaker sees next.

        Args:
            text: Text that replaces the observation.
            history: Episode with the turns whose results the speaker sees.
            fresh: Whether the whole context is recorded as the prompt, because another speaker had the previous turn.
        """
        self._view = text, history, fresh
        return self

    def _ask(self, observation: str, episode: Episode, image: bytes = b"") -> Prompt:
        text, history, fresh = self._view
        prompt = super()._ask(text, history)
        return Prompt(prompt.context, list(prompt.context), True) if fresh else prompt


class SolverVerifier(Agent):
    """Agent with two speakers: a solver proposes actions, and a verifier accepts or rejects them.

    Accepted actions are sent. Reward and observation are recorded on the accepted proposal's turn, and a verdict is a
    turn without actions. After a rejection, the solver makes another proposal.
    """

    def __init__(self, agents: ScriptedAgents, session: Session, task: Task) -> None:
        self.replies = 2 * agents.script.proposals - 1
        self._max_proposals = agents.script.proposals
        solver, verifier = (
            replace(agents, prompt=role_prompt(agents.script, agents.prompt, speaker), speaker=speaker)
            for speaker in (SOLVER, VERIFIER)
        )
        self._solver = Speaker(solver, session, task)
        verdicts = replace(task, actions=VERDICTS)
        self._verifier = Speaker(verifier, session, verdicts)
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

    def __init__(self, agents: ScriptedAgents, session: Session, task: Task) -> None:
        self.attempts = agents.script.attempts
        self._script, self._prompt = agents.script, agents.prompt
        self._speaker = Speaker(agents, session, task)
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

    def __init__(self, agents: ScriptedAgents, session: Session, task: Task) -> None:
        self._agents, self._session, self._task = agents, session, task
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
            agents = replace(self._agents, speaker=name)
            self._speakers[name] = Speaker(agents, self._session, self._task, episode.begun_at)
        return self._speakers[name].see(observation.text, turns_of(episode, name), fresh=True)


def engine_agents(script: ScriptConfig, **settings: Any) -> EngineAgents:
    """Return agents that follow a script. The settings are the arguments of `EngineAgents`."""
    return EngineAgents(**settings) if script.name == "solo" else ScriptedAgents(script=script, **settings)
