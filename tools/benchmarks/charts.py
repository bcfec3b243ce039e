"""Bar charts as SVG files that need nothing else, readable on light and dark pages."""

from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 720
LABELS = 190
"""Width of the names left of the bars."""
FIGURES = 90
"""Width of the numbers right of the longest bar."""
ROW = 24
HEADING = 34
MARGIN = 16
ACCESSIBLE = 'role="img" aria-labelledby="title summary"'
STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de }
  text { fill: #1f2328; font: 13px system-ui, sans-serif }
  .title { font-size: 16px; font-weight: 600 }
  .heading { font-weight: 600 }
  .peer { fill: #8c96a3 }
  .ours { fill: #0a7d4f }
  .strong { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14181d; stroke: #3d444d }
    text { fill: #e6edf3 }
    .peer { fill: #6e7781 }
    .ours { fill: #2ebd7f }
  }
"""
"""It has a ground of its own, because a page can be dark while the reader's system is light."""


@dataclass(frozen=True)
class Bar:
    """A value and its name."""

    name: str
    value: float
    is_ours: bool = False


@dataclass(frozen=True)
class Panel:
    """Bars that share a scale, under a heading."""

    heading: str
    bars: tuple[Bar, ...]

    @property
    def height(self) -> int:
        return HEADING + ROW * len(self.bars)


def chart(title: str, panels: list[Panel]) -> str:
    """Return an SVG with a panel below the other."""
    height = 2 * MARGIN + HEADING + sum(panel.height for panel in panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {ACCESSIBLE}>',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="summary">{escape("; ".join(map(summary, panels)))}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>',
        f'<text class="title" x="{MARGIN}" y="{MARGIN + 18}">{escape(title)}</text>',
    ]
    top = MARGIN + HEADING
    for panel in panels:
        lines += drawn(panel, top)
        top += panel.height
    return "\n".join([*lines, "</svg>"]) + "\n"


def summary(panel: Panel) -> str:
    """Return a panel as text, for those who do not see it."""
    return f"{panel.heading}: " + ", ".join(f"{bar.name} {bar.value:,.0f}" for bar in panel.bars)


def drawn(panel: Panel, top: int) -> list[str]:
    """Return the elements of a panel."""
    lines = [f'<text class="heading" x="{MARGIN}" y="{top + 22}">{escape(panel.heading)}</text>']
    room = WIDTH - 2 * MARGIN - LABELS - FIGURES
    most = max((bar.value for bar in panel.bars), default=0) or 1
    left = MARGIN + LABELS
    for number, bar in enumerate(panel.bars):
        y = top + HEADING + number * ROW
        width = max(1.0, bar.value / most * room)
        size = f'x="{left}" y="{y}" width="{width:.1f}" height="{ROW - 6}" rx="2"'
        strong = ' class="strong"' if bar.is_ours else ""
        lines += [
            f'<text{strong} x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(bar.name)}</text>',
            f'<rect class="{"ours" if bar.is_ours else "peer"}" {size}/>',
            f'<text{strong} x="{left + width + 8:.1f}" y="{y + 13}">{bar.value:,.0f}</text>',
        ]
    return lines
