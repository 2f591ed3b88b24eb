"""Episodes that are seen as pictures, from a server to the loss."""

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from starpod.client import Fleet, Want
from starpod.trainer.agents.config import SamplingConfig
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.configuration.optimizer import OptimizerConfig
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.data.images import MARK, ImageConfig, image_ids, read_image
from starpod.trainer.data.sample import samples_of
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import Policy, build_policy
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.prompts.prompt import Context, PromptConfig
from starpod.trainer.prompts.template import Template
from starpod.trainer.rollout.collect import Collector, Start
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.rollout.environment import make_task
from starpod.trainer.update import PolicyTrainer
from tests.trainer.lake import ACTIONS
from tests.trainer.models.tiny_vlm import tiny_vlm
from tests.trainer.tiny_learner import learner_of, scored_table
from tests.trainer.turns import a_turn

LAKE = EnvironmentConfig(
    id="frozen_lake-v1",
    options={"success_rate": 1.0, "tile_pixels": 16, "observation": "local"},
    max_turns=4,
    max_actions_per_turn=1,
)
VIEW = ImageConfig(rows=4, columns=4, pixels=4)
EXACT = OptimizerConfig(lr=1e-3, max_logprob_gap_mean=1e-5, max_logprob_gap_q99=1e-4)


@pytest.fixture(params=["tiny", "smolvlm"])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    if request.param == "smolvlm":
        return tiny_vlm("smolvlm", tmp_path, "shared")
    shape = {"hidden": 32, "heads": 2, "intermediate": 48, "image": VIEW.to_dict()}
    config = ModelConfig.model_validate({"tiny": shape})
    return build_policy(config, texts=[f"{MARK} P 0 1 2 3 Left Down Right Up"], critic="shared", seed=1)


@asynccontextmanager
async def collecting(fleet: Fleet, policy: Policy, prompt: PromptConfig) -> AsyncIterator[Collector[EngineAgents]]:
    engine = TorchEngine(policy, slots=8, max_context=256)
    template = Template(policy.tokenizer, prefill=prompt.opening, view=policy.view)
    agents = EngineAgents(
        engine=engine,
        template=template,
        prompt=prompt,
        sampling=SamplingConfig(max_reply_tokens=4, max_episode_tokens=256),
        want=Want(image=True),
    )
    yield Collector(fleet=fleet, agents=agents, task=make_task(LAKE, ACTIONS))
    await engine.close()


@pytest.mark.parametrize(("observation", "context", "window"), [("image", "window", 2), ("both", "full", None)])
async def test_what_was_sampled_from_pictures_is_what_is_trained(
    fleet: Fleet, policy: Policy, observation: str, context: Context, window: int | None
) -> None:
    values = {
        "style": "compact",
        "thinking": False,
        "observation": observation,
        "context": {"kind": context} | ({"window": window} if window else {}),
    }
    prompt = PromptConfig.model_validate(values)
    async with collecting(fleet, policy, prompt) as collector:
        collected = await collector.collect([Start(0, 1), Start(1, 2)], 3)
    assert collected.failed == 0
    group = collected.groups[0]
    first = group.episodes[0].turns[0]
    assert read_image(first.image).size == (16, 16)
    assert [each for each in first.prompt if each < 0] == image_ids(first.image, 16)
    text = policy.tokenizer.decode([each for each in first.prompt if each >= 0])
    assert ("P " in text) == (observation == "both")
    assert first.observation.startswith("P "), "the record keeps the text that is not shown"
    # Members of a group begin with the same picture, so with the same ids.
    assert len({tuple(episode.turns[0].prompt) for episode in group.episodes}) == 1

    again = [Group.from_json(json.loads(json.dumps(each.to_json()))) for each in collected.groups]
    assert again == collected.groups
    trainer = PolicyTrainer(policy, AlgorithmConfig.model_validate("starpo-s"), EXACT, Parallel(), max_length=256)
    before = {name: each.clone() for name, each in policy.named_parameters()}
    for each in again:
        for member, episode in enumerate(each.episodes):
            episode.turns[-1].parts = {"environment": float(member)}
    learner_of(trainer).learn(again, version=0)  # raises LogprobGap where the pictures got mixed up
    moved = {name for name, each in policy.named_parameters() if not torch.equal(each, before[name])}
    eyes = {name for name in before if any(part in name for part in ("encoder", "places", "connector", "vision"))}
    # What is added to all keys alike changes no attention.
    assert {name for name in eyes if not name.endswith("k_proj.bias")} <= moved


async def test_a_cut_episode_is_bootstrapped_from_its_last_picture(fleet: Fleet, policy: Policy) -> None:
    prompt = PromptConfig(style="compact", thinking=False, observation="image")
    async with collecting(fleet, policy, prompt) as collector:
        collected = await collector.collect([Start(0, 1)], 4)
    cut = [each for each in collected.groups[0].episodes if each.tail]
    assert cut
    episode = cut[0]
    assert episode.final_image
    assert image_ids(episode.final_image, 16)[0] in episode.tail
    assert policy.critic is not None
    torch.nn.init.normal_(next(policy.critic.parameters()))
    algorithm = AlgorithmConfig.model_validate({"preset": "starpo-s", "advantage": {"bootstrap_truncated": True}})
    trainer = PolicyTrainer(policy, algorithm, EXACT, Parallel())
    assert scored_table(trainer, [episode])[1].bootstrap_B.item() != 0


def test_samples_of_branches_know_the_pictures_of_their_parents() -> None:
    images = [VIEW.scaled(_png(shade)) for shade in (10, 200)]
    turns = [
        a_turn(image=images[0], prompt=image_ids(images[0], 16)),
        a_turn(image=images[1], prompt=image_ids(images[1], 16), fresh=False),
    ]
    branch = replace(Episode(0, 1, "lake"), turns=turns, parent=(0, 1))
    (sample,) = samples_of(branch)
    assert sorted(sample.images.values()) == sorted(images)
    packed = Batch([branch]).block([0])
    assert packed.images == sample.images
    assert packed.tokens_SL.tolist() == [sample.tokens]


def _png(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (shade, shade, shade)).save(buffer, format="PNG")
    return buffer.getvalue()
