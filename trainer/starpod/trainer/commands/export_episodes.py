"""`starpod export-episodes`: recorded episodes in a format of other tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from starpod.trainer.data.episode import Episode
from starpod.trainer.data.exports import FORMATS
from starpod.trainer.data.files import BadEpisodes, episode_files, named_episodes, training_files


@click.command(epilog="Example: starpod export-episodes runs/lake trajectories --solved")
@click.argument("path", metavar="EPISODES.jsonl|RUN_DIR", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--as",
    "name",
    type=click.Choice([*FORMATS]),
    default="atif",
    help="Format. " + ". ".join(f"{name}: {each.title}" for name, each in FORMATS.items()) + ".",
)
@click.option("--tokens", is_flag=True, help="Include token ids and log-probabilities of all prompts and replies.")
@click.option(
    "--model", default="", show_default=False, metavar="NAME", help="Name of the model, to be written to the files."
)
@click.option("--solved", is_flag=True, help="Write only episodes with success.")
def export_episodes(path: Path, out: Path, name: str, tokens: bool, model: str, solved: bool) -> None:
    """Write recorded episodes to OUT in a format that other tools read.

    The episodes are those of a file (.jsonl or .jsonl.gz), or all of the folder of a run or of `starpod eval --to`.
    Episodes without a turn are omitted. In a format for training, so are failed episodes and a run's evaluations.
    """
    skipped_count = 0

    def chosen() -> Iterator[tuple[str, Episode]]:
        nonlocal skipped_count
        for_training = FORMATS[name].for_training
        for file in (training_files if for_training else episode_files)(path):
            for key, episode in named_episodes(file):
                if episode.turns and (episode.success or not solved) and not (for_training and episode.failed):
                    yield key, episode
                else:
                    skipped_count += 1

    if tokens and not FORMATS[name].takes_tokens:
        raise click.UsageError(f"--as {name} has no place for token ids: leave out --tokens, or use --as atif")
    try:
        written_count = FORMATS[name].write(chosen(), out, model, tokens)
    except BadEpisodes as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{out}: {error.strerror}") from error
    if not written_count:
        raise click.ClickException(f"{path} holds no such episode")
    click.echo(f"{out}: {written_count} episodes" + (f"; {skipped_count} left out" if skipped_count else ""))
