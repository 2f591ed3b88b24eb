"""Construction of a run from its configuration: folder, environments, models, learner, engine, collectors."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from starpod.client import Want
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.agents.program import Wrap, load_programs
from starpod.trainer.agents.script import engine_agents
from starpod.trainer.algorithms.distillation import Judge, SelfTeacher
from starpod.trainer.checkpoints.checkpoint import Checkpoints, Loaded
from starpod.trainer.checkpoints.resume import check_model as check_resumed_model
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.preflight import check_model, warn_of_rewrites
from starpod.trainer.configuration.seeds import derive
from starpod.trainer.configuration.user_file import digests
from starpod.trainer.data.offline import check_tokens, read_offline
from starpod.trainer.engines.base import Engine
from starpod.trainer.engines.factory import build_engines
from starpod.trainer.learner import Learner
from starpod.trainer.models.config import TINY, model_title
from starpod.trainer.models.policies import Policies
from starpod.trainer.models.policy import Policy
from starpod.trainer.output.in_play import telling
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.screen import Screen
from starpod.trainer.output.sinks import Sinks
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.prompts.template import Template
from starpod.trainer.rewards.reward import Rewards
from starpod.trainer.rollout.collect import Collector
from starpod.trainer.rollout.config import Facts, PivotsConfig
from starpod.trainer.rollout.environment import make_task
from starpod.trainer.rollout.pivots import Recoverability
from starpod.trainer.rollout.search import Search
from starpod.trainer.run.environments import Served, demonstrate, episodes_to_imitate, serve
from starpod.trainer.run.interrupts import Interrupts
from starpod.trainer.run.policies import Models, build_models, forget_initial
from starpod.trainer.run.run import Parts, Run
from starpod.trainer.run.step_report import Output
from starpod.trainer.run.teachers import make_judge
from starpod.trainer.scorers.base import TurnScorer
from starpod.trainer.scorers.config import ImplicitConfig, QConfig
from starpod.trainer.scorers.implicit import ImplicitScorer
from starpod.trainer.scorers.q import QScorer
from starpod.trainer.update import PolicyTrainer


@contextlib.asynccontextmanager
async def open_run(
    config: Config,
    path: Path,
    *,
    resume: bool,
    parallel: Parallel,
    screen: Screen,
    interrupts: Interrupts,
    begin: Callable[[], None] = lambda: None,
) -> AsyncIterator[Run]:
    """Build all parts of a run, restore its state if it is resumed, and close everything at the end.

    The configuration must have passed `preflight.check`.

    Args:
        begin: Called once the environments accept the configuration, before anything is written or played.

    Raises:
        Interrupted: A signal came before the run began.
        ConfigError: The configuration or the folder cannot be used. Other causes raise ServiceFailed, StarpodError or
            an error from loading the model.
    """
    async with contextlib.AsyncExitStack() as stack:
        folder = RunFolder.create(path, resume=resume) if parallel.is_main else RunFolder(path)
        if parallel.is_main:
            stack.enter_context(folder.lock())
        output = Output(folder, Checkpoints(folder.checkpoints, config.checkpoint, parallel=parallel.apart()), screen)
        loaded = _load(config, output.checkpoints, resume=resume)
        teacher = make_judge(config, parallel)
        offline = read_offline(config.replay.offline, config.seeds)
        served = await _serve_all(config, stack, screen)
        if loaded is None:
            for environment in served:
                await environment.check_scout(config)
        begin()
        if parallel.is_main:
            if not resume:  # at once, so that pages show the run during its warm start
                _record(config, folder, screen, resume=False)
            await stack.enter_async_context(telling(folder, [environment.fleet for environment in served], screen))
        models = await _build_models(config, served, output, loaded, parallel=parallel, interrupts=interrupts)
        templates = _build_templates(served, models.policies)
        for line in warn_of_rewrites(config, templates):
            screen.warn(line)
        check_tokens(config.replay.offline, offline, templates)
        demonstrations = await episodes_to_imitate(config, served, templates)
        for environment in served:
            if environment.contents is not None:
                screen.phase(environment.contents.sentence())
            if cut_count := environment.writer.cut_count:
                screen.phase(f"{cut_count} demonstrations end early, at sampling.max_episode_tokens")
        engine = _start_engine(config, models, parallel, screen, stack)
        run = Run(
            config,
            Parts(
                collectors=await _build_collectors(config, served, templates, engine, stack),
                models=models,
                learner=build_learner(config, models, parallel, teacher),
                output=output,
                parallel=parallel,
                interrupts=interrupts,
                demonstrations=demonstrations,
                offline=offline,
                scorer=make_scorer(config, models.make_initial, parallel),
            ),
        )
        stack.push_async_callback(run.persistence.close)
        stack.push_async_callback(run.collecting.ahead.close)
        if loaded is not None:
            run.restore(loaded)
        resumed_step = loaded.step if loaded is not None else -1
        # Its tensors are mapped into memory: as long as they are, the disk space of a deleted checkpoint is not free.
        del loaded
        if parallel.is_main:
            output.sinks = stack.enter_context(_open_sinks(config, output, resumed_step if resume else None))
        yield run


def _load(config: Config, checkpoints: Checkpoints, *, resume: bool) -> Loaded | None:
    """Return the checkpoint to continue from, if there is one. Raises ConfigError if the model does not fit."""
    loaded = checkpoints.latest() if resume else None
    if loaded is None:
        check_model(config)
    else:
        check_resumed_model(config, loaded)
    return loaded


async def _build_models(
    config: Config,
    served: Sequence[Served],
    output: Output,
    loaded: Loaded | None,
    *,
    parallel: Parallel,
    interrupts: Interrupts,
) -> Models:
    """Build the models, and play the demonstrations of a new run, on which a tiny model's tokenizer is trained."""
    texts = lambda: chain.from_iterable(environment.texts for environment in served)  # noqa: E731
    folder, screen, models = output.folder, output.screen, None
    if config.model.name != TINY:  # one that cannot be used is refused before demonstrations are played
        screen.phase(f"loading {model_title(config.model.name)}")
        models = build_models(config, texts, folder, parallel)
    if loaded is None:
        if config.warm_start.imitates or config.model.name == TINY:
            await demonstrate(config, served, parallel=parallel, screen=screen, interrupts=interrupts)
        forget_initial(folder, parallel)
    return models or build_models(config, texts, folder, parallel)


def _start_engine(
    config: Config, models: Models, parallel: Parallel, screen: Screen, stack: contextlib.AsyncExitStack
) -> Engine:
    """Start the engine until the stack is closed, and warn if it samples fewer replies at once than configured."""
    if config.engine.name == "vllm":
        screen.phase("starting vLLM")
    engine = build_engines(
        config.engine,
        models.sampler,
        max_context=config.sampling.max_episode_tokens,
        parallel=parallel,
        updates=models.updates,
    )
    stack.push_async_callback(engine.close)
    if (slots := engine.stats().slots) < config.engine.slots:
        screen.warn(f"engine.cache_gib ({config.engine.cache_gib:g}) holds {slots} replies at once")
    if engine.stats().apart:
        screen.warn(
            "engine torch computes each reply of this model separately, because of its layers; engine=vllm is faster"
        )
    return engine


async def _serve_all(config: Config, stack: contextlib.AsyncExitStack, screen: Screen) -> list[Served]:
    """Connect to the servers of all environments until the stack is closed."""
    if all(task.environment.addresses for task in config.tasks):
        screen.phase("connecting")
    return [await stack.enter_async_context(serve(config, task)) for task in config.tasks]


def _build_templates(served: Sequence[Served], policies: Policies) -> dict[str, Template]:
    """Return the chat template of each environment, by its name in the run."""
    return {
        each.config.name: Template(
            policies.tokenizer,
            prefill=each.config.prompt.opening,
            view=policies.view,
            calls=each.config.prompt.calls,
        )
        for each in served
    }


def build_learner(config: Config, models: Models, parallel: Parallel, teacher: Judge | None = None) -> Learner:
    """Return the learner of all policies."""
    trainers = {
        agent: PolicyTrainer(
            policy,
            config.algorithm,
            config.optimizer,
            parallel,
            temperature=config.sampling.temperature,
            max_length=config.sampling.max_episode_tokens,
            make_reference=models.make_initial,
            seed=derive(config.seed, "minibatches"),
            branches=config.collect.search if isinstance(config.collect.search, PivotsConfig) else PivotsConfig(),
            criteria_weights=config.criteria_weights,
            teacher=teacher,
        )
        for agent, policy in models.policies.by_agent.items()
    }
    return Learner(trainers)


async def _build_collectors(
    config: Config,
    served: Sequence[Served],
    templates: Mapping[str, Template],
    engine: Engine,
    stack: contextlib.AsyncExitStack,
) -> list[Collector[EngineAgents]]:
    """Return one collector per stage in order, then one with the unchanged configuration."""
    wrap_agents: Wrap = lambda agents: agents  # noqa: E731
    if config.collect.agent.command:
        wrap_agents = await stack.enter_async_context(load_programs()(config.collect.agent))
    search, pivots = config.collect.search, Recoverability()

    def build(stage: Config) -> Collector[EngineAgents]:
        collectors = {
            task.name: Collector(
                fleet=environment.fleet,
                agents=wrap_agents(
                    engine_agents(
                        config.script,
                        engine=engine,
                        template=templates[task.name],
                        prompt=task.prompt,
                        sampling=stage.sampling,
                        seed=config.seed,
                        want=_want(config, environment.facts, image=task.prompt.shows_images),
                        spans=any(settings.algorithm.blocks for settings in config.in_stages),
                        hint=config.teaching.hint if isinstance(config.teaching, SelfTeacher) else "",
                    )
                ),
                task=make_task(task.environment, environment.task.actions, task.name),
                rewards=Rewards(task.rewards),
                deadline=config.collect.deadline,
                search=Search(search, pivots) if search.strategy != "none" else None,
            )
            for task, environment in zip(stage.tasks, served, strict=True)
        }
        first = next(iter(collectors.values()))
        return replace(first, others=collectors) if stage.environments else first

    return [*map(build, config.in_stages)]


def _want(config: Config, facts: Facts, *, image: bool) -> Want:
    """Return the data that observations must carry besides text. image: whether the policy sees images.

    Turn scorers use state keys to pool the visits of a state. Their scores are compared with the environment's scores.
    """
    scorer = config.scorer.kind
    reads_states = scorer == "q" or any(stage.algorithm.may_read_state_key for stage in config.in_stages)
    return Want(
        state_key=config.needs_state_key or (reads_states and facts.state_key),
        expert_action=isinstance(config.teaching, SelfTeacher),
        score=config.collect.search.needs_score or (scorer != "off" and facts.score),
        image=image,
    )


def make_scorer(config: Config, make_model: Callable[[], Policy], parallel: Parallel) -> TurnScorer | None:
    """Return the configured turn scorer, or None.

    Args:
        make_model: Builds a policy with the initial weights, to be trained by the scorer.
    """
    scorer = config.scorer
    if not isinstance(scorer, ImplicitConfig | QConfig):
        return None
    model = make_model()
    model.critic, model.critic_kind = None, "none"
    build = partial(ImplicitScorer, scorer) if isinstance(scorer, ImplicitConfig) else partial(QScorer, scorer)
    return build(
        model.to(parallel.device),
        lr=scorer.lr or config.optimizer.lr,
        micro_batch_tokens=config.optimizer.micro_batch_tokens,
        temperature=config.sampling.temperature,
    )


def _record(config: Config, folder: RunFolder, screen: Screen, *, resume: bool) -> None:
    """Write the configuration and facts of the run, or of its resumption, to its folder.

    The screen names the user's files that changed since the run last started.
    """
    earlier_files = folder.read_facts().get("files", {}) if resume else {}
    files = digests(config.to_dict())
    if changed := [file for file in files if earlier_files.get(file, files[file]) != files[file]]:
        screen.warn(f"changed since this run last started: {', '.join(changed)}")
    # The report shows differences from the default configuration with the same environments.
    defaults = Config.model_validate({"environments": {name: each.id for name, each in config.environments.items()}})
    model = model_title(config.model.name)
    folder.begin(
        config.to_dict(), resume=resume, defaults=defaults.to_dict(), title=config.title, model=model, files=files
    )


def _open_sinks(config: Config, output: Output, resumed_step: int | None) -> Sinks:
    """Open the sinks of metrics. A resumption is recorded, and output that was written after the checkpoint removed.

    resumed_step: step of the checkpoint, or -1 if the run was lost before its first one; None if the run is new.
    """
    folder, screen = output.folder, output.screen
    if resumed_step is not None:  # only now, so that a refused resumption leaves the folder unchanged
        _record(config, folder, screen, resume=True)
        folder.cut_after(resumed_step)
    return Sinks(
        config.monitor.sinks,
        folder.path,
        warn=screen.warn,
        run_id=folder.id,
        run_config=config.to_dict(),
        resumed_step=resumed_step,
    )
