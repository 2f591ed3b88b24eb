"""A training run, as the steps that the loop calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from starpod.client.spelling import nearest
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.algorithms.filters import filter_groups, loss_scale
from starpod.trainer.checkpoints.checkpoint import Checkpoints, Loaded
from starpod.trainer.configuration.config import Config
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group, branches_of, episodes_of
from starpod.trainer.diagnostics.echo_trap import SettingsInUse
from starpod.trainer.diagnostics.metrics import kept_by_task
from starpod.trainer.diagnostics.monitor import Monitor
from starpod.trainer.evaluation.held_out import HeldOut
from starpod.trainer.learner import Learner
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.screen import Screen
from starpod.trainer.output.sinks import Sinks
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.rollout.collect import Collector
from starpod.trainer.run.collecting import Collecting
from starpod.trainer.run.diagnosis import Diagnosis
from starpod.trainer.run.evaluating import Evaluating
from starpod.trainer.run.interrupts import Interrupted, Interrupts
from starpod.trainer.run.persistence import Persistence, Persistent
from starpod.trainer.run.policies import Models
from starpod.trainer.run.progress import Progress, Settings, StopReason
from starpod.trainer.run.rollout_log import RolloutLog
from starpod.trainer.run.warm_start import WarmStart
from starpod.trainer.run.weights import EngineWeights
from starpod.trainer.scorers.base import TurnScorer, score_and_fit

_MEASURED = 5
"""Number of first iterations whose speed is extrapolated to the time limit."""


@dataclass(slots=True)
class Output:
    """Files and screen of a run."""

    folder: RunFolder
    checkpoints: Checkpoints
    screen: Screen
    sinks: Sinks | None = None
    """Sinks of metrics; None on ranks that write no metrics."""


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
    """A training run. `starpod.trainer.run.setup` builds it; `starpod.trainer.loop` drives it.

    Attributes:
        metrics: Metrics of the current step.
    """

    def __init__(self, config: Config, parts: Parts) -> None:
        output, parallel, interrupts = parts.output, parts.parallel, parts.interrupts
        screen, learner = output.screen, parts.learner
        self.settings = Settings(config)
        self.progress = Progress()
        self.learner = learner
        self.scorer = parts.scorer
        self.output = output
        self.parallel = parallel
        self.interrupts = interrupts
        self.collecting = Collecting(
            self.settings,
            parts.collectors,
            parallel=parallel,
            interrupts=interrupts,
            screen=screen,
            offline=parts.offline,
        )
        collector = self.collecting.collector
        self.weights = EngineWeights(collector.agents.engine, parts.models, parallel, sleeps=config.engine.sleep)
        held_out = HeldOut(
            config, collector, parallel=parallel, screen=screen, interrupts=interrupts, scorer=parts.scorer
        )
        self.monitor = Monitor(config.monitor)
        self.evaluating = Evaluating(
            config,
            held_out,
            early_stop=self.monitor.early_stop,
            folder=output.folder,
            parallel=parallel,
            screen=screen,
        )
        self.warm_start = WarmStart(
            config,
            learner,
            parts.demonstrations,
            held_out=held_out,
            weights=self.weights,
            parallel=parallel,
            interrupts=interrupts,
            screen=screen,
        )
        self.diagnosis = Diagnosis(config, learner, weights=self.weights, parallel=parallel)
        self.rollouts = RolloutLog(
            output.folder.episodes, parallel, screen, mib=0.0 if parts.offline else config.collect.keep_mib
        )
        persistent = Persistent(
            learner=learner,
            scorer=parts.scorer,
            warm_start=self.warm_start,
            progress=self.progress,
            collecting=self.collecting,
            evaluating=self.evaluating,
            parts={
                "stages": self.settings.stages,
                "monitor": self.monitor,
                "information": self.diagnosis.information,
            },
        )
        self.persistence = Persistence(config, persistent, output.checkpoints, parallel=parallel, screen=screen)
        self.metrics: dict[str, float] = {}
        self._start_time = perf_counter()
        if config.stages:
            self._begin_stage()

    @property
    def config(self) -> Config:
        """The configuration of the current stage."""
        return self.settings.now

    def restore(self, loaded: Loaded) -> None:
        """Continue from a checkpoint. Raises CheckpointError if its tensors are not finite, and ConfigError."""
        loaded.check_finite()
        if "stages" in loaded.state:
            self.settings.stages.load_state_dict(loaded.state["stages"])
            self._begin_stage()
        self.persistence.restore(loaded)

    # --- schedule -----------------------------------------------------------------------------------------------------

    def reason_to_stop(self) -> StopReason | None:
        """Return why the run is over; None if it is not over. All ranks agree."""
        stop, progress, success = self.config.stop, self.progress, self.evaluating.success
        reason = None
        if self.interrupts.signal is not None:
            reason = StopReason(f"stopped by {self.interrupts.signal.name} and saved")
        elif self.monitor.early_stop.reason:
            reason = StopReason(self.monitor.early_stop.reason)
        else:
            reached = {}
            if progress.step >= stop.iterations:
                reached["iterations"] = f"iteration {stop.iterations} of {stop.iterations} done"
            if stop.minutes is not None and progress.elapsed >= 60 * stop.minutes:
                reached["minutes"] = f"the time is up: stop.minutes={stop.minutes:g}"
            if stop.tokens is not None and progress.tokens >= stop.tokens:
                reached["tokens"] = f"{progress.tokens:,} tokens were sampled: stop.tokens={stop.tokens}"
            if stop.success is not None and (success or 0.0) >= stop.success:
                reached["success"] = f"evaluation success {success:.1%} reached stop.success"
            if reached:
                reason = StopReason(next(iter(reached.values())), tuple(reached))
        # Compare the ranks, because a signal may have reached only one of them.
        return max((rank_reason for rank_reason in self.parallel.gather_objects(reason) if rank_reason), default=None)

    def due(self, every: int) -> bool:
        """Return whether this step is a multiple of `every`, except for the last step, which `finish` handles."""
        step = self.progress.step
        return every > 0 and step % every == 0 and step < self.config.stop.iterations

    @property
    def evaluation_is_due(self) -> bool:
        """Whether this step still has to be evaluated. In a resumed run, an error may have prevented its evaluation."""
        step = self.progress.step
        return not self.evaluating.is_done(step) and (step == 0 or self.due(self.config.evaluation.every))

    @property
    def checkpoint_is_due(self) -> bool:
        """Whether to save this step: on schedule, or because it has the best evaluation so far."""
        return self.due(self.config.checkpoint.every) or self.evaluating.is_best(self.progress.step)

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
        if self.settings.whole.needs_reference:
            self.learner.freeze_reference(None)
        if self.scorer is not None:
            self.scorer.begin(self.learner.by_agent[""].policy)
        self.warm_start.over = True
        self.persistence.finish_step()
        # Time limits apply to training, because otherwise imitation could use up the limit and leave nothing for
        # training.
        self.progress.restart_clock()

    def begin_step(self) -> None:
        self.persistence.begin_step()
        self.progress.step += 1
        self.output.screen.at = self.progress.step
        self.metrics = {}
        self._start_time = perf_counter()

    async def sync(self) -> None:
        """Load the policy's weights into the engine if they changed or the engine is asleep."""
        if (seconds := await self.weights.load(self.progress.version)) is not None:
            self.metrics["time/sync"] = seconds

    async def collect(self) -> list[Group]:
        """Return the groups of a step from `Collecting.collect`, plus older groups if replay is on."""
        collection = await self.collecting.collect(self.progress)
        self.metrics |= collection.metrics
        self.progress.tokens += collection.tokens
        self.rollouts.begin(collection.played, collection.rejected_groups)
        if self.scorer is None:  # a scorer first adds its reward part
            await self.rollouts.write_rollouts(self.progress.step)
        self.metrics |= await self.diagnosis.measure(collection.played, self.progress.step, self._fresh_version)
        groups, metrics = self.collecting.with_replayed(collection.groups, self.progress)
        self.metrics |= metrics
        return groups

    def filter(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups that are worth an update."""
        kept_groups = filter_groups(self.config.algorithm.filter, groups)
        self.metrics["collect/kept_fraction"] = len(kept_groups) / max(len(groups), 1)
        self.rollouts.judge(self.config.algorithm.filter, groups, kept_groups)
        if self.config.environments:
            self.metrics |= kept_by_task(groups, kept_groups)
        # Keep the branches of dropped groups. If all episodes failed alike, the branches can still be learnt from.
        kept_ids = {id(group) for group in kept_groups}
        dropped_groups = [group for group in groups if group.branches and id(group) not in kept_ids]
        return kept_groups + [Group(group.id, [], branches=group.branches) for group in dropped_groups]

    async def learn(self, groups: Sequence[Group]) -> None:
        """Update the policy, or skip the update if the filter kept nothing."""
        self.interrupts.raise_if_requested()
        is_empty = not (episodes_of(groups) or branches_of(groups))
        if not is_empty:
            await self.weights.leave_gpu()
        self.persistence.begin_update()
        self.metrics["update/skipped"] = float(is_empty)
        start_time = perf_counter()
        busy_seconds = self.collecting.ahead.busy_seconds
        if self.scorer is not None:
            if not is_empty:
                self.output.screen.phase("scoring turns")
                self.metrics |= await self.parallel.in_thread(score_and_fit, self.scorer, groups)
            await self.rollouts.write_rollouts(self.progress.step)
        if not is_empty:
            await self._update(groups)
            seconds = max(perf_counter() - start_time, 1e-9)
            self.metrics["time/update"] = seconds
            if self.config.collect.max_staleness:
                self.metrics["time/overlap_share"] = min(
                    (self.collecting.ahead.busy_seconds - busy_seconds) / seconds, 1.0
                )
            episodes = (episode for group in groups for episode in (*group.episodes, *group.branches))
            tokens = sum(episode.sampled_tokens for episode in episodes)
            self.metrics["rate/trained_tokens_per_s"] = tokens / seconds
        await self.rollouts.write_update(self.progress.step, None if is_empty else self.learner.table)

    async def _update(self, groups: Sequence[Group]) -> None:
        self.output.screen.phase("updating")
        scale = loss_scale(self.config.algorithm, self.metrics["collect/kept_fraction"])
        rate = self.config.optimizer.rate_factor(self.progress.step, self.config.stop.iterations)
        for _ in range(self.config.replay.reuse):
            metrics = await self.parallel.in_thread(
                self.learner.learn, groups, version=self._fresh_version, scale=scale, rate=rate
            )
            self.progress.version += 1
            self.metrics |= metrics

    @property
    def _fresh_version(self) -> int:
        """Return the version of tokens that the current policy samples; -1 offline, where versions mean nothing."""
        return -1 if self.collecting.offline else self.progress.version

    def finish_step(self) -> None:
        """Compute warnings and timing, and log the step."""
        metrics, step, screen = self.metrics, self.progress.step, self.output.screen
        metrics["policy/version"] = float(self.progress.version)
        fleets = [collector.fleet for collector in self.collecting.collector.by_task.values()]
        metrics["collect/recoveries"] = float(sum(fleet.recoveries for fleet in fleets))
        config = self.config
        lr = config.optimizer.lr * config.optimizer.rate_factor(step, config.stop.iterations)
        use = SettingsInUse(lr, config.optimizer.max_grad_norm, config.sampling.temperature, config.algorithm)
        warnings = [warning.text for warning in self.monitor.update(step, metrics, use)]
        for warning in warnings:
            screen.warn(warning)
        metrics |= self.monitor.echo_trap.metrics
        if self.settings.several:
            self._follow_stages()
        seconds = metrics["time/step"] = perf_counter() - self._start_time
        inside_seconds = metrics.get("time/generate_wait", 0.0) + metrics.get("time/update", 0.0)
        metrics["time/share_outside"] = max(0.0, 1 - inside_seconds / seconds)
        if self.output.sinks is not None:
            self.output.sinks.write(step, metrics, warnings)
        screen.step(step, self.config.stop.iterations, metrics)
        self._forecast()
        self.persistence.finish_step()

    def _forecast(self) -> None:
        """Show, after the first steps, how many iterations fit into the time limit."""
        stop, progress = self.config.stop, self.progress
        if progress.step == _MEASURED and stop.minutes is not None:
            count = min(stop.iterations, round(60 * stop.minutes / progress.elapsed * _MEASURED))
            self.output.screen.phase(f"at this speed, stop.minutes={stop.minutes:g} has room for {count} iterations")

    def _follow_stages(self) -> None:
        """Record the stage in the metrics, and begin the next one if its condition is met."""
        stages, metrics, screen = self.settings.stages, self.metrics, self.output.screen
        metrics["collect/stage"] = float(stages.index)
        if metric := stages.unknown(metrics):
            screen.warn(
                f"stages[{stages.index}] waits for the metric {metric}, but this iteration has no such "
                f"metric{nearest(metric, sorted(metrics))}"
            )
        if stages.update(self.progress.step, metrics):
            self._begin_stage()
            screen.phase(f"stage {stages.index} of {len(self.settings.whole.stages)} begins")

    def _begin_stage(self) -> None:
        """Apply the configuration of the current stage."""
        config = self.config
        self.learner.configure(config.algorithm, config.optimizer, config.criteria_weights)
        self.collecting.begin_stage()

    async def save(self) -> None:
        """Begin to write a checkpoint."""
        await self.persistence.save()

    async def evaluate(self) -> None:
        """Evaluate on the seeds that select the best checkpoint; at step 0, also evaluate the reference policies."""
        self.interrupts.raise_if_requested()
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
            self.learner.load_policy(checkpoint.tensors["policy"])
        await self.sync()
        await self.evaluating.play_final(step, progress)
        progress.version = version

    async def finish(self, reason: StopReason) -> None:
        """Evaluate, save, and play the final evaluation; after a signal only save.

        Weights that were already evaluated are not evaluated again on the same start states.
        """
        # All ranks must evaluate or none, and a signal may have reached only one.
        if not self.parallel.any(self.interrupts.requested) and not self.evaluating.is_done(self.progress.step):
            await self.evaluate()
        await self.save()
        await self.persistence.finish_writing()
        await self.collecting.ahead.close()
        if not self.parallel.any(self.interrupts.requested):
            await self.evaluate_final()
        await self.end(reason)
        if self.parallel.is_main and self.interrupts.signal is None:
            await self.evaluating.held_out.draw(self.output.folder)

    async def rescue(self, error: Exception) -> None:
        """Save the last finished step after an error; see `Persistence.rescue`."""
        await self.persistence.rescue(error)

    async def end(self, reason: StopReason) -> None:
        """Stop the groups in play and record why the run is over."""
        await self.collecting.ahead.close()
        if self.parallel.is_main:
            self.output.folder.end(reason.text, seconds=self.progress.elapsed, limits=reason.limits)
