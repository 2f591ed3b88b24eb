"""Prompts: the system message about the task, and a message about the state at each turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from starpod.client import Limits
from starpod.trainer.configuration.kinds import KindBy
from starpod.trainer.configuration.section import ConfigError, Section
from starpod.trainer.configuration.user_file import UserCodeError, call, known_or_located, load, names_file
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.images import MARK, NOT_A_MARK
from starpod.trainer.prompts.calls import CallGrammar
from starpod.trainer.prompts.formats.table import FORMATS
from starpod.trainer.prompts.grammar import Further, Grammar, Parsed, UserGrammar

OPENING = "You are an agent in an environment. You act turn by turn, and after each turn you see what came of it."


class FullContext(Section):
    """The whole conversation."""

    kind: Literal["full"] = "full"


class LatestTurns(Section):
    """The latest turns, as a conversation (window) or in a single message (single_turn)."""

    kind: Literal["window", "single_turn"] = "window"
    window: int | None = Field(default=None, ge=1, description="Turns to show; null: all.")


class SplitContext(Section):
    """A conversation that grows to a number of turns, and then restarts with the pinned first turns and the latest
    ones."""

    kind: Literal["split"] = "split"
    window: int = Field(ge=1, description="Turns of each part.")
    pinned: int = Field(default=0, ge=0, description="First turns of the episode that every part shows.")
    overlap: int = Field(default=0, ge=0, description="Last turns of a part that the next part repeats.")

    @model_validator(mode="after")
    def _parts_advance(self) -> SplitContext:
        if self.overlap >= self.window:
            raise ValueError(
                f"prompt.context split begins a new part after {self.window} turns, {self.overlap} of which are "
                "repeated: set prompt.context.window to more than overlap"
            )
        return self


Context = Literal["full", "window", "split", "single_turn"]
ContextConfig = Annotated[FullContext | LatestTurns | SplitContext, KindBy("kind")]


class PromptConfig(Section):
    """Texts of the prompt, and the part of the past that it shows."""

    style: Literal["full", "compact"] = Field(
        default="full",
        description="full: with instructions and rules for replies. compact: only the observation, for tiny models.",
    )
    observation: Literal["text", "image", "both"] = Field(
        default="text",
        description="Form of observations in the prompt. An image needs a model with image input.",
    )
    thinking: bool = Field(default=True, description="Asks for reasoning between think tags before the answer.")
    blocks: tuple[Further, ...] = Field(
        default=(), description="Further blocks of a reply, between reasoning and answer: [switch, subgoal]."
    )
    grammar: str = Field(
        default="tags",
        description="Form of replies. tags: reasoning and answer between tags; the name of a format of tool calls; "
        "FILE.py:NAME: a class of yours that derives from Grammar.",
        examples=["tags", *FORMATS, "FILE.py:NAME"],
    )
    context: ContextConfig = Field(
        default=FullContext(),
        description="Past that a reply sees. full: all turns; window: the latest turns; single_turn: the latest "
        "turns in one message; split: a conversation that begins again when it has become long.",
    )
    prefill: bool = Field(
        default=True, description="Ends the prompt with the reply's first tag, without training on it."
    )
    system: str | None = Field(
        default=None, description="Beginning of the system message; null: one sentence, or nothing in compact."
    )
    show_reward: bool | None = Field(default=None, description="Shows the last reward; null: only with style full.")
    show_actions_left: bool | None = Field(
        default=None, description="Shows how many actions are left; null: only with style full."
    )
    words: int | None = Field(default=100, ge=1, description="Requested maximum words of a reply; null: none.")
    max_observation: int | None = Field(
        default=20_000,
        ge=1,
        description="Maximum characters of an observation; the prompt says how many are omitted; null: all.",
    )

    @field_validator("grammar")
    @classmethod
    def _locate_grammar(cls, text: str) -> str:
        return known_or_located(text, ["tags", *FORMATS], "reply grammar")

    @model_validator(mode="after")
    def _names_each_block_once(self) -> PromptConfig:
        if len({*self.blocks}) < len(self.blocks):
            raise ValueError("prompt.blocks names a block twice: drop one")
        if self.blocks and self.calls:
            raise ValueError(f"prompt.grammar {self.grammar} has no further blocks: drop prompt.blocks")
        return self

    @model_validator(mode="after")
    def _images_keep_their_turn(self) -> PromptConfig:
        if self.shows_images and self.context.kind == "single_turn":
            raise ValueError(
                f"prompt.observation {self.observation} shows an image per turn, but prompt.context single_turn puts "
                "all turns in one message: set context to window"
            )
        return self

    @property
    def calls(self) -> str:
        """The configured format of tool calls; empty if replies have another form."""
        return self.grammar if self.grammar in FORMATS else ""

    @property
    def shows_images(self) -> bool:
        return self.observation != "text"

    def make_grammar(self, actions: Sequence[str] = ()) -> Grammar:
        """Return the grammar of replies for these action names. Raises ConfigError if it cannot be loaded."""
        if self.calls:
            return CallGrammar(FORMATS[self.calls], self.thinking, actions)
        if not names_file(self.grammar):
            return Grammar(self.thinking, actions, self.blocks)
        setting, kind = f"prompt.grammar {self.grammar}", load("prompt.grammar", self.grammar)
        if not (isinstance(kind, type) and issubclass(kind, Grammar)):
            raise ConfigError(f"{setting} must be a subclass of starpod.trainer.prompts.grammar.Grammar")
        return UserGrammar(call(f"{setting} failed", kind, self.thinking, actions, self.blocks), setting)

    @property
    def opening(self) -> str:
        """Text at the end of prompts: the reply's first tag, or nothing without prefill."""
        return self.make_grammar().opening if self.prefill else ""

    def check_grammar(self) -> None:
        """Raise ConfigError if the grammar of a user's file cannot be loaded, or cannot parse its own replies."""
        if not names_file(self.grammar):
            return
        setting = f"prompt.grammar {self.grammar}"
        thought, blocks = "a thought" if self.thinking else None, dict.fromkeys(self.blocks, "a block")
        try:
            grammar = self.make_grammar()
            text = grammar.compose(thought, ["one", "two"], blocks)
            parsed = grammar.parse(text)
            texts = (grammar.opening, grammar.describe())
        except UserCodeError as error:
            raise ConfigError(f"on its own reply, {error}") from error
        if not text.startswith(grammar.opening):
            raise ConfigError(f"{setting}: its replies, such as {text!r}, must begin with its opening, {texts[0]!r}")
        if (parsed.thought, parsed.actions, dict(parsed.blocks)) != (thought, ("one", "two"), blocks):
            raise ConfigError(
                f"{setting} does not read its own replies: of {text!r}, with the thought {thought!r}, the actions "
                f"one and two and the blocks {blocks}, it reads {parsed}"
            )


class Prompter:
    """Writes the messages about an environment's task and turns, and parses the replies.

    Args:
        instructions: The environment's instructions, which depend on its options.
        limits: Limits of the session; 0 and None mean no limit.
    """

    def __init__(self, config: PromptConfig, instructions: str, actions: Sequence[str], limits: Limits) -> None:
        self.config = config
        self.instructions = instructions
        self.grammar = config.make_grammar(actions)
        self.limits = limits
        full = config.style == "full"
        self.shows_reward = full if config.show_reward is None else config.show_reward
        self.shows_actions_left = full if config.show_actions_left is None else config.show_actions_left
        self.reminder = self.grammar.describe(limits.max_actions_per_turn or None)
        if config.words is not None:
            self.reminder += f" Use at most {config.words} words."

    def system(self) -> str:
        """Return the system message; "" if there is none."""
        config = self.config
        if config.style == "compact":
            return config.system or ""
        lines = [OPENING if config.system is None else config.system, self.instructions]
        if actions := self.grammar.actions:
            lines.append(f"Actions: {', '.join(actions)}.")
        lines.append(self._limits())
        if config.context.kind == "single_turn":
            # The user message contains the past turns, each of which would repeat the reminder.
            lines.append(self.reminder)
        return "\n".join(line for line in lines if line)

    def user(
        self,
        number: int,
        observation: str,
        *,
        image: bool = False,
        reward: float | None = None,
        actions_left: int | None = None,
        warning: bool = False,
    ) -> str:
        """Return the message of a turn.

        Args:
            number: Number of the turn, from 1.
            image: Whether to insert a placeholder for an image.
            reward: Reward of the previous turn, if there was one.
            actions_left: Number of actions left in the episode; None is no limit.
            warning: Whether the previous turn had no valid action.
        """
        observation = capped(observation, self.config.max_observation)
        if image:
            text = observation.replace(MARK, NOT_A_MARK) if self.config.observation == "both" else ""
            observation = f"{MARK}\n{text}" if text else MARK
        lines = []
        if reward is not None and self.shows_reward:
            lines.append(f"Reward: {format_reward(reward)}")
        note = "" if actions_left is None or not self.shows_actions_left else f"{_count(actions_left, 'action')} left."
        if self.config.style == "compact":
            lines += ["Invalid." if warning else "", note, observation]
        else:
            suffix = f" of {self.limits.max_turns}" if self.limits.max_turns else ""
            lines += [f"Turn {number}{suffix}", "State:", observation]
            lines.append("Your last reply held no valid action. Try again." if warning else "")
            lines.append(note and f"You have {note}")
            lines.append("" if self.config.context.kind == "single_turn" else self.reminder)
        return "\n".join(line for line in lines if line)

    def following(self, episode: Episode, observation: str, *, image: bool = False) -> str:
        """Return the message of the episode's next turn, with the environment's reward for the previous turn."""
        last_turn = episode.turns[-1] if episode.turns else None
        actions_left = None
        if limit := self.limits.max_actions:
            actions_left = max(limit - sum(turn.executed for turn in episode.turns), 0)
        return self.user(
            len(episode.turns) + 1,
            observation,
            image=image,
            reward=last_turn.own_reward if last_turn else None,
            actions_left=actions_left,
            warning=last_turn is not None and not last_turn.valid,
        )

    def parse(self, reply: str) -> Parsed:
        """Parse a reply. Actions beyond the limit of one turn are dropped."""
        return self.grammar.parse(reply, self.limits.max_actions_per_turn or None)

    def reply_of(self, turn: Turn) -> str:
        """Return the turn's text if it parses to the turn's actions; otherwise compose a well-formed reply."""
        if self.parse(turn.text).actions == tuple(turn.actions):
            return turn.text
        blocks = {name: turn.blocks.get(name, "") for name in self.grammar.blocks}
        return self.grammar.compose(turn.thought, turn.actions, blocks)

    def _limits(self) -> str:
        limits = self.limits
        episode = " and ".join(
            _count(limit, kind) for limit, kind in ((limits.max_turns, "turn"), (limits.max_actions, "action")) if limit
        )
        parts = [f"an episode ends after {episode}" if episode else ""]
        if limits.max_actions_per_turn:
            parts.append(f"a turn takes at most {_count(limits.max_actions_per_turn, 'action')}")
        text = "; ".join(part for part in parts if part)
        return text and f"Limits: {text}."


def fold(exchanges: Sequence[tuple[str, str]], turns: int, user: str) -> str:
    """Combine the current message and the last of `turns` previous turns into a single message (`single_turn`).

    Args:
        exchanges: User message and reply of each turn to show, oldest first.
        turns: Number of all previous turns, shown or not.
        user: Message of the current turn.
    """
    if not exchanges:
        return user
    text = "\n\n".join(f"{message}\nYour reply: {reply}" for message, reply in exchanges)
    return f"Turns so far: {turns}. Shown: {len(exchanges)}.\n\n{text}\n\nNow:\n{user}"


def capped(observation: str, characters: int | None) -> str:
    """Cut off an observation after `characters`, and append the number of omitted characters; None keeps all of it."""
    if characters is None or len(observation) <= characters:
        return observation
    return f"{observation[:characters]}\n[The other {len(observation) - characters} characters are not shown.]"


def format_reward(value: float) -> str:
    """Format a reward without the noise of binary fractions: 10.7, -0.1, 0."""
    return f"{value + 0.0:.10g}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
