"""Exported folders: transformers loads them, and they say the same as the trained policy."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from starpod.cli.main import starpod
from starpod.trainer.agents.pretrained import find_pretrained
from starpod.trainer.checkpoints.checkpoint import CheckpointError, Checkpoints
from starpod.trainer.checkpoints.config import CheckpointConfig
from starpod.trainer.checkpoints.export import ExportError, export, model_card
from starpod.trainer.checkpoints.state import join_parts
from starpod.trainer.checkpoints.trained import is_run_or_checkpoint, load_trained
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.models.config import LoraConfig, ModelConfig, ModelError, TinyConfig
from starpod.trainer.models.policies import Policies, policy_of
from starpod.trainer.models.policy import Policy, build_policy, load_policy
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.parallel import sharding
from tests.trainer.chat_templates import tokenizer

TEXTS = ["The goal is at (2, 3). Left || Right", "a hole is below you"]
MESSAGES = [{"role": "user", "content": "The goal is at (2, 3)."}]


def shake(policy: Policy, seed: int) -> None:
    """Change the weights, like training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def save(run: Path, policy: Policy, step: int, score: float | None = None) -> Path:
    config = {
        "title": "FrozenLake, tiny",
        "model": policy.config.to_dict(),
        "environment": {"id": "frozen_lake-v1", "token_file": "/secret/place"},
        "algorithm": {"preset": "starpo-s"},
        "sampling": {"temperature": 0.7},
    }
    checkpoints = Checkpoints(run / "checkpoints", CheckpointConfig(keep=9))
    state = sharding.state_dict(policy, without=policy.frozen())
    return checkpoints.save(
        step, {"policy": state}, {"config": config}, score=None if score is None else (score, score)
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of a tiny model with a critic: the checkpoint of step 2 is the best, that of step 3 the newest."""
    folder = tmp_path_factory.mktemp("run")
    shape = TinyConfig(hidden=16, heads=2, intermediate=24, vocabulary=400)
    policy = build_policy(ModelConfig(tiny=shape), texts=TEXTS, critic="shared", seed=0)
    policy.save(folder / "initial")
    for step, score in [(1, 0.2), (2, 0.9), (3, 0.5)]:
        shake(policy, step)
        save(folder, policy, step, score)
        RunFolder(folder).append_evaluation({"step": step, "success": score, "return_mean": 1.0})
    (folder / "run.json").write_text(
        '{"id": "abc", "git": {"commit": "1234", "dirty": true}, "packages": {"torch": "2"}}'
    )
    return folder


@pytest.fixture(scope="module")
def lora_run(run, tmp_path_factory) -> tuple[Path, Policy]:
    folder = tmp_path_factory.mktemp("lora")
    policy = build_policy(
        ModelConfig(name=str(run / "initial"), lora=LoraConfig(rank=2)), texts=None, critic="none", seed=0
    )
    shake(policy, 5)
    save(folder, policy, 1)
    return folder, policy


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=torch.arange(20)[None], use_cache=False).logits
    return result


@pytest.mark.parametrize(("which", "step"), [("best", 2), ("latest", 3)])
def test_transformers_loads_what_was_trained(run, tmp_path, which, step):
    trained = load_trained(run, which)
    assert (trained.step, trained.run, policy_of(trained.policies).critic) == (step, run.resolve(), None)
    out = tmp_path / "new" / "model"
    export(trained, out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(model), logits(policy_of(trained.policies).model))
    assert not torch.allclose(logits(model), logits(load_policy(run / "initial").model))
    tokenizer = AutoTokenizer.from_pretrained(out)
    expected = policy_of(trained.policies).tokenizer
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == expected.apply_chat_template(
        MESSAGES, tokenize=False
    )
    assert tokenizer(TEXTS[0])["input_ids"] == expected(TEXTS[0])["input_ids"]
    settings = GenerationConfig.from_pretrained(out)
    assert (settings.do_sample, settings.temperature, settings.top_k, settings.top_p) == (True, 0.7, 0, 1.0)
    assert settings.eos_token_id == expected.eos_token_id
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "README.md"} <= names
    assert "critic.safetensors" not in names
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_the_card_says_how_it_was_trained(run, tmp_path):
    """The exported policy can be trained further."""
    export(load_trained(run), tmp_path / "model")
    assert torch.equal(
        logits(load_policy(tmp_path / "model").model), logits(policy_of(load_trained(run).policies).model)
    )
    _, front, body = (tmp_path / "model" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["starpod", "reinforcement-learning", "frozen_lake-v1"],
    }
    told = ["# FrozenLake, tiny", "starpo-s", "2 iterations, success 90 % on the selection seeds."]
    told += ["1234, with changes", "torch 2", "hidden: 16"]
    assert [part for part in told if part not in body] == [] and "secret" not in body


def test_the_card_states_the_final_figure_only_for_these_weights(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    final = {"step": 2, "success": 0.72, "success_low": 0.66, "success_high": 0.77, "episodes": 256}
    RunFolder(folder).write_final(final)
    text = model_card(load_trained(folder))
    told = "success 72 % (66 to 77 %) of 256 episodes in the final evaluation"
    assert told in text and "90 %" not in text
    result = CliRunner().invoke(starpod, ["export", str(folder), str(tmp_path / "model")])
    assert result.stdout == f"{tmp_path / 'model'}: the policy after 2 iterations, {told}\n"
    RunFolder(folder).write_final({**final, "step": 1})
    assert "90 %" in model_card(load_trained(folder))


GRAMMAR = """
from starpod.trainer.prompts.grammar import Grammar

class Shout(Grammar):
    def describe(self, actions=None): return "SHOUT"
"""


def test_an_export_is_prompted_as_in_training_and_hosts_its_environment(run, tmp_path):
    """This works without the run's folder and the user's file with the reply grammar."""
    (grammar := tmp_path / "mine.py").write_text(GRAMMAR)
    file = tmp_path / "a vault.py"
    prompt = {"style": "compact", "thinking": False, "context": {"kind": "single_turn", "window": 1}}
    words = {
        "environment": {
            "id": "vault-v1",
            "options": {"marks": 5},
            "max_turns": 7,
            "serve": [str(file)],
            "token_file": "/secret/place",
            "curriculum": {"levels": [{"marks": 3}]},
        },
        "prompt": {**prompt, "grammar": f"{grammar}:Shout"},
        "sampling": {"temperature": 0.7, "max_reply_tokens": 16, "max_episode_tokens": 128},
        "script": {"name": "self_play", "policies": ["x", "o"]},
        "evaluation": {"temperature": 0.2, "reference": ["none"]},
        "rewards": {"shaping": ["gone.py:score"]},
    }
    trained = load_trained(run)
    export(dataclasses.replace(trained, config={**trained.config, **words}), tmp_path / "model")
    grammar.unlink()
    loaded = find_pretrained(str((tmp_path / "model").rename(tmp_path / "moved")))
    assert loaded.config is not None
    assert loaded.config.prompt.make_grammar().describe() == "SHOUT"
    assert loaded.config.prompt.model_dump(include=set(prompt)) == prompt
    assert (loaded.config.sampling.max_reply_tokens, loaded.config.evaluation.temperature) == (16, 0.2)
    assert (loaded.config.environment.max_turns, loaded.config.environment.options) == (7, {"marks": 5})
    assert (loaded.config.script.name, loaded.config.script.policies) == ("self_play", ())
    card, settings = ((tmp_path / "moved" / name).read_text() for name in ("README.md", "starpod.json"))
    assert f"starpod serve vault-v1 '{file}'" in card and "/secret" not in card + settings
    assert json.loads(settings)["serve"] == ["vault-v1", str(file)]
    (tmp_path / "moved/starpod.json").write_text("{")
    with pytest.raises(ConfigError, match=r"starpod\.json cannot be read: JSONDecodeError"):
        find_pretrained(str(tmp_path / "moved"))


def test_generation_ends_at_the_stops_of_the_template(tmp_path):
    """The end of text of a base model is another token than the end of a turn in its template."""
    words = tokenizer("chatml")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = LlamaConfig(vocab_size=len(words), **sizes)
    LlamaForCausalLM(shape).save_pretrained(tmp_path / "base")
    words.save_pretrained(tmp_path / "base")
    policy = build_policy(ModelConfig(name=str(tmp_path / "base")), texts=None, critic="none", seed=1)
    save(tmp_path, policy, 1)
    export(load_trained(tmp_path), tmp_path / "model")
    stops = GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id
    assert set(words.convert_ids_to_tokens(stops)) == {"<|im_end|>", "<|endoftext|>"}


def test_the_card_names_the_model_behind_a_name_of_ours(run):
    trained = load_trained(run)
    config = {**trained.config, "model": {**trained.config["model"], "name": "smollm2"}}
    text = model_card(dataclasses.replace(trained, config=config))
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in text
    assert "from SmolLM2-135M-Instruct, dequantised from Q4_1:" in text


def test_adapters_are_merged_or_stand_alone(lora_run, tmp_path):
    folder, policy = lora_run
    for out, adapter in [(tmp_path / "merged", False), (tmp_path / "adapter", True)]:
        export(load_trained(folder), out, adapter=adapter)
        torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(out)), logits(policy.model))
        assert AutoTokenizer.from_pretrained(out).chat_template == policy.tokenizer.chat_template
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def test_each_agents_adapters_are_its_own_on_a_model_that_they_share(run, tmp_path):
    config = ModelConfig(name=str(run / "initial"), lora=LoraConfig(rank=2))
    policy = Policies.of(("solver", "verifier"), build_policy(config, texts=None, critic="none", seed=0))
    for seed, own in enumerate(policy.by_agent.values()):
        shake(own, seed)
    states = {agent: sharding.state_dict(own, without=own.frozen()) for agent, own in policy.by_agent.items()}
    script = {"name": "solver_verifier", "policies": ["solver", "verifier"]}
    values = {"title": "", "model": config.to_dict(), "environment": {"id": "corridor-v1"}, "script": script}
    values |= {"algorithm": {"preset": "dapo"}, "sampling": {"temperature": 1.0}}
    Checkpoints(tmp_path / "checkpoints").save(1, {"policy": join_parts(states)}, {"config": values})
    trained = load_trained(tmp_path)
    models = {agent: own.model for agent, own in trained.policies.by_agent.items()}
    frozen = [{id(p) for p in model.parameters() if not p.requires_grad} for model in models.values()]
    assert frozen[0] == frozen[1] and frozen[0]
    for agent, own in policy.by_agent.items():
        export(trained, tmp_path / agent, adapter=True, agent=agent)
        torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / agent)), logits(own.model))
        assert torch.equal(logits(models[agent]), logits(own.model))
    assert not torch.allclose(logits(models["solver"]), logits(models["verifier"]))
    for one, agent, words in ((trained, "", "each of solver, verifier"), (load_trained(run), "solver", "share one")):
        with pytest.raises(ModelError, match=words):
            export(one, tmp_path / "none", agent=agent)


def test_what_can_be_loaded(run, tmp_path):
    assert load_trained(run / "checkpoints" / "step-00000001").score == (0.2, 0.2)
    assert is_run_or_checkpoint(run)
    assert is_run_or_checkpoint(run / "checkpoints" / "step-00000001")
    assert not is_run_or_checkpoint(run / "initial")
    with pytest.raises(CheckpointError, match="neither a run's folder"):
        load_trained(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        load_trained(tmp_path)


def test_the_command_overwrites_nothing_and_makes_up_no_adapter(run, tmp_path):
    with pytest.raises(ExportError, match="trained without LoRA"):
        export(load_trained(run), tmp_path / "other", adapter=True)
    assert not list(tmp_path.iterdir())
    out = tmp_path / "model"
    result = CliRunner().invoke(starpod, ["export", str(run), str(out), "--which", "latest"])
    assert (result.exit_code, result.stdout) == (
        0,
        f"{out}: the policy after 3 iterations, success 50 % on the selection seeds\n",
    )
    assert (out / "model.safetensors").exists()
    with pytest.raises(ExportError, match="nothing is overwritten"):
        export(load_trained(run), out)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
