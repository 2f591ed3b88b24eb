"""`starpod train FILE.py`: the job that is chosen for a file, and mistakes in it, told with their line."""

from pathlib import Path
from typing import Any

import pytest

from starpod.cli.new import fill
from starpod.trainer.config import Config, ConfigError, names_environment_file
from starpod.trainer.config import load_config as load
from starpod.trainer.environment_file import choose_job

VALUES = {"file": "vault", "id": "vault-v1", "title": "Vault", "name": "Vault"}


def load_config(source: str) -> Config:
    return load(source, explore=lambda file: choose_job(file).values)


def write(folder: Path, *changes: tuple[str, str], expert: bool = True) -> str:
    text = fill("environment", VALUES, options=True, expert=expert)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "vault.py").write_text(text)
    return str(folder / "vault.py")


def test_what_names_a_file(tmp_path: Path) -> None:
    names = ("vault.py", "folder/vault.py:vault-v1", "vault.yaml", "frozen_lake")
    assert [*map(names_environment_file, names)] == [True, True, False, False]
    with pytest.raises(ConfigError, match=r"no such file: .*missing.py"):
        load_config(str(tmp_path / "missing.py"))
    (tmp_path / "dungeon.py").touch()
    with pytest.raises(ConfigError, match=r"no such file: .*dungon\.py; did you mean .*dungeon\.py\?"):
        load_config(str(tmp_path / "dungon.py"))


def test_sizes_come_from_the_environment(tmp_path: Path) -> None:
    job = choose_job(source := write(tmp_path))
    config = load(source, ["stop.minutes=1"], explore=lambda _: job.values)
    assert (config.environment.id, config.environment.max_turns) == ("vault-v1", 12)
    assert config.environment.serve == ("--environment-module", source)
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
    """Without an expert the format is learnt from random play, and long texts are shown a turn at a time."""
    config = load_config(write(tmp_path, expert=False))
    assert (config.warm_start.actions, config.warm_start.noise) == ("random", 0.0)
    assert config.evaluation.reference == ("random",)
    hopeless = write(tmp_path, ("solved = self.dial == self.secret", "solved = False"), expert=False)
    advice = "random play solved 0 of 64; if training stays flat, give it an `expert_action`"
    assert any(line.startswith(advice) for line in choose_job(hopeless).explain(config))
    config = load_config(write(tmp_path, ("max_turns=12", "max_turns=1")))
    assert (config.environment.max_turns, config.algorithm.advantage) == (1, "grpo")


LONG = ("The dial is at", "A dial of brass and iron, " * 12 + "is at")
ENOUGH = ("        limits=Limits", "        fully_observed=True,\n        limits=Limits")


def test_one_observation_is_shown_alone_only_where_the_environment_says_that_it_is_enough(tmp_path: Path) -> None:
    def plan(source: str, *words: str) -> tuple[Config, str]:
        context = next((word.partition("=")[2] for word in words if word.startswith("prompt.context=")), None)
        job = choose_job(source, context)
        config = load(source, words, explore=lambda _: job.values)
        return config, next(line for line in job.explain(config) if line.startswith("the policy sees "))

    config, told = plan(write(tmp_path, LONG))
    assert config.prompt.context == "full" and "sees the whole episode so far (up to " in told
    config, told = plan(write(tmp_path, LONG, ENOUGH))
    assert (config.prompt.context, config.prompt.window) == ("single_turn", 1)
    assert "sees only the present observation, since its spec says fully_observed" in told
    short = config.sampling.max_episode_tokens
    # What is told is what is trained, and what goes with a context goes with it.
    config, told = plan(write(tmp_path, LONG, ENOUGH), "prompt.context=full")
    assert (config.prompt.context, config.prompt.window) == ("full", None) and "the whole episode so far" in told
    assert config.sampling.max_episode_tokens > 4 * short
    config, told = plan(write(tmp_path, LONG, ENOUGH), "prompt.window=3", "prompt.context=window", "warm_start.steps=0")
    assert (config.prompt.context, config.prompt.window) == ("window", 3) and "sees the last 3 turns at most" in told
    config, told = plan(write(tmp_path, (LONG[0], LONG[1] * 12)))
    assert config.prompt.context == "split" and f"the last {config.prompt.window} turns at most" in told


def test_a_configuration_may_begin_from_a_file_beside_it(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "mine.yaml").write_text("base: vault.py\nenvironment:\n  options:\n    marks: 5\n")
    config: Config = load_config(str(tmp_path / "mine.yaml"))
    assert config.environment.options == {"marks": 5}
    assert config.environment.serve == ("--environment-module", str(tmp_path / "vault.py"))


SECOND = """

class Other(Vault):
    spec = EnvironmentSpec(id="other-v1", version="1.0.0", title="Other", actions=("open",))
"""


def test_of_several_environments_one_is_named(tmp_path: Path) -> None:
    source = write(tmp_path)
    Path(source).write_text(Path(source).read_text() + SECOND)
    with pytest.raises(ConfigError, match=r"holds other-v1 and vault-v1: say which, as in vault\.py:other-v1"):
        choose_job(source)
    assert choose_job(f"{source}:vault-v1").values["environment"]["id"] == "vault-v1"
    assert choose_job(f"{source}:other").values["environment"]["id"] == "other-v1"
    with pytest.raises(ConfigError, match="did you mean vault-v1"):
        choose_job(f"{source}:valt")


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
def test_a_mistake_is_told_with_its_line(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        choose_job(write(tmp_path, change))
    assert "\n" not in str(caught.value)


def test_what_lists_nothing_and_shows_nothing_cannot_be_begun_from_nothing(tmp_path: Path) -> None:
    changes: list[Any] = [('actions=("left", "right", "open")', 'grammar="left, right or open"')]
    with pytest.raises(ConfigError, match="vault-v1 lists no actions and has no expert"):
        choose_job(write(tmp_path, *changes, expert=False))
    config = load_config(write(tmp_path, *changes))
    assert (config.warm_start.noise, config.evaluation.reference) == (0.0, ("expert",))
