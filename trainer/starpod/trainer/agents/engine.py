"""Agents that sample from an engine: the policy that is trained or evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from starpod.client import Observation, Session, Want
from starpod.trainer.agents.base import (
    Agent,
    AgentError,
    Agents,
    Move,
    Stop,
    Task,
    Tokens,
    limits_left,
)
from starpod.trainer.agents.config import SamplingConfig
from starpod.trainer.configuration.seeds import derive
from starpod.trainer.data.episode import Episode, Finish, Turn
from starpod.trainer.data.images import BadImage
from starpod.trainer.engines.base import Engine, Reply, Request
from starpod.trainer.prompts.conversation import Conversation, Prompt
from starpod.trainer.prompts.prompt import PromptConfig, Prompter
from starpod.trainer.prompts.structure import answer_structure
from starpod.trainer.prompts.template import Template


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAgents(Agents):
    """Agents that share an engine."""

    engine: Engine
    template: Template
    prompt: PromptConfig
    sampling: SamplingConfig
    seed: int = 0
    purpose: str = "train"
    """Mixed into the random seed of every reply, so that training and evaluation never use the same random numbers."""
    temperature: float | None = None
    """Sampling temperature; None means the one in `sampling`."""
    want: Want = field(default_factory=Want)
    at_once: int | None = None
    spans: bool = False
    """Whether turns record `Turn.spans`, the blocks of their replies."""
    speaker: str = ""
    """Name of the agent, if a script has several."""
    hint: str = ""
    """Format string of the expert's `action`, which a teacher reads below a turn's message; "" without such a
    teacher."""

    def agent(self, session: Session, task: Task, group: int) -> Agent:
        return EngineAgent(self, session, task)


class EngineAgent(Agent):
    """Agent that keeps one episode's conversation as token ids and requests each reply from the engine."""

    def __init__(self, agents: EngineAgents, session: Session, task: Task, begun_at: int | None = None) -> None:
        """begun_at: `Episode.begun_at`; None: the episode begins now."""
        self._agents, self._session, self._actions = agents, session, task.actions
        self._name = ""
        self._begin(session.step_index if begun_at is None else begun_at)

    def _begin(self, begun_at: int) -> None:
        agents, session = self._agents, self._session
        limits = limits_left(session, begun_at)
        self._prompter = Prompter(agents.prompt, session.instructions, self._actions, limits)
        self._conversation = Conversation.of(agents.template, agents.prompt)
        self._conversation.system(self._prompter.system())
        schema = agents.sampling.json_schema
        grammar = self._prompter.grammar
        self._structure = "" if schema is None else answer_structure(agents.template, grammar, schema)

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        agents = self._agents
        hinted = self._with_hint(observation, episode)
        prompt = self._ask(observation.text, episode, self.image_of(observation))
        self._name = f"{agents.purpose}/{episode.group}/{episode.member}"
        room = agents.sampling.max_episode_tokens - len(prompt.context)
        if room < agents.sampling.least_room:
            return Stop("context")
        turn = len(episode.turns) + 1
        request = Request(
            prompt.context,
            max_tokens=min(room, agents.sampling.max_reply_tokens),
            stop=agents.template.stop,
            temperature=agents.sampling.temperature if agents.temperature is None else agents.temperature,
            seed=derive(agents.seed, "reply", agents.purpose, episode.group, episode.member, turn),
            # Lower group numbers are trained first, so their requests go first: a step must not wait behind requests
            # for a later step.
            order=episode.group,
            conversation=self._name,
            agent=agents.speaker,
            images=self._conversation.images,
            structure=self._structure,
        )
        return self._answer(prompt, await self._reply(request, prompt, observation, episode), hinted)

    async def _reply(self, request: Request, prompt: Prompt, observation: Observation, episode: Episode) -> Reply:
        """Return the reply to play."""
        return await self._agents.engine.generate(request)

    def repeat(self, observation: Observation, episode: Episode, turn: Turn) -> Move | None:
        prompt = self._ask(observation.text, episode, self.image_of(observation))
        if (prompt.appended, prompt.fresh) != (turn.prompt, turn.fresh) or not turn.reply:
            return None
        return self._answer(prompt, Reply(turn.reply, turn.logprobs, turn.versions, turn.finish), turn.hinted)

    def recall(self, episode: Episode) -> None:
        template, history = self._agents.template, replace(episode, turns=[])
        self._begin(episode.begun_at)  # the session already has the turns behind it
        for turn in episode.turns:
            self._ask(turn.observation, history, turn.image)
            if turn.reply:
                self._record(turn.reply, turn.finish, turn.text)
            else:  # not sampled, for example a demonstration
                text = self._prompter.reply_of(turn)
                self._conversation.answer(template.encode_reply(text), "stop", text)
            history.turns.append(turn)

    def _answer(self, prompt: Prompt, reply: Reply, hinted: list[int]) -> Move:
        _, length, stop = self._agents.template.cut(reply.tokens, self._agents.sampling.stop)
        if stop:
            reply = Reply(reply.tokens[:length], reply.logprobs[:length], reply.versions[:length], "stop")
        text = self._agents.template.decode(reply.tokens)
        parsed_reply = self._prompter.parse(text)
        self._record(reply.tokens, reply.finish, text)
        template, grammar = self._agents.template, self._prompter.grammar
        structure = self._structure
        spans = template.spans(reply.tokens, grammar.cut(text)) if self._agents.spans else []
        return Move(
            text,
            parsed_reply.actions or None,
            parsed_reply.thought,
            parsed_reply.well_formed,
            reply.finish,
            Tokens(
                prompt.appended, prompt.fresh, reply.tokens, reply.logprobs, reply.versions, spans, hinted, structure
            ),
            parsed_reply.blocks,
        )

    def _record(self, reply: list[int], finish: Finish, text: str) -> None:
        # A reply that a stop text ended has no stop id.
        self._conversation.answer(reply, "length" if self._agents.sampling.stop else finish, text)

    def unanswered(self, observation: Observation, episode: Episode) -> tuple[list[int], bool]:
        prompt = self._ask(observation.text, episode, self.image_of(observation))
        return prompt.appended, prompt.fresh

    def image_of(self, observation: Observation) -> bytes:
        view = self._agents.template.view
        if view is None or not self._agents.prompt.shows_images:
            return b""
        if observation.image is None:
            raise AgentError("the prompt shows images, but the environment gave none")
        try:
            return view.scaled(observation.image.data)
        except BadImage as error:
            raise AgentError(str(error)) from error

    def close(self) -> None:
        self._agents.engine.forget(self._name)

    def _with_hint(self, observation: Observation, episode: Episode) -> list[int]:
        """Return the context of the next reply with the expert's move; empty without a hint or an expert's move."""
        hint, action = self._agents.hint, observation.expert_action
        if not (hint and isinstance(action, str)):
            return []
        note = "\n" + hint.format(action=action)
        return self._ask(observation.text, episode, self.image_of(observation), note=note).context

    def _ask(self, observation: str, episode: Episode, image: bytes = b"", *, note: str = "") -> Prompt:
        sampling = self._agents.sampling
        return self._conversation.ask(
            self._prompter.following(episode, observation, image=bool(image)) + note,
            image,
            most_tokens=sampling.max_episode_tokens - sampling.least_room,
        )
