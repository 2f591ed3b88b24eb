"""Replays recorded episodes of the original Sokoban from their layouts."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from starpod.env_server.environment import Limits
from starpod.env_server.episode import Episode, Want
from starpod.environments.sokoban import Sokoban
from tests.environments.recorded_turns import begin, records_of, replay_turns
from tests.golden import Parity, episodes_of

CHOSEN = {
    "open-success-unknown": "the original says success = false while the episode is open; here nothing is said yet",
    "over-is-over": "after the end the original goes on and pays +9.9 for every step; here a reset is due",
    "four-moves-only": "the original also takes ids 0 (wait) and 5 to 8 (walk only); here they are invalid and free",
    "names-not-ids": "an action is its name; the original takes ids and raises on a name",
    "invalid-is-an-outcome": "other ids raise in the original; here they are invalid outcomes",
    "own-sprites": "pictures have the original's size and content, but are drawn by ourselves",
}

VARIANTS = (
    "SimpleSokoban",
    "LargerSokoban",
    "SokobanDifferentGridVocab",
    "CoordSokoban",
    "VisualSimpleSokoban",
    "x_SokobanCoordOnly",
    "x_SokobanMaxSteps8",
    "x_SokobanNonSquare6x9",
    "x_SokobanThreeBoxes7",
    "x_SokobanTwoBoxCoord",
)


def test_recorded_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity(CHOSEN)
    for variant in VARIANTS:
        episodes = episodes_of(variant)
        assert episodes, variant
        for record in episodes:
            replay(record, parity)
    parity.report("sokoban-v1", capsys)


def replay(record: Any, parity: Parity) -> None:
    config, start = record["config"], record["reset"]
    sokoban = Sokoban()
    sokoban.options = Sokoban.Options(
        layout=start["grid"],
        symbols="letters" if "DifferentGridVocab" in record["variant"] else "default",
        observation="rgb" if config["render_mode"] == "rgb_array" else config["observation_format"],
        max_steps=config["max_steps"],
    )
    episode = Episode(sokoban, Limits())
    episode.reset(record["seed"], 0)
    parity.episodes += 1
    compare_observation(record["id"], sokoban.observe(), start["obs"], parity)
    for number, step in enumerate(record["steps"]):
        where = f"{record['id']} step {number}"
        if episode.end_reason:
            parity.deviate("over-is-over")
            continue
        name = step["action_name"]
        if isinstance(step["action"], str):
            parity.deviate("names-not-ids")
            continue
        grid = sokoban.render("text")
        transition = episode.turn([name or step["action"]], Want())
        outcome = transition.outcomes[0]
        parity.steps += 1
        if name is None:
            assert not outcome.valid, where
            assert sokoban.render("text") == grid, where
            if "exception" in step:
                parity.deviate("invalid-is-an-outcome")
                continue
            parity.deviate("four-moves-only")
            recorded = step.get("grid", step["obs"])
            assert isinstance(recorded, str)
            sokoban.player = max(map(recorded.find, "PSA@"))  # go on from where the original walked to
            sokoban.steps = step["num_env_steps"]
            if step["done"]:
                return
            continue
        compare_observation(where, transition.observation.parts, step["obs"], parity)
        parity.equal(f"{where} grid", sokoban.render("text"), step.get("grid", step["obs"]))
        parity.equal(f"{where} reward", transition.reward, step["reward"])
        parity.equal(f"{where} done", bool(episode.end_reason), step["done"])
        still_open = "" if episode.end_reason else "open-success-unknown"
        parity.equal(f"{where} success", transition.success, step["info"]["success"], still_open)
        parity.equal(f"{where} effective", outcome.effective, step["info"]["action_is_effective"])
        parity.equal(f"{where} valid", outcome.valid, step["info"]["action_is_valid"])
        parity.equal(f"{where} on target", len(sokoban.boxes & sokoban.board.targets), step["boxes_on_target"])
        parity.equal(f"{where} steps", sokoban.steps, step["num_env_steps"])


def compare_observation(where: str, ours: Any, original: Any, parity: Parity) -> None:
    if isinstance(original, str):
        parity.equal(where, ours, original)
        return
    picture = Image.open(io.BytesIO(ours[0].data)).convert("RGB")
    assert [picture.height, picture.width, len(picture.getbands())] == original["shape"], where
    parity.deviate("own-sprites")


def test_recorded_shortest_solutions() -> None:
    checked = 0
    for variant in VARIANTS:
        for record in episodes_of(variant):
            sokoban = Sokoban()
            symbols = "letters" if "DifferentGridVocab" in variant else "default"
            sokoban.options = Sokoban.Options(layout=record["reset"]["grid"], symbols=symbols)
            episode = Episode(sokoban, Limits())
            episode.reset(0, 0)
            while not episode.end_reason:
                last = episode.turn([sokoban.expert_action()], Want())
            assert last.success
            assert episode.actions == len(record["reset"]["shortest_solution"]), record["id"]
            checked += 1
    assert checked > 0


def test_recorded_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """Turns of several actions under limits, as the original's manager played them."""
    parity = Parity({"own-sprites": CHOSEN["own-sprites"]})
    for record in records_of("Sokoban"):
        state, fixed = record["layout"]["room_state"], record["layout"]["room_fixed"]
        layout = [
            "".join("S" if (kind, under) == (5, 2) else "#_O√XP"[kind] for kind, under in zip(*rows, strict=True))
            for rows in zip(state, fixed, strict=True)
        ]
        letters = "DifferentGridVocab" in record["variant"]
        sokoban = Sokoban()
        sokoban.options = Sokoban.Options(
            layout=[row.translate(str.maketrans("#_O√XPS", "W.GCBA@")) for row in layout] if letters else layout,
            symbols="letters" if letters else "default",
            observation="grid_coord" if "Coord" in record["variant"] else "grid",
        )
        shown = "own-sprites" if "Visual" in record["variant"] else ""
        replay_turns(record, begin(sokoban, record), parity, lambda transition, shown=shown: shown)
    parity.report("sokoban-v1 in turns", capsys)
