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
        ("https://ghp_abc@github.com/a/b", "https://***@github.com/a/b"),
        ("pip install git+https://ghp_abc@github.com/a/b", "pip install git+https://***@github.com/a/b"),
        ("clone https://ghp_abc:x-oauth-basic@github.com/a", "clone https://***@github.com/a"),
        ("clone https://ghp_abc:@github.com/a", "clone https://***@github.com/a"),
        ("GITHUB_PAT=abc MYSQL_PWD=p SECRET_KEY=k run", "GITHUB_PAT=*** MYSQL_PWD=*** SECRET_KEY=*** run"),
        ("login failed: password: pw, user: u", "login failed: password: ***, user: u"),
        ("password: correct horse\nuser: u", "password: ***\nuser: u"),
        ("a:\n  - api_key: k1\n  - db_password: p,q}", "a:\n  - api_key: ***\n  - db_password: ***"),
        ('{"password": "a b", "x": 1}', '{"password": ***, "x": 1}'),
        ('{"password":"a\\"b", "HF_TOKEN": "t"}', '{"password":***, "HF_TOKEN": ***}'),
        (r'body "{\"secret\": \"s t\", \"x\": 1}"', r'body "{\"secret\": ***, \"x\": 1}"'),
        ("{'api_key': b'k', 'password': 123}", "{'api_key': ***, 'password': ***}"),
        ("{'password': 'cut off", "{'password': ***"),
        ("host = h password = secret dbname = x", "host = h password = *** dbname = x"),
        ("connect(api_key='k', x=1)", "connect(api_key=***, x=1)"),
        ("API_KEY = 'k'\nhf_token = \"t\"", "API_KEY = ***\nhf_token = ***"),
        ("https://h/p?account_key=k&x=1", "https://h/p?account_key=***&x=1"),
        ("curl -s -u user:pw https://h/p", "curl -s -u user:*** https://h/p"),
        ("curl --user 'user:pw' https://h/p", "curl --user 'user:***' https://h/p"),
        ("Authorization: abc.def", "Authorization: ***"),
        ("password=b\"x\" PASSWORD=f'x'\nDB_PASSWORD = rb'x'", "password=*** PASSWORD=***\nDB_PASSWORD = ***"),
        ("password=('x') + y\npassword = [\"x\"]", "password=*** + y\npassword = ***"),
        ('password = """a\nb""" + c', "password = *** + c"),
        ('PASSWORD: str = "x"\n    HF_TOKEN: str | None = "t"', "PASSWORD: str = ***\n    HF_TOKEN: str | None = ***"),
        ("os.environ.setdefault('DB_PASSWORD', 'x')", "os.environ.setdefault('DB_PASSWORD', ***)"),
        ('os.environ["DB_PASSWORD"] = "x"', 'os.environ["DB_PASSWORD"] = ***'),
        (
            "os.getenv('API_KEY', 'x') or os.environ.get('HF_TOKEN', 'x')",
            "os.getenv('API_KEY', ***) or os.environ.get('HF_TOKEN', ***)",
        ),
        ('password: str | None = field(default="x")', "password: str | None = field(default=***)"),
        ("    api_key: SecretStr = pydantic.Field('x')", "    api_key: SecretStr = pydantic.Field(***)"),
        ("password = SecretStr('x')", "password = SecretStr(***)"),
        ('password = (\n    "x"\n    "y"\n)', "password = (\n    ***\n)"),
        ('password = "x" "y"\n"z"', 'password = ***\n"z"'),
        ("PRIVATE-TOKEN: glpat-1\nCookie: a=b; c=d", "PRIVATE-TOKEN: ***\nCookie: ***"),
        ("curl -H 'X-Api-Key: k' https://h/p", "curl -H 'X-Api-Key: ***' https://h/p"),
        ("setenv HF_TOKEN t; setenv LR 1", "setenv HF_TOKEN ***; setenv LR 1"),
        ('{"pwd": "a", "pass": "b", "credentials": "c"}', '{"pwd": ***, "pass": ***, "credentials": ***}'),
        ("self._token = 't'", "self._token = ***"),
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
        "postgresql://hpsearch_worker@postgres:5432/optuna",
        "sftp://user@host/folder and abfs://container@account/x",
        "see https://h/@me, https://h?to=a@b or https://h, a@b",
        "tokens: 512",
        '{"max_tokens": 512, "token": null, "tokens": [1]}',
        "train --max-tokens 5 --password-file /run/secrets/x",
        "password-file: /run/secrets/x",
        "HPSEARCH_PASSWORD_FILE=/run/secrets/x PWD=/home COMPAT=1",
        "SyntaxError: unexpected token: ')'",
        "def f(password: str, token: str | None = None) -> None:",
        "    token: torch.Tensor\n    password: str",
        "secrets: [POSTGRES_PASSWORD]",
        "password:\nnext line",
        "password = read_password()\npassword = settings.password.get()",
        "pad_token = '<pad>', sep_token=\"</s>\"",
        "docker run -u 1000:1000 image",
        "authorization: str | None = None",
        "secret_key: jax.Array\ntoken: list[int] = field(default_factory=list)",
        'batch = {"token": batch["tokens"], "secret": read(1)}',
        "self.token: nn.Embedding = nn.Embedding(3, 4)",
        'tokens.get("pad_token", "<pad>")',
        "password = (\n    read()\n)",
        "the pass: no failures\ncookies: 3\npass: 12 of 14",
        "sep._tokens = '</s>'",
    ],
)
def test_other_texts_are_kept(text: str) -> None:
    assert redact(text) == text


def test_private_keys_are_hidden() -> None:
    start, end = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"
    assert redact(f"a {start}\nMIIE\n{end} b") == f"a {start}***{end} b"
    assert redact(f"a {start}\nMIIE\n") == f"a {start}***"
    assert redact("-----BEGIN PGP PRIVATE KEY BLOCK-----\nx\n") == "-----BEGIN PGP PRIVATE KEY BLOCK-----***"


@pytest.mark.parametrize("part", ["-", "curl -u ", "password", "a=", "'''", "\\", "://", ": ", "password=(\n", "\n\t"])
def test_long_texts_take_linear_time(part: str) -> None:
    """With quadratic time, a text of this length takes hours."""
    text = part * (200_000 // len(part))
    assert redact(text) == text
