"""Run `starpod serve` as `python -m starpod.env_server`, without the client. An error is also printed as one line."""

import sys

import click

from starpod.env_server.cli import serve

if __name__ == "__main__":
    try:
        serve.main(standalone_mode=False)
    except click.ClickException as error:
        print(f"starpod: {error.format_message()}", file=sys.stderr)
        sys.exit(error.exit_code)
