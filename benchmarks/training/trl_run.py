"""TRL's GRPOTrainer on the bandit, on our servers. `benchmarks.training.beside_trl` starts it.

python -m benchmarks.training.trl_run SETTINGS.json OUT.json
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from starpod.client.adapters.text import Reader, Setting
from starpod.client.adapters.trl import Rollouts, episode_reward
from starpod.trainer.models.precision import fast_dtype


class SamePrompt(Rollouts):
    """Rollouts with the prompts of Starpod's trainer. They measure the time of sampling and environment together."""

    def __init__(self, setting: Setting, user: str) -> None:
        super().__init__(setting)
        self.user = user
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.prompts: list[int] = []

    async def _open(self, prompts: list[list[dict[str, Any]]]) -> list[Any]:
        episodes = await super()._open(prompts)
        for episode in episodes:
            episode.first = self.user.replace("{observation}", episode.session.observation.text)
        return episodes

    def __call__(self, prompts: list[list[dict[str, Any]]], trainer: Any) -> dict[str, Any]:
        start = perf_counter()
        result = super().__call__(prompts, trainer)
        self.seconds.append(perf_counter() - start)
        self.tokens.append(sum(map(len, result["completion_ids"])))
        self.prompts.append(sum(map(len, result["prompt_ids"])))
        return result


class Clock(TrainerCallback):
    """Callback that measures each iteration, and then saves weights and tokenizer below `weights`, if it is given."""

    def __init__(self, model: Path, weights: Path | None) -> None:
        self.model = model
        self.weights = weights
        self.seconds: list[float] = []
        self.began = perf_counter()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = perf_counter()

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.seconds.append(perf_counter() - self.began)
        if self.weights is not None:
            folder = self.weights / str(len(self.seconds))
            shutil.copytree(self.model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
            model.save_pretrained(folder)
        self.began = perf_counter()


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    # The prompt ends with the beginning of the reply, as in our trainer.
    tokenizer.chat_template += f"{{% if add_generation_prompt %}}{settings['opening']}{{% endif %}}"
    rows = [
        {"prompt": [{"role": "system", "content": settings["system"]}, {"role": "user", "content": "", "seed": seed}]}
        for seed in settings["seeds"]
    ]
    rollouts = SamePrompt(Setting(settings["address"], "bandit-v1", reader=Reader(separator=None)), settings["user"])
    clock = Clock(Path(settings["model"]), Path(settings["weights"]) if settings["weights"] else None)
    size = settings["groups"] * settings["group_size"]
    vllm = settings["engine"] == "vllm"
    liger = vllm and importlib.util.find_spec("liger_kernel") is not None
    trainer = GRPOTrainer(
        settings["model"],
        reward_funcs=[episode_reward],
        args=GRPOConfig(
            str(Path(sys.argv[2]).with_suffix("")),
            max_steps=settings["iterations"],
            per_device_train_batch_size=settings["rows"],
            gradient_accumulation_steps=size // settings["rows"],
            num_generations=settings["group_size"],
            max_completion_length=settings["max_reply_tokens"],
            learning_rate=settings["lr"],
            lr_scheduler_type="constant",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            loss_type="dapo",
            scale_rewards="none",
            bf16=vllm or fast_dtype("cpu") == "bfloat16",
            use_cpu=not vllm,
            use_vllm=vllm,
            vllm_mode="colocate",
            use_liger_kernel=liger,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            seed=settings["seed"],
            model_init_kwargs={"dtype": "float32"},
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=rollouts,
        callbacks=[clock],
    )
    trainer.train()
    success = [entry["starpod/success"] for entry in trainer.state.log_history if "starpod/success" in entry]
    figures = {
        "seconds": clock.seconds,
        "sampling": rollouts.seconds,
        "sampled": rollouts.tokens,
        "prompt_tokens": rollouts.prompts,
        "success": success,
    }
    Path(sys.argv[2]).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
