"""Mutual information between prompts and reasoning, after RAGEN-2 (arXiv:2604.06268).

Reasoning Z_i was sampled after prompt X_own(i). L_ij = log p(Z_i | X_j) is its log-probability after prompt j. If
reasoning is no likelier after its own prompt than after the others, the policy recites a template regardless of the
state, even if its entropy is high.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.diagnostics.config import MonitorConfig
from starpod.trainer.prompts.grammar import THINK, THINK_END

Score = Callable[[list[list[int]], list[list[int]]], Sequence[float] | Tensor]
"""Function that returns the log-probability of each continuation after its prompt, in nats, summed over tokens. Its two
lists are parallel."""

RETRIEVAL_DEPTHS = (1, 2, 4, 8)
LOW_SHARE = 0.5
"""Information below this share of its upper bound is low, and so is entropy below this share of its start."""
Regime = Literal["diverse reasoning", "compressed reasoning", "template collapse", "low-entropy collapse"]


@dataclass(frozen=True, slots=True)
class Information:
    """Diagnostics of a set of samples, in nats."""

    mutual_information: float
    """Estimate of I(X; Z), at most `bound`."""
    bound: float
    """Entropy of the prompts; log N for N equally frequent prompts."""
    conditional_entropy: float
    """Conditional entropy of the reasoning, H(Z | X)."""
    entropy: float
    """Entropy of the reasoning, H(Z) = H(Z | X) + I(X; Z)."""
    deviation: float
    """Standard deviation of log p(Z_i) over samples."""
    z_score: float
    """Mutual information divided by a standard deviation; see `information`."""
    retrieval: Mapping[int, float]
    """For k = 1, 2, 4, 8, the share of samples whose own prompt is among the k prompts that make them likeliest."""
    chance: Mapping[int, float]
    """The value of `retrieval` that is expected if the k prompts are chosen at random."""


def information(L_NM: Tensor, prompts_N: Tensor, *, deviation: float | None = None) -> Information:
    """Return the diagnostics of N samples of reasoning under M distinct prompts.

    Identical prompts must be merged into one column, because they would compete with each other in retrieval. p(Z_i)
    weights each prompt by its number of samples. A tie at rank k counts fractionally in retrieval.

    Args:
        L_NM: Log-probability of each sample after each prompt, in nats.
        prompts_N: Column of each sample's own prompt.
        deviation: Divisor of the z-score; None: this batch's deviation.
    """
    L_NM = L_NM.double()
    samples, prompts = L_NM.shape
    weights_M = torch.bincount(prompts_N, minlength=prompts).double() / samples
    conditional_N = L_NM.gather(1, prompts_N[:, None]).squeeze(1)
    marginal_N = torch.logsumexp(L_NM + weights_M.log(), dim=1)
    mutual_information = float((conditional_N - marginal_N).mean())
    spread = float(marginal_N.std(correction=0))
    better_counts_N = torch.gt(L_NM, conditional_N[:, None]).sum(1)
    equal_counts_N = torch.eq(L_NM, conditional_N[:, None]).sum(1)  # includes itself
    return Information(
        mutual_information=mutual_information,
        bound=float(-(weights_M * weights_M.log()).nansum()),
        conditional_entropy=float(-conditional_N.mean()),
        entropy=float(-marginal_N.mean()),
        deviation=spread,
        z_score=mutual_information / ((spread if deviation is None else deviation) + 1e-3),
        retrieval={k: float(((k - better_counts_N) / equal_counts_N).clamp(0, 1).mean()) for k in RETRIEVAL_DEPTHS},
        chance={k: min(k / prompts, 1.0) for k in RETRIEVAL_DEPTHS},
    )


def regime(*, high_entropy: bool, high_information: bool) -> Regime:
    """Return which of four states the reasoning is in: varied or not, and dependent on the prompt or not."""
    if high_information:
        return "diverse reasoning" if high_entropy else "compressed reasoning"
    return "template collapse" if high_entropy else "low-entropy collapse"


@dataclass(frozen=True, slots=True)
class ReasoningSample:
    """The reasoning of one turn."""

    prompt: list[int]
    """Token ids up to and including the opening think tag."""
    reasoning: list[int]
    """Token ids between the tags."""


def reasoning_of(
    turns: Sequence[Turn], index: int, decode: Callable[[list[int]], str], tags: tuple[str, str]
) -> ReasoningSample | None:
    """Return the reasoning of one turn and its context; None if there is none between the tags.

    The opening tag may be prefilled in the prompt or sampled.

    Args:
        decode: Decodes token ids to text, with special tokens.
        tags: Opening and closing tag of the reasoning, as text.
    """
    opening, closing = tags
    reply = turns[index].reply
    text = decode(reply)
    end = text.find(closing)
    if end < 0:
        return None
    start = text.find(opening, 0, end)
    begin = _first(len(reply), lambda count: opening in decode(reply[:count])) if start >= 0 else 0
    # A token that contains both the end of the reasoning and the start of the tag belongs to the tag.
    stop = _first(len(reply), lambda count: len(decode(reply[:count])) > end) - 1
    reasoning = reply[begin:stop]
    if not decode(reasoning).strip():
        return None
    return ReasoningSample(context_of(turns, index) + reply[:begin], reasoning)


def context_of(turns: Sequence[Turn], index: int) -> list[int]:
    """Return all token ids before the reply of turn `index`."""
    first = max(number for number in range(index + 1) if turns[number].fresh or number == 0)
    context: list[int] = []
    for turn in turns[first:index]:
        context += turn.prompt + turn.reply
    return context + turns[index].prompt


def _first(length: int, holds: Callable[[int], bool]) -> int:
    """Return the smallest count up to `length` that meets a monotone condition, by bisection."""
    low, high = 0, length
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def first_turns(episodes: Sequence[Episode], count: int, generator: torch.Generator) -> list[tuple[Episode, int]]:
    """Return first turns from as many different start states as possible.

    Args:
        episodes: Episodes of any groups. Those without a turn are skipped.

    Returns:
        Each turn as its episode and its index, 0.
    """
    candidates = _shuffled([episode for episode in episodes if episode.turns], generator)
    counts: dict[int, int] = {}
    rounds = []
    for episode in candidates:
        rounds.append(counts.get(episode.group, 0))
        counts[episode.group] = rounds[-1] + 1
    order = sorted(range(len(candidates)), key=rounds.__getitem__)
    return [(candidates[index], 0) for index in order[:count]]


def random_turns(episodes: Sequence[Episode], count: int, generator: torch.Generator) -> list[tuple[Episode, int]]:
    """Return one random turn from each of some random episodes.

    Args:
        episodes: Episodes of any groups. Those without a turn are skipped.

    Returns:
        Each turn as its episode and its index.
    """
    selection = _shuffled([episode for episode in episodes if episode.turns], generator)[:count]
    return [(e, int(torch.randint(len(e.turns), (), generator=generator))) for e in selection]


def _shuffled(episodes: Sequence[Episode], generator: torch.Generator) -> list[Episode]:
    return [episodes[index] for index in torch.randperm(len(episodes), generator=generator).tolist()]


@dataclass(slots=True)
class _History:
    """Values kept between measurements."""

    deviation: dict[str, float] = field(default_factory=dict)
    """Moving average of the deviation, by form ("sum" or "mean")."""
    start: float | None = None
    """Conditional entropy per token at the first measurement."""


class InformationProbe:
    """Periodic measurement, with the moving averages that the z-score and the regime need.

    Attributes:
        regimes: The latest regime by sampler: "first_turn", "random_turn".
    """

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config.information
        self._histories: dict[str, _History] = {}
        self.regimes: dict[str, Regime] = {}

    def due(self, step: int) -> bool:
        """Return whether to measure at this step: at step 1 and at every multiple of `every`."""
        return self._config.every > 0 and (step == 1 or step % self._config.every == 0)

    def measure(
        self,
        episodes: Sequence[Episode],
        score: Score,
        decode: Callable[[list[int]], str],
        generator: torch.Generator,
    ) -> dict[str, float]:
        """Return metrics `information/<sampler>/...`; empty if no turn has reasoning.

        Values are in nats per reasoning. Those under `per_token_` use log-probabilities divided by the number of
        tokens, so that long reasoning does not dominate.

        Args:
            decode: Decodes token ids to text, with special tokens.
        """
        samplers = {"first_turn": first_turns} | ({"random_turn": random_turns} if self._config.random_turns else {})
        metrics: dict[str, float] = {}
        for name, sampler in samplers.items():
            turns = sampler(episodes, self._config.samples, generator)
            samples = [reasoning_of(episode.turns, index, decode, (THINK, THINK_END)) for episode, index in turns]
            valid_samples = [sample for sample in samples if sample is not None]
            if samples:
                metrics[f"information/{name}/valid_thinking_rate"] = len(valid_samples) / len(samples)
            if len(valid_samples) > 1:
                metrics |= self._measure(name, valid_samples, score)
        return metrics

    def _measure(self, name: str, samples: Sequence[ReasoningSample], score: Score) -> dict[str, float]:
        prompts: dict[tuple[int, ...], int] = {}
        own_N = torch.tensor([prompts.setdefault(tuple(sample.prompt), len(prompts)) for sample in samples])
        columns = [list(prompt) for prompt in prompts]
        logprobs = score(columns * len(samples), [sample.reasoning for sample in samples for _ in columns])
        L_NM = torch.as_tensor(logprobs, dtype=torch.float64).reshape(len(samples), len(columns))
        lengths_N = torch.tensor([len(sample.reasoning) for sample in samples])
        history = self._histories.setdefault(name, _History())
        results = {
            "": self._smoothed(history, "sum", L_NM, own_N),
            "per_token_": self._smoothed(history, "mean", L_NM / lengths_N[:, None], own_N),
        }
        metrics = {"prompts": float(len(columns)), "samples": float(len(samples))}
        for form, (result, z_score_ema) in results.items():
            metrics |= {
                f"{form}mutual_information": result.mutual_information,
                f"{form}conditional_entropy": result.conditional_entropy,
                f"{form}entropy": result.entropy,
                f"{form}z_score": result.z_score,
                f"{form}z_score_ema": z_score_ema,
            }
        per_reasoning, per_token = results[""][0], results["per_token_"][0]
        metrics["bound"] = per_reasoning.bound
        for depth, share in per_reasoning.retrieval.items():
            metrics[f"retrieval_at_{depth}"] = share
            metrics[f"retrieval_at_{depth}_above_chance"] = share - per_reasoning.chance[depth]
        history.start = per_token.conditional_entropy if history.start is None else history.start
        self.regimes[name] = regime(
            high_entropy=per_token.conditional_entropy >= LOW_SHARE * history.start,
            high_information=per_reasoning.mutual_information >= LOW_SHARE * per_reasoning.bound,
        )
        return {f"information/{name}/{key}": value for key, value in metrics.items() if math.isfinite(value)}

    def _smoothed(self, history: _History, form: str, L_NM: Tensor, prompts_N: Tensor) -> tuple[Information, float]:
        result = information(L_NM, prompts_N)
        average = history.deviation.get(form, result.deviation)
        history.deviation[form] = self._config.decay * average + (1 - self._config.decay) * result.deviation
        return result, information(L_NM, prompts_N, deviation=history.deviation[form]).z_score

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {name: asdict(history) for name, history in self._histories.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._histories = {name: _History(dict(v["deviation"]), v["start"]) for name, v in state.items()}
