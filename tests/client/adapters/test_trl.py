"""TRL's GRPOTrainer over real servers: tools and conversations, failures left out, tokens as they were sampled."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-adapters")

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from starpod.client.adapters.text import Reader, Setting
from starpod.client.adapters.trl import EnvironmentFactory, Rollouts, StarpodEnvironment, episode_reward, log_episodes
from starpod.client.errors import EnvironmentBug
from tests.client.adapters.sessions import live_sessions
from tests.client.adapters.tiny import Scripted, make_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

REPLY = "<|im_start|>assistant\n"


def config(path: Path, **more: Any) -> GRPOConfig:
    options = {
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 900,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        "seed": 3,
        "loss_type": "grpo",
    }
    return GRPOConfig(str(path), **{**options, **more})


def call(action: str) -> str:
    return f'<tool_call>\n{{"name": "act", "arguments": {json.dumps({"action": action})}}}\n</tool_call>'


def logged(trainer: GRPOTrainer, name: str) -> float:
    (value,) = [entry[name] for entry in trainer.state.log_history if name in entry]
    return float(value)


def test_tools(walk: Setting, tmp_path: Path) -> None:
    """Four members of a group: one earns 1, one 0.5, one never acts, and one fails."""

    def reply(row: int, text: str) -> str:
        if "bug on purpose" in text or text.count(REPLY) > 2 or "is over" in text:
            return "Done."
        return [call("stop"), call("report"), "I will not.", call("Left || bug")][row]

    tokenizer = make_tokenizer()
    model = Scripted.make(tokenizer, reply)
    weights = model.lm_head.weight.clone()
    trainer = GRPOTrainer(
        model,
        reward_funcs=[log_episodes],
        args=config(tmp_path),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "Play."}], "seed": 4}]),
        processing_class=tokenizer,
        environment_factory=EnvironmentFactory(walk),
    )
    trainer.train()
    rewards = trainer._logs["rewards"]["StarpodEnvironment"]
    assert sorted(list(rewards)[:3]) == [0.0, 1.0, 1.0], "the second reports twice: once in each of its two turns"
    assert math.isnan(rewards[3])
    advantages = list(trainer._logs["advantages"])
    assert advantages[3] == 0.0, "a failure pushes nowhere"
    scored = torch.tensor(list(rewards)[:3])
    expected = (scored - scored.mean()) / (scored.std() + 1e-4)
    assert torch.allclose(torch.tensor(advantages[:3]), expected, atol=1e-4), "and is no part of its group's mean"
    assert logged(trainer, "starpod/failed") == 0.25
    assert logged(trainer, "starpod/turns") == pytest.approx(1.0)
    assert not torch.equal(weights, model.lm_head.weight), "the step was taken"
    prompts = {prompt[-1]["content"] for prompt in trainer._logs["prompt"]}
    (prompt,) = prompts
    assert prompt.startswith("Play.\n\n") and "Call the tool act with" in prompt and "at " in prompt
    environments = trainer.environments
    assert isinstance(environments[3].failure, EnvironmentBug)
    assert len({environment.episode.session.dynamics_seed for environment in environments}) == 4
    assert {environment.episode.session.seed for environment in environments} == {4}
    assert environments[0].episode.done


def test_an_environment_is_used_again(walk: Setting) -> None:
    fleet = walk.shared_fleet()
    environment = EnvironmentFactory(walk)()
    environment.reset(seed=1, prompt=[{"role": "user", "content": ""}])
    assert environment.episode is not None
    first = environment.episode.session
    with pytest.raises(EnvironmentBug):
        fleet.run(environment.act("bug"))
    with pytest.raises(EnvironmentBug):
        fleet.run(environment.act("stop"))
    assert environment.get_reward() is None
    assert not environment.reset(seed=2).startswith("\n")
    assert first.closed and environment.failure is None and environment.get_reward() == 0.0
    assert fleet.run(environment.act("Left || stop")).endswith("The episode is over.")
    assert fleet.run(environment.act("Left")) == "The episode is over."
    assert environment.get_reward() == 1.0


async def test_what_a_model_may_call_is_no_failure(walk: Setting) -> None:
    environment = EnvironmentFactory(walk)()
    environment.reset(seed=1)
    odd: list[Any] = [5, None, ["report"], {"a": 1}, "\ud800", "||", ""]
    for action in odd:
        assert (await environment.act(action)).startswith("Your reply held no valid action.")
    ends = await asyncio.gather(*(environment.act(action) for action in ("stop", "Left", "stop")))
    assert [text == "The episode is over." for text in ends] == [False, True, True]
    assert environment.failure is None and environment.get_reward() == 1.0


def test_the_factory_travels_to_other_processes(walk: Setting) -> None:
    factory = EnvironmentFactory(walk)
    assert pickle.loads(pickle.dumps(factory)) == factory


def test_the_factory_keeps_a_reader_of_its_own(walk: Setting) -> None:
    class Shouted(Reader):
        def read(self, reply: str) -> list[Any]:
            return [reply.strip("!")]

    shouted = Setting(walk.addresses, "walk-v1", reader=Shouted())
    environment: StarpodEnvironment = EnvironmentFactory(shouted)()
    environment.reset(seed=1)
    walk.shared_fleet().run(environment.act("stop!"))
    assert environment.get_reward() == 1.0


FIRST = ("<answer>bug</answer>", "<answer>report</answer>…", "<answer>Left</answer>", "<answer>stop</answer>")


def talk(row: int, text: str) -> str:
    """Return a row's text. Members of a group begin differently, and the member that went left then says nothing."""
    said = text.split(REPLY)[1:]
    if len(said) == 1:
        return FIRST[row % 4]
    return "no idea" if len(said) == 2 and "Left" in said[0] else "<answer>stop</answer>"


def make_rollout_trainer(setting: Setting, path: Path, reply: Any = talk, **more: Any) -> GRPOTrainer:
    tokenizer = make_tokenizer()
    prompts = [{"prompt": [{"role": "user", "content": "Play.", "seed": seed}]} for seed in (11, 12)]
    return GRPOTrainer(
        Scripted.make(tokenizer, reply),
        reward_funcs=[episode_reward],
        args=config(path, per_device_train_batch_size=8, shuffle_dataset=False, **more),
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        rollout_func=Rollouts(setting),
    )


def test_conversations(walk: Setting, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Watched(Rollouts):
        def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
            seen.append(super().__call__(prompts, trainer))
            return seen[-1]

    trainer = make_rollout_trainer(walk, tmp_path)
    trainer.rollout_func = Watched(walk)
    weights = trainer.model.lm_head.weight.clone()
    trainer.train()
    (rollout,) = seen
    assert rollout["episode_rewards"] == [None, 1.5, 1.0, 1.0] * 2
    assert [metrics and metrics["misread_turns"] for metrics in rollout["episode_metrics"]] == [None, 0, 1, 0] * 2
    advantages = list(trainer._logs["advantages"])
    assert advantages[0] == advantages[4] == 0.0 and advantages[1] > 0 > advantages[2]
    assert logged(trainer, "starpod/failed") == 0.25
    assert not torch.equal(weights, trainer.model.lm_head.weight)

    tokenizer = trainer.processing_class
    sampled: Counter[tuple[int, ...]] = Counter(tuple(ids) for call in trainer.model.calls for ids in call)
    trained: Counter[tuple[int, ...]] = Counter()
    for prompt, ids, mask, reward in zip(
        rollout["prompt_ids"],
        rollout["completion_ids"],
        rollout["env_mask"],
        rollout["episode_rewards"],
        strict=True,
    ):
        assert len(ids) == len(mask)
        if reward is None:
            assert not any(mask), "nothing of a failed episode is trained"
            continue
        for run in runs_of(ids, mask):
            trained[run] += 1
        messages = read_back(tokenizer.decode([*prompt, *ids]))
        again = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert [*prompt, *ids] == again[: len(prompt) + len(ids)], "the stream is the conversation, rendered whole"
    assert trained == sampled - Counter({run: 2 for run in sampled if "bug" in tokenizer.decode(run)}), (
        "what was sampled is what is trained, token by token"
    )
    starts = [tokenizer.decode(prompt) for prompt in rollout["prompt_ids"]]
    assert len(set(starts[:4])) == len(set(starts[4:])) == 1 and starts[0] != starts[4]


def runs_of(ids: list[int], mask: list[int]) -> list[tuple[int, ...]]:
    """The stretches where the mask is 1."""
    runs: list[tuple[int, ...]] = []
    current: list[int] = []
    for token, bit in zip([*ids, 0], [*mask, 0], strict=True):
        if bit:
            current.append(token)
        elif current:
            runs.append(tuple(current))
            current = []
    return runs


def read_back(text: str) -> list[dict[str, str]]:
    """The messages of a ChatML text."""
    messages = []
    for piece in text.split("<|im_start|>")[1:]:
        role, _, content = piece.partition("\n")
        messages.append({"role": role, "content": content.partition("<|im_end|>")[0]})
    return messages


def test_log_probabilities_are_aligned_with_their_tokens(walk: Setting, tmp_path: Path) -> None:
    trainer = make_rollout_trainer(walk, tmp_path)
    generate = trainer._generate_single_turn

    def with_logprobs(*arguments: Any, **options: Any) -> Any:
        ids, _ = generate(*arguments, **options)
        return ids, [[-float(token) - 1 for token in reply] for reply in ids]

    trainer._generate_single_turn = with_logprobs
    prompts = [[{"role": "user", "content": "", "seed": 1}] for _ in range(4)]
    rollout = Rollouts(walk)(prompts, trainer)
    for ids, mask, logprobs in zip(rollout["completion_ids"], rollout["env_mask"], rollout["logprobs"], strict=True):
        expected = [-float(token) - 1 if bit else 0.0 for token, bit in zip(ids, mask, strict=True)]
        assert logprobs == expected or not any(mask)


def test_a_conversation_without_room_ends_where_it_is(walk: Setting, tmp_path: Path) -> None:
    trainer = make_rollout_trainer(walk, tmp_path, lambda row, text: "<answer>Left</answer>", max_completion_length=200)
    trainer.train()
    assert logged(trainer, "completions/max_length") <= 200
    assert logged(trainer, "starpod/turns") >= 2
    assert logged(trainer, "starpod/failed") == 0


@pytest.mark.parametrize(("room", "earned"), [(30, 1.0), (15, 0.0)])
def test_a_reply_without_room_is_cut_and_then_played(walk: Setting, tmp_path: Path, room: int, earned: float) -> None:
    reply = "<answer>stop</answer> That is all that I have to say."
    trainer = make_rollout_trainer(walk, tmp_path, lambda row, text: reply, max_completion_length=room)
    prompts = [[{"role": "user", "content": "", "seed": 1}] for _ in range(4)]
    before = live_sessions(walk)
    rollout = Rollouts(walk)(prompts, trainer)
    assert [len(ids) for ids in rollout["completion_ids"]] == [room] * 4 and rollout["env_mask"] == [[1] * room] * 4
    assert rollout["episode_rewards"] == [earned] * 4, "actions beyond the trained tokens are not played"
    assert live_sessions(walk) == before


def test_when_everything_fails_the_error_is_raised(walk: Setting, tmp_path: Path) -> None:
    trainer = make_rollout_trainer(walk, tmp_path, lambda row, text: "<answer>bug</answer>")
    with pytest.raises(EnvironmentBug):
        trainer.train()


def test_random_transitions_differ_between_members_and_epochs(walk: Setting) -> None:
    fleet, rollouts = walk.shared_fleet(), Rollouts(walk)

    def seeds(**row: Any) -> list[tuple[int, int]]:
        episodes = fleet.run(rollouts.open([[{"role": "user", "content": "", "seed": 7, **row}]] * 3))
        sessions = [episode.session for episode in episodes]
        fleet.run(fleet.fleet.close_sessions(sessions))
        return [(session.seed, session.dynamics_seed) for session in sessions]

    drawn = seeds() + seeds()
    assert {seed for seed, _ in drawn} == {7} and len({dynamics for _, dynamics in drawn}) == 6
    assert {dynamics for _, dynamics in seeds(dynamics_seed=4)} == {4}


def test_a_template_that_does_not_close_replies_is_refused(walk: Setting, tmp_path: Path) -> None:
    trainer = make_rollout_trainer(walk, tmp_path, lambda row, text: "<answer>Left</answer>")
    trainer.processing_class.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    with pytest.raises(ValueError, match="does not close a reply with an end token"):
        trainer.train()


def test_a_prompt_without_a_seed_is_refused(walk: Setting, tmp_path: Path) -> None:
    trainer = make_rollout_trainer(walk, tmp_path)
    prompts = [[{"role": "user", "content": "Play."}]]
    with pytest.raises(ValueError, match="No seed"):
        Rollouts(walk)(prompts, trainer)
