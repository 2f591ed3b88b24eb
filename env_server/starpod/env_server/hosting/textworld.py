"""Host TextWorld games that `tw-make` created: `starpod serve textworld:games/`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import textworld

from starpod.env_server.authoring.environment import INVALID, Concurrency, EnvironmentOptions, EnvironmentSpec, Outcome
from starpod.env_server.hosting.hosted import Hosted, HostedGame, ProbeResult, package_version, publish, starpod_id
from starpod.env_server.hosting.request import HostingRequest, fitting
from starpod.v1.values import Action

_GAMES = (".z8", ".ulx")
_PROBED_COMMANDS = ("inventory", "look", "dance", "go east", "take all")
_WANTED = textworld.EnvInfos(
    feedback=True, admissible_commands=True, policy_commands=True, score=True, max_score=True, won=True, lost=True
)


def host(text: str, probed: str = "") -> type[Hosted[Any]]:
    """Return the environment class for `FILE` or `FOLDER`, with `#setting=value`. Raises HostingError.

    `probed` is the encoded ProbeResult if another process has already probed the environment.
    """
    request = HostingRequest.parse(text, ())
    if request.arguments:
        raise request.fail("a finished game takes no arguments; give them to tw-make")
    games = _games(request)
    factory = TextWorldFactory(request, games)
    probe_result = ProbeResult(**json.loads(probed)) if probed else _probe(factory)
    spec = EnvironmentSpec(
        id=starpod_id(request, "textworld", Path(request.name).stem, 1),
        version=probe_result.version,
        title=f"{Path(request.name).stem} of TextWorld",
        instructions="You play a text adventure. An action is one command, such as: take key, open door, go east.",
        grammar="any text: a command",
        # Each game has a copy of the interpreter, which it writes to a file. A confined process cannot do that.
        concurrency=Concurrency.THREAD,
    )
    options = EnvironmentOptions
    return publish(TextWorldEnvironment, request, spec, probe_result, "textworld", Options=options, factory=factory)


def installed(pattern: str) -> list[str]:
    """Return the games, and the folders of games, in the current folder that match."""
    return fitting(pattern, [path.name for path in Path().iterdir() if _game_files(path)])


@dataclass(frozen=True, slots=True)
class TextWorldFactory:
    """Factory of games. `games` are the files, sorted by name."""

    request: HostingRequest
    games: Sequence[Path]

    def begin(self, seed: int) -> TextWorldGame:
        """Start the game whose index is the seed modulo the number of games. Raises HostingError."""
        path = self.games[seed % len(self.games)]
        try:
            return TextWorldGame(path)
        except Exception as error:
            raise self.request.fail(f"{path.name}: {type(error).__name__}: {error}") from error


class TextWorldEnvironment(Hosted["TextWorldGame"]):
    """Environment with one game per session. The reward of a command is the points that it scores."""

    factory: ClassVar[TextWorldFactory]

    def begin(self, dynamics_seed: int) -> TextWorldGame:
        return self.factory.begin(self.seed)

    def render(self, mode: str = "text") -> str:
        return "\n".join(self.game.texts)

    def valid_actions(self) -> Sequence[str]:
        return sorted(self.game.state.admissible_commands or ())

    def state_key(self) -> bytes:
        return self.digest_past(self.seed % len(self.factory.games))

    def expert_action(self) -> str | None:
        """Return the next command of a shortest solution, or None if the game can no longer be solved."""
        commands = self.game.state.policy_commands
        return str(commands[0]) if commands else None

    def score(self) -> float:
        """Return the points scored as a share of the maximum. It is below 1 until the game is won."""
        state = self.game.state
        if state.won:
            return 1.0
        return min(0.99, max(0.0, (state.score or 0) / state.max_score)) if state.max_score else 0.0


class TextWorldGame(HostedGame):
    """A live game. `state` is its latest state, and `said` holds all its texts."""

    def __init__(self, path: Path) -> None:
        super().__init__(None)
        self.environment = textworld.start(str(path), _WANTED)
        self.state = self.environment.reset()
        self.texts = [self.state.feedback.strip()]

    def play(self, action: Action) -> Outcome:
        if not isinstance(action, str) or not action.strip() or "\n" in action:
            return INVALID
        before = self.state.score or 0
        self.state, _, is_over = self.environment.step(action)
        self.texts.append(self.state.feedback.strip())
        outcome = self.outcome((self.state.score or 0) - before, bool(is_over))
        return outcome._replace(success=bool(self.state.won)) if is_over else outcome

    def observe(self) -> str:
        return str(self.texts[-1])

    def close(self) -> None:
        self.environment.close()


def _games(request: HostingRequest) -> list[Path]:
    games = _game_files(Path(request.name).resolve())
    if not games:
        raise request.fail(
            f"{request.name} is not a game and contains none; make one: tw-make tw-simple --output game.z8"
        )
    for game in games:
        if not game.with_suffix(".json").is_file():
            raise request.fail(f"{game.name} has no {game.stem}.json next to it, which tw-make also writes")
    return games


def _game_files(game_path: Path) -> list[Path]:
    """Return the games of a folder, sorted, or the file itself if it is a game."""
    paths = [game_path] if game_path.is_file() else game_path.glob("*")
    return sorted(path for path in paths if path.suffix in _GAMES)


def _probe(factory: TextWorldFactory) -> ProbeResult:
    """Play some commands twice to find out whether the game is deterministic."""
    first, second = (_play_record(factory.begin(0)) for _ in range(2))
    return ProbeResult(package_version("textworld"), deterministic=first == second).overridden(factory.request)


def _play_record(game: TextWorldGame) -> list[Any]:
    try:
        outcomes = [game.play(command) for command in _PROBED_COMMANDS]
        return [outcomes, game.texts, sorted(game.state.admissible_commands), game.state.policy_commands]
    finally:
        game.close()
