"""Credit terms, the building blocks of estimators without a critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from starpod.trainer.configuration.section import Section
from starpod.trainer.prompts.grammar import Block

Key = Literal["turn", "state", "agent", "tree"]
CRITERIA = "criteria"
"""Name of the reward part for a checklist's criteria."""
PROCESS = "process"
"""Name of the reward part from a turn scorer."""
REASONING = "reasoning"
"""Name of the reward part for true claims."""


class CreditTerm(Section):
    """A comparison of units of episodes with their peers. An estimator without a critic is a sum of such terms.

    A unit's tokens get its score minus the mean score of its peers, scaled and weighted.
    """

    unit: Literal["episode", "agent", "turn", "block", "token", "criterion"] = Field(
        default="episode",
        description="Unit with a score: an episode; an agent's turns in it; a turn; a token; a block of a reply, "
        "with its turn's score; or a criterion of a checklist, credited to the turns from its first report until it "
        "is met.",
    )
    block: Block | None = Field(
        default=None,
        description="unit block: name of the block. An unreadable reply belongs to it as a whole.",
    )
    score: Literal["return", "reward", "to_go", "met", "gain"] = Field(
        default="return",
        description="return: of the episode; reward: of the unit; to_go: discounted rewards from the unit on; met: "
        "1 for a met criterion, discounted by the turns it took; gain: the turn's reward plus the rise of the "
        "state's value (needs collect.search.strategy values).",
    )
    parts: tuple[str, ...] = Field(default=(), description="Reward parts that count in the score; empty: all.")
    without: tuple[str, ...] = Field(default=(), description="Reward parts that do not count in the score.")
    key: tuple[Key, ...] = Field(
        default=(),
        description="Properties that peers share besides the start state: turn: number among the agent's turns in "
        "the attempt; state: the state before the turn; agent; tree: the tree of the episode (collect.search).",
    )
    strata: tuple[str, ...] = Field(
        default=(),
        description="Reward parts of the turn, those of its earlier blocks, whose signs peers share too.",
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per unit (to_go) or turn (met).")
    baseline: Literal["mean", "others", "none"] = Field(
        default="mean", description="Subtracted from the score: the mean of all peers, or of the others."
    )
    scale: Literal["none", "std", "mean"] = Field(
        default="none", description="Divides by the peers' standard deviation, or by their mean if it is positive."
    )
    weight: float = Field(default=1.0, gt=0, description="Factor of the term in the sum.")
    min_peers: int = Field(default=2, ge=2, description="Minimum number of peers; with fewer, the units get 0.")
    smallest: float = Field(default=0.0, ge=0, description="Results with a smaller absolute value count as 0.")

    @model_validator(mode="after")
    def _fits_together(self) -> CreditTerm:
        unit, score = self.unit, self.score
        missing_key = "state" if "state" in self.key else "turn"
        for wrong, sentence in (
            (
                (unit == "criterion") != (score == "met"),
                f"a term of unit {unit} cannot have score {score}: only unit criterion has score met, and no other "
                "score",
            ),
            (
                unit == "criterion" and bool(self.parts or self.without or self.key or self.strata),
                "a term of unit criterion compares the same criterion in the episodes of a group: drop parts, without, "
                "key and strata",
            ),
            (
                bool(self.parts and self.without),
                "a term has parts that count, or parts that do not: drop parts or without",
            ),
            (
                (unit == "block") != (self.block is not None),
                "a term of unit block needs the key block, and other units do not have it: give both, or neither",
            ),
            (
                bool(self.strata) and unit not in ("turn", "block"),
                f"a term's strata are rewards of a turn's earlier blocks, but unit {unit} is not part of a turn: "
                "drop strata, or set the unit to block",
            ),
            (
                score == "gain" and (unit != "turn" or self.baseline != "none" or bool(self.parts or self.without)),
                "score gain compares a turn with the value of its own state: set the unit to turn and the baseline "
                "to none, and drop parts",
            ),
            (
                unit == "episode" and score != "return",
                f"a term of unit episode has the score return, not {score}: set score to return, or the unit to turn",
            ),
            (
                unit == "agent" and score == "to_go",
                "a term of unit agent has turns in the whole episode, so no rewards are to go: set score to reward "
                "or return",
            ),
            (
                unit in ("episode", "agent") and bool({"turn", "state"} & {*self.key}),
                f"a term of unit {unit} spans many turns, so it has no single {missing_key}: drop it from key, or "
                "set the unit to turn",
            ),
            (
                unit == "episode" and "agent" in self.key,
                "a term of unit episode spans all agents: drop agent from key, or set the unit to agent",
            ),
            (len({*self.key}) < len(self.key), "a term's key has an entry twice: drop one"),
            (
                self.gamma != 1 and score not in ("to_go", "met"),
                f"a term with score {score} discounts nothing: set gamma to 1, or score to to_go",
            ),
            (
                self.baseline == "none"
                and (bool(self.key or self.strata) or self.scale != "none" or self.min_peers > 2),
                "a term with baseline none has no peers: drop key, strata, scale and min_peers, or give a baseline",
            ),
        ):
            if wrong:
                raise ValueError(sentence)
        return self

    def most_peers(self, group_size: int) -> int | None:
        """Return the maximum number of units compared with each other in a group of this size; None if unknown."""
        key = {"turn": "turn", "block": "turn", "agent": "agent"}.get(self.unit)
        return group_size if self.unit in ("episode", "criterion") or key in self.key else None


TERMS: dict[str, Sequence[CreditTerm]] = {
    "grpo": (CreditTerm(scale="std"),),
    "dr_grpo": (CreditTerm(),),
    "maxrl": (CreditTerm(scale="mean"),),
    "rloo": (CreditTerm(baseline="others"),),
    # Smaller advantages are set to 0.
    "loop": (CreditTerm(baseline="others", smallest=0.01),),
    "reinforce_plus_plus": (CreditTerm(unit="token", score="to_go", baseline="none"),),
    "reinforce_plus_plus_baseline": (CreditTerm(),),
    "vineppo": (CreditTerm(unit="turn", score="gain", baseline="none"),),
    "tree_grpo": (CreditTerm(scale="std"), CreditTerm(scale="std", key=("tree",))),
    "gigpo": (CreditTerm(), CreditTerm(unit="turn", score="to_go", key=("state",))),
    "mt_grpo": (CreditTerm(scale="std"), CreditTerm(unit="turn", score="reward", key=("turn",), scale="std")),
    "dr_mas": (CreditTerm(unit="agent", key=("agent",), scale="std"),),
    "attempts": (CreditTerm(unit="agent", score="reward", key=("agent",)),),
    "cm2_trajectory": (CreditTerm(parts=(CRITERIA,)),),
    "cm2_turn": (CreditTerm(unit="turn", score="reward", parts=(CRITERIA,), key=("turn",), min_peers=5),),
    "istar": (
        CreditTerm(without=(PROCESS,), baseline="others"),
        CreditTerm(unit="turn", score="reward", parts=(PROCESS,), baseline="others"),
    ),
    "agent_prm": (
        CreditTerm(without=(PROCESS,)),
        CreditTerm(unit="turn", score="reward", parts=(PROCESS,), key=("state",)),
    ),
    "blockwise": (
        CreditTerm(unit="block", block="think", score="reward", parts=(REASONING,), key=("turn",)),
        CreditTerm(
            unit="block", block="answer", score="to_go", without=(REASONING,), key=("turn",), strata=(REASONING,)
        ),
    ),
    "cm2_step": (CreditTerm(unit="criterion", score="met", min_peers=5),),
}
"""Terms of each estimator without a critic."""
