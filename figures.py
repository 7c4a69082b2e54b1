"""Pictures and tables of the experiments, from results/experiments.jsonl: one function per figure of the paper.

Every value is a mean over test questions and seeds. Two spreads are given: +- is the 95 % interval over questions of the change
against the base, paired by question and averaged over seeds; `seeds` is the standard deviation of the mean over seeds.
What has not been run is said, not drawn.

    python figures.py                  # results/*.png and results/experiments.txt
"""
from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from textwrap import fill

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from scipy.stats import spearmanr  # noqa: E402

from check import best_constant  # noqa: E402
from command import Parser, one_line, run as run_command  # noqa: E402
from compare import half_width  # noqa: E402
from data import BOOLEAN_TASKS  # noqa: E402
from dataset import evaluation_pair, to_prompt  # noqa: E402
from eval import Settings, held_out_examples  # noqa: E402
from experiments import BY_IMPORTANCE, INDOOR, NOISE, NUMERIC_TASKS, OUTDOOR, PAIRS, TAUGHT, read_results, unpacked  # noqa: E402
from grpo import rollout  # noqa: E402
from images import DataError  # noqa: E402
from model import load_base_and_adapter  # noqa: E402
from pairing import PAIRINGS  # noqa: E402
from questions import SYSTEM_PROMPT, ground_truth, prompt_text  # noqa: E402
from verifiers import accuracy  # noqa: E402

Results = dict[str, dict]
MILLIONS = {"tiny": 0.68, "small": 1.45}              # weights
COLOURS = {"base": "#999999", "accuracy": "#4477aa", "consistency": "#ee7733", "vote": "#228833", "entropy": "#aa3377"}


# ---------------------------------------------------------------------------------------------------------- arithmetic
def arm(results: Results, *words: str) -> list[dict]:
    """The finished runs of one arm, seed by seed: arm(results, "depth", "consistency", "random")."""
    stem = "-".join(words) + "-"
    return [r for name, r in sorted(results.items()) if name.startswith(stem) and name[len(stem):].isdigit()]


def per_question(runs: list[dict], domain: str, task: str, metric: str) -> np.ndarray:
    """(seeds, n) over the questions that all of these runs answered."""
    rows = [unpacked(r["tests"][domain][task][metric]) for r in runs]
    return np.stack([row[:min(map(len, rows))] for row in rows])


def compared(runs: list[dict], base: dict, domain: str, task: str, metric: str = "greedy_accuracy", word: int | None = None) -> dict:
    """Value, change against the base, the 95 % half-width of the change over questions, and the spread over seeds, in %."""
    after = per_question(runs, domain, task, metric)                                            # (seeds, n)
    n = after.shape[1]
    before = unpacked(base["tests"][domain][task][metric])[:n]                                  # (n,)
    chosen = np.ones(n, bool) if word is None else unpacked(base["tests"][domain][task]["relation"])[:n] == word
    change = (after.mean(0) - before)[chosen]                                                   # (n',)
    return {"value": 100 * after[:, chosen].mean(), "base": 100 * before[chosen].mean(), "base_half": 100 * half_width(before[chosen]),
            "change": 100 * change.mean(),
            "half": 100 * half_width(change), "seeds": len(runs), "n": int(chosen.sum()),
            "spread": 100 * after[:, chosen].mean(1).std(ddof=1) if len(runs) > 1 else float("nan"),
            "each": (100 * after[:, chosen].mean(1)).round(1).tolist()}


def first_above(curve: list[list[float]], level: float) -> int | str:
    """The first step at which the probe was looked at and was right more often than `level`."""
    return next((step for step, right, _ in curve if right > level), "never")


def said(c: dict) -> str:
    """One comparison as text."""
    return (f"{c['base']:5.1f} -> {c['value']:5.1f}  ({c['change']:+5.1f} +- {c['half']:4.1f}; {c['seeds']} seeds, sd {c['spread']:4.1f}: "
            f"{' '.join(f'{v:.1f}' for v in c['each'])}; n = {c['n']})")


def save(figure, folder: Path, name: str) -> None:
    figure.savefig(folder / f"{name}.png", dpi=100, bbox_inches="tight")
    plt.close(figure)


# -------------------------------------------------------------------------------------------------------------- figures
def figure2(results: Results, base: dict, folder: Path) -> list[str]:
    """Base, with labels, without labels, in two model sizes: the task that was trained, and its two relation words."""
    lines, panels = [], {}
    for size, variant, untrained in (("tiny", (), base), ("small", ("small",), results.get("base-small"))):
        bars = {}
        for task, reward in product(BOOLEAN_TASKS, ("accuracy", "consistency")):
            if untrained and (runs := arm(results, task, reward, *variant)):
                title = f"{size:<7}{task:<12}{reward:<13}"
                for metric in ("greedy_accuracy", "sampled_accuracy", "consistency", "blind_accuracy"):
                    c = compared(runs, untrained, INDOOR, task, metric)
                    lines.append(f"{title}{metric:<18}{said(c)}")
                    if metric == "sampled_accuracy":
                        bars[task, reward] = c
                lines += [f"{title}{name:<18}{said(compared(runs, untrained, INDOOR, task, word=w))}"
                          for w, name in enumerate(("  first word", "  opposite word"))]
        if bars:
            panels[size] = bars
    if not panels:
        return []
    figure, axes = plt.subplots(1, len(panels), figsize=(1 + 6 * len(panels), 3.6), sharey=True, squeeze=False, constrained_layout=True)
    for axis, (size, bars) in zip(axes.flat, panels.items()):
        draw_bars(axis, bars)
        axis.set_title(f"{size}, {MILLIONS[size]} million weights", fontsize=10)
    axes[0, 0].set_ylabel("accuracy of sampled answers, %")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), ncols=3, loc="outside upper center", frameon=False)
    save(figure, folder, "figure2")
    return lines


def draw_bars(axis, bars: dict[tuple[str, str], dict]) -> None:
    """Three bars per task, from {(task, reward): comparison}; whiskers are 95 % over questions, of the change for trained models."""
    tasks = [t for t in BOOLEAN_TASKS if any(t == task for task, _ in bars)]
    for i, (kind, label) in enumerate((("base", "base"), ("accuracy", "accuracy, labels"), ("consistency", "consistency, no labels"))):
        for x, task in enumerate(tasks):
            c = bars.get((task, kind)) or (bars.get((task, "consistency")) if kind == "base" else None)
            if c:
                value, half = (c["base"], c["base_half"]) if kind == "base" else (c["value"], c["half"])
                axis.bar(x + 0.27 * (i - 1), value, 0.25, yerr=half, capsize=2, color=COLOURS[kind], label=label if x == 0 else None)
    axis.axhline(50, color="k", lw=0.6, ls=":")
    axis.set(xticks=range(len(tasks)), xticklabels=tasks, ylim=(40, 102))


def transfer(results: Results, base: dict, folder: Path) -> list[str]:
    """Figures 3 and 4: trained on the row's task, tested on the column's, here and in the second domain; change in points."""
    lines, panels = [], []
    for domain in (INDOOR, OUTDOOR):
        for reward in ("consistency", "accuracy"):
            table = np.full((4, 4), np.nan)
            for i, task in enumerate(BOOLEAN_TASKS):
                for j, tested in enumerate(BOOLEAN_TASKS):
                    if runs := [r for r in arm(results, task, reward) if domain in r["tests"]]:
                        c = compared(runs, base, domain, tested)
                        table[i, j] = c["change"]
                        lines.append(f"{domain:<18}{reward:<13}{task:<12}-> {tested:<12}{said(c)}")
            panels.append((f"{domain}, {reward}", table))
    if all(np.isnan(table).all() for _, table in panels):
        return []
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), constrained_layout=True)
    for axis, (title, table) in zip(axes, panels):
        axis.imshow(table, cmap="RdBu", vmin=-30, vmax=30)
        for (i, j), value in np.ndenumerate(table):
            axis.text(j, i, "not run" if np.isnan(value) else f"{value:+.0f}", ha="center", va="center", fontsize=9)
        axis.set(xticks=range(4), yticks=range(4), title=title, xlabel="tested on")
        axis.set_xticklabels(BOOLEAN_TASKS, rotation=30)
        axis.set_yticklabels(BOOLEAN_TASKS)
    axes[0].set_ylabel("trained on")
    save(figure, folder, "figure3_4")
    return lines


def figure5(results: Results, base: dict, folder: Path) -> list[str]:
    """Joint training and label-free baselines: the mean over the four boolean tasks."""
    bars = {}
    voted = np.concatenate([unpacked(base["tests"][INDOOR][t]["vote_accuracy"]) for t in BOOLEAN_TASKS])
    greedy = np.concatenate([unpacked(base["tests"][INDOOR][t]["greedy_accuracy"]) for t in BOOLEAN_TASKS])
    lines = [f"{'base, vote of 4 at test time':<32}{100 * greedy.mean():5.1f} -> {100 * voted.mean():5.1f}  (n = {len(voted)})"]
    for reward in ("consistency", "accuracy", "vote", "entropy"):
        if runs := arm(results, "joint", reward):
            each = [compared(runs, base, INDOOR, task) for task in BOOLEAN_TASKS]
            bars[reward] = float(np.mean([c["value"] for c in each]))
            lines.append(f"joint, {reward:<25}{100 * greedy.mean():5.1f} -> {bars[reward]:5.1f}  ({len(runs)} seeds)")
            lines += [f"    {task:<28}{said(c)}" for task, c in zip(BOOLEAN_TASKS, each)]
    if runs := arm(results, "joint", "consistency", "long"):
        lines.append("joint, consistency, four times the steps")
        lines += [f"    {task:<28}{said(compared(runs, base, INDOOR, task))}" for task in BOOLEAN_TASKS]
    if not bars:
        return []
    figure, axis = plt.subplots(figsize=(6.5, 3.2))
    values = {"base": 100 * greedy.mean(), "base,\nvote of 4": 100 * voted.mean(), **bars}
    axis.bar(list(values), list(values.values()), color=[COLOURS.get(k, "#bbbbbb") for k in values])
    axis.axhline(50, color="k", lw=0.6, ls=":")
    axis.set(ylabel="greedy accuracy, four tasks, %", ylim=(40, 100))
    save(figure, folder, "figure5")
    return lines


def figure6(results: Results, base: dict, folder: Path) -> list[str]:
    """Wrong labels against no labels, on depth."""
    arms = {p: runs for p in (0, *NOISE) if (runs := arm(results, "depth", "accuracy", *([f"noise{p}"] if p else [])))}
    lines = [f"depth, accuracy, {100 * p:3.0f} % of labels wrong   {said(compared(runs, base, INDOOR, 'depth'))}" for p, runs in arms.items()]
    if len(arms) < 2:
        return []
    figure, axis = plt.subplots(figsize=(5.5, 3.2))
    for p, runs in arms.items():
        axis.plot([100 * p] * len(runs), per_question(runs, INDOOR, "depth", "greedy_accuracy").mean(1) * 100, "o", color=COLOURS["accuracy"], alpha=0.5)
    axis.plot([100 * p for p in arms], [compared(r, base, INDOOR, "depth")["value"] for r in arms.values()], "-", color=COLOURS["accuracy"],
              label="accuracy; points: seeds")
    if runs := arm(results, "depth", "consistency"):
        axis.axhline(compared(runs, base, INDOOR, "depth")["value"], color=COLOURS["consistency"], ls="--", label="consistency, no labels")
    axis.axhline(100 * unpacked(base["tests"][INDOOR]["depth"]["greedy_accuracy"]).mean(), color=COLOURS["base"], ls=":", label="base")
    axis.set(xlabel="labels flipped, %", ylabel="greedy accuracy, depth, %", ylim=(40, 102))
    axis.legend(fontsize=8)
    save(figure, folder, "figure6")
    return lines


def figure7(results: Results, base: dict, folder: Path) -> list[str]:
    """Numbers: does training collapse to a constant? It would be perfectly consistent. A table; nothing is drawn."""
    lines = []
    for task in NUMERIC_TASKS:
        truth = base["tests"][INDOOR][task]["truth"]
        constant = best_constant(truth)[0]
        lines.append(f"{task:<14}best constant answer {constant:g}: {100 * np.mean([accuracy(constant, t) for t in truth]):.1f}  (n = {len(truth)})")
        for name, runs in (("base", [base]), *((r, arm(results, task, r)) for r in ("consistency", "accuracy"))):
            for r in runs:
                t = r["tests"][INDOOR][task]
                read = [(y, true) for y, true in zip(t["greedy"], t["truth"]) if y is not None]
                answers = [y for y, _ in read]
                rank = spearmanr(*zip(*read)).statistic if len(set(answers)) > 1 else float("nan")
                commonest = max(set(answers), key=answers.count) if answers else float("nan")
                lines.append(f"{task:<14}{name:<13}{r['name'].split('-')[-1]:<6}greedy {100 * unpacked(t['greedy_accuracy']).mean():5.1f}  "
                             f"consistency {100 * unpacked(t['consistency']).mean():5.1f}  blind {100 * unpacked(t['blind_accuracy']).mean():5.1f}  "
                             f"commonest {commonest:g}: {100 * answers.count(commonest) / max(1, len(answers)):3.0f} %  rank correlation {rank:+.2f}")
    return lines if any(arm(results, task, "consistency") for task in NUMERIC_TASKS) else []


def figure8(results: Results, base: dict, folder: Path) -> list[str]:
    """How K answers meet K answers: own task, the mean of the three others, the curve over steps. (Seconds: benchmark.py.)"""
    lines, curves = [], {}
    for task in BY_IMPORTANCE:
        for pairing in PAIRINGS:
            runs = arm(results, task, "consistency", *([] if pairing == "minimal" else [pairing]))
            if not runs:
                continue
            others = np.mean([compared(runs, base, INDOOR, t)["change"] for t in BOOLEAN_TASKS if t != task])
            lines.append(f"{task:<12}{pairing:<16}{said(compared(runs, base, INDOOR, task))}  sampled "
                         f"{compared(runs, base, INDOOR, task, 'sampled_accuracy')['value']:5.1f}  other three tasks {others:+5.1f}  "
                         f"probe above 90 % from step {' '.join(str(first_above(r['curve'], 0.9)) for r in runs)}")
            if task == "depth":
                curves[pairing] = np.array([[p[1] for p in r["curve"]] for r in runs]), [p[0] for p in runs[0]["curve"]]
    if len(curves) < 2:
        return []
    figure, axes = plt.subplots(1, len(curves), figsize=(3.2 * len(curves), 3), sharey=True, constrained_layout=True)
    for axis, (pairing, (table, steps)) in zip(axes, curves.items()):
        for row in table:
            axis.plot(steps, 100 * row, color=COLOURS["consistency"], alpha=0.3, lw=1)
        axis.plot(steps, 100 * table.mean(0), "o-", ms=3, color=COLOURS["consistency"])
        axis.fill_between(steps, *(100 * (table.mean(0) + s * table.std(0)) for s in (-1, 1)), color=COLOURS["consistency"], alpha=0.15)
        axis.set(title=f"{pairing}, {len(table)} seeds", xlabel="step", ylim=(30, 102))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("probe accuracy, depth, %")
    save(figure, folder, "figure8")
    return lines


def pairs_per_step(results: Results, base: dict, folder: Path) -> list[str]:
    """Pairing with 1, 4 and 8 pairs in a step, on depth. A table."""
    lines = []
    for pairing, n in product(("minimal", "minimal_vertex", "one_to_all"), sorted((*PAIRS, 4))):
        variant = [f"{pairing}-pairs{n}"] if n != 4 else [] if pairing == "minimal" else [pairing]
        if runs := arm(results, "depth", "consistency", *variant):
            lines.append(f"depth, {pairing:<16}{n} pairs  {said(compared(runs, base, INDOOR, 'depth'))}  "
                         f"probe above 90 % from step {' '.join(str(first_above(r['curve'], 0.9)) for r in runs)}")
    return lines if any("-pairs" in name for name in results) else []


def label_free(results: Results, base: dict, folder: Path) -> list[str]:
    """Pairs by 2D boxes alone; the paper's transforms against the full set. A table."""
    lines = []
    for name, variant in (("gap, full", ()), ("2D boxes, full", ("select2d",)), ("gap, paper's transforms", ("paper-transforms",))):
        if runs := arm(results, "depth", "consistency", *variant):
            lines += [f"depth, {name:<26}{m:<18}{said(compared(runs, base, INDOOR, 'depth', m))}"
                      for m in ("greedy_accuracy", "sampled_accuracy", "consistency", "blind_accuracy", "blind_consistency")]
    return lines if len(lines) > 5 else []


def watershed(results: Results, base: dict, folder: Path) -> list[str]:
    """Bases that are wrong about the opposite word: what each reward makes of them, by what they believe on average."""
    lines = []
    for name in TAUGHT:
        for reward in ("consistency", "accuracy"):
            if name in results and (runs := arm(results, "depth", reward, name)):
                lines += [f"depth, {name:<14}{reward:<13}{what:<24}{said(compared(runs, results[name], INDOOR, 'depth', metric, word))}"
                          for what, metric, word in (("sampled", "sampled_accuracy", None), ("greedy", "greedy_accuracy", None),
                                                     ("greedy, first word", "greedy_accuracy", 0), ("greedy, opposite word", "greedy_accuracy", 1),
                                                     ("sampled, first word", "sampled_accuracy", 0), ("sampled, opposite word", "sampled_accuracy", 1),
                                                     ("consistency", "consistency", None))]
    return lines


def long(results: Results, base: dict, folder: Path) -> list[str]:
    """Ten times the steps: does it stay?"""
    found = {reward: runs[0] for reward in ("consistency", "accuracy") if (runs := arm(results, "depth", reward, "long"))}
    if not found:
        return []
    figure, axis = plt.subplots(figsize=(5.5, 3))
    for reward, r in found.items():
        steps, right, agree = zip(*r["curve"])
        axis.plot(steps, 100 * np.array(right), "o-", ms=3, color=COLOURS[reward], label=f"{reward}: accuracy")
        axis.plot(steps, 100 * np.array(agree), "--", lw=1, color=COLOURS[reward], label=f"{reward}: consistency")
    axis.set(xlabel="step", ylabel="probe, %", ylim=(30, 102))
    axis.legend(fontsize=8)
    save(figure, folder, "long")
    return [f"depth, {reward:<13}{said(compared([r], base, INDOOR, 'depth'))}; probe by step "
            + " ".join(f"{s}: {100 * a:.0f}" for s, a, _ in r["curve"]) for reward, r in found.items()]


def figure10(results: Results, base: dict, folder: Path, adapter: Path) -> list[str]:
    """One question before and after. The rule: the first test question on depth that the base gets wrong."""
    if not (adapter / "adapter_model.safetensors").is_file():
        return []
    first = base["tests"][INDOOR]["depth"]["greedy_accuracy"].index("0")
    pair = evaluation_pair(held_out_examples(INDOOR, "depth", "test", first + 1)[first], seed=Settings().seed)
    sides, lines = (pair.x, pair.x_prime), [f"{pair.example.id}: T = {', '.join(pair.transform.parts)}; the answers must "
                                            f"{'differ' if pair.negates else 'match'}"]
    said_by = {}
    for who, given in (("base", None), ("trained", str(adapter))):
        vlm, _ = load_base_and_adapter("tiny", given)
        done = rollout(vlm, [to_prompt(vlm, side, SYSTEM_PROMPT) for side in sides], torch.zeros(2, 1, 48), temperature=0.0)
        said_by[who] = [vlm.tokenizer.decode(done.tokens[b, 0, :done.lengths[b, 0]], skip_special_tokens=True) for b in (0, 1)]
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.4))
    for b, (axis, side) in enumerate(zip(axes, sides)):
        question = prompt_text(side.question, {i: o.name for i, o in side.view.objects.items()}).splitlines()[-2]
        truth = ground_truth(side.question, side.view.objects)
        text = [f"{'x' if b == 0 else 'T(x)'}: {question}   (truth: {truth})", *(f"{who}: {one_line(t[b])}" for who, t in said_by.items())]
        lines += ["    " + line for line in text]
        axis.imshow(side.picture)
        axis.set_title("\n".join(fill(line, 60) for line in text), fontsize=7, loc="left")
        axis.axis("off")
    save(figure, folder, "figure10")
    return lines


DRAWN = {"figure 2": figure2, "figures 3 and 4": transfer, "figure 5": figure5, "figure 6": figure6, "figure 7": figure7,
         "figure 8": figure8, "pairs per step": pairs_per_step, "label-free to the end": label_free, "a base that is wrong": watershed, "ten times the steps": long}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", default="results/experiments.jsonl", metavar="FILE.jsonl", help="what experiments.py wrote")
    parser.add_argument("--out", default="results", metavar="FOLDER", help="pictures and experiments.txt go here")
    parser.add_argument("--adapter", default="runs/experiments/depth-consistency-0", metavar="RUN", help="the trained model of figure 10")
    args = parser.parse_args(argv)
    results, folder = read_results(Path(args.results)), Path(args.out)
    if "base" not in results:
        raise DataError(f"--results {args.results}: no line of the base there; run python experiments.py figure2 first")
    folder.mkdir(parents=True, exist_ok=True)
    text = []
    for title, draw in DRAWN.items():
        text += [f"\n{title}: {draw.__doc__.splitlines()[0]}", *(draw(results, results["base"], folder) or ["    not run"])]
    title, file = f"\nfigure 10: {figure10.__doc__}", folder / "experiments.txt"
    before = file.read_text().partition(title + "\n")[2].splitlines() if file.is_file() else []      # without its adapter it stays as it was
    text += [title, *(figure10(results, results["base"], folder, Path(args.adapter)) or before or ["    not run"])]
    file.write_text(__doc__.split("\n\n")[1] + "\n" + "\n".join(text) + "\n")
    print("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
