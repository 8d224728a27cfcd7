"""The wheel holds what an installation needs beside the modules."""

import subprocess
import sys
import zipfile
from pathlib import Path

from docs.rooms import PACKAGES, ROOT


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(tmp_path: Path) -> None:
    build = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    source = tmp_path / "source"
    inside = tracked()
    for name in ("pyproject.toml", "README.md", "LICENSE", *inside):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=source, capture_output=True, text=True, check=True
    )
    wheel = zipfile.ZipFile(tmp_path / done.stdout.split()[-1])
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == {path.removeprefix("src/") for path in inside}
    points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "hpsearch = hpsearch.__main__:main" in wheel.read(points).decode()


def tracked() -> set[str]:
    """The files of the package, as a clone has them: behind the links of src/hpsearch too."""
    root = ROOT / "src" / "hpsearch"
    paths = [path for folder in (root, *(root / name for name in PACKAGES)) for path in folder.rglob("*")]
    return {path.relative_to(ROOT).as_posix() for path in paths if path.is_file() and "__pycache__" not in path.parts}
