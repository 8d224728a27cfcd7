"""Where Weights & Biases is, and whether there is a key for it: by the environment alone, without its package."""

from __future__ import annotations

import netrc
import os
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from hpsearch.storage.errors import StorageError
from hpsearch.storage.wandb_runs.connection import WandbAwayError

_HOSTED = (
    "api.forge.coreweave.com",
    "forge.coreweave.com",
    "api.wandb.ai",
)  # the same service, by its package
_PATIENCE = 5.0  # seconds


_ONLINE, _MODES = {"online", "run", "shared"}, ("online", "offline", "shared", "disabled", "run", "dryrun")


def is_online() -> bool:
    """Whether runs go to a server, and not to files alone, by WANDB_MODE."""
    return os.environ.get("WANDB_MODE", "online") in _ONLINE


def server() -> str:
    """Return the address of the server."""
    return os.environ.get("WANDB_BASE_URL") or f"https://{_HOSTED[0]}"


def check_account(project: str) -> None:
    """Check that there is a key where one is needed.

    Raises:
        StorageError: there is none, or WANDB_MODE is no mode.
    """
    if (mode := os.environ.get("WANDB_MODE", "online")) not in _MODES:
        raise StorageError(f"WANDB_MODE {mode!r}: set it to online or offline, or leave it out")
    if is_online() and not _has_key():
        raise StorageError(
            f"--wandb {project}: no key of Weights & Biases: set WANDB_API_KEY, or WANDB_API_KEY_FILE, or run wandb "
            "login; or set WANDB_MODE=offline and send later with wandb sync"
        )


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(server()).netloc
    hosts = _HOSTED if host in _HOSTED else (host,)
    places = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for place in places:
        try:
            known = netrc.netrc(Path(place).expanduser())
        except (OSError, netrc.NetrcParseError, RuntimeError):
            continue
        # Its `default` entry is for any host, and so no key of this one.
        if any(host in known.hosts and known.hosts[host][2] for host in hosts):
            return True
    return False


def check_reachable() -> None:
    """Check that something answers where the server is; what it says is no matter.

    Raises:
        WandbAwayError: nothing does.
    """
    if urlsplit(server()).scheme not in {"http", "https"}:
        raise StorageError(f"WANDB_BASE_URL {server()}: must be the http(s):// address of a server")
    try:
        urllib.request.urlopen(server(), timeout=_PATIENCE).close()  # noqa: S310 the scheme is checked
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError) as error:
        raise WandbAwayError(f"{server()}: no answer ({getattr(error, 'reason', error)})") from None
