"""Agents with a policy each, from the outside: training, going on, and what is made of the checkpoints."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from starpod.cli.main import starpod
from starpod.trainer.data.files import read_episodes
from tests.e2e.test_jobs import SMALL
from tests.support import ServerProcess, start_server
from tests.training import latest, learnt, lines, rewound, train

TEAM = (
    "benchmarks/training/jobs/team.yaml",
    "script.policies=[solver,verifier]",
    "algorithm.advantage.terms=[{unit: agent, score: reward, scale: std, key: [agent]}]",
    "collect.groups=3",
    "collect.group_size=4",
    "environment.options.rooms=2",
    "environment.max_turns=2",
    "warm_start.steps=30",
    "warm_start.episodes=60",
    "evaluation.episodes=4",
    "evaluation.every=0",
    "checkpoint.every=1",
    "monitor.gradients.every=2",
    "stop.iterations=2",
    "monitor.sinks.tensorboard=false",
    "monitor.screen=plain",
)
GAME = (
    *("self_play", *SMALL, "script.policies=[X,O]", "environment.options.opening=0"),
    *("warm_start.steps=20", "warm_start.lr=0.005", "warm_start.episodes=16", "warm_start.actions=random"),
)


def digests(run: Path) -> dict[str, dict[str, object]]:
    """The weights of each agent in the last checkpoint."""
    found: dict[str, dict[str, object]] = {}
    for name, tensor in load_file(latest(run) / "policy.safetensors").items():
        agent, _, rest = name.partition(".")
        found.setdefault(agent, {})[rest] = tensor.tolist()
    return found


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("team") / "run"
    train(run_dir=folder, base=TEAM)
    return folder


@pytest.fixture(scope="module")
def corridor() -> ServerProcess:
    with start_server("benchmarks/training/corridor.py") as process:
        yield process


def test_solver_and_verifier_have_weights_of_their_own(team: Path) -> None:
    weights = digests(team)
    assert weights.keys() == {"solver", "verifier"} and weights["solver"].keys() == weights["verifier"].keys()
    assert weights["solver"] != weights["verifier"]
    steps = [record["metrics"] for record in lines(team / "metrics.jsonl")]
    for metrics in steps:
        # What each engine samples is what its learner scores.
        assert metrics["policy/logprob_gap_max"] < 1e-3
        each = [metrics[f"agents/{agent}/update/grad_norm"] for agent in weights]
        assert metrics["update/grad_norm"] == pytest.approx(sum(each) / 2) and each[0] != each[1]
    for agent in weights:
        assert steps[1][f"gradients/agents/{agent}/measured_factor"] > 0
    report = (team / "report.html").read_text()
    assert "verifier: gradient norm" in report and "solver: growth of its squared gradients" in report


def test_a_team_continues_bit_for_bit(team: Path, tmp_path: Path) -> None:
    cut = rewound(team, 1, tmp_path / "run")
    train(run_dir=cut, resume=True, base=())
    assert learnt(cut) == learnt(team)
    assert digests(cut) == digests(team)


def test_another_set_of_policies_cannot_continue(team: Path) -> None:
    errors = train("script.policies=[verifier,solver]", run_dir=team, resume=True, status=2, base=())
    assert "script.policies is ['verifier', 'solver'], but the run that is resumed has ['solver', 'verifier']" in errors


def test_a_team_is_evaluated_watched_and_exported_agent_by_agent(
    team: Path, corridor: ServerProcess, tmp_path: Path
) -> None:
    runner = CliRunner()
    report = tmp_path / "report.json"
    words = [str(team), "-e", f"{corridor.address}/corridor-v1", "--episodes", "4", "--json", str(report)]
    told = runner.invoke(starpod, ["eval", *words])
    assert told.exit_code == 0, told.output
    (final,) = lines(team / "final.json")
    played = json.loads(report.read_text())["models"][str(team)]["environments"]["corridor-v1"]
    assert (played["success"], played["return_mean"]) == (final["success"], final["return_mean"])
    watched = runner.invoke(starpod, ["watch", str(team), "--episode", "1"]).output
    assert "turn 1, solver" in watched and "turn 2, verifier" in watched
    refused = runner.invoke(starpod, ["export", str(team), str(tmp_path / "none")])
    assert "each of solver, verifier has a policy: choose one with `starpod export RUN OUT --agent NAME`" in str(
        refused.exception
    )
    for agent in ("solver", "verifier"):
        out = tmp_path / agent
        told = runner.invoke(starpod, ["export", str(team), str(out), "--which", "latest", "--agent", agent])
        assert told.exit_code == 0, told.output
        exported, trained = load_file(out / "model.safetensors"), digests(team)[agent]
        assert all(tensor.tolist() == trained[f"model.{name}"] for name, tensor in exported.items())
        assert f"the policy of `{agent}` after 2 iterations" in (out / "README.md").read_text()


def test_two_players_train_each_other_also_while_they_play(server: ServerProcess, tmp_path: Path) -> None:
    """Self-play with max_staleness: copies of both policies sample while both are updated."""
    addresses = f"environment.addresses=[{server.address}]"
    train("stop.iterations=2", "collect.max_staleness=1", addresses, run_dir=tmp_path / "run", base=GAME)
    weights = digests(tmp_path / "run")
    assert weights.keys() == {"X", "O"} and weights["X"] != weights["O"]
    files = (tmp_path / "run" / "episodes").glob("train-*.jsonl.gz")
    episodes = [episode for file in files for episode in read_episodes(file)]
    assert {turn.agent_id for episode in episodes for turn in episode.turns} == {"X", "O"}
    # Against an opponent of the environment's, X's policy plays.
    (final,) = (tmp_path / "run" / "episodes").glob("final-*.jsonl")
    assert {turn.agent_id for episode in read_episodes(final) for turn in episode.turns} == {""}


def test_a_player_without_a_policy_is_told(server: ServerProcess, tmp_path: Path) -> None:
    words = ("script.policies=[X,Y]", f"environment.addresses=[{server.address}]")
    errors = train(*words, run_dir=tmp_path / "run", status=2, base=GAME)
    assert "script.policies names X, Y, but the agents of the demonstrations are 'O', 'X'" in errors
