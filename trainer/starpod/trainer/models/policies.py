"""The policies of a run, by agent."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from starpod.trainer.data.images import ImageConfig
from starpod.trainer.models.config import ModelError
from starpod.trainer.models.policy import Policy

Model = TypeVar("Model", bound=nn.Module)


class Policies(nn.Module):
    """One policy per agent, or a single one for all agents, named "".

    If there are several policies, they have the same shape and tokenizer, and no critic.
    """

    def __init__(self, by_agent: Mapping[str, Policy]) -> None:
        super().__init__()
        self.by_agent = dict(by_agent)
        self.policies = nn.ModuleList(self.by_agent.values())

    @classmethod
    def of(cls, agents: Sequence[str], policy: Policy) -> Policies:
        """Return the policies of these agents: `policy` for the first agent, and a copy for each other agent.

        Copies share frozen parameters. Without agents, `policy` is the single policy of all agents.
        """
        first_agent, *other_agents = agents or ("",)
        return cls({first_agent: policy, **{agent: copy_trained(policy) for agent in other_agents}})

    @property
    def model(self) -> nn.Module:
        """The language model; a list of them, in the order of the agents, if there are several policies."""
        first_model, *other_models = (policy.model for policy in self.by_agent.values())
        return nn.ModuleList([first_model, *other_models]) if other_models else first_model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return next(iter(self.by_agent.values())).tokenizer

    @property
    def view(self) -> ImageConfig | None:
        """The image processing of all policies; None for text models."""
        return next(iter(self.by_agent.values())).view


def copy_trained(model: Model) -> Model:
    """Copy a model's trained parameters and share the frozen parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})


def policy_of(policies: Policies, agent: str = "") -> Policy:
    """Return an agent's policy, or the shared one for "". Raises ModelError if there is no such policy."""
    if agent in policies.by_agent:
        return policies.by_agent[agent]
    if "" in policies.by_agent:
        raise ModelError(f"agent {agent!r} does not have its own policy: all agents share one; leave the agent out")
    names = ", ".join(policies.by_agent)
    raise ModelError(f"each of {names} has a policy: choose one with `starpod export RUN OUT --agent NAME`")
