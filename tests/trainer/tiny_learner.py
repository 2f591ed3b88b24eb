"""A trainer of a policy of a few thousand parameters, and groups that it sampled."""

import copy
import functools
from collections.abc import Sequence

import torch

from starpod.trainer.algorithms.advantages import compute_advantages
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.configuration.optimizer import OptimizerConfig
from starpod.trainer.data.batch import Batch, RolloutBatch
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.group import Group
from starpod.trainer.learner import Learner
from starpod.trainer.models.config import ModelConfig, TinyConfig
from starpod.trainer.models.policy import Policy, build_policy
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.update import PolicyTrainer
from tests.trainer.turns import a_turn

VERSION = 3
IDS = 256
"""Every tokenizer has the bytes."""


@functools.cache
def built(critic: str, heads: int = 1) -> Policy:
    shape = TinyConfig(hidden=16, layers=1, heads=2, key_value_heads=1, intermediate=24, vocabulary=335)
    return build_policy(
        ModelConfig(tiny=shape),
        texts=["Left || Right"],
        critic=critic,  # type: ignore[arg-type]
        seed=0,
        heads=heads,
    )


def make_trainer(
    algorithm: AlgorithmConfig,
    *,
    lr: float = 1e-3,
    budget: int = 8192,
    opinion: bool = False,
    policy: Policy | None = None,
) -> PolicyTrainer:
    """opinion: whether the critic, if there is one, has any; a new one says 0. policy: to be trained, if not a new
    one."""
    policy = policy or copy.deepcopy(built("shared" if algorithm.needs_critic else "none", algorithm.value_heads))
    with torch.no_grad():
        for parameter in policy.critic_parameters() if opinion else ():
            parameter.copy_(torch.linspace(-0.3, 0.4, parameter.numel()).view_as(parameter))
    trainer = PolicyTrainer(
        policy,
        algorithm,
        OptimizerConfig(lr=lr, critic_lr=lr, micro_batch_tokens=budget),
        Parallel(),
        max_length=64,
        make_reference=lambda: copy.deepcopy(built("none")),
    )
    if algorithm.needs_reference:
        trainer.freeze_reference(built("none").state_dict())
    return trainer


def scored_table(trainer: PolicyTrainer, episodes: Sequence[Episode]) -> tuple[Batch, RolloutBatch]:
    """A batch and its table, with the policy's scores and advantages."""
    batch = Batch(episodes)
    table = trainer.tabulate(batch)
    trainer.score(batch, table)
    table.advantages = compute_advantages(trainer.algorithm, table)
    return batch, table


def learner_of(trainer: PolicyTrainer) -> Learner:
    """The learner of one policy for all agents."""
    return Learner({"": trainer})


def weights(policy: torch.nn.Module) -> list[torch.Tensor]:
    """A copy of the weights."""
    return [parameter.detach().clone() for parameter in policy.parameters()]


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    """All gradients in one row."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def say(policy: Policy, episode: Episode) -> Episode:
    """The episode with the log-probabilities that this policy gives its replies."""
    batch = Batch([episode])
    (block,) = batch.micro_batches([0], 10**6)
    with torch.no_grad():
        told = policy.score(*batch.block(block).inputs).logprobs_N.tolist()
    for turn in episode.turns:
        turn.logprobs, told = told[: len(turn.reply)], told[len(turn.reply) :]
    return episode


def turn(prompt: list[int], reply: list[int], reward: float, *, fresh: bool, key: bytes = b"s") -> Turn:
    versions = [VERSION] * len(reply)
    spans = [("", len(reply))]
    return a_turn(reply, prompt=prompt, versions=versions, fresh=fresh, reward=reward, state_key=key, spans=spans)


def group_of(policy: Policy, number: int, rewards: tuple[float, ...], *, turns: int = 2) -> Group:
    """Members that share their prompts and reply differently, each rewarded at the end."""
    generator = torch.Generator().manual_seed(number)

    def ids(count: int) -> list[int]:
        drawn: list[int] = torch.randint(0, IDS, (count,), generator=generator).tolist()
        return drawn

    prompts = [ids(3 + place) for place in range(turns)]
    episodes = []
    for member, reward in enumerate(rewards):
        own = [
            turn(
                prompt,
                ids(1 + (number + member + place) % 4),
                reward if place == turns - 1 else 0.0,
                fresh=place == 0 or number % 2 == 1,
                key=str((number, place)).encode(),
            )
            for place, prompt in enumerate(prompts)
        ]
        episodes.append(say(policy, Episode(number, member, "lake", turns=own, end="terminal")))
    return Group(number, episodes)
