"""Demonstrations to imitate, so that a new policy learns the response format."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points

from starpod.client import Fleet, Limits, Observation, StarpodError
from starpod.trainer.agents.base import Agent, Move, Stop, Task
from starpod.trainer.agents.config import SOLVER, VERIFIER, ScriptConfig
from starpod.trainer.agents.script import (
    REJECT,
    VERDICTS,
    proposal_message,
    rejection_message,
    retry_message,
    role_prompt,
)
from starpod.trainer.agents.scripted import REFERENCES, choose_randomly
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.episode import DONE, Episode, Turn, part_sums
from starpod.trainer.data.files import BadEpisodes, read_episodes
from starpod.trainer.prompts.conversation import Conversation
from starpod.trainer.prompts.grammar import SEPARATOR
from starpod.trainer.prompts.prompt import PromptConfig, Prompter
from starpod.trainer.prompts.template import Template
from starpod.trainer.rollout.play import play, together
from starpod.trainer.warm_start.config import WarmStartConfig

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


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One episode of a demonstrator, with one action per turn."""

    episode: Episode
    limits: Limits
    """Limits of its session."""
    imitate: list[bool]
    """For each turn, whether it is imitated."""
    earlier_attempts: tuple[Demonstration, ...] = ()
    """Earlier attempts at the same start state, if a script has them."""


class Demonstrator(Agent):
    """A reference policy with some random moves.

    images: whether turns keep the environment's images. imitate: for each turn so far, whether to imitate it.
    """

    def __init__(self, config: WarmStartConfig, task: Task, seed: str, *, images: bool = False) -> None:
        self._images = images
        self.imitate: list[bool] = []
        self._config = config
        self._task = task
        self._choose, _ = REFERENCES[config.actions]
        self._rng = random.Random(f"demonstration/{seed}")

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        action = self._choose(observation, self._task.actions, self._rng)
        if action is None:
            if not episode.turns:
                raise ConfigError(
                    f"{self._task.environment} shows no {self._config.actions} action to imitate; "
                    "set warm_start.actions to random, or warm_start.steps to 0"
                )
            return Stop()
        noisy = self._rng.random() < self._config.noise
        if noisy:
            action = choose_randomly(observation, self._task.actions, self._rng) or action
        self.imitate.append(self._config.imitate_noise or not noisy)
        return Move(action, [action])

    def image_of(self, observation: Observation) -> bytes:
        return observation.image.data if self._images and observation.image else b""


async def collect_demonstrations(
    fleet: Fleet,
    config: WarmStartConfig,
    task: Task,
    seeds: Sequence[int],
    attempts: int = 1,
    *,
    images: bool = False,
    watch: Callable[[Demonstration], None] = lambda _: None,
) -> list[Demonstration]:
    """Play one episode per seed, preceded by other attempts at its start state if `attempts` is above 1.

    Args:
        fleet: Servers of the environment.
        config: The warm start's configuration.
        task: Task to play.
        seeds: Seeds of the start states.
        attempts: Number of episodes per seed.
        images: Whether turns keep images.
        watch: Called with the demonstration of each finished seed.

    Raises:
        ConfigError: An expert is configured, and the environment has none.
        StarpodError: An episode failed.
    """
    _, want = REFERENCES[config.actions]
    if config.noise and not task.actions:  # without fixed actions, the environment must list valid actions
        want = replace(want, valid_actions=True)
    want = replace(want, image=images)

    async def demonstrate(seed: int, attempt: str) -> Demonstration:
        (session,) = await task.open(fleet, seed, 1, want)
        demonstrator = Demonstrator(config, task, f"{seed}{attempt}", images=images)
        try:
            episode = await play(demonstrator, session)
        finally:
            await session.close()
        if episode.failed:
            raise StarpodError(f"a demonstration from seed {seed} failed: {episode.error}")
        count, limit = config.actions_per_turn, session.limits.max_actions_per_turn
        if limit and count > limit:
            raise ConfigError(
                f"warm_start.actions_per_turn is {count}, but a turn of {task.environment} may have {limit}: lower "
                "it, or raise environment.max_actions_per_turn"
            )
        demonstration = Demonstration(episode, session.limits, demonstrator.imitate)
        return join_turns(demonstration, count, random.Random(f"joined/{seed}{attempt}"))

    async def with_earlier(seed: int) -> Demonstration:
        names = [*(f"/{number}" for number in range(1, attempts)), ""]
        *earlier, last = await together(demonstrate(seed, name) for name in names)
        watch(last)
        return replace(last, earlier_attempts=tuple(earlier))

    return await together(map(with_earlier, seeds))


def join_turns(demonstration: Demonstration, max_moves: int, rng: random.Random) -> Demonstration:
    """Join moves into turns of 1 to `max_moves` moves. A turn is imitated if all of its moves are."""
    turns: list[Turn] = []
    imitate: list[bool] = []
    moves_left = 0
    for turn, imitated in zip(demonstration.episode.turns, demonstration.imitate, strict=True):
        if moves_left:
            joined = turns[-1]
            turns[-1] = replace(
                joined,
                actions=[*joined.actions, *turn.actions],
                outcomes=[*joined.outcomes, *turn.outcomes],
                parts=part_sums([joined, turn]),
            )
            imitate[-1] = imitate[-1] and imitated
        else:
            turns.append(turn)
            imitate.append(imitated)
            moves_left = rng.randint(1, max_moves)
        moves_left -= 1
    return replace(demonstration, episode=replace(demonstration.episode, turns=turns), imitate=imitate)


def choose_best(demonstrations: Sequence[Demonstration], share: float) -> Sequence[Demonstration]:
    """Return the demonstrations with the highest returns, in their original order.

    Their moves without effect are not imitated.

    Args:
        demonstrations: The demonstrations to choose from.
        share: Fraction of the demonstrations to return; 1 returns all of them unchanged.
    """
    if share == 1:
        return demonstrations
    ranking = sorted(range(len(demonstrations)), key=lambda index: -demonstrations[index].episode.own_return)
    selection = [demonstrations[index] for index in sorted(ranking[: math.ceil(share * len(ranking))])]
    return [
        replace(
            item,
            imitate=[
                flag and 0 < turn.effective == len(turn.outcomes)
                for flag, turn in zip(item.imitate, item.episode.turns, strict=True)
            ],
        )
        for item in selection
    ]


def read_demonstrations(path: str, environment: str, limits: Limits) -> list[Demonstration]:
    """Read the episodes of an environment from a file or folder. Turns with an invalid move are not imitated.

    limits: limits of a session of the environment. Raises ConfigError if there is no such episode.
    """
    try:
        episodes = [episode for episode in read_episodes(path) if episode.environment == environment and episode.turns]
    except BadEpisodes as error:
        raise ConfigError(f"warm_start.demonstrations: {error}") from error
    for episode in episodes:
        episode.turns = [turn for turn in episode.turns if turn.actions]
    if not any(episode.turns for episode in episodes):
        raise ConfigError(f"warm_start.demonstrations {path} holds no episode of {environment} with an action")
    return [
        Demonstration(episode, limits, [turn.valid == len(turn.actions) for turn in episode.turns])
        for episode in episodes
        if episode.turns
    ]


class DemonstrationWriter:
    """Writer of demonstrations in the policy's format, as texts and as episodes with tokens."""

    def __init__(
        self,
        config: WarmStartConfig,
        prompt: PromptConfig,
        actions: Sequence[str],
        script: ScriptConfig | None = None,
    ) -> None:
        self.config = config
        self.prompt = prompt
        self.script = script or ScriptConfig()
        self.actions = tuple(actions)
        self.grammar = prompt.make_grammar(self.actions)
        # Replies without reasoning get no thought, even if one is configured for the environment.
        self.thought = config.thought if self.grammar.thinking else ""

    def reply(self, turn: Turn, previous_turn: Turn | None = None, texts: Mapping[str, str] | None = None) -> str:
        """Return the whole reply, including any prefilled part.

        Args:
            turn: The turn to write.
            previous_turn: The previous turn.
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

    def _relations(self, episode: Episode, turn: Turn, after: str) -> Mapping[str, str]:
        """Return texts on the relations in the states before and after a turn; empty if no template uses them."""
        if not any("relations}" in text for text in (self.thought, *self.config.blocks.values())):
            return {}
        try:
            return _describer()(episode, turn, after)
        except ValueError as error:
            raise ConfigError(f"warm_start cannot name relations: {error}") from error

    @property
    def attempts(self) -> int:
        """Number of episodes of a demonstration."""
        return self.script.attempts if self.script.name == "attempts" else 1

    def texts(self, demonstrations: Iterable[Demonstration]) -> Iterable[str]:
        """Return all texts that a policy will read or write, to train a tokenizer on."""
        for demonstration in demonstrations:
            prompter = self._prompter(demonstration)
            yield prompter.system()
            for reply in self._replies(demonstration):
                yield prompter.following(reply.past, reply.observation, image=bool(reply.turn.image))
                yield reply.text
            # Add the warning after a mistake. Demonstrations make no mistakes, so the tokenizer would not see it.
            yield prompter.user(2, "", warning=True)

    def episode(self, demonstration: Demonstration, template: Template, group: int) -> Episode:
        """Return the demonstration with tokens. A turn's weight in the loss is 1 if it is imitated, else 0."""
        conversations: dict[str, Conversation] = {}
        prompter = self._prompter(demonstration)
        episode = replace(demonstration.episode, group=group, turns=[])
        for reply in self._replies(demonstration):
            if reply.speaker not in conversations:
                conversations[reply.speaker] = Conversation.of(template, self.prompt)
                conversations[reply.speaker].system(self._prompter(demonstration, reply.speaker).system())
            conversation = conversations[reply.speaker]
            image = template.view.scaled(reply.turn.image) if template.view and reply.turn.image else b""
            prompt = conversation.ask(prompter.following(reply.past, reply.observation, image=bool(image)), image)
            ids = template.encode_reply(reply.text)
            conversation.answer(ids, "stop", reply.text)
            # With several speakers, each prompt is recorded in full, from its beginning.
            fresh = prompt.fresh or len(conversations) > 1
            episode.turns.append(
                replace(
                    reply.turn,
                    image=image,
                    prompt=list(prompt.context) if fresh else prompt.appended,
                    fresh=fresh,
                    reply=ids,
                    logprobs=[0.0] * len(ids),
                    versions=[0] * len(ids),
                    text=reply.text,
                    agent_id=reply.speaker or reply.turn.agent_id,
                    weight=float(reply.imitate),
                )
            )
        return episode

    def _prompter(self, demonstration: Demonstration, speaker: str = "") -> Prompter:
        prompt, instructions = role_prompt(self.script, self.prompt, speaker), demonstration.episode.instructions
        actions = VERDICTS if speaker == VERIFIER else self.actions
        return Prompter(prompt, instructions, actions, demonstration.limits)

    def _replies(self, demonstration: Demonstration) -> Iterable[ScriptReply]:
        """Return the replies of a demonstration, in the order of the script."""
        if self.script.name == "solver_verifier":
            yield from self._proposals_and_verdicts(demonstration)
            return
        if self.script.name == "self_play":
            yield from self._by_agent(demonstration)
            return
        for number, attempt in enumerate((*demonstration.earlier_attempts, demonstration)):
            for reply in self._turns(attempt):
                is_retry = number and not reply.past.turns
                observation = (
                    retry_message(self.script, self.prompt, reply.observation) if is_retry else reply.observation
                )
                yield replace(reply, observation=observation)

    def _turns(self, demonstration: Demonstration) -> Iterable[ScriptReply]:
        """Return the turns as replies of one agent."""
        episode = demonstration.episode
        past = replace(episode, turns=[])
        observations = [*(turn.observation for turn in episode.turns[1:]), episode.final_observation]
        for turn, next_observation, imitate in zip(episode.turns, observations, demonstration.imitate, strict=True):
            texts = self._relations(episode, turn, next_observation)
            text = self.reply(turn, past.turns[-1] if past.turns else None, texts)
            yield ScriptReply("", turn.observation, past, text, turn, imitate)
            # Demonstrations make no mistakes.
            past = replace(past, turns=[*past.turns, replace(turn, outcomes=[DONE] * len(turn.actions))])

    def _by_agent(self, demonstration: Demonstration) -> Iterable[ScriptReply]:
        """Return the turns as replies of the environment's agents. Each agent sees only its own turns."""
        agents = [turn.agent_id for turn in demonstration.episode.turns]
        replies = {
            name: iter(list(self._turns(_turns_of_agent(demonstration, name)))) for name in dict.fromkeys(agents)
        }
        for name in agents:
            yield replace(next(replies[name]), speaker=name)

    def _proposals_and_verdicts(self, demonstration: Demonstration) -> Iterable[ScriptReply]:
        """Return each turn as a proposal with a verdict. A random half is rejected and proposed again.

        The verdicts only teach the format, because nobody has judged which proposals are right.
        """
        rng = random.Random(f"verdicts/{demonstration.episode.seed}")
        for reply in self._turns(demonstration):
            yield replace(reply, speaker=SOLVER)
            verdict = rng.choice(VERDICTS)
            text = self.reply(replace(reply.turn, actions=[verdict]))
            observation = proposal_message(reply.observation, reply.turn.actions)
            yield replace(reply, speaker=VERIFIER, observation=observation, text=text)
            if verdict == REJECT:
                yield replace(reply, speaker=SOLVER, observation=rejection_message(reply.observation))


@dataclass(frozen=True, slots=True)
class ScriptReply:
    """One reply of a demonstration."""

    speaker: str
    """Speaker in the script; "" if there is only one."""
    observation: str
    """The observation that the speaker sees."""
    past: Episode
    """Earlier turns, whose results the speaker sees."""
    text: str
    turn: Turn
    """The turn that the reply plays or judges."""
    imitate: bool
    """Whether the reply is imitated."""


def _turns_of_agent(demonstration: Demonstration, name: str) -> Demonstration:
    """Return the part of a demonstration that one agent played."""
    indices = [index for index, turn in enumerate(demonstration.episode.turns) if turn.agent_id == name]
    episode = replace(demonstration.episode, turns=[demonstration.episode.turns[index] for index in indices])
    return replace(demonstration, episode=episode, imitate=[demonstration.imitate[index] for index in indices])
