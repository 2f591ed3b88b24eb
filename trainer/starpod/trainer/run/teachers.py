"""Teachers of on-policy distillation: what gives the log-probabilities that a policy's own tokens are compared with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from starpod.trainer.algorithms.distillation import Judge, ModelTeacher, Score, SelfTeacher, Teaching, VllmTeacher
from starpod.trainer.checkpoints.checkpoint import CheckpointError
from starpod.trainer.checkpoints.trained import find_checkpoint, initial_of, is_run_or_checkpoint, load_trained
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.batch import Batch, RolloutBatch
from starpod.trainer.data.images import by_key
from starpod.trainer.data.sample import Sample
from starpod.trainer.engines.base import EngineError
from starpod.trainer.models.config import TINY, LoraConfig, ModelConfig, ModelError
from starpod.trainer.models.hf import load_tokenizer
from starpod.trainer.models.policy import Policy, build_policy
from starpod.trainer.models.precision import round_weights
from starpod.trainer.parallel import sharding
from starpod.trainer.parallel.ranks import Parallel

KEY = "algorithm.distillation"
CALLS_AT_ONCE = 32
"""Number of requests that a rank keeps in flight at a vLLM server."""
IDS_OF_PROBE = 1024
"""Number of ids in each text by which a server's tokenizer is compared."""


class LoadedJudge(Judge):
    """A frozen model, sharded among the ranks as the policy is."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def logprobs(self, score: Score, batch: Batch, table: RolloutBatch, mask_BT: Tensor) -> Tensor:
        return score(batch, mask_BT=mask_BT, model=self.policy)


class HintedJudge(Judge):
    """The policy itself, which reads the expert's move. Where the expert has none, it agrees with the policy."""

    def logprobs(self, score: Score, batch: Batch, table: RolloutBatch, mask_BT: Tensor) -> Tensor:
        logprobs_BT = table.old_logprobs_BT.clone()
        samples, places = [], []
        for row, episode in enumerate(batch.episodes):
            images, start = by_key(turn.image for turn in episode.turns), 0
            for turn in episode.own_turns:
                if turn.hinted and turn.reply:
                    samples.append(Sample.of(turn.hinted, turn.reply, images))
                    places.append((row, slice(start, start + len(turn.reply))))
                start += len(turn.reply)
        if samples:
            hinted_ST = score(Batch.from_samples(samples, batch.device))
            for (row, columns), hinted_T in zip(places, hinted_ST, strict=True):
                logprobs_BT[row, columns] = hinted_T[: columns.stop - columns.start]
        return logprobs_BT


class ServedJudge(Judge):
    """A model on a vLLM server. Each rank asks for a share of the samples.

    Raises ConfigError if the server cannot be used or has another tokenizer.
    """

    def __init__(self, settings: VllmTeacher, tokenizer: PreTrainedTokenizerBase, parallel: Parallel) -> None:
        self._parallel = parallel
        self._url = settings.url.rstrip("/").removesuffix("/v1")
        try:
            key = Path(settings.api_key_file).read_text("utf-8-sig").strip() if settings.api_key_file else "none"
            self._client = openai.OpenAI(base_url=self._url, api_key=key, max_retries=4)
            self._model = self._call("/v1/models")["data"][0]["id"]
            self._compare(tokenizer)
        except OSError as error:
            raise ConfigError(f"{KEY}.api_key_file cannot be read: {error}") from None
        except (EngineError, LookupError, TypeError) as error:
            raise ConfigError(f"{KEY}.url {self._url} is no vLLM server that can teach: {error}") from None

    def logprobs(self, score: Score, batch: Batch, table: RolloutBatch, mask_BT: Tensor) -> Tensor:
        samples = [sample for row_samples in batch.samples for sample in row_samples]

        def ask_share() -> list[list[float]]:
            with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
                return list(pool.map(self._ask, samples[self._parallel.rank :: self._parallel.world]))

        shares = [iter(answers) for answers in self._parallel.do_together(ask_share)]
        answers = (next(shares[index % len(shares)]) for index in range(len(samples)))
        return batch.rows([[p for _ in row_samples for p in next(answers)] for row_samples in batch.samples])

    def _ask(self, sample: Sample) -> list[float]:
        """Return the server's log-probabilities of a sample's sampled tokens. Raises EngineError."""
        if not any(sample.sampled):
            return []
        reply = self._call("/v1/completions", prompt=sample.tokens, max_tokens=1, prompt_logprobs=0)
        try:
            places = zip(reply["choices"][0]["prompt_logprobs"], sample.tokens, sample.sampled, strict=True)
            return [float(place[str(token)]["logprob"]) for place, token, sampled in places if sampled]
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"the teacher at {self._url} gave no log-probability for each token of a prompt ({error!r})"
            ) from None

    def _compare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise EngineError unless the server encodes the texts of all ids as this tokenizer does."""
        for first in range(0, len(tokenizer), IDS_OF_PROBE):
            text = tokenizer.decode([*range(first, min(first + IDS_OF_PROBE, len(tokenizer)))])
            ids = self._call("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
            if ids != tokenizer.encode(text, add_special_tokens=False):
                raise EngineError(
                    "its tokenizer gives different ids than the policy's: serve a model with the policy's tokenizer"
                )

    def _call(self, path: str, **body: Any) -> Any:
        """Return a decoded reply: of a POST request if there is a body, else of GET. Raises EngineError."""
        try:
            if not body:
                return json.loads(self._client.get(path, cast_to=str))
            return json.loads(self._client.post(path, body={"model": self._model, **body}, cast_to=str))
        except (openai.OpenAIError, ValueError) as error:
            cause = error.__cause__ or error
            raise EngineError(f"the teacher at {self._url} did not answer {path}: {cause}") from error


def make_judge(config: Config, parallel: Parallel) -> Judge | None:
    """Return the run's teacher, ready to judge; None without one.

    Raises ConfigError if it cannot be used, or if its token ids are not the policy's.
    """
    settings = config.teaching
    if isinstance(settings, SelfTeacher):
        return HintedJudge()
    try:
        if isinstance(settings, VllmTeacher):
            return ServedJudge(settings, load_tokenizer(config.model), parallel)
        if isinstance(settings, ModelTeacher):
            return LoadedJudge(_load(settings, config.model, parallel))
    except (ModelError, CheckpointError) as error:
        raise ConfigError(f"{KEY}: {error}") from None
    return None


def model_of_teacher(settings: Teaching, student: ModelConfig) -> ModelConfig | None:
    """Return the model that a run loads as its teacher; None if it loads none. Raises ConfigError."""
    if not isinstance(settings, ModelTeacher):
        return None
    path = Path(settings.model)
    if not is_run_or_checkpoint(path):  # it computes as the policy does
        return student.model_copy(update={"name": settings.model, "revision": "main", "lora": LoraConfig()})
    try:
        checkpoint = find_checkpoint(path, names=())
        values = checkpoint.state["config"]
        model = ModelConfig.model_validate(values["model"])
        model = ModelConfig(name=str(initial_of(checkpoint))) if model.name == TINY else model
    except CheckpointError as error:
        raise ConfigError(f"{KEY}: {error}") from None
    if policies := values.get("script", {}).get("policies"):
        raise ConfigError(
            f"{KEY}.model {path} has a policy for each of {', '.join(policies)}: export one, and name its folder"
        )
    return model


def _load(settings: ModelTeacher, student: ModelConfig, parallel: Parallel) -> Policy:
    """Load a frozen teacher after its tokenizer was compared. Raises ConfigError, ModelError and CheckpointError."""
    model = model_of_teacher(settings, student)
    assert model is not None
    check_ids(load_tokenizer(student).get_vocab(), load_tokenizer(model).get_vocab(), settings.model)
    if is_run_or_checkpoint(path := Path(settings.model)):
        policy = load_trained(path).policies.by_agent[""]
    else:
        policy = build_policy(model, texts=None, critic="none", seed=0)
    policy.requires_grad_(False)
    if parallel.world == 1:  # sharding needs weights of one type
        round_weights(policy.model)
    sharding.shard(policy, parallel.world, parallel.device)
    return policy


def check_ids(student_ids: Mapping[str, int], teacher_ids: Mapping[str, int], teacher: str) -> None:
    """Raise ConfigError unless the teacher's tokenizer has all of the policy's tokens, under the same ids."""
    different = [token for token, id_ in student_ids.items() if teacher_ids.get(token) != id_]
    if different:
        token = min(different, key=lambda each: student_ids[each])
        raise ConfigError(
            f"{KEY}.model {teacher} has a different tokenizer than the policy, so their log-probabilities cannot be "
            f"compared: {token!r} has the id {student_ids[token]} in the policy's and {teacher_ids.get(token, 'none')} "
            "in the teacher's; choose a model and a teacher with the same tokenizer"
        )
