"""Several runs against their base on the same questions: one table, with intervals over questions and over seeds.

Reads files that `eval.py --out` wrote. Every difference is paired by question: arm minus base, averaged over the arm's
seeds per question. `questions` is the 95 % interval over questions; `seeds` the standard deviation of the mean over seeds.

    python compare.py --base base.json --arm consistency c0.json c1.json --arm accuracy a0.json a1.json
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from command import Parser, run as run_command
from images import DataError

METRICS = ("greedy_accuracy", "sampled_accuracy", "consistency", "unparsed", "blind_accuracy", "blind_consistency")


def read_rows(file: str) -> dict[tuple[str, str], dict]:
    """(source, example id) -> row of one eval.py output file."""
    try:
        sources = json.loads(Path(file).read_text())["sources"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{file}: not a file that eval.py --out wrote ({type(error).__name__})") from None
    return {(source, row["id"]): row for source, entry in sources.items() for row in entry["rows"]}


def values(rows: dict, keys: list, metric: str) -> np.ndarray:
    """(n,) one value per question."""
    return np.array([float(rows[k][metric]) for k in keys])


def half_width(v: np.ndarray) -> float:
    """Half of the 95 % interval of a mean over questions."""
    return 1.96 * v.std(ddof=1) / np.sqrt(len(v))


def compare(base: dict, arms: dict[str, list[dict]], belongs=lambda row: True) -> list[str]:
    """Lines of the table for the questions that `belongs` chooses; every file must hold the same questions."""
    lines = []
    for task in dict.fromkeys(row["task"] for row in base.values()):
        keys = [k for k, row in base.items() if row["task"] == task and belongs(row)]
        for metric in METRICS:
            if not keys or metric not in base[keys[0]] or any(metric not in a[keys[0]] for runs in arms.values() for a in runs):
                continue
            before = values(base, keys, metric)
            lines.append(f"{task:<12} {metric:<18} {'base':<14} {100 * before.mean():5.1f} +-{100 * half_width(before):4.1f}"
                         f"{'':<30} n = {len(keys)}")
            for name, runs in arms.items():
                table = np.stack([values(a, keys, metric) for a in runs])                       # (seeds, n)
                change = table.mean(0) - before                                                 # (n,)
                spread = 100 * table.mean(1).std(ddof=1) if len(runs) > 1 else float("nan")
                lines.append(f"{'':<12} {'':<18} {name:<14} {100 * table.mean():5.1f} (seeds {spread:4.1f})  change "
                             f"{100 * change.mean():+5.1f} +-{100 * half_width(change):4.1f}   per seed "
                             + " ".join(f"{100 * m:.1f}" for m in table.mean(1)))
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, metavar="FILE.json")
    parser.add_argument("--arm", required=True, nargs="+", action="append", metavar="NAME FILE", help="a name, then its seeds' files")
    args = parser.parse_args(argv)
    base, arms = read_rows(args.base), {name: [read_rows(f) for f in files] for name, *files in args.arm}
    for name, runs in arms.items():
        if not runs or any(run.keys() != base.keys() for run in runs):
            raise DataError(f"--arm {name}: its files must hold the same questions as {args.base}; use the same --n, --seed and --data")
    for title, belongs in (("all questions", lambda r: True), ("first word (known to the base)", lambda r: r["relation"] == 0),
                           ("opposite word", lambda r: r["relation"] == 1)):
        print(f"\n{title}: value in %, +- 95 % over questions, (standard deviation over seeds)")
        print("\n".join(compare(base, arms, belongs)))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
