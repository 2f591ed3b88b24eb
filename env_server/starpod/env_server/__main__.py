"""`python -m starpod.env_server`: the same as `starpod serve`, without the client. Its errors are one line, too."""

import sys

import click

from starpod.env_server.cli import serve

if __name__ == "__main__":
    try:
        serve.main(standalone_mode=False)
    except click.ClickException as error:
        print(f"starpod: {error.format_message()}", file=sys.stderr)
        sys.exit(error.exit_code)
