"""`python data.py --check FOLDER`: is a folder in Omni3D's format fit for training, and how balanced is it?

Prints every malformed row (by file and id), every picture that is missing, broken, mislabelled, too small or of another
size than its annotation says, then the number of examples and the class balance of each task. Exit code 0: usable, bad
pictures are left out. 2: no such folder, no example, or malformed rows (training stops at them: mend or delete them).

A boolean answer is True in exactly half of the drawn questions, whatever the data: relation and object order are drawn
uniformly. Printed is what could still leak: how often the example's object 1 is the one further left, closer, bigger.
Counts and distances have no such guarantee; beside them stands the constant answer that would score best.
"""
from __future__ import annotations

import sys
from collections import Counter

import numpy as np

from command import Parser
from data import BOOLEAN_TASKS, TASKS, Example, Record, examples, gap, load_omni3d, split
from images import DataError, bad_pictures

POSITIVE = dict(orientation="object 1 is left of object 2", depth="object 1 is closer than object 2",
                size="object 1 is bigger than object 2", distance="object 2 is closer to object 1 than object 3")


def best_constant(truths: list[float]) -> tuple[float, float]:
    """The constant answer with the highest mean of max(0, 1 - |y - y*| / y*), and that mean.

    The mean is piecewise linear in y with its peaks at the truths; more than 201 of them are thinned to quantiles.
    """
    values = np.asarray(truths, dtype=float)  # (n,)
    tried = np.unique(np.quantile(values, np.linspace(0, 1, 201), method="nearest"))  # (m,)
    scores = np.maximum(0, 1 - np.abs(tried[:, None] - values) / values).mean(1)  # (m,)
    return float(tried[scores.argmax()]), float(scores.max())


def balance(task: str, chosen: list[Example]) -> str:
    """One line on the answers of a task's examples."""
    gaps = [gap(task, example.objects) for example in chosen]
    names = Counter(o.name for e in chosen for o in (e.objects[:1] if task == "counting" else e.objects))
    commonest = "commonest: " + ", ".join(f"{name} {count}" for name, count in names.most_common(4))
    if task in BOOLEAN_TASKS:
        return f"True 50 % by construction; {POSITIVE[task]} in {np.mean(np.array(gaps) > 0):.0%}; {commonest}"
    answer, score = best_constant(gaps)
    if task == "counting":
        spread = ", ".join(f"{count:g}: {times}" for count, times in sorted(Counter(gaps).items()))
    else:
        spread = f"{min(gaps):.2f} to {max(gaps):.2f} m, median {np.median(gaps):.2f} m"
    return f"{spread}; always answering {answer:.3g} scores {score:.3f}; {commonest}"


def report(source: str, records: list[Record]) -> int:
    """Prints counts and class balance of one source; returns the number of examples, of either selection."""
    objects = sum(len(r.objects) for r in records)
    boxes = sum(o.box3d is not None for r in records for o in r.objects)
    rows = sum(sum(r.counts.values()) for r in records)
    print(f"\n{source}: {len(records)} pictures; of {rows} rows {objects} pass the filters, {boxes} with a 3D box")
    print(f"  {'examples':<14}{'train':>8}{'test':>8}   (with --select 2d:{'train':>8}{'test':>8})")
    total = 0
    for task in TASKS:
        counts = [sum(examples(r, task, select) is not None for r in split(records, part))
                  for select in ("gap", "2d") for part in ("train", "test")]
        total += sum(counts)
        print(f"  {task:<14}{counts[0]:>8}{counts[1]:>8}   {'':<17}{counts[2]:>8}{counts[3]:>8}")
    for task in TASKS:
        chosen = [example for r in records if (example := examples(r, task))]
        if chosen:
            print(f"  {task}: {balance(task, chosen)}")
    return total


def check(folder: str) -> int:
    """The whole report on a folder, as an exit code; raises a DataError where there is nothing to report on."""
    errors: list[str] = []
    records = load_omni3d(folder, errors=errors)
    print("\n".join(f"malformed: {error}" for error in errors) or "malformed rows: none")
    problems = bad_pictures([r.load for r in records])
    print("\n".join(f"left out: {problem}" for problem in problems if problem) or "pictures left out: none")
    usable = [r for r, problem in zip(records, problems) if problem is None]
    sources = sorted({r.source for r in usable})
    total = sum(report(source, [r for r in usable if r.source == source]) for source in sources)
    if errors:
        raise DataError(f"{folder}: {len(errors)} malformed rows or images, listed above; correct or delete them")
    if total == 0:
        raise DataError(f"{folder}: no picture gives an example for any task; see what was left out above")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line of data.py."""
    parser = Parser(prog="data.py", description="Is a folder in Omni3D's format fit for training, and how balanced?")
    parser.add_argument("--check", metavar="FOLDER", help="has annotations/*.json (or Omni3D/*.json) and the pictures")
    folder = parser.parse_args(arguments).check
    if folder is None:
        parser.print_help()
        return 0
    try:
        return check(folder)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
