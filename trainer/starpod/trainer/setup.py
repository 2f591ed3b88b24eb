"""Builds a run from its configuration: services, fleet, policy, engine, learner, folder."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError

from starpod.client import TLS, Fleet, Want
from starpod.client.nearest import unknown_environment
from starpod.trainer.agents.base import Task
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.agents.program import Wrap, load_programs
from starpod.trainer.agents.script import engine_agents
from starpod.trainer.checkpoints.checkpoint import Checkpoints
from starpod.trainer.checkpoints.resume import check_model
from starpod.trainer.checkpoints.trained import INITIAL
from starpod.trainer.config import Config, ConfigError
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.offline import read_offline
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.interrupts import Interrupts
from starpod.trainer.learners import Learners
from starpod.trainer.models.config import TINY, model_title
from starpod.trainer.models.hf import load_tokenizer
from starpod.trainer.models.policies import Policies, copy_trained
from starpod.trainer.models.policy import Policy, build_policy, load_policy
from starpod.trainer.models.precision import round_weights
from starpod.trainer.output.files import CannotWrite
from starpod.trainer.output.in_play import telling
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.screen import Screen
from starpod.trainer.output.sinks import Sinks
from starpod.trainer.parallel import Parallel
from starpod.trainer.prompts.conversation import Template
from starpod.trainer.rewards.reward import Rewards
from starpod.trainer.rollout.collect import Collector
from starpod.trainer.rollout.config import EnvironmentConfig, PivotsConfig
from starpod.trainer.rollout.environment import local_services, make_task
from starpod.trainer.rollout.pivots import Recoverability
from starpod.trainer.rollout.saved_starts import read_starts
from starpod.trainer.rollout.search import Search
from starpod.trainer.run.run import Output, Parts, Run
from starpod.trainer.scorers.base import TurnScorer
from starpod.trainer.scorers.config import ImplicitConfig, QConfig
from starpod.trainer.scorers.implicit import ImplicitScorer
from starpod.trainer.scorers.q import QScorer
from starpod.trainer.seeds import SeedCursor, derive
from starpod.trainer.tasks import TaskConfig
from starpod.trainer.turn_order import TurnwiseLearner
from starpod.trainer.update import Learner
from starpod.trainer.warmstart import (
    Demonstration,
    DemonstrationWriter,
    collect_demonstrations,
    read_demonstrations,
)


@contextlib.asynccontextmanager
async def connect(config: EnvironmentConfig) -> AsyncIterator[Fleet]:
    """The fleet of the configured servers, or of services started on this machine."""
    with contextlib.ExitStack() as stack:
        addresses: Sequence[str] = config.addresses
        if not addresses:
            service = local_services([config.id], workers=config.workers, arguments=config.serve)
            addresses = [stack.enter_context(service)]
        tls = TLS(config.ca or None, config.certificate or None, config.key or None) if config.ca else None
        token = Path(config.token_file) if config.token_file else None
        async with Fleet(addresses, token=token, tls=tls, timeout=config.timeout, patience=config.patience) as fleet:
            yield fleet


@dataclass(frozen=True, slots=True)
class Facts:
    """The part of the environment's spec that a run needs: its action names, and whether it can show state keys, be
    forked, score states, draw them, and has an expert."""

    actions: tuple[str, ...]
    state_key: bool
    fork: bool = True
    expert: bool = True
    score: bool = True
    image: bool = True


async def read_facts(fleet: Fleet, environment_id: str) -> Facts:
    """Asks the servers. Raises UnknownEnvironment with what was probably meant."""
    specs = await fleet.describe()
    for spec in specs:
        if spec.id == environment_id:
            able = spec.capabilities
            names = tuple(spec.action_space.names)
            image = "png" in spec.render_modes
            return Facts(names, able.state_key, able.fork, able.expert_action, able.score, image)
    raise unknown_environment(environment_id, [spec.id for spec in specs])


@dataclass(slots=True)
class Served:
    """One environment of a run: its servers, the task that is played there, and demonstrations of it."""

    config: TaskConfig
    fleet: Fleet
    task: Task
    writer: DemonstrationWriter
    facts: Facts
    demonstrations: list[Demonstration] = field(default_factory=list)

    async def demonstrate(self, config: Config, cursor: SeedCursor, screen: Screen) -> None:
        """Collects the demonstrations, from the next seeds, and reads those of a file. Raises ConfigError."""
        seeds = cursor.take(self.config.warm_start.episodes)

        def progress(through: int) -> None:
            if through % 500 == 0:
                screen.phase(f"demonstration {through:,} of {len(seeds):,}")

        self.demonstrations = await collect_demonstrations(
            self.fleet,
            self.config.warm_start,
            self.task,
            seeds,
            self.writer.attempts,
            images=self.config.prompt.shows_images,
            progress=progress,
        )
        if path := self.config.warm_start.demonstrations:
            (session,) = await self.task.open(self.fleet, 0, 1, Want())
            await session.close()
            read = read_demonstrations(path, self.task.environment, session.limits)
            _refuse_held_out(config, "warm_start.demonstrations", path, (each.episode.seed for each in read))
            if self.config.prompt.shows_images and not all(turn.image for each in read for turn in each.episode.turns):
                raise ConfigError(
                    f"warm_start.demonstrations {path} holds turns without an image, and prompt.observation is "
                    f"{self.config.prompt.observation}: give a file of a run that was shown images"
                )
            self.demonstrations += read

    def texts(self) -> Iterable[str]:
        """All that a policy will read or write of it."""
        return self.writer.texts(self.demonstrations)


def _refuse_held_out(config: Config, key: str, path: str, seeds: Iterable[int]) -> None:
    """Raises ConfigError where a file teaches what evaluations ask."""
    for seed in seeds:
        if held_out := config.seeds.holds_out(seed):
            raise ConfigError(
                f"{key} {path} holds something of seed {seed}, which {held_out} holds out: save it from another seed, "
                f"such as {config.seeds.train.start}, or choose other {held_out.split()[0]}"
            )


def _check_agents(config: Config, demonstrations: Sequence[Episode]) -> None:
    """Raises ConfigError where others play than the agents that have a policy each."""
    policies = set(config.script.policies)
    found = {turn.agent_id for episode in demonstrations for turn in episode.turns}
    if policies and found and found != policies:
        raise ConfigError(
            f"script.policies names {', '.join(sorted(policies))}, and the agents of the demonstrations are "
            f"{', '.join(map(repr, sorted(found)))}: name all agents and no others"
        )


@contextlib.asynccontextmanager
async def _serve(config: Config, task: TaskConfig) -> AsyncIterator[Served]:
    async with connect(task.environment) as fleet:
        facts = await read_facts(fleet, task.environment.id)
        if config.needs_state_key and not facts.state_key:
            raise ConfigError(
                f"algorithm.advantage {config.algorithm.advantage} compares turns that began in the same state, and "
                f"{task.environment.id} does not tell states apart (it has no state_key); choose another advantage, or "
                "set algorithm.gigpo.weight to 0"
            )
        if task.prompt.shows_images and not facts.image:
            raise ConfigError(
                f"prompt.observation {task.prompt.observation} shows what the environment draws, and "
                f"{task.environment.id} draws nothing (no render mode png): set prompt.observation to text"
            )
        from_expert = any(each.environment.expert_moves_left for stage in config.in_stages for each in stage.tasks)
        if path := task.environment.starts:
            seeds = (start.seed for start in read_starts(path, task.environment.id))
            _refuse_held_out(config, "environment.starts", path, seeds)
            if not facts.fork:
                raise ConfigError(f"environment.starts forks what was saved, and {task.environment.id} has no fork")
        if from_expert and not (facts.fork and facts.expert):
            raise ConfigError(
                f"environment.expert_moves_left begins episodes with moves of an expert and forks what they come to, "
                f"and {task.environment.id} has {'no fork' if facts.expert else 'no expert'}: drop it"
            )
        search = config.collect.search
        if search.needs_score and not facts.score:
            raise ConfigError(
                f"collect.search.score is the environment's own, and {task.environment.id} has none; set "
                "collect.search.score to reward"
            )
        if search.needs_fork and not facts.fork:
            raise ConfigError(
                f"collect.search.strategy {search.strategy} tries replies on copies that have luck of their own, and "
                f"{task.environment.id} cannot be forked; choose best_of or pivots"
            )
        if config.script.name == "attempts" and not facts.fork:
            raise ConfigError(
                f"script attempts plays all attempts but the last on forks, and {task.environment.id} has none: set "
                "script to solo"
            )
        writer = DemonstrationWriter(task.warm_start, task.prompt, facts.actions, config.script)
        yield Served(task, fleet, make_task(task.environment, facts.actions, task.name), writer, facts)


def _defaults(config: Config) -> Config:
    """The configuration with which the report compares: without what was given, but with the same environments."""
    return Config.model_validate({"environments": {name: each.id for name, each in config.environments.items()}})


@contextlib.asynccontextmanager
async def open_run(
    config: Config, path: Path, *, resume: bool, parallel: Parallel, screen: Screen, interrupts: Interrupts
) -> AsyncIterator[Run]:
    """All parts of a run, its state restored where one is resumed. Everything is closed at the end.

    Raises Interrupted, ConfigError, RunExists, ServiceFailed, StarpodError and whatever stops a model from being
    loaded.
    """
    if parallel.world > 1 and config.engine.name == "vllm":
        raise ConfigError(
            f"engine vllm is for one process: each of {parallel.world} would start one on the same GPUs; with torchrun "
            "give engine=torch, or engine=vllm_remote and its servers"
        )
    async with contextlib.AsyncExitStack() as stack:
        folder = RunFolder.create(path, resume=resume) if parallel.is_main else RunFolder(path)
        if parallel.is_main:
            stack.enter_context(folder.lock())
        checkpoints = Checkpoints(folder.checkpoints, config.checkpoint)
        loaded = checkpoints.latest() if resume else None
        if loaded is not None:
            check_model(config, loaded)
        if loaded is None and config.model.name != TINY:
            load_tokenizer(config.model)  # a model that cannot be had is told before demonstrations are played
        # A run that was lost before its first checkpoint begins again, without what it had written.
        resumed_step = None if not resume else loaded.step if loaded else -1
        local = not all(task.environment.addresses for task in config.tasks)
        screen.phase("starting the environment services" if local else "connecting")
        served = [await stack.enter_async_context(_serve(config, task)) for task in config.tasks]
        if parallel.is_main:
            await stack.enter_async_context(telling(folder, [each.fleet for each in served], screen))
        if loaded is None and (config.warm_start.steps or config.model.name == TINY):
            screen.phase(f"collecting {sum(task.warm_start.episodes for task in config.tasks)} demonstrations")
            cursor = SeedCursor(config.seeds.warmstart, config.seed)
            for each in served:
                if parallel.is_main:
                    await interrupts.unless_requested(each.demonstrate(config, cursor, screen))
                each.demonstrations = parallel.broadcast_object(each.demonstrations)
        if loaded is None and parallel.is_main:
            shutil.rmtree(folder.path / INITIAL, ignore_errors=True)  # of a start that failed
        parallel.barrier()

        def make_initial_policy() -> Policy:
            return make_policy(config, lambda: chain.from_iterable(each.texts() for each in served), folder, parallel)

        first = make_initial_policy()
        if first.view is None and any(task.prompt.shows_images for task in config.tasks):
            raise ConfigError(
                f"prompt.observation shows images, and {config.model.name} has no eyes: set model.tiny.image.rows and "
                "columns, choose an Idefics3 or SmolVLM, or set prompt.observation to text"
            )
        policy = Policies.of(config.script.policies, first) if config.script.policies else first
        # Sampling from a sharded model would be collective at every token, and from one that is updated meanwhile it
        # would be from weights between two versions: then there is a whole copy, brought up to date between updates.
        sampler = policy
        if parallel.world > 1 and config.engine.name == "torch":
            sampler = make_replica(policy).to(parallel.device)
        for own in policy.by_agent.values():
            parallel.shard(own)
        if parallel.world == 1 and config.collect.max_staleness and config.engine.name == "torch":
            sampler = copy_trained(policy)
        templates = {
            each.config.name: Template(policy.tokenizer, prefill=each.config.prompt.opening, view=policy.view)
            for each in served
        }
        offline = read_offline(config.replay.offline, templates, config.seeds)
        turnwise = any(stage.algorithm.order != "together" for stage in config.in_stages)

        def make_learner(policy: Policy) -> Learner:
            return (TurnwiseLearner if turnwise else Learner)(
                policy,
                config.algorithm,
                config.optimizer,
                parallel,
                temperature=config.sampling.temperature,
                max_length=config.sampling.max_episode_tokens,
                make_reference=make_initial_policy,
                seed=derive(config.seed, "minibatches"),
                branches=config.collect.search if isinstance(config.collect.search, PivotsConfig) else PivotsConfig(),
                criteria_weights=config.criteria_weights,
            )

        learners = {agent: make_learner(own) for agent, own in policy.by_agent.items()}
        learner = Learners(policy, learners) if isinstance(policy, Policies) else learners[""]
        engine = build_engine(config.engine, sampler, max_context=config.sampling.max_episode_tokens, parallel=parallel)
        stack.push_async_callback(engine.close)
        if (slots := engine.stats().slots) < config.engine.slots:
            screen.warn(f"engine.cache_gib ({config.engine.cache_gib:g}) holds {slots} replies at once")
        search, pivots = config.collect.search, Recoverability()

        playing: Wrap = lambda agents: agents  # noqa: E731
        if config.collect.agent.command:
            playing = await stack.enter_async_context(load_programs()(config.collect.agent))

        def make_collector(stage: Config) -> Collector[EngineAgents]:
            """Plays what a stage, or at last the run itself, is about."""
            collectors = {
                task.name: Collector(
                    fleet=each.fleet,
                    agents=playing(
                        engine_agents(
                            config.script,
                            engine=engine,
                            template=templates[task.name],
                            prompt=task.prompt,
                            sampling=stage.sampling,
                            seed=config.seed,
                            want=_want(config, each.facts, image=task.prompt.shows_images),
                            spans=any(each.algorithm.blocks for each in config.in_stages),
                        )
                    ),
                    task=make_task(task.environment, each.task.actions, task.name),
                    rewards=Rewards(task.rewards),
                    deadline=config.collect.deadline,
                    search=Search(search, pivots) if search.strategy != "none" else None,
                )
                for task, each in zip(stage.tasks, served, strict=True)
            }
            first = next(iter(collectors.values()))
            return replace(first, others=collectors) if stage.environments else first

        imitated = [
            (each.writer, demonstration, templates[each.config.name])
            for each in served
            for demonstration in each.demonstrations
            if config.warm_start.steps
        ]
        demonstrations = [
            writer.episode(each, template, index) for index, (writer, each, template) in enumerate(imitated)
        ]
        _check_agents(config, demonstrations)
        output = Output(folder, checkpoints, screen)
        parts = Parts(
            collectors=[*map(make_collector, config.in_stages)],
            sampler=sampler,
            learner=learner,
            output=output,
            parallel=parallel,
            interrupts=interrupts,
            demonstrations=demonstrations,
            offline=offline,
            scorer=make_scorer(config, make_initial_policy, parallel),
        )
        run = Run(config, parts)
        stack.push_async_callback(run.collecting.ahead.close)
        if loaded is not None:
            run.restore(loaded)
        # Not before: what is refused leaves the folder as it was.
        if parallel.is_main:
            model = model_title(config.model.name)
            folder.begin(config.to_dict(), defaults=_defaults(config).to_dict(), title=config.title, model=model)
            if resumed_step is not None:
                folder.cut_after(resumed_step)
            output.sinks = stack.enter_context(
                Sinks(
                    config.monitor.sinks,
                    folder.path,
                    warn=screen.warn,
                    run_id=folder.id,
                    run_config=config.to_dict(),
                    resumed_step=resumed_step,
                )
            )
        yield run


def _want(config: Config, facts: Facts, *, image: bool) -> Want:
    """What observations carry beside their text. image: whether they are shown as images.

    Turn scorers pool visits of a state, and are compared with scores.
    """
    scorer = config.scorer.kind
    return Want(
        state_key=config.needs_state_key or (scorer == "q" and facts.state_key),
        score=config.collect.search.needs_score or (scorer != "off" and facts.score),
        image=image,
    )


def make_scorer(config: Config, make_model: Callable[[], Policy], parallel: Parallel) -> TurnScorer | None:
    """The turn scorer that is configured, or none. make_model: builds a policy like the one that is trained.

    Raises ConfigError.
    """
    if not isinstance(config.scorer, ImplicitConfig | QConfig):
        return None
    if parallel.world > 1:
        raise ConfigError(f"scorer.kind {config.scorer.kind} is trained in one process: run without torchrun")
    if config.model.lora.rank:
        raise ConfigError(
            f"scorer.kind {config.scorer.kind} trains a whole copy of the policy: set model.lora.rank to 0"
        )
    model = make_model()
    model.critic, model.critic_kind = None, "none"
    scorer = config.scorer
    build = partial(ImplicitScorer, scorer) if isinstance(scorer, ImplicitConfig) else partial(QScorer, scorer)
    return build(
        model.to(parallel.device),
        lr=config.scorer.lr or config.optimizer.lr,
        micro_batch_tokens=config.optimizer.micro_batch_tokens,
        temperature=config.sampling.temperature,
    )


def make_replica(policy: Policy | Policies) -> Policy | Policies:
    """A copy to sample from: without the critic, its weights in what they are computed in."""
    replica = copy.deepcopy(policy, {id(own.critic): None for own in policy.by_agent.values()})
    for own in replica.by_agent.values():
        own.critic_kind = "none"
        round_weights(own.model)
    return replica


def make_policy(config: Config, texts: Callable[[], Iterable[str]], folder: RunFolder, parallel: Parallel) -> Policy:
    """The policy that the run begins with: the same on all ranks, and the same again when the run is resumed.

    texts: what the tokenizer of a tiny model is trained on. It is kept in the run folder.
    """
    critic = config.model.critic if config.algorithm.needs_critic else "none"
    heads = config.algorithm.value_heads
    seed = derive(config.seed, "weights")
    if config.model.name != TINY:
        return build_policy(config.model, texts=None, critic=critic, seed=seed, heads=heads)
    kept = folder.path / INITIAL
    if parallel.is_main and not kept.exists():
        temporary = folder.path / ".temporary-initial"
        shutil.rmtree(temporary, ignore_errors=True)
        policy = build_policy(config.model, texts=list(texts()), critic=critic, seed=seed, heads=heads)
        try:
            policy.save(temporary)
            temporary.rename(kept)
        except (OSError, SafetensorError) as error:
            raise CannotWrite(kept, error if isinstance(error, OSError) else OSError(str(error))) from error
    parallel.barrier()
    return load_policy(kept, config.model)
