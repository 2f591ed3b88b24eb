"""A run: its parts, its state, and the steps that the loop is made of."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter, time
from typing import Any, Literal, Protocol

import numpy as np
import torch

from starpod.client.spelling import nearest
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.algorithms.filters import filter_groups, loss_scale, needs_reask, verdicts
from starpod.trainer.checkpoints.checkpoint import CheckpointError, Checkpoints, Loaded
from starpod.trainer.checkpoints.state import capture_rng, join_parts, restore_rng, split_parts
from starpod.trainer.config import Config, ConfigError
from starpod.trainer.data.episode import Episode, Group, branches_of, episodes_of, turns_of
from starpod.trainer.data.images import by_key
from starpod.trainer.data.replay import ReplayBuffer, oldest_version
from starpod.trainer.data.updates import UpdateRecord, Verdict
from starpod.trainer.diagnostics.diversity import diversity
from starpod.trainer.diagnostics.early_stop import EarlyStop
from starpod.trainer.diagnostics.echo_trap import EchoTrap
from starpod.trainer.diagnostics.information import InformationProbe
from starpod.trainer.diagnostics.metrics import (
    episode_metrics,
    kept_by_task,
    latency_metrics,
    metrics_by_task,
    search_metrics,
    staleness_metrics,
    tokens_spent,
)
from starpod.trainer.evaluation.figures import final_figures, held_out_figures, overall
from starpod.trainer.evaluation.held_out import HeldOut
from starpod.trainer.imitation import Imitation
from starpod.trainer.interrupts import Interrupted, Interrupts
from starpod.trainer.learners import Learners
from starpod.trainer.mixture import Mixture
from starpod.trainer.models.policies import Policies
from starpod.trainer.models.policy import Policy
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.screen import Screen
from starpod.trainer.output.sinks import Sinks
from starpod.trainer.parallel import Parallel, RankFailed
from starpod.trainer.rewards.truth import punish_repetition
from starpod.trainer.rollout.ahead import Admitted, Ahead
from starpod.trainer.rollout.collect import Collected, CollectionFailed, Collector, of_all_ranks
from starpod.trainer.scorers.base import TurnScorer, score_and_fit
from starpod.trainer.seeds import SeedCursor, derive
from starpod.trainer.stages import Stages
from starpod.trainer.update import Learner


class Stateful(Protocol):
    """A part of a run that its checkpoints hold, as JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


@dataclass(slots=True)
class Output:
    """Files and screen of a run. sinks: of metrics; None on ranks that write none."""

    folder: RunFolder
    checkpoints: Checkpoints
    screen: Screen
    sinks: Sinks | None = None


class Run:
    """All that one training run holds. `starpod.trainer.setup` builds it; `starpod.trainer.loop` drives it.

    collector: plays the training tasks. sampler: the copy of the policy that its engine samples from; the policy itself
    where it is neither sharded nor updated meanwhile. ahead: groups in play for this step and later ones.
    demonstrations: to imitate before training. offline: groups to train on
    instead of collecting. scorer: of turns, where one is trained beside the policy. stage_collectors: of the stages,
    which collect in the place of `collector`.
    warm: whether the warm start is over.
    step: iterations done. version: of the policy, one more with each update. tokens: sampled in training, those of a
    search included. elapsed: seconds of training, before a resumption included. rescued: the step as of which `rescue`
    left the run saved; None before.
    """

    def __init__(
        self,
        config: Config,
        *,
        collector: Collector[EngineAgents],
        sampler: Policy | Policies,
        learner: Learner | Learners,
        output: Output,
        parallel: Parallel,
        interrupts: Interrupts,
        demonstrations: Sequence[Episode] = (),
        offline: Sequence[Group] = (),
        scorer: TurnScorer | None = None,
        stage_collectors: Sequence[Collector[EngineAgents]] = (),
    ) -> None:
        self.stages = Stages(config.stages)
        self._configs = config.in_stages
        self._stage_collectors = stage_collectors
        self.collector = collector
        self.ahead = Ahead(collector, config.collect.group_size, parallel)
        self.sampler = sampler
        self.learner = learner
        self.output = output
        self.screen = output.screen
        self.parallel = parallel
        self.interrupts = interrupts
        self.demonstrations = demonstrations
        self.offline = offline
        self.scorer = scorer
        self.warm = False
        self.step = 0
        self.version = 0
        self.tokens = 0
        self.elapsed = 0.0
        self.cursor = SeedCursor(config.seeds.train, config.seed)
        self.held_out = HeldOut(
            config, collector, parallel=parallel, screen=output.screen, interrupts=interrupts, scorer=scorer
        )
        self.mixture = Mixture(config.tasks)
        self.replay = ReplayBuffer(config.replay)
        self.echo_trap = EchoTrap(config.monitor)
        self.early_stop = EarlyStop(config.monitor)
        self.information = InformationProbe(config.monitor)
        self._parts: dict[str, Stateful] = {
            "cursor": self.cursor,
            "stages": self.stages,
            "mixture": self.mixture,
            "echo_trap": self.echo_trap,
            "early_stop": self.early_stop,
            "information": self.information,
        }
        if collector.search is not None:
            self._parts["pivots"] = collector.search.pivots
        # Progress and groups in play at the end of the last finished step, while a later one has begun.
        self._finished: tuple[dict[str, Any], Sequence[Admitted]] | None = None
        # In the warm start only where a signal ends it, and not from the first gradient of a step to its end.
        self._weights_are_whole = False
        self._imitations: dict[str, Imitation] = {}
        self._saved = -1
        self.rescued: int | None = None
        self.stopped = ""
        self.success: float | None = None
        self._evaluated = -1
        self._best, self._best_at = 0.0, -1
        self.metrics: dict[str, float] = {}
        self._verdicts: dict[int, Verdict] = {}
        self._played: list[Group] = []
        self._references: dict[str, Any] = {}
        self._restarts = 0
        self._collected_at: float | None = None
        self._loaded_version = -1
        self._paused = False
        self._began = self._resumed_at = perf_counter()
        if config.stages:
            self._begin_stage()

    @property
    def config(self) -> Config:
        """That of the present stage."""
        return self._configs[self.stages.index]

    # --- the state that a checkpoint holds ---------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint. Only rank 0 writes; all ranks take part."""
        self._save(self._progress(), self.ahead.admitted)

    def _save(self, progress: Mapping[str, Any], admitted: Sequence[Admitted]) -> None:
        optimizer, learner = self.learner.state()
        tensors = {"policy": self.learner.policy_state(), "optimizer": optimizer}
        if self.learner.reference is not None:
            tensors["reference"] = self.learner.reference_state()
        scoring: dict[str, Any] = {}
        if self.scorer is not None:
            tensors["scorer"], scoring = self.scorer.state()
        warm_start: dict[str, Any] = {}
        if not self.warm:
            imitated = {agent: each.state() for agent, each in self._imitations.items()}
            tensors["imitation"] = join_parts({agent: own for agent, (own, _) in imitated.items()})
            warm_start = {
                "references": self._references,
                "demonstrations": [episode.to_json() for episode in self.demonstrations],
                "imitations": {agent: values for agent, (_, values) in imitated.items()},
            }
        in_play = [group for share in self.parallel.gather_objects(self.ahead.state(admitted)) for group in share]
        step = progress["step"]
        if self.parallel.is_main:
            # An older evaluation says nothing about these weights.
            score = progress["success"] if progress["evaluated"] == step else None
            state = {
                **progress,
                "learner": learner,
                "scorer": scoring,
                "warm_start": warm_start,
                "replay": self.replay.state_dict(),
                "ahead": in_play,
                "config": self._configs[-1].to_dict(),
            }
            self.output.checkpoints.save(step, tensors, state, score=score)
        self._saved = step

    def _progress(self) -> dict[str, Any]:
        """The part of a checkpoint that collecting changes. The replay buffer is not among it: it takes groups when
        the collection is over."""
        return {
            "step": self.step,
            "version": self.version,
            "tokens": self.tokens,
            "elapsed": self._elapsed(),
            "success": self.success,
            "evaluated": self._evaluated,
            "best": self._best,
            "best_at": self._best_at,
            "stopped": self.stopped,
            **{name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()},
            "rng": capture_rng(),
        }

    def rescue(self, error: Exception) -> None:
        """Saves the last finished step, where an error ends the run while its weights are whole.

        Of several ranks all have to have the error, as those of an engine and of a collection are.
        """
        alike = self.parallel.world == 1 or isinstance(error, RankFailed | CollectionFailed)
        if not (self._weights_are_whole and alike):
            return
        progress, admitted = self._finished or (self._progress(), self.ahead.admitted)
        try:
            if self._saved != progress["step"]:
                self._save(progress, admitted)
            self.rescued = progress["step"]
        except CheckpointError as problem:
            if isinstance(error, Interrupted):
                raise  # there is no other error to tell
            self.screen.warn(str(problem))
        # Until rank 0 is through: torchrun ends all where one has failed.
        self.parallel.barrier()

    def restore(self, loaded: Loaded) -> None:
        """Goes on from a checkpoint. Raises CheckpointError if its tensors are not finite."""
        loaded.check_finite()
        state = loaded.state
        warm_start = state.get("warm_start")
        self.warm = not warm_start
        if "stages" in state:
            self.stages.load_state_dict(state["stages"])
            self._begin_stage()
        needs_reference = self.warm and self._configs[-1].needs_reference
        if needs_reference and "reference" not in loaded.tensors:
            raise ConfigError(
                f"algorithm.kl.where is {self.config.algorithm.kl.where}, but the run began without a KL term, so its "
                "checkpoint holds no reference policy: resume with algorithm.kl.where=off, or begin another run"
            )
        self.learner.load_policy(loaded.tensors["policy"])
        if needs_reference:
            self.learner.freeze_reference(loaded.tensors["reference"])
        self.learner.load_state(loaded.tensors["optimizer"], state["learner"])
        if self.scorer is not None:
            if "scorer" not in loaded.tensors or loaded.state["config"]["scorer"]["kind"] != self.config.scorer.kind:
                raise ConfigError(
                    f"scorer.kind is {self.config.scorer.kind}, and the run that is resumed has no such scorer in its "
                    "checkpoint: give the same again, or begin another run with another --run-dir"
                )
            self.scorer.load_state(loaded.tensors["scorer"], state["scorer"])
        self.step, self.version, self.elapsed = state["step"], state["version"], state["elapsed"]
        self.tokens = state.get("tokens", 0)
        self.success, self._evaluated = state["success"], state["evaluated"]
        self._best, self._best_at = state.get("best", 0.0), state.get("best_at", -1)
        if state["config"]["monitor"]["early_stop"] == self.config.monitor.early_stop.to_dict():
            self.stopped = state["stopped"]
        for name, part in {**self._parts, "replay": self.replay}.items():
            if name in state:
                part.load_state_dict(state[name])
        self.ahead.load_state(state.get("ahead", []))
        restore_rng(state["rng"])
        if warm_start:
            self._references = warm_start["references"]
            self.demonstrations = [Episode.from_json(each) for each in warm_start["demonstrations"]]
            parts = split_parts(loaded.tensors["imitation"])
            if warm_start["imitations"]:
                self._imitations = self._begin_imitations()
            for agent, values in warm_start["imitations"].items():
                self._imitations[agent].load_state(parts[agent], values)
        else:
            self._weights_are_whole, self._saved = True, self.step

    # --- when ---------------------------------------------------------------------------------------------------------

    def reason_to_stop(self) -> str:
        """Why the run is over; empty while it is not. All ranks agree."""
        stop = self.config.stop
        reason = self.stopped
        if self.interrupts.signal is not None:
            reason = f"stopped by {self.interrupts.signal.name} and saved"
        elif not reason and self.step >= stop.iterations:
            reason = f"iteration {stop.iterations} of {stop.iterations} done"
        elif not reason and stop.minutes is not None and self._elapsed() >= 60 * stop.minutes:
            reason = f"the time is up: stop.minutes={stop.minutes:g}"
        elif not reason and stop.tokens is not None and self.tokens >= stop.tokens:
            reason = f"{self.tokens:,} tokens were sampled: stop.tokens={stop.tokens}"
        elif not reason and stop.success is not None and (self.success or 0.0) >= stop.success:
            reason = f"evaluation success {self.success:.1%} reached stop.success"
        # One rank may have got the signal alone.
        return max(self.parallel.gather_objects(reason))

    @property
    def is_best(self) -> bool:
        """Whether this step's evaluation beats those before and its weights are to be kept. All ranks agree."""
        return self.config.checkpoint.keep_best and self._best_at == self.step

    def due(self, every: int) -> bool:
        """Whether something that happens every so many steps happens now. The end has its own."""
        return every > 0 and self.step % every == 0 and self.step < self.config.stop.iterations

    @property
    def evaluation_is_due(self) -> bool:
        """Whether this step's evaluation is yet to come: of a run that is resumed an error may have prevented it."""
        return self._evaluated != self.step and (self.step == 0 or self.due(self.config.evaluation.every))

    def _elapsed(self) -> float:
        return self.elapsed + perf_counter() - self._resumed_at

    # --- the steps of the loop ----------------------------------------------------------------------------------------

    async def warm_start(self) -> None:
        """Plays the reference policies, and imitates demonstrations, if the configuration says so. The policy that
        this leaves is the KL term's reference. One that a checkpoint holds goes on."""
        try:
            # First: one that cannot play here is told before minutes of imitation.
            self._references = self._references or await self.held_out.play_references()
            if self.config.warm_start.steps:
                await self._imitate()
        except Interrupted:
            self._weights_are_whole = True  # it comes between two steps of imitation
            raise
        if self._configs[-1].needs_reference:
            self.learner.freeze_reference(None)
        if self.scorer is not None:
            self.scorer.begin(self.learner.by_agent[""].policy)
        self.warm = self._weights_are_whole = True
        # A time limit is one of training: a run whose imitation took all of it would have learnt nothing by itself.
        self.elapsed, self._resumed_at = 0.0, perf_counter()

    async def _imitate(self) -> None:
        config = self.config.warm_start
        self._imitations = self._imitations or self._begin_imitations()
        left = config.steps - min(each.step for each in self._imitations.values())
        self.screen.phase(f"imitating {len(self.demonstrations)} demonstrations for {left} steps")

        def progress(agent: str, step: int, loss: float) -> None:
            self.interrupts.raise_if_requested()
            if step % 10 == 0 or step == config.steps:
                self.screen.phase(f"imitation {step}/{config.steps}, loss {loss:.3f} nats per token {agent}".rstrip())

        await self._leave_gpu()
        for agent, imitation in self._imitations.items():
            await self.parallel.in_thread(imitation.run, partial(progress, agent))
        self._imitations = {}
        self.version += 1

    def _begin_imitations(self) -> dict[str, Imitation]:
        """Return the imitation of each agent's policy, before its first step."""
        config = self.config
        return {
            agent: Imitation(
                learner.policy,
                [turns_of(demonstration, agent) for demonstration in self.demonstrations],
                config.warm_start,
                self.parallel,
                lr=config.warm_start.rate(config.model),
                micro_batch_tokens=config.optimizer.micro_batch_tokens,
                temperature=config.sampling.temperature,
                seed=derive(config.seed, "imitation"),
            )
            for agent, learner in self.learner.by_agent.items()
        }

    def begin_step(self) -> None:
        self._finished = self._progress(), self.ahead.admitted
        self.step += 1
        self.metrics = {}
        self._began = perf_counter()

    def _begin_stage(self) -> None:
        """Applies what the present stage sets. What is in play goes on as it was begun."""
        config = self.config
        self.learner.configure(config.algorithm, config.optimizer, config.criteria_weights)
        collector = (*self._stage_collectors, self.collector)[self.stages.index]
        self.ahead.configure(collector, config.collect.group_size)

    def _follow_stages(self) -> None:
        """Notes the stage of the iteration, and begins the next one where it is over."""
        stages, metrics = self.stages, self.metrics
        metrics["collect/stage"] = float(stages.index)
        if missing := stages.unknown(metrics):
            self.screen.warn(
                f"stages[{stages.index}] waits for the metric {missing}, and this iteration has none of that name"
                f"{nearest(missing, sorted(metrics))}"
            )
        if stages.update(self.step, metrics):
            self._begin_stage()
            self.screen.phase(f"stage {stages.index} of {len(self._configs) - 1} begins")

    async def _leave_gpu(self) -> None:
        """Where the engine sleeps beside passes of the policy: halts it until the next `sync`."""
        if self.config.engine.sleep and not self._paused:
            await self.collector.agents.engine.pause()
            self._paused = True

    async def sync(self) -> None:
        """Hands the policy's weights to the engine, if they changed or it sleeps."""
        if self._loaded_version == self.version and not self._paused:
            return
        began = perf_counter()
        engine, sampler = self.collector.agents.engine, self.sampler
        if not self._paused:
            await engine.pause()
        if sampler is not self.learner.policy:
            self.parallel.copy_weights(self.learner.policy.model, sampler.model)
        await engine.load(self.version, sampler.model)
        await engine.resume()
        self._paused, self._loaded_version = False, self.version
        self.metrics["time/sync"] = perf_counter() - began

    async def collect(self) -> list[Group]:
        """P groups of N fresh episodes; too small ones, and with dynamic sampling uniform ones, are asked for again.

        Offline they come from files instead, P at a time, in an order that the run's seed shuffles anew at each pass.
        Raises CollectionFailed where failed episodes left no group.
        """
        groups: list[Group] = []
        self._verdicts = {}
        if self.offline:
            groups = self._offline_groups()
            await self._diagnose(groups)
            return groups
        config = self.config.collect
        began, before = perf_counter(), self.collector.agents.engine.stats()
        stale = 0
        reasked: list[Group] = []
        rounds: list[Collected] = []
        self.screen.phase("collecting")
        dynamic = self.config.algorithm.dynamic_sampling
        room = config.groups + self._early - len(self.ahead)
        self.ahead.admit(self.mixture.starts(self.mixture.divide(max(room, 0)), self.cursor))
        starts = self.ahead.oldest(config.groups)
        while starts:
            taking = self.ahead.take(starts, min_size=config.min_group_size)
            collected = await self.interrupts.unless_requested(of_all_ranks(taking, self.parallel, self.screen.warn))
            stale += self._drop_stale(collected)
            lost = {start.id: start.task for start in starts}
            uniform: list[str] = []
            for group, again in zip(collected.groups, needs_reask(dynamic, collected.groups), strict=True):
                task = lost.pop(group.id)
                (reasked if again else groups).append(group)
                uniform += [task] if again else []
            asked = len(rounds)
            wanted = list(lost.values()) if asked < config.max_rounds else []
            wanted += uniform if asked < dynamic.max_rounds else []
            rounds.append(collected)
            self.ahead.admit(self.mixture.starts(wanted, self.cursor))
            starts = self.ahead.oldest_of(wanted)
        whole = Collected.joined(rounds)
        # All that was played: dynamic sampling chooses like a filter, and would hide how alike the rest is.
        played = [*groups, *reasked]
        for each in self.config.tasks:
            own = [episode for group in played for episode in group.members if episode.task == each.name]
            punish_repetition(each.rewards.relations, own)
        if not played:
            raise CollectionFailed(
                f"step {self.step} has nothing to train on: {whole.failed} episodes failed and left no group of at "
                f"least {config.min_group_size}, the first one by: {whole.error}"
            )
        after = self.collector.agents.engine.stats()
        seconds = perf_counter() - began
        if after.restarts > self._restarts:
            self._restarts = after.restarts
            allowed = self.config.engine.restarts
            self.screen.warn(f"the engine died and was restarted ({self._restarts} of engine.restarts={allowed})")
        # What was played ahead began earlier: then the rates are over the time since the last collection.
        span = perf_counter() - (self._collected_at or began) if config.max_staleness else seconds
        self._collected_at = perf_counter()
        generating = after.seconds - before.seconds
        # Each rank samples its share; the clock is this one's.
        counted = [getattr(after, name) - getattr(before, name) for name in ("sampled", "reused", "prefilled")]
        sampled, reused, prefilled = map(sum, zip(*self.parallel.gather_objects(counted), strict=True))
        turns = sum(len(episode.turns) for group in played for episode in group.episodes)
        self.metrics |= episode_metrics(played) | latency_metrics(whole.latencies) | diversity(episodes_of(played))
        self.metrics |= {
            "collect/failed": float(whole.failed),
            "collect/groups_dropped": float(whole.dropped),
            "collect/groups_reasked": float(len(reasked)),
            "time/collect": seconds,
            "time/generate_wait": generating,
            "time/environment_wait": max(seconds - generating, 0.0),
            "rate/sampled_tokens_per_s": sampled / max(generating, 1e-9),
            "rate/prompt_reused": reused / max(reused + prefilled, 1),
            "rate/environment_steps_per_s": turns / max(span, 1e-9),
            "rate/episodes_per_s": sum(len(group.episodes) for group in played) / max(span, 1e-9),
        }
        self._follow_tasks(played)
        if (search := self.collector.search) is not None:
            search.pivots.observe(played)
            self.metrics |= search_metrics(played)
        self.tokens += tokens_spent(played)
        if config.max_staleness:
            self.metrics |= staleness_metrics(groups, self.version) | {"collect/stale_groups": float(stale)}
        if groups:
            self.screen.episode(groups[0].episodes[0])
        passed_over = Verdict(False, "Its returns are all the same: dynamic sampling asked for another.")
        self._verdicts = {group.id: passed_over for group in reasked}
        self._played = played
        if self.scorer is None:  # else it pays a part first
            await self._keep(played)
        await self._diagnose(played)
        return self._with_replayed(groups)

    def _follow_tasks(self, groups: Sequence[Group]) -> None:
        """Metrics of each environment, where there are several, and the levels of their curricula."""
        several = bool(self.config.environments)
        if several:
            self.metrics |= metrics_by_task(groups)
        for task, level in self.mixture.levels().items():
            self.metrics[f"environments/{task}/level" if several else "collect/level"] = float(level)
        for task in self.mixture.silent(groups):
            self.screen.warn(
                f"{task or 'the environment'} does not say whether an episode succeeded, so its curriculum never rises"
            )
        for task in self.mixture.update(groups):
            self.screen.phase(f"{task} goes on at level {self.mixture.levels()[task]}".lstrip())

    async def _keep(self, groups: Sequence[Group]) -> None:
        """Writes what was played into the run folder, whose oldest rollouts make room."""
        bound = self._kept_bytes
        if not bound or not self.parallel.is_main:
            return
        episodes = [episode for group in groups for episode in group.members]
        if not await self.parallel.in_thread(self.output.folder.write_rollouts, self.step, episodes, most=bound):
            self.screen.warn(
                f"the episodes of one step take more than collect.keep_mib ({self.config.collect.keep_mib:g}) and are "
                "not kept: raise it, or set it to 0"
            )

    async def _keep_update(self, record: UpdateRecord) -> None:
        if self.parallel.is_main:
            await self.parallel.in_thread(
                self.output.folder.write_update, self.step, self._verdicts, record.tokens(), most=self._kept_bytes
            )

    @property
    def _kept_bytes(self) -> int:
        """Bytes of rollouts that the run folder keeps."""
        return 0 if self.offline else int(self.config.collect.keep_mib * 2**20)

    @property
    def _early(self) -> int:
        """Groups of later steps that may be in play now.

        Each step trains on the oldest, so what is admitted now is trained on at most `max_staleness` versions later
        (the bound of arXiv 2505.24298, for batches in the order of admission).
        """
        steps = self.config.collect.max_staleness // self.config.replay.reuse
        return self.config.collect.groups * min(steps, max(self.config.stop.iterations - self.step, 0))

    def _drop_stale(self, collected: Collected) -> int:
        """Takes out what became too old: nothing does, unless the run was resumed with a smaller bound."""
        oldest = self.version - self.config.collect.max_staleness
        fresh = [group for group in collected.groups if oldest_version(group, self.version) >= oldest]
        dropped = len(collected.groups) - len(fresh)
        collected.groups = fresh
        return dropped

    def _offline_groups(self) -> list[Group]:
        count = len(self.offline)
        size = min(self.config.collect.groups, count)
        # What is left over at the end of a pass waits for the next one: no batch holds a group twice.
        sweep, batch = divmod(self.step - 1, count // size)
        order = np.random.default_rng(derive(self.config.seed, "offline", sweep)).permutation(count)
        groups = [self.offline[index] for index in order[batch * size : (batch + 1) * size]]
        self.metrics |= episode_metrics(groups)
        return groups

    def _with_replayed(self, groups: list[Group]) -> list[Group]:
        """Fresh groups, and older ones from the buffer where replay is on."""
        if not self.replay.enabled:
            return groups
        rng = np.random.default_rng(derive(self.config.seed, "replay", self.step))
        stale, dropped = self.replay.sample(self.version, rng)
        self.replay.add(groups, self.version)
        self.metrics["collect/stale_dropped"] = float(dropped)
        return groups + stale

    def filter(self, groups: Sequence[Group]) -> list[Group]:
        """The groups that are worth an update."""
        kept = filter_groups(self.config.algorithm.filter, groups)
        self.metrics["collect/kept_fraction"] = len(kept) / max(len(groups), 1)
        if self._kept_bytes and self.parallel.is_main:
            self._verdicts |= verdicts(self.config.algorithm.filter, groups, kept)
        if self.config.environments:
            self.metrics |= kept_by_task(groups, kept)
        # Where all have failed alike, their branches are what can be learnt from.
        left = {id(group) for group in kept}
        dropped = [group for group in groups if group.branches and id(group) not in left]
        return kept + [Group(group.id, [], branches=group.branches) for group in dropped]

    async def learn(self, groups: Sequence[Group]) -> None:
        """One update, or none where the filter kept nothing to train on."""
        self.interrupts.raise_if_requested()
        nothing = not (episodes_of(groups) or branches_of(groups))
        if not nothing:
            await self._leave_gpu()
        self._weights_are_whole = False
        self.metrics["update/skipped"] = float(nothing)
        record = UpdateRecord() if self._kept_bytes else None
        began, busy = perf_counter(), self.ahead.busy
        if self.scorer is not None:
            if not nothing:
                self.screen.phase("scoring turns")
                self.metrics |= await self.parallel.in_thread(score_and_fit, self.scorer, groups)
            await self._keep(self._played)
        if nothing:
            if record is not None:
                await self._keep_update(record)
            return
        self.screen.phase("updating")
        scale = loss_scale(self.config.algorithm, self.metrics["collect/kept_fraction"])
        rate = self.config.optimizer.rate_factor(self.step, self.config.stop.iterations)
        for _ in range(self.config.replay.reuse):
            version = self._fresh_version
            metrics = await self.parallel.in_thread(
                self.learner.learn, groups, version=version, scale=scale, rate=rate, record=record
            )
            self.version += 1
            self.metrics |= metrics
        seconds = perf_counter() - began
        self.metrics["time/update"] = seconds
        if self.config.collect.max_staleness:
            self.metrics["time/overlap_share"] = min((self.ahead.busy - busy) / max(seconds, 1e-9), 1.0)
        trained = (episode for group in groups for episode in (*group.episodes, *group.branches))
        tokens = sum(episode.sampled_tokens for episode in trained)
        self.metrics["rate/trained_tokens_per_s"] = tokens / max(seconds, 1e-9)
        if record is not None:
            await self._keep_update(record)

    @property
    def _fresh_version(self) -> int:
        """Whose tokens the present policy sampled. Other runs' versions are not ours: offline nothing is fresh."""
        return -1 if self.offline else self.version

    async def _diagnose(self, groups: Sequence[Group]) -> None:
        """Measures what is measured now and then, of all groups: those that a filter drops are the collapsed ones."""
        if episodes_of(groups):
            if self.information.due(self.step) or self._gradients_are_due:
                await self._leave_gpu()
            await self.parallel.in_thread(self._measure, groups)

    @property
    def _gradients_are_due(self) -> bool:
        every = self.config.monitor.gradients.every
        return every > 0 and self.step % every == 0

    def _measure(self, groups: Sequence[Group]) -> None:
        """Mutual information, gradients by reward deviation."""
        began = perf_counter()
        if self.information.due(self.step):
            tokenizer = self.learner.policy.tokenizer
            episodes = episodes_of(groups)
            images = by_key(turn.image for episode in episodes for turn in episode.turns)
            self.metrics |= self.information.measure(
                episodes,
                partial(self.learner.by_agent[""].log_likelihoods, images=images),
                lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
                torch.Generator().manual_seed(derive(self.config.seed, "information", self.step)),
            )
        if self._gradients_are_due:
            buckets = self.config.monitor.gradients.buckets
            self.metrics |= self.learner.gradients(groups, version=self._fresh_version, buckets=buckets)
        self.metrics["time/diagnose"] = perf_counter() - began

    def finish_step(self) -> None:
        """Diagnoses and logs the step."""
        metrics = self.metrics
        metrics["policy/version"] = float(self.version)
        metrics["collect/recoveries"] = float(sum(each.fleet.recoveries for each in self.collector.by_task.values()))
        drops = self.config.algorithm.filter.drop_identical
        warnings = [warning.text for warning in self.echo_trap.update(self.step, metrics, drops_identical=drops)]
        for warning in warnings:
            self.screen.warn(warning)
        metrics |= self.echo_trap.metrics
        self.stopped = self.early_stop.update(self.step, metrics) or self.stopped
        if len(self._configs) > 1:
            self._follow_stages()
        seconds = metrics["time/step"] = perf_counter() - self._began
        inside = metrics.get("time/generate_wait", 0.0) + metrics.get("time/update", 0.0)
        metrics["time/share_outside"] = max(0.0, 1 - inside / seconds)
        if self.output.sinks is not None:
            self.output.sinks.write(self.step, metrics, warnings)
        self.screen.step(self.step, self.config.stop.iterations, metrics)
        self._finished, self._weights_are_whole = None, True

    # --- evaluation ---------------------------------------------------------------------------------------------------

    async def evaluate(self) -> None:
        """Plays the start states that choose the best checkpoint; at step 0 the reference policies play them too."""
        self.interrupts.raise_if_requested()
        config = self.config.evaluation
        await self.sync()
        began = perf_counter()
        played = await self.held_out.play("selection", "selection")
        summary: dict[str, Any] = {"step": self.step, "time": time(), "policy_version": self.version}
        figures = {name: held_out_figures(collected) for name, collected in played.items()}
        if self.step == 0:
            for name, reference in (self._references or await self.held_out.play_references()).items():
                figures[name]["reference"] = reference
        summary |= overall(figures)
        summary["seconds"] = perf_counter() - began
        if all(collected.episodes for collected in played.values()):
            # One that a stop of the process made is none of those in a row: resuming often makes no run stop earlier.
            scheduled = self.step == 0 or (config.every > 0 and self.step % config.every == 0)
            if scheduled and self._evaluated != self.step:
                reason = self.early_stop.evaluated(self.step, summary["success"], summary["return_mean"])
                self.stopped = reason or self.stopped
            if self._best_at < 0 or summary["success"] > self._best:
                self._best, self._best_at = summary["success"], self.step
            self.success, self._evaluated = summary["success"], self.step
        else:
            self.screen.warn(f"the evaluation at step {self.step} says nothing: all of its episodes failed")
        if self.parallel.is_main:
            self.output.folder.append_evaluation(summary)
            self.output.folder.write_episodes(self.step, self.held_out.kept(played))
        self.screen.evaluation(self.step, summary)

    async def evaluate_final(self) -> None:
        """Plays the best checkpoint, once, on start states that neither taught nor chose it, and notes each episode.

        Leaves that checkpoint's weights in the policy: only for the end of a run. All ranks take part.
        """
        self.parallel.barrier()  # rank 0 has saved
        checkpoints = self.output.checkpoints
        best = checkpoints.best(["policy"]) or checkpoints.latest(["policy"])
        step, version = self.step, self.version
        if best is not None and best.step != self.step:
            step, self.version = best.step, best.state["version"]
            self.learner.load_policy(best.tensors["policy"])
        await self.sync()
        began = perf_counter()
        # The random streams are those of `starpod eval`, and not those that chose the checkpoint.
        played = await self.held_out.play("final", "evaluation", f"the checkpoint of step {step} ")
        summary: dict[str, Any] = {"step": step, "last_step": self.step, "time": time(), "policy_version": self.version}
        figures = {name: held_out_figures(collected) for name, collected in played.items()}
        ways: list[Literal["greedy", "best_of"]] = ["greedy"] if self.config.evaluation.greedy else []
        ways += ["best_of"] if self.config.evaluation.best_of > 1 else []
        for way in ways:
            for name, collected in (await self.held_out.play("final", "evaluation", way=way)).items():
                figures[name][way] = held_out_figures(collected)
        summary |= overall(figures)
        summary["seconds"] = perf_counter() - began
        self.version = version
        if not all(collected.episodes for collected in played.values()):
            self.screen.warn("the final evaluation says nothing: all of its episodes failed")
        elif self.parallel.is_main:
            for name, collected in played.items():
                seeds = self.held_out.seeds(name, "final")
                final_figures(summary, self.held_out.task(name), seeds, collected.episodes)
            self.output.folder.write_final(summary)
            self.output.folder.write_episodes(step, self.held_out.kept(played), "final")

    async def finish(self, reason: str) -> None:
        """Evaluates and saves the end, and takes the final figure; after a signal it only saves.

        The same weights are not evaluated twice on the same start states.
        """
        # One rank may have got the signal alone, and evaluating is for all of them or none.
        if not self.parallel.any(self.interrupts.requested) and self._evaluated != self.step:
            await self.evaluate()
        self.save()
        await self.ahead.close()
        if not self.parallel.any(self.interrupts.requested):
            await self.evaluate_final()
        await self.end(reason)
        if self.parallel.is_main and self.interrupts.signal is None:
            await self.held_out.draw(self.output.folder)

    async def end(self, reason: str) -> str:
        """Ends what is in play and notes why the run is over. Returns that."""
        await self.ahead.close()
        if self.parallel.is_main:
            self.output.folder.end(reason, seconds=self._elapsed())
        return reason
