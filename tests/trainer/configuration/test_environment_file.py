"""`starpod train FILE.py` and `ADDRESS/NAME`: the job that is chosen, and mistakes in a file, told with their line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from starpod.cli.new import fill
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.environment_file import Job, choose_job
from starpod.trainer.configuration.job_sizes import fixed_values
from starpod.trainer.configuration.loading import Complete, names_environment, read_config, read_files
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.prompts.prompt import FullContext, LatestTurns, SplitContext
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_word import EnvironmentWord
from tests.support import start_server
from tests.trainer.chat_templates import tokenizer

VALUES = {"file": "vault", "id": "vault-v1", "title": "Vault", "name": "Vault"}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder := tmp_path_factory.mktemp("cache")))
    return folder


def plan(source: str, *words: str, lines: list[str] | None = None) -> tuple[Config, Job]:
    """The configuration with the user's words, and the job that it comes from. lines: filled with what is reported."""
    jobs: list[Job] = []

    def explore(environment: str, complete: Complete) -> Mapping[str, Any]:
        jobs.append(choose_job(environment, complete, [].append if lines is None else lines.append))
        return jobs[0].values

    config, _ = read_config(source, words, explore=explore)
    return config, jobs[0]


def load_config(source: str) -> Config:
    return plan(source)[0]


def write(folder: Path, *changes: tuple[str, str], expert: bool = True) -> str:
    text = fill("environment", VALUES, options=True, expert=expert)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "vault.py").write_text(text)
    return str(folder / "vault.py")


def test_what_names_a_file(tmp_path: Path) -> None:
    named = (
        "vault.py",
        "folder/vault.py:vault-v1",
        "[::1]:50051/lock-v1",
        "bandit-v1",
        "gymnasium:X-v1?slippery=false",
        "missing.jsonl?attempts=3",
    )
    others = (
        "vault.yaml",
        "frozen_lake",
        "a:1/b/c.yaml",
        "sokobn",
        "scorers.x=own.py:f",
        "environment.addresses=a:1/b",
    )
    assert all(map(names_environment, named)) and not any(map(names_environment, others))
    with pytest.raises(ConfigError, match=r"no such file: .*missing.py"):
        load_config(str(tmp_path / "missing.py"))
    (tmp_path / "dungeon.py").touch()
    with pytest.raises(ConfigError, match=r"no such file: .*dungon\.py; did you mean .*dungeon\.py\?"):
        load_config(str(tmp_path / "dungon.py"))


def test_sizes_come_from_the_environment(tmp_path: Path) -> None:
    config, job = plan(source := write(tmp_path), "stop.minutes=1")
    assert (config.environment.id, config.environment.max_turns) == ("vault-v1", 12)
    assert config.environment.serve == (source,)
    assert config.warm_start.actions == "expert"
    assert config.evaluation.reference == ("random", "expert")
    assert (config.stop.minutes, config.stop.iterations) == (1.0, job.values["stop"]["iterations"])
    told = "\n".join(job.explain(config))
    for words in (
        "at most 12 turns: its expert took",
        "sees the whole episode so far",
        "imitates the best 50% of 1000 demonstrations of its expert, 30% of the moves random",
        "each turn with others from the same state",
        "100 times, for 1 minutes or until",
        "on an idle core about ",
    ):
        assert words in told
    wide = load_config(write(tmp_path, ("max_turns=12", "max_turns=500"), ("default=10", "default=4")))
    assert wide.environment.max_turns is not None and wide.environment.max_turns < 12
    assert wide.sampling.max_episode_tokens < config.sampling.max_episode_tokens


def test_the_job_fits_the_environment(tmp_path: Path) -> None:
    """Random play teaches the format if there is no expert, and long texts lead to prompts with one turn at a time."""
    config = load_config(write(tmp_path, expert=False))
    assert (config.warm_start.actions, config.warm_start.noise) == ("random", 0.0)
    assert config.evaluation.reference == ("random",)
    hopeless = write(tmp_path, ("solved = self.dial == self.secret", "solved = False"), expert=False)
    advice = "random play solved 0 of 64; if training stays flat, give it an `expert_action`"
    assert any(line.startswith(advice) for line in plan(hopeless)[1].explain(config))
    config = load_config(write(tmp_path, ("max_turns=12", "max_turns=1")))
    assert (config.environment.max_turns, config.algorithm.advantage.kind) == (1, "grpo")


LONG = ("The dial is at", "A dial of brass and iron, " * 12 + "is at")
ENOUGH = ("        limits=Limits", "        fully_observed=True,\n        limits=Limits")


def test_one_observation_is_shown_alone_only_where_the_environment_says_that_it_is_enough(tmp_path: Path) -> None:
    def tell(source: str, *words: str) -> tuple[Config, str]:
        config, job = plan(source, *words)
        return config, next(line for line in job.explain(config) if line.startswith("the policy sees "))

    config, told = tell(write(tmp_path, LONG))
    assert config.prompt.context == FullContext() and "sees the whole episode so far (up to " in told
    config, told = tell(write(tmp_path, LONG, ENOUGH))
    assert config.prompt.context == LatestTurns(kind="single_turn", window=1)
    assert "sees only the present observation, since its spec says fully_observed" in told
    short = config.sampling.max_episode_tokens
    # The printed job is trained, and the context's other keys follow it.
    config, told = tell(write(tmp_path, LONG, ENOUGH), "prompt.context=full")
    assert config.prompt.context == FullContext() and "the whole episode so far" in told
    assert config.sampling.max_episode_tokens > 4 * short
    config, told = tell(
        write(tmp_path, LONG, ENOUGH), "prompt.context.window=3", "prompt.context=window", "warm_start.steps=0"
    )
    assert config.prompt.context == LatestTurns(kind="window", window=3) and "sees the last 3 turns at most" in told
    config, told = tell(write(tmp_path, (LONG[0], LONG[1] * 12)))
    assert (
        isinstance(config.prompt.context, SplitContext)
        and f"the last {config.prompt.context.window} turns at most" in told
    )


def test_a_configuration_may_have_a_base_in_its_folder(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "mine.yaml").write_text("base: vault.py\nenvironment:\n  options:\n    marks: 5\n")
    config: Config = load_config(str(tmp_path / "mine.yaml"))
    assert config.environment.options == {"marks": 5}
    assert config.environment.serve == (str(tmp_path / "vault.py"),)


@pytest.mark.parametrize("base", ["tasks.jsonl", "tasks.jsonl?attempts=3", "tasks:tasks.jsonl", "vault.py", "b.yaml"])
def test_a_base_is_beside_its_file_and_not_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    for folder in ("mine", "elsewhere"):
        (tmp_path / folder).mkdir()
        for name in ("tasks.jsonl", "vault.py", "b.yaml"):
            (tmp_path / folder / name).write_text(f"title: {folder}")
    (tmp_path / "mine" / "mine.yaml").write_text(f"base: {base}")
    monkeypatch.chdir(tmp_path / "elsewhere")
    environment, files = read_files("../mine/mine.yaml")
    if base == "b.yaml":
        assert files[0][1] == {"title": "mine"}
    else:
        word = EnvironmentWord.parse(environment)
        assert str(tmp_path / "mine") in word.serve and word.serve.endswith(base.removeprefix("tasks:"))


SECOND = """

class Other(Vault):
    spec = EnvironmentSpec(id="other-v1", version="1.0.0", title="Other", actions=("open",))
"""


def test_of_several_environments_one_is_named(tmp_path: Path) -> None:
    source = write(tmp_path)
    Path(source).write_text(Path(source).read_text() + SECOND)
    with pytest.raises(ConfigError, match=r"holds other-v1 and vault-v1: say which, as in vault\.py:other-v1"):
        plan(source)
    assert load_config(f"{source}:vault-v1").environment.id == "vault-v1"
    assert load_config(f"{source}:other").environment.id == "other-v1"
    with pytest.raises(ConfigError, match="did you mean vault-v1"):
        plan(f"{source}:valt")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("def step(", "de step("), r"vault.py, line \d+: SyntaxError: "),
        (("import random", "import no_such_package"), "vault.py, line 3: ModuleNotFoundError: No module named"),
        (('version="1.0.0"', 'version="1"'), r"vault.py, line \d+: version '1' of vault-v1 is not MAJOR.MINOR.PATCH"),
        (("def render(", "def draw("), r"vault.py, line \d+: Vault does not define render"),
        (('title="Vault"', "name='Vault'"), r"vault.py, line \d+: TypeError: .*'name'"),
        (
            ("before = self.dial", "before = self.dail"),
            r"Step raised AttributeError: .* \(vault.py, line \d+\)",
        ),
        (("self.last = marks[-1]", "self.last = marks[99]"), r"Open raised IndexError: .* \(vault.py, line \d+\)"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_a_mistake_is_reported_with_its_line(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        plan(write(tmp_path, change))
    assert "\n" not in str(caught.value)


def test_what_lists_nothing_and_shows_nothing_cannot_be_begun_from_nothing(tmp_path: Path) -> None:
    changes: list[Any] = [('actions=("left", "right", "open")', 'grammar="left, right or open"')]
    with pytest.raises(ConfigError, match="vault-v1 lists no actions and has no expert"):
        plan(write(tmp_path, *changes, expert=False))
    config = load_config(write(tmp_path, *changes))
    assert (config.warm_start.noise, config.evaluation.reference) == (0.0, ("expert",))


def test_sizes_are_for_the_options_of_the_run(tmp_path: Path, cache: Path) -> None:
    """Sizes include the options of a base, of evaluations and of levels, and obey a limit of the user."""
    source = write(tmp_path, ("max_turns=12", "max_turns=500"))
    easy, hard = (plan(source, f"environment.options.marks={marks}")[0].environment.max_turns for marks in (4, 60))
    assert easy is not None and hard is not None and hard > 32 > 4 * easy - 8
    for word in ("evaluation.options={marks: 60}", "environment.curriculum.levels=[{marks: 4}, {marks: 60}]"):
        assert plan(source, "environment.options.marks=4", word)[0].environment.max_turns == hard
    (tmp_path / "mine.yaml").write_text("base: vault.py\nenvironment: {options: {marks: 60}}\n")
    assert plan(str(tmp_path / "mine.yaml"))[0].environment.max_turns == hard
    short, long = (plan(source, f"environment.max_turns={turns}")[0] for turns in (6, 12))
    assert short.sampling.max_episode_tokens < long.sampling.max_episode_tokens
    with pytest.raises(ConfigError, match="has no option 'mark': did you mean marks"):
        plan(source, "environment.options.mark=4")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("optimizer.lrr=1", r"no key 'optimizer\.lrr'"),
        ("stop.minutes=-1", "stop.minutes"),
        ("algorithm.advantage=gigp", "no kind 'gigp'"),
        ("rewards.shaping=[gone.py:score]", r"gone\.py"),
        ("evaluation.reference=[walkk]", "walkk"),
        ("model=./nowhere", "nowhere"),
    ],
)
def test_keys_are_checked_before_the_environment_is_played(tmp_path: Path, word: str, told: str) -> None:
    source = write(
        tmp_path, ("    def reset(", "    def reset(self, rng): raise RuntimeError('played')\n    def unused(")
    )
    with pytest.raises(ConfigError, match=told) as caught:
        plan(source, word)
    assert "played" not in str(caught.value)


def test_keys_that_fit_some_size_are_kept_until_sizes_are_known(tmp_path: Path) -> None:
    source = write(tmp_path, (LONG[0], LONG[1] * 12))  # shown as a split conversation
    assert plan(source, "prompt.context.overlap=1")[0].prompt.context.overlap == 1
    with pytest.raises(
        ConfigError, match=r"prompt\.context\.window belongs to window, single_turn, split, and prompt\.context is full"
    ):
        plan(write(tmp_path), "prompt.context.window=3")


def test_a_file_is_explored_once_for_each_of_its_versions_and_options(tmp_path: Path) -> None:
    def lines(*words: str) -> list[str]:
        plan(source, *words, lines=(told := []))
        return told

    source = write(tmp_path)
    first, values = lines(), plan(source)[1].values
    assert first == [
        "vault.py: some episodes are played to choose sizes",
        "vault-v1: playing 64 episodes by its expert",
    ]
    assert (lines(), lines("optimizer.lr=0.01")) == ([], [])
    assert plan(source)[1].values == values
    assert len(lines("environment.options.marks=4")) == 2
    (tmp_path / "rooms.py").write_text("SIZE = 4\n")
    assert (len(lines()), len(lines())) == (2, 0)


def test_a_served_environment_gets_the_job_that_its_file_gets(tmp_path: Path) -> None:
    source = write(tmp_path)
    own, (config, job) = load_config(source), (None, None)
    with start_server(source) as server:
        config, job = plan(f"{server.address}/vault")
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1:\d+: .*did you mean vault-v1"):
            plan(f"{server.address}/valt-v1")
    assert config.environment.addresses == (server.address,) and not config.environment.serve
    same = {"addresses": (), "serve": own.environment.serve}
    assert config.environment.model_copy(update=same) == own.environment
    for section in ("prompt", "sampling", "collect", "warm_start", "algorithm", "stop"):
        assert getattr(config, section) == getattr(own, section)
    assert job.explain(config)[0].startswith(f"vault-v1 1.0.0 of {server.address}, with the model tiny")
    words = ("environment.patience=1", "environment.timeout=1")
    with pytest.raises(ConfigError, match=r"no server answers at 127\.0\.0\.1:1: connection refused"):
        plan("127.0.0.1:1/vault-v1", *words)


def test_a_pretrained_model_gets_a_job_of_its_own(tmp_path: Path) -> None:
    """A tiny policy's rates, reply lengths and minutes do not fit a pretrained model."""
    words = tokenizer("chatml")
    words.save_pretrained(folder := tmp_path / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(vocab_size=len(words), **sizes).save_pretrained(folder)
    source = write(tmp_path)
    config, job = plan(source, f"model={folder}")
    tiny = load_config(source)
    assert (config.prompt.style, config.prompt.thinking, config.stop.minutes) == ("full", True, None)
    assert (config.model.name, config.warm_start.steps, config.optimizer.lr) == (str(folder), 0, 1e-6)
    assert config.sampling.max_reply_tokens > 10 * tiny.sampling.max_reply_tokens
    assert config.sampling.max_episode_tokens > 2 * config.sampling.max_reply_tokens
    assert f"with the model {folder}" in job.explain(config)[0]
    brief = plan(source, f"model={folder}", "prompt.thinking=false")[0]
    assert brief.sampling.max_reply_tokens < config.sampling.max_reply_tokens


@pytest.mark.parametrize(
    ("split", "trained", "held_out", "episodes"),
    [
        ({"enum": ["all", "test", "train"], "rows": {"test": 30}}, {"split": "train"}, {"split": "test"}, 30),
        ({"enum": ["train", "test"], "rows": {"test": 999}}, {"split": "train"}, {"split": "test"}, 128),
        ({"enum": ["all", "dev"]}, None, None, 128),
    ],
)
def test_splits_of_an_environment_are_trained_and_held_out(
    split: dict[str, Any], trained: dict[str, str] | None, held_out: dict[str, str] | None, episodes: int
) -> None:
    spec = pb.EnvironmentSpec(id="tasks-v1", options_schema_json=json.dumps({"properties": {"split": split}}))
    values = fixed_values(EnvironmentWord("tasks:/tasks.jsonl", family="tasks"), spec, tiny=True, single_turn=True)
    assert values["environment"].get("options") == trained
    assert values["evaluation"].get("options") == held_out and values["evaluation"]["episodes"] == episodes
