"""Small clones of a project with the real wrapper ./hpsearch, and packages for them."""

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent.parent
PYTHON = os.path.realpath(sys.executable)  # not that of the virtual environment, because the wrapper creates one
CONSTRAINTS = ("constraints.txt", "constraints-torch.txt")


class Clone:
    """A clone of the tiny project with the real wrapper, and the environment of its calls."""

    def __init__(self, root: Path, python: str = PYTHON) -> None:
        shutil.copytree(REPOSITORY / "tests" / "wrapper_clone", root, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPOSITORY / "hpsearch", root)
        (root / "src" / "hpsearch").mkdir(parents=True)
        shutil.copy(REPOSITORY / "src" / "hpsearch" / "changeable_paths.py", root / "src" / "hpsearch")
        (root / "constraints.txt").write_text("")
        (root / "constraints-torch.txt").write_text("# torch==2.13.0\n")
        self.root, self.venv, self.python = root, root / ".venv", python
        tools = root.parent / "tools"
        tools.mkdir(exist_ok=True)
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        assert uv, "uv belongs to the test extra"
        shutil.copy(uv, tools)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        self.environment = {
            **kept,
            "PATH": f"{tools}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "PIP_CONFIG_FILE": os.devnull,
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def command(self, *arguments: str) -> list[str]:
        return [self.python, str(self.root / "hpsearch"), *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self.command(*arguments), env=self.environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), env=self.environment, capture_output=True, text=True, check=False, **options
        )

    def require(self, *wheels: Path) -> None:
        """Make the project depend on these wheels, with their hashes in the constraints."""
        path = self.root / "pyproject.toml"
        names = [wheel.name.split("-")[0] for wheel in wheels]
        path.write_text(
            re.sub(r"^dependencies = .*", f"dependencies = {json.dumps(names)}", path.read_text(), flags=re.M)
        )
        for wheel in wheels:
            change(self.root / CONSTRAINTS[wheel.name.startswith("torch-")], pin(wheel))

    def builds(self) -> int:
        path = self.root / "builds"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def lock_is_free(self) -> bool:
        with (self.venv / "hpsearch.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def site_packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.venv)}))


def change(path: Path, text: str = "# changed\n") -> None:
    with path.open("a") as file:
        file.write(text)


def make_wheel(folder: Path, name: str, version: str = "1.0", more: str = "") -> Path:
    """Build a wheel with one module in ``folder``, where only a configured installer finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", f"VALUE = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def make_source(folder: Path, name: str, code: str) -> None:
    """Write the source archive of a package that runs this code when it is built, with a build backend of its own."""
    with tarfile.open(folder / f"{name}-1.0.tar.gz", "w:gz") as archive:
        project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        for path, text in (
            ("PKG-INFO", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"),
            ("pyproject.toml", f'{project}[project]\nname = "{name}"\ndynamic = ["version"]\n'),
            ("backend.py", code),
        ):
            entry = tarfile.TarInfo(f"{name}-1.0/{path}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))


def pin(wheel: Path) -> str:
    name, version, *_ = wheel.name.split("-")
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def there(clone: Clone) -> set[str]:
    return {path.name.removesuffix(".dist-info") for path in clone.site_packages().glob("*.dist-info")}
