"""Display of texts that a user, a worker or another program wrote: visible escapes, Markdown, CSV cells and links.

Trials, logs, exceptions and names may contain control characters, which a terminal executes, or text that a browser or
spreadsheet executes. These functions are applied where a text leaves the program, not where it comes from.
"""

from __future__ import annotations

import html
import re
from urllib.parse import urlsplit

# Control characters except tab and line feed; invisible and direction-changing characters; separators that some
# programs treat as line ends; lone surrogates, which cannot be encoded. Joiners of scripts and emoji are allowed.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\u3164\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_CONTROL_OR_BREAK = re.compile(rf"{_CONTROL.pattern}|[\t\n]")
_MARKDOWN = re.compile(r"[\\`*\[\]|$~!]|(?<!\w)_|_(?!\w)")  # in a word, an underscore is no markup
# The characters that could end the address of a Markdown link, percent-encoded.
_ENCODED = str.maketrans({character: f"%{ord(character):02X}" for character in " ()<>\\"})
_FORMULA_STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")  # also in full width


def escape_controls(text: str) -> str:
    r"""Return `text` with visible escapes for control characters: ``\x1b[2J``. Tabs and line feeds stay.

    A JSON document stays valid and keeps its values.
    """
    return text if text.isprintable() else _CONTROL.sub(_escape_character, text)


def escape_line(text: str) -> str:
    r"""Return `text` as one line: like `escape_controls`, and with ``\t`` and ``\n`` for tabs and line feeds."""
    return text if text.isprintable() else _CONTROL_OR_BREAK.sub(_escape_character, text)


def _escape_character(match: re.Match[str]) -> str:
    code = ord(match[0])
    if short := {9: r"\t", 10: r"\n", 13: r"\r"}.get(code):
        return short
    if code < 0x7F:
        return rf"\x{code:02x}"  # JSON has no \x; it may contain the others
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(rf"\u{units[start : start + 4]}" for start in range(0, len(units), 4))  # two of them above \uffff


def escape_markdown(text: str) -> str:
    """Return `text` as one line of Markdown that is displayed literally, by MLflow and by the Optuna dashboard."""
    return _MARKDOWN.sub(r"\\\g<0>", html.escape(escape_line(text), quote=False))


def format_markdown_code(text: str) -> str:
    """Return `text` as Markdown code, in which a backtick is replaced by an apostrophe."""
    shown = escape_line(text).replace("`", "'")
    return f"`{shown}`"


def format_markdown_link(text: str, url: object) -> str:
    """Return a Markdown link with `text`, which is Markdown; only the text if `find_link` rejects the URL."""
    link = find_link(url)
    return f"[{text}]({link.translate(_ENCODED)})" if link else text


def escape_csv_cell(cell: object) -> object:
    """Return a value for a CSV cell: a text that a spreadsheet would evaluate as a formula starts with an apostrophe.

    Numbers, also as texts, None and booleans are unchanged.
    """
    if cell is None or isinstance(cell, int | float):
        return cell
    text = escape_controls(str(cell))
    return f"'{text}" if text.strip().startswith(_FORMULA_STARTS) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def find_link(url: object) -> str | None:
    """Return `url` if a page may contain a link to it, that is, if it is an HTTP or HTTPS URL; else None."""
    if not isinstance(url, str) or escape_line(url) != url:
        return None
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    return url if parts.scheme in ("http", "https") and parts.netloc else None
