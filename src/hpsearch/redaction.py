"""Removal of secrets from texts that are printed, logged or recorded."""

from __future__ import annotations

import re

HIDDEN = "***"

_WORDS = "passwords?|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|signature|credentials?"
# A text that begins with a URL is one URL, so that everything up to its last @ belongs to the password.
_URL = re.compile(r"\s*[A-Za-z][\w+.-]*://")
_PASSWORD_OF_URL = re.compile(r"(://[^:/@?]*):.*@", re.DOTALL)
_PASSWORD_IN_TEXT = re.compile(r"(://[^:/@?\s]*):(?:\S*@|(?!\d+(?:[^\w@%]|$))[^\n]*@)")
_PARAMETER_OF_URL = re.compile(rf"([?&][\w.-]*(?:{_WORDS})=)[^&]*", re.IGNORECASE)
_PARAMETER = re.compile(rf"([?&;](?:[\w.-]*(?:{_WORDS})|sig|key|auth)=)[^&\s'\"]+", re.IGNORECASE)
_VALUE = r"(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s'\";&|]+)"
# Variables are in capitals, so that Python arguments such as `pad_token=pad` are kept.
_VARIABLE = re.compile(rf"(?<![\w?&-])((?:[A-Z0-9_]*_|PG)?(?:{_WORDS.upper().replace('[_-]', '_')})=){_VALUE}")
_OPTION = re.compile(rf"(?<!\S)(--?(?:[\w-]+-)?(?:{_WORDS})(?:=|\s+))(?!-){_VALUE}", re.IGNORECASE)
_KEYWORD = re.compile(rf"(?<![\w?&-])((?:ssl)?password=){_VALUE}")  # of libpq
_HEADER = re.compile(r"(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token)\s+)[^\s'\"]+", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----).*?(?=-----END [A-Z0-9 ]*PRIVATE KEY|\Z)", re.DOTALL)


def redact(text: str) -> str:
    """Return a text without secrets: a URL, a command, or another text that contains these.

    Passwords in URLs, query parameters and options such as ``token=``, assignments of variables such as ``API_KEY=``,
    headers for authorization and private keys are replaced.
    """
    if _URL.match(text):
        text = _PARAMETER_OF_URL.sub(rf"\1{HIDDEN}", _PASSWORD_OF_URL.sub(rf"\1:{HIDDEN}@", text))
    text = _PASSWORD_IN_TEXT.sub(rf"\1:{HIDDEN}@", text)
    for pattern in (_PARAMETER, _VARIABLE, _OPTION, _KEYWORD, _HEADER):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return _PRIVATE_KEY.sub(rf"\1{HIDDEN}", text)
