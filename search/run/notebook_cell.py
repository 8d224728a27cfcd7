"""A view in a notebook that is redrawn in place."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

_STYLE = "margin: 0; white-space: pre; overflow-x: auto; line-height: normal; font-family: monospace"


class NotebookCell:
    """A redrawn view in a notebook. Rich's own notebook view needs ipywidgets, which few users have.

    Args:
        display: `IPython.display.display`.
        console: console that renders the view. IPython would use rich's global console, which reads markup in texts:
            a worker's name could contain a script.
    """

    def __init__(self, display: Callable[..., Any], console: Console) -> None:
        self._display, self._console = display, console
        self._handle: Any = None

    def start(self) -> None:
        """Show an empty view."""
        self._handle = self._display(_Page([]), display_id=True)

    def update(self, view: RenderableType, *, refresh: bool) -> None:  # noqa: ARG002 as rich's Live has it
        """Redraw the view."""
        self._handle.update(_Page(self._console.render(view, self._console.options)))

    def stop(self) -> None:
        """Clear the view. The result is printed afterwards, and replaces the view."""
        self._handle.update(_Page([]))


class _Page:
    """Segments of rich as text and as HTML without links."""

    def __init__(self, segments: Any) -> None:
        self._segments = [each for each in Segment.simplify(segments) if not each.control]

    def _repr_mimebundle_(self, *_: object, **__: object) -> dict[str, str]:
        """Return the representations that IPython displays."""
        spans = "".join(_render_span(each) for each in self._segments)
        text = "".join(each.text for each in self._segments)
        return {"text/plain": text, "text/html": f'<pre style="{_STYLE}">{spans}</pre>' if text else ""}


def _render_span(segment: Segment) -> str:
    text = html.escape(segment.text)
    style = segment.style.get_html_style(DEFAULT_TERMINAL_THEME) if segment.style else ""
    return f'<span style="{html.escape(style)}">{text}</span>' if style else text
