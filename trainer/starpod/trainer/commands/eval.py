"""`starpod eval`: evaluation of models on held-out start states."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from starpod.remote.catalog import ACCESS, JSON, VERSION, access_options, expect_writable, write_report
from starpod.serving.folders import make_locked_folder
from starpod.serving.options import Command
from starpod.trainer.commands.eval_call import EPISODES, EvaluationCall
from starpod.trainer.commands.eval_tables import show_comparison, show_report
from starpod.trainer.evaluation.folder import MOST_STARTS, EvaluationFolder
from starpod.trainer.evaluation.table import to_csv, to_markdown

_LIMIT = "the environment's limit"


@click.command(
    name="eval",
    cls=Command,
    headings={
        "Episodes": ["environments", "episodes", "attempts", "seed", "assignments", "version"],
        "Limits": ["turns", "actions_per_turn", "actions"],
        "Replies": ["temperature", "max_tokens", "thinking", "engine", "concurrency"],
        "Results": ["to", "retry_failed", "compared", "json_file", "csv_file", "markdown_file"],
        "Access to the server": ACCESS,
    },
    renamed={
        "--samples": "--attempts",
        "--jsonl": "--to FOLDER, which has the episodes in FOLDER/episodes/",
        "--base-url": "part of the model, as in http://127.0.0.1:8000/v1#llama",
    },
    epilog="Example: starpod eval runs/lake random --environment frozen_lake --episodes 64 --to lake-evaluation",
)
@click.argument("words", metavar="MODEL... [ENVIRONMENT]", nargs=-1)
@click.option(
    "--environment",
    "-e",
    "environments",
    metavar="ENVIRONMENT",
    multiple=True,
    help="Environment to play, by default those of the runs. Repeatable.",
)
@click.option(
    "--episodes",
    type=click.IntRange(1, MOST_STARTS),
    show_default=f"{EPISODES}, or as in the folder",
    help="Number of start states of each environment, one seed each.",
)
@click.option(
    "--attempts",
    type=click.IntRange(1),
    show_default="1, or as in the folder",
    help="Episodes per start state, for pass@k and pass^k.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    show_default="a seed that training never uses",
    help="Seed of the first start state; each further one has the next seed.",
)
@click.option(
    "--option",
    "assignments",
    multiple=True,
    metavar="[ENV:]KEY=VALUE",
    help="Option of the environments, or of ENV alone, as JSON; a text needs no quotes. Repeatable.",
)
@VERSION
@click.option("--turns", type=click.IntRange(1), show_default=_LIMIT, help="Maximum turns of an episode.")
@click.option("--actions-per-turn", type=click.IntRange(1), show_default=_LIMIT, help="Maximum actions of a turn.")
@click.option("--actions", type=click.IntRange(1), show_default=_LIMIT, help="Maximum actions of an episode.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    show_default="as in training, else the model's",
    help="Sampling temperature; 0 is greedy.",
)
@click.option(
    "--max-tokens", type=click.IntRange(1), show_default="as in training, else 400", help="Maximum tokens of a reply."
)
@click.option(
    "--thinking/--no-thinking",
    default=None,
    show_default="as in training",
    help="Whether replies begin with reasoning.",
)
@click.option(
    "--engine",
    type=click.Choice(["torch", "vllm"]),
    default="torch",
    help="Program that samples. torch: on a CPU or GPU. vllm: faster, needs the extra vllm.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=16,
    help="Maximum requests to an endpoint, or programs, at a time.",
)
@click.option(
    "--to",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Folder for the episodes. If it has an evaluation already, only what is missing is played.",
)
@click.option("--retry-failed", is_flag=True, help="Play the folder's failed episodes again.")
@click.option(
    "--compare",
    "compared",
    type=click.Path(path_type=Path),
    nargs=2,
    metavar="A B",
    help="Compare two evaluations, episode by episode, and play nothing. A and B are reports of --json, or folders of "
    "runs.",
)
@JSON
@click.option(
    "--csv",
    "csv_file",
    metavar="FILE",
    default="",
    show_default=False,
    help="File for the table as CSV with exact numbers; -: standard output.",
)
@click.option(
    "--markdown",
    "markdown_file",
    metavar="FILE",
    default="",
    show_default=False,
    help="File for the table as Markdown; -: standard output.",
)
@access_options
@click.pass_context
def evaluate(
    context: click.Context, /, compared: tuple[Path, Path] | None, to: Path | None, json_file: str, **options: Any
) -> None:
    """Play each MODEL in each ENVIRONMENT and report its success.

    MODEL is the folder of a run, of a checkpoint or of `starpod export`, which plays as in training; the name or folder
    of another Hugging Face model; openai:NAME or URL#NAME, a model at OpenAI or at another OpenAI-compatible endpoint,
    as in http://127.0.0.1:8000/v1#llama; a policy without a model, which plays one action per turn: random, expert,
    walk or careful (frozen_lake with local observations), or rule (webshop); or, in quotes, 'MODEL | COMMAND', a
    program that plays with a run or a Hugging Face model.

    ENVIRONMENT is ADDRESS/NAME at a server (host:port, several with commas), or ADDRESS with --environment. A NAME,
    FILE.py, FILE.py:CLASS or FAMILY:NAME is served during the evaluation. Without ENVIRONMENT, the environments of the
    runs are played: at their addresses, or served here if the run started its own servers.

    Exit status: 0 done, 1 something failed, such as an episode, 2 usage error.
    """
    csv_file, markdown_file = options.pop("csv_file"), options.pop("markdown_file")
    expect_writable(json_file, csv_file, markdown_file)
    if compared:
        show_comparison(*compared, json_file)
        return
    if options["retry_failed"] and to is None:
        raise click.UsageError("--retry-failed needs the folder of the evaluation: --to FOLDER")
    call = EvaluationCall.of(options)
    with _folder(to) as folder:
        report = call.run(folder)
    show_report(report, quiet="-" in (json_file, csv_file, markdown_file))
    write_report(json_file, json.dumps(report, ensure_ascii=False) + "\n")
    write_report(csv_file, to_csv(report))
    write_report(markdown_file, to_markdown(report))
    cells = [figures for model in report["models"].values() for figures in model["environments"].values()]
    if failed := sum(figures["failed"] for figures in cells):
        error = next(figures["error"] for figures in cells if figures["error"])
        hint = f"; play them again with: starpod eval --to {to} --retry-failed" if to else ""
        raise click.ClickException(f"{failed} episodes failed, the first one with: {error}{hint}")
    context.exit(0)


@contextlib.contextmanager
def _folder(to: Path | None) -> Iterator[EvaluationFolder]:
    """Yield the folder of the evaluation. Without a path, it is removed at the end."""
    if to is not None:
        yield EvaluationFolder(to)
        return
    temporary = make_locked_folder("starpod-eval-", Path(tempfile.gettempdir()))
    try:
        yield EvaluationFolder(temporary)
    finally:
        shutil.rmtree(temporary)
