"""Quality against measured speed-up as a picture: one line an arm, the control as the zero line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COLOURS = ("#0f9d8a", "#d9822b", "#b36ad1", "#2f6fd0", "#c23b4a", "#6b8e23", "#8492a6")
WIDTH, PLOT, HEIGHT, LEFT, BOTTOM = 720, 510, 400, 56, 48
"""Pixels: least of the picture, up to the legend, height, and before and below the plot."""
LETTER = 7.2
"""Pixels of a letter of the legend at most, on average over a name: fonts of other machines are wider."""
MARKS = (
    "M{x:.1f} {y:.1f}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "M{x:.1f} {y:.1f}m-4 -4h8v8h-8z",
    "M{x:.1f} {y:.1f}m0 -5.5l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
)
"""Shapes of points: a circle, and where all colours are taken a square, then a diamond."""


def picture(lines: Mapping[str, Sequence[tuple[float, float, float]]], metric: str) -> str:
    """An SVG from each arm's (measured speed-up, mean difference from the control in points, its standard deviation over the
    seeds)."""
    points = [point for line in lines.values() for point in line]
    right = max(speed for speed, _, _ in points) + 0.1
    low = min(-1.0, *(gap - deviation for _, gap, deviation in points)) - 0.5
    high = max(0.0, *(gap + deviation for _, gap, deviation in points)) + 0.5
    width = width_of(lines)

    def x(speed: float) -> float:
        return LEFT + (speed - 1) / (right - 1) * (PLOT - LEFT)

    def y(gap: float) -> float:
        return 16 + (high - gap) / (high - low) * (HEIGHT - BOTTOM - 16)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
    ]
    for gap in range(int(low), int(high) + 1):
        style = 'stroke="#333" stroke-dasharray="2 3"' if gap == 0 else 'stroke="#dde3ea"'
        parts.append(f'<path d="M{LEFT} {y(gap):.1f}H{x(right):.1f}" {style} fill="none"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(gap) + 4:.1f}" text-anchor="end">{f"{gap:+d}" if gap else "control"}</text>')
    for speed in range(1, int(right) + 1):
        parts.append(f'<text x="{x(speed):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{speed}x</text>')
    told = f"measured speed-up; {metric} against the control in points (whiskers: standard deviation)"
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">{told}</text>')
    for number, (arm, line) in enumerate(lines.items()):
        colour, mark = COLOURS[number % len(COLOURS)], MARKS[number // len(COLOURS) % len(MARKS)]
        style = f'stroke="{colour}" fill="none" stroke-width="2"'
        path = "L".join(f"{x(speed):.1f} {y(gap):.1f}" for speed, gap, _ in sorted(line))
        parts.append(f'<path d="M{path}" {style}/>')
        for speed, gap, deviation in line:
            ends = f"M{x(speed):.1f} {y(gap + deviation):.1f}V{y(gap - deviation):.1f}"
            parts += [f'<path d="{ends}" stroke="{colour}" opacity="0.5"/>'] if deviation else []
            parts.append(f'<path d="{mark.format(x=x(speed), y=y(gap))}" fill="{colour}"/>')
        at = 24 + 18 * number
        parts.append(f'<path d="M{PLOT + 10} {at - 4}h22" {style}/>')
        parts.append(f'<path d="{mark.format(x=PLOT + 21, y=at - 4)}" fill="{colour}"/>')
        parts.append(f'<text x="{PLOT + 38}" y="{at}">{arm}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def width_of(arms: Mapping[str, object]) -> int:
    """Width of a picture whose legend holds the longest name of these."""
    return max(WIDTH, PLOT + 38 + round(LETTER * max(map(len, arms))) + 8)
