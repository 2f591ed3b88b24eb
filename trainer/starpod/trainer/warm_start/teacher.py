"""The teacher: an agent that plays demonstrations again and writes its replies with the prompt code of training."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import NamedTuple, cast

from starpod.client import Action, EndReason, Image, Limits, Observation, Session, Transition
from starpod.trainer.agents.base import Move, Stop, Tokens
from starpod.trainer.agents.config import VERIFIER, SamplingConfig, ScriptConfig
from starpod.trainer.agents.script import VERDICTS, Speaker, View, role_of, script_agent
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.prompts.conversation import Conversation
from starpod.trainer.prompts.grammar import SEPARATOR
from starpod.trainer.prompts.prompt import PromptConfig, Prompter
from starpod.trainer.prompts.template import Template
from starpod.trainer.rollout.play import play
from starpod.trainer.warm_start.config import WarmStartConfig
from starpod.trainer.warm_start.demonstrations import Demonstration

GROUP = "starpod.demonstrations"
"""Entry-point group of functions that fill in thoughts and blocks.

Such a function takes an episode, one of its turns, and the observation after that turn. It returns texts by name. It
raises ValueError if it cannot parse an observation.
"""


@functools.cache
def _describer() -> Callable[[Episode, Turn, str], Mapping[str, str]]:
    """Return the registered function that describes the relations in a state. Raises ConfigError if there is none."""
    for entry in entry_points(group=GROUP, name="relations"):
        describe: Callable[[Episode, Turn, str], Mapping[str, str]] = entry.load()
        return describe
    raise ConfigError(f"warm_start cannot name relations: no installed package registers them in the group {GROUP}")


class RecordedSession:
    """Session in which a demonstration is played again: a step has the result that the recorded turn had.

    Actions count as executed and valid, because a prompt should not show mistakes that are not imitated. A fork plays
    the next earlier attempt; closing it leads to the attempt after that.

    Attributes:
        is_cut: Whether an attempt ended early because its next reply did not fit into the context.
    """

    limits = Limits()
    dynamics_seed = 0
    is_cut = False

    def __init__(self, demonstration: Demonstration) -> None:
        self._attempts = [*demonstration.earlier_attempts, demonstration]
        self._index = 0

    @property
    def turns(self) -> Sequence[Turn]:
        return self._attempts[0].episode.turns

    @property
    def done(self) -> bool:
        return self._index == len(self.turns)

    @property
    def turn(self) -> Turn:
        """The recorded turn that is played next."""
        return self.turns[self._index]

    @property
    def imitate(self) -> bool:
        """Whether that turn is imitated."""
        return self._attempts[0].imitate[self._index]

    @property
    def after(self) -> str:
        """Observation after that turn."""
        is_last = self._index + 1 == len(self.turns)
        return self._attempts[0].episode.final_observation if is_last else self.turns[self._index + 1].observation

    @property
    def observation(self) -> Observation:
        if self.done:
            return Observation((self._attempts[0].episode.final_observation,))
        images = (Image(self.turn.image),) if self.turn.image else ()
        return Observation((self.turn.observation, *images), self.turn.state_key, agent_id=self.turn.agent_id)

    async def step(self, actions: Sequence[Action]) -> Transition:
        after, reward, count = self.after, self.turn.own_reward, len(actions)
        self._index += 1
        return Transition(after, reward, (7,) * count, (0.0,) * count, b"", EndReason.NONE, None, None, tuple(actions))

    async def fork(self, *, reseed: bool, dynamics_seeds: Sequence[int]) -> list[RecordedSession]:
        return [self]

    async def close(self) -> None:
        del self._attempts[0]
        self._index = 0


class WrittenReply(NamedTuple):
    """A reply of the teacher."""

    message: str
    """Message of the prompt."""
    text: str
    weight: float
    """Weight in the loss: 1 if the reply is imitated, else 0."""


class Teacher(Speaker):
    """Speaker whose replies are the recorded turns.

    Args:
        template: Template of the ids; None: replies have no ids.
        verdicts: Random numbers of a verifier, None for other speakers. Verdicts are random, because nobody has judged
            which proposals are right: they only teach the format.
        replies: List to which replies are added.
    """

    def __init__(
        self,
        writer: DemonstrationWriter,
        session: RecordedSession,
        *,
        prompter: Prompter,
        template: Template | None,
        verdicts: random.Random | None,
        replies: list[WrittenReply],
    ) -> None:
        self._writer = writer
        self._session = session
        self._prompter = prompter
        self._template = template
        self._verdicts = verdicts
        self._replies = replies
        if template is not None:
            self._conversation = Conversation.of(template, writer.prompt)
            self._conversation.system(prompter.system())

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        image = b"" if self.view else self.image_of(observation)
        view = self.view or View(observation.text, episode, fresh=False)
        turn, previous_turns = self._session.turn, view.history.turns
        if self._verdicts is not None:
            actions = [self._verdicts.choice(VERDICTS)]
            text = self._writer.reply(replace(turn, actions=actions))
        else:
            actions = turn.actions
            relations = self._writer.relations(view.history, turn, self._session.after)
            text = self._writer.reply(turn, previous_turns[-1] if previous_turns else None, relations)
        message = self._prompter.following(view.history, view.text, image=bool(image))
        tokens = None
        if self._template is not None:
            tokens = self._encode(self._template, message, image, text, whole=view.fresh)
            if tokens is None:
                self._session.is_cut = True
                return Stop("context")
        self._replies.append(WrittenReply(message, text, float(self._session.imitate)))
        return Move(text, actions, tokens=tokens)

    def _encode(self, template: Template, message: str, image: bytes, text: str, *, whole: bool) -> Tokens | None:
        """Return the ids of a prompt and its reply; None if the policy would have no room for the reply.

        whole: whether the whole context is the prompt.
        """
        sampling, ids = self._writer.sampling, template.encode_reply(text)
        most_tokens = sampling.max_episode_tokens - sampling.least_room if sampling else None
        prompt = self._conversation.ask(message, image, most_tokens=most_tokens)
        if sampling and len(prompt.context) + max(len(ids), sampling.least_room) > sampling.max_episode_tokens:
            return None
        self._conversation.answer(ids, "stop", text)
        prompt_ids, fresh = (list(prompt.context), True) if whole else (prompt.appended, prompt.fresh)
        return Tokens(prompt_ids, fresh, ids, [0.0] * len(ids), [0] * len(ids))

    def image_of(self, observation: Observation) -> bytes:
        image, template = observation.image, self._template
        if image is None or template is None:
            return image.data if image else b""
        return template.view.scaled(image.data) if template.view else b""


class DemonstrationWriter:
    """Writer of demonstrations in the policy's format, as texts and as episodes with tokens.

    Args:
        sampling: Limits of contexts, at which episodes with tokens end as rollouts do; None: there are none.

    Attributes:
        cut_count: Number of episodes with tokens that ended early because a context was full.
    """

    def __init__(
        self,
        config: WarmStartConfig,
        prompt: PromptConfig,
        actions: Sequence[str],
        script: ScriptConfig | None = None,
        sampling: SamplingConfig | None = None,
    ) -> None:
        self.config = config
        self.sampling = sampling
        self.prompt = prompt
        self.script = script or ScriptConfig()
        self.actions = tuple(actions)
        self.grammar = prompt.make_grammar(self.actions)
        # Replies without reasoning get no thought, even if one is configured for the environment.
        self.thought = config.thought if self.grammar.thinking else ""
        self.cut_count = 0

    @property
    def attempts(self) -> int:
        """Number of episodes of a demonstration."""
        return self.script.attempts if self.script.name == "attempts" else 1

    async def texts(self, demonstrations: Iterable[Demonstration]) -> list[str]:
        """Return all texts that a policy will read or write, to train a tokenizer on."""
        texts = []
        for demonstration in demonstrations:
            _, replies = await self._play(demonstration, None)
            prompter = self._prompter(demonstration, "")
            texts.append(prompter.system())
            for reply in replies:
                texts += [reply.message, reply.text]
            # Add the warning after a mistake. Demonstrations make no mistakes, so the tokenizer would not see it.
            texts.append(prompter.user(2, "", warning=True))
        return texts

    async def episode(self, demonstration: Demonstration, template: Template, group: int) -> Episode:
        """Return the demonstration with tokens. A turn's weight in the loss is 1 if it is imitated, else 0."""
        turns, replies = await self._play(demonstration, template)
        for turn, reply in zip(turns, replies, strict=True):
            turn.weight = reply.weight
        return replace(demonstration.episode, group=group, turns=turns)

    async def _play(
        self, demonstration: Demonstration, template: Template | None
    ) -> tuple[list[Turn], list[WrittenReply]]:
        """Play a demonstration again by the script. Return its turns, and the teacher's replies, one per turn."""
        session, replies = RecordedSession(demonstration), list[WrittenReply]()

        def make_speaker(name: str, begun_at: int | None) -> Teacher:
            judges = self.script.name == "solver_verifier" and name == VERIFIER
            return Teacher(
                self,
                session,
                prompter=self._prompter(demonstration, name),
                template=template,
                verdicts=random.Random(f"verdicts/{demonstration.episode.seed}") if judges else None,
                replies=replies,
            )

        script = self.script
        if script.name == "attempts":  # demonstrations from a file have no earlier attempts
            script = script.model_copy(update={"attempts": 1 + len(demonstration.earlier_attempts)})
        agent = script_agent(script, self.prompt, make_speaker)
        record = replace(demonstration.episode, turns=[], end="", success=None)
        # With a record to continue, `play` uses only those members of a session that RecordedSession has.
        await play(agent, cast(Session, session), episode=record)
        self.cut_count += session.is_cut
        return record.turns, replies

    def _prompter(self, demonstration: Demonstration, speaker: str) -> Prompter:
        prompt, actions = role_of(self.script, speaker, self.prompt, self.actions)
        return Prompter(prompt, demonstration.episode.instructions, actions, demonstration.limits)

    def reply(self, turn: Turn, previous_turn: Turn | None = None, texts: Mapping[str, str] | None = None) -> str:
        """Return the whole reply, including any prefilled part.

        Args:
            texts: Additional texts to fill in, by name.

        Raises:
            ConfigError: A thought or block does not fit the observation.
        """
        blocks = {name: self._fill(f"blocks.{name}", text, turn, texts) for name, text in self.config.blocks.items()}
        if "switch" not in blocks and (subgoal := self.config.blocks.get("subgoal")) is not None:
            keeps_subgoal = (
                previous_turn is not None and self._fill("blocks.subgoal", subgoal, previous_turn) == blocks["subgoal"]
            )
            blocks["switch"] = "KEEP" if keeps_subgoal else "SWITCH"
        if missing := [name for name in self.grammar.blocks if name not in blocks]:
            raise ConfigError(
                f"prompt.blocks has {missing[0]}, but no demonstration does: set warm_start.blocks.{missing[0]}"
            )
        thought = turn.thought or self._fill("thought", self.thought, turn, texts)
        return self.grammar.compose(thought, turn.actions, blocks)

    def _fill(self, key: str, template: str, turn: Turn, texts: Mapping[str, str] | None = None) -> str:
        action = f" {SEPARATOR} ".join(turn.actions)
        try:
            return template.format(action=action, words=turn.observation.split(), **(texts or {}))
        except (LookupError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"warm_start.{key} {template!r} cannot be filled in for the observation {turn.observation[:60]!r} "
                f"({type(error).__name__}: {error}): it may use {{action}}, {{relations}}, {{next_relations}}, "
                "{intended_relations}, and {words[0]} and so on, one per word of the observation"
            ) from error

    def relations(self, episode: Episode, turn: Turn, after: str) -> Mapping[str, str]:
        """Return texts on the relations in the states before and after a turn; empty if no template uses them."""
        if not any("relations}" in text for text in (self.thought, *self.config.blocks.values())):
            return {}
        try:
            return _describer()(episode, turn, after)
        except ValueError as error:
            raise ConfigError(f"warm_start cannot name relations: {error}") from error
