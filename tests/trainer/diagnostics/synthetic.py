"""Made-up episodes, curves and whole run folders."""

import math
import random
from pathlib import Path
from typing import Any

from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.sinks import JsonlSink
from tests.trainer.turns import a_turn

LADDER = {
    "random": {"success": 0.13},
    "walk to the goal": {"success": 0.64},
    "avoid holes": {"success": 0.86},
    "expert": {"success": 1.0},
}
WARNING = "reward deviation within groups has fallen to 28 % of its start: the policy is echoing"


def turn(text: str = "", **values: Any) -> Turn:
    """A turn of one reply; `prompt` and `reply` may be given."""
    filled: dict[str, Any] = {"observation": "P_\n_G", "prompt": [1, 2], "reply": [3], "finish": "stop", "text": text}
    return a_turn(**filled | values)


def episode(seed: int, *, solved: bool, turns: int = 3, group: int = 0, member: int = 0) -> Episode:
    """An episode on a frozen lake that walks to the goal, or into a hole."""
    rows = ["P _ _ O", "_ O _ _", "_ _ _ O", "O _ _ G"]
    made = []
    for number in range(turns):
        last = number == turns - 1
        reward = 1.0 if last and solved else -0.1 if number == 1 and not solved else 0.0
        made.append(
            turn(
                f"<think>goal is down <right></think><answer>Down{' || Right' * (number % 2)}</answer>",
                observation="\n".join(rows[number % 4 :] + rows[: number % 4]),
                thought=f"the goal lies {4 - number} down & {number} right; the hole is <next> to me",
                actions=["Down", "Right"][: 1 + number % 2],
                parts={"environment": max(reward, 0.0), "format": min(reward, 0.0)},
            )
        )
    end = "terminal" if solved else "max_turns"
    final = "\n".join(rows[1:] + rows[:1])
    return Episode(group, member, "frozen_lake-v1", "1.0.0", seed, 0, "Reach the goal.", made, end, solved, "", final)


def metrics_at(step: int, seed: int = 0, *, collapse: bool = False) -> dict[str, float]:
    """A healthy S-shaped run, or one that falls into the Echo Trap near step 60."""
    noise = random.Random(f"{seed} {step}").gauss
    rise = 1 / (1 + math.exp(-(step - 70) / 18))
    trap = 1 / (1 + math.exp(-(step - 60) / 8)) if collapse else 0.0
    success = min(max((0.07 + 0.8 * rise) * (1 - 0.6 * trap) + noise(0, 0.03), 0), 1)
    wait, envs, update = 0.9 + noise(0, 0.05), 0.3 + 0.1 * rise, 0.8 + noise(0, 0.03)
    return {
        "collect/success": success,
        "collect/return_mean": success - 0.1 + noise(0, 0.02),
        "collect/reward_std_in_group": max(0.4 * (1 - 0.85 * trap) * (1 - 0.4 * rise) + noise(0, 0.03), 0.001),
        "collect/own_std_in_group": max(0.4 * (1 - 0.85 * trap) * (1 - 0.4 * rise), 0.001),
        "collect/identical_fraction": 0.6 * trap,
        "collect/response_diversity": max(0.8 - 0.3 * rise - 0.45 * trap + noise(0, 0.02), 0.01),
        "collect/episodes": 16.0,
        "collect/turns_mean": 4 - rise,
        "collect/tokens_per_turn": 24.0,
        "collect/format_rate": min(0.8 + 0.2 * rise, 1),
        "collect/kept_fraction": 0.5,
        "policy/entropy": max(0.5 * (1 - 0.5 * rise) * (1 - 0.9 * trap) + noise(0, 0.01), 0.01),
        "policy/kl": 0.02 * rise,
        "policy/clip_fraction_high": abs(noise(0.02, 0.005)),
        "critic/explained_variance": 0.6 * rise,
        "update/grad_norm": (0.8 + noise(0, 0.1)) * (1 + (8 * trap if step > 75 else 0)),
        "time/step": wait + envs + update + 0.08,
        "time/collect": wait + envs,
        "time/generate_wait": wait,
        "time/environment_wait": envs,
        "time/update": update,
        "time/share_outside": 0.04,
        "rate/sampled_tokens_per_s": 7800 + noise(0, 200),
        "rate/trained_tokens_per_s": 9900 + noise(0, 200),
        "rate/environment_steps_per_s": 420 + noise(0, 20),
        "environment/latency_p50": 0.0021 + abs(noise(0, 0.0002)),
        "environment/latency_p99": 0.011 + abs(noise(0, 0.002)),
        "policy/logprob_gap_mean": 1e-6 * abs(noise(1, 0.2)),
        "custom/number": 3.0,
    }


def write_run(path: Path, *, steps: int = 150, seed: int = 0, collapse: bool = False, title: str = "") -> RunFolder:
    """A run folder as a finished run leaves it."""
    defaults = {"seed": 0, "model": {"name": "tiny"}, "algorithm": {"preset": "starpo-ppo", "loss": {"clip_high": 0.2}}}
    config = {"seed": seed, "model": {"name": "tiny"}, "algorithm": {"preset": "starpo-s", "loss": {"clip_high": 0.28}}}
    folder = RunFolder.create(path).begin(config, defaults=defaults, title=title, model="SmolLM2, dequantised")
    sink = JsonlSink(folder.metrics)
    for step in range(1, steps + 1):
        sink.write(step, metrics_at(step, seed, collapse=collapse), [WARNING] if collapse and step == 66 else [])
    sink.close()
    for step in range(0, steps + 1, 25):
        success = metrics_at(max(step, 1), seed + 100, collapse=collapse)["collect/success"]
        half = 1.96 * math.sqrt(max(success * (1 - success), 0.01) / 256)
        folder.append_evaluation(
            {
                "step": step,
                "time": 1.7e9 + 2 * step,
                "policy_version": step,
                "success": success,
                "success_low": max(success - half, 0),
                "success_high": min(success + half, 1),
                "episodes": 256,
                "return_mean": success - 0.1,
                "turns_mean": 3.4,
                "format_rate": 0.98,
                **({"reference": LADDER} if step == 0 else {}),
            }
        )
        played = [episode(number, solved=number % 3 != 0 and step > 0, group=number) for number in range(8)]
        folder.episodes.write(step, played)
    folder.end("Finished: the time was up.", seconds=252.0, limits=["minutes"])
    return folder
