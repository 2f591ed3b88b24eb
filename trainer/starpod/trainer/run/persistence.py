"""Persistence of a run: the content of its checkpoints, rescue after an error, and resumption."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starpod.trainer.checkpoints.checkpoint import CheckpointError, Checkpoints, Loaded
from starpod.trainer.checkpoints.state import capture_rng, restore_rng
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.replay import ReplayBuffer
from starpod.trainer.learner import Learner
from starpod.trainer.parallel.ranks import RankFailed
from starpod.trainer.rollout.ahead import Admitted
from starpod.trainer.rollout.collect import CollectionFailed
from starpod.trainer.run.collecting import Collecting
from starpod.trainer.run.evaluating import Evaluating, evaluation_task
from starpod.trainer.run.interrupts import Interrupted
from starpod.trainer.run.progress import Shared
from starpod.trainer.run.warm_start import WarmStart
from starpod.trainer.scorers.base import TurnScorer


class Stateful(Protocol):
    """A part of a run that is saved in checkpoints as JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Persistent:
    """Everything that a checkpoint contains."""

    learner: Learner
    scorer: TurnScorer | None
    warm_start: WarmStart
    collecting: Collecting
    evaluating: Evaluating
    parts: Mapping[str, Stateful]
    """The small parts, by name."""


class Persistence:
    """Saving and restoring of a run. All ranks take part.

    A thread writes a snapshot of the run while training continues.
    """

    def __init__(self, shared: Shared, contents: Persistent, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self._shared = shared
        self._contents = contents
        self._parts = {**contents.parts, **contents.collecting.parts}
        # What `_present` returned at the end of the last finished step, if a later step has begun.
        self._last_step_state: tuple[dict[str, Any], Sequence[Admitted], ReplayBuffer] | None = None
        self._weights_are_whole = False
        self._saved_step = -1
        self._writing: tuple[int, asyncio.Future[Any]] | None = None  # the step, and the thread's work

    # --- when weights are whole ---------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Remember the state of the run, so that a rescue before the step's first gradient loses only this step."""
        self._last_step_state = self._present()

    def begin_update(self) -> None:
        """Disable rescues until the step is over, because the weights are now between two versions."""
        self._weights_are_whole = False

    def finish_step(self) -> None:
        """Enable rescues again, because the weights are now those of a finished step."""
        self._last_step_state, self._weights_are_whole = None, True

    # --- saving -------------------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """Begin to write a checkpoint. Raises CheckpointError if the previous one could not be written."""
        await self.finish_writing()
        self._begin_writing(*self._present())

    async def finish_writing(self) -> None:
        """Wait until the last checkpoint is on disk. Raises CheckpointError on all ranks if that fails on one."""
        if self._writing is not None:
            (step, work), self._writing = self._writing, None
            await work
            self._saved_step = step

    def _begin_writing(self, progress: Mapping[str, Any], admitted: Sequence[Admitted], replay: ReplayBuffer) -> None:
        contents, step = self._contents, progress["step"]
        optimizer, learner = contents.learner.state()
        tensors = {"policy": contents.learner.policy_state(), "optimizer": optimizer}
        if reference := contents.learner.reference_state():
            tensors["reference"] = reference
        scorer_values: dict[str, Any] = {}
        if contents.scorer is not None:
            tensors["scorer"], scorer_values = contents.scorer.state()
        imitation, warm_start = contents.warm_start.state()
        if warm_start:
            tensors["imitation"] = imitation
        ahead = contents.collecting.ahead
        groups = [group for share in self._shared.parallel.gather_objects(ahead.state(admitted)) for group in share]
        # Omit the score of an older evaluation, because it was measured with other weights.
        score = progress["score"] if progress["evaluated"] == step else None
        state = {
            **progress,
            "learner": learner,
            "scorer": scorer_values,
            "warm_start": warm_start,
            "replay": replay.state_dict(),
            "ahead": groups,
            "config": self._shared.config.to_dict(),
        }
        snapshot = self.checkpoints.snapshot(step, tensors, state, score=score)
        self._writing = step, asyncio.ensure_future(self._shared.parallel.in_thread(self.checkpoints.write, snapshot))

    async def close(self) -> None:
        """Wait for the thread that writes. Its errors are ignored, because another error already ends the run."""
        with contextlib.suppress(CheckpointError):
            await self.finish_writing()

    def _present(self) -> tuple[dict[str, Any], Sequence[Admitted], ReplayBuffer]:
        """Return the part of a checkpoint that a collection changes: progress, groups in play and replay buffer."""
        progress = {
            **self._shared.progress.state_dict(),
            **self._contents.evaluating.state_dict(),
            **{name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()},
            "rng": capture_rng(),
        }
        collecting = self._contents.collecting
        return progress, collecting.ahead.admitted, copy.copy(collecting.replay)

    async def rescue(self, error: Exception) -> None:
        """Save the last finished step after an error, and wait until it is written.

        Nothing is saved if the error interrupted an update, because the weights are then between two versions. With
        several ranks, this only works for an error that all ranks raise, such as RankFailed or CollectionFailed.
        """
        on_all_ranks = self._shared.parallel.world == 1 or isinstance(
            error, RankFailed | CollectionFailed | CheckpointError
        )
        if not (self._weights_are_whole and on_all_ranks):
            return
        state = self._last_step_state or self._present()
        step = state[0]["step"]
        await self.close()
        try:
            if self._saved_step != step:
                self._begin_writing(*state)
                await self.finish_writing()
        except CheckpointError as problem:
            if isinstance(error, Interrupted | CheckpointError):
                raise  # there is no other cause to report
            self._shared.screen.warn(str(problem))

    # --- resuming -----------------------------------------------------------------------------------------------------

    def restore(self, loaded: Loaded) -> None:
        """Continue from a checkpoint. Call this after the checkpoint's stage has begun.

        Raises:
            ConfigError: The configuration needs something that the checkpoint does not contain.
        """
        contents, config, state = self._contents, self._shared.config, loaded.state
        # A checkpoint from the warm start has no reference policy yet.
        needs_reference = config.needs_reference and not state["warm_start"]
        if needs_reference and "reference" not in loaded.tensors:
            raise ConfigError(
                f"algorithm.kl.where is {config.algorithm.kl.where}, but the run began without a KL term, so its "
                "checkpoint holds no reference policy: resume with algorithm.kl.where=off, or begin another run"
            )
        contents.learner.load_policy(loaded.tensors["policy"])
        if needs_reference:
            contents.learner.freeze_reference(loaded.tensors["reference"])
        contents.learner.load_state(loaded.tensors["optimizer"], state["learner"])
        if contents.scorer is not None:
            if "scorer" not in loaded.tensors or state["config"]["scorer"]["kind"] != config.scorer.kind:
                raise ConfigError(
                    f"scorer.kind is {config.scorer.kind}, but the run that is resumed has no such scorer in its "
                    "checkpoint: give the same value, or begin another run with another --run-dir"
                )
            contents.scorer.load_state(loaded.tensors["scorer"], state["scorer"])
        self._shared.progress.load_state_dict(state)
        contents.evaluating.load_state_dict(state)
        for name, part in {**self._parts, "replay": contents.collecting.replay}.items():
            if name in state:
                part.load_state_dict(state[name])
        if state["config"]["monitor"]["early_stop"] != config.monitor.early_stop.to_dict():
            contents.evaluating.early_stop.reason = ""
        contents.collecting.ahead.load_state(state["ahead"])
        restore_rng(state["rng"])
        contents.warm_start.load_state(loaded.tensors.get("imitation", {}), state["warm_start"])
        if contents.warm_start.over:
            self._weights_are_whole, self._saved_step = True, self._shared.progress.step
        if evaluation_task(Config.model_validate(state["config"])) != evaluation_task(config):
            contents.evaluating.forget()
            if self._shared.parallel.is_main:  # last, so that a refused resumption leaves the folder unchanged
                self.checkpoints.forget_scores()
