"""Ask one question about one picture of your own, and see what the base model and your adapter think and answer.

    python ask.py photo.jpg --box 40,60,200,220 --box 260,30,330,210 --task depth --adapter runs/depth-consistency-seed0
    python ask.py photo.jpg --task counting --name chair --model Qwen/Qwen2.5-VL-3B-Instruct

Boxes are x0,y0,x1,y1 in pixels of the picture, object 1 first. `--swap`, `--relation 1` and `--template N` give the other
wordings of the same question: a consistent model answers them all alike, or all the other way round.
"""
from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import nullcontext

import torch

from command import Parser, run
from data import TASKS, Object
from dataset import to_prompt
from grpo import rollout
from images import DataError, open_image
from model import default_new_tokens, load_base_and_adapter
from questions import SYSTEM_PROMPT, Question, prompt_text
from transforms import Prompted, View, prompted
from verifiers import TASK_KIND, parse

BOXES = {"distance": 3, "counting": 0}          # every other task asks about two objects


def parse_box(text: str) -> tuple[float, float, float, float]:
    """'40,60,200,220' -> (x0, y0, x1, y1)."""
    try:
        x0, y0, x1, y1 = map(float, text.split(","))
    except ValueError:
        raise DataError(f"--box {text}: give four numbers x0,y0,x1,y1 in pixels, without blanks") from None
    if not (0 <= x0 < x1 and 0 <= y0 < y1):
        raise DataError(f"--box {text}: needs 0 <= x0 < x1 and 0 <= y0 < y1 (pixels from the top left corner)")
    return x0, y0, x1, y1


def main(argv: list[str] | None = None) -> int:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("image", help="a picture of any common format")
    p.add_argument("--task", required=True, choices=TASKS)
    p.add_argument("--box", action="append", default=[], metavar="x0,y0,x1,y1", help="objects 1, 2 (distance: and 3), in order")
    p.add_argument("--name", action="append", default=[], help="class names in the same order; left out: the listing is unnamed")
    p.add_argument("--relation", type=int, default=0, choices=(0, 1), help="1: the opposite word")
    p.add_argument("--swap", action="store_true", help="name the compared objects in the other order")
    p.add_argument("--template", type=int, default=0, choices=range(5))
    p.add_argument("--adapter", metavar="RUN", help="a folder that train.py made; without it only the base model answers")
    p.add_argument("--model", help="default: the adapter's own base, else 'tiny'")
    p.add_argument("--max-new-tokens", type=int, help="default: as the adapter was trained, else 48 for the embedded model and 512 for others")
    args = p.parse_args(argv)

    wanted = BOXES.get(args.task, 2)
    if len(args.box) != wanted:
        raise DataError(f"--task {args.task} needs {wanted} --box, got {len(args.box)}")
    names = args.name or [""] * wanted
    if len(names) != (wanted or 1) or (args.task == "counting" and not args.name):
        raise DataError(f"--task {args.task} needs {wanted or 1} --name (or none at all where boxes are given), got {len(args.name)}")
    image = open_image(args.image)
    boxes = [parse_box(b) for b in args.box] or [(0.0, 0.0, 1.0, 1.0)]
    for text, (_, _, x1, y1) in zip(args.box, boxes):
        if x1 > image.width or y1 > image.height:
            raise DataError(f"--box {text}: leaves the picture, which is {image.width}x{image.height} pixels")
    objects = {i: Object(i, name, box, None) for i, (name, box) in enumerate(zip(names, boxes))}
    question = Question(args.task, tuple(objects), args.relation, args.swap, args.template, named=bool(args.name))
    ask(args, prompted(View(image, None, objects), question))
    return 0


def ask(args: Namespace, shown: Prompted) -> None:
    """Print the prompt, then what base and adapter say, greedily."""
    vlm, trained = load_base_and_adapter(args.model, args.adapter)
    limit = args.max_new_tokens or trained.get("max_new_tokens") or default_new_tokens(vlm)
    prompt = to_prompt(vlm, shown, trained.get("system_prompt_text", SYSTEM_PROMPT))
    print(prompt_text(shown.question, {i: o.name for i, o in shown.view.objects.items()}))
    for name in ("base", "adapter") if args.adapter else ("base",):
        with vlm.model.disable_adapter() if args.adapter and name == "base" else nullcontext():
            done = rollout(vlm, [prompt], torch.zeros(1, 1, limit), temperature=0.0)                # (1, 1, T)
        text = vlm.tokenizer.decode(done.tokens[0, 0, :done.lengths[0, 0]])
        verdict = parse(text, TASK_KIND[shown.question.task])
        print(f"\n{name}: {text.strip()}\n  -> {verdict.answer} ({verdict.reason})")


if __name__ == "__main__":
    sys.exit(run(main))
