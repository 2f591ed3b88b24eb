"""Export of a trained policy as a Hugging Face folder: weights, tokenizer, generation settings and a model card."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import yaml
from transformers import GenerationConfig

from starpod.trainer.checkpoints.trained import Trained
from starpod.trainer.models.config import GEMMA3, SMOLLM2, TINY, model_title
from starpod.trainer.models.policies import policy_of
from starpod.trainer.models.policy import Policy
from starpod.trainer.models.trunk import unwrapped
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.words import with_interval

_ON_THE_HUB = {SMOLLM2: "HuggingFaceTB/SmolLM2-135M-Instruct", GEMMA3: "google/gemma-3-270m"}
"""Names on the Hugging Face hub of models that come with Python packages."""

PRIVATE = {"addresses", "token_file", "ca", "certificate", "key"}
"""Keys of the environment's section that contain addresses and paths of secrets. The model card omits them."""


class ExportError(Exception):
    """The export failed. The message says why."""


def export(trained: Trained, out: Path, *, adapter: bool = False, agent: str = "") -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` can load.

    Args:
        trained: The policy and its run.
        out: Folder to create.
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
        (temporary / "README.md").write_text(model_card(trained, adapter, agent), encoding="utf-8")
        temporary.rename(out)
    except OSError as error:
        raise ExportError(f"{out} could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _set_generation(policy: Policy, temperature: float) -> None:
    """Set plain sampling at the training temperature. The base model's top-k and penalties were off in training."""
    model = unwrapped(policy.model)
    base = model.generation_config
    pad, eos = policy.tokenizer.pad_token_id, policy.tokenizer.eos_token_id
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        bos_token_id=base.bos_token_id,
        eos_token_id=eos if base.eos_token_id is None else base.eos_token_id,
        pad_token_id=pad if base.pad_token_id is None else base.pad_token_id,
    )


def model_card(trained: Trained, adapter: bool = False, agent: str = "") -> str:
    """Return a description of the training, from the run folder. agent: see `export`."""
    config = trained.config
    name = config["model"]["name"]
    algorithm = config["algorithm"]["preset"]
    # A run has several environments by name, or just one without a name.
    configs = config.get("environments") or {"": config["environment"]}
    names = list(dict.fromkeys(env["id"] for env in configs.values()))
    metadata: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["starpod", "reinforcement-learning", *names],
    }
    if name != TINY:
        metadata["base_model"] = _ON_THE_HUB.get(name, name)
    base = "a small model built from scratch" if name == TINY else model_title(name)
    evaluation = RunFolder(trained.run).read_final()
    score = "" if trained.score is None else f" Its success on the selection seeds was {trained.score:.1%}."
    if evaluation is not None and evaluation["step"] == trained.step:
        score = f" Its final evaluation: success {with_interval(evaluation)} of {evaluation['episodes']} episodes."
    envs = {name: {key: value for key, value in env.items() if key not in PRIVATE} for name, env in configs.items()}
    public = {**config, **({"environments": envs} if config.get("environments") else {"environment": envs[""]})}
    lines = [
        f"# {config['title'] or ', '.join(names)}",
        "",
        f"An agent for {' and '.join(f'`{name}`' for name in names)}, trained by Starpod with {algorithm} from {base}: "
        f"the policy{f' of `{agent}`' * bool(agent)} after {trained.step} iterations.{score}",
        "",
        "It answers in the format that it was trained with, one turn of the environment at a time:",
        "",
        "    starpod serve",
        *(
            f"    starpod eval FOLDER 127.0.0.1:50051 --environment {shlex.quote(name)} --episodes 256"
            for name in names
        ),
        "",
        "## How it was trained",
        "",
        *(f"- {key}: {value}" for key, value in _provenance(trained.run).items()),
        "",
        "```yaml",
        yaml.safe_dump(public, sort_keys=False, allow_unicode=True).strip(),
        "```",
        "",
    ]
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n" + "\n".join(lines)


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
