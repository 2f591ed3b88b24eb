"""`starpod gateway`: the command line."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO, cast

import click

from starpod.report.site import site_options
from starpod.serving.options import Command, Number, duration, size
from starpod.serving.sockets import claim_output, is_loopback, link, listen
from starpod.trainer.output.files import FolderLocked
from starpod.trainer.prompts.formats.table import FORMATS

if TYPE_CHECKING:
    from starpod.gateway.serving import Serving


@click.command(
    cls=Command,
    headings={
        "Address": ["host", "port", "hosts", "gateway_token_file"],
        "Replies": ["engine", "urls", "temperature", "max_tokens", "context", "tool_format", "seed"],
        "Sessions": ["out", "max_sessions", "idle_timeout", "max_body_bytes"],
    },
    epilog="Example: starpod gateway runs/lake --port 8091 --out gateway",
)
@click.argument("model")
@site_options(port=8091)
@click.option(
    "--engine",
    type=click.Choice(["torch", "vllm", "vllm_remote"]),
    default="torch",
    help="Program that samples. torch: on a CPU or GPU. vllm: faster, needs the extra vllm. vllm_remote: the "
    "servers at --url, which serve MODEL: a run is exported first.",
)
@click.option(
    "--url", "urls", multiple=True, metavar="URL", help="Server of `starpod vllm`, for vllm_remote. Repeatable."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="gateway",
    help="Folder for sessions and episodes. Sessions in it continue.",
)
@click.option(
    "--gateway-token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the token that opens sessions and signs API keys; needed if other machines can reach the gateway.",
)
@click.option("--temperature", type=Number(0), show_default="the run's, or 1", help="Sampling temperature.")
@click.option(
    "--max-tokens", type=click.IntRange(1), show_default="the run's, or 400", help="Maximum tokens of a reply."
)
@click.option(
    "--max-model-len",
    "context",
    type=click.IntRange(2),
    show_default="the run's, or 3600",
    help="Maximum tokens of prompt and reply.",
)
@click.option(
    "--tool-format",
    type=click.Choice(list(FORMATS)),
    show_default="the chat template's",
    help="Form in which the model writes tool calls.",
)
@click.option("--max-sessions", type=click.IntRange(1), default=1024, help="Maximum open sessions.")
@click.option(
    "--idle-timeout",
    type=duration(0.001),
    default="1h",
    help="Time without a call after which a session ends as failed, because its agent may be dead.",
)
@click.option("--max-body-bytes", type=size(), default="8MiB", help="Maximum size of a request's body.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of all random streams.")
def gateway(
    model: str,
    host: str,
    port: int,
    hosts: tuple[str, ...],
    engine: str,
    urls: tuple[str, ...],
    out: Path,
    gateway_token_file: Path | None,
    temperature: float | None,
    max_tokens: int | None,
    context: int | None,
    tool_format: str | None,
    max_sessions: int,
    idle_timeout: float,
    max_body_bytes: int,
    seed: int,
) -> None:
    """Serve MODEL to unmodified agents over the APIs of OpenAI and Anthropic, and keep the tokens of each session.

    MODEL is the folder of a run, of a checkpoint or of `starpod export`, a Hugging Face name or folder, or smollm2.
    Prints one line with the address when ready. The API key of an agent names its session.
    """
    token = gateway_token_file.read_text(encoding="utf-8-sig").strip() if gateway_token_file else ""
    if gateway_token_file and not token:
        raise click.UsageError(f"{gateway_token_file} is empty")
    if not token and not is_loopback(host):
        raise click.UsageError("others can reach this address: give --gateway-token-file, or leave --host at 127.0.0.1")
    import uvloop

    from starpod.gateway.serving import Serving

    serving = Serving(
        model=model,
        folder=out,
        engine=cast(Literal["torch", "vllm", "vllm_remote"], engine),
        urls=urls,
        temperature=temperature,
        max_tokens=max_tokens,
        context=context,
        calls=tool_format or "",
        seed=seed,
    )
    work = _serve(
        serving,
        token,
        claim_output(),
        host=host,
        port=port,
        hosts={host, *hosts},
        most_sessions=max_sessions,
        idle_seconds=idle_timeout,
        most_body_bytes=max_body_bytes,
    )
    try:
        uvloop.run(work)
    except FolderLocked as error:
        raise click.ClickException(
            f"another gateway ({error}) writes to {out}: give another folder with --out"
        ) from None


async def _serve(
    serving: Serving,
    token: str,
    ready: TextIO,
    *,
    host: str,
    port: int,
    hosts: Collection[str],
    most_sessions: int,
    idle_seconds: float,
    most_body_bytes: int,
) -> None:
    from starpod.gateway.app import Keys, create_app
    from starpod.gateway.control import endpoints
    from starpod.serving.http import serve

    with closing(listen(host, port)) as listener:
        async with serving.start(most_sessions, idle_seconds) as records:
            keys = Keys(token)
            records.begins_unknown = not token
            app = create_app(
                records,
                model=serving.model,
                keys=keys,
                hosts=hosts,
                most_body_bytes=most_body_bytes,
                more=endpoints(records, keys),
            )
            print(link(listener, host).rstrip("/"), file=ready, flush=True)
            await serve(app, listener)
