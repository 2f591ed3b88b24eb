"""LoRA: checkpoints hold adapters alone, the reference is no second model, and what is frozen may be kept rounded."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.checkpoints.checkpoint import Checkpoints, load_checkpoint
from starpod.trainer.configuration.optimizer import OptimizerConfig
from starpod.trainer.engines.base import Request
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.engines.weights import weights_of
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import CriticKind, Policy, build_policy
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.update import PolicyTrainer
from tests.trainer.models.test_policy import a_batch
from tests.trainer.models.tiny_policy import tiny_policy
from tests.trainer.tiny_learner import VERSION, group_of, learner_of

WITH_KL = AlgorithmConfig.model_validate({"preset": "starpo-ppo", "kl": {"where": "loss", "coefficient": 0.1}})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    tiny_policy().save(folder)
    return folder


def adapted(base: Path, critic: CriticKind = "none", *, seed: int = 0, **more: object) -> Policy:
    config = ModelConfig.model_validate({"name": str(base), "lora": {"rank": 2}, **more})
    return build_policy(config, texts=None, critic=critic, seed=seed)


def make_trainer(policy: Policy) -> PolicyTrainer:
    def refuse() -> Policy:
        raise AssertionError("with adapters the reference is no second model")

    config = OptimizerConfig(lr=0.01, critic_lr=0.01)
    return PolicyTrainer(policy, WITH_KL, config, Parallel(), max_length=64, make_reference=refuse)


def train(trainer: PolicyTrainer, steps: int) -> list[float]:
    groups = [group_of(trainer.policy, 0, (1.0, 0.0))]
    return [learner_of(trainer).learn(groups, version=VERSION - 1)["policy/kl"] for _ in range(steps)]


def told(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.score(*a_batch(policy)).logprobs_N


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_checkpoint_holds_what_is_trained_alone_and_continues_bit_for_bit(
    base: Path, tmp_path: Path, critic: CriticKind
) -> None:
    trainer = make_trainer(adapted(base, critic))
    train(trainer, 1)
    trainer.freeze_reference(None)
    train(trainer, 1)
    optimizer, values = trainer.state()
    tensors = {"policy": trainer.policy_state(), "reference": trainer.reference_state(), "optimizer": optimizer}
    trained = {name for name, parameter in trainer.policy.named_parameters() if parameter.requires_grad}
    assert tensors["policy"].keys() == trained
    assert all(("lora_" in name and "lm_head" not in name) or name.startswith("critic.head") for name in trained)
    assert tensors["reference"].keys() == {name for name in trained if name.startswith("model.")}
    numbers = sum(parameter.numel() for parameter in trainer.policy.parameters() if parameter.requires_grad)
    # Two moments of each and a counter of steps.
    assert sum(tensor.numel() for tensor in optimizer.values()) == 2 * numbers + len(trained)
    path = Checkpoints(tmp_path).save(1, tensors, {"trainer": values})
    onward = train(trainer, 1)

    again = make_trainer(adapted(base, critic))
    loaded = load_checkpoint(path)
    again.load_policy(loaded.tensors["policy"])
    again.freeze_reference(loaded.tensors["reference"])
    again.load_state(loaded.tensors["optimizer"], loaded.state["trainer"])
    assert train(again, 1) == onward
    assert torch.equal(told(again.policy), told(trainer.policy))


def test_a_checkpoint_of_another_model_is_refused(base: Path) -> None:
    policy = adapted(base)
    state = make_trainer(adapted(base)).policy_state()
    name = min(state)
    again = make_trainer(adapted(base, seed=1))
    again.load_policy(policy.state_dict())  # a checkpoint of all weights is read too
    assert torch.equal(told(again.policy), told(policy))
    with pytest.raises(ValueError, match="is in one of them only"):
        make_trainer(policy).load_policy({key: value for key, value in state.items() if key != name})
    with pytest.raises(ValueError, match=r"has the shape \[3\]"):
        make_trainer(policy).load_policy(state | {name: torch.zeros(3)})


def test_the_reference_is_the_model_that_training_began_from_or_what_a_warm_start_came_to(base: Path) -> None:
    for warm in (0, 1):
        trainer = make_trainer(adapted(base, "shared"))
        train(trainer, warm)
        trainer.freeze_reference(None)
        began = told(trainer.policy)
        plain = told(build_policy(ModelConfig(name=str(base)), texts=None, critic="none", seed=0))
        assert torch.equal(began, plain) == (not warm)
        train(trainer, 1)
        before = {name: tensor.clone() for name, tensor in trainer.policy.state_dict().items()}
        assert trainer.reference is not None
        with torch.no_grad():
            reference = trainer.reference.score(*a_batch(trainer.policy), temperature=1.0).logprobs_N
        assert torch.equal(reference, began) and not torch.allclose(reference, told(trainer.policy))
        assert all(torch.equal(before[name], tensor) for name, tensor in trainer.policy.state_dict().items())


async def test_what_is_frozen_may_be_kept_in_bfloat16(base: Path) -> None:
    kept, half = (adapted(base, dtype="bfloat16", base_dtype=name) for name in ("float32", "bfloat16"))
    for policy in (kept, half):
        torch.manual_seed(0)
        for name, parameter in policy.named_parameters():
            assert parameter.dtype == (torch.bfloat16 if policy is half and "lora_" not in name else torch.float32)
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    # A pass rounds the weights anyway.
    torch.testing.assert_close(told(half), told(kept), atol=0.05, rtol=0)
    half.score(*a_batch(half)).logprobs_N.sum().backward()
    assert {parameter.grad.dtype for parameter in half.parameters() if parameter.grad is not None} == {torch.float32}
    handed, whole = dict(weights_of(half.model)), dict(weights_of(kept.model))
    for name, weight in whole.items():
        torch.testing.assert_close(handed[name], weight, atol=0.01, rtol=0.01)
    engine = TorchEngine(half, slots=1, max_context=32)
    shared = {parameter.data_ptr() for parameter in engine._model.parameters()}
    frozen = half.frozen()
    assert all(p.data_ptr() in shared for name, p in half.named_parameters() if name in frozen)
    reply = await engine.generate(Request(prompt=[5, 9, 3], max_tokens=4, stop=frozenset()))
    tokens = torch.tensor([[5, 9, 3, *reply.tokens]])
    sampled = torch.arange(tokens.shape[1])[None] >= 3
    with torch.no_grad():
        scored = half.score(tokens, torch.tensor([tokens.shape[1]]), sampled).logprobs_N
    torch.testing.assert_close(torch.tensor(reply.logprobs), scored, atol=0.1, rtol=0)
    await engine.close()


@pytest.mark.parametrize("more", [{"dtype": "bfloat16"}, {"lora": {"rank": 2}}])
def test_weights_that_are_trained_are_not_kept_in_bfloat16(more: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="base_dtype bfloat16 is for frozen weights"):
        ModelConfig.model_validate({"name": "x/y", "base_dtype": "bfloat16", **more})
