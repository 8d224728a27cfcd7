"""Picture of the packages: a column per folder, in which packages are above those that they import.

Arrows that follow from others are omitted: a package that imports the study depends on the spec through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

ORDER = ("search", "objectives", "storage")
TRAINING = "objectives.training."
LETTER, PADDING, GAP, BOX, LEVEL, MARGIN = 8.8, 9, 10, 30, 52, 16  # pixels
TOP, WIDEST = 52, 370  # pixels: top of the first row, and maximum width of a row

STYLE = """
  text { font: 16px system-ui, "Segoe UI", "Liberation Sans", sans-serif; fill: #1f2430; }
  .title { font-weight: 600; font-size: 18px; }
  .small { font-size: 14px; fill: #5b6270; }
  .panel { fill: #f6f7fa; stroke: #d5d9e2; }
  .package { fill: #ffffff; stroke: #5468c4; }
  .training { fill: #e6ebff; }
  .arrow { fill: none; stroke: #7d8597; stroke-width: 1.3; }
  .between { stroke: #5468c4; stroke-width: 2.4; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e8ee; }
    .small { fill: #a5adbd; }
    .panel { fill: #1c2029; stroke: #3a4150; }
    .package { fill: #272d3a; stroke: #8fa0f5; }
    .training { fill: #333d63; }
    .arrow { stroke: #828b9e; }
    .between { stroke: #8fa0f5; }
  }"""


@dataclass
class Box:
    """Box of a package: its name, and its center and top in pixels."""

    name: str
    x: float
    y: float

    @property
    def width(self) -> float:
        """Width in pixels."""
        return len(self.name) * LETTER + 2 * PADDING


def remove_implied_arrows(arrows: Mapping[str, set[str]], packages: Iterable[str]) -> dict[str, set[str]]:
    """Return the arrows among `packages`, in their order, without those that follow from others."""
    inner: dict[str, set[str]] = {}
    reached: dict[str, set[str]] = {}
    for package in packages:
        targets = arrows[package] & reached.keys()
        inner[package] = {t for t in targets if not any(t in reached[other] for other in targets)}
        reached[package] = targets.union(*(reached[t] for t in targets))
    return inner


def _make_rows(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the packages in rows by their depth of imports, the deepest first; rows that are too wide are split."""
    level: dict[str, int] = {}
    for package in arrows:
        level[package] = 1 + max((level[t] for t in arrows[package]), default=-1)
    rows = []
    for height in range(max(level.values()), -1, -1):
        row: list[str] = []
        for package in (package for package in arrows if level[package] == height):
            if sum(Box(_name(r), 0, 0).width + GAP for r in [*row, package]) > WIDEST:
                rows.append(row)
                row = []
            row.append(package)
        rows.append(row)
    return rows


def _name(package: str) -> str:
    return package.removeprefix(TRAINING).rpartition(".")[2]


def _place_boxes(rows: list[list[str]], arrows: Mapping[str, set[str]], middle: float, height: float) -> dict[str, Box]:
    """Return the boxes of a column; each row is sorted by the mean position of the importing packages above."""
    placed: dict[str, Box] = {}
    level = (height - TOP - BOX - MARGIN) / (len(rows) - 1)
    for number, unsorted in enumerate(rows):
        positions = {}
        for package in unsorted:
            above = [box.x for other, box in placed.items() if package in arrows[other]]
            positions[package] = sum(above) / len(above) if above else middle
        row = sorted(unsorted, key=positions.__getitem__)
        x = middle - (sum(Box(_name(package), 0, 0).width for package in row) + GAP * (len(row) - 1)) / 2
        for package in row:
            box = Box(_name(package), 0, TOP + number * level)
            box.x = x + box.width / 2
            x += box.width + GAP
            placed[package] = box
    return placed


def draw(packages: Iterable[str], arrows: Mapping[str, set[str]]) -> str:
    """Return the picture as SVG; deterministic."""
    columns = {}
    for folder in ORDER:
        connected = [r for r in packages if arrows[r] or any(r in targets for targets in arrows.values())]
        inner = remove_implied_arrows(arrows, [r for r in connected if r.split(".")[0] == folder])
        columns[folder] = (inner, _make_rows(inner))
    depth = max(len(rows) for _, rows in columns.values())
    height = TOP + (depth - 1) * LEVEL + BOX + MARGIN
    shapes, left = [], MARGIN / 2
    for folder, (inner, rows) in columns.items():
        width = max(sum(Box(_name(r), 0, 0).width + GAP for r in row) for row in rows) + MARGIN
        shapes += _column(folder, inner, rows, (left, width, height))
        left += width + MARGIN
    total = left - MARGIN / 2
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:.0f} {height + 8:.0f}" '
            'role="img" aria-label="The packages of the three folders and their imports">',
            f"<style>{STYLE}\n</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0.5 L7.5 4 L0 7.5" class="arrow"/></marker></defs>',
            *shapes,
            "</svg>\n",
        ]
    )


def _column(
    folder: str, arrows: Mapping[str, set[str]], rows: list[list[str]], frame: tuple[float, float, float]
) -> list[str]:
    """Return the shapes of a folder: panel, arrows, boxes; `frame` is left, width and height in pixels."""
    left, width, height = frame
    below = {"search": "imports both others", "objectives": "tinted: training", "storage": ""}[folder]
    shapes = [
        f'<rect class="panel" x="{left:.0f}" y="8" width="{width:.0f}" height="{height - 8:.0f}" rx="8"/>',
        f'<text class="title" x="{left + 12:.0f}" y="32">{folder}</text>',
        f'<text class="small" x="{left + width - 12:.0f}" y="32" text-anchor="end">{below}</text>',
    ]
    boxes = _place_boxes(rows, arrows, left + width / 2, height)
    for package, targets in arrows.items():
        shapes += [_arrow(boxes[package], boxes[target]) for target in sorted(targets)]
    for package, box in boxes.items():
        kind = "package training" if package.startswith(TRAINING) else "package"
        shapes.append(
            f'<rect class="{kind}" x="{box.x - box.width / 2:.1f}" y="{box.y:.0f}" width="{box.width:.1f}" '
            f'height="{BOX}" rx="5"><title>{package}</title></rect>'
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
