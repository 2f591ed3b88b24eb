"""Credit terms, the building blocks of estimators without a critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from starpod.trainer.configuration.section import Contradiction, Section, find_broken
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
        description="Reward parts of a turn's earlier blocks, such as the part of its description. Only turns with the "
        "same signs of these parts are peers.",
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
    smallest: float = Field(default=0.0, ge=0, description="Advantages with a smaller absolute value become 0.")

    @model_validator(mode="after")
    def _has_a_meaning(self) -> CreditTerm:
        if sentence := find_broken(_CONTRADICTIONS, self):
            raise ValueError(sentence)
        return self

    def most_peers(self, group_size: int) -> int | None:
        """Return the maximum number of units compared with each other in a group of this size; None if unknown."""
        key = {"turn": "turn", "block": "turn", "agent": "agent"}.get(self.unit)
        return group_size if self.unit in ("episode", "criterion") or key in self.key else None


_CONTRADICTIONS: tuple[Contradiction[CreditTerm], ...] = (
    Contradiction(
        ("unit", "score"),
        lambda c: (c.unit == "criterion") != (c.score == "met"),
        "a term of unit {c.unit} cannot have score {c.score}: only unit criterion has score met, and no other score",
    ),
    Contradiction(
        ("unit", "parts", "without", "key", "strata"),
        lambda c: c.unit == "criterion" and (c.parts or c.without or c.key or c.strata),
        "a term of unit criterion compares the same criterion in the episodes of a group: drop parts, without, key and "
        "strata",
    ),
    Contradiction(
        ("parts", "without"),
        lambda c: c.parts and c.without,
        "a term has parts that count, or parts that do not: drop parts or without",
    ),
    Contradiction(
        ("unit", "block"),
        lambda c: (c.unit == "block") != (c.block is not None),
        "a term of unit block needs the key block, and other units do not have it: give both, or neither",
    ),
    Contradiction(
        ("unit", "strata"),
        lambda c: c.strata and c.unit not in ("turn", "block"),
        "a term's strata are rewards of a turn's earlier blocks, but unit {c.unit} is not part of a turn: drop strata, "
        "or set the unit to block",
    ),
    Contradiction(
        ("score", "unit", "baseline", "parts", "without"),
        lambda c: c.score == "gain" and (c.unit != "turn" or c.baseline != "none" or c.parts or c.without),
        "score gain compares a turn with the value of its own state: set the unit to turn and the baseline to none, "
        "and drop parts",
    ),
    Contradiction(
        ("unit", "score"),
        lambda c: c.unit == "episode" and c.score != "return",
        "a term of unit episode has the score return, not {c.score}: set score to return, or the unit to turn",
    ),
    Contradiction(
        ("unit", "score"),
        lambda c: c.unit == "agent" and c.score == "to_go",
        "a term of unit agent has turns in the whole episode, so no rewards are to go: set score to reward or return",
    ),
    Contradiction(
        ("unit", "key"),
        lambda c: c.unit in ("episode", "agent") and next((key for key in ("state", "turn") if key in c.key), ""),
        "a term of unit {c.unit} spans many turns, so it has no single {found}: drop it from key, or set the unit to "
        "turn",
    ),
    Contradiction(
        ("unit", "key"),
        lambda c: c.unit == "episode" and "agent" in c.key,
        "a term of unit episode spans all agents: drop agent from key, or set the unit to agent",
    ),
    Contradiction(("key",), lambda c: len({*c.key}) < len(c.key), "a term's key has an entry twice: drop one"),
    Contradiction(
        ("gamma", "score"),
        lambda c: c.gamma != 1 and c.score not in ("to_go", "met"),
        "a term with score {c.score} discounts nothing: set gamma to 1, or score to to_go",
    ),
    Contradiction(
        ("baseline", "key", "strata", "scale", "min_peers"),
        lambda c: c.baseline == "none" and (c.key or c.strata or c.scale != "none" or c.min_peers > 2),
        "a term with baseline none has no peers: drop key, strata, scale and min_peers, or give a baseline",
    ),
)


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
