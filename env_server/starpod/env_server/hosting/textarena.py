"""Host any TextArena game for one player, or two in turn: `starpod serve textarena:Mastermind-v0`."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import textarena
from textarena.envs.registration import ENV_REGISTRY
from textarena.wrappers import ActionFormattingWrapper

from starpod.env_server.authoring.environment import INVALID, Concurrency, EnvironmentSpec, OptionsError, Outcome
from starpod.env_server.hosting.hosted import (
    Hosted,
    HostedGame,
    ProbeResult,
    jsonable,
    needs_dynamics_seed,
    package_version,
    publish,
    starpod_id,
)
from starpod.env_server.hosting.request import (
    HostingError,
    HostingRequest,
    check_arguments,
    constructor,
    fitting,
    import_named,
    nearest,
    options_model,
)
from starpod.v1.values import Action

_VERSION = re.compile(r"-v([0-9]+)")
_VARIANTS = ("-raw", "-train")
"""Suffixes of ids of the same game with other wrappers for observations. They are not hosted separately, because here
an observation is always the new text."""
_STATES = {1: textarena.SinglePlayerState, 2: textarena.TwoPlayerState}
"""Classes of a game's state, by its number of players."""
_PROBED_ACTIONS = ("[1]", "[up]", "[0 0]", "[A1]", "hello", "[left]")
_SEEDS = 2**32


def host(text: str, probed: str = "") -> type[Hosted[Any]]:
    """Return the environment class for `ID?argument=value#setting=value`. Raises HostingError.

    `probed` is the encoded ProbeResult if another process has already probed the environment.
    """
    request = HostingRequest.parse(text, ("players",))
    env_class = _find(request)
    signature = constructor(env_class)
    defaults = {**ENV_REGISTRY[request.name].kwargs, **request.arguments}
    check_arguments(request, signature)
    # Games use the process's global random state, which sessions must not share.
    request.choice("concurrency", Concurrency.PROCESS.value)
    players = int(request.choice("players", "1", "2"))
    factory = TextArenaFactory(request, players)
    probe_result = ProbeResult(**json.loads(probed)) if probed else _probe(factory, env_class.__module__)
    number = _VERSION.search(request.name)
    spec = EnvironmentSpec(
        id=starpod_id(request, "textarena", _VERSION.sub("", request.name), int(number[1]) if number else 0),
        version=probe_result.version,
        title=f"{request.name} of TextArena",
        instructions="The first observation of a player holds the rules. An action is a move, as they ask for it.",
        grammar="any text: the move, as the rules ask for it",
        concurrency=Concurrency.PROCESS,
    )
    options = options_model(request, signature, defaults)
    base = TextArenaEnvironment if players == 1 else TwoPlayerEnvironment
    return publish(base, request, spec, probe_result, env_class.__module__, Options=options, factory=factory)


def installed(pattern: str) -> list[str]:
    """Return the ids that match. `*` matches any text."""
    return fitting(pattern, _registered_games())


@dataclass(frozen=True, slots=True)
class TextArenaFactory:
    """Factory of games with the operator's arguments, for a number of players."""

    request: HostingRequest
    players: int

    def begin(self, options: Mapping[str, Any], seed: int, dynamics_seed: int) -> TextArenaGame:
        """Start a new game. If that fails, raise OptionsError if the caller chose arguments, else HostingError.

        Args:
            options: the caller's constructor arguments, which replace the operator's.
            seed, dynamics_seed: seeds of the start and of the random transitions, 64 bits each.
        """
        try:
            game = textarena.make(f"{self.request.name}-raw", **{**self.request.arguments, **options})
            success_at = self.request.number("success_at", 1.0)
            return TextArenaGame(
                ActionFormattingWrapper(game), seed, dynamics_seed, players=self.players, success_at=success_at
            )
        except Exception as error:
            message = _one_line(error)
            raise (OptionsError(message) if options else self.request.fail(message)) from error


class TextArenaEnvironment(Hosted["TextArenaGame"]):
    """Environment with one game per session. An observation is what the game has said since the last move."""

    factory: ClassVar[TextArenaFactory]

    def begin(self, dynamics_seed: int) -> TextArenaGame:
        return self.factory.begin(self.options.model_dump(), self.seed, dynamics_seed)

    def render(self, mode: str = "text") -> str:
        return "\n".join(self.game.texts)

    def state_key(self) -> bytes:
        return self.digest_past(self.seed, self.options.model_dump())


class TwoPlayerEnvironment(TextArenaEnvironment):
    """Environment of two players in turn.

    The reward of a turn is that of the player who moved. The `info` of the last turn contains both players' rewards.
    """

    def agent_id(self) -> str:
        return f"Player {self.game.player}"


class TextArenaGame(HostedGame):
    """A live game. `said` holds all its texts. `new` holds the current player's texts since the last move."""

    def __init__(
        self, environment: textarena.Env, seed: int, dynamics_seed: int, *, players: int, success_at: float
    ) -> None:
        super().__init__(success_at)
        self.environment = environment
        self.reseed(seed)  # some games draw from NumPy, or before they use the seed
        environment.reset(num_players=players, seed=seed % _SEEDS)
        if not isinstance(environment.state, _STATES[players]):
            raise ValueError("it is a game for another number of players: #players=1 and #players=2 are hosted")
        self.texts: list[str] = []
        self.new = self._listen()
        if needs_dynamics_seed(seed, dynamics_seed):
            self.reseed(dynamics_seed)

    @property
    def player(self) -> int:
        """Id of the player whose turn it is."""
        return int(self.environment.state.current_player_id)

    def reseed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed % _SEEDS)

    def play(self, action: Action) -> Outcome:
        if not isinstance(action, str):
            return INVALID
        state, player = self.environment.state, self.player
        errors = state.error_count
        is_over, info = self.environment.step(action)
        self.new = self._listen()
        if not is_over:
            return self.outcome(0.0, False, info=jsonable(info))._replace(valid=state.error_count <= errors)
        rewards, game_info = self.environment.close()
        reward = rewards[player]
        if not isinstance(reward, int | float):
            raise TypeError(f"the game gave {reward!r} as a reward, which is not a number")
        all_rewards = {"rewards": {f"Player {seat}": rewards[seat] for seat in rewards}} if len(rewards) > 1 else {}
        outcome = self.outcome(reward, True, info=jsonable({**info, **game_info[player], **all_rewards}))
        return outcome._replace(valid=not game_info[player]["invalid_move"])

    def observe(self) -> str:
        return "\n".join(self.new)

    def close(self) -> None:
        pass

    def _listen(self) -> list[str]:
        """Read the game's messages to the player since the last call, without the player's own moves."""
        player, messages = self.environment.get_observation()
        own_source = (player, textarena.ObservationType.PLAYER_ACTION)
        texts = [str(text).strip() for sender, text, kind in messages if (sender, kind) != own_source]
        self.texts += texts
        return texts


def _registered_games() -> list[str]:
    return [id for id in ENV_REGISTRY if not id.endswith(_VARIANTS) and f"{id}-raw" in ENV_REGISTRY]


def _find(request: HostingRequest) -> type[textarena.Env]:
    """Return the class of a registered id, without the wrappers of its variants."""
    if request.name not in (ids := _registered_games()):
        raise request.fail(f"TextArena has no such id{nearest(request.name, ids)}")
    point = ENV_REGISTRY[request.name].entry_point
    try:
        if isinstance(point, str):
            module, _, name = point.partition(":")
            point = getattr(import_named(request, module), name)
    except HostingError:
        raise
    except Exception as error:  # some do not compile under every Python version, and some load data on import
        raise request.fail(f"it cannot be loaded: {_one_line(error)}") from error
    env_class: type[textarena.Env] = point
    return env_class


def _probe(factory: TextArenaFactory, module: str) -> ProbeResult:
    """Play some moves twice to find out whether the game is deterministic. Restore this process's random states."""
    streams = random.getstate(), np.random.get_state()
    try:
        first_play, second_play = (_play_record(factory.begin({}, 1, 2)) for _ in range(2))
    finally:
        random.setstate(streams[0])
        np.random.set_state(streams[1])
    return ProbeResult(package_version(module), deterministic=first_play == second_play).overridden(factory.request)


def _play_record(game: TextArenaGame) -> list[Any]:
    """Play some moves, and return the game's texts and outcomes. Stop if the game raises an error."""
    record: list[Any] = []
    for action in _PROBED_ACTIONS:
        try:
            outcome = game.play(action)
        except Exception as error:
            return [*record, game.texts, repr(error)]
        record.append(outcome)
        if outcome.terminated:
            break
    return [*record, game.texts]


def _one_line(error: Exception) -> str:
    """Return an error in one line, because NLTK's errors are a page long."""
    lines = [line.strip(" *") for line in str(error).splitlines()]
    return next(filter(None, lines), "") or type(error).__name__
