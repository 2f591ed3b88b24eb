"""`starpod eval`: evaluation of models on held-out start states."""

from __future__ import annotations

import json
import shlex
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from starpod.remote.catalog import ACCESS, JSON, VERSION, access_options, expect_writable, report_option, write_report
from starpod.serving.options import Command, Number
from starpod.trainer.commands.eval_call import EPISODES, EvaluationCall
from starpod.trainer.commands.eval_tables import show_report
from starpod.trainer.evaluation.folder import EvaluationFolder
from starpod.trainer.evaluation.plan import MOST_STARTS
from starpod.trainer.evaluation.table import to_csv, to_markdown

_LIMIT = "the environment's limit"


@click.command(
    name="eval",
    cls=Command,
    headings={
        "Episodes": ["environments", "episodes", "attempts", "seed", "assignments", "version"],
        "Limits": ["turns", "actions_per_turn", "actions"],
        "Replies": ["temperature", "max_tokens", "thinking", "engine", "concurrency", "agent_port"],
        "Results": ["to", "retry_failed", "json_file", "csv_file", "markdown_file"],
        "Access to the server": ACCESS,
    },
    epilog="Example: starpod eval runs/lake random --environment frozen_lake --episodes 64 --to lake-evaluation",
)
@click.argument("models", metavar="MODEL...", nargs=-1)
@click.option(
    "--environment",
    "-e",
    "environments",
    metavar="ENVIRONMENT",
    multiple=True,
    help="Environment to play: NAME, FILE.py, FILE.py:CLASS, tasks.jsonl or FAMILY:NAME, served meanwhile, or "
    "ADDRESS/NAME at a server; ADDRESS alone serves all environments of the runs. Default: those of the runs. "
    "Repeatable.",
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
    type=Number(0),
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
    "--agent-port",
    type=click.IntRange(0, 65_535),
    show_default="a free one",
    default=0,
    help="Port of the programs' gateway, for programs in containers that may reach it: #reach=127.0.0.1:PORT.",
)
@click.option(
    "--to",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Folder for the episodes. If it has an evaluation already, only what is missing is played.",
)
@click.option("--retry-failed", is_flag=True, help="Play the folder's failed episodes again.")
@JSON
@report_option("--csv", "the table as CSV with exact numbers")
@report_option("--markdown", "the table as Markdown")
@access_options
def evaluate(to: Path | None, json_file: str, csv_file: str, markdown_file: str, **options: Any) -> None:
    """Play each MODEL in each environment and report its success.

    MODEL is the folder of a run, of a checkpoint or of `starpod export`, which plays as in training; the name or folder
    of another Hugging Face model; openai:NAME or URL#NAME, a model at OpenAI or at another OpenAI-compatible endpoint,
    as in http://127.0.0.1:8000/v1#llama; a policy without a model, which plays one action per turn: random, expert,
    walk or careful (frozen_lake with local observations), or rule (webshop); or, in quotes, 'MODEL | COMMAND', a
    program that plays with a run or a Hugging Face model.

    Without --environment, the last word may be one: starpod eval random frozen_lake. Otherwise the environments of the
    runs are played: at their addresses, or served here if the run started its own servers.

    Exit status: 0 done, 1 something failed, such as an episode, 2 usage error.
    """
    expect_writable(json_file, csv_file, markdown_file)
    if options["retry_failed"] and to is None:
        raise click.UsageError("--retry-failed needs the folder of the evaluation: --to FOLDER")
    call = EvaluationCall.of(options)
    with nullcontext(to) if to else TemporaryDirectory(prefix="starpod-eval-") as folder:
        report = call.run(EvaluationFolder(Path(folder)))
    show_report(report, quiet="-" in (json_file, csv_file, markdown_file))
    write_report(json_file, json.dumps(report, ensure_ascii=False) + "\n")
    write_report(csv_file, to_csv(report))
    write_report(markdown_file, to_markdown(report))
    cells = [figures for model in report["models"].values() for figures in model["environments"].values()]
    if failed := sum(figures["failed"] for figures in cells):
        error = next(figures["error"] for figures in cells if figures["error"])
        hint = f"; play them again with: starpod eval --to {shlex.quote(str(to))} --retry-failed" if to else ""
        raise click.ClickException(f"{failed} episodes failed, the first one with: {error}{hint}")
