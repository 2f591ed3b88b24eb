"""`starpod eval` against a real server, with scripted policies and with a model behind a real HTTP endpoint."""

import csv
import json
import re
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from click import BadParameter
from click.testing import CliRunner, Result

from starpod.client import Fleet, Limits
from starpod.client.transport import Transport
from starpod.trainer.agents.base import AgentError, AgentRefused, Agents, Task
from starpod.trainer.agents.chat import ChatAgents
from starpod.trainer.agents.scripted import ReferenceAgents
from starpod.trainer.checkpoints.checkpoint import Checkpoints
from starpod.trainer.commands.eval import evaluate
from starpod.trainer.commands.eval_environments import EnvironmentChoice, Servers
from starpod.trainer.commands.eval_models import EvaluatedModel
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import read_episodes
from starpod.trainer.evaluation.figures import evaluate_reference, summarise
from starpod.trainer.evaluation.plan import MOST_STARTS
from starpod.trainer.evaluation.statistics import wilson_interval
from starpod.trainer.models.policy import build_policy
from starpod.trainer.rollout.collect import Collector, starts_from
from tests.client.fake_server import FakeServer
from tests.fake_openai import fake_openai
from tests.support import ServerProcess

EASY = ("--option", "frozen_lake:success_rate=1", "--turns", "20", "--actions", "20")


def run(server: ServerProcess, model: str, *arguments: str) -> Result:
    return CliRunner().invoke(evaluate, [model, *at(server, *arguments)])


def at(server: ServerProcess, *arguments: str) -> list[str]:
    """Arguments whose environments are at the server."""
    previous = ("", *arguments)
    return [
        f"{server.address}/{word}" if option == "-e" else word
        for option, word in zip(previous, arguments, strict=False)
    ]


def model_of(values: dict[str, Any]) -> dict[str, Any]:
    (model,) = values["models"].values()
    return dict(model)


def report(server: ServerProcess, model: str, *arguments: str) -> dict[str, Any]:
    """Return the JSON report. Standard output contains nothing else."""
    result = run(server, model, *arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def figures_of(values: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = model_of(values)["environments"]["frozen_lake-v1"]
    return figures


def timeless(values: dict[str, Any]) -> dict[str, Any]:
    return {name: {**figures, "seconds_mean": 0} for name, figures in model_of(values)["environments"].items()}


# --- scripted policies -------------------------------------------------------------------------------------------


def test_the_expert_solves_a_lake_without_slips_and_chance_does_not(server: ServerProcess) -> None:
    expert = report(server, "expert", "-e", "frozen_lake", "--episodes", "40", *EASY)
    figures = figures_of(expert)
    assert (figures["success"], figures["failed"], figures["episodes"]) == (1.0, 0, 40)
    assert (figures["success_low"], figures["success_high"]) == pytest.approx(wilson_interval(40, 40))
    assert (figures["return_mean"], figures["ends"]) == (1.0, {"terminal": 40})
    assert (expert["seeds"], [*expert["models"]], model_of(expert)["kind"]) == ([0, 40], ["expert"], "reference")
    chance, again, other = (
        report(server, "random", "-e", "frozen_lake", "--episodes", "40", "--attempts", "2", "--seed", seed, *EASY)
        for seed in ("5", "5", "77")
    )
    assert figures_of(chance)["success_high"] < figures["success_low"]
    assert timeless(chance) == timeless(again) != timeless(other)


def test_several_environments_each_with_its_options_and_its_row(server: ServerProcess, tmp_path: Path) -> None:
    folder = tmp_path / "evaluation"
    result = run(
        server, "random", "-e", "frozen_lake", "-e", "bandit", "--episodes", "6", "--attempts", "4",
        "--option", "frozen_lake-v1:size=3", "--option", "bandit:split=test", "--to", str(folder),
        "--json", str(tmp_path / "figures.json"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert re.search(r"frozen_lake-v1 +24 ", result.stdout)
    assert re.search(r"bandit-v1 +24 ", result.stdout)
    assert "pass@4" in result.stdout
    figures = model_of(json.loads((tmp_path / "figures.json").read_text()))["environments"]
    assert figures["bandit-v1"]["options"] == {"split": "test"}
    recorded = sorted(read_episodes(folder), key=lambda each: (each.group, each.member))
    assert [episode.environment for episode in recorded] == ["frozen_lake-v1"] * 24 + ["bandit-v1"] * 24
    # Four episodes of one group share the start and nothing else.
    assert [(episode.group, episode.member) for episode in recorded] == [
        (first + n // 4, n % 4) for first in (0, MOST_STARTS) for n in range(24)
    ]
    assert len({episode.turns[0].observation for episode in recorded[:4]}) == 1
    assert len({tuple(turn.actions[0] for turn in episode.turns) for episode in recorded[:24]}) > 6
    assert all(turn.observation.count("\n") == 2 for turn in recorded[0].turns)
    for name, part in (("frozen_lake-v1", recorded[:24]), ("bandit-v1", recorded[24:])):
        assert figures[name]["success"] == pytest.approx(sum(bool(episode.success) for episode in part) / 24)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["randm", "-e", "bandit"], 2, "did you mean random?"),
        (["random", "-e", "bandits"], 2, "did you mean bandit-v1?"),
        (["random", "-e", "bandit", "--option", "splt=test"], 2, "did you mean split?"),
        (["random", "-e", "bandit", "--option", "split=nonsense"], 2, "split"),
        (["random", "-e", "bandit", "--option", "frozen_lake:size=3"], 2, "is for frozen_lake, which is not played"),
        (["random", "-e", "bandit", "--version", ">=2"], 2, "there are 1.0.0"),
        (["random", "-e", "bandit", "--episodes", "20000"], 2, "fewer than the 20000 episodes"),
        (["random", "-e", "a bandit"], 2, "a bandit' is no environment"),
        (["bandit"], 2, "bandit is an environment: write --environment bandit"),
        (["random", "-e", "bandit", "--retry-failed"], 2, "needs the folder"),
        (["python agent.py", "-e", "bandit"], 2, "'runs/lake | python agent.py'"),
        (["random | python agent.py", "-e", "bandit"], 2, "a model that is sampled here"),
        (["http://127.0.0.1:1/v1", "-e", "bandit"], 2, "as in http://127.0.0.1:1/v1#NAME"),
        (["openai:", "-e", "bandit"], 2, "needs the name of a model"),
        (["random", "-e", "bandit", "--json", "/no/such/a.json"], 2, "there is no folder /no/such"),
        (["random", "-e", "bandit", "--csv", "/no/such/a.csv"], 2, "there is no folder /no/such"),
        (["openai:m", "-e", "bandit"], 2, "OPENAI_API_KEY"),
        (["careful", "-e", "frozen_lake"], 1, "read the local observation"),
        (["/absent/folder", "-e", "bandit"], 1, "there is no such folder"),
        (["./absent", "-e", "bandit"], 1, "there is no such folder"),
        ([f"./{'x' * 300}", "-e", "bandit"], 1, "there is no such folder"),
        (["a/b/c", "-e", "bandit"], 1, "there is no such folder"),
    ],
)
def test_wrong_calls_say_what_would_be_right(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int, words: str
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    result = run(server, *arguments)
    assert words in result.output + str(result.exception)
    assert result.exit_code == status


def test_the_last_word_may_be_the_environment(server: ServerProcess) -> None:
    words = ["--episodes", "2", "--json", "-"]
    last, option = (
        CliRunner().invoke(evaluate, ["random", "expert", *environment, *words])
        for environment in ([f"{server.address}/bandit"], ["-e", f"{server.address}/bandit"])
    )
    assert (last.exit_code, list(json.loads(last.stdout)["models"])) == (0, ["random", "expert"])
    assert json.loads(last.stdout)["models"].keys() == json.loads(option.stdout)["models"].keys()


def test_a_dead_server_and_no_address() -> None:
    for address, status, words in (
        ("127.0.0.1:1", 1, "no server answers"),
        ("localhost", 2, "unknown environment 'localhost'"),
    ):
        result = CliRunner().invoke(evaluate, ["random", "-e", address])
        assert (result.exit_code, words in result.output) == (status, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            [],
            "name what to evaluate: the folder of a run, a checkpoint or an export, a Hugging Face model, openai:MODEL",
        ),
        (["NOPE"], "for example: starpod eval NOPE -e frozen_lake. A run is evaluated by its folder"),
        (["opnai:m"], "did you mean openai:?"),
        (["random", f"random | python -c {'x' * 300}/x.py"], "a model that is sampled here"),
        (["randm"], "no model 'randm'; did you mean random?"),
        (["random"], "name an environment, for example: starpod eval random -e frozen_lake"),
    ],
)
def test_a_call_that_lacks_something_is_answered_with_a_whole_one(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(evaluate, arguments)
    assert (result.exit_code, words in " ".join(result.output.split())) == (2, True)


def test_a_folder_of_runs_is_answered_with_the_runs_in_it(tmp_path: Path) -> None:
    (tmp_path / "lake/checkpoints").mkdir(parents=True)
    told = CliRunner().invoke(evaluate, [str(tmp_path)]).output
    assert f"the folder holds no run, checkpoint or model; choose one below it: {tmp_path}/lake" in " ".join(
        told.split()
    )


async def test_references_play_as_they_do_beside_a_learning_curve(fleet: Fleet) -> None:
    alone = await played(fleet, ReferenceAgents("random"), LAKE, range(20))
    curve = await evaluate_reference(fleet, "random", LAKE, range(20))
    assert (curve["success"], curve["return_mean"], curve["turns_mean"]) == (
        summarise(alone)["success"],
        fmean(e.own_return for e in alone),
        fmean(len(e.turns) for e in alone),
    )


LAKE = Task("frozen_lake-v1", limits=Limits(max_turns=3), actions=("Left", "Down", "Right", "Up"))


async def played(fleet: Fleet, agents: Agents, task: Task, seeds: Sequence[int]) -> list[Episode]:
    collected = await Collector(fleet=fleet, agents=agents, task=task).collect(starts_from(seeds), 1, min_size=0)
    return [episode for group in collected.groups for episode in group.members]


# --- a model behind an endpoint ----------------------------------------------------------------------------------


def towards_goal(body: dict[str, Any]) -> str:
    """Reads the local observation in the last message, as a good model would."""
    line = next(line for line in body["messages"][-1]["content"].splitlines() if line.count(" ") == 11)
    words = line.split()
    ways = [way for way in words[6:8] if way != "-"]
    return f"<think>{words[6]} {words[7]}</think> <answer>{ways[0]}</answer>"


OPEN_LAKE = ("-e", "frozen_lake", "--option", "observation=local", "--option", "frozen_probability=1")


def test_a_model_behind_an_endpoint_plays(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-this-test")
    with fake_openai(towards_goal) as endpoint:
        values = report(
            server, f"{endpoint.base_url}#some/model", *OPEN_LAKE, *EASY, "--episodes", "20",
            "--temperature", "0", "--max-tokens", "77", "--concurrency", "3", "--to", str(tmp_path / "e"),
        )  # fmt: skip
    figures = figures_of(values)
    assert (figures["success"], figures["format_rate"], figures["failed"]) == (1.0, 1.0, 0)
    assert endpoint.keys == {"Bearer key-of-this-test"}
    assert 1 <= endpoint.most_at_once <= 3
    assert sum(each.usage["prompt_tokens"] for each in read_episodes(tmp_path / "e")) == 100 * len(endpoint.requests)
    first = endpoint.requests[0]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("some/model", 0, 77)
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    # A later request tells the whole conversation: what was said before is in it word for word.
    longest = max(endpoint.requests, key=lambda body: len(body["messages"]))
    roles = [message["role"] for message in longest["messages"]]
    assert roles == ["system", *["user", "assistant"] * (len(roles) // 2 - 1), "user"] and len(roles) > 4
    (match,) = [
        episode
        for episode in read_episodes(tmp_path / "e")
        if [turn.text for turn in episode.turns[:-1]]
        == [m["content"] for m in longest["messages"] if m["role"] == "assistant"]
        and episode.turns[0].observation in longest["messages"][1]["content"]
    ]
    assert match.turns[0].thought == " ".join(match.turns[0].observation.split()[6:8])


def test_what_the_endpoint_refuses_for_the_moment_is_asked_again(server: ServerProcess) -> None:
    seen: set[str] = set()

    def answer(body: dict[str, Any]) -> str | int:
        text = json.dumps(body["messages"])
        if text not in seen:
            seen.add(text)
            return 429 if len(seen) % 2 else 500
        return towards_goal(body)

    with fake_openai(answer) as endpoint:
        values = report(server, f"{endpoint.base_url}#m", *OPEN_LAKE, *EASY, "--episodes", "3")
    assert (figures_of(values)["success"], figures_of(values)["failed"]) == (1.0, 0)


def test_an_episode_that_the_endpoint_fails_is_counted_and_excluded(server: ServerProcess) -> None:
    def answer(body: dict[str, Any]) -> str | int:
        return 400 if "P 0 " in body["messages"][1]["content"] else towards_goal(body)

    with fake_openai(answer) as endpoint:
        result = run(server, f"{endpoint.base_url}#m", *OPEN_LAKE, *EASY, "--episodes", "30", "--json", "-")
    assert result.exit_code == 1
    assert "episodes failed, the first one with: AgentError: " in result.stderr
    figures = figures_of(json.loads(result.stdout))
    assert figures["failed"] > 0
    assert (figures["episodes"] + figures["failed"], figures["success"]) == (30, 1.0)


def test_a_folder_is_continued_and_only_failed_episodes_are_played_again(server: ServerProcess, tmp_path: Path) -> None:
    broken = True

    def answer(body: dict[str, Any]) -> str | int:
        return 400 if broken and "P 0 " in body["messages"][1]["content"] else towards_goal(body)

    folder = str(tmp_path / "lake")
    with fake_openai(answer) as endpoint:

        def play(*arguments: str) -> tuple[int, dict[str, Any], str]:
            """Return the number of requests, the lake's figures and the error."""
            endpoint.requests.clear()
            result = CliRunner().invoke(evaluate, [*arguments, "--to", folder, "--json", "-"])
            return len(endpoint.requests), figures_of(json.loads(result.stdout)) if result.stdout else {}, result.stderr

        arguments = (f"{endpoint.base_url}#m", *at(server, *OPEN_LAKE), *EASY, "--episodes", "12")
        _, figures, error = play(*arguments)
        failed = figures["failed"]
        assert failed and f"play them again with: starpod eval --to {folder} --retry-failed" in error
        broken = False
        assert play(*arguments)[:2] == (0, figures)
        requests, figures, error = play("--retry-failed")
        assert (figures["failed"], figures["episodes"], figures["success"], "failed" in error) == (0, 12, 1.0, False)
        assert requests >= failed
        requests, figures, _ = play("--episodes", "13", "--attempts", "2")
        assert requests >= 14 and figures["episodes"] == 26
        assert play()[:2] == (0, figures)
        # A further model plays the same: the folder's options and limits count for it.
        result = run(server, "expert", "-e", "frozen_lake", "--to", folder, "--csv", "-")
        rows = list(csv.DictReader(result.stdout.splitlines()))
        assert [(row["model"], row["episodes"], row["pass^2"]) for row in rows] == [
            (arguments[0], "26", "1.0"), ("expert", "26", "1.0"),
        ]  # fmt: skip
        for other, words in (
            (("--temperature", "0.5"), "temperature: null in the folder, 0.5 now"),
            (("--option", "size=3"), "options of frozen_lake-v1"),
            (("--version", ">=2"), "no version '>=2' of frozen_lake-v1"),
        ):
            assert words in " ".join(play(*arguments[:-1], "13", *other)[2].split())
    (tmp_path / "other" / "file").mkdir(parents=True)
    result = run(server, "random", "-e", "bandit", "--to", str(tmp_path / "other"))
    assert (result.exit_code, "holds no evaluation, but other files" in result.output) == (1, True)
    assert run(server, "random", "-e", "bandits", "--to", str(tmp_path / "new")).exit_code == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("status", [401, 404])
def test_an_endpoint_that_refuses_for_good_ends_the_evaluation(server: ServerProcess, status: int) -> None:
    with fake_openai(lambda body: status) as endpoint:
        result = run(server, f"{endpoint.base_url}#nobody", *OPEN_LAKE, "--episodes", "50")
    assert result.exit_code == 1 and "refuses nobody" in result.output
    assert len(endpoint.requests) <= 16  # not one for each episode


async def test_an_endpoint_that_is_not_there_is_said_so(fleet: Fleet) -> None:
    agents = ChatAgents("m", base_url="http://127.0.0.1:1/v1", retries=0)
    with pytest.raises(AgentRefused, match=r"no answer from http://127\.0\.0\.1:1/v1"):
        await played(fleet, agents, LAKE, [0])
    await agents.close()


MALFORMED: list[tuple[bytes | dict[str, Any], str]] = [
    (b"null", "no message"),
    (b"<html>", "not JSON"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"choices": []}', "no message"),
    ({"message": None}, "no message"),
    ({"message": {"content": 5}}, "no text"),
    ({"finish_reason": 5}, "finish reason 5"),
    ({"finish_reason": "content_filter"}, "finish reason 'content_filter'"),
    (b'{"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": "3"}}', "the usage"),
]


async def test_a_malformed_reply_is_requested_again_and_then_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation ends if its endpoint has never answered. Otherwise only the episode fails."""
    monkeypatch.setattr("starpod.trainer.agents.chat.FIRST_WAIT", 0.001)
    reply: Any = b""
    with fake_openai(lambda body: reply) as endpoint:
        agents = ChatAgents("m", base_url=endpoint.base_url)
        for error in (AgentRefused, AgentError):
            for lie, said in MALFORMED:
                reply = lie
                endpoint.requests.clear()
                with pytest.raises(error, match=rf"{endpoint.base_url}/ answered 3 times, but .*{said}"):
                    await agents.complete([])
                assert len(endpoint.requests) == 3
            reply = "It is fine..."
            assert await agents.complete([]) == (reply, "length")
        await agents.close()


async def test_replies_that_cannot_be_read_are_turns_without_an_action(fleet: Fleet) -> None:
    """Such a reply costs a turn and is reported to the model. It is no error."""
    replies = iter(["I would rather not.", "<think>hm</think><answer>Jump</answer>", "<think>cut off..."])
    with fake_openai(lambda body: next(replies)) as endpoint:
        agents = ChatAgents("m", base_url=endpoint.base_url)
        (episode,) = await played(fleet, agents, LAKE, [3])
        await agents.close()
    assert [(turn.well_formed, turn.actions, turn.finish) for turn in episode.turns] == [
        (False, [], "stop"),
        (False, ["Jump"], "stop"),
        (False, [], "length"),
    ]
    assert (episode.end, episode.success, episode.error) == ("max_turns", False, "")
    assert "no valid action" in endpoint.requests[1]["messages"][-1]["content"]


# --- models that are loaded here ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config() -> Config:
    return parse_config(
        {
            "model": {"name": "tiny", "tiny": {"hidden": 16, "layers": 1, "heads": 2, "intermediate": 32}},
            "environment": {"id": "frozen_lake-v1", "options": {"observation": "local", "size": 3}, "max_turns": 2},
            "prompt": {"style": "compact"},
            "sampling": {"max_reply_tokens": 12, "max_episode_tokens": 200},
            "evaluation": {"temperature": 0.7, "episodes": 100},
            "seeds": {
                "train": {"start": 0, "stop": 5000},
                "final": {"start": 5000, "stop": 6000},
                "selection": {"start": 6000, "stop": 7000},
            },
        }
    )


@pytest.fixture(scope="module")
def run_folder(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, with one checkpoint of an untrained policy."""
    folder = tmp_path_factory.mktemp("run")
    texts = ["P 1 3 G 0 0 Up Left _ _ # _", "<think>Up Left</think><answer>Up</answer>"]
    policy = build_policy(config.model, texts=texts, critic="none", seed=3)
    policy.save(folder / "initial")
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(25, {"policy": policy.state_dict()}, {"config": config.to_dict()}, score=(0.5, 0.5))
    return folder


def test_a_run_is_played_as_it_was_trained(server: ServerProcess, run_folder: Path, tmp_path: Path) -> None:
    arguments = ("-e", "frozen_lake", "--episodes", "6", "--attempts", "2")
    values = report(server, str(run_folder), *arguments, "--to", str(tmp_path / "evaluation"))
    assert (model_of(values)["step"], model_of(values)["temperature"]) == (25, 0.7)
    figures = figures_of(values)
    assert figures["options"] == {"observation": "local", "size": 3}
    assert figures["limits"]["max_turns"] == 2
    recorded = list(read_episodes(tmp_path / "evaluation"))
    assert sorted((episode.group, episode.member) for episode in recorded) == [(n // 2, n % 2) for n in range(12)]
    assert all(len(turn.reply) <= 12 and len(turn.observation.split()) == 12 for e in recorded for turn in e.turns)
    # A checkpoint of it is the same policy, and the same seeds are the same episodes.
    again = report(server, str(run_folder / "checkpoints" / "step-00000025"), *arguments)
    assert timeless(again) == timeless(values)
    # What is said on the command line goes before.
    other = report(server, str(run_folder), *arguments, "--option", "size=2", "--turns", "1", "--temperature", "0")
    assert model_of(other)["temperature"] == 0
    assert figures_of(other)["options"]["size"] == 2
    assert figures_of(other)["turns_mean"] == 1


async def test_a_run_is_played_in_the_newest_version_that_it_allows_and_in_no_other() -> None:
    """The options are those of that version, and a version in between that appears later adds no episodes."""
    config = parse_config({"environment": {"id": "walk-v1", "version": "<1.10"}})
    model = EvaluatedModel("runs/walk", {}, ReferenceAgents, config)
    async with FakeServer(version="1.2.0") as old, FakeServer(version="1.10.0") as new, AsyncExitStack() as stack:
        new.spec.options_schema_json = json.dumps({"properties": {"size": {}}})

        async def resolve(version: str, assignment: str) -> Task:
            words = (f"{old.address},{new.address}",)
            choice = EnvironmentChoice(words=words, assignments=(assignment,), version=version, limits=Limits())
            return (await choice.resolve([model], {}, Servers(stack, Transport())))["walk-v1"].task

        assert (await resolve("", "length=3")).version == "==1.2.0"
        assert (await resolve(">=1.10", "size=3")).version == "==1.10.0"
        with pytest.raises(BadParameter, match="no option 'size'"):
            await resolve("", "size=3")


def test_a_run_is_played_on_the_start_states_that_it_held_out(
    server: ServerProcess, run_folder: Path, tmp_path: Path
) -> None:
    def played(*arguments: str) -> tuple[list[int], str]:
        result = run(server, str(run_folder), *arguments, "--episodes", "2", "--json", "-")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["seeds"], " ".join(result.stderr.split())

    seeds, told = played("-e", "frozen_lake")
    assert (seeds, "Warning" in told) == ([5000, 5002], False)
    seeds, told = played("-e", "frozen_lake", "--seed", "4998")
    assert (seeds, "Warning" in told) == ([4998, 5000], True)
    assert f"seeds.train of {run_folder} (0 to 4999): it may have been trained on these start states" in told
    seeds, told = played("-e", "frozen_lake", "--seed", "6000")
    assert (
        f"seeds.selection of {run_folder} (6000 to 6999): its best checkpoint was chosen on these start states" in told
    )
    grown = ("-e", "frozen_lake", "--seed", "5998", "--to", str(tmp_path / "grown"))
    assert "Warning" not in played(*grown)[1]
    result = run(server, "--to", str(tmp_path / "grown"), "--episodes", "3")
    assert (result.exit_code, "seeds.selection" in result.stderr) == (0, True)
    # Of another environment it has seen nothing.
    assert "Warning" not in played("-e", "bandit", "--seed", "0")[1]
    result = run(server, str(run_folder), "-e", "frozen_lake", "--episodes", "1001")
    assert result.exit_code == 2
    assert "holds 1000 seeds" in result.output


def test_a_folder_with_a_model_is_played(server: ServerProcess, run_folder: Path) -> None:
    values = report(server, str(run_folder / "initial"), "-e", "bandit", "--episodes", "3", "--max-tokens", "4")
    assert model_of(values)["environments"]["bandit-v1"]["episodes"] == 3
    assert model_of(values)["temperature"] == 0.5


def test_replies_longer_than_the_context_are_said_and_fit_without_a_run_if_the_model_reads_them(
    server: ServerProcess, run_folder: Path
) -> None:
    model = str(run_folder / "initial")
    for name, tokens, context in ((str(run_folder), 200, "200"), (model, 4096, "4096"), (model, 600, "")):
        result = run(server, name, "-e", "frozen_lake", "--max-tokens", str(tokens), "--episodes", "1")
        assert result.exit_code == 0, result.output
        assert ("end at its context of" in result.output) == bool(context) and context in result.output


def test_names_are_shown_as_they_are(
    server: ServerProcess, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    models = ["lake[seed=1]", "lake[seed=2]", "[/x]:apple:"]
    for model in models:
        shutil.copytree(run_folder, model)
    result = run(server, models[0], *models[1:], "-e", "frozen_lake", "--episodes", "2")
    assert result.exit_code == 0, result.output
    assert all(result.stdout.count(model) == 3 for model in models), "a row, and two pairs"


def test_a_run_without_a_checkpoint_is_said_so(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    result = run(server, str(tmp_path), "-e", "bandit")
    assert result.exit_code == 1 and "has no checkpoint yet" in result.output
