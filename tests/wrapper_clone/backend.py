"""A build backend without dependencies. It counts its builds, and delays them while a file `hold` exists."""

import os
import time
import zipfile
from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n" + "".join(
    f"Provides-Extra: {extra}\n" for extra in ("server", "test", "lint")
)
INFO = "tiny-1.0.dist-info"


def build_editable(wheel_directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
    """Write an editable wheel."""
    root = Path.cwd()
    with (root / "builds").open("a") as builds:
        builds.write(f"{os.getpid()}\n")
    while (root / "hold").exists():
        time.sleep(0.02)
    name = "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory) / name, "w") as wheel:
        wheel.writestr("tiny.pth", f"{root}\n")
        wheel.writestr(f"{INFO}/METADATA", METADATA)
        wheel.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{INFO}/entry_points.txt", "[console_scripts]\nhpsearch = tiny:main\n")
        wheel.writestr(f"{INFO}/RECORD", "")
    return name
