"""Imports in a thread while another thread calls `mlflow.autolog()`."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys, threading
from hpsearch.storage.mlflow.client import Tracking
from mlflow.utils.import_hooks import register_post_import_hook

Tracking("http://127.0.0.1:9")

def import_in_thread(_):  # MLflow holds the lock of its hooks, as while autolog() imports a package
    def import_missing(name):
        try:
            __import__(name)
        except ModuleNotFoundError:
            print("not found", flush=True)

    for name in ("missing_module", "hooked_module"):
        thread = threading.Thread(target=import_missing, args=[name], daemon=True)
        thread.start()
        thread.join(20)
        if thread.is_alive():
            os._exit(1)
    os._exit(0)

register_post_import_hook(lambda _: None, "hooked_module")  # adds MLflow's finder
register_post_import_hook(import_in_thread, "json")
"""


def test_an_import_of_a_thread_does_not_wait_for_autolog_in_another() -> None:
    result = subprocess.run([sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "not found\n" * 2), result.stderr
