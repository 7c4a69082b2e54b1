"""The two pictures a run leaves behind: curves over steps, and a sheet of pairs to look at."""
from __future__ import annotations

import json
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from dataset import Pair  # noqa: E402
from questions import prompt_text  # noqa: E402


def smooth(values: list[float], window: int = 10) -> list[float]:
    """Mean over the last `window` steps."""
    return [sum(values[max(0, i + 1 - window):i + 1]) / len(values[max(0, i + 1 - window):i + 1]) for i in range(len(values))]


def plot_curves(run: Path) -> Path:
    """curves.png from log.jsonl: probe accuracy and consistency, reward parts, and the health of the update."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    probes = [r for r in rows if "probe_accuracy" in r]
    rows = [r for r in rows if "reward" in r]
    steps = [r["step"] for r in rows]
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
    axes[0].plot([r["step"] for r in probes], [r["probe_accuracy"] for r in probes], "o-", label="probe accuracy (plot only)")
    axes[0].plot([r["step"] for r in probes], [r["probe_consistency"] for r in probes], "s--", label="probe consistency")
    axes[0].set(title="held-out probe", ylim=(0, 1.02))
    for key in ("consistency", "format", "reward"):
        axes[1].plot(steps, smooth([r[key] for r in rows]), label=key)
    axes[1].set(title="reward parts (mean of 10 steps)")
    for key in ("no_spread", "unparsed", "entropy"):
        axes[2].plot(steps, smooth([r[key] for r in rows]), label=key)
    axes[2].set(title="groups without spread, unparsed, entropy", ylim=(0, None))
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(run / "curves.png", dpi=90)
    plt.close(figure)
    return run / "curves.png"


def plot_pairs(file: Path, pairs: list[Pair], said: list[tuple[str, str]]) -> Path:
    """A sheet of pairs: x beside x', the words, the parts of T, the expected relation, and what the model answered."""
    figure, axes = plt.subplots(len(pairs), 2, figsize=(10, 3.1 * len(pairs)), squeeze=False)
    for (left, right), pair, answers in zip(axes, pairs, said):
        for axis, shown, answer, name in ((left, pair.x, answers[0], "x"), (right, pair.x_prime, answers[1], "x'")):
            axis.imshow(shown.picture)
            axis.axis("off")
            words = prompt_text(shown.question, {i: o.name for i, o in shown.view.objects.items()})
            lines = [wrapped for line in words.splitlines()[:-1] for wrapped in textwrap.wrap(line, 62)]
            axis.text(1.04, 1.0, "\n".join([name, *lines, f"model: {answer}"]), transform=axis.transAxes, fontsize=6.5, va="top")
        left.set_title(f"T: {', '.join(pair.transform.parts) or 'identity'}: answers must "
                       f"{'differ' if pair.negates else 'match'}", fontsize=8, loc="left")
    figure.subplots_adjust(left=0.01, right=0.78, wspace=1.3, hspace=0.25, top=0.97, bottom=0.01)
    figure.savefig(file, dpi=90)
    plt.close(figure)
    return file
