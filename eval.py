"""Is it right, is it consistent, and does it look? Evaluation of a base model or an adapter on held-out pairs.

For every example one pair (x, x') is drawn by (seed, example id) alone, so every model answers the same questions:

    greedy_accuracy    the likeliest answer to x against the truth
    sampled_accuracy   mean over the sampled answers to x (temperature 1)
    consistency        verif_T of the k-th sampled answers to x and x', mean over k; unparseable answers count 0
    unparsed           share of the sampled answers that the parser refuses
    blind_*            the same, greedy, with the whole picture replaced by mid-grey, markers included
    marks_only_*       the same with the markers left on the grey: what 2D place and box size alone give

A consistency that survives blanking is a shortcut. Intervals are 95 %, over questions. Where an example has no 3D boxes
there is no truth, and only consistencies are given. `direct_*` asks the same without thinking: the base's other prompt.

    python eval.py --adapter runs/depth-consistency-seed0 --tasks depth size --n 500
    torchrun --nproc_per_node 8 -- eval.py --model Qwen/Qwen2.5-VL-3B-Instruct --data data/omni3d --out base.json    # 8 GPUs

Behind `--`, because torchrun takes a flag of ours that begins one of its own (`--n`, `--nnodes`) for its own.
"""
from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

import scenes
from check import best_constant
from checkpoint import write_json
from command import Parser, read_text, run
from data import TASKS, Example
from dataset import TRAINED_ON, Pair, evaluation_pair, load_examples, to_prompt
from grpo import rollout
from images import DataError
from model import default_new_tokens, is_embedded, load_base_and_adapter, MIN_PIXELS, run_settings, VLM
from omni3d import SOURCES, read_folder
from questions import RELATIONS, SYSTEM_PROMPT, Question, ground_truth
from ranks import gather, setup
from transforms import Prompted, draw_markers
from verifiers import TASK_KIND, accuracy, parse, verify

GREY = (128, 128, 128)
DIRECT_PROMPT = "Give only the answer inside <answer></answer>."      # the base model's other prompt: no thinking
SAMPLES = 4
EVALUATED = 32                   # pairs whose sampling numbers come from one generator


@dataclass(frozen=True)
class Settings:
    """How to ask. The same in training and evaluation, except for the number of samples."""
    system: str = SYSTEM_PROMPT
    max_new_tokens: int = 48
    seed: int = 0
    samples: int = SAMPLES
    diagnostics: tuple[str, ...] = ("blind",)        # of: blind, marks_only, direct
    rows: int = 256                                  # completions sampled at a time; memory only


# -------------------------------------------------------------------------------------------------------- asking
def answers(vlm: VLM, shown: list[Prompted], system: str, settings: Settings, samples: int, stream: int) -> list[list]:
    """`samples` sampled answers (or, for 0, the greedy one) to each prompt: Parsed objects, prompt by prompt."""
    prompts = [to_prompt(vlm, s, system) for s in shown]
    rng = np.random.default_rng([settings.seed, 5, stream])
    uniforms = torch.from_numpy(rng.random((len(prompts), max(1, samples), settings.max_new_tokens)))   # (B, K, T)
    parsed, at_once = [], max(1, settings.rows // uniforms.shape[1])
    for start in range(0, len(prompts), at_once):
        part = slice(start, start + at_once)
        done = rollout(vlm, prompts[part], uniforms[part], temperature=1.0 if samples else 0.0)
        parsed += [[parse(vlm.tokenizer.decode(tokens[:n]), TASK_KIND[s.question.task]) for tokens, n in zip(*group)]
                   for s, group in zip(shown[part], zip(done.tokens, done.lengths.tolist()))]
    return parsed


def blank(shown: Prompted, marks: bool) -> Prompted:
    """The prompt with a grey picture of the same size; with `marks` the markers are drawn on the grey."""
    grey = replace(shown.view, image=Image.new("RGB", shown.view.image.size, GREY))
    return replace(shown, picture=draw_markers(grey, shown.question) if marks else grey.image)


def agree(y, y_prime, negates: bool) -> float:
    """verif_T of two parsed answers, 0 where one cannot be read."""
    return 0.0 if y.answer is None or y_prime.answer is None else verify(y.answer, y_prime.answer, negates)


def ask(vlm: VLM, pairs: list[Pair], settings: Settings, stream: int) -> list[dict]:
    """Put both sides of each pair to the model: one row per question, with per-question means."""
    x, x_prime = [p.x for p in pairs], [p.x_prime for p in pairs]
    both = x + x_prime
    n, K = len(pairs), settings.samples
    sampled = answers(vlm, both, settings.system, settings, K, 2 * stream)
    greedy = answers(vlm, both, settings.system, settings, 0, 0)
    variants = {"": (greedy[:n], greedy[n:])}
    for name in settings.diagnostics:
        if name == "direct":
            found = answers(vlm, both, DIRECT_PROMPT, settings, 0, 0)
        else:
            found = answers(vlm, [blank(s, marks=name == "marks_only") for s in both], settings.system, settings, 0, 0)
        variants[name + "_"] = (found[:n], found[n:])
    rows = []
    for i, pair in enumerate(pairs):
        truth, truth_prime = truths_of(pair)
        parts = pair.transform.parts
        row = {"id": pair.example.id, "task": pair.example.task, **wording(pair.x.question, False), "parts": list(parts),
               "negates": pair.negates, "x_prime": wording(pair.x_prime.question, "flip" in parts)}
        if truth is not None:
            row["truth"] = truth
            row["sampled_accuracy"] = np.mean([accuracy(y.answer, truth) for y in sampled[i]])
            row["x_prime"]["greedy_accuracy"] = accuracy(greedy[n + i][0].answer, truth_prime)
        row["consistency"] = np.mean([agree(y, z, pair.negates) for y, z in zip(sampled[i], sampled[n + i])])
        row["unparsed"] = np.mean([y.answer is None for y in sampled[i] + sampled[n + i]])
        for name, (side, side_prime) in variants.items():
            if truth is not None:
                row[f"{name or 'greedy_'}accuracy"] = accuracy(side[i][0].answer, truth)
            row[f"{name or 'greedy_'}consistency"] = agree(side[i][0], side_prime[i][0], pair.negates)
        row["answers"] = [y.answer for y in sampled[i]]
        row["greedy"], row["greedy_prime"] = greedy[i][0].answer, greedy[n + i][0].answer
        rows.append(row)
    return rows


def wording(question: Question, flipped: bool) -> dict:
    """What `breakdown` sorts questions by."""
    return {"relation": question.relation, "swapped": question.swapped, "template": question.template,
            "named": question.named, "flipped": flipped}


def truths_of(pair: Pair) -> tuple:
    """The true answers to x and x', or (None, None) where a detector's 2D boxes are all that is known."""
    if any(o.box3d is None for o in pair.example.objects):
        return None, None
    truth = ground_truth(pair.x.question, pair.x.view.objects)
    return truth, (truth != pair.negates if isinstance(truth, bool) else truth)


def evaluate(vlm: VLM, examples: list[Example], settings: Settings, rank: int = 0, world_size: int = 1,
             batch: int = EVALUATED, label: str = "evaluating") -> list[dict]:
    """One row per example, in the order of `examples`, on every rank; the ranks share the work."""
    chunks = [examples[i:i + batch] for i in range(0, len(examples), batch)]
    mine = {}
    for i in tqdm(range(rank, len(chunks), world_size), desc=label, disable=rank != 0 or not chunks, leave=False):
        mine[i] = ask(vlm, [evaluation_pair(e, settings.seed) for e in chunks[i]], settings, i)
    merged = {i: rows for part in gather(mine, world_size) for i, rows in part.items()}
    return [row for i in range(len(chunks)) for row in merged[i]]


# ------------------------------------------------------------------------------------------------------- summarising
def estimate(values: list[float]) -> dict[str, float]:
    """Mean with a 95 % interval over questions: Wilson's for 0/1 values, normal otherwise."""
    v, n, z = np.asarray(values, dtype=float), len(values), 1.96
    mean = v.mean()
    if np.isin(v, (0, 1)).all():
        centre, half = (mean + z * z / (2 * n)) / (1 + z * z / n), z * np.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    else:
        centre, half = mean, z * v.std(ddof=1) / np.sqrt(n) if n > 1 else np.inf
    return {"value": float(mean), "n": n, "low": float(max(0, centre - half)), "high": float(min(1, centre + half))}


METRICS = ("greedy_accuracy", "sampled_accuracy", "consistency", "unparsed", "blind_accuracy", "blind_consistency",
           "marks_only_accuracy", "marks_only_consistency", "direct_accuracy", "direct_consistency")


def summarise(rows: list[dict]) -> dict[str, dict]:
    """{task: {metric: {value, n, low, high}}}; numeric tasks also say what a constant answer would score."""
    by_task = defaultdict(list)
    for row in rows:
        by_task[row["task"]].append(row)
    summary = {}
    for task, group in by_task.items():
        summary[task] = {m: estimate(values) for m in METRICS if (values := [r[m] for r in group if m in r])}
        if TASK_KIND[task] != "boolean":
            if truths := [r["truth"] for r in group if "truth" in r]:
                constant = best_constant(truths)[0]
                summary[task]["best_constant"] = {**estimate([accuracy(constant, t) for t in truths]), "answer": constant}
            greedy = [r["greedy"] for r in group]
            commonest = max(set(greedy), key=greedy.count)
            summary[task]["commonest_answer"] = {**estimate([float(y == commonest) for y in greedy]), "answer": commonest}
    return summary


def breakdown(rows: list[dict], metric: str = "greedy_accuracy") -> list[tuple[str, str, dict]]:
    """(task, part of the questions, estimate) by relation word, order, template, listing and flip.

    Greedy accuracy is over x and x' together: only x' is ever flipped or unnamed.
    """
    found = []
    for task in dict.fromkeys(r["task"] for r in rows):
        sides = [side for r in rows if r["task"] == task for side in (r, r["x_prime"]) if metric in side]
        words = [word.split()[0] for word in RELATIONS.get(task, ())]
        parts = [(f"word: {word}", "relation", value) for value, word in enumerate(words)]
        parts += [("order: 1 then 2", "swapped", False), ("order: 2 then 1", "swapped", True)]
        parts += [(f"template {t}", "template", t) for t in range(5)]
        parts += [("listing: named", "named", True), ("listing: unnamed", "named", False)]
        parts += [("flip: no", "flipped", False), ("flip: yes", "flipped", True)]
        found += [(task, name, estimate(values)) for name, key, value in parts
                  if (values := [side[metric] for side in sides if side[key] == value])]
    return found


def shown(e: dict) -> str:
    """An estimate as text: 71.3 [69.2, 73.4]."""
    return f"{100 * e['value']:5.1f} [{100 * e['low']:.1f}, {100 * e['high']:.1f}]"


def print_summary(summary: dict[str, dict], title: str = "") -> None:
    """One aligned line per task and metric."""
    for task, metrics in summary.items():
        for name, e in metrics.items():
            extra = f"  (answer {e['answer']})" if "answer" in e else ""
            print(f"{title}{task:<13}{name:<24}{shown(e):<22}n = {e['n']}{extra}")


# ------------------------------------------------------------------------------------------------------- command line
def parse_arguments(argv: list[str] | None = None) -> Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint folder or hub id; default: the adapter's own base, else 'tiny'")
    parser.add_argument("--adapter", metavar="RUN", help="a folder that train.py made")
    parser.add_argument("--data", help="synthetic, synthetic-outdoor, or a folder in Omni3D's format; default: what the "
                        "adapter was trained on, else synthetic")
    parser.add_argument("--split", default="test", choices=("test", "train", "all", "val"),
                        help="val: synthetic scenes kept for choosing settings")
    parser.add_argument("--tasks", nargs="+", default=["orientation", "depth", "size", "distance"], choices=TASKS)
    parser.add_argument("--n", type=int, default=500, help="questions per task at most")
    parser.add_argument("--seed", type=int, default=0, help="of questions, transforms and sampling")
    parser.add_argument("--max-pixels", type=int,
                        help="picture size limit; default: as the adapter was trained, else the checkpoint's own, at most 512 tokens")
    parser.add_argument("--max-new-tokens", type=int, help="default: as the adapter was trained, else 48 for the embedded model and 512 for others")
    parser.add_argument("--system-prompt", metavar="FILE", help="default: as the adapter was trained, else the built-in one")
    parser.add_argument("--diagnostics", nargs="*", default=["blind", "marks_only", "direct"],
                        choices=("blind", "marks_only", "direct"))
    parser.add_argument("--breakdown", action="store_true", help="also by relation word, order, template, listing and flip")
    parser.add_argument("--out", metavar="FILE.json", help="write summary and one row per question here")
    args = parser.parse_args(argv)
    for name, least in (("n", 1), ("max_new_tokens", 1), ("max_pixels", MIN_PIXELS)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise DataError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    if args.out and not Path(args.out).resolve().parent.is_dir():
        raise DataError(f"--out {args.out}: there is no folder {Path(args.out).parent}; make it first")
    return args


def held_out_examples(data: str, task: str, split: str, n: int, sources: tuple[str, ...] = TRAINED_ON) -> list[Example]:
    """Gap-filtered pairs, whatever training selects; pairs by 2D boxes only where the pictures have no 3D boxes."""
    try:
        return load_examples(data, task, split, "gap", n, sources)
    except DataError:
        try:
            flat = load_examples(data, task, split, "2d", None, sources)
        except DataError:
            flat = []
        flat = [e for e in flat if any(o.box3d is None for o in e.objects)]
        if not flat:
            raise
        return flat[:n]


def find_questions(args: Namespace) -> dict[tuple[str, str], list[Example]]:
    """(source, task) -> examples; what a folder lacks is named and left out."""
    sources = [args.data] if args.data in scenes.DOMAINS else sorted({s for _, s, _, _ in read_folder(args.data, SOURCES)})
    found, missing = {}, []
    for source in sources:
        for task in args.tasks:
            try:
                found[source, task] = held_out_examples(args.data, task, args.split, args.n, (source,))
            except DataError as error:
                missing.append(f"{source} {task}: {error}")
    if not found:
        raise DataError(missing[0])
    print("".join(f"left out: {line}\n" for line in missing), end="")
    return found


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    rank, world_size, _ = setup()
    args.data = args.data or (run_settings(args.adapter).get("data") if args.adapter else None) or "synthetic"
    questions = find_questions(args)
    vlm, trained = load_base_and_adapter(args.model, args.adapter, args.max_pixels)
    system = read_text(args.system_prompt, "--system-prompt") if args.system_prompt else None
    settings = Settings(system or trained.get("system_prompt_text", SYSTEM_PROMPT),
                        args.max_new_tokens or trained.get("max_new_tokens") or default_new_tokens(vlm),
                        args.seed, diagnostics=tuple(args.diagnostics), rows=256 if is_embedded(vlm) else 64)
    print(f"{vlm.name}{' + ' + args.adapter if args.adapter else ''} on {args.data} ({args.split}), seed {args.seed}, "
          f"{SAMPLES} samples per question at temperature 1, at most {settings.max_new_tokens} tokens, pictures at most "
          f"{vlm.max_pixels:,} pixels")
    out = {}
    for (source, task), examples in questions.items():
        rows = evaluate(vlm, examples, settings, rank, world_size, label=f"{source} {task}")
        summary = summarise(rows)
        print_summary(summary, title=f"{source:<12}" if args.data not in scenes.DOMAINS else "")
        if args.breakdown:
            for _, part, e in breakdown(rows):
                print(f"    {task:<12}{part:<24}{shown(e):<22}n = {e['n']}")
        entry = out.setdefault(source, {"summary": {}, "rows": []})
        entry["summary"].update(summary)
        entry["rows"] += rows
    if args.out and rank == 0:
        write_json(Path(args.out), {"arguments": vars(args), "sources": out})
        print(f"wrote {args.out}")
    if world_size > 1:
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
