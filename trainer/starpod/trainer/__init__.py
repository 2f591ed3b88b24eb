"""Training multi-turn agents with StarPO on environments that are served elsewhere."""

import os
from pathlib import Path


def _keep_temporary_folder_clean() -> None:
    """Give torch a folder for compiled code in the user's cache: it makes one in /tmp as soon as it is imported."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")).absolute()
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if there.is_dir() and os.access(there, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "starpod" / "torchinductor"))


_keep_temporary_folder_clean()
