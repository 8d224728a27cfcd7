"""Recorded and printed texts contain no secrets."""

from __future__ import annotations

import pytest

from hpsearch.redaction import redact


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("postgresql://u:s@cr/et@h:1/db?x=1", "postgresql://u:***@h:1/db?x=1"),
        ("postgresql://u:two words@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u@h/db?password=secret&x=1", "postgresql://u@h/db?password=***&x=1"),
        ("run --url postgresql://u:p@ss@h/db --name a@b", "run --url postgresql://u:***@h/db --name a@b"),
        ("A=postgresql://u:p@h/db B=http://v:q@h/ x", "A=postgresql://u:***@h/db B=http://v:***@h/ x"),
        ("get https://h/p?token=abc&page=1", "get https://h/p?token=***&page=1"),
        ("get 'https://h/f?X-Amz-Signature=abc&sig=d' now", "get 'https://h/f?X-Amz-Signature=***&sig=***' now"),
        ("train --api-key K --password=pw --epochs 3", "train --api-key *** --password=*** --epochs 3"),
        ("train --token 'a b' --epochs 3", "train --token *** --epochs 3"),
        ('env API_KEY=abc HF_TOKEN="x y" LR=1', "env API_KEY=*** HF_TOKEN=*** LR=1"),
        ("AWS_SECRET_ACCESS_KEY=q/+ PGPASSWORD=p run", "AWS_SECRET_ACCESS_KEY=*** PGPASSWORD=*** run"),
        ("host=h password=secret dbname=x", "host=h password=*** dbname=x"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
    ],
)
def test_secrets_are_hidden(text: str, redacted: str) -> None:
    assert redact(text) == redacted
    assert redact(redacted) == redacted


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://h/db",
        "no url",
        "train --max-tokens 512 --token-budget 3 --set pad_token=0",
        "see http://127.0.0.1:5000/#/runs, or write to a@b",
        'password authentication failed for user "u"',
    ],
)
def test_other_texts_are_kept(text: str) -> None:
    assert redact(text) == text


def test_private_keys_are_hidden() -> None:
    start, end = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"
    assert redact(f"a {start}\nMIIE\n{end} b") == f"a {start}***{end} b"
    assert redact(f"a {start}\nMIIE\n") == f"a {start}***"
