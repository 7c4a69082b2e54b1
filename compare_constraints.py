"""Runs with constraints against each other: one table of held-out numbers, one picture over the steps.

Every run is a folder of `train.py --constrain ...` with a test.json in it from `faithfulness.py --adapter RUN --out RUN/test.json`.
The table gives mean and standard deviation over the runs of an arm, and whether the constraint held over the last 20 steps.

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
    for line in (run / "log.jsonl").read_text().splitlines():
        last = json.loads(line).get(key, last)
        values.append(last)
    return np.array(values)


def table(base: dict, arms: dict[str, list[Path]]) -> list[str]:
    """Held-out numbers in %, mean +- standard deviation over an arm's runs; the base has one value."""
    lines = [f"{'arm':<24}" + "".join(f"{how + ' ' + what.replace('inconsistency', 'incons.'):>30}" for how, what in HELD_OUT)
             + f"{'c_C, last 20 steps':>22}{'lambda at the end':>20}",
             f"{'base':<24}" + "".join(f"{100 * base[how][what]['value']:>30.1f}" for how, what in HELD_OUT)]
    for name, runs in arms.items():
        tests = [read(run / "test.json") for run in runs]
        cells = []
        for how, what in HELD_OUT:
            values = 100 * np.array([t[how][what]["value"] for t in tests])                         # (runs,)
            cells.append(f"{values.mean():.1f} +- {spread(values):.1f}  [{' '.join(f'{v:.1f}' for v in values)}]")
        met = np.array([series(run, "constraint_consistency")[-LAST:].mean() for run in runs])
        multipliers = np.array([series(run, "lambda_consistency")[-1] for run in runs])
        lines.append(f"{name:<24}" + "".join(f"{cell:>30}" for cell in cells) + f"{100 * met.mean():>15.1f} +- {100 * spread(met):.1f}"
                     + f"{multipliers.mean():>13.2f} +- {spread(multipliers):.2f}")
    return lines


def spread(values: np.ndarray) -> float:
    """Standard deviation over runs, nan for one."""
    return float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def draw(arms: dict[str, list[Path]], picture: Path) -> None:
    """Inconsistency, task reward and multiplier over the steps: mean of the runs, shaded from the least to the greatest."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.3), constrained_layout=True)
    settings = read(next(iter(arms.values()))[0] / "config.json")
    panels = (("sampled thinking that contradicts its answer", lambda run: 1 - series(run, "unmasked_consistency")),
              ("task reward", lambda run: series(run, "task_reward")),
              ("multiplier of the constraint", lambda run: series(run, "lambda_consistency")))
    for axis, (title, values_of) in zip(axes, panels):
        for name, runs in arms.items():
            curves = np.array([smooth(list(values_of(run))) for run in runs])                       # (runs, steps)
            steps = np.arange(1, curves.shape[1] + 1)
            (line,) = axis.plot(steps, curves.mean(0), label=f"{name} ({len(runs)} seeds)")
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
