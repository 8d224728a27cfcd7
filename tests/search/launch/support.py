"""A fleet to print, and values that break with bad quoting."""

from __future__ import annotations

from typing import Any

from hpsearch.search.launch.launch import LaunchConfig, render_manifest

AWAY = "postgresql://user@127.0.0.1:1/optuna"
# Valid names with special characters of shells, YAML, Python and systemd, which must be passed unchanged.
URL = 'postgresql://user@host/it\'s%20"a"$HOME`x`$(x)#db?options=-c%20a\\b'
HOME = '/srv/it\'s "a" $HOME %i `x` $(x) #home\\'


def launch(**changed: Any) -> LaunchConfig:
    """Return the configuration of four workers under Slurm, with changes."""
    return LaunchConfig(**{"engine": "slurm", "study": "wine", "workers": 4, "storage_url": AWAY, **changed})


def text(**changed: Any) -> str:
    """Return the printed script."""
    return render_manifest(launch(**changed))
