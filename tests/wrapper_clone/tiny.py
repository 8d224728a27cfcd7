"""The command of the tiny clone: it prints its arguments and process, or waits for SIGTERM."""

import json
import os
import signal
import sys
import threading
from pathlib import Path


def main() -> int:
    """Print this process as JSON; `exit N` ends with N, `wait` waits for SIGTERM and then ends with 7."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    print(
        json.dumps({"argv": sys.argv[1:], "cwd": str(Path.cwd()), "pid": os.getpid(), "prefix": sys.prefix}), flush=True
    )
    if sys.argv[1:2] == ["wait"]:
        stop.wait()
        return 7
    return int(sys.argv[2]) if sys.argv[1:2] == ["exit"] else 0
