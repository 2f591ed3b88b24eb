"""`python -m starpod.env_server`: the same as `starpod serve`, without the client."""

from starpod.env_server.cli import serve

if __name__ == "__main__":
    serve()
