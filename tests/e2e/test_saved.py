"""A run uses what a person saved in the live site: it imitates demonstrations, and begins in start states."""

import re
from pathlib import Path

import httpx

from starpod.trainer.data.files import read_episodes
from tests.support import ServerProcess
from tests.tools.ui.conftest import serve_site
from tests.tools.ui.test_games import Visitor, solve_by_hints, start
from tests.training import SMALL, train

OPTIONS = {"observation": "local", "success_rate": "1.0"}


def test_a_demonstration_and_a_start_state_reach_the_next_run(server: ServerProcess, tmp_path: Path) -> None:
    for address in serve_site(tmp_path, "--address", server.address, page="/fleet", shown="frozen_lake-v1"):
        with httpx.Client(base_url=address, follow_redirects=True, timeout=60.0) as http:
            visitor = Visitor(http)
            start(visitor, "frozen_lake-v1", seed="20007", **OPTIONS)
            visitor.get(f"{visitor.path}?hint=1")
            visitor.send("act", action=re.findall(r"The expert would play <b>(\w+)</b>", visitor.text)[0])
            assert visitor.send("save", kind="starts") == 200
            starts, state = re.findall(r"<code>([^<]*jsonl)</code>", visitor.text)[0], seen(visitor)
            solve_by_hints(visitor)
            assert visitor.send("save", kind="demonstrations") == 200
            words = re.findall(r"<code>(warm_start[^<]*)</code>", visitor.text)[0].split()
    base = (*SMALL, f"environment.addresses=[{server.address}]", "warm_start.steps=5", "evaluation.episodes=2")
    asked = (f"environment.starts={starts}", "environment.starts_share=0.5", *words[:1], "warm_start.episodes=20")
    said = train(*asked, "environment.options.success_rate=1", "stop.iterations=1", run_dir=tmp_path / "run", base=base)
    assert "imitating 21 demonstrations" in said
    episodes = list(read_episodes(tmp_path / "run" / "episodes" / "train-000001.jsonl.gz"))
    groups = sorted({episode.group for episode in episodes})
    for episode in episodes:
        saved = groups.index(episode.group) % 2 == 1
        assert (episode.turns[0].observation == state) == saved and episode.begun_at == int(saved)
    # What is held out stays so.
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(Path(starts).read_text().replace("20007", "7"))
    said = train(f"environment.starts={held_out}", run_dir=tmp_path / "other", status=2, base=base)
    assert "has data of seed 7, which seeds.final (0 to 4999) holds out" in said


def seen(visitor: Visitor) -> str:
    return re.findall(r'aria-label="What the agent sees"[^>]*>(.*?)</pre>', visitor.text, re.DOTALL)[0]
