"""The options of webshop-v1, and presets for the original WebShop and for three programs that are built on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from starpod.env_server import EnvironmentOptions

from .items import HITS
from .shop import PAGE_SIZE

Preset = Literal["original", "ragen", "verl_agent", "agentgym"]

PRESETS: dict[str, dict[str, Any]] = {
    "original": {},
    "ragen": {
        "goals": "synthetic",
        "split": "train",
        "choose": "seed",
        "permute_goals": True,
        "reward": "binary",
        "presentation": "ragen",
        "search_without_bar": "flagged",
    },
    "verl_agent": {
        "goals": "synthetic",
        "splits": "verl_agent",
        "split": "train",
        "choose": "uniform",
        "reward": "binary",
        "reward_scale": 10.0,
        "presentation": "verl_agent",
    },
    "agentgym": {
        "goals": "synthetic",
        "choose": "seed",
        "caps": "agentgym",
        "ratio": "levenshtein",
    },
}
"""The options that each preset changes. The defaults are the original WebShop's."""

_PRESETS_IN_WORDS = "; ".join(
    f"{preset}: {', '.join(f'{name}={json.dumps(value).strip(chr(34))}' for name, value in values.items())}"
    for preset, values in PRESETS.items()
    if values
)

SPLITS: dict[str, dict[str, tuple[int, int | None]]] = {
    "original": {"test": (0, 500), "dev": (500, 1500), "train": (1500, None), "all": (0, None)},
    "verl_agent": {"test": (0, 500), "train": (500, None), "all": (0, None)},
}
"""For each scheme and split, the index of its first goal and the index after its last goal (None: up to the end)."""


MAX_LIMIT = 10_000
"""Maximum of `limit_goals`. Goals are drawn in the server's event loop, for less than a second."""


class WebShopOptions(EnvironmentOptions):
    """Options for the goals, the form of pages, and the reward."""

    preset: Preset = Field(
        default="original",
        description=f"Changes the defaults of other options. {_PRESETS_IN_WORDS}.",
    )
    catalogue: str = Field(
        default="",
        max_length=200,
        description="A store of the server (`--store NAME=PATH`), `synthetic` or `plain` (400 products, few "
        "words). Empty: the first store, else `synthetic`.",
    )
    goals: Literal["human", "synthetic"] = Field(
        default="human", description="human: instructions by people; synthetic: one per product and choice of options."
    )
    caps: Literal["original", "agentgym"] = Field(
        default="original",
        description="Price caps. original: one per instruction; agentgym: a human instruction gives one goal per "
        "candidate cap, and caps of synthetic goals are drawn with seed 233.",
    )
    goal: int | None = Field(default=None, ge=0, description="Index of the goal, in the original's order.")
    split: Literal["all", "train", "dev", "test"] = Field(default="all", description="The goals to choose from.")
    splits: Literal["original", "verl_agent"] = Field(
        default="original",
        description="Test is 0 to 499, dev 500 to 1499, train the rest; verl_agent has no dev.",
    )
    choose: Literal["weighted", "uniform", "seed"] = Field(
        default="weighted",
        description="weighted: draw from all goals by weight, as in the original; uniform: draw uniformly, the default "
        "with a split; seed: the goal with the index seed modulo the number of goals.",
    )
    permute_goals: bool = Field(default=False, description="Shuffle the goals with seed 42 before one is chosen.")
    limit_goals: int | None = Field(
        default=None, ge=1, le=MAX_LIMIT, description="Keep only this many goals, drawn by weight."
    )
    observation: Literal["text", "text_rich", "html", "url"] = Field(
        default="text", description="The form in which the agent sees a page."
    )
    presentation: Literal["original", "ragen", "verl_agent", "compact"] = Field(
        default="original",
        description="original: only the text; ragen: with advice and possible actions; verl_agent: task, page and "
        "possible actions; compact: a short page for small models, with clickable texts in brackets.",
    )
    num_prev_obs: int = Field(default=0, ge=0, le=100, description="Number of earlier pages to show again.")
    num_prev_actions: int = Field(default=0, ge=0, le=100, description="Number of earlier actions to show again.")
    page_size: int = Field(default=PAGE_SIZE, ge=1, le=HITS, description="Number of products on a page of results.")
    show_attrs: bool = Field(
        default=False, description="Give each product a page with its attributes, category and query."
    )
    reward: Literal["graded", "binary"] = Field(
        default="graded", description="graded: the score of the purchase; binary: 1 if the score is 1, else 0."
    )
    reward_scale: float = Field(default=1.0, gt=0, le=1000, description="Factor of the reward.")
    search_without_bar: Literal["allowed", "flagged", "refused"] = Field(
        default="allowed",
        description="A search on a page without a search bar is valid (allowed), executed but marked as invalid "
        "(flagged), or invalid (refused).",
    )
    on_invalid: Literal["continue", "end"] = Field(
        default="continue", description="end: an invalid action ends the episode, with reward 0."
    )
    ratio: Literal["difflib", "levenshtein"] = Field(
        default="difflib",
        description="Similarity for matching options and attributes. difflib: the original's; levenshtein: that of "
        "thefuzz with the package Levenshtein.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        preset = PRESETS.get(str(values.get("preset", "original")), {})  # unknown presets fail the field's validation
        options = {**preset, **values}
        if "choose" not in options and options.get("split", "all") != "all":
            options["choose"] = "uniform"
        return options

    @model_validator(mode="after")
    def _consistent(self) -> WebShopOptions:
        if self.split not in SPLITS[self.splits]:
            splits = ", ".join(SPLITS[self.splits])
            raise ValueError(f"the splits of {self.splits} have no {self.split}; choose one of {splits}")
        if self.choose == "weighted" and self.split != "all":
            raise ValueError("weighted draws are from all goals: leave out split, or choose uniform or seed")
        if self.choose == "weighted" and self.permute_goals:
            raise ValueError("permute_goals changes how goals are counted, not drawn by weight; choose uniform or seed")
        if self.presentation != "original" and self.observation != "text":
            raise ValueError(f"the presentation {self.presentation} is of observation text; leave out one of the two")
        if self.presentation != "original" and (self.num_prev_obs or self.num_prev_actions):
            raise ValueError(f"the presentation {self.presentation} shows no earlier steps; leave out num_prev_*")
        return self
