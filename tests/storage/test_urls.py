from __future__ import annotations

import pytest

from hpsearch.storage.errors import StorageError
from hpsearch.storage.urls import build_url, normalise_url


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("postgres://u:p@h/db", "postgresql+psycopg2://u:p@h/db"),
        ("postgresql://u:p@h:5432/db?sslmode=require", "postgresql+psycopg2://u:p@h:5432/db?sslmode=require"),
        ("postgresql+psycopg://u@h/db", "postgresql+psycopg2://u@h/db"),
        ("postgresql+psycopg2://u:a%40b%2F@h/db", "postgresql+psycopg2://u:a%40b%2F@h/db"),
        ("postgresql://u:p@[::1]:5432/db", "postgresql+psycopg2://u:p@[::1]:5432/db"),
        (" postgresql:///db?host=/run/postgresql ", "postgresql+psycopg2:///db?host=%2Frun%2Fpostgresql"),
    ],
)
def test_every_spelling_of_a_url_is_normalized(given: str, normal: str) -> None:
    assert normalise_url(given) == normal
    assert normalise_url(normal) == normal


@pytest.mark.parametrize(
    "given",
    [
        "sqlite:///secret.db",
        "mysql://u:secret@h/db",
        "mysql+pymysql://u:secret@h/db",
        "journal.log",
        "redis://u:secret@h",
        "",
        "postgresql://u:secret@h",
        "postgresql://u:secret@h/",
        "postgresql://u:secret@h:port/db",
        "postgresql://u:sec@ret/secret@h:port/db",
    ],
)
def test_other_urls_are_rejected_without_printing_the_password(given: str) -> None:
    with pytest.raises(StorageError) as raised:
        normalise_url(given, setting="--here")
    message = str(raised.value)
    assert message.startswith("--here")
    assert "\n" not in message
    assert "postgresql://USER@HOST" in message
    if "@" in given:
        assert "secret" not in message
        assert "sec@" not in message


def test_build_url_escapes_its_arguments() -> None:
    from sqlalchemy.engine import make_url

    url = make_url(
        build_url(user="a b", password="p@/:#?%&", host="::1", port=5, database="d", query="sslmode=disable")
    )
    assert (url.username, url.password, url.host, url.port, url.database) == ("a b", "p@/:#?%&", "::1", 5, "d")
    assert url.query == {"sslmode": "disable"}
