"""The two pictures a run leaves behind: curves over steps, and a sheet of pairs to look at.

    python plots.py RUN        # draws RUN/curves.png again, also while the run goes on
"""
from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402
from PIL import Image, ImageDraw, ImageFont  # noqa: E402

from checkpoint import read_log  # noqa: E402
from command import Parser, run as run_command  # noqa: E402
from dataset import Pair  # noqa: E402
from questions import prompt_text  # noqa: E402
from transforms import Prompted  # noqa: E402
from verifiers import Answer, verify  # noqa: E402

PANELS = (("reward parts", ("consistency", "task_reward", "format"), True),
          ("groups without spread, unread and cut answers", ("no_spread", "unparsed", "truncated"), True),
          ("health of the update", ("entropy", "grad_norm"), False))


def smooth(values: list[float], window: int = 10) -> list[float]:
    """Mean over the last `window` steps."""
    return [sum(values[max(0, i + 1 - window):i + 1]) / min(window, i + 1) for i in range(len(values))]


def plot_curves(run: Path) -> Path:
    """curves.png from log.jsonl: the held-out probe (its labels are for this plot only), rewards, health of the update."""
    rows = read_log(run)
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.6), constrained_layout=True)
    for key, style in (("probe_accuracy", "o-"), ("probe_consistency", "s--")):
        points = [(r["step"], r[key]) for r in rows if key in r]
        if points:
            axes[0, 0].plot(*zip(*points), style, label=key.replace("_", " "))
    axes[0, 0].set(title="held-out probe, greedy", ylim=(0, 1.02))
    for axis, (title, keys, share) in zip(axes.flat[1:], PANELS):
        for key in keys:
            values = [r[key] for r in rows]
            (line,) = axis.plot([r["step"] for r in rows], smooth(values), label=key)
            axis.plot([r["step"] for r in rows], values, color=line.get_color(), alpha=0.2)
        axis.set(title=f"{title} (mean of 10 steps)", ylim=(-0.02, 1.02) if share else (0, None))
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=9)
    figure.savefig(run / "curves.png", dpi=100)
    plt.close(figure)
    return run / "curves.png"


# ----------------------------------------------------------------------------------------------------- a sheet of pairs
CELL, PICTURE_HEIGHT, LINE, GAP = 410, 250, 17, 12          # pixels: one side of a pair, its picture, a line of text
INK, GOOD, BAD = (20, 20, 20), (0, 120, 40), (190, 20, 20)


def plot_pairs(file: Path, pairs: list[Pair], said: list[tuple[Answer | None, Answer | None]]) -> Path:
    """Two pairs a row: T and the relation the answers must have, x beside x', the words of each, what the model answered."""
    height = PICTURE_HEIGHT + 10 * LINE
    sheet = Image.new("RGB", (4 * (CELL + GAP), height * -(-len(pairs) // 2)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for n, (pair, (y, y_prime)) in enumerate(zip(pairs, said)):
        left, top = 2 * (CELL + GAP) * (n % 2) + GAP, height * (n // 2) + GAP
        draw.text((left, top), f"T = {', '.join(pair.transform.parts) or 'identity'}", INK, font)
        known = y is not None and y_prime is not None
        agreement = verify(y, y_prime, pair.negates) if known else 0.0
        draw.text((left, top + LINE), f"answers must {'differ' if pair.negates else 'match'}: verif = {agreement:.2f}",
                  GOOD if agreement > 0.5 else BAD, font)
        for x, name, shown, answer in ((left, "x", pair.x, y), (left + CELL + GAP, "x'", pair.x_prime, y_prime)):
            picture = fitted(shown.picture)
            sheet.paste(picture, (x, top + 2 * LINE + 4))
            words = "\n".join([*wrapped(shown), f"model on {name}: {'unreadable' if answer is None else answer}"])
            draw.multiline_text((x, top + 2 * LINE + 8 + PICTURE_HEIGHT), words, INK, font, spacing=3)
    sheet.save(file)
    return file


def fitted(picture: Image.Image) -> Image.Image:
    """As large as a cell allows; small pictures are enlarged pixel by pixel, as the model sees them."""
    zoom = min(CELL / picture.width, PICTURE_HEIGHT / picture.height)
    size = max(1, round(zoom * picture.width)), max(1, round(zoom * picture.height))
    return picture.resize(size, Image.Resampling.NEAREST if zoom > 1 else Image.Resampling.LANCZOS)


def wrapped(shown: Prompted) -> list[str]:
    """The listing and the question, in lines that fit a cell."""
    words = prompt_text(shown.question, {i: o.name for i, o in shown.view.objects.items()})
    return [part for line in words.splitlines()[:-1] for part in textwrap.wrap(line, 58)]


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    print(plot_curves(parser.parse_args(argv).run))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
