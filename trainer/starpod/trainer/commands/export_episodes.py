"""`starpod export-episodes`: recorded episodes in a format of other tools."""

from __future__ import annotations

import json
from pathlib import Path

import click

from starpod.trainer.data.atif import to_atif
from starpod.trainer.data.files import SUFFIXES, BadEpisodes, episode_files, read_episodes


@click.command(epilog="Example: starpod export-episodes runs/lake trajectories --solved")
@click.argument("path", metavar="EPISODES.jsonl|RUN_DIR", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--format", "style", type=click.Choice(["atif"]), default="atif", help="Format. atif: trajectories of Harbor."
)
@click.option("--tokens", is_flag=True, help="Include token ids and log-probabilities of all prompts and replies.")
@click.option(
    "--model", default="", show_default=False, metavar="NAME", help="Name of the model, to be written to the files."
)
@click.option("--solved", is_flag=True, help="Write only episodes with success.")
def export_episodes(path: Path, out: Path, style: str, tokens: bool, model: str, solved: bool) -> None:
    """Write each recorded episode to a separate file in the folder OUT.

    The episodes are those of a file (.jsonl or .jsonl.gz), or all of the folder of a run. Episodes without a turn are
    omitted.
    """
    written_count = skipped_count = 0
    try:
        for file in episode_files(path):
            stem = file.name[: -max(len(suffix) for suffix in SUFFIXES if file.name.endswith(suffix))]
            for number, episode in enumerate(read_episodes(file), 1):
                if not episode.turns or (solved and not episode.success):
                    skipped_count += 1
                    continue
                name = f"{stem}-{number:05d}"
                trajectory = to_atif(episode, name, model=model, tokens=tokens)
                out.mkdir(parents=True, exist_ok=True)
                text = json.dumps(trajectory, ensure_ascii=False, indent=None if tokens else 1)
                (out / f"{name}.{style}.json").write_text(text + "\n", encoding="utf-8")
                written_count += 1
    except BadEpisodes as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{out}: {error.strerror}") from error
    if not written_count:
        raise click.ClickException(f"{path} holds no such episode")
    click.echo(f"{out}: {written_count} episodes" + (f"; {skipped_count} left out" if skipped_count else ""))
