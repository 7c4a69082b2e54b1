"""Does the thinking entail the answer, and does it describe the picture? Scores of one completion (Faithful GRPO, section 3).

    consistency   1 if the conclusion of the thinking is the answer, else 0, whether or not either is true. Text only.
    semantic      share of the sentences with a visual claim whose claim is true
    spatial       Hungarian matching with Complete IoU between the boxes written in the thinking and those of the objects

Every score is a number in [0, 1] or None: the judge abstains, and constraints.py leaves the completion out. Two kinds of judge
share one signature: rules that read the tiny model's language (`blue 8, red 4, further`; anything else: None), and a model.

Ours, where the paper's text is lost: the model's verdict is the word with more than half of the next-token probability (no
such word: it abstains); the spatial score divides by the larger number of boxes, so that missing and superfluous ones cost; a
thinking without boxes has no spatial score; a digit is true within 1. The semantic rules read the 3D boxes, that is, labels.

    python faithfulness.py                                                   # a worked example
    python faithfulness.py --model runs/contradicting --split val            # how often does thinking contradict the answer?
"""
from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from dataclasses import dataclass
from math import atan, pi
from pathlib import Path
from typing import Callable, Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from command import Parser, run
from data import BOOLEAN_TASKS, TASKS
from dataset import evaluation_pair, load_examples, to_prompt
from eval import estimate, shown as in_points
from grpo import rollout
from images import DataError
from model import VLM, load_base_and_adapter
from pretrain import thinking as true_thinking
from questions import COLOURS, RELATIONS, SYSTEM_PROMPT, Question, compared, ground_truth, prompt_text
from transforms import Prompted
from verifiers import TASK_KIND, Answer, parse

Box = tuple[float, float, float, float]                    # x0, y0, x1, y1


@dataclass(frozen=True)
class Said:
    """What a judge of the text sees of one completion. Not the picture."""
    question: Question
    prompt: str                       # the user turn in words
    thinking: str
    answer: Answer | None
    frame: tuple[int, int] = (1, 1)   # width and height of the picture as the model saw it: the pixels its boxes are in


Score = Callable[[Said, Prompted], float | None]


def said_of(shown: Prompted, text: str, frame: tuple[int, int] = (1, 1)) -> Said:
    """Take a completion apart. Without a closing tag there is no thinking: ''."""
    before, closed, _ = text.partition("</think>")
    names = {i: o.name for i, o in shown.view.objects.items()}
    return Said(shown.question, prompt_text(shown.question, names), before.replace("<think>", "").strip() if closed else "",
                parse(text, TASK_KIND[shown.question.task]).answer, frame)


# ------------------------------------------------------------------------------------ rules for the tiny model's language
def entailed(question: Question, thinking: str) -> Answer | None:
    """The answer that this thinking concludes, or None where it concludes nothing that the rules can read.

        boolean    blue 8, red 4, further      the word is about the object named first; its opposite about the other
        counting   2, 5, 8                     as many as there are places
    """
    if question.task == "counting":
        return float(thinking.count(",") + 1) if re.fullmatch(r"\d(, \d)*", thinking) else None
    found = re.fullmatch(r"(\w+) \d, (\w+) \d, (\w+)", thinking)
    if question.task not in BOOLEAN_TASKS or not found:
        return None
    words = [relation.split()[0] for relation in RELATIONS[question.task]]
    asked, other = (COLOURS[i - 1] for i in compared(question))
    if found[3] not in words or {found[1], found[2]} != {asked, other}:
        return None
    return (found[3] == words[question.relation]) == (found[1] == asked)


def consistency_rule(said: Said) -> float | None:
    """C: 1 iff the thinking entails the answer given."""
    conclusion = entailed(said.question, said.thinking)
    return None if conclusion is None or said.answer is None else float(conclusion == said.answer)


def semantic_rule(said: Said, shown: Prompted) -> float | None:
    """S: share of true claims among `colour digit` (within 1) and the conclusion; boolean tasks only."""
    if said.question.task not in BOOLEAN_TASKS:
        return None
    digits = dict(re.findall(r"(\w+) (\d)", true_thinking(shown)))
    claims = [abs(int(value) - int(digits[colour])) <= 1 for colour, value in re.findall(r"(\w+) (\d)\b", said.thinking)
              if colour in digits]
    conclusion = entailed(said.question, said.thinking)
    if conclusion is not None:
        claims.append(conclusion == ground_truth(said.question, shown.view.objects))
    return sum(claims) / len(claims) if claims else None


# ------------------------------------------------------------------------------------------------- boxes in the thinking
NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
WRITTEN_BOX = re.compile(rf"[\[(]{NUMBER},{NUMBER},{NUMBER},{NUMBER}[\])]")


def written_boxes(thinking: str) -> list[Box]:
    """Every [x0, y0, x1, y1] or (x0, y0, x1, y1), in pixels of the picture as the model saw it (Qwen2.5-VL's convention)."""
    return [tuple(map(float, numbers)) for numbers in WRITTEN_BOX.findall(thinking)]


def complete_iou(a: Box, b: Box) -> float:
    """CIoU = IoU - d^2 / c^2 - alpha v (Zheng et al. 2020): d between the centres, c the diagonal of the enclosing box,

    v = 4 / pi^2 (arctan(w_b / h_b) - arctan(w_a / h_a))^2, alpha = v / (1 - IoU + v). Both boxes must have an area.
    """
    (ax0, ay0, ax1, ay1), (bx0, by0, bx1, by1) = a, b
    overlap = max(0.0, min(ax1, bx1) - max(ax0, bx0)) * max(0.0, min(ay1, by1) - max(ay0, by0))
    iou = overlap / ((ax1 - ax0) * (ay1 - ay0) + (bx1 - bx0) * (by1 - by0) - overlap)
    d2 = ((ax0 + ax1 - bx0 - bx1) ** 2 + (ay0 + ay1 - by0 - by1) ** 2) / 4
    c2 = (max(ax1, bx1) - min(ax0, bx0)) ** 2 + (max(ay1, by1) - min(ay0, by0)) ** 2
    v = 4 / pi**2 * (atan((bx1 - bx0) / (by1 - by0)) - atan((ax1 - ax0) / (ay1 - ay0))) ** 2
    alpha = v / (1 - iou + v) if v else 0.0                    # 0 / 0 where the boxes are one
    return iou - d2 / c2 - alpha * v


def box_score(written: Sequence[Box], references: Sequence[Box]) -> float | None:
    """G: sum of CIoU over the best one-to-one matching, divided by the larger number of boxes; None where a side has none.

    A CIoU below 0 counts 0, like a missing box, so that a box in the wrong place is no worse than none.
    """
    if not len(written) or not len(references):
        return None
    gain = np.array([[max(0.0, complete_iou(w, r)) if w[0] < w[2] and w[1] < w[3] else 0.0 for r in references]
                     for w in written])                                                         # (written, references)
    rows, columns = linear_sum_assignment(gain, maximize=True)
    return float(gain[rows, columns].sum()) / max(gain.shape)


def spatial_rule(said: Said, shown: Prompted) -> float | None:
    """G of one completion: its boxes against the 2D boxes of the objects asked about. No label in it."""
    scale = np.array(said.frame * 2) / np.array(shown.picture.size * 2)                          # (4,)
    references = [tuple(scale * shown.view.objects[i].box2d) for i in said.question.object_ids]
    return box_score(written_boxes(said.thinking), references)


RULES: dict[str, Score] = {"consistency": lambda said, _: consistency_rule(said), "semantic": semantic_rule,
                           "spatial": spatial_rule}


# --------------------------------------------------------------------------------------------------------- measurement
def measure(vlm: VLM, pairs: list, system: str, max_new_tokens: int, samples: int, seed: int) -> list[dict]:
    """One row per completion to x of each pair: correct?, and its scores by the rules. 0 samples: the greedy one."""
    rows = []
    for start in range(0, len(pairs), 32):
        batch = [pair.x for pair in pairs[start:start + 32]]
        prompts = [to_prompt(vlm, x, system) for x in batch]
        uniforms = torch.from_numpy(np.random.default_rng([seed, 7, start]).random((len(batch), max(1, samples), max_new_tokens)))
        done = rollout(vlm, prompts, uniforms, temperature=1.0 if samples else 0.0)
        for x, prompt, tokens, lengths in zip(batch, prompts, done.tokens, done.lengths.tolist()):
            truth = ground_truth(x.question, x.view.objects)
            for row, n in zip(tokens, lengths):
                said = said_of(x, vlm.tokenizer.decode(row[:n]), frame_of(prompt))
                rows.append({"correct": float(said.answer == truth), **{name: score(said, x) for name, score in RULES.items()}})
    return rows


def frame_of(prompt) -> tuple[int, int]:
    """(width, height) in pixels of the picture as the model saw it, after resizing."""
    _, height, width = (14 * prompt.grid_thw).tolist()
    return width, height


def summarise(rows: list[dict]) -> dict[str, dict]:
    """{metric: estimate}. The inconsistency rate is over the completions that the judge judged; `_if_correct` the masked one."""
    found = {"accuracy": [r["correct"] for r in rows],
             "inconsistency": [1 - r["consistency"] for r in rows if r["consistency"] is not None],
             "inconsistency_if_correct": [1 - r["consistency"] for r in rows if r["correct"] and r["consistency"] is not None],
             "semantic": [r["semantic"] for r in rows if r["semantic"] is not None]}
    return {name: estimate(values) for name, values in found.items() if values}


def demonstrate() -> int:
    """Scores of four thinkings about one scene."""
    x = evaluation_pair(load_examples("synthetic", "depth", "val", limit=1)[0], 0).x
    true, box = true_thinking(x), [round(v) for v in x.view.objects[x.question.object_ids[0]].box2d]
    values, word = true.rsplit(", ", 1)
    wrong = {"closer": "further", "further": "closer"}[word]
    truth = ground_truth(x.question, x.view.objects)
    print(prompt_text(x.question, {i: o.name for i, o in x.view.objects.items()}).splitlines()[-2])
    for thought, answer in ((true, truth), (f"{values}, {wrong}", truth), (true, not truth), (f"It is at {box}.", truth)):
        said = said_of(x, f"<think>{thought}</think><answer>{answer}</answer>", x.picture.size)
        scores = {name: score(said, x) for name, score in RULES.items()}
        print(f"  {thought:<32} {answer!s:<6}", *(f" {n} {'-' if s is None else format(s, '.2f')}" for n, s in scores.items()))
    return 0


def main(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--model", help="checkpoint folder or hub id; default: the adapter's own base")
    p.add_argument("--adapter", metavar="RUN", help="a folder that train.py made")
    p.add_argument("--data", default="synthetic")
    p.add_argument("--task", default="depth", choices=TASKS)
    p.add_argument("--split", default="test", choices=("test", "val"))
    p.add_argument("--n", type=int, default=500, help="questions")
    p.add_argument("--samples", type=int, default=4, help="completions per question at temperature 1, beside the greedy one")
    p.add_argument("--max-new-tokens", type=int, help="default: as the adapter was trained, else 48")
    p.add_argument("--seed", type=int, default=0, help="of questions and sampling")
    p.add_argument("--out", metavar="FILE.json")
    args = p.parse_args(argv)
    if args.model is None and args.adapter is None:
        return demonstrate()
    if min(args.n, args.samples, args.max_new_tokens or 1) < 1:
        raise DataError("--n, --samples and --max-new-tokens must be at least 1")
    return report(args)


def report(args: Namespace) -> int:
    """Measure and print; the rules judge."""
    vlm, trained = load_base_and_adapter(args.model, args.adapter)
    pairs = [evaluation_pair(e, args.seed) for e in load_examples(args.data, args.task, args.split, limit=args.n)]
    system, limit = trained.get("system_prompt_text", SYSTEM_PROMPT), args.max_new_tokens or trained.get("max_new_tokens", 48)
    found = {}
    for how, samples in (("greedy", 0), ("sampled", args.samples)):
        rows = measure(vlm, pairs, system, limit, samples, args.seed)
        found[how] = summarise(rows)
        for name, e in found[how].items():
            print(f"{how:<9}{name:<26}{in_points(e):<22}n = {e['n']}")
    if args.out:
        Path(args.out).write_text(json.dumps({"arguments": vars(args), **found}))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
