"""`starpod export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(epilog="Example: starpod export runs/lake lake-model")
@click.argument("source", metavar="RUN_OR_CHECKPOINT", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--which",
    type=click.Choice(["best", "latest"]),
    default="best",
    help="Checkpoint of a run: the one with the best evaluation, or the newest.",
)
@click.option("--adapter", is_flag=True, help="Write only the LoRA adapter, instead of merging it into the weights.")
@click.option(
    "--agent",
    default="",
    show_default=False,
    metavar="NAME",
    help="Agent whose policy to write, if the run trained several policies (script.policies).",
)
def export(source: Path, out: Path, which: str, adapter: bool, agent: str) -> None:
    """Write the model of a run or checkpoint to the new folder OUT, for transformers, vLLM and other programs.

    OUT also contains the settings of prompts, limits and sampling, which `starpod eval OUT`, `gateway` and `serve` use.
    """
    import transformers

    from starpod.trainer.checkpoints.export import describe_result
    from starpod.trainer.checkpoints.export import export as write
    from starpod.trainer.checkpoints.trained import load_trained

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    trained = load_trained(source, "best" if which == "best" else "latest")
    write(trained, out, adapter=adapter, agent=agent)
    result = describe_result(trained)
    click.echo(f"{out}: the policy after {trained.step} iterations{result and f', {result}'}")
