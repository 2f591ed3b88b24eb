"""A run whose groups a script plays, for tests of its steps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from starpod.trainer.agents.base import Task
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.checkpoints.checkpoint import Checkpoints, Loaded
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import read_groups
from starpod.trainer.data.group import Group
from starpod.trainer.engines.base import EngineStats
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.screen import Screen
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.rollout.collect import Collector, Start
from starpod.trainer.run.interrupts import Interrupts
from starpod.trainer.run.policies import Models
from starpod.trainer.run.progress import Progress, Settings, Shared
from starpod.trainer.run.run import Parts, Run
from starpod.trainer.run.step_report import Output
from tests.trainer.tiny_learner import learner_of, make_trainer
from tests.trainer.turns import a_turn

Outcome = Callable[[int], list[float]]
"""The returns of the episodes of the n-th start that is asked for; fewer than asked: the others failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedCollector(Collector[EngineAgents]):
    """Plays nothing: groups come out as `outcome` says. asked: the starts, in order."""

    outcome: Outcome
    asked: list[Start] = field(default_factory=list)

    async def play_group(self, start: Start, size: int, begun: dict[int, Episode] | None = None) -> Group:
        returns = self.outcome(len(self.asked))
        self.asked.append(start)
        episodes = [episode(start.id, member, value) for member, value in enumerate(returns)]
        failed = [Episode(start.id, member, "lake", end="failed") for member in range(len(returns), size)]
        for lost in failed:
            lost.error = "Unavailable: the server is gone"
        return Group(start.id, episodes, failed)


def episode(group: int, member: int, reward: float) -> Episode:
    turn = a_turn(logprobs=[-1.0], parts={"environment": reward})
    return Episode(group, member, "lake", turns=[turn], end="terminal", success=reward > 0)


def make_collector(
    config: Config, plays: Callable[..., ScriptedCollector] = ScriptedCollector, outcome: Outcome = lambda _: [1.0, 0.0]
) -> ScriptedCollector:
    """A collector without servers, over an engine that does nothing."""
    engine = SimpleNamespace(stats=EngineStats, pause=nothing, load=nothing, resume=nothing)
    agents = EngineAgents(
        engine=cast(Any, engine), template=cast(Any, None), prompt=config.prompt, sampling=config.sampling
    )

    async def describe() -> list[Any]:
        return []

    fleet = cast(Any, SimpleNamespace(recoveries=0, describe=describe))
    return plays(fleet=fleet, agents=agents, task=Task("lake"), outcome=outcome)


def make_run(
    tmp_path: Path,
    outcome: Outcome = lambda _: [1.0, 0.0],
    *,
    path: str = "run",
    plays: Callable[..., ScriptedCollector] = ScriptedCollector,
    parallel: Parallel | None = None,
    turn_scorer: Any = None,
    **values: Any,
) -> Run:
    """A run whose groups a script plays. plays: makes the collector."""
    evaluation = {"episodes": 4, "reference": [], "every": 1}
    values = {"evaluation": evaluation, "collect": {"groups": 4, "group_size": 2}} | values
    config = parse_config(values)
    folder = RunFolder.create(tmp_path / path, resume=True).begin(config.to_dict(), resume=True)
    learner = learner_of(make_trainer(config.algorithm))
    collector = make_collector(config, plays, outcome)
    return Run(
        config,
        Parts(
            collectors=[collector] * len(config.in_stages),
            models=Models(learner.policies, learner.policies, cast(Any, None)),
            learner=learner,
            output=Output(folder, Checkpoints(folder.checkpoints, config.checkpoint), Screen()),
            parallel=parallel or Parallel(),
            interrupts=Interrupts(),
            offline=read_groups(config.replay.offline) if config.replay.offline else (),
            scorer=turn_scorer,
        ),
    )


def make_shared(
    config: Config,
    *,
    progress: Progress | None = None,
    parallel: Parallel | None = None,
    screen: Screen | None = None,
) -> Shared:
    """Return the settings and services of a run of one process."""
    return Shared(Settings(config), progress or Progress(), parallel or Parallel(), Interrupts(), screen or Screen())


async def nothing(*_: Any) -> None:
    return


def told_by(run: Run) -> list[str]:
    """Return a list that collects the run's warnings from now on."""
    told: list[str] = []
    cast(Any, run.output.screen).warn = told.append
    return told


def asked_by(run: Run) -> list[int]:
    """The numbers of the start states that were asked for."""
    return [start.id for start in cast(Any, run.collecting.collector).asked]


async def save(run: Run) -> None:
    await run.persistence.save()
    await run.persistence.finish_writing()


def saved_by(run: Run) -> Loaded:
    loaded = run.output.checkpoints.latest()
    assert loaded is not None
    return loaded


class TwoRanks(Parallel):
    """The other rank's flag is as given; it does as much as this one."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.other = other

    def any(self, flag: bool) -> bool:
        return flag or self.other

    def gather_objects(self, item: Any) -> list[Any]:
        return [item, item]
