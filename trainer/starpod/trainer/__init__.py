"""Training of multi-turn agents with StarPO on environments that run in servers."""

import os
from pathlib import Path


def _keep_temporary_folder_clean() -> None:
    """Move torch's folder for compiled code to the user's cache. By default, importing torch creates one in /tmp."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")).absolute()
    parent = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if parent.is_dir() and os.access(parent, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "starpod" / "torchinductor"))


_keep_temporary_folder_clean()
