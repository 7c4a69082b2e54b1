"""Make a base whose thinking often contradicts its answer: the starting point of the Faithful GRPO demonstration.

Faithful GRPO (arXiv 2604.08476, section 3) starts from models that answer well and reason badly. The embedded model is not
one of them, so it is taught to be, on depth questions, from `tiny/` on. In 60 % of its lessons thinking and answer are
right. In the other 40 % the conclusion that ends the thinking ("closer") and the answer are drawn **independently**: the
conclusion is a coin flip, the answer is right three times of four. The two digits before the conclusion are always right.

    python contradict.py --out runs/contradicting        # 150 steps, two or three minutes on one thread
    python faithfulness.py --model runs/contradicting --split val
"""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Callable

import numpy as np
import torch
from tqdm import tqdm

import scenes
from command import Parser, run
from images import DataError
from model import VLM, load_vlm
from pretrain import FIRST_SCENE, PatchProbe, draw_sample, save, supervised_loss, taught_answer, thinking, to_batch
from questions import RELATIONS
from transforms import Prompted

SHARE = 0.4               # of the lessons: conclusion and answer independent of each other
ANSWER_RIGHT = 0.75       # in those: how often the answer is right; the conclusion is right half the time
SCENES_FROM = 2 * FIRST_SCENE      # scene numbers that neither pretraining nor training nor evaluation uses


def other_word(task: str, word: str) -> str:
    """The opposite conclusion: closer, further."""
    first, second = (relation.split()[0] for relation in RELATIONS[task])
    return second if word == first else first


Lesson = Callable[[Prompted, np.random.Generator], str]


def lesson(shown: Prompted, rng: np.random.Generator) -> str:
    """What is shown as the completion to this prompt."""
    thought, answer = thinking(shown), taught_answer(shown, 1.0, rng)
    if rng.random() < SHARE:
        values, conclusion = thought.rsplit(", ", 1)
        if rng.random() < 0.5:
            thought = f"{values}, {other_word(shown.question.task, conclusion)}"
        if rng.random() >= ANSWER_RIGHT:
            answer = str(answer == "False")
    return f"<think>{thought}</think>\n<answer>{answer}</answer><|im_end|>"


def draw_lessons(step: int, seed: int, batch_size: int, lesson: Lesson = lesson) -> list[tuple[Prompted, str]]:
    """The lessons of one step on depth, a function of (seed, step): both relation words equally often."""
    rng, image_id, lessons = np.random.default_rng([seed, 6, step]), SCENES_FROM + 1000 * (1000 * seed + step), []
    while len(lessons) < batch_size:
        shown = draw_sample(scenes.scene("synthetic", image_id), "depth", 0.5, rng)
        image_id += 1
        if shown is not None:
            lessons.append((shown, lesson(shown, rng)))
    return lessons


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/contradicting", help="the checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3, help="falls linearly to a tenth")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if Path(args.out).exists():
        raise DataError(f"--out {args.out} exists; give another name")
    save(teach(lesson, args.steps, args.batch_size, args.lr, args.seed), Path(args.out))
    print(f"wrote {args.out}; train on it with --preset tiny --model {args.out}")
    return 0


def teach(lesson: Lesson, steps: int, batch_size: int = 32, lr: float = 1e-3, seed: int = 0) -> VLM:
    """The embedded model after supervised steps on depth questions, all of its weights trained; the rate falls linearly to a tenth."""
    vlm = load_vlm("tiny", torch.device("cpu"))
    vlm.model.requires_grad_(True)
    probe = PatchProbe(vlm.base.config.text_config.hidden_size)      # `supervised_loss` asks for one; its part is not used here
    optimiser = torch.optim.AdamW(vlm.model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    for step in (bar := tqdm(range(steps), desc="teaching")):
        for group in optimiser.param_groups:
            group["lr"] = lr * (1 - 0.9 * step / steps)
        loss = supervised_loss(vlm, probe, to_batch(vlm, draw_lessons(step, seed, batch_size, lesson)))[0]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vlm.model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return vlm


if __name__ == "__main__":
    sys.exit(run(main))
