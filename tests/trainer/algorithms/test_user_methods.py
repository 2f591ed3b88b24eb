"""Estimators, losses and reply grammars of a user's file: those of examples/own_methods.py, and what is refused."""

import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from starpod.trainer.algorithms.advantages import compute_advantages
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.user_methods import check_user_methods
from starpod.trainer.commands.train import train
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.user_file import UserCodeError, load
from starpod.trainer.data.updates import token_records
from starpod.trainer.prompts.prompt import PromptConfig
from tests.trainer.algorithms.builders import a_rollout, doubles, loss_of
from tests.trainer.tiny_learner import VERSION, group_of, learner_of, make_trainer

EXAMPLE = "examples/own_methods.py"


def test_sapo_lets_the_gradient_fade() -> None:
    config = AlgorithmConfig(preset="dapo", loss={"kind": f"{EXAMPLE}:sapo", "parameters": {"negative": 2.0}})
    logprobs_BT = doubles([-1.0, math.log(0.5), math.log(0.5), -1.0]).requires_grad_()
    old_BT = doubles([-1.0, math.log(0.25), math.log(0.25), 0.0])  # ratios of 1, 2 and 2
    loss = loss_of(config, logprobs_BT, old_BT, [3.0, 1.0, -1.0, 1.0], mask=[1, 1, 1, 0])
    assert loss.per_token_BT.tolist() == [pytest.approx([-6.0, -4 * 0.731059, 2 * 0.880797, 0])]
    loss.per_token_BT.sum().backward()  # type: ignore[no-untyped-call]
    # -4 rho sigmoid(1 - sigmoid) A, with sigmoid(1) = 0.731059 and sigmoid(2) = 0.880797.
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad.tolist() == [pytest.approx([-3.0, -8 * 0.196612, 8 * 0.104994, 0.0], abs=1e-5)]


def test_an_estimator_may_have_any_statistic() -> None:
    rollout = a_rollout([[0.0, 1.0], [0.0, 0.0], [4.0, 0.0]], groups=[7, 7, 7])
    config = AlgorithmConfig(preset="dapo", advantage={"kind": f"{EXAMPLE}:median", "parameters": {"scale": False}})
    assert compute_advantages(config, rollout).advantages_BT.tolist() == [[0, 0], [-1, -1], [3, 3]]
    scaled = compute_advantages(AlgorithmConfig(preset="dapo", advantage=f"{EXAMPLE}:median"), rollout)
    assert scaled.advantages_BT[:, 0].tolist() == pytest.approx([0, -0.75, 2.25])


def test_a_grammar_reads_what_it_writes() -> None:
    config = PromptConfig(grammar=f"{EXAMPLE}:ReAct")
    config.check_grammar()
    grammar = config.make_grammar(["Up", "Down"])
    parsed = grammar.parse("Thought: the goal is below. Action: down || Jump")
    assert (parsed.thought, parsed.actions, parsed.unknown) == ("the goal is below.", ("Down", "Jump"), ("Jump",))
    assert grammar.cut("Thought: a Action: Up") == [("think", 11), ("answer", 21)]
    assert not grammar.parse("Down").well_formed and config.opening == "Thought:"


def test_files_are_found_again_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    algorithm, prompt = (
        AlgorithmConfig(loss="mine.py:mine", advantage="mine.py:mine"),
        PromptConfig(grammar="mine.py:G"),
    )
    assert (algorithm.loss.kind, algorithm.advantage.kind) == (f"{tmp_path}/mine.py:mine",) * 2
    monkeypatch.chdir("/")
    assert AlgorithmConfig.model_validate(algorithm.to_dict()) == algorithm
    assert PromptConfig.model_validate(prompt.to_dict()) == prompt


BROKEN = """
import torch
from starpod.trainer.algorithms.losses import PolicyLoss
from starpod.trainer.prompts.grammar import Grammar
def scalar(*_, **__): return 0.5
def failing(*_, **__): raise KeyError("values")
def plain(rollout, rewards_BT): return rewards_BT
def mean(rollout, rewards_BT): return rewards_BT - rewards_BT.mean()
def of(loss_BT, mask_BT): return PolicyLoss(loss_BT, ~mask_BT, ~mask_BT, torch.exp(loss_BT))
def nan(p, *_, mask_BT, **__): return of(p / 0 * 0, mask_BT)
def centred(p, *_, mask_BT, **__): return of(p - p.mean(), mask_BT)
def partial(p, *_, mask_BT, **__): return PolicyLoss(p, None, ~mask_BT, p.detach())
class Deaf(Grammar):
    def compose(self, *_): return "<think>hm"
constant = 3
"""


def test_a_file_runs_once_whatever_is_read_from_it(tmp_path: Path) -> None:
    path = tmp_path / "counts.py"
    path.write_text(f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\ndef one(): ...\ndef other(): ...\n")
    assert load("key", f"{path}:one") is load("key", f"{path}:one") and load("key", f"{path}:other")
    assert (tmp_path / "runs").read_text() == "x"
    path = tmp_path / "ends.py"
    path.write_text("def one(): ...\nraise SystemExit(0)\n")
    with pytest.raises(ConfigError, match=r"cannot be loaded: it ends the program, with sys\.exit\(0\) \(.*line 2"):
        load("key", f"{path}:one")


def test_a_method_may_draw_random_numbers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef noisy(rollout, rewards_BT): return torch.rand_like(rewards_BT)"
    )
    check_user_methods(AlgorithmConfig(preset="dapo", advantage=f"{tmp_path}/mine.py:noisy"))


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("algorithm.loss=mine.py:absent", "it defines no absent"),
        ("algorithm.loss=absent.py:sapo", "absent.py:sapo cannot be loaded: FileNotFoundError"),
        ("algorithm.loss=mine.py:constant", "is a int, not a function or a class"),
        ("algorithm.loss=mine.py:scalar", "must return a PolicyLoss"),
        ("algorithm.loss=mine.py:failing", "failed: KeyError: 'values' (mine.py, line 6)"),
        ("algorithm.loss=mine.py:nan", "must return finite losses with finite gradients"),
        ("algorithm.loss=mine.py:centred", "depends on padding"),
        ("algorithm.loss=mine.py:partial", "must return a PolicyLoss of tensors"),
        ("algorithm.advantage=mine.py:mean", "depends on padding"),
        ("algorithm={advantage: {kind: mine.py:plain, parameters: {beta: 1}}}", "unexpected keyword argument 'beta'"),
        ("algorithm={advantage: {kind: grpo, parameters: {beta: 1}}}", "algorithm.advantage is grpo"),
        ("algorithm.loss=ppoo", "no kind 'ppoo'; did you mean ppo"),
        ("algorithm.advantage=gra", "no kind 'gra'"),
        ("prompt.grammar=mine.py:plain", "must be a subclass"),
        ("prompt.grammar=mine.py:Deaf", "does not read its own replies"),
        ("prompt.grammar=jsn", "no reply grammar 'jsn'"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_starts(
    word: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(BROKEN)
    done = CliRunner().invoke(train, ["frozen_lake", word, "--dry-run"])
    output = done.output.replace("\n", " ").replace(f"{tmp_path}/mine", "mine")
    assert done.exit_code == 2 and sentence in output, done.output


def test_a_policy_is_updated_by_an_estimator_and_a_loss_of_a_file(tmp_path: Path) -> None:
    """A loss may return its ratio with a gradient, and the ratio is recorded."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from starpod.trainer.algorithms.losses import PolicyLoss\n"
        "def plain(p, old, advantages, *, mask_BT, turns_BT):\n"
        "    return PolicyLoss(-(p - old).exp() * advantages, ~mask_BT, ~mask_BT, (p - old).exp())\n"
    )
    config = AlgorithmConfig(preset="dapo", advantage=f"{EXAMPLE}:median", loss=f"{file}:plain")
    check_user_methods(config)
    trainer = make_trainer(config)
    learner = learner_of(trainer)
    group = group_of(trainer.policy, 0, (1.0, 0.0, 0.0))
    metrics = learner.learn([group], version=VERSION)
    assert metrics["update/grad_norm"] > 0 and metrics["policy/ratio_max"] == pytest.approx(1.0)
    assert learner.table is not None
    assert all(tokens.ratios == pytest.approx(1.0) for _, tokens in token_records(learner.table))


LATER = """
import torch
from starpod.trainer.algorithms.losses import PolicyLoss
CALLS = [0]
def is_early():
    CALLS[0] += 1
    return CALLS[0] <= 2  # the calls before the run
def short(rollout, rewards_BT): return rewards_BT if is_early() else rewards_BT[:1]
def nan(rollout, rewards_BT): return rewards_BT if is_early() else rewards_BT / 0
def whole(rollout, rewards_BT): return rewards_BT if is_early() else rewards_BT.long()
def writing(rollout, rewards_BT):
    if not is_early(): rollout.mask_BT[0, 0] = False
    return rewards_BT
def of(p, mask_BT): return PolicyLoss(p, ~mask_BT, ~mask_BT, torch.ones_like(p))
def detached(p, *_, mask_BT, **__): return of(p if is_early() else p.detach(), mask_BT)
def steep(p, *_, mask_BT, **__): return of(p if is_early() else (p - p).sqrt(), mask_BT)
def adding(p, old, advantages, *, mask_BT, **__):
    if not is_early(): advantages += 1
    return of(p, mask_BT)
def leaving(p, *_, mask_BT, **__):
    if not is_early(): raise SystemExit(0)
    return of(p, mask_BT)
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("advantage:short", r"must return a tensor of one finite advantage .* returned a tensor \[1, .*line 8\)"),
        ("advantage:nan", r"must return finite advantages; .* NaN or infinite at .*line 9\)"),
        ("advantage:whole", r"returned a tensor .* of torch\.int64.*line 10\)"),
        ("advantage:writing", r"must not write into its argument mask_BT.*line 11\)"),
        ("loss:detached", r"per_token_BT depends on logprobs_BT.*, detached.*line 15\)"),
        ("loss:steep", r"its gradients are NaN or infinite.*line 16\)"),
        ("loss:adding", r"must not write into its argument advantages_BT.*line 17\)"),
        ("loss:leaving", r"failed: it ends the program, with sys\.exit\(0\) .*line 21\)"),
    ],
)
def test_methods_are_checked_at_each_call(name: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LATER)
    key, _, function = name.partition(":")
    config = AlgorithmConfig.model_validate({"preset": "dapo", key: f"{tmp_path}/mine.py:{function}"})
    check_user_methods(config)
    trainer = make_trainer(config)
    with pytest.raises(UserCodeError, match=rf"algorithm\.{key} .*mine\.py:{function} .*{sentence}"):
        learner_of(trainer).learn([group_of(trainer.policy, 0, (1.0, 0.0, 0.0))], version=VERSION)
