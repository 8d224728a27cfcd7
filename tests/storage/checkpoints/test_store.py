"""The checkpoint store: a stored file comes back unchanged or is rejected."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import pytest

from hpsearch.storage import files
from hpsearch.storage.checkpoints.store import CheckpointStore, StoredFile, is_identical
from hpsearch.storage.errors import CheckpointStoreError, StorageError, StoredCheckpointError


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/a store" if request.param == "file" else f"memory://{uuid.uuid4().hex}/store"


@pytest.fixture
def store(url: str) -> CheckpointStore:
    return CheckpointStore(url)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    path = tmp_path / "last.pt"
    path.write_bytes(os.urandom(100_000))
    return path


def content(url: str, name: str, data: bytes | None = None) -> bytes:
    """Return the stored content of a name, read without the store; write `data` first if given."""
    fs, root = fsspec.core.url_to_fs(url)
    if data is not None:
        fs.rm_file(f"{root}/{name}")
        fs.pipe_file(f"{root}/{name}", data)
    return bytes(fs.cat_file(f"{root}/{name}"))


def test_a_stored_file_round_trips(store: CheckpointStore, url: str, local: Path, tmp_path: Path) -> None:
    stored = store.put(local, name="s-1/0000/0003-1.pt")
    assert content(url, stored.path) == local.read_bytes()
    assert stored.size == 100_000
    back = tmp_path / "back.pt"
    back.write_bytes(b"an older one")
    store.get(stored, back)
    assert back.read_bytes() == local.read_bytes()
    assert is_identical(back, stored)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["back.pt", "last.pt"]


@pytest.mark.parametrize("change", ["torn", "one byte", "empty", "longer"])
def test_a_changed_file_is_rejected_and_the_local_one_kept(
    store: CheckpointStore, url: str, local: Path, tmp_path: Path, change: str
) -> None:
    stored = store.put(local, name="s-1/0000/0003-1.pt")
    whole = local.read_bytes()
    data = {
        "torn": whole[:-1],
        "one byte": whole[:50_000] + bytes([whole[50_000] ^ 1]) + whole[50_001:],
        "empty": b"",
        "longer": whole + b"x",
    }[change]
    content(url, stored.path, data)
    target = tmp_path / "target.pt"
    target.write_bytes(b"as before")
    with pytest.raises(StoredCheckpointError, match="damaged: its checksum"):
        store.get(stored, target)
    assert target.read_bytes() == b"as before"
    assert not is_identical(target, stored)


def test_a_missing_file_is_an_error(store: CheckpointStore, local: Path, tmp_path: Path) -> None:
    stored = store.put(local, name="s-1/0000/0003-1.pt")
    store.remove([stored.path, "s-1/0000/never.pt"])
    with pytest.raises(StoredCheckpointError, match=r"0003-1.pt does not exist at"):
        store.get(stored, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


def test_a_folder_in_place_of_a_file_is_a_missing_file(tmp_path: Path, local: Path) -> None:
    store = CheckpointStore(str(tmp_path / "store"))
    stored = store.put(local, name="s-1/0000/0003-1.pt")
    (tmp_path / "store" / stored.path).unlink()
    (tmp_path / "store" / stored.path).mkdir()
    with pytest.raises(StoredCheckpointError, match=r"0003-1.pt does not exist at"):
        store.get(stored, tmp_path / "x.pt")


def test_files_are_listed_by_folder(store: CheckpointStore, local: Path) -> None:
    for name in ("s-1/0000/0000-1.pt", "s-1/0001/0000-1.pt", "s-10/0000/0000-1.pt"):
        store.put(local, name=name)
    assert store.find("s-1") == ["s-1/0000/0000-1.pt", "s-1/0001/0000-1.pt"]
    assert store.find("s-2") == []
    store.remove_folder("s-1/0000")
    store.remove_folder("s-7")
    assert store.find("s-1") == ["s-1/0001/0000-1.pt"]


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x.pt", "s/../../x.pt", "..\\x.pt"])
def test_names_outside_of_the_store_are_rejected(
    store: CheckpointStore, local: Path, tmp_path: Path, name: str
) -> None:
    with pytest.raises(StorageError, match="not a relative path below"):
        store.put(local, name=name)
    with pytest.raises(StorageError, match="not a relative path below"):
        store.get(StoredFile(name, "0" * 64, 1), tmp_path / "x")
    with pytest.raises(StorageError, match="not a relative path below"):
        store.remove_folder(name)


def test_the_store_is_checked_before_use(store: CheckpointStore, url: str) -> None:
    store.check()
    fs, root = fsspec.core.url_to_fs(url)
    assert fs.exists(root)
    assert fs.find(root) == []


def test_a_folder_store_uses_hard_links(tmp_path: Path, local: Path) -> None:
    store = CheckpointStore(str(tmp_path / "store"))
    stored = store.put(local, name="s-1/0000/0000-1.pt")
    kept = tmp_path / "store" / stored.path
    assert kept.samefile(local)
    back = tmp_path / "back.pt"
    store.get(stored, back)
    assert back.samefile(kept)
    # A session replaces its file like this. The stored file must not change.
    new = tmp_path / "new"
    new.write_bytes(b"the next epoch")
    new.replace(local)
    assert is_identical(kept, stored)


def test_a_store_on_another_file_system_uses_copies(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    source = memory / f"hpsearch-test-{uuid.uuid4().hex}"
    source.write_bytes(b"x" * 1000)
    try:
        store = CheckpointStore(str(tmp_path / "store"))
        stored = store.put(source, name="s-1/0000/0000-1.pt")
        assert store.find("s-1") == [stored.path], "and no temporary file stays"
        source.unlink()
        store.get(stored, source)
        assert source.read_bytes() == b"x" * 1000
    finally:
        source.unlink(missing_ok=True)


def test_a_torn_file_in_the_store_is_replaced_atomically(tmp_path: Path, local: Path) -> None:
    """A store without atomic uploads can have a torn file when the same attempt stores the same epoch again."""
    store = CheckpointStore(str(tmp_path / "store"))
    torn = tmp_path / "store" / "s-1" / "0000" / "0000-1.pt"
    files.make_folder(torn.parent)
    torn.write_bytes(local.read_bytes()[:10])
    assert is_identical(torn, store.put(local, name="s-1/0000/0000-1.pt"))


FULL = """
import resource, sys
from pathlib import Path
from hpsearch.storage.checkpoints.store import CheckpointStore
from hpsearch.storage.errors import CheckpointStoreError
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
import os
os.link = lambda *_: (_ for _ in ()).throw(OSError(18, "another file system"))
store = CheckpointStore(sys.argv[1])
try:
    store.put(Path(sys.argv[2]), name="s-1/0000/0000-1.pt")
except CheckpointStoreError as error:
    print(error, store.find("s-1"))
"""


def test_a_full_disk_is_an_error_and_leaves_no_file(tmp_path: Path, local: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path / "store", local], capture_output=True, text=True, check=True
    )
    assert "cannot store s-1/0000/0000-1.pt (File too large); free disk space []" in done.stdout
    assert done.stdout.startswith("--checkpoint-url ")


def test_a_folder_without_write_access_is_an_error(tmp_path: Path, local: Path) -> None:
    (tmp_path / "file").touch()
    store = CheckpointStore(str(tmp_path / "file"))
    with pytest.raises(CheckpointStoreError, match=r"--checkpoint-url .*file' cannot be written \("):
        store.check()
    with pytest.raises(CheckpointStoreError, match="cannot store a/b"):
        store.put(local, name="a/b")


def test_a_local_folder_may_contain_the_separator_of_url_chains(local: Path, tmp_path: Path) -> None:
    CheckpointStore(str(tmp_path / "a::b" / "store")).put(local, name="0000-1.pt")
    assert [path.name for path in tmp_path.glob("*/store/*")] == ["0000-1.pt"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("foo://bucket", ["unknown protocol 'foo'", "s3"]),
        ("s3://bucket/file?versionId=", ["contains ? or #", "without them"]),
        ("memory://a#1", ["contains ? or #"]),
        ("simplecache::webhdfs://host/x", ["contains '::'", "the last URL"]),
        ("/folder/\udcff", ["is not valid UTF-8"]),
        ("", ["is empty", "s3://bucket/prefix"]),
        ("file://relative/folder", ["not an absolute path", "three slashes"]),
    ],
)
def test_an_unusable_url_is_an_error_of_one_line(url: str, words: list[str]) -> None:
    with pytest.raises(StorageError) as caught:
        CheckpointStore(url)
    assert "\n" not in str(caught.value)
    for word in ["--checkpoint-url", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("sftp", "paramiko")])
def test_a_missing_driver_is_an_error_with_its_package(protocol: str, package: str) -> None:
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError:
        with pytest.raises(StorageError, match=rf"needs a package that is not installed; run pip install {package}$"):
            CheckpointStore(f"{protocol}://bucket/prefix", setting="HPSEARCH_CHECKPOINT_URL")
    else:
        pytest.skip(f"{package} is installed")


class Refusing(fsspec.AbstractFileSystem):
    """A driver whose errors contain its arguments."""

    protocol = "refusing"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "bucket"

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"given": path}

    def __init__(self, given: str) -> None:
        super().__init__()
        self.given = given

    def put_file(self, *args: object, **kwargs: object) -> None:
        raise ConnectionError(errno.ECONNREFUSED, f"no answer from {self.given}: wrong key 'ge heim'?")

    find = cp_file = rm = makedirs = put_file


def test_passwords_in_urls_are_not_shown(local: Path) -> None:
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    store = CheckpointStore("refusing://me:ge%20heim@host/bucket")
    assert store.url == "refusing://me:***@host/bucket"
    for call in (lambda: store.put(local, name="a"), lambda: store.find("a"), lambda: store.remove_folder("a")):
        with pytest.raises(CheckpointStoreError) as caught:
            call()
        assert "heim" not in str(caught.value)
        assert "me:***@host" in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
