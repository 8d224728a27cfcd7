"""Aliases and model names that are rejected without a request to MLflow, and reserved aliases."""

from __future__ import annotations

import pytest

from hpsearch.storage.errors import StorageError
from hpsearch.storage.mlflow.registry import check_alias, check_model_name, is_previous, previous_alias


@pytest.mark.parametrize("alias", ["", "two words", "a.b", "latest", "Latest", "v3", "V3", "a" * 256])
def test_aliases_that_mlflow_rejects(alias: str) -> None:
    with pytest.raises(StorageError, match=r"^--alias .*(, such as champion|; choose another alias)$"):
        check_alias(alias)


@pytest.mark.parametrize("alias", ["previous", "previous-x"])
def test_reserved_aliases_are_rejected(alias: str) -> None:
    assert is_previous(alias)
    with pytest.raises(StorageError, match=r"^--alias .* is reserved for replaced versions; choose another alias"):
        check_alias(alias)


@pytest.mark.parametrize("alias", ["champion", "A-1_b", "é", "v3x"])
def test_valid_aliases_are_accepted(alias: str) -> None:
    check_alias(alias)
    assert not is_previous(alias)
    assert is_previous(previous_alias(alias))


@pytest.mark.parametrize("name", ["", " ", "a/b", "a:b", 'a"b', ".", "..", "a" * 257])
def test_invalid_model_names_are_rejected(name: str) -> None:
    with pytest.raises(StorageError, match=r"^--model .*; choose another$"):
        check_model_name(name)


@pytest.mark.parametrize("name", ["digits", "two words", "it's", "a" * 256])
def test_valid_model_names_are_accepted(name: str) -> None:
    check_model_name(name)
