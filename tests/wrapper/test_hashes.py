"""The wrapper ./hpsearch installs only packages with the hashes of the constraints files."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.wrapper.clone import CONSTRAINTS, REPOSITORY, Clone, change, make_source, make_wheel, pin, there

pytestmark = pytest.mark.slow


INSTALLERS = ["uv", pytest.param("pip", marks=pytest.mark.soak)]  # pip needs several times as long


@pytest.mark.parametrize("installer", INSTALLERS)
def test_a_package_that_was_replaced_on_its_index_is_not_installed(
    clone: Clone, tmp_path: Path, installer: str
) -> None:
    """An attacker controls the index: other contents under the pinned version, or an additional dependency."""
    folder = tmp_path / "wheels"
    if installer == "pip":
        (tmp_path / "tools" / "uv").unlink()
    clone.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    clone.require(make_wheel(folder, "torch", "2.13.0"), make_wheel(folder, "honest"))
    for name, version in (("torch", "2.13.0"), ("honest", "1.0")):
        kept = (folder / f"{name}-{version}-py3-none-any.whl").read_bytes()
        replaced = make_wheel(folder, name, version, "Requires-Dist: evil\n")
        make_wheel(folder, "evil")
        refused = clone.run("x")
        assert refused.returncode in (1, 2), refused.stderr
        assert re.search("hash", refused.stderr, re.IGNORECASE)
        assert not there(clone) & {f"{name}-{version}", "evil-1.0"}
        replaced.write_bytes(kept)
    assert clone.run("x").returncode == 0
    assert {"torch-2.13.0", "honest-1.0"} <= there(clone)


@pytest.mark.soak
@pytest.mark.parametrize("installer", INSTALLERS)
def test_no_package_is_built_before_its_hash_is_compared(clone: Clone, tmp_path: Path, installer: str) -> None:
    """A build runs the code of the package."""
    folder = tmp_path / "wheels"
    if installer == "pip":
        (tmp_path / "tools" / "uv").unlink()
    clone.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    clone.require(make_wheel(folder, "torch", "2.13.0"), make_wheel(folder, "honest"))
    make_wheel(folder, "honest", "1.0", "Requires-Dist: evil\n")
    make_source(folder, "evil", f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    assert clone.run("x").returncode in (1, 2)
    assert not (tmp_path / "ran").exists()


def test_uv_reads_no_settings_of_folders_above(clone: Clone, tmp_path: Path) -> None:
    """Another user can write them, and so choose the index or the cache of packages."""
    shutil.copy(REPOSITORY / "pyproject.toml", clone.root)
    (tmp_path / "uv.toml").write_text("invalid")
    command = [tmp_path / "tools" / "uv", "pip", "list", "--python", clone.python]
    done = subprocess.run(command, cwd=clone.root, env=clone.environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "uv.toml" in done.stderr) == (0, False), done.stderr


@pytest.mark.soak
def test_a_cache_of_uv_that_others_can_write_to_is_not_used(clone: Clone, open_folder: Path, tmp_path: Path) -> None:
    """Uv does not verify packages from its cache."""
    cache = open_folder / "shared" / "uv"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    clone.environment |= {"XDG_CACHE_HOME": str(cache.parent)}
    folder = tmp_path / "wheels"
    clone.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    clone.require(make_wheel(folder, "torch", "2.13.0"), make_wheel(folder, "honest"))
    assert clone.run("x").returncode == 0
    assert not list(cache.iterdir())
    assert (clone.venv / "cache").is_dir()


@pytest.mark.soak
@pytest.mark.parametrize("name", [pytest.param("torch", marks=pytest.mark.soak), "uv"])
def test_uv_from_the_index_is_verified(clone: Clone, tmp_path: Path, name: str) -> None:
    """Without uv on PATH, the wrapper downloads the pinned one, and never runs another."""
    (tmp_path / "tools" / "uv").unlink()
    folder = tmp_path / "wheels"
    folder.mkdir()
    change(clone.root / "constraints.txt", pin(make_wheel(folder, "uv", "0.13.8")))
    if name == "uv":
        make_wheel(folder, "uv", "0.13.8", "Summary: another\n")
    clone.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    done = clone.run("x")
    assert "downloading uv" in done.stderr
    assert (clone.venv / "installer" / "uv.py").exists() == (name != "uv")


@pytest.mark.soak
def test_a_private_package_is_not_replaced_by_a_newer_one_of_the_public_index(clone: Clone, tmp_path: Path) -> None:
    """Dependency confusion: anyone can register the name of a private package on the public index."""

    def publish(index: str, name: str, version: str) -> None:
        wheel = make_wheel(tmp_path / index / "files", name, version)
        page = tmp_path / index / "simple" / name / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f'<!DOCTYPE html><html><body><a href="{wheel.as_uri()}">{wheel.name}</a></body></html>')

    publish("private", "inhouse", "1.0")
    publish("private", "mirrored", "1.0")
    publish("public", "inhouse", "9.0")
    publish("public", "mirrored", "2.0")
    clone.environment |= {
        "PIP_INDEX_URL": (tmp_path / "public" / "simple").as_uri(),
        "PIP_EXTRA_INDEX_URL": (tmp_path / "private" / "simple").as_uri(),
    }
    done = clone.run("add", "inhouse", "mirrored>1")
    assert done.returncode == 0, done.stderr
    assert {"inhouse-1.0", "mirrored-2.0"} <= there(clone), "versions that the private index lacks come from the other"


@pytest.mark.soak
def test_a_build_of_torch_without_hashes_is_named(clone: Clone, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    clone.require(make_wheel(folder, "torch", "2.13.0"), make_wheel(folder, "honest"))
    make_wheel(folder, "torch", "2.13.0", "Summary: another build\n")
    clone.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "HPSEARCH_TORCH_BACKEND": "cu126"}
    done = clone.run("x")
    assert done.returncode == 0, done.stderr
    assert "constraints-torch.txt has no hashes of torch build cu126: it is not verified" in done.stderr
    assert there(clone) >= {"torch-2.13.0", "honest-1.0"}


@pytest.mark.soak
def test_requirements_are_printed_with_hashes_for_other_installers(clone: Clone, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "honest")
    clone.require(wheel)
    assert clone.run("requirements", "server").stdout == "honest==1.0\n"
    assert clone.run("requirements", "none").stderr.startswith("hpsearch: error: pyproject.toml has no extra 'none'; ")
    printed = clone.run("hashes", input="# resolved\nhonest==1.0\n").stdout
    assert printed.split() == pin(wheel).replace("\\", "").split()
    for line in ("evil==1.0", "honest==2.0"):
        refused = clone.run("hashes", input=f"{line}\n")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"constraints.txt has no hash of {line}: check the index" in refused.stderr
    assert not clone.venv.exists()


def test_constraints_have_the_hashes_of_all_packages() -> None:
    """The repository's own files: also torch's CPU builds, which PyPI does not have."""
    for name in CONSTRAINTS:
        entries = re.findall(r"^[^#\s].*\n(?: .*\n)*", (REPOSITORY / name).read_text(), re.MULTILINE)
        assert len(entries) > 15
        bad = [
            entry
            for entry in entries
            if not re.match(r"\S+==\S+ .*\\(\n    --hash=sha256:[0-9a-f]{64}( \\)?)+\n", entry)
        ]
        assert bad == []
        assert not re.search("://|index-url|find-links", re.sub("^#.*", "", "".join(entries)))
    text = (REPOSITORY / "constraints-torch.txt").read_text()
    own = re.findall(r"^# (--hash=\S+) torch-2\.13\.0\+(?:cpu|cu130)-cp(\d+)-\S+$", text, re.MULTILINE)
    assert {"311", "312", "313", "314"} == {python for _, python in own}
    torch = text[text.index("\ntorch==2.13.0 ") :].split("\ntriton")[0]
    assert [item for item, _ in own if item not in torch] == []
