"""Which pair comes when: from `--data` to examples, and from (seed, step, place in the batch) to a pair of prompts.

Everything random about a pair is a function of (seed, step, index of the pair in the whole batch), never of the rank: the
same pairs and the same sampling numbers come out however many processes share a step, and a resumed run goes on exactly.

    examples = load_examples("synthetic", "depth", "train")                     # or a folder in Omni3D's format
    pair = draw_pair(examples, seed=0, step=3, index=1, pairs_per_step=4)
    pair.x.question, pair.x_prime.question, pair.negates
"""
from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path

import numpy as np
import torch

import scenes
from data import BOOLEAN_TASKS, TASKS, Example, Record, examples as example_of, hashed, load_omni3d, split as split_records
from images import DataError, bad_pictures
from model import VLM, Prompt, make_prompt
from questions import draw_question, prompt_text
from ranks import gather, local_ranks, world_size
from transforms import Prompted, Transform, draw_transform, make_pair, negates

SCENES_PER_EPOCH = 1000          # synthetic examples per task that training goes through before it meets one again
VALIDATION_SCENE = 5_000_000     # first scene id of the validation block; pretraining has its own block further up
TRAINED_ON = ("SUNRGBD", "own")  # KITTI is for testing across domains only


@dataclass(frozen=True, eq=False)
class Pair:
    """x and x' = T(x), and how T acts on the answer. Holds no answer: `questions.ground_truth` would compute one."""
    example: Example
    transform: Transform
    x: Prompted
    x_prime: Prompted
    negates: bool


def tasks_of(task: str) -> tuple[str, ...]:
    """`joint` is the four boolean tasks shuffled together; any other task is itself."""
    return BOOLEAN_TASKS if task == "joint" else (task,)


# ----------------------------------------------------------------------------------------------------------- examples
def load_examples(data: str, task: str, split: str, select: str = "gap", limit: int | None = None,
                  sources: tuple[str, ...] = TRAINED_ON) -> list[Example]:
    """The examples of one task ('joint': of four) in one split, in an order that depends on nothing but the data.

    `data` is a synthetic domain or a folder in Omni3D's format; split is train, test, all, or (synthetic only) val.
    Raises DataError where there is none, with the mend.
    """
    if data in scenes.DOMAINS:
        per_task = limit or SCENES_PER_EPOCH
        chosen = [e for t in tasks_of(task) for e in _scene_examples(data, t, split, select, per_task)]
    else:
        chosen = folder_examples(data, split, select, tasks_of(task), sources, limit)
    if not chosen:
        raise DataError(f"--data {data}: no example of task {task} in the {split} split (--select {select}); run "
                        f"`python data.py --check {data}` to see what the folder holds, or use --data synthetic")
    return chosen


def _scene_examples(domain: str, task: str, split: str, select: str, n: int) -> list[Example]:
    """The first n examples among the scenes of a split. Training and test scenes are told apart as photos are."""
    chosen = []
    for image_id in count(VALIDATION_SCENE if split == "val" else 0):
        in_test = hashed("split", image_id) < 0.2
        if split in ("train", "test") and in_test != (split == "test"):
            continue
        example = example_of(scenes.scene(domain, image_id), task, select)
        if example is not None:
            chosen.append(example)
        if len(chosen) == n:
            return chosen


def folder_examples(folder: str, split: str, select: str, tasks: tuple[str, ...], sources: tuple[str, ...],
                    limit: int | None = None) -> list[Example]:
    """Examples of a folder's pictures, in an order by hash. Unusable pictures are named on stdout and left out.

    Every picture that may be drawn is decoded once before training, and none is replaced later: with a `limit` the first
    so many examples whose pictures are good, and no picture beyond them is opened.
    """
    if split == "val":
        raise DataError("--split val exists for synthetic scenes only; use train, test or all")
    files = sorted(f for part in ("annotations", "Omni3D") for f in Path(folder).glob(f"{part}/*.json"))
    stamp = tuple((str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in files)
    records = split_records(_records(folder, sources, stamp), split)
    chosen = [e for r in records for t in tasks if (e := example_of(r, t, select)) is not None]
    chosen.sort(key=lambda e: hashed("shuffle", e.id))
    good, block = [], limit or len(chosen)
    for start in range(0, len(chosen), block) if chosen else ():
        part = chosen[start:start + block]
        problems = picture_problems(list({id(e.record): e.record for e in part}.values()))
        for problem in filter(None, problems.values()):
            print(f"left out: {problem}")
        good += [e for e in part if problems[e.record.image_id] is None]
        if limit and len(good) >= limit:
            break
    return good[:limit]


@lru_cache(maxsize=2)
def _records(folder: str, sources: tuple[str, ...], stamp: tuple) -> list[Record]:
    """A folder is read once for all splits and tasks; `stamp` (its files' times and sizes) tells whether it has changed."""
    return load_omni3d(folder, sources)


def picture_problems(records: list[Record]) -> dict[int, str | None]:
    """Image id -> why its picture cannot be used, or None. The ranks of a node share the decoding, and all ranks get all
    findings: a read error that one of them met alone leaves the picture out everywhere, so their lists cannot differ."""
    local, size = local_ranks()
    mine = records[local::size]
    found = gather(dict(zip((r.image_id for r in mine), bad_pictures([r.load for r in mine]))), world_size())
    merged = {r.image_id: None for r in records}
    for part in found:
        merged |= {image_id: problem for image_id, problem in part.items() if problem}
    return merged


# -------------------------------------------------------------------------------------------------------------- pairs
def draw_pair(examples: list[Example], seed: int, step: int, index: int, pairs_per_step: int,
              transforms: str = "full") -> Pair:
    """Pair number `index` of a step: its example by a new permutation each epoch, then question and T (Algorithm 1)."""
    place = step * pairs_per_step + index
    epoch, offset = divmod(place, len(examples))
    example = examples[np.random.default_rng([seed, 1, epoch]).permutation(len(examples))[offset]]
    return pair_of(example, np.random.default_rng([seed, 2, step, index]), transforms)


def evaluation_pair(example: Example, seed: int, transforms: str = "full") -> Pair:
    """The pair that evaluation asks about this example: the same for every model, by (seed, example id) alone."""
    return pair_of(example, np.random.default_rng([seed, 3, zlib.crc32(example.id.encode())]), transforms)


def pair_of(example: Example, rng: np.random.Generator, transforms: str) -> Pair:
    """Draw the question and T for an example, and apply T."""
    question = draw_question(example.task, example.object_ids, rng)
    transform = draw_transform(example.task, rng, transforms)
    x, x_prime = make_pair(example, question, transform)
    return Pair(example, transform, x, x_prime, negates(transform, example.task))


def to_prompt(vlm: VLM, shown: Prompted, system: str) -> Prompt:
    """Words and pixels of one side of a pair as tensors."""
    names = {i: o.name for i, o in shown.view.objects.items()}
    return make_prompt(vlm, system, prompt_text(shown.question, names), shown.picture)


def draw_uniforms(seed: int, step: int, index: int, K: int, T: int) -> torch.Tensor:
    """(2, K, T) numbers in [0, 1) that sample the completions of x and x' of one pair, from a generator of their own."""
    return torch.from_numpy(np.random.default_rng([seed, 4, step, index]).random((2, K, T)))        # (2, K, T)


if __name__ == "__main__":
    for task in TASKS:
        pair = draw_pair(load_examples("synthetic", task, "train", limit=8), 0, 0, 0, 4)
        print(f"{task}: T = {', '.join(pair.transform.parts) or 'identity'}: answers must "
              f"{'differ' if pair.negates else 'match'}")
        for shown in (pair.x, pair.x_prime):
            print("   ", prompt_text(shown.question, {i: o.name for i, o in shown.view.objects.items()}).splitlines()[-2])
