"""Runs with constraints against each other: one table of held-out numbers, one picture over the steps.

Every run is a folder of `train.py --constrain ...` with a test.json in it from `faithfulness.py --adapter RUN --out RUN/test.json`.
The table gives mean and standard deviation over the runs of an arm; the mean of c_C tells whether the constraint held.

    python compare_constraints.py --base base.json --arm "task only" runs/measure-? --arm constrained runs/dual-? --picture curves.png
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from checkpoint import read_log  # noqa: E402
from command import Parser, run as run_command  # noqa: E402
from constraints import thresholds_of  # noqa: E402
from images import DataError  # noqa: E402
from plots import smooth  # noqa: E402

HELD_OUT = (("sampled", "inconsistency"), ("sampled", "inconsistency_if_correct"), ("sampled", "accuracy"), ("sampled", "semantic"),
            ("greedy", "inconsistency"), ("greedy", "accuracy"))
LAST = 20       # steps over which "held" is judged


def read(file: Path) -> dict:
    """A JSON file that must be there."""
    if not file.is_file():
        raise DataError(f"{file} is missing; train with --constrain, then python faithfulness.py --adapter RUN --out RUN/test.json")
    return json.loads(file.read_text())


def series(run: Path, key: str) -> np.ndarray:
    """One number of the log per step, (steps,); a step without it repeats the one before."""
    values, last = [], float("nan")
    for logged in read_log(run):
        last = logged.get(key, last)
        values.append(last)
    return np.array(values)


def table(base: dict, arms: dict[str, list[Path]]) -> list[str]:
    """Held-out numbers in %, mean, standard deviation over an arm's runs, and every run; the base has one value."""
    tests, lines = {name: [read(run / "test.json") for run in runs] for name, runs in arms.items()}, []
    for how, what in HELD_OUT:
        e = base[how][what]
        lines.append(f"{how + ' ' + what:<34}{'base':<22}{100 * e['value']:6.1f}{'':<12} n = {e['n']}")
        lines += [row(name, [100 * t[how][what]["value"] for t in tests[name]], 1) for name in arms]
    for title, key, scale, digits in ((f"mean of c_C, last {LAST} steps", "constraint_consistency", 100, 1),
                                      ("largest multiplier", "lambda_consistency", 1, 2)):
        lines.append(title)
        for name, runs in arms.items():
            values = [series(run, key) for run in runs]                                             # each (steps,)
            lines.append(row(name, [scale * (v.max() if digits == 2 else v[-LAST:].mean()) for v in values], digits))
    return lines


def row(name: str, values: list[float], digits: int) -> str:
    """One arm: mean +- standard deviation over its runs, then each run."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")
    each = " ".join(f"{v:.{digits}f}" for v in values)
    return f"{'':<34}{name:<22}{np.mean(values):6.{digits}f} +- {spread:<8.{digits}f} per seed {each}"


def draw(arms: dict[str, list[Path]], picture: Path) -> None:
    """Inconsistency, task reward and multiplier over the steps: mean of the runs, shaded from the least to the greatest."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.3), constrained_layout=True)
    settings = read(next(iter(arms.values()))[0] / "config.json")
    panels = (("sampled thinking that contradicts its answer", lambda run: 1 - series(run, "unmasked_consistency")),
              ("task reward", lambda run: series(run, "task_reward")),
              ("multiplier of the constraint", lambda run: series(run, "lambda_consistency")))
    colours = {name: f"C{i}" for i, name in enumerate(arms)}
    for axis, (title, values_of) in zip(axes, panels):
        for name, runs in arms.items():
            if axis is axes[2] and not any(values_of(run).any() for run in runs):
                continue                                                      # an arm without a multiplier
            curves = np.array([smooth(list(values_of(run))) for run in runs])                       # (runs, steps)
            steps = np.arange(1, curves.shape[1] + 1)
            (line,) = axis.plot(steps, curves.mean(0), color=colours[name], label=f"{name} ({len(runs)} seed{'s' * (len(runs) > 1)})")
            axis.fill_between(steps, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.15)
        axis.set(title=title, xlabel="step (mean of 10)")
        axis.grid(alpha=0.3)
    axes[0].axhline(1 - thresholds_of(settings["constrain"])["consistency"], color="black", ls=":", lw=1)
    axes[0].set_ylim(0, None)
    axes[0].legend(fontsize=9)
    figure.savefig(picture, dpi=90)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, metavar="FILE.json", help="of faithfulness.py --model ... --out")
    parser.add_argument("--arm", required=True, nargs="+", action="append", metavar="NAME RUN", help="a name, then its seeds' runs")
    parser.add_argument("--picture", metavar="FILE.png")
    args = parser.parse_args(argv)
    arms = {name: [Path(run) for run in runs] for name, *runs in args.arm}
    if not all(arms.values()):
        raise DataError("--arm takes a name and at least one run")
    print("\n".join(table(read(Path(args.base)), arms)))
    if args.picture:
        draw(arms, Path(args.picture))
        print(f"wrote {args.picture}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
