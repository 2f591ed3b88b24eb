"""A training run, as the steps that the loop calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.algorithms.filters import filter_groups
from starpod.trainer.checkpoints.checkpoint import Loaded
from starpod.trainer.configuration.config import Config
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.diagnostics.metrics import kept_by_task
from starpod.trainer.evaluation.held_out import HeldOut
from starpod.trainer.learner import Learner
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.rollout.collect import Collector
from starpod.trainer.run.collecting import Collecting
from starpod.trainer.run.diagnosis import Diagnosis
from starpod.trainer.run.evaluating import Evaluating
from starpod.trainer.run.interrupts import Interrupted, Interrupts
from starpod.trainer.run.persistence import Persistence, Persistent
from starpod.trainer.run.policies import Models
from starpod.trainer.run.progress import Progress, Settings, Shared, StopReason
from starpod.trainer.run.rollout_log import RolloutLog
from starpod.trainer.run.schedule import RunSchedule
from starpod.trainer.run.step_report import Output, StepReport
from starpod.trainer.run.updating import Updating
from starpod.trainer.run.warm_start import WarmStart
from starpod.trainer.run.weights import EngineWeights
from starpod.trainer.scorers.base import TurnScorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts that a run is built from."""

    collectors: Sequence[Collector[EngineAgents]]
    """One collector per stage in order, then one with the unchanged configuration."""
    learner: Learner
    models: Models
    output: Output
    parallel: Parallel
    interrupts: Interrupts
    demonstrations: Sequence[Episode] = ()
    """Episodes to imitate before training."""
    offline: Sequence[Group] = ()
    """Groups to train on instead of collecting."""
    scorer: TurnScorer | None = None
    """Scorer of turns, if one is trained with the policy."""


class Run:
    """A training run. `starpod.trainer.run.setup` builds it; `starpod.trainer.loop` drives it."""

    def __init__(self, config: Config, parts: Parts) -> None:
        output, learner, scorer = parts.output, parts.learner, parts.scorer
        self.progress = Progress()
        self.shared = shared = Shared(Settings(config), self.progress, parts.parallel, parts.interrupts, output.screen)
        self.output = output
        self.collecting = Collecting(shared, parts.collectors, offline=parts.offline)
        collector = self.collecting.collector
        weights = EngineWeights(collector.agents.engine, parts.models, sleeps=config.engine.sleep)
        held_out = HeldOut(shared, collector, scorer)
        self.report = StepReport(shared, output)
        self.evaluating = Evaluating(shared, held_out, early_stop=self.report.monitor.early_stop, folder=output.folder)
        self.schedule = RunSchedule(shared, self.evaluating)
        self.warm_start = WarmStart(shared, learner, parts.demonstrations, held_out=held_out, weights=weights)
        self.diagnosis = Diagnosis(shared, learner, weights)
        mib = 0.0 if parts.offline else config.collect.keep_mib
        self.rollouts = RolloutLog(shared, output.folder.episodes, mib=mib)
        self.updating = Updating(
            shared,
            learner,
            scorer,
            weights=weights,
            collecting=self.collecting,
            diagnosis=self.diagnosis,
            rollouts=self.rollouts,
        )
        self.persistence = Persistence(shared, self._contents(), output.checkpoints)
        if config.stages:
            self._begin_stage()

    def _contents(self) -> Persistent:
        """Return everything that a checkpoint contains."""
        return Persistent(
            learner=self.updating.learner,
            scorer=self.updating.scorer,
            warm_start=self.warm_start,
            collecting=self.collecting,
            evaluating=self.evaluating,
            parts={
                "stages": self.shared.settings.stages,
                "monitor": self.report.monitor,
                "information": self.diagnosis.information,
                "noise": self.diagnosis.noise,
            },
        )

    def restore(self, loaded: Loaded) -> None:
        """Continue from a checkpoint. Raises CheckpointError if its tensors are not finite, and ConfigError."""
        loaded.check_finite()
        if "stages" in loaded.state:
            self.shared.settings.stages.load_state_dict(loaded.state["stages"])
            self._begin_stage()
        self.persistence.restore(loaded)

    def _begin_stage(self) -> None:
        """Apply the configuration of the current stage."""
        config = self.shared.settings.now
        self.updating.learner.configure(config.algorithm, config.optimizer, config.criteria_weights)
        self.collecting.begin_stage()

    # --- the steps of the loop ----------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Run the warm start, or the rest of it after a resumption. The resulting policy is the KL term's reference."""
        if self.warm_start.over:
            return
        try:
            imitated = await self.warm_start.run()
        except Interrupted:
            self.persistence.finish_step()  # the interruption comes between two imitation steps
            raise
        self.progress.version += imitated
        if self.shared.config.needs_reference:
            self.updating.learner.freeze_reference(None)
        if self.updating.scorer is not None:
            self.updating.scorer.begin(self.updating.learner.by_agent[""].policy)
        self.warm_start.over = True
        self.persistence.finish_step()
        # Time limits apply to training, because otherwise imitation could use up the limit and leave nothing for
        # training.
        self.progress.restart_clock()

    def begin_step(self) -> None:
        self.persistence.begin_step()
        self.progress.step += 1
        self.report.begin()

    async def sync(self) -> None:
        """Load the policy's weights into the engine if they changed or the engine is asleep."""
        if (seconds := await self.updating.weights.load(self.progress.version)) is not None:
            self.report.metrics["time/sync"] = seconds

    async def collect(self) -> list[Group]:
        """Return the groups of a step from `Collecting.collect`, plus older groups if replay is on."""
        collection = await self.collecting.collect(self.progress)
        self.report.metrics.update(collection.metrics)
        self.progress.tokens += collection.tokens
        self.rollouts.begin(collection.played, collection.rejected_groups)
        if self.updating.scorer is None:  # a scorer first adds its reward part
            await self.rollouts.write_rollouts(self.progress.step)
        version = self.updating.fresh_version
        self.report.metrics.update(await self.diagnosis.measure(collection.played, self.progress.step, version))
        groups, metrics = self.collecting.with_replayed(collection.groups, self.progress)
        self.report.metrics.update(metrics)
        return groups

    def filter(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups that are worth an update."""
        config = self.shared.settings.now
        kept_groups = filter_groups(config.algorithm.filter, groups)
        self.report.metrics["collect/kept_fraction"] = len(kept_groups) / max(len(groups), 1)
        self.rollouts.judge(config.algorithm.filter, groups, kept_groups)
        if config.environments:
            self.report.metrics.update(kept_by_task(groups, kept_groups))
        # Keep the branches of dropped groups. If all episodes failed alike, the branches can still be learnt from.
        kept_ids = {id(group) for group in kept_groups}
        dropped_groups = [group for group in groups if group.branches and id(group) not in kept_ids]
        return kept_groups + [Group(group.id, [], branches=group.branches) for group in dropped_groups]

    async def learn(self, groups: Sequence[Group]) -> None:
        """Update the policy, or skip the update if the filter kept nothing."""
        self.shared.interrupts.raise_if_requested()
        await self.updating.make_room(groups)
        self.persistence.begin_update()
        kept_fraction = self.report.metrics.get("collect/kept_fraction", 1.0)
        self.report.metrics.update(await self.updating.learn(groups, kept_fraction))

    def finish_step(self) -> None:
        """Report the step, and begin the next stage if its condition is met."""
        fleets = [collector.fleet for collector in self.collecting.collector.by_task.values()]
        self.report.metrics["collect/recoveries"] = float(sum(fleet.recoveries for fleet in fleets))
        self.report.finish(self._begin_stage)
        self.persistence.finish_step()

    async def evaluate(self) -> None:
        """Evaluate on the seeds that select the best checkpoint; at step 0, also evaluate the reference policies."""
        self.shared.interrupts.raise_if_requested()
        await self.sync()
        references = None
        if self.progress.step == 0:
            references = self.warm_start.references or await self.evaluating.held_out.play_references()
        await self.evaluating.play(self.progress, references)

    async def evaluate_final(self) -> None:
        """Play the best checkpoint once, on start states that were used neither to train nor to choose it.

        The policy then has that checkpoint's weights, so call this only at the end of a run. All ranks take part.
        """
        checkpoints, progress = self.output.checkpoints, self.progress
        checkpoint = checkpoints.best(["policy"]) or checkpoints.latest(["policy"])
        step, version = progress.step, progress.version
        if checkpoint is not None and checkpoint.step != step:
            step, progress.version = checkpoint.step, checkpoint.state["version"]
            self.updating.learner.load_policy(checkpoint.tensors["policy"])
        await self.sync()
        await self.evaluating.play_final(step, progress)
        progress.version = version

    async def finish(self, reason: StopReason) -> None:
        """Evaluate, save, and play the final evaluation; after a signal only save.

        Weights that were already evaluated are not evaluated again on the same start states.
        """
        # All ranks must evaluate or none, and a signal may have reached only one.
        if not self.schedule.is_interrupted() and not self.evaluating.is_done(self.progress.step):
            await self.evaluate()
        await self.persistence.save()
        await self.persistence.finish_writing()
        await self.collecting.ahead.close()
        if not self.schedule.is_interrupted():
            await self.evaluate_final()
        await self.end(reason)
        if self.shared.parallel.is_main and self.shared.interrupts.signal is None:
            await self.evaluating.held_out.draw(self.output.folder)

    async def end(self, reason: StopReason) -> None:
        """Stop the groups in play and record why the run is over."""
        await self.collecting.ahead.close()
        if self.shared.parallel.is_main:
            self.output.folder.end(reason.text, seconds=self.progress.elapsed, limits=reason.limits)
