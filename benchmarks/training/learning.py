"""Learning curves: complete training runs over several seeds, and the pictures of docs/benchmarks.md.

    python -m benchmarks.training.learning frozen_lake       the default job, three seeds, with reference policies
    python -m benchmarks.training.learning critic_lake       the default job with a critic instead of GiGPO
    python -m benchmarks.training.learning filter            the share of groups that the filter keeps: 25 to 100 %
    python -m benchmarks.training.learning sokoban bandit countdown webshop
    python -m benchmarks.training.learning game_2048 rubiks_cube house word_problems --seeds 2
    python -m benchmarks.training.learning tic_tac_toe self_play --seeds 2   against a random player, and against itself
    python -m benchmarks.training.learning credit            estimators without a critic, if the true credit is known
    python -m benchmarks.training.learning blocks            true claims and right moves, credited together or apart
    python -m benchmarks.training.learning horizons          episodes that grow forward, backward from success, or not
    python -m benchmarks.training.learning split             episodes longer than the context: a window, or parts
    python -m benchmarks.training.learning turn_order        a step for each turn, the last one first, or whole episodes
    python -m benchmarks.training.learning critics           a critic of tokens, and of turns and tokens
    python -m benchmarks.training.learning trees             credit from continuations, and groups that share turns
    python -m benchmarks.training.learning attempts          second attempts, rewarded for their improvement
    python -m benchmarks.training.learning tools             looks that cost a turn, with and without a bonus
    python -m benchmarks.training.learning subgoals          critics of tokens, turns, and segments with a subgoal
    python -m benchmarks.training.learning process           turn scorers, compared with returns and repeated states
    python -m benchmarks.training.learning visual_lake       a lake as a picture, with and without rewards for seeing
    python -m benchmarks.training.learning visual_sokoban --seeds 1    a room of Sokoban as a picture
    python -m benchmarks.training.learning lock              tree searches, if one episode of a hundred succeeds
    python -m benchmarks.training.learning long_lock --seeds 5   searches by progress, if no episode succeeds
    python -m benchmarks.training.learning team              two agents, whose rewards differ in size
    python -m benchmarks.training.learning mixture --seeds 1 one policy on three environments, with and without a critic
    python -m benchmarks.training.learning bandit_llm        a pretrained model (after `make .venv/.smollm`)
    python -m benchmarks.training.learning frozen_lake_llm --seeds 1   a pretrained model on a small lake
    python -m benchmarks.training.learning sokoban_llm --seeds 1       a pretrained model pushes a box
    python -m benchmarks.training.learning countdown_llm --seeds 1     a pretrained model reaches a number
    python -m benchmarks.training.learning desk_llm search_qa_llm coding_llm --seeds 1   it calls tools, reads, programs
    python -m benchmarks.training.learning reasoning_llm --seeds 1     with and without reasoning, on unseen names
    python -m benchmarks.training.learning swapped_llm --seeds 1       with and without reasoning, if names mislead
    python -m benchmarks.training.learning filter_llm --seeds 1        the share of groups that the filter keeps
    python -m benchmarks.training.learning reuse_llm --seeds 1         updates on each collection: online-1, 2, 5
    python -m benchmarks.training.learning starts_llm --seeds 1        many start states, or many episodes per state
    python -m benchmarks.training.learning echo_trap_llm --seeds 1     GRPO and StarPO-S over several turns
    python -m benchmarks.training.learning actions_llm --seeds 1       number of actions per turn
    python -m benchmarks.training.learning claims_llm --seeds 1        a reward for thoughts that are true
    python -m benchmarks.training.learning search_llm --seeds 1        a beam by the environment's score
    python -m benchmarks.training.learning agent_llm --seeds 1         tool calls of an unmodified agent of OpenAI's SDK
    python -m benchmarks.training.learning gpu_lake gpu_sokoban gpu_desk gpu_search_qa gpu_coding --seeds 1   on a GPU
    python -m benchmarks.training.learning echo_trap         vanilla StarPO in the Echo Trap, and StarPO-S
    python -m benchmarks.training.learning echo_trap_others  the Echo Trap with other filters and ratios
    python -m benchmarks.training.learning echo_trap_parts   the Echo Trap with one change at a time

Each run is a separate process, `starpod train`, as a user would start it. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import origin
from benchmarks.training.comparison import EVALUATION, RETURN, SPENT, STEPS, spent_by, write_comparison
from starpod.trainer.algorithms.terms import TERMS
from starpod.trainer.config import load_config
from starpod.trainer.diagnostics.echo_trap import SIGNALS, Signal
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.words import is_graded, return_with_interval
from starpod.trainer.rollout.environment import local_services

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "benchmarks"


@dataclass(frozen=True, slots=True)
class Variant:
    """One curve: a configuration, changes to it, and its name in the picture."""

    name: str
    config: str
    changes: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """Name of the folders of its runs. Equal runs of several experiments share it."""
        return f"{Path(self.config).stem}-{hashlib.sha256(repr(self.changes).encode()).hexdigest()[:8]}"


KEYS = ("step", "success", "success_low", "success_high", "return_mean", "return_low", "return_high")
"""Figures of an evaluation that the results keep."""

CLAIMS = "benchmarks/training/claims.yaml"
ROUTED = json.dumps([{**term.to_dict(), "strata": []} for term in TERMS["blockwise"]])
"""Terms of the preset `blockwise`, without strata."""

CORRIDOR, DOORS = "benchmarks/training/corridor.yaml", "benchmarks/training/doors.yaml"
LOCK, TEAM = "benchmarks/training/lock.yaml", "benchmarks/training/team.yaml"
LONG_LOCK = "benchmarks/training/long_lock.yaml"
SPLIT, HALF_A_CONTEXT = "benchmarks/training/split.yaml", "sampling.max_episode_tokens=64"
PARTS = (HALF_A_CONTEXT, "prompt.context=split", "prompt.window=3", "prompt.overlap=1")
Q = ("scorer=q", "scorer.lr=0.001", "evaluation.best_of=4")
TSR = (
    "collect.search.strategy=beam",
    "collect.search.width=6",
    "collect.search.keep=1",
    "collect.search.naive=0.25",
)
TOOLS = "benchmarks/training/tools.yaml"
VAGEN = (
    "environment.options.observation=grid",
    "rewards.reasoning.weight=0",
    "prompt.thinking=false",
    "prompt.blocks=[description,prediction]",
    "warm_start.blocks={description: '{relations}', prediction: '{next_relations}'}",
    "rewards.relations={description: 0.05, prediction: 0.05}",
    "sampling.max_reply_tokens=80",
    "sampling.max_episode_tokens=120",
    "evaluation.reference=[random,expert]",
)
IN_FOUR_STEPS = ("algorithm.mini_batch_size=16",)
NO_KL, NO_BONUS = "algorithm.kl.where=off", "algorithm.entropy_coefficient=0"
HALF = ("algorithm=pyvision", "algorithm.mini_batch_size=8")
SWAPPED = "environment.options.swapped=true"
TEN, EIGHT = ("stop.iterations=10", "evaluation.every=2"), ("stop.iterations=8", "evaluation.every=2")
OPENAI_AGENTS = (
    # Run this with the Python of .venv-agents, after `make .venv-agents/.ready`.
    f"collect.agent.command=[{sys.executable}, examples/openai_agents_tool.py]",
    "collect.agent.at_once=3",
    "prompt.prefill=false",
    # Use the pretrained model without a warm start.
    "warm_start.steps=0",
    "sampling.max_episode_tokens=480",
    "engine.slots=48",
    "collect.groups=6",
    "collect.group_size=8",
    "algorithm.mini_batch_size=48",
    "optimizer.lr=0.00004",
    # With a single pair, few episodes show which arm pays. Each episode is a process, which takes most of the time.
    "environment.options.pair=[Phoenix,Dragon]",
    "evaluation.episodes=48",
    "evaluation.every=4",
    "evaluation.temperature=1.0",
    "evaluation.greedy=false",
    "evaluation.reference=[random]",
    "stop.iterations=8",
)
ON_A_GPU = (
    "device=cuda",
    "threads=4",
    "engine=vllm",
    "engine.slots=512",
    "engine.gpu_memory_fraction=0.1",
    "collect.groups=32",
    "collect.group_size=16",
    "algorithm.mini_batch_size=256",
    "optimizer.micro_batch_tokens=16384",
    "evaluation.episodes=1024",
    "evaluation.every=10",
    "stop.iterations=100",
    "stop.minutes=6",
)
"""Settings for a GPU, with eight times as many episodes per iteration as on two cores."""
JOINED = ("environment.max_actions_per_turn={}", "warm_start.actions_per_turn={}")
SEEN = "warm_start.thought='{words[6]} {words[7]} Left {words[8]} Down {words[9]} Right {words[10]} Up {words[11]}'"
"""Thought of the warm start that describes everything that the policy sees of a lake before it moves."""
SHORT = ("stop.iterations=24", "evaluation.every=8")
TWO_ROOMS = ("environment.options.rooms=2", "environment.max_turns=2", "script=attempts", "algorithm=score", *SHORT)
FIRST_STAGE = (
    "stages=[{until: {iteration: 8}, set: {rewards.improvement: 0, algorithm.advantage: terms, "
    "algorithm.terms: [{unit: episode, parts: [environment]}], algorithm.kl.agents: {attempt1: 0.1}}}]"
)
"""First stage of SCoRe: a KL term keeps the first attempt near the initial policy, and only the second one is paid."""


def _stages(key: str, values: Sequence[int]) -> str:
    """Return a stage per value. Stages end by success, or at iterations 10, 20, ... at the latest."""
    until = "until: {{metric: collect/success, at_least: 0.7, patience: 2, iteration: {}}}"
    stages = (
        f"{{{until.format(10 * number)}, set: {{{key}: {value}}}}}" for number, value in enumerate(values, start=1)
    )
    return f"stages=[{', '.join(stages)}]"


EXPERIMENTS: dict[str, tuple[Variant, ...]] = {
    "frozen_lake": (Variant("StarPO-S with GiGPO", "frozen_lake"),),
    "critic_lake": (Variant("StarPO-S with a critic", "frozen_lake", ("algorithm.advantage=gae",)),),
    "sokoban": (Variant("StarPO-S", "sokoban"),),
    "bandit": (Variant("StarPO-S", "bandit"),),
    "bandit_llm": (Variant("StarPO-S", "bandit_llm"),),
    "frozen_lake_llm": (Variant("StarPO-S", "frozen_lake_llm"),),
    "sokoban_llm": (Variant("StarPO-S", "sokoban_llm"),),
    "countdown_llm": (Variant("StarPO-S", "countdown_llm"),),
    "reasoning_llm": (
        Variant("reasoning", "bandit_llm"),
        Variant("no reasoning", "bandit_llm", ("prompt.thinking=false",)),
    ),
    "swapped_llm": tuple(
        Variant(name, "bandit_llm", (SWAPPED, *more))
        for name, more in (("reasoning", ()), ("no reasoning", ("prompt.thinking=false",)))
    ),
    "filter_llm": tuple(
        Variant(f"{share:.0%} kept", "bandit_llm", (*TEN, f"algorithm.filter.value={share}"))
        for share in (0.25, 0.5, 0.75, 1.0)
    ),
    # All variants have the same number of updates.
    "reuse_llm": tuple(
        Variant(f"online-{reuse}", "bandit_llm", (f"replay.reuse={reuse}", *updates))
        for reuse, updates in (
            (1, TEN),
            (2, ("stop.iterations=5", "evaluation.every=1")),
            (5, ("stop.iterations=2", "evaluation.every=1")),
        )
    ),
    "starts_llm": tuple(
        Variant(f"{groups} x {size}", "bandit_llm", (*TEN, f"collect.groups={groups}", f"collect.group_size={size}"))
        for groups, size in ((36, 4), (12, 12), (4, 36))
    ),
    "echo_trap_llm": (
        Variant("StarPO-S", "frozen_lake_llm", EIGHT),
        Variant("GRPO", "frozen_lake_llm", (*EIGHT, "algorithm=starpo-grpo")),
    ),
    "actions_llm": tuple(
        Variant(
            f"up to {most}", "frozen_lake_llm", (*EIGHT, *(each.format(most) for each in JOINED)) if most > 1 else EIGHT
        )
        for most in (1, 2, 4)
    ),
    "claims_llm": tuple(
        Variant(name, "frozen_lake_llm", (*EIGHT, SEEN, f"rewards.reasoning={{weight: {weight}, claims: 4}}"))
        for name, weight in (("success alone", 0), ("true claims, too", 0.1))
    ),
    # Both variants sample about the same number of tokens.
    "search_llm": (
        Variant("StarPO-S", "frozen_lake_llm", EIGHT),
        Variant(
            "TSR",
            "frozen_lake_llm",
            ("collect.search.strategy=beam", "stop.iterations=3", "evaluation.every=1"),
        ),
    ),
    "agent_llm": (Variant("StarPO-S", "bandit_llm", OPENAI_AGENTS),),
    "desk_llm": (Variant("StarPO-S", "desk_llm"),),
    "search_qa_llm": (Variant("StarPO-S", "search_qa_llm"),),
    "coding_llm": (Variant("StarPO-S", "coding_llm"),),
    "gpu_lake": (Variant("StarPO-S", "frozen_lake_llm", ON_A_GPU),),
    "gpu_sokoban": (Variant("StarPO-S", "sokoban_llm", ON_A_GPU),),
    "gpu_desk": (Variant("StarPO-S", "desk_llm", ON_A_GPU),),
    "gpu_search_qa": (Variant("StarPO-S", "search_qa_llm", ON_A_GPU),),
    "gpu_coding": (Variant("StarPO-S", "coding_llm", ON_A_GPU),),
    "countdown": (Variant("StarPO-S", "countdown"),),
    "game_2048": (Variant("StarPO-S", "game_2048"),),
    "rubiks_cube": (Variant("StarPO-S", "rubiks_cube"),),
    "tic_tac_toe": (Variant("StarPO-S", "tic_tac_toe"),),
    "self_play": (Variant("StarPO-S", "self_play"),),
    "word_problems": (Variant("StarPO-S", "word_problems"),),
    "house": (Variant("StarPO-S", "house"),),
    "webshop": (Variant("StarPO-S", "webshop"),),
    "visual_lake": (
        Variant("success and true claims", "visual_lake"),
        Variant("success alone", "visual_lake", ("rewards.reasoning.weight=0",)),
        Variant("descriptions and predictions by F1", "visual_lake", VAGEN),
    ),
    "visual_sokoban": (Variant("StarPO-S", "visual_sokoban"),),
    "mixture": (
        Variant("StarPO-S, GRPO", "mixture"),
        Variant("StarPO-S, one critic", "mixture", ("algorithm.advantage=gae",)),
    ),
    "filter": tuple(
        Variant(f"{share:.0%} kept", "frozen_lake", (f"algorithm.filter.value={share}", "stop.iterations=40"))
        for share in (0.25, 0.5, 0.75, 1.0)
    ),
    "credit": tuple(
        Variant(
            name,
            CORRIDOR,
            (f"algorithm.advantage={advantage}", f"rewards.criteria.weight={paid}"),
        )
        for name, advantage, paid in (
            ("GRPO", "grpo", 0),
            ("Dr. GRPO", "dr_grpo", 0),
            ("GiGPO", "gigpo", 0),
            ("MT-GRPO", "mt_grpo", 0),
            ("CM2 by turn", "cm2_turn", 1),
            ("CM2 by criterion", "cm2_step", 0),
        )
    ),
    "blocks": (
        Variant("Dr. GRPO", CLAIMS),
        Variant("routed", CLAIMS, ("algorithm.advantage=terms", f"algorithm.terms={ROUTED}")),
        Variant("Blockwise", CLAIMS, ("algorithm.advantage=blockwise",)),
    ),
    "horizons": (
        Variant("fixed", DOORS),
        Variant("backward", DOORS, (_stages("environment.expert_moves_left", (1, 2, 4)),)),
        Variant("forward", DOORS, (_stages("environment.max_turns", (4, 8)),)),
    ),
    "split": (
        Variant("whole context", SPLIT),
        Variant("half of it, whole conversation", SPLIT, (HALF_A_CONTEXT,)),
        Variant("half, window", SPLIT, (HALF_A_CONTEXT, "prompt.context=window", "prompt.window=3")),
        Variant("half, split", SPLIT, PARTS),
        Variant("half, split, first turn pinned", SPLIT, (*PARTS, "prompt.pinned=1")),
    ),
    # All variants take four gradient steps per iteration, one for each turn.
    "turn_order": (
        Variant("Dr. GRPO", CORRIDOR, (*SHORT, *IN_FOUR_STEPS, "algorithm=dr-grpo", NO_KL)),
        Variant("GSPO", CORRIDOR, (*SHORT, *IN_FOUR_STEPS, "algorithm=seeupo", "algorithm.order=together", NO_KL)),
        Variant("SeeUPO", CORRIDOR, (*SHORT, "algorithm=seeupo", NO_KL)),
    ),
    "critics": tuple(
        Variant(name, CORRIDOR, (*SHORT, "algorithm=starpo-ppo", f"algorithm.advantage={advantage}", NO_KL, NO_BONUS))
        for name, advantage in (("GAE", "gae"), ("bi-level GAE", "bilevel_gae"))
    ),
    # All variants sample about the same number of tokens: VinePPO plays a quarter of the groups, with continuations.
    "trees": (
        Variant("Dr. GRPO", CORRIDOR, (*SHORT, "algorithm.advantage=dr_grpo")),
        Variant(
            "VinePPO",
            CORRIDOR,
            (
                *SHORT,
                "algorithm.advantage=vineppo",
                "collect.groups=2",
                "collect.search.strategy=values",
                "collect.search.width=2",
            ),
        ),
        Variant("Tree-GRPO", CORRIDOR, (*SHORT, "algorithm.advantage=tree_grpo", "collect.search.strategy=tree")),
    ),
    "attempts": (
        Variant("each attempt by itself", CORRIDOR, TWO_ROOMS),
        Variant("SCoRe", CORRIDOR, (*TWO_ROOMS, "rewards.improvement=10", FIRST_STAGE)),
    ),
    # HALF trains on half of the groups, with the same number of gradient steps.
    "tools": (
        Variant("Dr. GRPO", TOOLS),
        Variant("ranked groups", TOOLS, HALF),
        Variant("PyVision-RL", TOOLS, (*HALF, "rewards.tools.bonus=0.1")),
    ),
    "subgoals": tuple(
        Variant(name, "benchmarks/training/subgoals.yaml", (f"algorithm.advantage={advantage}", *more))
        for name, advantage, *more in (
            ("GAE", "gae"),
            ("bi-level GAE", "bilevel_gae"),
            ("HiPER", "hae"),
        )
    ),
    "process": tuple(
        Variant(name, "benchmarks/training/process.yaml", (f"algorithm.advantage={advantage}", *more))
        for name, advantage, *more in (
            ("RLOO", "rloo"),
            ("GiGPO", "gigpo"),
            ("iStar", "istar", "scorer=implicit", "scorer.lr=0.001"),
            ("AgentPRM", "agent_prm", *Q),
            ("AgentPRM, branches", "agent_prm", *Q, "collect.search.strategy=pivots", "collect.search.width=4"),
        )
    ),
    # All variants sample about the same number of tokens: searches have fewer iterations, but sample more in each.
    "lock": tuple(
        Variant(
            name, LOCK, (f"collect.search.strategy={strategy}", f"stop.iterations={last}", f"evaluation.every={by}")
        )
        for name, strategy, last, by in (
            ("Dr. GRPO", "none", 50, 10),
            ("TSR, beam", "beam", 14, 2),
            ("DEEP-GRPO", "pivots", 16, 4),
        )
    ),
    # All variants sample the same number of tokens, and evaluate about equally often.
    "long_lock": tuple(
        Variant(name, LONG_LOCK, (*changes, f"evaluation.every={every}", "stop.iterations=2000"))
        for name, every, *changes in (
            ("Dr. GRPO", 80),
            ("StarPO-S", 80, "algorithm=starpo-s", "monitor.early_stop.empty_filter=false"),
            ("Dr. GRPO, paid for each step", 20, "environment.options.graded=true"),
            ("best of 4", 20, "collect.search.strategy=best_of", "collect.search.width=4"),
            ("TSR", 3, *TSR),
        )
    ),
    "team": tuple(
        Variant(name, TEAM, (f"algorithm.terms=[{{unit: agent, score: reward, scale: std{key}}}]", *more))
        for name, key, *more in (
            ("one scale", ""),
            ("Dr. MAS", ", key: [agent]"),
            ("Dr. MAS, own weights", ", key: [agent]", "script.policies=[solver,verifier]"),
        )
    ),
    "echo_trap": (
        Variant("GRPO", "echo_trap"),
        Variant("PPO", "echo_trap", ("algorithm=starpo-ppo",)),
        Variant("StarPO-S", "echo_trap", ("algorithm=starpo-s",)),
        Variant("StarPO-S, GRPO", "echo_trap", ("algorithm=starpo-s", "algorithm.advantage=grpo")),
    ),
    "echo_trap_others": (
        Variant("RAGEN-2's filter", "echo_trap", ("algorithm=ragen2",)),
        Variant("LOOP", "echo_trap", ("algorithm=loop",)),
    ),
    "echo_trap_parts": (
        Variant("the filter alone", "echo_trap", ("algorithm.filter.strategy=top_fraction",)),
        Variant("no KL, clip 0.28", "echo_trap", ("algorithm.kl.where=off", "algorithm.clip_high=0.28")),
        Variant("no deviation", "echo_trap", ("algorithm.advantage=dr_grpo",)),
        Variant("16 x 16", "echo_trap", ("collect.groups=16", "collect.group_size=16")),
    ),
}

TRAP = (EVALUATION, "collect/reward_std_in_group", "policy/entropy", "update/grad_norm")
METRICS = {
    "blocks": (EVALUATION, "reward/reasoning"),
    "credit": (RETURN, EVALUATION),
    "horizons": (EVALUATION, "collect/success"),
    "search_llm": (EVALUATION,),
    "split": (EVALUATION, "collect/turns_mean"),
    "turn_order": (RETURN, EVALUATION),
    "critics": (RETURN, EVALUATION),
    "trees": (RETURN, EVALUATION),
    "attempts": (RETURN, "reward/attempt"),
    "tools": (EVALUATION, "collect/turns_mean"),
    "visual_lake": (EVALUATION,),
    "echo_trap": TRAP,
    "echo_trap_others": (EVALUATION, "collect/reward_std_in_group"),
    "echo_trap_parts": TRAP,
    "lock": (EVALUATION, "collect/success"),
    "long_lock": (EVALUATION, "collect/success"),
    "process": (EVALUATION, "scorer/score_correlation"),
    "subgoals": (EVALUATION, "collect/segment_turns"),
    "team": (RETURN, *(f"gradients/agents/{name}/task" for name in ("solver", "verifier"))),
    "mixture": (EVALUATION, *(f"{EVALUATION}/{name}" for name in ("bandit", "frozen_lake", "sokoban"))),
    "webshop": (RETURN, EVALUATION),
}
"""Metrics to show in the picture, if success alone is not enough."""
BY_COST = {
    "attempts",
    "blocks",
    "credit",
    "critics",
    "echo_trap_others",
    "horizons",
    "lock",
    "long_lock",
    "process",
    "search_llm",
    "split",
    "subgoals",
    "team",
    "tools",
    "trees",
    "turn_order",
    "visual_lake",
}
"""Comparisons of methods, which are drawn over used resources instead of iterations."""
TRANSFER = {"reasoning_llm": {"split": "test"}, "swapped_llm": {"split": "test", "swapped": "true"}}
"""Options of the environment for a second evaluation of the final policy."""


def starpod(*words: str, stdout: int | None = None) -> str:
    """Run a command of starpod, and return its output if `stdout` is a pipe.

    If it fails, it has printed why, and this process exits with the same status.
    """
    ended = subprocess.run([sys.executable, "-m", "starpod.cli.main", *words], stdout=stdout, text=True)
    if ended.returncode:
        raise SystemExit(ended.returncode)
    return ended.stdout


def run(variant: Variant, seed: int, folder: Path, words: Iterable[str]) -> dict[str, object]:
    """Train once and return the figures. An unfinished run of this configuration is resumed, a finished one kept."""
    command = ["train", variant.config, *variant.changes, *words, f"seed={seed}", "monitor.screen=plain"]
    asked = starpod(*command, "--dry-run", stdout=subprocess.PIPE)
    before, source = folder / "asked.yaml", folder / "origin.json"
    if not before.exists() or before.read_text() != asked:
        shutil.rmtree(folder, ignore_errors=True)
    if not (folder / "report.html").exists():
        folder.mkdir(parents=True, exist_ok=True)
        before.write_text(asked)
        if not source.exists():  # otherwise the run was started there before, and is resumed
            source.write_text(json.dumps(origin()))
        starpod(*command, "--run-dir", str(folder), "--resume-or-start")
    evaluations = RunFolder(folder).read_evaluations()
    first, final = evaluations[0], RunFolder(folder).read_final()
    if final is None:
        raise SystemExit(f"{folder} has no final evaluation: the run was stopped; give the command again")
    steps, spent = RunFolder(folder).read_metrics(), {axis: spent_by(RunFolder(folder), axis) for axis in SPENT}
    return {
        "variant": variant.name,
        "seed": seed,
        "origin": json.loads(source.read_text()) if source.exists() else {},
        "seconds": RunFolder(folder).read_facts()["ended"]["seconds"],  # including the parts before an interruption
        "before": {key: first[key] for key in KEYS},
        "after": {key: final[key] for key in KEYS},
        "environments": {
            name: {
                "before": own,
                "after": {key: value for key, value in final["environments"][name].items() if key in own},
            }
            for name, own in first.get("environments", {}).items()
        },
        "last": evaluations[-1]["success"],
        "curve": [
            {"success": each["success"], "return_mean": each["return_mean"]}
            | {axis: round(at_step(each["step"])) for axis, at_step in spent.items()}
            for each in evaluations
        ],
        "greedy": (final.get("greedy") or {}).get("success"),
        "best_of": (final.get("best_of") or {}).get("success"),
        "reference": first.get("reference", {}),
        "factors": _factors(steps),
        "signals": {signal.name: found for signal in SIGNALS if (found := _signal(signal, steps))},
        "warnings": [
            {"step": step["step"], "text": text.partition(". To do")[0]}
            for step in steps
            for text in step.get("warnings", ())
        ],
    }


def _factors(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean factors (predicted and measured, by agent) by which one scale changes squared gradients."""
    found: dict[str, list[float]] = {}
    for name, value in (item for step in steps for item in step["metrics"].items()):
        if name.startswith("gradients/agents/") and name.endswith("_factor"):
            found.setdefault(name.removeprefix("gradients/agents/"), []).append(value)
    return {name: statistics.fmean(values) for name, values in found.items()}


def transfer(folder: Path, options: Mapping[str, str]) -> dict[str, object]:
    """Evaluate a finished run's policy on its environment with other options, and return the figures."""
    config, report = load_config(str(RunFolder(folder).config)), folder / "transfer.json"
    environment = config.environment.id
    words = [word for name, value in options.items() for word in ("--option", f"{name}={value}")]
    words += ["--episodes", str(config.evaluation.episodes), "--temperature", str(config.evaluation.temperature)]
    with local_services([environment]) as address:
        starpod("eval", str(folder), address, "-e", environment, *words, "--json", str(report))
    found = json.loads(report.read_text())["environments"][environment]
    return {key: found[key] for key in KEYS[1:]}


def _signal(signal: Signal, steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return a signal of the Echo Trap: mean of the first ten steps, and worst and last of the medians over five steps.

    The result is empty if no step has the signal.
    """
    values = [step["metrics"][signal.metric] for step in steps if step["metrics"].get(signal.metric) is not None]
    if not values:
        return {}
    medians = [statistics.median(values[max(0, end - 5) : end]) for end in range(1, len(values) + 1)]
    worst = max(medians) if signal.rises else min(medians)
    return {"start": statistics.fmean(values[:10]), "worst": worst, "end": medians[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", choices=sorted(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"), help="where the runs go")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changed in every run")
    arguments = parser.parse_args()
    console = Console()
    for name in arguments.experiments:
        results, folders = [], {}
        for variant in EXPERIMENTS[name]:
            for seed in range(1, arguments.seeds + 1):
                folder = arguments.runs / f"{variant.slug}-{seed}"
                results.append(run(variant, seed, folder, arguments.set))
                if name in TRANSFER:
                    results[-1]["transfer"] = transfer(folder, TRANSFER[name])
                folders.setdefault(variant.name, []).append(folder)
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"learning_{name}.json").write_text(json.dumps(results, indent=2) + "\n")
        page = arguments.runs / f"learning_{name}.html"
        _, together, *charts = write_comparison(
            folders, page, metrics=METRICS.get(name, (EVALUATION,)), over=tuple(SPENT) if name in BY_COST else (STEPS,)
        )
        for chart in (together,) if name in METRICS else charts:
            shutil.copy(chart, arguments.out)
        console.print(_table(name, results))


def _table(name: str, results: list[dict[str, object]]) -> Table:
    table = Table("Variant", "Seed", "Before", "Final", "Last", "Seconds", "Deviation", "Warned at", title=name)
    for result in results:
        table.add_row(
            str(result["variant"]),
            str(result["seed"]),
            _interval(result["before"]),
            _interval(result["after"]),
            f"{result['last']:.1%}",
            f"{result['seconds']:.0f}",
            f"{result['signals']['reward_std']['end']:.3f}",  # type: ignore[index]
            ", ".join(str(warning["step"]) for warning in result["warnings"]) or "-",  # type: ignore[attr-defined]
        )
    for variant in dict.fromkeys(result["variant"] for result in results):
        ends = [result["after"]["success"] for result in results if result["variant"] == variant]  # type: ignore[index]
        if len(ends) > 1:
            spread = f"{statistics.fmean(ends):.1%} ± {statistics.stdev(ends):.1%}"
            table.add_row(str(variant), "mean", "", spread)
    for result in results:
        for name, value in result["factors"].items():  # type: ignore[attr-defined]
            table.add_row(f"{result['variant']}: {name}", str(result["seed"]), "", f"{value:.2f}")
    for policy, summary in results[0]["reference"].items():  # type: ignore[attr-defined]
        table.add_row(f"reference: {policy}", "", "", _interval(summary))
    return table


def _interval(summary: object) -> str:
    assert isinstance(summary, dict)
    text = f"{summary['success']:.1%} ({summary['success_low']:.1%} to {summary['success_high']:.1%})"
    return f"{text}, return {return_with_interval(summary)}" if is_graded(summary) else text


if __name__ == "__main__":
    main()
