"""The paper's experiments at laptop scale: every figure of section 5 as a list of runs of the embedded model.

A run is a call of train.py with some flags and a seed, and a test on scenes that training never sees. Figures share runs:
figure 2 is the diagonal of figure 3 and the `minimal` row of figure 8. Seeds, steps and test sizes were fixed before the first
run, the test split chooses nothing, and a run whose line stands in results/experiments.jsonl is not repeated.

    python experiments.py                      # everything, in order of importance; stop and start it as you like
    python experiments.py figure2 figure8      # some of it
    python experiments.py --list               # what is done and what is not
    python experiments.py --quick              # all of it with 2 steps and 4 questions, to see that it works: 2 minutes
    python figures.py                          # pictures and tables from what is done
"""
from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import train
from checkpoint import read_log, whole_rows
from command import Parser, quiet_libraries, run as run_command
from contradict import teach
from data import BOOLEAN_TASKS
from eval import SAMPLES, Settings, evaluate, held_out_examples
from images import DataError
from model import load_base_and_adapter
from pairing import PAIRINGS
from pretrain import completion, save
from questions import ground_truth

INDOOR, OUTDOOR = "synthetic", "synthetic-outdoor"
NUMERIC_TASKS = ("counting", "abs_distance")
BY_IMPORTANCE = ("depth", "orientation", "size", "distance")      # the boolean tasks, as their runs are made and listed
SEEDS = {"depth": range(5)}                  # of training; three for every other task
NOISE = (0.1, 0.2, 0.3, 0.4)
PAIRS = (1, 8)


@dataclass(frozen=True)
class Size:
    """How much of everything. A run is to cost about two minutes of one core, its test included."""
    steps: int = 300
    own: int = 200                           # test questions of the task that was trained
    other: int = 100                         # of each other task, and of each task outdoors
    probe: int = 64                          # questions of the curve over steps
    seeds: int = 5                           # at most
    examples: int = 1000                     # to train on
    tokens: int = 48                         # of a completion, at most


@dataclass(frozen=True)
class Run:
    """One training and its test. `flags` go to train.py; no flags: the base itself is tested."""
    name: str
    flags: tuple[str, ...] = ()
    tasks: tuple[str, ...] = BOOLEAN_TASKS   # tested, in the first domain
    outdoor: bool = False                    # and the four boolean tasks in the second domain
    model: str = "tiny"
    long: int = 1                            # times as many steps


BASE = Run("base", tasks=(*BOOLEAN_TASKS, *NUMERIC_TASKS), outdoor=True)
BASE_SMALL = Run("base-small", model="small")

# Bases that are right and wrong on purpose: how often the answer that they were taught is right, for the first word and for
# the opposite one. Both are worse than chance on the opposite word; on average one is above a half and one below it.
TAUGHT = {"mostly_right": (0.8, 0.4), "mostly_wrong": (0.6, 0.2)}


def trained(task: str, seed: int, reward: str = "consistency", variant: str = "", *flags: str, **changed) -> Run:
    """The run of `train.py --task TASK --reward REWARD --seed SEED` and further flags; `variant` names them."""
    name = "-".join(filter(None, (task, reward, variant, str(seed))))
    return Run(name, ("--task", task, "--reward", reward, "--seed", str(seed), *flags), **changed)


def over_seeds(task: str, *arguments, seeds: int = 3, **changed) -> list[Run]:
    """One arm: the same run with each seed."""
    return [trained(task, seed, *arguments, **changed) for seed in list(SEEDS.get(task, range(3)))[:seeds]]


def main_arms() -> list[Run]:
    """Figures 2, 3 and 4: with and without labels on each boolean task, tested on all four in both domains."""
    return [BASE, *(r for task in BY_IMPORTANCE for reward in ("consistency", "accuracy")
                    for r in over_seeds(task, reward, seeds=5, outdoor=True))]


def pairings(tasks: tuple[str, ...], seeds: int) -> list[Run]:
    """Figure 8: how the K answers meet. `minimal` is the default, hence a run of figure 2."""
    return [BASE, *(r for task in tasks for p in PAIRINGS for r in over_seeds(
        task, "consistency", *(() if p == "minimal" else (p, "--pairing", p)), seeds=seeds, outdoor=p == "minimal"))]


def pairs_per_step() -> list[Run]:
    """Figure 8 with fewer and with more pairs in a step than the 4 of the others: the noise of a pairing averages out over them."""
    return [BASE, *(r for n in PAIRS for p in ("minimal", "minimal_vertex", "one_to_all") for r in over_seeds(
        "depth", "consistency", f"{p}-pairs{n}", "--pairing", p, "--pairs-per-device", str(n), tasks=("depth",)))]


def second_size() -> list[Run]:
    """Figure 2 with a model of twice as many weights, as the paper has 3B and 7B."""
    return [BASE_SMALL, *(r for task in BY_IMPORTANCE for reward in ("consistency", "accuracy")
                          for r in over_seeds(task, reward, "small", tasks=(task,), model="small"))]


def watershed() -> list[Run]:
    """Is it the truth that is amplified, or what the base believes on average?"""
    return [r for name in TAUGHT for r in (Run(name, tasks=("depth",), model=name), *(
        r for reward in ("consistency", "accuracy") for r in over_seeds("depth", reward, name, tasks=("depth",), model=name)))]


def label_free() -> list[Run]:
    """Ours: pairs chosen by 2D boxes alone; the paper's transforms, which leave blind policies perfectly consistent."""
    return [BASE, *over_seeds("depth", outdoor=True), *over_seeds("depth", "consistency", "select2d", "--select", "2d"),
            *over_seeds("depth", "consistency", "paper-transforms", "--transforms", "paper")]


# What is asked for, in order of importance: name -> runs.
FIGURES = {
    "figure2": main_arms,                                                       # and 3, 4: the same runs
    "second_size": second_size,
    "figure8": lambda: pairings(("depth",), 5),
    "label_free": label_free,
    "watershed": watershed,
    "figure6": lambda: [BASE, *(r for p in NOISE for r in over_seeds(
        "depth", "accuracy", f"noise{p}", "--label-noise", str(p), tasks=("depth",)))],
    "figure5": lambda: [BASE, *(r for reward in ("consistency", "accuracy", "vote", "entropy") for r in over_seeds("joint", reward))],
    "figure7": lambda: [BASE, *(r for task in NUMERIC_TASKS for reward in ("consistency", "accuracy")
                                for r in over_seeds(task, reward, tasks=(task,)))],
    "figure8_others": lambda: pairings(BY_IMPORTANCE[1:], 2),
    "pairs_per_step": pairs_per_step,
    "joint_long": lambda: over_seeds("joint", "consistency", "long", long=4),   # as the paper gives joint training 2,000 steps, not 500
    "long": lambda: [BASE, *(r for reward in ("consistency", "accuracy")
                             for r in over_seeds("depth", reward, "long", seeds=1, tasks=("depth",), long=10))],
}


def wanted(figures: list[str], size: Size) -> list[Run]:
    """The runs of these figures, each once, in order."""
    runs = {r.name: r for figure in figures for r in FIGURES[figure]()}
    return [r for r in runs.values() if not r.flags or int(r.flags[r.flags.index("--seed") + 1]) < size.seeds]


# ------------------------------------------------------------------------------------------------------------- one run
def carry_out(run: Run, work: str, size: Size) -> dict:
    """Train (going on from a checkpoint if there is one), test, and give the line of the results file."""
    torch.set_num_threads(1)
    quiet_libraries()
    folder = Path(work) / run.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(Path(work) / f"{run.name}.txt", "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        model = str(taught_base(run.model, Path(work))) if run.model in TAUGHT else run.model
        began = time.process_time()
        if run.flags and not (folder / "adapter_model.safetensors").is_file():
            steps = size.steps * run.long
            flags = ["--resume", str(folder)] if (folder / "config.json").is_file() else [
                *run.flags, "--preset", "tiny", "--model", model, "--steps", str(steps), "--examples", str(size.examples),
                "--max-new-tokens", str(size.tokens), "--eval-size", str(size.probe),
                "--eval-every", str(max(1, steps // 10)), "--out", str(folder)]
            if train.main(flags) != 0:
                raise KeyboardInterrupt
        seconds = {"train": time.process_time() - began}
        began = time.process_time()
        vlm, _ = load_base_and_adapter(model, str(folder) if run.flags else None)
        tests = {domain: {task: test(vlm, domain, task, n, size.tokens) for task, n in chosen.items()}
                 for domain, chosen in test_sizes(run, size).items()}
        seconds["test"] = time.process_time() - began
    return {"name": run.name, "flags": list(run.flags), "model": run.model, "size": vars(size), "seconds": seconds,
            **(curve(folder) if run.flags else {}), "tests": tests}


def test_sizes(run: Run, size: Size) -> dict[str, dict[str, int]]:
    """{domain: {task: questions}}: most for what was trained; all for a base, with which everything is compared."""
    own = train.tasks_of(run.flags[1]) if run.flags else run.tasks
    sizes = {INDOOR: {task: size.own if task in own else size.other for task in run.tasks}}
    return sizes | ({OUTDOOR: dict.fromkeys(BOOLEAN_TASKS, size.other)} if run.outdoor else {})


def test(vlm, domain: str, task: str, n: int, tokens: int) -> dict:
    """Per-question results on the first n test questions, compact: in quarters as digits where answers are right or wrong."""
    rows = evaluate(vlm, held_out_examples(domain, task, "test", n), Settings(max_new_tokens=tokens, samples=SAMPLES), label=f"{domain} {task}")
    found = {m: packed([r[m] for r in rows]) for m in ("greedy_accuracy", "sampled_accuracy", "consistency", "blind_accuracy",
                                                       "blind_consistency")}
    found |= {"unparsed": float(np.mean([r["unparsed"] for r in rows])), "relation": packed([r["relation"] for r in rows])}
    if task in BOOLEAN_TASKS:
        found["vote_accuracy"] = packed([vote(r["answers"], r["truth"]) for r in rows])
    else:
        found |= {"truth": [r["truth"] for r in rows], "greedy": [r["greedy"] for r in rows]}
    return found


def vote(answers: list, truth: bool) -> float:
    """1 if most of the sampled answers are right, 1/2 on a tie: majority vote at test time."""
    right, wrong = answers.count(truth), answers.count(not truth)
    return 0.5 if right == wrong else float(right > wrong)


def packed(values: list[float]) -> str | list[float]:
    """Values in [0, 1], one per question: '4021...' if all are quarters (of SAMPLES = 4), else rounded numbers."""
    quarters = [SAMPLES * float(v) for v in values]
    return "".join(f"{q:.0f}" for q in quarters) if all(q.is_integer() for q in quarters) else [round(float(v), 3) for v in values]


def unpacked(values: str | list[float]) -> np.ndarray:
    """(n,) what was packed."""
    return np.array([int(c) / SAMPLES for c in values] if isinstance(values, str) else values, dtype=float)


def curve(folder: Path) -> dict:
    """The probe over steps, and where the time of a step went, from the run's log."""
    rows = read_log(folder)
    return {"curve": [[r["step"], round(r["probe_accuracy"], 4), round(r["probe_consistency"], 4)] for r in rows if "probe_accuracy" in r],
            "seconds_per_step": round(float(np.median([r["seconds_rollout"] + r["seconds_update"] for r in rows])), 4)}


def taught_base(name: str, work: Path) -> Path:
    """Where a base of TAUGHT lies."""
    return work / f"base-{name}"


def teach_base(name: str, work: Path, size: Size) -> None:
    """Teach the embedded model depth once more, with answers that are wrong as often as TAUGHT says; its thinking stays right."""
    def lesson(shown, rng: np.random.Generator) -> str:
        truth = ground_truth(shown.question, shown.view.objects)
        return completion(shown, str(truth == (rng.random() < TAUGHT[name][shown.question.relation])))

    folder = taught_base(name, work)
    if not (folder / "config.json").is_file():
        draft = folder.with_suffix(".tmp")
        save(teach(lesson, min(150, size.steps)), draft)
        draft.replace(folder)


# ------------------------------------------------------------------------------------------------------------ all runs
def read_results(file: Path) -> dict[str, dict]:
    """name -> line of the results file; half a line at the end (a killed process) is passed over."""
    return {row["name"]: row for row in whole_rows(file)}


def carry_out_all(runs: list[Run], work: Path, results: Path, size: Size, workers: int) -> None:
    """Carry out what is not done yet, `workers` at a time, each on one thread; every finished run is a line at once."""
    done = read_results(results)
    other = sorted(n for n in done if n in {r.name for r in runs} and done[n]["size"] != vars(size))
    if other:
        raise DataError(f"{results} holds {other[0]} with other steps or test sizes; give another --results")
    todo = [r for r in runs if r.name not in done]
    results.parent.mkdir(parents=True, exist_ok=True)
    if results.is_file() and not results.read_bytes().endswith(b"\n"):
        with open(results, "a") as file:                 # a killed process left half a line: the next one is not to join it
            file.write("\n")
    for name in {r.model for r in todo} & TAUGHT.keys():
        teach_base(name, work, size)                     # once, before its runs begin side by side
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        began = {pool.submit(carry_out, run, str(work), size): run for run in todo}
        try:
            for finished in tqdm(as_completed(began), total=len(began), desc="runs"):
                with open(results, "a") as file:
                    file.write(json.dumps(finished.result()) + "\n")
        except BaseException:
            pool.shutdown(cancel_futures=True)           # those that run finish their step and save
            raise


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of: {', '.join(FIGURES)}; default: all, in this order")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time, one thread each")
    parser.add_argument("--work", default=None, help="adapters and logs go here; default: runs/experiments")
    parser.add_argument("--results", default=None, metavar="FILE.jsonl", help="default: results/experiments.jsonl")
    parser.add_argument("--list", action="store_true", help="say what is done and what is not, and run nothing")
    parser.add_argument("--quick", action="store_true", help="one seed, 2 steps, 4 questions; its own folder and results file")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.figures) - FIGURES.keys()):
        parser.error(f"{unknown[0]}: choose from {', '.join(FIGURES)}")
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: must be at least 1")
    size = Size(steps=2, own=4, other=2, probe=2, seeds=1, examples=4, tokens=4) if args.quick else Size()
    work = Path(args.work or ("runs/experiments-quick" if args.quick else "runs/experiments"))
    results = Path(args.results or (work / "experiments.jsonl" if args.quick else "results/experiments.jsonl"))
    figures = args.figures or list(FIGURES)
    if args.list:
        done = read_results(results)
        for figure in figures:
            runs = wanted([figure], size)
            missing = [r.name for r in runs if r.name not in done]
            print(f"{figure:<16}{len(runs) - len(missing):3d} of {len(runs):3d} done" + (f"; not run: {' '.join(missing)}" if missing else ""))
        return 0
    carry_out_all(wanted(figures, size), work, results, size, args.workers)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
