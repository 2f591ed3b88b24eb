"""`starpod rescore`: new rewards for recorded episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any

import click

from starpod.remote.catalog import JSON, expect_writable, write_report
from starpod.trainer.commands.eval_tables import print_table, progress_bars
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.user_file import UserCodeError
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import BadEpisodes, episode_files, named_episodes
from starpod.trainer.evaluation.rescoring import compare_rewards, find_rewards, score_again
from starpod.trainer.evaluation.table import format_figure, format_interval
from starpod.trainer.output.files import to_json_line, write_atomic
from starpod.trainer.rewards.judge import MAX_REQUESTS, JudgeFailed
from starpod.trainer.rewards.reward import Rewards


@click.command(epilog="Example: starpod rescore runs/lake --reward rewards.py:brevity")
@click.argument("path", metavar="EPISODES.jsonl|FOLDER", type=click.Path(path_type=Path))
@click.option(
    "--reward",
    required=True,
    metavar="REWARD",
    help="FILE.py:NAME, the name of a registered function, the YAML file of a judge, or a YAML file with keys of the "
    "section rewards, such as criteria.",
)
@click.option("--name", default="", show_default="the name in --reward", help="Name of the new file.")
@click.option("--solved-from", type=float, default=1.0, help="Reward from which an episode counts as solved.")
@JSON
def rescore(path: Path, reward: str, name: str, solved_from: float, json_file: str) -> None:
    """Compute new rewards for recorded episodes without playing, and compare them with the environment's.

    The episodes are those of a file (.jsonl or .jsonl.gz), of a run's folder or of an evaluation's. The rewards are
    written to the file rescored/NAME.jsonl in the folder, one line per episode. The episodes stay unchanged.

    Exit status: 0 done, 1 an episode has no new reward, 2 usage error.
    """
    expect_writable(json_file)
    name = name or Path(reward.rpartition(":")[2]).stem
    folder = path if path.is_dir() else path.parent
    file = folder / "rescored" / f"{name}.jsonl"
    if Path(name).name != name or file.exists():
        raise click.BadParameter(f"{file} exists or is not the name of a file: give another", param_hint="--name")
    try:
        files = episode_files(path)
        expect_writable(file if file.parent.exists() else file.parent)
        rows = list(_score(files, Rewards(find_rewards(reward)), solved_from))
    except (BadEpisodes, ConfigError) as error:
        raise click.UsageError(str(error)) from error
    except UserCodeError as error:
        raise click.ClickException(str(error)) from error
    write_atomic(file, "".join(map(to_json_line, rows)))
    report = compare_rewards(rows)
    _show(report, f"{path} by {reward}: {file}", quiet=json_file == "-")
    write_report(json_file, json.dumps(report, ensure_ascii=False) + "\n")
    if errors := [row["error"] for row in rows if "error" in row]:
        raise click.ClickException(f"{len(errors)} episodes have no new reward, the first one because: {errors[0]}")


def _score(files: Sequence[Path], rewards: Rewards, solved_from: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each episode. Judges are asked about several at a time."""

    def judge(row: dict[str, Any], episode: Episode) -> dict[str, Any]:
        if "error" in row:
            return row
        try:
            row["parts"] |= rewards.verdicts(episode)
        except JudgeFailed as error:
            return row | {"error": str(error)}
        reward = sum(row["parts"].values())
        return row | {"reward": reward, "success": reward >= solved_from}

    episodes = chain.from_iterable(map(named_episodes, files))
    with ThreadPoolExecutor(MAX_REQUESTS) as pool, progress_bars() as progress:
        bar = progress.add_task("episodes", total=None)
        while chunk := dict(islice(episodes, 4 * MAX_REQUESTS)):
            rows = [_row(rewards, key, episode) for key, episode in chunk.items()]
            for row in pool.map(judge, rows, chunk.values()):
                progress.advance(bar)
                yield row


def _row(rewards: Rewards, key: str, episode: Episode) -> dict[str, Any]:
    row: dict[str, Any] = {"key": key, "model": episode.model, "environment": episode.kind}
    row |= {"seed": episode.seed, "attempt": episode.member}
    if episode.failed or not episode.turns:
        return row | {"error": episode.error or "the episode has no turns"}
    old = {"old_reward": episode.own_return, "old_success": episode.success}
    return row | old | {"parts": score_again(rewards, episode)}


def _show(report: Sequence[Mapping[str, Any]], title: str, *, quiet: bool) -> None:
    after = "After (95 %)"
    heads = ["Environment", "Episodes", "Reward before", after, "Changed", "Success before", after, "Agree"]
    rows = [
        [
            " in ".join(filter(None, (row["model"], row["environment"]))),
            f"{row['after']['episodes']}" + (f" ({row['unscored']} unscored)" if row["unscored"] else ""),
            format_figure(row["before"]["return_mean"], ".3f"),
            format_interval(row["after"], "return_mean", "return", ".3f"),
            str(row["changed"]),
            format_figure(row["before"]["success"], ".1%"),
            format_interval(row["after"], "success", "success", ".1%"),
            format_figure(row["agreement"], ".1%"),
        ]
        for row in report
    ]
    print_table(title, heads, rows, quiet=quiet)
