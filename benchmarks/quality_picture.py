"""Quality against measured speed-up as a picture: one line an arm, the control as the zero line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COLOURS = ("#0f9d8a", "#d9822b", "#b36ad1", "#2f6fd0", "#c23b4a", "#6b8e23", "#8492a6")
WIDTH, HEIGHT, LEFT, BOTTOM, LEGEND = 720, 400, 56, 48, 210


def picture(lines: Mapping[str, Sequence[tuple[float, float]]], metric: str) -> str:
    """An SVG from each arm's (measured speed-up, mean difference from the control in points)."""
    points = [point for line in lines.values() for point in line]
    right = max(speed for speed, _ in points) + 0.1
    low, high = min(-1.0, *(gap for _, gap in points)) - 0.5, max(0.0, *(gap for _, gap in points)) + 0.5

    def x(speed: float) -> float:
        return LEFT + (speed - 1) / (right - 1) * (WIDTH - LEFT - LEGEND)

    def y(gap: float) -> float:
        return 16 + (high - gap) / (high - low) * (HEIGHT - BOTTOM - 16)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for gap in range(int(low), int(high) + 1):
        style = 'stroke="#333" stroke-dasharray="2 3"' if gap == 0 else 'stroke="#dde3ea"'
        parts.append(f'<path d="M{LEFT} {y(gap):.1f}H{x(right):.1f}" {style} fill="none"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(gap) + 4:.1f}" text-anchor="end">{f"{gap:+d}" if gap else "control"}</text>')
    for speed in range(1, int(right) + 1):
        parts.append(f'<text x="{x(speed):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{speed}x</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">measured speed-up; {metric} against the control in points</text>')
    for number, (arm, line) in enumerate(lines.items()):
        style = f'stroke="{COLOURS[number % len(COLOURS)]}" fill="none" stroke-width="2"'
        style += ' stroke-dasharray="5 4"' if number >= len(COLOURS) else ""
        path = "L".join(f"{x(speed):.1f} {y(gap):.1f}" for speed, gap in sorted(line))
        parts.append(f'<path d="M{path}" {style}/>')
        parts += [f'<circle cx="{x(speed):.1f}" cy="{y(gap):.1f}" r="3" {style}/>' for speed, gap in line]
        at = 24 + 18 * number
        parts.append(f'<path d="M{WIDTH - LEGEND + 10} {at - 4}h22" {style}/>')
        parts.append(f'<text x="{WIDTH - LEGEND + 38}" y="{at}">{arm}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
