"""Host any dataset of Reasoning Gym as single-turn episodes: `starpod serve reasoning-gym:leg_counting`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from starpod.env_server.authoring.environment import (
    INVALID,
    Concurrency,
    EnvironmentSpec,
    Limits,
    OptionsError,
    Outcome,
    digest,
)
from starpod.env_server.hosting.hosted import (
    Hosted,
    HostedGame,
    ProbeResult,
    jsonable,
    package_version,
    publish,
    starpod_id,
)
from starpod.env_server.hosting.request import (
    HostingRequest,
    check_arguments,
    constructor,
    fitting,
    nearest,
    options_model,
)
from starpod.v1.values import Action

_OWN_ARGUMENTS = ("seed", "size")
"""Arguments of a dataset that select its questions. The session's seed determines them instead."""
_SEEDS = 2**31
_CONCURRENCY = (Concurrency.PROCESS.value, Concurrency.INLINE.value, Concurrency.THREAD.value)


def host(text: str, probed: str = "") -> type[Hosted[Any]]:
    """Return the environment class for `DATASET?argument=value#setting=value`. Raises HostingError.

    `probed` is the encoded ProbeResult if another process has already probed the environment.
    """
    request = HostingRequest.parse(text, ())
    if request.name not in DATASETS:
        raise request.fail(f"Reasoning Gym has no such dataset{nearest(request.name, DATASETS)}")
    for argument in _OWN_ARGUMENTS:
        if argument in request.arguments:
            raise request.fail(f"{argument} is set by each session's seed")
    dataset_class, configuration = DATASETS[request.name]
    signature = constructor(configuration)
    check_arguments(request, signature)
    factory = QuestionFactory(request)
    probe_result = ProbeResult(**json.loads(probed)) if probed else _probe(factory, dataset_class.__module__)
    spec = EnvironmentSpec(
        id=starpod_id(request, "reasoning", request.name, 1),
        version=probe_result.version,
        title=f"{request.name} of Reasoning Gym",
        instructions="Answer the question. An action is the answer alone, without explanation.",
        grammar="any text: the answer",
        limits=Limits(max_turns=1, max_actions_per_turn=1),
        # Some scorers evaluate the answer as an expression.
        concurrency=Concurrency.PROCESS,
    )
    options = options_model(request, signature, request.arguments, _OWN_ARGUMENTS)
    base = AnsweredEnvironment if probe_result.expert else ReasoningEnvironment
    return publish(base, request, spec, probe_result, dataset_class.__module__, Options=options, factory=factory)


def installed(pattern: str) -> list[str]:
    """Return the datasets whose names match. `*` matches any text."""
    return fitting(pattern, DATASETS)


@dataclass(frozen=True, slots=True)
class QuestionFactory:
    """Factory of questions with the operator's arguments."""

    request: HostingRequest

    def begin(self, options: Mapping[str, Any], seed: int) -> ReasoningQuestion:
        """Create a dataset of size 1 with this seed and return its question. Raises OptionsError or HostingError."""
        arguments = {**self.request.arguments, **options}
        try:
            dataset = reasoning_gym.create_dataset(self.request.name, seed=seed % _SEEDS, size=1, **arguments)
            return ReasoningQuestion(dataset, dataset[0], self.request.number("success_at", 1.0))
        except (AssertionError, ValueError) as error:
            message = f"these arguments make no dataset: {str(error) or type(error).__name__}"
            raise (OptionsError(message) if options else self.request.fail(message)) from error


class ReasoningEnvironment(Hosted["ReasoningQuestion"]):
    """Environment with one question per session. The reward is the dataset's own score of the answer, in [0, 1]."""

    factory: ClassVar[QuestionFactory]

    def begin(self, dynamics_seed: int) -> ReasoningQuestion:
        return self.factory.begin(self.options.model_dump(), self.seed)

    def render(self, mode: str = "text") -> str:
        question = self.game
        answer = f"\n\nAnswered: {question.answered}" if question.answered is not None else ""
        return f"{question.entry['question']}{answer}"

    def state_key(self) -> bytes:
        """Return a digest of the question and of whether it is answered."""
        question = self.game
        return digest(f"{question.answered is not None}:{question.entry['question']}")


class AnsweredEnvironment(ReasoningEnvironment):
    """Environment of a dataset that stores answers."""

    def expert_action(self) -> str | None:
        """Return the dataset's answer, or None if it has none or the question is answered."""
        question = self.game
        answer = question.entry["answer"]
        return None if question.answered is not None or answer is None else str(answer)


class ReasoningQuestion(HostedGame):
    """A question with its answer. `entry` holds question, answer and metadata of the dataset."""

    def __init__(self, dataset: ProceduralDataset, entry: Mapping[str, Any], success_at: float) -> None:
        super().__init__(success_at)
        self.dataset = dataset
        self.entry = entry
        self.answered: str | None = None

    def play(self, action: Action) -> Outcome:
        if not isinstance(action, str):
            return INVALID
        self.answered = action
        info = {"metadata": self.entry.get("metadata", {})}
        try:
            score = float(self.dataset.score_answer(action, self.entry))
        except Exception as error:
            # Several scorers raise on an answer that they cannot read. The policy is responsible: the answer is wrong.
            return self.outcome(0.0, True, info=jsonable({**info, "scorer_raised": f"{type(error).__name__}: {error}"}))
        return self.outcome(score, True, info=jsonable(info))

    def observe(self) -> str:
        return "" if self.answered is not None else str(self.entry["question"])

    def close(self) -> None:
        pass


def _probe(factory: QuestionFactory, module: str) -> ProbeResult:
    """Create one question twice to find out whether the dataset is deterministic.

    It counts as deterministic only if each session has its own process. Several datasets iterate over sets of text,
    whose order is fixed only there.
    """
    request = factory.request
    concurrency = request.choice("concurrency", *_CONCURRENCY)
    first, second = factory.begin({}, 1), factory.begin({}, 1)
    is_deterministic = first.entry == second.entry and concurrency == Concurrency.PROCESS.value
    has_answer = first.entry["answer"] is not None
    return ProbeResult(package_version(module), deterministic=is_deterministic, expert=has_answer).overridden(request)
