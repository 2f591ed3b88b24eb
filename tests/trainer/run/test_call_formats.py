"""The desk and the coding tasks with SmolLM2, whose actions are tool calls in two formats."""

import contextlib
import json
from pathlib import Path

import pytest

from starpod.cli.main import main
from starpod.client import Fleet
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import load_config
from starpod.trainer.models.hf import load_tokenizer
from starpod.trainer.prompts.template import Template
from starpod.trainer.rollout.environment import make_task
from starpod.trainer.warm_start.demonstrations import Demonstration, collect_demonstrations
from starpod.trainer.warm_start.teacher import DemonstrationWriter
from tests.support import ServerProcess

FORMATS = ("hermes", "qwen3_coder")
JOBS = ("desk_llm", "coding_llm")


async def expert_episodes(server: ServerProcess, config: Config) -> list[Demonstration]:
    async with Fleet(server.address) as fleet:
        task = make_task(config.environment, ())
        return await collect_demonstrations(fleet, config.warm_start, task, range(2))


@pytest.mark.smollm
@pytest.mark.parametrize("job", JOBS)
async def test_an_episode_has_the_same_actions_in_every_format(server: ServerProcess, job: str) -> None:
    demonstrations = await expert_episodes(server, load_config(job))
    seen = []
    for form in FORMATS:
        prompt = load_config(job, [f"prompt.grammar={form}"]).tasks[0].prompt
        template = Template(load_tokenizer(load_config(job).model), prefill=prompt.opening, calls=prompt.calls)
        assert template.layout.calls.name == form
        writer = DemonstrationWriter(load_config(job).warm_start, prompt, ())
        ids, actions = [], []
        for demonstration in demonstrations:
            episode = await writer.episode(demonstration, template, 0)
            for turn, played in zip(episode.turns, demonstration.episode.turns, strict=True):
                parsed = prompt.make_grammar().parse(template.decode(turn.reply))
                assert list(parsed.actions) == list(turn.actions) == list(played.actions) and parsed.well_formed
                ids.append(turn.reply)
                actions.append(parsed.actions)
        seen.append((ids, actions))
    (hermes_ids, hermes_actions), (coder_ids, coder_actions) = seen
    assert hermes_actions == coder_actions and all(one != two for one, two in zip(hermes_ids, coder_ids, strict=True))


SMALL = (
    "collect.groups=1",
    "collect.group_size=2",
    "algorithm.mini_batch_size=2",
    "algorithm.filter.value=1.0",
    "warm_start.steps=0",
    "evaluation.episodes=1",
    "evaluation.every=100",
    "evaluation.reference=[]",
    "environment.max_turns=1",
    "sampling.max_reply_tokens=24",
    "optimizer.warmup_iterations=0",
    "stop.iterations=1",
    "monitor.sinks.tensorboard=false",
    "monitor.screen=plain",
)


@pytest.mark.smollm
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("job", "form"), [("desk_llm", "hermes")])
def test_an_iteration_of_training(job: str, form: str, tmp_path: Path) -> None:
    with contextlib.suppress(SystemExit):
        main(["train", job, f"prompt.grammar={form}", *SMALL, "--run-dir", str(tmp_path)])
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1
