"""The file of a backup: a complete file is read; any other is an error of one line, and nothing is written."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hpsearch.storage.backup import archive
from hpsearch.storage.backup.archive import (
    ARTIFACTS,
    MLFLOW_DUMP,
    STUDIES_DUMP,
    ArchiveReader,
    Manifest,
    UnpackedArchive,
    create_archive,
)
from hpsearch.storage.errors import StorageError

MANIFEST = Manifest(
    made_at="2026-11-22T12:00:00+00:00",
    hpsearch_version="0.1.0",
    postgres_version="18.6",
    pg_dump_version="18.6",
    schema="0004",
    optuna_schema="v3.2.0.a",
    mlflow_schema="1",
    home="/home/ann/hpsearch",
    studies=1,
    trials=2,
    runs=3,
    models=0,
    files=True,
)


def write(path: Path, manifest: Manifest = MANIFEST) -> Path:
    source = path.with_name("source")
    with path.open("wb") as file, create_archive(file) as writer:
        writer.write_manifest(manifest)
        for name in (STUDIES_DUMP, MLFLOW_DUMP, f"{ARTIFACTS}1/abc/metrics.jsonl"):
            source.write_bytes(name.encode() * 5000)
            assert writer.add_file(name, source)
        writer.add_index_entry(f"{ARTIFACTS}1/abc/elsewhere.pt", 7, None)
        writer.write_index()
    return path


def unpack(path: Path, folder: Path) -> UnpackedArchive:
    folder.mkdir()
    with ArchiveReader.open(path) as reader:
        return reader.unpack(folder, progress=lambda _: None)


def test_an_archive_round_trips(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar")
    found = unpack(path, tmp_path / "out")
    assert found.manifest == MANIFEST
    [(name, lies)] = found.iterate_files(ARTIFACTS)
    assert (str(name), lies.read_bytes()) == ("1/abc/metrics.jsonl", b"artifacts/1/abc/metrics.jsonl" * 5000)
    assert [entry.path for entry in found.index if not entry.held] == [f"{ARTIFACTS}1/abc/elsewhere.pt"]


def test_removed_and_truncated_source_files_do_not_break_the_archive(tmp_path: Path) -> None:
    shrinking = tmp_path / "shrinking"
    shrinking.write_bytes(b"x" * 100)
    with shrinking.open("rb") as file:
        exactly = archive._FixedSizeReader(file, 150)
        assert exactly.read() == b"x" * 100 + b"\0" * 50
    with (tmp_path / "a.tar").open("wb") as file, create_archive(file) as writer:
        writer.write_manifest(MANIFEST)
        assert not writer.add_file(STUDIES_DUMP, tmp_path / "gone")


@pytest.mark.parametrize("kept", [0, 1, 300, 600, 3000, 20_000, 40_000, 100_000, 200_000, 250_000])
def test_a_truncated_archive_is_rejected(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path / "a.tar")
    whole = path.read_bytes()
    assert len(whole) > kept
    path.write_bytes(whole[:kept])
    with pytest.raises(StorageError, match=r"a\.tar' is (not a backup|damaged)"):
        unpack(path, tmp_path / "out")


def test_an_archive_without_its_last_member_is_rejected(tmp_path: Path) -> None:
    """A tar file that is cut between two of its files is still a valid tar file."""
    path = write(tmp_path / "a.tar")
    with tarfile.open(path) as tar:
        end = tar.getmember(archive.INDEX).offset
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(StorageError, match="damaged"):
        unpack(path, tmp_path / "out")
    path.write_bytes(path.read_bytes() + b"\0" * 1024)
    with pytest.raises(StorageError, match=r"damaged \(the end of the file is missing"):
        unpack(path, tmp_path / "again")


def test_a_changed_byte_is_detected(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar")
    with tarfile.open(path) as tar:
        at = tar.getmember(STUDIES_DUMP).offset_data + 100
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"'studies\.dump' is missing or does not match index\.jsonl"):
        unpack(path, tmp_path / "out")


def add(path: Path, change: Callable[[tarfile.TarInfo], None]) -> Path:
    """Write an archive with an additional member."""
    with tarfile.open(path, "w") as tar:
        for name, data in ((archive.MANIFEST, json.dumps(MANIFEST.to_dict()).encode()), ("x", b"evil")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if name == "x":
                change(member)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize(
    "name", ["../x", "/tmp/x", "artifacts/../../x", "artifacts//x", "checkpoints/./x", "x", "artifacts/", "a\\..\\x"]
)
def test_a_path_outside_of_the_target_is_rejected(tmp_path: Path, name: str) -> None:
    path = add(tmp_path / "a.tar", lambda member: setattr(member, "name", name))
    with pytest.raises(StorageError, match="contains the unexpected entry"):
        unpack(path, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar", "out"]
    assert not list((tmp_path / "out").rglob("*"))


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a")])
def test_a_file_that_is_also_a_folder_is_rejected(tmp_path: Path, names: tuple[str, str]) -> None:
    with (tmp_path / "a.tar").open("wb") as file, create_archive(file) as writer:
        writer.write_manifest(MANIFEST)
        for name in names:
            writer.add_file(f"{ARTIFACTS}{name}", Path(__file__))
        writer.write_index()
    with pytest.raises(StorageError, match=f"damaged .*{names[1]}' is also a folder, or its folder is also a file"):
        unpack(tmp_path / "a.tar", tmp_path / "out")


def test_a_name_with_a_backslash_is_accepted(tmp_path: Path) -> None:
    """MLflow accepts such names of artifacts."""
    name, content = f"{ARTIFACTS}1/\\..\\x", tmp_path / "content"
    content.write_bytes(b"content")
    with (tmp_path / "a.tar").open("wb") as tar, create_archive(tar) as writer:
        writer.write_manifest(MANIFEST)
        for each in (STUDIES_DUMP, MLFLOW_DUMP, name):
            writer.add_file(each, content)
        writer.write_index()
    [(found, _)] = unpack(tmp_path / "a.tar", tmp_path / "out").iterate_files(ARTIFACTS)
    assert str(found) == "1/\\..\\x"


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_an_archive_are_rejected(tmp_path: Path, kind: bytes) -> None:
    def change(member: tarfile.TarInfo) -> None:
        member.name, member.type, member.linkname, member.size = f"{ARTIFACTS}x", kind, "/etc/passwd", 0

    with pytest.raises(StorageError, match="contains the unexpected entry"):
        unpack(add(tmp_path / "a.tar", change), tmp_path / "out")


def test_a_sparse_file_that_would_fill_the_disk_is_rejected(tmp_path: Path) -> None:
    def change(member: tarfile.TarInfo) -> None:
        member.name, member.pax_headers = f"{ARTIFACTS}x", {"GNU.sparse.map": "0,4", "GNU.sparse.size": str(10**15)}

    with pytest.raises(StorageError, match=r"the entry 'artifacts/x' is sparse"):
        unpack(add(tmp_path / "a.tar", change), tmp_path / "out")


def test_a_newer_format_names_the_required_version(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", dataclasses.replace(MANIFEST, format=2, hpsearch_version="9.1"))
    with pytest.raises(StorageError, match=r"has backup format 2, .* install hpsearch 9\.1 or newer"):
        unpack(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value"), [("schema", None), ("schema", ["0001"]), ("home", 1), ("studies", "1"), ("dumped_by", "x")]
)
def test_a_manifest_with_an_invalid_value_is_damaged(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "a.tar"
    data = json.dumps({**MANIFEST.to_dict(), key: value}).encode()
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo(archive.MANIFEST)
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    with pytest.raises(StorageError, match="is damaged"), ArchiveReader.open(path):
        pass


def test_a_deeply_nested_manifest_is_an_error(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo(archive.MANIFEST)
        member.size = 100_000
        tar.addfile(member, io.BytesIO(b"[" * member.size))
    with pytest.raises(StorageError, match="is not a backup of hpsearch"):
        unpack(tmp_path / "a.tar", tmp_path / "out")


@pytest.mark.parametrize("content", [None, b"", b"hello", b"\0" * 2048])
def test_a_file_that_is_no_backup_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.tar"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        StorageError, match="does not exist" if content is None else "is not a backup of hpsearch"
    ) as error:
        unpack(path, tmp_path / "out")
    assert "\n" not in str(error.value)


def test_a_pipe_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "a.tar")
    with pytest.raises(StorageError, match=r"a\.tar' is not a regular file; give a file"):
        unpack(path, tmp_path / "out")


def test_a_tar_file_of_other_content_is_an_error(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("readme"), io.BytesIO())
    with pytest.raises(StorageError, match=r"is not a backup of hpsearch \(its first entry is not manifest\.json"):
        unpack(tmp_path / "a.tar", tmp_path / "out")
