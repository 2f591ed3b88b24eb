"""Recorded episodes of the original environments, replayed in ours: no difference but the chosen ones."""

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from starpod.env_server.authoring.environment import UNKNOWN_NAME, Environment, Limits
from starpod.env_server.episodes.live_episode import EpisodeEnded, LiveEpisode, TurnResult, Want
from starpod.environments.bandit import Bandit
from starpod.environments.countdown import Countdown
from starpod.environments.countdown.expression import MalformedExpression, parse
from starpod.environments.countdown.puzzles import signs_for
from starpod.environments.frozen_lake import FrozenLake
from starpod.environments.game_2048 import Game2048
from starpod.environments.rubiks_cube import RubiksCube
from starpod.environments.sokoban import Sokoban
from starpod.environments.sudoku import Sudoku
from tests.environments import episodes
from tests.golden import Draws, Parity, episodes_of, golden

CHOSEN: dict[type[Environment], dict[str, str]] = {
    Bandit: {
        "short-first-observation": "the original shows its whole prompt; ours names the arms, instructions() explains",
        "invalid-is-an-outcome": "the original raises on an unknown arm; ours answers valid=false and changes nothing",
        "over-is-over": "the original pulls again after its one pull; ours refuses until the next reset",
    },
    FrozenLake: {
        "open-success-unknown": "the original says success=false while all is open; ours says nothing until it is over",
        "invalid-is-an-outcome": "the original raises on an unknown action; ours answers valid=false, changes nothing",
        "over-is-over": "the original steps on after the end; ours refuses until the next reset",
        "no-draw-without-slip": "the original draws a number even where nothing can slip; ours does not",
    },
    Countdown: {
        "listing-earns-nothing": "the original pays 0.1 for the right digits in any text; ours only for an expression",
        "no-comments": "the original runs the answer as code, so a comment passes; ours knows arithmetic only",
        "right-hand-side": "the original counts the digits after = among the numbers; ours allows = and the target",
        "malformed-is-invalid": "the original says every answer is valid; ours says which could not be read",
        "over-is-over": "the original takes answer after answer; ours refuses until the next reset",
    },
    Sokoban: {
        "open-success-unknown": "the original says success = false while the episode is open; here nothing is said yet",
        "over-is-over": "the original continues after the end and pays +9.9 for every step; here a reset is due",
        "four-moves-only": "the original also takes ids 0 (wait) and 5 to 8 (walk only); invalid and free here",
        "names-not-ids": "an action is its name; the original takes ids and raises on a name",
        "invalid-is-an-outcome": "other ids raise in the original; here they are invalid outcomes",
        "own-sprites": "pictures have the original's size and content, but are drawn by ourselves",
    },
    Sudoku: {
        "cell-pays-once": "overwriting a cell pays what it gains over the best digit it held, not the whole again",
        "same-digit-again": "a digit that the cell holds already is refused as such, not as in conflict with itself",
        "every-step-counts": "the step limit ends the episode whatever the last action was, not on a placement only",
        "open-success-unknown": "the original says success = false while the episode is open; here nothing is said yet",
        "over-is-over": "the original continues after the end; here a reset is due",
    },
    Game2048: {
        "open-success-unknown": "the original says success = false while the episode is open; here nothing is said yet",
        "invalid-is-an-outcome": "the original raises on an unknown action; ours answers valid=false, changes nothing",
        "over-is-over": "a locked board reports its end once in the original, then continues; here a reset is due",
    },
    RubiksCube: {
        "open-success-unknown": "the original says success = false while the episode is open; here nothing is said yet",
        "invalid-is-an-outcome": "the original raises on an unknown action; ours answers valid=false, changes nothing",
        "over-is-over": "the original continues after the end; here a reset is due",
        "back-turns-as-on-a-cube": "the original's turns of the back swap two stickers of the row that comes from or "
        "goes to the down face, which tears corners apart; ours are those of a cube",
    },
}
FILTER_CHOSEN = {"all-numbers-count": "the original's filter looks at the first four numbers only; ours at all"}

VARIANTS: dict[type[Environment], str] = {
    Bandit: "Bandit BanditTest x_BanditCustom",
    FrozenLake: "FrozenLake CoordFrozenLake x_CoordFrozenLakeSuccess1 x_FrozenLake8x8 x_FrozenLakeCoordOnly "
    "x_FrozenLakeNoSlip",
    Countdown: "Countdown",
    Sokoban: "SimpleSokoban LargerSokoban SokobanDifferentGridVocab CoordSokoban VisualSimpleSokoban "
    "x_SokobanCoordOnly x_SokobanMaxSteps8 x_SokobanNonSquare6x9 x_SokobanThreeBoxes7 x_SokobanTwoBoxCoord",
    Sudoku: "SimpleSudoku MediumSudoku x_Sudoku4Detailed x_Sudoku9Simple",
    Game2048: "game_2048 x_2048RawReward x_2048ToTheEnd",
    RubiksCube: "rubikscube x_RubikDepth5",
}


def records_of(kind: type[Environment]) -> Iterator[Any]:
    for variant in VARIANTS[kind].split():
        records = episodes_of(variant)
        assert records, variant
        yield from records


Played = tuple[str, Any, Any, TurnResult]


def turns(
    record: Any, episode: LiveEpisode, parity: Parity, before: Callable[[Any], Any] = lambda step: None
) -> Iterator[Played]:
    """Yield the place, the recorded step, its action and our transition for each step that both programs played.

    before: is called with each step first. If it returns true, the step is not played.
    """
    environment = episode.environment
    for number, step in enumerate(record["steps"]):
        parity.steps += 1
        if before(step):
            continue
        if episode.end_reason:
            with pytest.raises(EpisodeEnded):
                episode.turn(["anything"], Want())
            parity.deviate("over-is-over")
            continue
        action = step["action"] if step.get("action_name") is None else step["action_name"]
        if "exception" in step and action in environment.spec.actions:
            action = "not an action"  # the original knows actions by number: a name is right for us and wrong for it
        shown = environment.observe()
        transition = episode.turn([action], Want())
        if "exception" in step:
            outcome = transition.outcomes[0]
            assert outcome is not None and not outcome.valid and not outcome.effective
            assert transition.parts == shown and not transition.terminated
            parity.deviate("invalid-is-an-outcome")
            continue
        yield f"{record['id']} step {number}", step, action, transition


def compare_transitions(parity: Parity, where: str, step: Any, transition: TurnResult, **deviations: str) -> None:
    """Compares a step with its record, part by part. deviations: by part, the deliberate one that may change it."""
    outcome, info = transition.outcomes[0], step["info"]
    assert outcome is not None
    still_open = "" if transition.end_reason else "open-success-unknown"
    for part, ours, original in (
        ("shown", transition.parts, step["obs"]),
        ("reward", transition.reward, step["reward"]),
        ("done", transition.terminated or transition.truncated, step["done"]),
        ("success", transition.success, info["success"]),
        ("effective", outcome.effective, info["action_is_effective"]),
        ("valid", outcome.valid, info["action_is_valid"]),
    ):
        parity.equal(f"{where} {part}", ours, original, {"success": still_open, **deviations}.get(part, ""))


def replay_bandit(record: Any, parity: Parity) -> None:
    config, start = record["config"], record["reset"]
    episode = episodes.start(
        Bandit,
        split=config["split"],
        low_reward=config["lo_arm_score"],
        high_reward=config["hi_arm_hiscore"],
        high_loss=config["hi_arm_loscore"],
        high_probability=config["hi_arm_hiscore_prob"],
    )
    bandit: Any = episode.environment
    bandit.reset(Draws(start["rng_uniforms"]))  # pair and order come out of the recorded draws
    assert bandit.arms == tuple(start["action_lookup"].values())
    assert bandit.high == start["hi_arm"]
    parity.equal(record["id"], bandit.observe(), start["obs"], "short-first-observation")

    def before(step: Any) -> None:
        bandit._dynamics = Draws(step.get("rng_uniforms", []))

    for where, step, _, transition in turns(record, episode, parity, before):
        assert bandit._dynamics.left == [], where
        assert not transition.truncated, where
        compare_transitions(parity, where, step, transition)


def replay_frozen_lake(record: Any, parity: Parity) -> None:
    config, start = record["config"], record["reset"]
    rate = config["success_rate"] if config["is_slippery"] else 1.0
    episode = episodes.start(FrozenLake, map=start["desc"], success_rate=rate, observation=config["observation_format"])
    lake: Any = episode.environment
    parity.equal(record["id"], lake.observe(), start["obs"])
    parity.equal(record["id"], lake.position, start["start_state"])

    def before(step: Any) -> None:
        assert lake.position == step["state_before"], record["id"]
        lake._dynamics = Draws(step["rng_uniforms"])

    for where, step, _, transition in turns(record, episode, parity, before):
        parity.equal(where, lake._dynamics.left, [], "" if rate < 1 else "no-draw-without-slip")
        parity.equal(where, lake.position, step["state_after"])
        assert not transition.truncated, where
        compare_transitions(parity, where, step, transition)


def replay_countdown(record: Any, parity: Parity) -> None:
    config, start = record["config"], record["reset"]
    episode = episodes.start(
        Countdown,
        numbers=start["nums"],
        target=start["target"],
        reward_correct=config["score"],
        reward_numbers=config["format_score"],
    )
    parity.equal(record["id"], episode.environment.observe(), start["obs"])
    for where, step, action, transition in turns(record, episode, parity):
        name = ""
        if isinstance(action, str):
            try:
                name = "right-hand-side" if parse(action).claim is not None else ""
            except MalformedExpression:
                name = "no-comments" if "#" in action else "listing-earns-nothing"
        malformed = name in ("no-comments", "listing-earns-nothing") or not isinstance(action, str)
        assert transition.outcomes[0] is not None
        assert transition.outcomes[0].valid is not malformed, (where, action)
        assert not transition.truncated, where
        earned = dict.fromkeys(("shown", "reward", "success", "effective"), name)
        compare_transitions(parity, where, step, transition, valid="malformed-is-invalid", **earned)


def replay_sokoban(record: Any, parity: Parity) -> None:
    config, start = record["config"], record["reset"]
    pictures = config["render_mode"] == "rgb_array"
    episode = episodes.start(
        Sokoban,
        seed=record["seed"],
        layout=start["grid"],
        symbols=symbols_of(record),
        observation="rgb" if pictures else config["observation_format"],
        max_steps=config["max_steps"],
    )
    sokoban: Any = episode.environment

    def drawn(shown: Any, original: Any, where: str) -> str:
        """The deviation of what is drawn: of a picture the size is compared."""
        if isinstance(original, str):
            return ""
        picture = Image.open(io.BytesIO(shown[0].data)).convert("RGB")
        assert [picture.height, picture.width, len(picture.getbands())] == original["shape"], where
        return "own-sprites"

    first = sokoban.observe()
    parity.equal(record["id"], first, start["obs"], drawn(first, start["obs"], record["id"]))
    grid = ""

    def before(step: Any) -> bool:
        nonlocal grid
        grid = sokoban.render("text")
        named = isinstance(step["action"], str) and not episode.end_reason
        if named:
            parity.deviate("names-not-ids")
        return named

    for where, step, _, transition in turns(record, episode, parity, before):
        if step["action_name"] is None:
            assert sokoban.render("text") == grid, where
            assert transition.outcomes[0] is not None and not transition.outcomes[0].valid, where
            parity.deviate("four-moves-only")
            recorded = step.get("grid", step["obs"])
            assert isinstance(recorded, str)
            sokoban.player = max(map(recorded.find, "PSA@"))  # go on from where the original walked to
            sokoban.steps = step["num_env_steps"]
            if step["done"]:
                return
            continue
        compare_transitions(parity, where, step, transition, shown=drawn(transition.parts, step["obs"], where))
        parity.equal(f"{where} grid", sokoban.render("text"), step.get("grid", step["obs"]))
        parity.equal(f"{where} on target", len(sokoban.boxes & sokoban.board.targets), step["boxes_on_target"])
        parity.equal(f"{where} steps", sokoban.steps, step["num_env_steps"])


def symbols_of(record: Any) -> str:
    return "letters" if "DifferentGridVocab" in record["variant"] else "default"


def replay_sudoku(record: Any, parity: Parity) -> None:
    config, start = record["config"], record["reset"]
    episode = episodes.start(
        Sudoku,
        seed=record["seed"],
        puzzle=start["initial_grid"],
        solution=start["solution_grid"],
        observation=config["render_format"],
        max_steps=config["max_steps"],
    )
    sudoku: Any = episode.environment
    parity.equal(record["id"], sudoku.observe(), start["obs"])
    grid: list[int] = []

    def before(step: Any) -> None:
        grid[:] = sudoku.grid

    for where, step, _, transition in turns(record, episode, parity, before):
        outcome = transition.outcomes[0]
        assert outcome is not None
        said = dict(outcome.info or {})
        overwritten = any(was and was != now for was, now in zip(grid, sudoku.grid, strict=True))
        late = sudoku.steps >= config["max_steps"] and not outcome.valid
        repeat = "same-digit-again" if "already" in said.get("error", "") else ""
        compare_transitions(
            parity,
            where,
            step,
            transition,
            shown=repeat,
            reward="cell-pays-once" if overwritten else "",
            done="every-step-counts" if late else "",
        )
        flags = ("success", "action_is_effective", "action_is_valid")
        info = {name: value for name, value in step["info"].items() if name not in flags}
        parity.equal(f"{where} info", said, info, repeat)


class NumpyDraws(random.Random):
    """The original's stream: NumPy's default generator."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = np.random.default_rng(seed)

    def randrange(self, stop: int) -> int:  # type: ignore[override]
        return int(self._generator.integers(stop))

    def random(self) -> float:
        return float(self._generator.random())


def replay_2048(record: Any, parity: Parity) -> None:
    config, start = record["config"], record["reset"]
    episode = episodes.start(
        Game2048,
        size=config["size"],
        two_probability=config["two_prob"],
        reward="log" if config["use_log_reward"] else "raw",
    )
    game: Any = episode.environment
    draws = NumpyDraws(record["seed"])
    game.reset(draws)
    game._dynamics = draws
    parity.equal(record["id"], game.observe(), start["obs"])
    for where, step, _, transition in turns(record, episode, parity):
        compare_transitions(parity, where, step, transition)
        parity.equal(f"{where} score", game.points, step["info"]["score"])
        valid = [name for name, open_ in zip(game.spec.actions, step["info"]["action_mask"], strict=True) if open_]
        parity.equal(f"{where} valid actions", game.valid_actions(), valid)


def replay_cube(record: Any, parity: Parity) -> None:
    config, start = record["config"], record["reset"]
    names = {int(number): name for number, name in config["action_lookup"].items()}
    scramble = [names[number] for number in start["scramble_actions"]]
    episode = episodes.start(RubiksCube, scramble=scramble, max_steps=config["max_steps"])
    cube: Any = episode.environment
    torn = "back-turns-as-on-a-cube" if {"B", "B'"} & set(scramble) else ""
    parity.equal(record["id"], cube.observe(), start["obs"], torn)
    cube.cube = bytes(start["state"])
    for where, step, action, transition in turns(record, episode, parity):
        torn = "back-turns-as-on-a-cube" if action in ("B", "B'") else ""
        if torn and cube.cube != bytes(step["state_after"]):
            # Where it goes to (R, D of B; L, D of B'), the row that the down face gives or takes is back to front.
            for one, other in ((13, 15), (22, 23)) if action == "B" else ((4, 6), (22, 23)):
                swapped = bytearray(cube.cube)
                swapped[one], swapped[other] = swapped[other], swapped[one]
                cube.cube = bytes(swapped)
        parity.equal(f"{where} stickers", list(cube.cube), step["state_after"])
        compare_transitions(parity, where, step, transition, shown=torn)


REPLAYS: dict[type[Environment], Callable[[Any, Parity], None]] = {
    Bandit: replay_bandit,
    FrozenLake: replay_frozen_lake,
    Countdown: replay_countdown,
    Sokoban: replay_sokoban,
    Sudoku: replay_sudoku,
    Game2048: replay_2048,
    RubiksCube: replay_cube,
}


@pytest.mark.parametrize("kind", REPLAYS)
def test_recorded_episodes(kind: type[Environment], capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity(CHOSEN[kind])
    for record in records_of(kind):
        parity.episodes += 1
        REPLAYS[kind](record, parity)
    parity.report(kind.spec.id, capsys)


def test_recorded_shortest_solutions_of_sokoban() -> None:
    for record in records_of(Sokoban):
        episode = episodes.start(Sokoban, layout=record["reset"]["grid"], symbols=symbols_of(record))
        played = episodes.play_expertly(episode, rising=False)
        assert len(played) == len(record["reset"]["shortest_solution"]), record["id"]


def test_recorded_filter_of_countdown(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity(FILTER_CHOSEN)
    for record in golden("countdown_filter"):
        parity.episodes += 1
        parity.steps += 1
        numbers, target = record["nums"], record["target"]
        assert (signs_for(numbers[:4], target) is not None) is record["kept"], record
        name = "all-numbers-count" if len(numbers) > 4 else ""
        parity.equal(record["id"], signs_for(numbers, target) is not None, record["kept"], name)
    parity.report("countdown-v1's filter (puzzles as steps)", capsys)


def options_of(kind: type[Environment], record: Any) -> dict[str, Any]:
    layout, variant = record["layout"], record["variant"]
    if kind is Bandit:
        return {"pair": (layout["lo_arm"], layout["hi_arm"])}
    if kind is FrozenLake:
        return {"map": layout["desc"], "observation": "grid_coord" if "Coord" in variant else "grid"}
    if kind is Countdown:
        return {"numbers": layout["nums"], "target": layout["target"]}
    if kind is Sudoku:
        return {"puzzle": layout["initial_grid"], "solution": layout["solution_grid"]}
    symbols = symbols_of(record)
    characters = "W.GCBA@" if symbols == "letters" else "#_O√XPS"
    rows = [
        "".join(characters[6 if (kind, under) == (5, 2) else kind] for kind, under in zip(*rows, strict=True))
        for rows in zip(layout["room_state"], layout["room_fixed"], strict=True)
    ]
    return {"layout": rows, "symbols": symbols, "observation": "grid_coord" if "Coord" in variant else "grid"}


def deviation_of(kind: type[Environment], record: Any, transition: TurnResult) -> str:
    """The chosen deviation that may change what is shown after a turn."""
    if kind is Bandit:
        return "" if transition.terminated else "short-first-observation"
    if kind is Sudoku:
        return "same-digit-again" if " already\n" in str(transition.parts) else ""
    return "own-sprites" if "Visual" in record["variant"] else ""


TURNS = {
    Bandit: ["short-first-observation"],
    FrozenLake: [],
    Countdown: [],
    Sokoban: ["own-sprites"],
    Sudoku: ["same-digit-again"],
}
"""The deviations that occur in turns."""


@pytest.mark.parametrize("kind", TURNS)
def test_recorded_turns(kind: type[Environment], capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity({name: CHOSEN[kind][name] for name in TURNS[kind]})
    for record in golden("manager_trajectories"):
        if kind.__name__ not in record["variant"]:
            continue
        limits = Limits(max_actions=record["max_actions_per_traj"], max_actions_per_turn=record["max_actions_per_turn"])
        episode = episodes.start(kind, limits=limits, **options_of(kind, record))
        if isinstance(episode.environment, Bandit):
            episode.environment.arms = tuple(record["layout"]["action_lookup"].values())
        parity.episodes += 1
        for turn in record["turns"]:
            where = f"{record['id']} turn {turn['turn']}"
            draws = episode.environment._dynamics = Draws(turn.get("rng_uniforms", []))
            transition = episode.turn(turn["parsed_actions"], Want())
            parity.steps += 1
            shown = deviation_of(kind, record, transition)
            parity.equal(f"{where} state", transition.parts, turn["next_state"], shown)
            parity.equal(f"{where} draws", draws.left, [])
            parity.equal(f"{where} reward", transition.reward, turn["turn_reward"])
            parity.equal(f"{where} active", not episode.end_reason, turn["still_active"])
            parity.equal(f"{where} actions", episode.actions, turn["status"]["num_actions"])
            executed = sum(outcome not in (None, UNKNOWN_NAME) for outcome in transition.outcomes)
            parity.equal(f"{where} executed", executed, len(turn["executed_actions"]))
            # The original calls every end without success truncated.
            won = turn["status"]["terminated"] and not turn["status"]["truncated"]
            parity.equal(f"{where} success", bool(transition.success), won)
    parity.report(f"{kind.spec.id} in turns", capsys)
