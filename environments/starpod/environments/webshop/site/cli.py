"""`starpod webshop site`: the shop as a web site."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import click

from starpod.client import TLS
from starpod.client.transport import Transport
from starpod.env_server.registry import Registry, RegistryError
from starpod.report.site import site_options
from starpod.serving.sockets import link, listen

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_ENVIRONMENT = "webshop-v1"


@click.command(epilog="Example: starpod webshop site --store small=stores/small --port 8080")
@click.argument("address", metavar="[ADDRESS]", default="")
@site_options(port=8080)
@click.option(
    "--store",
    "stores",
    multiple=True,
    metavar="NAME=PATH",
    help="Folder of a store to sell from, if this process starts the server. Repeatable.",
)
@click.option("--pictures", is_flag=True, help="Let browsers load the products' own pictures over the network.")
@click.option("--token-file", type=_FILE, help="File with the bearer token that the server asks for.")
@click.option("--ca", type=_FILE, help="PEM file of the server's certificate authority; turns TLS on.")
@click.option("--certificate", type=_FILE, help="PEM file of the client's certificate, if the server wants mTLS.")
@click.option("--key", type=_FILE, help="PEM file of the key of --certificate.")
def site(
    address: str,
    host: str,
    port: int,
    hosts: tuple[str, ...],
    stores: tuple[str, ...],
    pictures: bool,
    token_file: Path | None,
    ca: Path | None,
    certificate: Path | None,
    key: Path | None,
) -> None:
    """Open the shop as a web site, to shop or to watch an agent's session.

    ADDRESS (host:port) is a server of webshop-v1. Without ADDRESS, this process starts one. Prints one line with the
    site's address when ready. All visitors of the site use the server with the token of --token-file.
    """
    if address and not re.fullmatch(r"\S*:\d+", address):
        raise click.BadParameter(f"{address!r} is not host:port, e.g. 127.0.0.1:50051", param_hint="ADDRESS")
    if (certificate or key) and not (ca and certificate and key):
        raise click.UsageError("--certificate and --key go together, and with --ca")
    if not address and (token_file or ca):
        raise click.UsageError("--token-file and --ca are about a server: give its ADDRESS")
    if address and stores:
        raise click.UsageError("--store is about a server in this process: leave out ADDRESS")
    from starpod.env_server.server.listening import ServerError

    transport = Transport(token_file, TLS(ca, certificate, key) if ca else None)
    names = {host, *hosts}
    try:
        asyncio.run(_serve(address, stores, host=host, port=port, hosts=names, pictures=pictures, transport=transport))
    except RegistryError as error:
        raise click.UsageError(str(error)) from error
    except (ServerError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


async def _serve(
    address: str,
    stores: Sequence[str],
    *,
    host: str,
    port: int,
    hosts: Collection[str],
    pictures: bool,
    transport: Transport,
) -> None:
    from starpod.env_server.operation.config import ServerConfig
    from starpod.env_server.server.server import EnvironmentServer
    from starpod.serving.http import serve

    from .app import create_app
    from .service import Service

    async with AsyncExitStack() as stack:
        if not address:
            registry = Registry.installed().select([_ENVIRONMENT])
            if stores:
                registry.use_stores(stores)
            server = EnvironmentServer(registry.prepare([_ENVIRONMENT]), ServerConfig(port=0))
            await server.start()
            stack.push_async_callback(server.stop, 0)
            address = server.address
        app = create_app(Service(address, transport), environment=_ENVIRONMENT, pictures=pictures, hosts=hosts)
        listener = stack.enter_context(listen(host, port))
        print(f"The shop is open at {link(listener, host)}", flush=True)
        await serve(app, listener)
