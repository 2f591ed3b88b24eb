"""Teachers: another model, the policy itself with the expert's move in its prompt, or a vLLM server."""

import contextlib
import copy
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from starpod.client import Fleet, Want
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.distillation import Judge, VllmTeacher
from starpod.trainer.checkpoints.checkpoint import Checkpoints
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import Policy
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.rollout.play import play
from starpod.trainer.run.teachers import HintedJudge, LoadedJudge, ServedJudge, make_judge
from starpod.trainer.update import PolicyTrainer
from tests.trainer.lake import TASK, TEMPLATE, collector, reply
from tests.trainer.models.tiny_policy import tiny_policy
from tests.trainer.scripted_engine import ScriptedEngine
from tests.trainer.tiny_learner import VERSION, built, group_of, learner_of, make_trainer, say, scored_table, turn

ALONE = AlgorithmConfig(
    preset="dr-grpo",
    distillation={"teacher": "model", "model": "somewhere", "reward": False},  # type: ignore[arg-type]
)


def taught_by(teacher: Judge) -> PolicyTrainer:
    trainer = make_trainer(ALONE, lr=3e-3)
    trainer.teacher = teacher
    return trainer


def other_policy() -> Policy:
    policy = copy.deepcopy(built("none"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return policy


@pytest.mark.parametrize("number", [0, 1])
def test_each_token_is_compared_with_the_teachers_and_a_teacher_equal_to_the_policy_teaches_nothing(
    number: int,
) -> None:
    """number: even: the turns share a context; odd: each has one of its own."""
    equal, other = copy.deepcopy(built("none")), other_policy()
    episodes = group_of(equal, number, (1.0, 0.0)).episodes
    trainer = taught_by(LoadedJudge(equal))
    _, table = scored_table(trainer, episodes)
    assert not trainer.estimate(table).advantages_BT.any()
    trainer.teacher = LoadedJudge(other)
    _, table = scored_table(trainer, episodes)
    advantages_BT = trainer.estimate(table).advantages_BT
    for row, episode in enumerate(episodes):
        own, others = (
            [p for each in say(policy, copy.deepcopy(episode)).turns for p in each.logprobs]
            for policy in (equal, other)
        )
        gaps = [theirs - mine for mine, theirs in zip(own, others, strict=True)]
        assert advantages_BT[row, : len(gaps)].tolist() == pytest.approx(gaps, abs=1e-4)
        assert not advantages_BT[row, len(gaps) :].any()


def test_updates_move_the_policy_towards_the_teacher_without_any_reward() -> None:
    trainer = taught_by(LoadedJudge(other_policy()))
    groups = [group_of(trainer.policy, number, (0.0,) * 4) for number in range(2)]
    divergences = [
        learner_of(trainer).learn(groups, version=VERSION + 1 + step)["distillation/reverse_kl"] for step in range(6)
    ]
    assert divergences[-1] < 0.8 * divergences[0]


async def test_the_teacher_alone_is_told_the_experts_move(fleet: Fleet) -> None:
    engine = ScriptedEngine(TEMPLATE, reply("Right"))
    agents = replace(collector(fleet, engine).agents, hint="Go {action}!", want=Want(expert_action=True))
    (session,) = await TASK.open(fleet, 1, 1, agents.want)
    expert = session.observation.expert_action
    episode = await play(agents.agent(session, TASK, 0), session, turns=2)
    for played, request in zip(episode.turns, engine.requests, strict=True):
        text, told = (TEMPLATE.tokenizer.decode(ids) for ids in (request.prompt, played.hinted))
        assert "Go " not in text
        assert told.replace(told[told.index("Go ") - 1 : told.index("!") + 1], "") == text
    assert f"Go {expert}!" in TEMPLATE.tokenizer.decode(episode.turns[0].hinted)


def test_the_policy_as_its_own_teacher_reads_the_hint_of_each_turn_and_agrees_where_there_is_none() -> None:
    trainer = taught_by(HintedJudge())
    episode = group_of(trainer.policy, 0, (1.0,)).episodes[0]
    second = episode.turns[1]
    second.hinted = [7, 8, 9]
    _, table = scored_table(trainer, [episode])
    (hinted,) = say(trainer.policy, replace(episode, turns=[turn([7, 8, 9], second.reply, 0.0, fresh=True)])).turns
    first_count = len(episode.turns[0].reply)
    assert table.teacher_logprobs_BT is not None
    assert table.teacher_logprobs_BT[0, :first_count].equal(table.old_logprobs_BT[0, :first_count])
    assert table.teacher_logprobs_BT[0, first_count:].tolist() == pytest.approx(hinted.logprobs, abs=1e-5)


def test_a_teacher_with_other_token_ids_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    tiny_policy().save(tmp_path / "policy")
    built("none").save(tmp_path / "teacher")
    (tmp_path / "teacher" / "model.safetensors").unlink()
    teaching = {"teacher": "model", "model": str(tmp_path / "teacher")}
    values = {"model": str(tmp_path / "policy"), "algorithm": {"preset": "dapo", "distillation": teaching}}
    with pytest.raises(ConfigError, match=r"a different tokenizer than the policy.* has the id \d+ in the policy's"):
        make_judge(parse_config(values), Parallel())


def test_a_checkpoint_teaches_wherever_it_is_unless_its_tokenizer_stayed_in_its_run(tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.save(tmp_path / "policy")
    policy.save(tmp_path / "run" / "initial")

    def teach(model: str, place: str) -> Judge | None:
        config = {"model": ModelConfig(name=model).to_dict()}
        checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
        saved = checkpoints.save(1, {"policy": policy.state_dict()}, {"config": config})
        path = saved if place == "run" else saved.rename(tmp_path / f"moved-{Path(model).name}")
        teaching = {"teacher": "model", "model": str(path)}
        values = {"model": str(tmp_path / "policy"), "algorithm": {"preset": "dapo", "distillation": teaching}}
        return make_judge(parse_config(values), Parallel())

    assert isinstance(teach("tiny", "run"), LoadedJudge)
    assert isinstance(teach(str(tmp_path / "policy"), "elsewhere"), LoadedJudge)
    with pytest.raises(ConfigError, match="keep the checkpoint in its run folder"):
        teach("tiny", "elsewhere")


@contextlib.contextmanager
def serving_teacher(policy: Policy) -> Iterator[str]:
    """The endpoints of `vllm serve` that a teacher needs, as a real server answers them (vLLM 0.32)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "the-teacher"}]} if self.path == "/v1/models" else {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["model"] == "the-teacher"
            if self.path == "/tokenize":
                ids = policy.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
                self._send({"tokens": ids, "count": len(ids)})
                return
            assert (self.path, body["max_tokens"], body["prompt_logprobs"]) == ("/v1/completions", 1, 0)
            ids = torch.tensor([body["prompt"]])
            sampled = torch.ones_like(ids, dtype=torch.bool)
            sampled[:, 0] = False
            with torch.no_grad():
                logprobs = policy.score(ids, torch.tensor([ids.shape[1]]), sampled).logprobs_N.tolist()
            places: list[Any] = [
                {str(token): {"logprob": p, "rank": 3, "decoded_token": "x"}}
                for token, p in zip(body["prompt"][1:], logprobs, strict=True)
            ]
            self._send({"choices": [{"text": "x", "prompt_logprobs": [None, *places]}]})

        def _send(self, values: Any) -> None:
            content = json.dumps(values).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_teaches_as_the_same_model_here_does_and_another_tokenizer_is_refused() -> None:
    policy, other = built("none"), other_policy()
    with serving_teacher(other) as url:
        settings = VllmTeacher(url=url)
        trainer = taught_by(ServedJudge(settings, policy.tokenizer, Parallel()))
        episodes = group_of(policy, 1, (1.0, 0.0)).episodes
        batch, table = scored_table(trainer, episodes)
        here_BT = LoadedJudge(other).logprobs(trainer.logprobs, batch, table, table.mask_BT)
        assert table.teacher_logprobs_BT is not None
        torch.testing.assert_close(table.teacher_logprobs_BT, here_BT)
        with pytest.raises(ConfigError, match="its tokenizer gives different ids than the policy's"):
            ServedJudge(settings, tiny_policy().tokenizer, Parallel())
    with pytest.raises(ConfigError, match=r"did not answer /v1/models"):
        ServedJudge(settings, policy.tokenizer, Parallel())
