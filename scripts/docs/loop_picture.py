"""The picture of the loop: processes around one durable log, with the path of a sample numbered as in the README's table.

It is an SVG with a ground of its own and colours for light and for dark surroundings, so it can be read wherever a page shows it.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

WIDTH, HEIGHT = 980, 452
LOG_TOP, LOG_HEIGHT = 166, 76
TOP, BOX_HEIGHT = 28, 66
BELOW = 312

STYLE = """
.ground{fill:#ffffff}.ink{fill:#0f172a}.faint{fill:#475569}.line{stroke:#475569;fill:none;stroke-width:1.6}.head{fill:#475569}
.maker{fill:#eef2ff;stroke:#4f46e5}.trainer{fill:#ecfdf5;stroke:#059669}.looker{fill:#f8fafc;stroke:#94a3b8}
.log{fill:#fff7ed;stroke:#ea580c}.stream{fill:#9a3412}.split{stroke:#fdba74}.dot{fill:#4f46e5}.number{fill:#ffffff}
@media (prefers-color-scheme: dark){
.ground{fill:#0d1117}.ink{fill:#e6edf3}.faint{fill:#9aa7b5}.line{stroke:#9aa7b5}.head{fill:#9aa7b5}
.maker{fill:#1a1f3d;stroke:#8b8cf8}.trainer{fill:#0c2a21;stroke:#34d399}.looker{fill:#161b22;stroke:#6b7785}
.log{fill:#2b1a0c;stroke:#fb923c}.stream{fill:#fdba74}.split{stroke:#7c4a1e}.dot{fill:#8b8cf8}.number{fill:#0d1117}}
"""


def loop_picture() -> str:
    """The SVG's text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, Helvetica, Arial, sans-serif" '
        'font-size="14" role="img">',
        "<title>The loop: feeder, producers, engines and trainer around one durable log</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0 10 5 0 10z"/></marker></defs>',
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        *_log(),
        *_processes(),
        *_arrows(),
        _text(
            WIDTH / 2, HEIGHT - 20, "A version is a number of batches trained. Every token carries the version that sampled it.", size=13
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _processes() -> list[str]:
    return [
        *_box("maker", 40, TOP, 150, "feeder", "stateless, by credits"),
        *_box("maker", 250, TOP, 170, "producers", "yours attach here"),
        *_dot(3, 266, TOP + 16),
        *_box("maker", 530, TOP, 180, "engines", "never pause for weights"),
        *_box("looker", 780, TOP, 160, "screen, evaluator", "look, decide nothing"),
        *_box("trainer", 250, BELOW, 460, "trainer", "fold → batch → advantages, importance sampling, clipping → step", height=84),
        *_dot(6, 266, BELOW + 16),
        _text(480, BELOW + 68, "then in this order: ledger → publish → checkpoint → position", size=12, kind="faint"),
        *_box("looker", 780, BELOW, 160, "replay, tap, branch", "the same fold,", height=84),
        _text(860, BELOW + 68, "the same digests", size=12, kind="faint"),
    ]


def _log() -> list[str]:
    columns = ((115, "tasks"), (335, "samples"), (620, "weights"), (740, "ledger"), (860, "events, metrics"))
    splits = (225, 500, 690, 780)
    return [
        f'<rect class="log" x="30" y="{LOG_TOP}" width="{WIDTH - 60}" height="{LOG_HEIGHT}" rx="9" stroke-width="1.5"/>',
        *(f'<path class="split" d="M{x} {LOG_TOP + 10} V{LOG_TOP + 42}"/>' for x in splits),
        *(_text(x, LOG_TOP + 32, name, kind="stream", bold=True) for x, name in columns),
        _text(WIDTH / 2, LOG_TOP + 62, "one durable log: NATS JetStream", size=12, kind="stream"),
    ]


def _arrows() -> list[str]:
    top, bottom = TOP + BOX_HEIGHT, LOG_TOP + LOG_HEIGHT
    upper, lower = top + 22, BELOW - 24
    return [
        *_arrow(f"M90 {top} V{LOG_TOP}", 62, upper + 18, "issue", number=1, at=(90, upper)),
        *_arrow(f"M150 {LOG_TOP} V{top}", 156, upper + 18, "credits", start=True),
        *_arrow(f"M205 {LOG_TOP} V{upper + 10} H275 V{top}", 218, upper + 4, "claim", start=True),
        *_arrow(f"M370 {top} V{LOG_TOP}", 390, upper + 18, "Arrow, then ack", start=True, number=4, at=(370, upper)),
        *_arrow(f"M420 {TOP + 20} H530", 475, TOP + 12, "token ids", number=2, at=(442, TOP + 20)),
        *_arrow(f"M530 {TOP + 46} H420", 475, TOP + 64, "ids, log-probs,"),
        _text(475, TOP + 79, "versions", size=12, kind="faint"),
        *_arrow(f"M620 {LOG_TOP} V{top}", 640, upper + 18, "stage, then flip", start=True, number=9, at=(620, upper)),
        *_arrow(f"M860 {LOG_TOP} V{top}", 0, 0, ""),
        *_arrow(f"M335 {bottom} V{BELOW}", 355, lower - 12, "every record in order,", start=True, number=5, at=(335, lower)),
        _text(355, lower + 3, "by position, no acks", size=12, kind="faint", start=True),
        *_arrow(f"M570 {BELOW} V{bottom}", 538, lower - 12, "version", number=8, at=(570, lower)),
        *_arrow(f"M680 {BELOW} V{bottom}", 698, lower - 12, "entry", start=True, number=7, at=(680, lower)),
        *_arrow(f"M860 {bottom} V{BELOW}", 872, lower - 12, "again", start=True, dashed=True),
        *_arrow(f"M250 {BELOW + 42} H115 V{bottom}", 60, BELOW + 62, "grant: retired + (S + 1) · B", start=True),
    ]


def _box(kind: str, x: float, y: float, width: float, name: str, about: str, *, height: float = BOX_HEIGHT) -> list[str]:
    return [
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="9" stroke-width="1.5"/>',
        _text(x + width / 2, y + 28, name, bold=True),
        _text(x + width / 2, y + 49, about, size=12, kind="faint"),
    ]


def _arrow(
    path: str,
    x: float,
    y: float,
    label: str,
    *,
    start: bool = False,
    number: int = 0,
    at: tuple[float, float] = (0, 0),
    dashed: bool = False,
) -> list[str]:
    """A line with a head, its label at (x, y), and on it the number that the README's table gives this part of a sample's path."""
    dashes = ' stroke-dasharray="4 4"' if dashed else ""
    line = f'<path class="line" d="{path}" marker-end="url(#head)"{dashes}/>'
    return [line, *([_text(x, y, label, size=12, kind="faint", start=start)] if label else []), *(_dot(number, *at) if number else [])]


def _dot(number: int, x: float, y: float) -> list[str]:
    return [
        f'<circle class="dot" cx="{x:g}" cy="{y:g}" r="9"/>',
        f'<text class="number" x="{x:g}" y="{y + 4:g}" font-size="11" font-weight="600" text-anchor="middle">{number}</text>',
    ]


def _text(x: float, y: float, text: str, *, size: int = 14, kind: str = "ink", bold: bool = False, start: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    anchor = "start" if start else "middle"
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" font-size="{size}"{weight} text-anchor="{anchor}">{escape(text)}</text>'
