"""Rules that connect sections of a configuration, one row each.

The table is checked whenever more is known about a run: once its configuration is read, when its processes have
started, and when its servers have said what the environment supports. A rule within a section is checked there.
"""

from __future__ import annotations

from operator import attrgetter

from starpod.trainer.algorithms.distillation import is_same_teacher
from starpod.trainer.algorithms.terms import PROCESS
from starpod.trainer.configuration.case import Case
from starpod.trainer.configuration.section import ConfigError, Contradiction, find_broken
from starpod.trainer.configuration.seeds import PURPOSES
from starpod.trainer.models.config import TINY
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.v1.spelling import nearest

_ADVANTAGE = "algorithm.advantage {c.run.algorithm.advantage.kind}"


def _search_from_start(key: str) -> Contradiction[Case]:
    return Contradiction(
        ("collect.search.strategy", f"environment.{key}"),
        lambda c: c.search != "none" and getattr(c.task.environment, key),
        f"collect.search.strategy {{c.search}} begins at the environment's start states, but environment.{key} at "
        "others: drop one of them",
    )


def _reward_of_script(key: str, name: str) -> Contradiction[Case]:
    return Contradiction(
        (f"rewards.{key}", "script.name"),
        lambda c: c.run.script.name != name and getattr(c.task.rewards, key),
        f"rewards.{key} belongs to {name}, and script.name is {{c.run.script.name}}: set it, or drop it",
    )


def _one_policy(key: str, setting: object) -> Contradiction[Case]:
    return Contradiction(
        ("script.policies", key),
        lambda c: c.run.script.policies and attrgetter(key)(c.run) != setting,
        f"script.policies gives each agent a policy, but {key} {{c.run.{key}}} is for one policy: set it to {setting}",
    )


def _no_images(key: str, setting: object) -> Contradiction[Case]:
    return Contradiction(
        ("prompt.observation", key),
        lambda c: c.task.prompt.shows_images and attrgetter(key)(c.run) != setting,
        f"prompt.observation {{c.task.prompt.observation}} shows images, but {key} {{c.run.{key}}} does not support "
        f"them: set it to {setting}",
    )


RULES: tuple[Contradiction[Case], ...] = (
    # Start states
    Contradiction(
        ("environment.curriculum.tasks", "seeds.train"),
        lambda c: (tasks := getattr(c.task.environment.curriculum, "tasks", 0)) > len(c.run.seeds.train) and tasks,
        "environment.curriculum.tasks {found} is more than the seeds of seeds.train, "
        "{c.run.seeds.train.start} to {c.run.seeds.train.stop}: lower it, or give more seeds",
    ),
    Contradiction(
        ("environment.curriculum", "collect.search", "collect.group_size"),
        lambda c: (
            (c.task.environment.curriculum.kind == "tasks" or c.task.environment.curriculum.levels)
            and not round(getattr(c.run.collect.search, "naive", 1) * c.run.collect.group_size)
        ),
        "environment.curriculum follows the success of the members that are played without search, but the share "
        "collect.search.naive of collect.group_size {c.run.collect.group_size} is none: raise collect.search.naive, or "
        "drop environment.curriculum",
    ),
    # Groups and credit
    Contradiction(
        ("algorithm.advantage", "collect.group_size"),
        lambda c: c.run.algorithm.credit_terms and c.run.collect.group_size < 2,
        _ADVANTAGE + " compares the members of a group; set collect.group_size to at least 2",
    ),
    Contradiction(
        ("algorithm.filter", "algorithm.dynamic_sampling", "collect.group_size"),
        lambda c: (
            c.run.collect.group_size < 2
            and (c.run.algorithm.filter.strategy != "none" or c.run.algorithm.dynamic_sampling.enabled)
        ),
        "algorithm.filter and algorithm.dynamic_sampling choose groups by how their members differ, so they would drop "
        "every group of one; set collect.group_size to at least 2, or set algorithm.filter.strategy to none",
    ),
    Contradiction(
        ("algorithm.advantage", "collect.group_size"),
        lambda c: next(
            (
                term.min_peers
                for term in c.run.algorithm.credit_terms
                if term.min_peers > (term.most_peers(c.run.collect.group_size) or term.min_peers)
            ),
            None,
        ),
        _ADVANTAGE + " needs at least {found} peers, but groups have {c.run.collect.group_size}: set "
        "collect.group_size to at least {found}",
    ),
    Contradiction(
        ("collect.search.strategy", "algorithm.advantage"),
        lambda c: any(term.score == "gain" for term in c.run.algorithm.credit_terms) != (c.search == "values"),
        "collect.search.strategy {c.search} does not go with " + _ADVANTAGE + ": only vineppo and terms with score "
        "gain use values of states, and they need them",
    ),
    Contradiction(
        ("algorithm.advantage", "collect.search.strategy"),
        lambda c: c.search != "tree" and any("tree" in term.key for term in c.run.algorithm.credit_terms),
        _ADVANTAGE + " compares the episodes of a tree, but there are no trees: set collect.search.strategy to tree",
    ),
    Contradiction(
        ("algorithm.order", "collect.search.strategy"),
        lambda c: c.run.algorithm.order != "together" and c.search not in ("none", "best_of"),
        "algorithm.order {c.run.algorithm.order} takes a step for each turn of whole episodes, but "
        "collect.search.strategy {c.search} gives branches: set it to none or best_of, or order to together",
    ),
    Contradiction(
        ("algorithm.advantage", "scorer.kind"),
        lambda c: c.needs_process and c.run.scorer.kind == "off",
        _ADVANTAGE + f" scores the reward part {PROCESS}, which a turn scorer pays, but there is no scorer: set "
        "scorer.kind to implicit or q",
    ),
    Contradiction(
        ("algorithm.advantage", "rewards"),
        lambda c: c.unpaid and (c.unpaid, nearest(c.unpaid, sorted(c.task.rewards.names))),
        _ADVANTAGE + " scores the reward part {found[0]}, which nothing pays{found[1]}; a part is paid if "
        "rewards.{found[0]} has a weight or a penalty, or if it is in rewards.shaping",
    ),
    Contradiction(
        ("algorithm.advantage.value_coefficient", "model.critic", "model.detach_critic"),
        lambda c: (
            (c.run.model.detach_critic or c.run.model.critic == "separate")
            and (critic := c.run.algorithm.critic) is not None
            and critic.value_coefficient != type(critic).model_fields["value_coefficient"].default
        ),
        "algorithm.advantage.value_coefficient weighs the critic's loss against the policy's, but this critic shares "
        "no trained weights with the policy: drop it (optimizer.critic_lr sets how fast the critic learns), or set "
        "model.critic to shared and model.detach_critic to false",
    ),
    # Blocks of replies
    Contradiction(
        ("algorithm.advantage", "prompt.thinking"),
        lambda c: "think" in c.run.algorithm.blocks - c.blocks,
        _ADVANTAGE + " credits the block think, which replies do not have: set prompt.thinking to true",
    ),
    Contradiction(
        ("algorithm.advantage", "prompt.blocks"),
        lambda c: min(c.run.algorithm.blocks - c.blocks, default=""),
        _ADVANTAGE + " credits the block {found}, which replies do not have: add {found} to prompt.blocks",
    ),
    Contradiction(
        ("algorithm.advantage", "prompt.blocks"),
        lambda c: (
            c.task.prompt.blocks[: len(first := c.run.algorithm.advantage.first_blocks)] != first and ", ".join(first)
        ),
        _ADVANTAGE + " reads a reply as {found}, action: let prompt.blocks begin with [{found}]",
    ),
    Contradiction(
        ("rewards.relations", "prompt.blocks"),
        lambda c: next(
            (
                block
                for block in ("description", "prediction")
                if getattr(c.task.rewards.relations, block) and block not in c.blocks
            ),
            None,
        ),
        "rewards.relations.{found} pays for the block {found}, which replies do not have: add it to prompt.blocks",
    ),
    # Where and how long episodes are played
    _search_from_start("expert_moves_left"),
    _search_from_start("starts"),
    Contradiction(
        ("collect.max_staleness", "replay.reuse"),
        lambda c: 0 < c.run.collect.max_staleness < c.run.replay.reuse,
        "collect.max_staleness {c.run.collect.max_staleness} is less than replay.reuse {c.run.replay.reuse}: each "
        "collection raises the policy version by that much, so no collection could begin early; raise max_staleness, "
        "or set it to 0",
    ),
    Contradiction(
        ("collect.max_staleness", "replay.offline"),
        lambda c: c.run.collect.max_staleness and c.run.replay.offline,
        "collect.max_staleness {c.run.collect.max_staleness} lets episodes continue during updates, but replay.offline "
        "collects none: drop one of them",
    ),
    Contradiction(
        ("collect.max_staleness", "engine.sleep"),
        lambda c: c.run.collect.max_staleness and c.run.engine.sleep,
        "collect.max_staleness {c.run.collect.max_staleness} samples during updates, but engine.sleep gives updates "
        "the GPU: drop one of them",
    ),
    Contradiction(
        ("optimizer.schedule_iterations", "stop.iterations"),
        lambda c: (c.run.optimizer.schedule_iterations or c.run.stop.iterations) < c.run.stop.iterations,
        "optimizer.schedule_iterations {c.run.optimizer.schedule_iterations} is less than stop.iterations "
        "{c.run.stop.iterations}: later updates would have a rate of 0",
    ),
    Contradiction(
        ("seeds.selection", "seeds.final", "evaluation.episodes"),
        lambda c: next(
            (
                (purpose, len(seeds))
                for purpose in PURPOSES
                if len(seeds := getattr(c.run.seeds, purpose)) < c.task.evaluation.episodes
            ),
            None,
        ),
        "seeds.{found[0]} holds {found[1]} seeds, fewer than the {c.task.evaluation.episodes} episodes to evaluate",
    ),
    Contradiction(
        ("environment", "environments"),
        lambda c: c.run.environments and c.run.environment != EnvironmentConfig(),
        "environment and environments are both given: environment is for runs with a single one; move all but "
        "addresses, token, certificates and timeouts to environments.NAME",
    ),
    Contradiction(
        ("evaluation.options", "environments"),
        lambda c: c.run.environments and c.run.evaluation.options,
        "evaluation.options is for runs with one environment: with several, give environments.NAME.evaluation.options",
    ),
    # Agents
    Contradiction(
        ("collect.search.strategy", "script"),
        lambda c: c.run.script.name != "solo" and c.search != "none",
        "collect.search.strategy {c.search} is for episodes of one agent: set script to solo",
    ),
    Contradiction(
        ("script", "collect.agent.command"),
        lambda c: c.run.script.name != "solo" and c.run.collect.agent.command,
        "script {c.run.script.name} decides who speaks, but a program plays alone: drop collect.agent.command",
    ),
    Contradiction(
        ("script", "environment.expert_moves_left"),
        lambda c: c.run.script.name == "attempts" and c.task.environment.expert_moves_left,
        "script attempts begins at a start state: drop environment.expert_moves_left",
    ),
    _reward_of_script("verdict", "solver_verifier"),
    _reward_of_script("improvement", "attempts"),
    _reward_of_script("zero_sum", "self_play"),
    Contradiction(
        ("rewards.zero_sum", "algorithm.advantage"),
        lambda c: (
            c.task.rewards.zero_sum
            and (
                c.run.algorithm.needs_critic
                or any(term.score not in ("reward", "met") for term in c.run.algorithm.credit_terms)
            )
        ),
        "rewards.zero_sum makes the rewards of an episode cancel, but " + _ADVANTAGE + " adds up those of all agents, "
        "so that the winner's earlier moves earn nothing: set algorithm.advantage to attempts, or to terms with score "
        "reward, such as [{{unit: agent, score: reward, key: [agent]}}]",
    ),
    Contradiction(
        ("rewards.zero_sum", "algorithm.filter", "algorithm.dynamic_sampling"),
        lambda c: (
            c.task.rewards.zero_sum
            and (c.run.algorithm.filter.strategy != "none" or c.run.algorithm.dynamic_sampling.enabled)
        ),
        "rewards.zero_sum makes the rewards of an episode cancel, so algorithm.filter and algorithm.dynamic_sampling "
        "would choose groups by their penalties alone: set algorithm.filter.strategy to none and "
        "algorithm.dynamic_sampling.enabled to false",
    ),
    Contradiction(
        ("script.policies", "algorithm.advantage"),
        lambda c: c.run.script.policies and c.run.algorithm.needs_critic,
        "script.policies gives each agent a policy, but " + _ADVANTAGE + " needs a critic, which these do not have: "
        "choose one without, such as dr_mas",
    ),
    _one_policy("engine.name", "torch"),
    _one_policy("algorithm.order", "together"),
    _one_policy("scorer.kind", "off"),
    _one_policy("monitor.information.every", 0),
    Contradiction(
        ("evaluation.best_of", "scorer.kind"),
        lambda c: c.run.evaluation.best_of > 1 and c.run.scorer.kind != "q",
        "evaluation.best_of {c.run.evaluation.best_of} chooses replies by their values, but scorer.kind is "
        "{c.run.scorer.kind}: set scorer.kind to q, or evaluation.best_of to 1",
    ),
    Contradiction(
        ("evaluation.best_of", "script", "collect.agent"),
        lambda c: c.run.evaluation.best_of > 1 and (c.run.script.name != "solo" or c.run.collect.agent.command),
        "evaluation.best_of above 1 is for one agent without a program: drop it, or script and collect.agent",
    ),
    # Teachers
    Contradiction(
        ("stages", "algorithm.distillation"),
        lambda c: any(
            stage.algorithm.has_teacher and not is_same_teacher(stage.algorithm.distillation, c.run.teaching)
            for stage in c.run.in_stages
        ),
        "algorithm.distillation names another teacher in another stage, but a run has one: give the same, or off",
    ),
    Contradiction(
        ("algorithm.distillation", "model.name"),
        lambda c: c.run.model.name == TINY and c.run.teaching.teacher in ("model", "vllm"),
        "algorithm.distillation needs a policy with the teacher's tokenizer, but model tiny makes one of its own: set "
        "model.name to the folder `initial` of the teacher's run, or to another model",
    ),
    Contradiction(
        ("algorithm.distillation", "sampling.temperature", "prompt.observation"),
        lambda c: c.run.teaching.teacher == "vllm" and (c.run.sampling.temperature != 1 or c.task.prompt.shows_images),
        "algorithm.distillation vllm reads texts alone, at temperature 1: set sampling.temperature to 1 and "
        "prompt.observation to text, or choose a teacher of the kind model",
    ),
    Contradiction(
        ("algorithm.distillation", "script", "collect.agent.command", "replay.offline"),
        lambda c: c.run.teaching.teacher == "self" and not c.plays_alone,
        "algorithm.distillation self reads the expert's moves in episodes that the policy plays alone: set script to "
        "solo, and drop collect.agent.command and replay.offline",
    ),
    # Replies with a schema
    Contradiction(
        ("sampling.json_schema", "prompt.grammar", "prompt.blocks"),
        lambda c: c.run.sampling.json_schema is not None and (c.task.prompt.calls or c.task.prompt.blocks),
        "sampling.json_schema is the schema of an answer between tags: set prompt.grammar to tags, and drop "
        "prompt.blocks",
    ),
    Contradiction(
        ("sampling.json_schema", "script.name", "collect.agent.command", "replay.offline", "algorithm.distillation"),
        lambda c: (
            c.run.sampling.json_schema is not None and (not c.plays_alone or c.run.teaching.teacher in ("self", "vllm"))
        ),
        "sampling.json_schema is for one agent that the trainer plays and scores: drop script, collect.agent.command "
        "(programs ask for a response_format), replay.offline, and distillation from self or vllm",
    ),
    Contradiction(
        ("sampling.stop", "collect.agent.command"),
        lambda c: c.run.sampling.stop and c.run.collect.agent.command,
        "sampling.stop ends replies in episodes that the trainer plays, but a program names stop texts in its own "
        "requests: drop sampling.stop, or collect.agent.command",
    ),
    # Images
    Contradiction(
        ("prompt.observation", "model.tiny.image"),
        lambda c: c.task.prompt.shows_images and c.run.model.name == TINY and not c.run.model.tiny.image.rows,
        "prompt.observation {c.task.prompt.observation} shows images, but the model has no image input: set "
        "model.tiny.image.rows and columns, or set prompt.observation to text",
    ),
    Contradiction(
        ("prompt.observation", "engine.name"),
        lambda c: (
            c.task.prompt.shows_images and c.run.engine.name not in c.image_engines and " or ".join(c.image_engines)
        ),
        "prompt.observation {c.task.prompt.observation} shows images, but engine.name {c.run.engine.name} does not "
        "support them: set it to {found}",
    ),
    _no_images("script.name", "solo"),
    _no_images("algorithm.order", "together"),
    Contradiction(
        ("prompt.observation", "collect.agent.command"),
        lambda c: c.task.prompt.shows_images and c.run.collect.agent.command,
        "prompt.observation {c.task.prompt.observation} shows images, but programs do not see them: drop "
        "collect.agent.command",
    ),
    # Processes
    Contradiction(
        ("engine.tensor_parallel",),
        lambda c: c.run.engine.name == "vllm" and c.processes % c.run.engine.tensor_parallel,
        "engine.tensor_parallel is {c.run.engine.tensor_parallel}, but each machine has {c.processes} processes with "
        "one GPU each, which cannot be divided into groups of {c.run.engine.tensor_parallel}",
    ),
    Contradiction(
        ("scorer.kind",),
        lambda c: c.processes and c.run.scorer.kind != "off",
        "scorer.kind {c.run.scorer.kind} is trained in one process: run without torchrun",
    ),
    Contradiction(
        ("scorer.kind", "model.lora.rank"),
        lambda c: c.run.scorer.kind != "off" and c.run.model.lora.rank,
        "scorer.kind {c.run.scorer.kind} trains a whole copy of the policy: set model.lora.rank to 0",
    ),
    # What an environment supports
    Contradiction(
        ("algorithm.advantage",),
        lambda c: c.run.needs_state_key and not c.facts.state_key,
        _ADVANTAGE + " compares turns that began in the same state, but {c.task.environment.id} has no state_key to "
        "recognise states; choose another advantage, or set algorithm.advantage.weight to 0",
    ),
    Contradiction(
        ("prompt.observation",),
        lambda c: c.task.prompt.shows_images and not c.facts.image,
        "prompt.observation {c.task.prompt.observation} shows images, but {c.task.environment.id} draws none (no "
        "render mode png): set prompt.observation to text",
    ),
    Contradiction(
        ("environment.starts",),
        lambda c: c.task.environment.starts and not c.facts.fork,
        "environment.starts forks saved states, but {c.task.environment.id} has no fork",
    ),
    Contradiction(
        ("environment.expert_moves_left",),
        lambda c: c.expert_starts and ((not c.facts.expert and "expert") or (not c.facts.fork and "fork")),
        "environment.expert_moves_left plays moves of an expert and forks the resulting state, but "
        "{c.task.environment.id} has no {found}: drop it",
    ),
    Contradiction(
        ("algorithm.distillation",),
        lambda c: c.run.teaching.teacher == "self" and not c.facts.expert,
        "algorithm.distillation self reads the moves of an expert, but {c.task.environment.id} has none: choose a "
        "teacher of the kind model or vllm",
    ),
    Contradiction(
        ("collect.search.score",),
        lambda c: c.run.collect.search.needs_score and not c.facts.score,
        "collect.search.score needs the environment's score, but {c.task.environment.id} has none; set "
        "collect.search.score to reward",
    ),
    Contradiction(
        ("collect.search.strategy",),
        lambda c: c.run.collect.search.needs_fork and not c.facts.fork,
        "collect.search.strategy {c.search} tries replies on forks with other random streams, but "
        "{c.task.environment.id} cannot be forked; choose best_of or pivots",
    ),
    Contradiction(
        ("script",),
        lambda c: c.run.script.name == "attempts" and not c.facts.fork,
        "script attempts plays all attempts except the last on forks, but {c.task.environment.id} has none: set script "
        "to solo",
    ),
)


def refuse_broken(case: Case) -> None:
    """Raise ConfigError for the first rule that a run breaks."""
    if sentence := find_broken(RULES, case):
        raise ConfigError(sentence)
