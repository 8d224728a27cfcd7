"""Removal of secrets from texts that are printed, logged or recorded."""

from __future__ import annotations

import re

HIDDEN = "***"

_KEYS = "(?:api|access|account|private|secret)[_-]?key"
_WORDS = f"passwords?|passwd|passphrase|secret|token|{_KEYS}|signature|credentials?"
# A text that begins with a URL is one URL, so that everything up to its last @ belongs to the password.
_URL = re.compile(r"\s*[A-Za-z][\w+.-]*://")
_PASSWORD_OF_URL = re.compile(r"(://[^:/@?]*):.*@", re.DOTALL)
_PASSWORD_IN_TEXT = re.compile(r"(://[^:/@?\s]*):(?:\S{0,4096}@|(?!\d+(?:[^\w@%]|$))[^\n]{0,4096}@)")
# Without a password, or with GitHub's constant, the user name of an HTTP address is a token. Other schemes have names.
_USER_OF_URL = re.compile(r"(\bhttps?://)[^:/@?#\s'\"]+(?::(?:x-oauth-basic)?)?@", re.IGNORECASE)
_PARAMETER_OF_URL = re.compile(rf"([?&][\w.-]*(?:{_WORDS})=)[^&]*", re.IGNORECASE)
_PARAMETER = re.compile(rf"([?&;](?:[\w.-]*(?:{_WORDS})|sig|key|auth)=)[^&\s'\"]+", re.IGNORECASE)
_VALUE = r"(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s'\";&|]+)"
# Variables are in capitals, so that Python arguments such as `pad_token=pad` are kept.
_VARIABLES = rf"(?:[A-Z0-9_]*_|PG)?(?:{_WORDS.upper().replace('[_-]', '_')})|[A-Z0-9_]*_(?:PAT|PASS|PWD)"
_VARIABLE = re.compile(rf"(?<![\w?&-])((?:{_VARIABLES})=){_VALUE}")
_OPTION = re.compile(rf"(?<!\S)(--?(?:[\w-]+-)?(?:{_WORDS})(?:=|\s+))(?!-){_VALUE}", re.IGNORECASE)
_NO_TYPE = (
    r"(?!(?:str|bytes|int|float|bool|None|null|true|false|Any|(?:\w+\.)*(?:Tensor|SecretStr)|(?:\w+\.)+(?-i:[A-Z])\w*)(?!\w))"
    r"(?![\w.]+[(\[])"  # the call of a function, or a type with parameters
)
# A keyword of libpq, which permits spaces around `=`. Values that are names of functions or attributes do not match.
_KEYWORD = re.compile(rf"(?<![\w?&-])((?:ssl)?password(?:=|[ \t]+=[ \t]*)){_NO_TYPE}(?!\w+\.|[(\[]\s){_VALUE}")
_HEADER = re.compile(
    rf"(authorization['\"]?\s*[:=]\s*['\"]?(?:(?:bearer|basic|token)\s+)?){_NO_TYPE}[^\s'\"]+", re.IGNORECASE
)
_OTHER_HEADER = re.compile(
    r"((?<![\w-])(?:private-token|x-api-key|x-auth-token|(?:set-)?cookie)['\"]?[ \t]*:[ \t]*['\"]?)[^\s'\"][^\n'\"]*",
    re.IGNORECASE,
)
_SETENV = re.compile(rf"(?<![\w?&-])(setenv[ \t]+(?:{_VARIABLES})[ \t]+){_VALUE}")
_CURL = re.compile(r"(\bcurl\s(?:[^\n|;]{0,500}\s)?(?:-u|--user)[ =]?['\"]?[^\s:'\"]*:)[^\s'\"]+")
# Entries of JSON, YAML and dictionaries. Prose also has `token:` and `secret:`, so these names count only in quotes, or
# at the start of a line.
_PASSWORDS = r"[\w.-]*(?:password|passwd|passphrase)"
_SECRETS = rf"(?:{_PASSWORDS}|[\w.-]*(?:secret|token|{_KEYS}))"
_ENTRY = re.compile(
    rf"((?:(?<![\w.-]){_PASSWORDS}|(\\?['\"])(?:{_SECRETS}|pass|pwd|credentials?)\2)[ \t]*:[ \t]*)"
    rf"(?:[bfru]?(\\?['\"])(?:(?!\3)(?:\\.|[^\n]))*(?:\3|$)|{_NO_TYPE}[^\s'\"]*[^\s'\",}}\])])",
    re.IGNORECASE | re.MULTILINE,
)
_LINE = re.compile(rf"^([ \t+-]*+{_SECRETS}[ \t]*:[ \t]+){_NO_TYPE}[^\s'\"].*$", re.IGNORECASE | re.MULTILINE)
# Texts in code that are assigned to a name or an environment variable. Texts such as `pad_token = "<pad>"` are kept.
_TOKENS = r"(?:[\w.-]*(?:auth|access|api|hf|hub|git|bot)[_-]?|(?:\w+\.)?_)?token"
_NAMES = rf"(?:{_PASSWORDS}|[\w.-]*(?:secret|{_KEYS})|{_TOKENS})"
_TEXT = (
    r"[bfru]{0,2}(?:\"\"\".*?(?:\"\"\"|\Z)|'''.*?(?:'''|\Z)|"
    r"'(?:\\[^\n]|[^'\\\n])*+(?:'|$)|\"(?:\\[^\n]|[^\"\\\n])*+(?:\"|$))"
)
_SETTERS = r"(?:setdefault|setenv|putenv|getenv|environ\.get)"
_ASSIGNMENT = re.compile(
    rf"((?:(?<![\w.-]){_NAMES}(?:['\"]\]|[ \t]*:[^=\n]{{1,80}})?[ \t]*=|{_SETTERS}\(['\"]{_SECRETS}['\"],)[ \t]*"
    rf"(?:[\w.]{{0,40}}(?:field|SecretStr)\((?:default=)?)?(?P<bracket>[(\[]\s*+)?)"
    rf"{_TEXT}(?:(?(bracket)\s|[ \t])*+{_TEXT})*",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----).*?(?=-----END [A-Z0-9 ]*PRIVATE KEY|\Z)", re.DOTALL
)
_PATTERNS = (
    *(_ASSIGNMENT, _PARAMETER, _VARIABLE, _SETENV, _OPTION, _KEYWORD, _HEADER, _OTHER_HEADER, _CURL, _LINE, _ENTRY),
)


def redact(text: str) -> str:
    """Return a text without secrets: a URL, a command, or another text that contains these.

    Passwords and tokens in URLs, query parameters and options such as ``token=``, assignments of variables such as
    ``API_KEY=``, entries such as ``password: X``, headers for authorization and private keys are replaced.
    """
    text = _USER_OF_URL.sub(rf"\1{HIDDEN}@", text)
    if _URL.match(text):
        text = _PARAMETER_OF_URL.sub(rf"\1{HIDDEN}", _PASSWORD_OF_URL.sub(rf"\1:{HIDDEN}@", text))
    text = _PASSWORD_IN_TEXT.sub(rf"\1:{HIDDEN}@", text)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return _PRIVATE_KEY.sub(rf"\1{HIDDEN}", text)
