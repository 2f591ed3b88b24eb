"""Export of a trained policy as a Hugging Face folder: weights, tokenizer, settings of prompts, and a model card."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from starpod.trainer.checkpoints.trained import Trained
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.user_file import names_file
from starpod.trainer.configuration.yaml12 import dump_yaml
from starpod.trainer.models.config import GEMMA3, SMOLLM2, TINY, model_title
from starpod.trainer.models.policies import policy_of
from starpod.trainer.models.policy import VALUES, Policy
from starpod.trainer.models.trunk import unwrapped
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.words import outcome
from starpod.trainer.prompts.template import Template
from starpod.trainer.rollout.environment import serve_words

_ON_THE_HUB = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct", GEMMA3: "google/gemma-3-270m"}
"""Names on the Hugging Face hub of models that come with Python packages."""

PRIVATE = {"addresses", "token_file", "ca", "certificate", "key"}
"""Keys of the environment's section that contain addresses and paths of secrets. The model card omits them."""

_SECTIONS = ("seed", "seeds", "prompt", "sampling", "script")
_OF_ENVIRONMENT = ("id", "version", "options", "max_turns", "max_actions_per_turn", "max_actions", "serve")
_OF_EVALUATION = ("temperature", "options")


class ExportError(Exception):
    """The export failed. The message says why."""


def export(trained: Trained, out: Path, *, adapter: bool = False, agent: str = "") -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` can load.

    Args:
        adapter: Export only the LoRA adapter, which needs peft and the base model to load. Otherwise it is merged into
            the weights.
        agent: Agent whose policy is exported, if each agent has a separate policy.

    Raises:
        ExportError: `out` exists, or there is no adapter.
        ModelError: There is no such policy.
    """
    out = Path(out)
    if out.exists():
        raise ExportError(f"{out} already exists; nothing is overwritten")
    policy = policy_of(trained.policies, agent)
    if adapter and unwrapped(policy.model) is policy.model:
        raise ExportError("this model was trained without LoRA: it has no adapter to export")
    _set_generation(policy, float(trained.config["sampling"]["temperature"]))
    temporary = out.parent / f".temporary-{out.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        if adapter:
            policy.model.save_pretrained(temporary)  # type: ignore[operator]
            policy.tokenizer.save_pretrained(temporary)
        else:
            policy.save(temporary, rounded=True)
            _add_settings(trained.config, temporary)
        (temporary / "README.md").write_text(model_card(trained, adapter, agent), encoding="utf-8")
        temporary.rename(out)
    except OSError as error:
        raise ExportError(f"{out} could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_settings(folder: Path) -> Config | None:
    """Return the configuration in an exported folder; None if the folder has none. Raises ConfigError."""
    file = folder / VALUES
    try:
        values = json.loads(file.read_text(encoding="utf-8")).get("run") if file.is_file() else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {type(error).__name__}: {error}; export the run again") from None
    if values is None:
        return None
    for prompt in _prompts(values):
        if names_file(prompt.get("grammar", "")):
            prompt["grammar"] = str(folder.resolve() / prompt["grammar"])
    return parse_config(values)


def _add_settings(config: Mapping[str, Any], folder: Path) -> None:
    """Add the part of a run's configuration that decides what its policy reads and how it answers, in VALUES as `run`.

    `serve` has the arguments of `starpod serve` that host the run's environments; env_server/cli.py reads them. The
    file of a reply grammar is copied into the folder.
    """
    values = {key: config[key] for key in _SECTIONS if key in config}
    values["evaluation"] = _part(config.get("evaluation", {}), _OF_EVALUATION)
    if "script" in config:
        values["script"] = {**config["script"], "policies": []}  # all agents share the folder's policy
    if environments := config.get("environments"):
        values["environments"] = {
            name: _part(environment, (*_OF_ENVIRONMENT, "prompt"))
            | {"evaluation": _part(environment.get("evaluation", {}), _OF_EVALUATION)}
            for name, environment in environments.items()
        }
    else:
        values["environment"] = _part(config["environment"], _OF_ENVIRONMENT)
    values = json.loads(json.dumps(values))  # a copy
    files: dict[str, str] = {}
    for prompt in _prompts(values):
        if names_file(prompt.get("grammar", "")):
            path, _, name = prompt["grammar"].rpartition(":")
            shutil.copyfile(path, folder / files.setdefault(path, f"grammar{len(files) or ''}.py"))
            prompt["grammar"] = f"{files[path]}:{name}"
    content = json.loads((folder / VALUES).read_text(encoding="utf-8"))
    content |= {"serve": serve_words(_environments(config).values()), "run": values}
    (folder / VALUES).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _part(values: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: values[key] for key in keys if key in values}


def _prompts(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the sections `prompt` of a run and of its environments."""
    environments = values.get("environments", {}).values()
    return [section["prompt"] for section in (values, *environments) if "prompt" in section]


def _set_generation(policy: Policy, temperature: float) -> None:
    """Set sampling as in training: at its temperature, to the stops of the chat template, without top-k and penalties.

    The base model's own end of text may be another one than that of its chat template.
    """
    model = unwrapped(policy.model)
    base, pad, stops = model.generation_config, policy.tokenizer.pad_token_id, sorted(Template(policy.tokenizer).stop)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        bos_token_id=base.bos_token_id,
        eos_token_id=stops if len(stops) > 1 else stops[0],
        pad_token_id=pad if base.pad_token_id is None else base.pad_token_id,
    )


def model_card(trained: Trained, adapter: bool = False, agent: str = "") -> str:
    """Return a description of the training, as Markdown with the Hub's metadata. For the arguments see `export`."""
    config = trained.config
    name = config["model"]["name"]
    algorithm = config["algorithm"]["preset"]
    configs = _environments(config)
    names = list(dict.fromkeys(env["id"] for env in configs.values()))
    metadata: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["starpod", "reinforcement-learning", *names],
    }
    if name != TINY:
        metadata["base_model"] = _ON_THE_HUB.get(name, name)
    base = "a small model built from scratch" if name == TINY else model_title(name)
    score = describe_result(trained)
    envs = {name: {key: value for key, value in env.items() if key not in PRIVATE} for name, env in configs.items()}
    public = {**config, **({"environments": envs} if config.get("environments") else {"environment": envs[""]})}
    lines = [
        f"# {config['title'] or ', '.join(names)}",
        "",
        f"An agent for {' and '.join(f'`{name}`' for name in names)}, trained by Starpod with {algorithm} from {base}: "
        f"the policy{f' of `{agent}`' * bool(agent)} after {trained.step} iterations{score and f', {score}'}.",
        "",
        *_usage(configs, adapter),
        "",
        "## How it was trained",
        "",
        *(f"- {key}: {value}" for key, value in _provenance(trained.run).items()),
        "",
        "```yaml",
        dump_yaml(public).strip(),
        "```",
        "",
    ]
    return f"---\n{dump_yaml(metadata)}---\n\n" + "\n".join(lines)


def _environments(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the environments of a run by name, or its only one under ""."""
    return config.get("environments") or {"": config["environment"]}


def describe_result(trained: Trained) -> str:
    """Return the success or return of these weights in words: that of the final evaluation, or else the selection's.

    The selection's is too high, because the checkpoint was chosen by it. Returns "" without an evaluation.
    """
    final = RunFolder(trained.run).read_final()
    if final is not None and final["step"] == trained.step:
        return f"{outcome(final)} of {final['episodes']} episodes in the final evaluation"
    evaluations = {line["step"]: line for line in RunFolder(trained.run).read_evaluations()}
    return f"{outcome(evaluations[trained.step])} on the selection seeds" if trained.step in evaluations else ""


def _usage(environments: Mapping[str, Mapping[str, Any]], adapter: bool) -> list[str]:
    """Return lines with the commands that host the environments and evaluate the folder."""
    if adapter:
        return ["`starpod eval` and `starpod gateway` load merged weights: export the run without `--adapter`."]
    address = "127.0.0.1:50051"
    if any(environment.get("addresses") for environment in environments.values()):
        hosting = [f"With the environment's server at {address}, in this folder:", ""]
    else:
        hosting = ["In this folder:", "", f"    starpod serve {shlex.join(serve_words(environments.values()))}"]
    return [
        *hosting,
        f"    starpod eval . {address} --episodes 256",
        "    starpod gateway .",
        "",
        f"They take prompts, limits and sampling from `{VALUES}`, as in training.",
    ]


def _provenance(run: Path) -> dict[str, str]:
    """Return the run's id, commit and package versions as texts. Facts that run.json lacks are omitted."""
    facts = RunFolder(run).read_facts()
    git, packages = facts.get("git") or {}, facts.get("packages") or {}
    provenance = {
        "run": facts.get("id", ""),
        "code": git.get("commit", "") + (", with changes" if git.get("dirty") else ""),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
    }
    return {key: value for key, value in provenance.items() if value}
