"""The configuration tree: files and command-line words give the same result, and errors are reported."""

from pathlib import Path

import pytest
import yaml

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.configuration.loading import load_config, parse_config
from starpod.trainer.configuration.resolve import resolve_run
from starpod.trainer.configuration.section import ConfigError, packaged_configs
from starpod.trainer.data.replay import ReplayConfig
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.prompts.prompt import FullContext
from starpod.trainer.rollout.config import EnvironmentConfig


@pytest.mark.parametrize("name", sorted(packaged_configs()))
def test_what_comes_with_the_package_is_valid(name: str) -> None:
    config = load_config(name)
    assert parse_config(config.to_dict()) == config
    assert packaged_configs()[name].read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("preset", packaged_configs("algorithm"))
def test_a_preset_is_one_word_on_any_configuration(preset: str) -> None:
    blocks = {"hiper": ["switch", "subgoal"]}.get(preset, [])
    config = load_config("frozen_lake", [f"algorithm={preset}", f"prompt.blocks={blocks}"])
    assert config.algorithm == parse_config({"algorithm": preset, "prompt": {"blocks": blocks}}).algorithm


def test_words_and_files_mean_the_same(tmp_path: Path) -> None:
    words = ["collect.groups=5", "environment.options.size=8", "model.tiny.hidden=32", "title=A lake", "engine=torch"]
    file = tmp_path / "mine.yaml"
    file.write_text(
        "base: frozen_lake\ntitle: A lake\nengine: torch\ncollect: {groups: 5}\n"
        "environment: {options: {size: 8}}\nmodel: {tiny: {hidden: 32}}\n"
    )
    assert load_config(str(file)) == load_config("frozen_lake", words)
    assert load_config(str(file)).environment.options["observation"] == "local"


def test_several_environments_share_how_to_reach_their_servers(tmp_path: Path) -> None:
    words = ["environment.addresses=[dns:///all:50051]", "environment.timeout=5", "environments.sokoban.timeout=7"]
    config = load_config("mixture", [*words, f"environment.token_file={tmp_path / 'token'}"])
    reached = {task.name: (task.environment.addresses, task.environment.timeout) for task in config.tasks}
    assert reached == {
        name: (("dns:///all:50051",), timeout) for name, timeout in (("bandit", 5), ("frozen_lake", 5), ("sokoban", 7))
    }
    assert {task.environment.token_file for task in config.tasks} == {str(tmp_path / "token")}
    assert parse_config(config.to_dict()) == config, "the run's folder has all that a resumed run needs"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    (tmp_path / "run.json").touch()
    resumed = resolve_run(
        None, ["environment.addresses=[dns:///new:1]"], tmp_path, resume=True, resume_or_start=False, changes=()
    )
    assert {task.environment.addresses for task in resumed.config.tasks} == {("dns:///new:1",)}
    with pytest.raises(ConfigError, match="environment and environments are both given"):
        load_config("mixture", [*words, "environment.max_turns=3"])


def test_paths_are_absolute_wherever_they_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's config.yaml is read in other folders. What only looks like a path stays as it is."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "tiny", "org/folder"):
        Path(name).mkdir(parents=True)
    Path("lake.py").touch()
    sections = {
        EnvironmentConfig: ("token_file", "starts", "ca"),
        EngineConfig: ("api_key_file", "handover_folder"),
        ReplayConfig: ("offline",),
    }
    for section, names in sections.items():
        assert {getattr(section.model_validate({name: "here"}), name) for name in names} == {str(tmp_path / "here")}
    for name, saved in {"./model": "model", "model": "model", "org/folder": "org/folder"}.items():
        assert parse_config({"model": name}).model.name == str(tmp_path / saved)
    for name in ("tiny", "smollm2", "org/name"):
        assert parse_config({"model": name}).model.name == name
    words = ("lake.py", "lake.py:Lake", "--store=a=org/folder", "bandit", "model")
    lake, folder = str(tmp_path / "lake.py"), f"--store=a={tmp_path / 'org/folder'}"
    assert parse_config({"environment": {"serve": words}}).environment.serve == (
        lake,
        f"{lake}:Lake",
        folder,
        *words[3:],
    )
    own = {"lake": {"id": "frozen_lake-v1", "warm_start": {"demonstrations": "mine", "episodes": 1}}}
    saved = parse_config({"environments": own, "warm_start": {"steps": 1}}).to_dict()["environments"]["lake"][
        "warm_start"
    ]
    assert saved == {"demonstrations": str(tmp_path / "mine"), "episodes": 1}


def test_words_are_read_as_they_are_meant() -> None:
    """Addresses are a text or a list, and what is off can be said so."""
    words = ["environment.addresses=127.0.0.1:50051,[::1]:50052", "monitor.screen=off", "algorithm.kl.where=off"]
    words += ["device=cuda:3", "engine=vllm", "engine.sleep=true"]
    config = load_config("frozen_lake", words)
    assert config.environment.addresses == ("127.0.0.1:50051", "[::1]:50052")
    assert (config.monitor.screen, config.algorithm.kl.where) == ("off", "off")
    assert (config.device, config.engine.sleep) == ("cuda:3", True)
    changed = load_config("frozen_lake", ["algorithm=dapo", "algorithm.loss.clip_high=0.3"])
    assert (changed.algorithm.preset, changed.algorithm.to_dict()["loss"]["clip_high"]) == ("dapo", 0.3)


def test_a_mistyped_configuration_gets_the_nearest_name_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("sokobann")
    meant = "no configuration 'sokobann'; did you mean sokoban or sokoban_llm or visual_sokoban? (a YAML file"
    assert str(refused.value).startswith(meant)


def test_another_preset_takes_the_place_of_a_bases_algorithm(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: frozen_lake\nalgorithm: {preset: starpo-grpo, epochs: 2}\n")
    given = {"algorithm": {"preset": "starpo-grpo", "epochs": 2}}
    assert load_config(str(file)).algorithm == parse_config(given).algorithm
    file.write_text("base: frozen_lake\nalgorithm: {epochs: 2}\n")
    assert load_config(str(file)).algorithm.filter == load_config("frozen_lake").algorithm.filter


def test_another_estimator_drops_the_keys_of_the_old_one(tmp_path: Path) -> None:
    saved, mine = tmp_path / "saved.yaml", tmp_path / "mine.yaml"
    saved.write_text(yaml.safe_dump(load_config("webshop_gigpo", ["algorithm.advantage.weight=2"]).to_dict()))
    mine.write_text(f"base: {saved}\nalgorithm: {{advantage: grpo}}\n")
    for config in (load_config(str(saved), ["algorithm.advantage=grpo"]), load_config(str(mine))):
        assert config.algorithm.advantage.kind == "grpo"
    with pytest.raises(ConfigError, match=r"algorithm\.advantage\.weight belongs to gigpo"):
        load_config(str(saved), ["algorithm.advantage=grpo", "algorithm.advantage.weight=1"])


def test_a_word_for_a_section_keeps_what_other_words_say_of_it() -> None:
    words = [
        "algorithm.advantage.lam=0.9",
        "environment.options.size=3",
        "algorithm=starpo-ppo",
        "environment=frozen_lake-v1",
    ]
    for given in (words, words[::-1]):
        config = load_config("frozen_lake", given)
        assert (config.algorithm.preset, config.algorithm.to_dict()["advantage"]["lam"]) == ("starpo-ppo", 0.9)
        assert config.environment.options["size"] == 3


def test_a_resolved_configuration_can_be_given_again(tmp_path: Path) -> None:
    config = load_config("sokoban", ["algorithm=gigpo"])
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()))
    assert load_config(str(file)) == config
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["collect.gruops=4"], "no key 'collect.gruops'; did you mean groups"),
        (["stop=3"], "stop: is a section of keys, such as stop.iterations, and cannot be 3"),
        (
            ["algorithm.filter=top_k"],
            "algorithm.filter: no strategy 'top_k'; did you mean top_p?",
        ),
        (["colect.groups=4"], "no key 'colect'; did you mean collect"),
        (["algorithm=starpo-x"], "no algorithm preset 'starpo-x'"),
        (
            ["algorithm=dapo", "algorithm.advantage.lam=0.9"],
            "lam belongs to gae, bilevel_gae, and algorithm.advantage is",
        ),
        (["collect.groups=many"], "collect.groups"),
        (["collect.min_group_size=9"], "every group would be dropped"),
        (["algorithm=starpo-grpo", "collect.group_size=1", "collect.min_group_size=1"], "group_size to at least 2"),
        (
            "algorithm=starpo-s algorithm.filter.strategy=top_p collect.group_size=1 collect.min_group_size=1".split(),
            "every group of one",
        ),
        (["algorithm=seeupo", "collect.search.strategy=pivots"], "reverse_turns takes a step for each turn of whole"),
        (["evaluation.episodes=20000"], "fewer than the 20000 episodes"),
        (["sampling.top_p=0.9"], "another distribution"),
        (["sampling.max_reply_tokens=8", "sampling.min_reply_tokens=9"], "than max_reply_tokens 8"),
        (["sampling.max_episode_tokens=8", "sampling.min_reply_tokens=8"], "no token for a prompt"),
        (["algorithm.advantage=terms"], "which is empty: give some"),
        (["algorithm.advantage.terms=[{scale: std}]"], "set algorithm.advantage to terms"),
        (
            ["algorithm.advantage={kind: terms, terms: [{scael: std}]}"],
            "'algorithm.advantage.terms.0.scael'; did you mean scale",
        ),
        (
            ["algorithm.advantage={kind: terms, terms: [{score: met}]}"],
            "advantage.terms.0: a term of unit episode",
        ),
        (
            [
                "rewards.format_penalty=-0.1",
                "algorithm.advantage=terms",
                "algorithm.advantage.terms=[{parts: [formt]}]",
            ],
            "which nothing pays; did you mean format",
        ),
        (
            ["algorithm=dapo", "algorithm.advantage=cm2_turn", "collect.group_size=8"],
            "scores the reward part criteria, which nothing pays",
        ),
        (["algorithm=dapo", "algorithm.advantage=cm2_step", "collect.group_size=4"], "group_size to at least 5"),
        (["algorithm.advantage=cm2_step", "algorithm.kl.where=reward"], "reads only parts of it"),
        (
            ["algorithm.advantage={kind: terms, terms: [{scale: std}]}", "algorithm.whiten=true"],
            "normalise twice",
        ),
        (["environment.certificate=c.pem", "environment.key=k.pem"], "would not be encrypted"),
        (["environment.ca=ca.pem", "environment.certificate=c.pem"], "are given together"),
        (["environment.addresses=[a:1]", "environment.workers=4"], "names running servers"),
        (["environment.addresses=[a:1]", "environment.serve=[--x]"], "names running servers"),
        (["device=mps"], "give auto, cpu, cuda, or cuda:0"),
        (
            ["environment.addresses=[http://127.0.0.1:1]"],
            "environment.addresses: 'http://127.0.0.1:1' is not an address: ",
        ),
        (["optimizer.betas=[0.9, 1]"], "optimizer.betas.1: Input should be less than 1"),
        (["collect.search.strategy=best_of", "environment.starts=saved.jsonl"], "environment.starts at others"),
        (["engine.sleep=true"], "engine.sleep is for engine.name=vllm"),
        (["engine=vllm", "engine.sleep=true", "collect.max_staleness=1"], "samples during updates"),
        (["sampling.stop=[x]", "collect.agent.command=[python]"], "drop sampling.stop, or collect.agent.command"),
        (["stop.iterations"], "key=value"),
        (["stop.iterations=[1"], "not YAML"),
        (["seed.x=1"], "seed: Input should be a valid integer"),
    ],
)
def test_mistakes_are_reported(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("frozen_lake", words)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_terms_that_are_written_out_are_the_estimator_of_that_name() -> None:
    words = [
        "algorithm.advantage=terms",
        "algorithm.advantage.terms=[{}, {unit: turn, score: to_go, key: [state], gamma: 0.95}]",
    ]
    written, named = (load_config("frozen_lake", given).algorithm for given in (words, ["algorithm.advantage=gigpo"]))
    assert written.credit_terms == named.credit_terms
    assert written.needs_state_key and not written.needs_critic and not written.whiten
    assert AlgorithmConfig.model_validate(written.to_dict()) == written
    assert load_config("frozen_lake", ["algorithm.advantage={kind: terms, terms: [{}]}", "algorithm.whiten=true"])


def test_files_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="frozen_lake"):
        load_config("frozen_lak")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="keys and values"):
        load_config(str(tmp_path / "list.yaml"))
    (tmp_path / "torn.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(str(tmp_path / "torn.yaml"))
    for wrong in ("", "3", "[a]"):
        (tmp_path / "section.yaml").write_text(f"base: frozen_lake\nalgorithm: {wrong}\n")
        with pytest.raises(ConfigError, match="algorithm: "):
            load_config(str(tmp_path / "section.yaml"))
    (tmp_path / "one.yaml").write_text("base: two.yaml\n")
    (tmp_path / "two.yaml").write_text("base: one.yaml\n")
    with pytest.raises(ConfigError, match="leads back to this file"):
        load_config(str(tmp_path / "one.yaml"))


@pytest.mark.parametrize("fast", ["bfloat16", "float32"])
def test_auto_is_the_dtype_that_the_device_is_fast_in(monkeypatch: pytest.MonkeyPatch, fast: str) -> None:
    asked: list[str] = []
    monkeypatch.setattr("starpod.trainer.models.precision.fast_dtype", lambda device: asked.append(device) or fast)
    config = load_config("bandit_llm", ["device=cpu"])
    assert (config.model.dtype, config.model.float32_logits, asked) == (fast, fast == "bfloat16", ["cpu"])
    assert parse_config(config.to_dict()) == config
    lora = ["model.lora.rank=4", "model.base_dtype=bfloat16", "optimizer.lr=1e-5"]
    assert load_config("bandit_llm", lora).model.base_dtype == fast
    assert load_config("bandit_llm", ["model.dtype=bfloat16"]).model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.tiny.image={}"], "the model has no image input: set model.tiny.image.rows"),
        (["engine=vllm"], "engine.name vllm does not support them: set it to torch$"),
        (
            ["model=org/eyes", "engine=vllm_remote", "engine.urls=[http://127.0.0.1:1]"],
            "engine.name vllm_remote does not support them: set it to torch or vllm$",
        ),
        (["script.name=attempts"], "script.name attempts does not support them"),
        (["prompt.context=single_turn"], "puts all turns in one message"),
        (["collect.agent.command=[x]"], "programs do not see them"),
    ],
)
def test_images_are_refused_where_they_would_be_lost(words: list[str], message: str) -> None:
    assert load_config("visual_lake").prompt.shows_images
    with pytest.raises(ConfigError, match=message):
        load_config("visual_lake", words)


def test_another_context_drops_the_window_of_the_old_one(tmp_path: Path) -> None:
    below, above = tmp_path / "below.yaml", tmp_path / "above.yaml"
    below.write_text("base: tiny\nprompt: {context: {kind: split, window: 4, overlap: 2}}\n")
    above.write_text("base: below.yaml\nprompt: {context: full}\n")
    several = "environments={lake: {id: frozen_lake-v1, prompt: {context: full}}}"
    split = "environments={lake: {id: frozen_lake-v1, prompt: {context: {kind: split, window: 4, overlap: 2}}}}"
    for config in (load_config(str(below), ["prompt.context=full"]), load_config(str(above))):
        assert config.prompt.context == FullContext()
    assert load_config(str(below), [several]).tasks[0].prompt.context == FullContext()
    assert load_config(str(below), ["prompt.context=split"]).prompt.context.window == 4
    below.write_text(f"base: tiny\n{split.replace('=', ': ', 1)}\n")
    lake = load_config(str(below), ["environments.lake.prompt.context=single_turn"]).tasks[0]
    assert lake.prompt.context.kind == "single_turn"
