"""Policies of agents that have weights of their own, as one policy wherever the difference does not matter."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from starpod.trainer.data.images import ImageConfig
from starpod.trainer.models.config import ModelError
from starpod.trainer.models.policy import Policy

Model = TypeVar("Model", bound=nn.Module)


class Policies(nn.Module):
    """A policy for each agent. All are of one shape, with one tokenizer and without a critic."""

    def __init__(self, by_agent: Mapping[str, Policy]) -> None:
        super().__init__()
        self.by_agent = dict(by_agent)
        self.policies = nn.ModuleList(self.by_agent.values())

    @classmethod
    def of(cls, agents: Iterable[str], policy: Policy) -> Policies:
        """Each agent begins as this policy, which is the first one's. What is frozen they share."""
        first, *others = agents
        return cls({first: policy, **{agent: copy_trained(policy) for agent in others}})

    @property
    def model(self) -> nn.ModuleList:
        """Their language models, in the order of the agents."""
        return nn.ModuleList(policy.model for policy in self.by_agent.values())

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return next(iter(self.by_agent.values())).tokenizer

    @property
    def view(self) -> ImageConfig | None:
        """As `Policy.view`."""
        return next(iter(self.by_agent.values())).view


def copy_trained(model: Model) -> Model:
    """A copy with trained parameters of its own. What is frozen it shares, as no update changes it."""
    return copy.deepcopy(model, {id(each): each for each in model.parameters() if not each.requires_grad})


def policy_of(policy: Policy | Policies, agent: str = "") -> Policy:
    """An agent's policy, or the one of all agents. Raises ModelError where there is no such one."""
    found = policy.by_agent.get(agent)
    if found is None and isinstance(policy, Policies):
        names = ", ".join(policy.by_agent)
        raise ModelError(f"each of {names} has a policy: choose one with `starpod export RUN OUT --agent NAME`")
    if found is None:
        raise ModelError(f"agent {agent!r} has no policy of its own: all agents share one; leave the agent out")
    return found
