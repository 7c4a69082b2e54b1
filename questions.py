"""Questions as structured data, and the words they become at the very end (section D.2, appendix B.1).

A question is never edited as a string: a transform changes its fields, and `prompt_text` writes the words once.
Table 6 of the paper (its templates) is lost, so the five templates per task are ours, in the forms its figures show.

    q = Question("depth", (7, 3), relation=0, swapped=False, template=0, named=True)
    prompt_text(q, {7: "table", 3: "lamp"})
        - object 1 = "table", highlighted by a red box.
        - object 2 = "lamp", highlighted by a blue box.
        Is object 1 closer to the camera than object 2?
        Answer True or False.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Sequence

import numpy as np

from data import BOOLEAN_TASKS, Object
from images import DataError

COLOURS = ("red", "blue", "green")       # of objects 1, 2, 3
MARKS = {"orientation": "dot", "size": "dot", "abs_distance": "dot", "depth": "box", "distance": "box"}  # D.2

# The relation asked about and its opposite; index 0 and 1 of `Question.relation`.
RELATIONS = {"orientation": ("left", "right"), "depth": ("closer to", "further from"),
             "size": ("bigger", "smaller"), "distance": ("closer to", "further from")}

# {a} and {b} are the numbers of the compared objects, in the order of the question.
TEMPLATES = {
    "orientation": ("Is object {a} to the {rel} of object {b}?",
                    "Compared to object {b}, is object {a} more to the {rel}?",
                    "Object {a} is to the {rel} of object {b}. Is this true?",
                    "Is it true that object {a} is to the {rel} of object {b}?",
                    "Looking at the image, is object {a} to the {rel} of object {b}?"),
    "depth": ("Is object {a} {rel} the camera than object {b}?",
              "Compared to object {b}, is object {a} {rel} the camera?",
              "Object {a} is {rel} the camera than object {b}. Is this true?",
              "Is it true that object {a} is {rel} the camera than object {b}?",
              "Looking at the image, is object {a} {rel} the camera than object {b}?"),
    "size": ("Is object {a} {rel} than object {b}?",
             "Compared to object {b}, is object {a} {rel}?",
             "Object {a} is {rel} than object {b}. Is this true?",
             "Is it true that object {a} is {rel} than object {b}?",
             "Looking at the image, is object {a} {rel} than object {b}?"),
    "distance": ("Is object {a} {rel} object 1 than object {b}?",
                 "Compared to object {b}, is object {a} {rel} object 1?",
                 "Object {a} is {rel} object 1 than object {b}. Is this true?",
                 "Is it true that object {a} is {rel} object 1 than object {b}?",
                 "Looking at the image, is object {a} {rel} object 1 than object {b}?"),
    "counting": ("How many {name} are visible in the image?",
                 "In the image, how many {name} can you see?",
                 "Count the {name} in the image. How many are there?",
                 "What is the number of {name} in the image?",
                 "Looking at the image, how many {name} are there?"),
    "abs_distance": ("What is the distance between object {a} and object {b} in meters?",
                     "In meters, how far apart are object {a} and object {b}?",
                     "How many meters are there between object {a} and object {b}?",
                     "How far is object {a} from object {b}, in meters?",
                     "Looking at the image, what is the distance from object {a} to object {b} in meters?"),
}
HOW_TO_ANSWER = {task: "Answer True or False." if task in BOOLEAN_TASKS else "Answer with a number."
                 for task in TEMPLATES}

SYSTEM_PROMPT = "First think inside <think></think>, then give only the answer inside <answer></answer>."


PLURALS = {"person": "people", "man": "men", "woman": "women", "child": "children", "mouse": "mice", "knife": "knives",
           "stationery": "stationery items", "toilet paper": "toilet paper rolls"}          # of the irregular names


@dataclass(frozen=True)
class Question:
    """`object_ids` are objects 1, 2, 3 in that order; `swapped` names the two compared ones in the other order."""
    task: str
    object_ids: tuple[int, ...]
    relation: int = 0              # index into RELATIONS[task]; 0 for the numeric tasks
    swapped: bool = False
    template: int = 0              # index into TEMPLATES[task]
    named: bool = True             # does the listing say what the marked objects are?


def draw_question(task: str, object_ids: Sequence[int], rng: np.random.Generator) -> Question:
    """A question about these objects with relation, order and template drawn uniformly (answers balance, D.2)."""
    relation, swapped, template = int(rng.integers(2)), bool(rng.integers(2)), int(rng.integers(5))
    boolean = task in BOOLEAN_TASKS
    return Question(task, tuple(object_ids), relation if boolean else 0, swapped and task != "counting", template)


def compared(question: Question) -> tuple[int, int]:
    """Numbers (from 1) of the two compared objects in the order the question names them; distance compares 2 and 3."""
    a, b = (2, 3) if question.task == "distance" else (1, 2)
    return (b, a) if question.swapped else (a, b)


def plural(name: str) -> str:
    """The class name in the plural, as a counting question needs it. Some of Omni3D's names are plurals already."""
    if name in PLURALS:
        return PLURALS[name]
    if name.endswith("shelf"):
        return name[:-1] + "ves"
    if name.endswith(("x", "ch", "sh", "ss", "us")):
        return name + "es"                             # boxes, couches, glasses, buses
    if name.endswith("s"):
        return name                                    # books, shelves, clothes, blinds
    if name.endswith("y") and name[-2:-1] not in tuple("aeiou"):
        return name[:-1] + "ies"
    return name + "s"


def prompt_text(question: Question, names: Mapping[int, str]) -> str:
    """The user turn: the listing of marked objects (none for counting), the question, how to answer.

    `names` maps object id to class name. Raises KeyError for an id without a name.
    """
    task = question.task
    template = TEMPLATES[task][question.template]
    if task == "counting":
        return template.format(name=plural(names[question.object_ids[0]])) + "\n" + HOW_TO_ANSWER[task]
    phrase = "highlighted by a" if MARKS[task] == "box" else "marked with a"
    listing = [f"- object {i}" + (f' = "{names[id_]}"' if question.named else "") + f", {phrase} {colour} {MARKS[task]}."
               for i, (id_, colour) in enumerate(zip(question.object_ids, COLOURS), start=1)]
    a, b = compared(question)
    relation = RELATIONS[task][question.relation] if task in RELATIONS else ""
    return "\n".join(listing + [template.format(a=a, b=b, rel=relation), HOW_TO_ANSWER[task]])


def ground_truth(question: Question, objects: Mapping[int, Object]) -> bool | float:
    """The true answer from the geometry of `objects` (by id, in the frame of the picture shown), section D.2.

    depth: nearest of the eight corners; size: volume; distance: between centres; orientation: centres of the 2D boxes.
    Label-free training never calls this: it is for `--reward accuracy`, the labelled probe and evaluation.
    Raises DataError where an object has no 3D box and the task needs one.
    """
    task, ids = question.task, question.object_ids
    if task == "counting":
        return float(len(ids))
    if task != "orientation" and any(objects[i].box3d is None for i in ids):
        raise DataError(f"{task}: the true answer needs a 3D box on every object asked about, and these have 2D boxes "
                        "only; train with --reward consistency, which needs no answer")
    if task == "abs_distance":
        return float(np.linalg.norm(objects[ids[0]].box3d.center - objects[ids[1]].box3d.center))
    a, b = (objects[ids[i - 1]] for i in compared(question))
    if task == "orientation":
        holds = a.box2d[0] + a.box2d[2] < b.box2d[0] + b.box2d[2]
    elif task == "depth":
        holds = a.box3d.corners[:, 2].min() < b.box3d.corners[:, 2].min()
    elif task == "size":
        holds = a.box3d.volume > b.box3d.volume
    else:
        anchor = objects[ids[0]].box3d.center
        holds = np.linalg.norm(a.box3d.center - anchor) < np.linalg.norm(b.box3d.center - anchor)
    return bool(holds) != bool(question.relation)      # relation 1 is the opposite word


if __name__ == "__main__":
    for name in TEMPLATES:
        ids = (1, 2, 3) if name == "distance" else (1, 2)
        print(f"--- {name}")
        print(prompt_text(Question(name, ids, template=1), {1: "table", 2: "lamp", 3: "chair"}))
