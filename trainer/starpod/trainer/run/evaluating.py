"""Evaluation on held-out start states, with the best step and early stopping."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter, time
from typing import Any, Literal

from starpod.trainer.checkpoints.checkpoint import Score, as_score
from starpod.trainer.configuration.config import Config
from starpod.trainer.diagnostics.early_stop import EarlyStop
from starpod.trainer.evaluation.figures import episode_results, facts_of, held_out_figures, overall
from starpod.trainer.evaluation.held_out import HeldOut
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.words import missing_result
from starpod.trainer.rollout.collect import Collected
from starpod.trainer.rollout.environment import make_task
from starpod.trainer.run.progress import Progress, Shared


def evaluation_task(config: Config) -> object:
    """Return the tasks, temperatures and seeds that choose the best checkpoint: scores of others cannot be compared."""
    tasks = [(make_task(task.held_out, (), task.name), task.evaluation.temperature) for task in config.tasks]
    return tasks, config.seeds.selection


class Evaluating:
    """Evaluation of the weights in the engine. It remembers the best step.

    Attributes:
        success: Success rate of the latest evaluation; None before the first one, and if the environment does not
            report success.
        score: Success rate (0 if it is not reported) and mean return of the latest evaluation; None before the first.
            The highest score is the best, so that the return decides where success is equal or unknown.
        early_stop: Early stopping, which counts scheduled evaluations.
    """

    def __init__(self, shared: Shared, held_out: HeldOut, *, early_stop: EarlyStop, folder: RunFolder) -> None:
        self.held_out = held_out
        self.early_stop = early_stop
        self.success: float | None = None
        self.score: Score | None = None
        self._shared = shared
        self._folder = folder
        self._evaluated_step = -1
        self._best: Score | None = None
        self._best_step = -1

    def forget(self) -> None:
        """Forget all evaluations, because they were of another task."""
        self.success = self.score = self._best = None
        self._evaluated_step = self._best_step = -1
        self.early_stop.forget_evaluations()

    def is_done(self, step: int) -> bool:
        """Return whether the weights of this step were evaluated."""
        return self._evaluated_step == step

    def is_scheduled(self, step: int) -> bool:
        """Return whether an evaluation is scheduled after this step. The end of a run alone does not schedule one."""
        every = self._shared.config.evaluation.every
        return step == 0 or (every > 0 and step % every == 0)

    def is_best(self, step: int) -> bool:
        """Return whether this step has the best evaluation so far and its weights are to be kept. All ranks agree."""
        return self._shared.config.checkpoint.keep_best and self._best_step == step

    async def play(self, progress: Progress, references: Mapping[str, Any] | None = None) -> None:
        """Play the start states that are used to choose the best checkpoint.

        references: metrics of reference policies by task and policy, for the first evaluation.
        """
        step = progress.step
        start_time = perf_counter()
        collections = await self.held_out.play("selection", "selection")
        summary: dict[str, Any] = {"step": step, "time": time(), "policy_version": progress.version}
        figures = {name: held_out_figures(collected) for name, collected in collections.items()}
        for name, reference in (references or {}).items():
            figures[name]["reference"] = reference
        summary |= overall(figures)
        summary["seconds"] = perf_counter() - start_time
        # Only scheduled evaluations count towards early stopping. The extra one after an interruption does not, or a
        # run that is resumed often would stop too early.
        if problem := missing_result(summary):
            self._shared.screen.warn(f"the evaluation at step {step} has no result: {problem}")
        else:
            if self.is_scheduled(step) and not self.is_done(step):
                results = {name: episode_results(collected.episodes) for name, collected in collections.items()}
                self.early_stop.evaluated(step, summary["success"], summary["return_mean"], results)
            self.success, self._evaluated_step = summary["success"], step
            self.score = (summary["success"] or 0.0, summary["return_mean"])
            if self._best is None or self.score > self._best:
                self._best, self._best_step = self.score, step
            self._shared.screen.evaluation(step, summary)
        if self._shared.parallel.is_main:
            self._folder.append_evaluation(summary)
            self._folder.episodes.write(step, self.held_out.kept_episodes(collections))

    async def play_final(self, step: int, progress: Progress) -> None:
        """Play start states that were used neither to train nor to choose the weights, and record each episode.

        step: step whose weights the engine has.
        """
        start_time = perf_counter()
        # Use the random streams of `starpod eval`, not the streams of the evaluations that chose the checkpoint.
        collections = await self.held_out.play("final", "evaluation", f"the checkpoint of step {step} ")
        summary: dict[str, Any] = {
            "step": step,
            "last_step": progress.step,
            "time": time(),
            "policy_version": progress.version,
        }
        figures = {name: held_out_figures(collected) for name, collected in collections.items()}
        modes: list[Literal["greedy", "best_of"]] = ["greedy"] if self._shared.config.evaluation.greedy else []
        modes += ["best_of"] if self._shared.config.evaluation.best_of > 1 else []
        for mode in modes:
            for name, collected in (await self.held_out.play("final", "evaluation", decoding=mode)).items():
                if collected.episodes:
                    figures[name][mode] = held_out_figures(collected)
        summary |= overall(figures)
        summary["seconds"] = perf_counter() - start_time
        if problem := missing_result(summary):
            self._shared.screen.warn(f"the final evaluation has no result: {problem}")
        if self._shared.parallel.is_main:
            self._write_final(summary, collections)

    def _write_final(self, summary: dict[str, Any], collections: Mapping[str, Collected]) -> None:
        for name, collected in collections.items():
            seeds = self.held_out.seeds(name, "final")
            facts = facts_of(self.held_out.task(name), collected.episodes)
            figures = summary["environments"][name] if name else summary
            figures |= {**facts, "seeds": [seeds.start, seeds.stop], "samples": 1}
        self._folder.write_final(summary)
        self._folder.episodes.write(summary["step"], self.held_out.kept_episodes(collections), "final")

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "success": self.success,
            "score": self.score,
            "evaluated": self._evaluated_step,
            "best": self._best,
            "best_at": self._best_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values from `state_dict`."""
        self.success, self._evaluated_step = state["success"], state["evaluated"]
        self.score, self._best = (as_score(state[name]) for name in ("score", "best"))
        self._best_step = state["best_at"]
