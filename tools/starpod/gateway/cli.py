"""`starpod gateway`: the command line."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO, cast

import click

from starpod.report.site import site_options
from starpod.serving.sockets import claim_output, is_loopback, link, listen

if TYPE_CHECKING:
    from starpod.gateway.serving import Serving


@click.command()
@click.argument("model")
@site_options(port=8091)
@click.option(
    "--engine",
    type=click.Choice(["torch", "vllm", "vllm_remote"]),
    default="torch",
    show_default=True,
    help="Engine that samples; see docs/advanced-training.md#engines.",
)
@click.option("--url", "urls", multiple=True, metavar="URL", help="Server of vllm_remote. Repeatable.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default="gateway",
    show_default=True,
    help="Folder for sessions and episodes.",
)
@click.option(
    "--gateway-token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the token that begins sessions and signs API keys; required if others can reach the gateway.",
)
@click.option("--temperature", type=click.FloatRange(0), help="Temperature of sampling. [default: the run's, or 1]")
@click.option("--max-tokens", type=click.IntRange(1), help="Maximum tokens of a reply. [default: the run's, or 400]")
@click.option(
    "--context", type=click.IntRange(2), help="Maximum tokens of prompt and reply. [default: the run's, or 3600]"
)
@click.option("--max-sessions", type=click.IntRange(1), default=1024, show_default=True, help="Maximum live sessions.")
@click.option(
    "--idle-minutes",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="End a session without a call for this long as failed: its agent may be dead.",
)
@click.option(
    "--max-body-mib", type=click.IntRange(1), default=8, show_default=True, help="Maximum MiB of a request's body."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all random streams.")
def gateway(
    model: str,
    host: str,
    port: int,
    hosts: tuple[str, ...],
    engine: str,
    urls: tuple[str, ...],
    folder: Path,
    gateway_token_file: Path | None,
    temperature: float | None,
    max_tokens: int | None,
    context: int | None,
    max_sessions: int,
    idle_minutes: float,
    max_body_mib: int,
    seed: int,
) -> None:
    """Serve MODEL to unmodified agents over OpenAI's and Anthropic's APIs, and keep the tokens of each session.

    MODEL is a run folder, a checkpoint, an exported or other Hugging Face model, or smollm2. Prints one line with the
    address when ready. An agent's API key names its session.
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
        folder=folder,
        engine=cast(Literal["torch", "vllm", "vllm_remote"], engine),
        urls=urls,
        temperature=temperature,
        max_tokens=max_tokens,
        context=context,
        seed=seed,
    )
    uvloop.run(
        _serve(
            serving,
            token,
            claim_output(),
            host=host,
            port=port,
            hosts={host, *hosts},
            most_sessions=max_sessions,
            idle_seconds=idle_minutes * 60,
            most_body_bytes=max_body_mib * 2**20,
        )
    )


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
