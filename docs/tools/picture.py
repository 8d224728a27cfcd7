"""Draws the rooms: a column for each package, what imports above what is imported.

An arrow that follows from others is left out: who imports the study reaches the spec through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

ORDER = ("search", "objectives", "storage")
TRAINING = "objectives.training."
LETTER, PADDING, GAP, BOX, LEVEL, MARGIN = 8.8, 9, 10, 30, 52, 16  # pixels
TOP, WIDEST = 52, 370  # where rows begin, and how wide one may be

STYLE = """
  text { font: 16px system-ui, "Segoe UI", "Liberation Sans", sans-serif; fill: #1f2430; }
  .title { font-weight: 600; font-size: 18px; }
  .small { font-size: 14px; fill: #5b6270; }
  .panel { fill: #f6f7fa; stroke: #d5d9e2; }
  .room { fill: #ffffff; stroke: #5468c4; }
  .training { fill: #e6ebff; }
  .arrow { fill: none; stroke: #7d8597; stroke-width: 1.3; }
  .between { stroke: #5468c4; stroke-width: 2.4; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e8ee; }
    .small { fill: #a5adbd; }
    .panel { fill: #1c2029; stroke: #3a4150; }
    .room { fill: #272d3a; stroke: #8fa0f5; }
    .training { fill: #333d63; }
    .arrow { stroke: #828b9e; }
    .between { stroke: #8fa0f5; }
  }"""


@dataclass
class Box:
    """A room in the picture: its name, and where its middle and its top are, in pixels."""

    name: str
    x: float
    y: float

    @property
    def width(self) -> float:
        """Pixels from side to side."""
        return len(self.name) * LETTER + 2 * PADDING


def reduced(arrows: Mapping[str, set[str]], rooms: Iterable[str]) -> dict[str, set[str]]:
    """The arrows among `rooms`, in their order, without those that follow from others."""
    inner: dict[str, set[str]] = {}
    reached: dict[str, set[str]] = {}
    for room in rooms:
        targets = arrows[room] & reached.keys()
        inner[room] = {t for t in targets if not any(t in reached[other] for other in targets)}
        reached[room] = targets.union(*(reached[t] for t in targets))
    return inner


def _rows(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Rooms by how much lies below them, the highest row first; a row that is too wide becomes two."""
    level: dict[str, int] = {}
    for room in arrows:
        level[room] = 1 + max((level[t] for t in arrows[room]), default=-1)
    rows = []
    for height in range(max(level.values()), -1, -1):
        row: list[str] = []
        for room in (room for room in arrows if level[room] == height):
            if sum(Box(_name(r), 0, 0).width + GAP for r in [*row, room]) > WIDEST:
                rows.append(row)
                row = []
            row.append(room)
        rows.append(row)
    return rows


def _name(room: str) -> str:
    return room.removeprefix(TRAINING).rpartition(".")[2]


def _place(rows: list[list[str]], arrows: Mapping[str, set[str]], middle: float, height: float) -> dict[str, Box]:
    """The boxes of a column: in each row in the order of those above that point to them."""
    placed: dict[str, Box] = {}
    level = (height - TOP - BOX - MARGIN) / (len(rows) - 1)
    for number, unsorted in enumerate(rows):
        wanted = {}
        for room in unsorted:
            above = [box.x for other, box in placed.items() if room in arrows[other]]
            wanted[room] = sum(above) / len(above) if above else middle
        row = sorted(unsorted, key=wanted.__getitem__)
        x = middle - (sum(Box(_name(room), 0, 0).width for room in row) + GAP * (len(row) - 1)) / 2
        for room in row:
            box = Box(_name(room), 0, TOP + number * level)
            box.x = x + box.width / 2
            x += box.width + GAP
            placed[room] = box
    return placed


def draw(rooms: Iterable[str], arrows: Mapping[str, set[str]]) -> str:
    """The picture as SVG; the same rooms give the same text."""
    columns = {}
    for package in ORDER:
        connected = [r for r in rooms if arrows[r] or any(r in targets for targets in arrows.values())]
        inner = reduced(arrows, [r for r in connected if r.split(".")[0] == package])
        columns[package] = (inner, _rows(inner))
    depth = max(len(rows) for _, rows in columns.values())
    height = TOP + (depth - 1) * LEVEL + BOX + MARGIN
    shapes, left = [], MARGIN / 2
    for package, (inner, rows) in columns.items():
        width = max(sum(Box(_name(r), 0, 0).width + GAP for r in row) for row in rows) + MARGIN
        shapes += _column(package, inner, rows, (left, width, height))
        left += width + MARGIN
    total = left - MARGIN / 2
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:.0f} {height + 8:.0f}" '
            'role="img" aria-label="The rooms of the three packages and what each imports">',
            f"<style>{STYLE}\n</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0.5 L7.5 4 L0 7.5" class="arrow"/></marker></defs>',
            *shapes,
            "</svg>\n",
        ]
    )


def _column(
    package: str, arrows: Mapping[str, set[str]], rows: list[list[str]], frame: tuple[float, float, float]
) -> list[str]:
    """A package in a frame of left, width and height: its panel, its arrows, its boxes."""
    left, width, height = frame
    below = {"search": "imports both others", "objectives": "tinted: training", "storage": ""}[package]
    shapes = [
        f'<rect class="panel" x="{left:.0f}" y="8" width="{width:.0f}" height="{height - 8:.0f}" rx="8"/>',
        f'<text class="title" x="{left + 12:.0f}" y="32">{package}</text>',
        f'<text class="small" x="{left + width - 12:.0f}" y="32" text-anchor="end">{below}</text>',
    ]
    boxes = _place(rows, arrows, left + width / 2, height)
    for room, targets in arrows.items():
        shapes += [_arrow(boxes[room], boxes[target]) for target in sorted(targets)]
    for room, box in boxes.items():
        kind = "room training" if room.startswith(TRAINING) else "room"
        shapes.append(
            f'<rect class="{kind}" x="{box.x - box.width / 2:.1f}" y="{box.y:.0f}" width="{box.width:.1f}" '
            f'height="{BOX}" rx="5"><title>{room}</title></rect>'
            f'<text x="{box.x:.1f}" y="{box.y + 20:.0f}" text-anchor="middle">{box.name}</text>'
        )
    return shapes


def _arrow(upper: Box, lower: Box) -> str:
    start, end = upper.y + BOX, lower.y - 2
    bend = min(40.0, (end - start) / 2)
    points = [(upper.x, start), (upper.x, start + bend), (lower.x, end - bend), (lower.x, end)]
    assert all(a[1] <= b[1] for a, b in pairwise(points)), "arrows point down"
    (x0, y0), *rest = points
    curve = " ".join(f"{x:.1f} {y:.1f}" for x, y in rest)
    return f'<path class="arrow" marker-end="url(#tip)" d="M{x0:.1f} {y0:.1f} C{curve}"/>'
