"""Prompts say exactly what the specification says, truths follow from the geometry, and answers are balanced."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import reader
from data import BOOLEAN_TASKS, TASKS, Box3D, Object
from images import DataError
from questions import RELATIONS, SYSTEM_PROMPT, TEMPLATES, Question, compared, draw_question, ground_truth, plural, prompt_text

fast = pytest.mark.fast
NAMES = {5: "night stand", 8: "lamp", 9: "sofa"}


def box(id, center, dimensions=(1, 1, 1), box2d=(0, 0, 30, 30), name="chair"):
    return Object(id, name, box2d, Box3D(np.array(center, dtype=float), dimensions, np.eye(3)))


def objects_of(task):
    return (5, 8, 9) if task == "distance" else (5, 8)


# --- the words ------------------------------------------------------------------------------------------------------

BOX = ('- object 1 = "night stand", highlighted by a red box.\n- object 2 = "lamp", highlighted by a blue box.\n')
DOT = BOX.replace("highlighted by", "marked with").replace(" box", " dot")
THREE = BOX + '- object 3 = "sofa", highlighted by a green box.\n'


@fast
@pytest.mark.parametrize("question, expected", [
    (Question("orientation", (5, 8)), DOT + "Is object 1 to the left of object 2?\nAnswer True or False."),
    (Question("orientation", (5, 8), relation=1, template=1),
     DOT + "Compared to object 2, is object 1 more to the right?\nAnswer True or False."),
    (Question("depth", (5, 8)), BOX + "Is object 1 closer to the camera than object 2?\nAnswer True or False."),
    (Question("depth", (5, 8), relation=1, swapped=True, template=2),
     BOX + "Object 2 is further from the camera than object 1. Is this true?\nAnswer True or False."),
    (Question("size", (5, 8), template=3), DOT + "Is it true that object 1 is bigger than object 2?\nAnswer True or False."),
    (Question("size", (5, 8), relation=1, swapped=True, template=4),
     DOT + "Looking at the image, is object 2 smaller than object 1?\nAnswer True or False."),
    (Question("distance", (5, 8, 9)), THREE + "Is object 2 closer to object 1 than object 3?\nAnswer True or False."),
    (Question("distance", (5, 8, 9), relation=1, swapped=True, template=1),
     THREE + "Compared to object 2, is object 3 further from object 1?\nAnswer True or False."),
    (Question("counting", (5, 5)), "How many night stands are visible in the image?\nAnswer with a number."),
    (Question("abs_distance", (5, 8), swapped=True),
     DOT + "What is the distance between object 2 and object 1 in meters?\nAnswer with a number."),
    (Question("depth", (5, 8), named=False),
     "- object 1, highlighted by a red box.\n- object 2, highlighted by a blue box.\n"
     "Is object 1 closer to the camera than object 2?\nAnswer True or False."),
])
def test_prompts_of_each_task_written_out(question, expected):
    assert prompt_text(question, NAMES) == expected


@fast
def test_the_system_prompt_asks_for_the_thinking_and_then_the_answer_in_tags():
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    places = [SYSTEM_PROMPT.index(tag) for tag in tags]
    assert places == sorted(places) and all(SYSTEM_PROMPT.count(tag) == 1 for tag in tags)


@fast
def test_each_task_has_five_different_templates_and_an_independent_reader_finds_relation_and_order_in_all():
    for task in BOOLEAN_TASKS:
        for relation, swapped, template in product((0, 1), (False, True), range(5)):
            text = prompt_text(Question(task, objects_of(task), relation, swapped, template), NAMES)
            first, second = (2, 3) if task == "distance" else (1, 2)
            assert reader.asked(task, text) == ((second, RELATIONS[task][relation], first) if swapped else
                                                (first, RELATIONS[task][relation], second))
    for task in TASKS:
        ids = (5, 5) if task == "counting" else objects_of(task)
        assert len({prompt_text(Question(task, ids, template=i), NAMES) for i in range(5)}) == len(TEMPLATES[task]) == 5


@fast
def test_objects_are_called_1_2_3_and_marked_red_blue_green_by_task():
    marks = {"orientation": "dot", "size": "dot", "abs_distance": "dot", "depth": "box", "distance": "box"}  # D.2
    for task, mark in marks.items():
        colours = ("red", "blue", "green")[:len(objects_of(task))]
        named, unnamed = (prompt_text(Question(task, objects_of(task), named=n), NAMES) for n in (True, False))
        assert reader.listed(named) == {i + 1: (c, mark, NAMES[objects_of(task)[i]]) for i, c in enumerate(colours)}
        assert reader.listed(unnamed) == {i + 1: (c, mark, None) for i, c in enumerate(colours)}
        assert not any(name in unnamed for name in NAMES.values())
    counting = prompt_text(Question("counting", (5, 5)), NAMES)
    assert not any(word in counting for word in ("object", "red", "dot", "box"))


@fast
def test_a_name_is_only_ever_inserted_never_interpreted():
    for name in ('a {b} "c"', "%s", "object 2"):
        assert f'- object 1 = "{name}", ' in prompt_text(Question("depth", (5, 8)), {5: name, 8: "lamp"})
    with pytest.raises(KeyError):
        prompt_text(Question("depth", (5, 7)), NAMES)


PLURALS = """pedestrian pedestrians, car cars, cyclist cyclists, person people, bus buses, bicycle bicycles, books books,
cereal box|cereal boxes, cup cups, shoes shoes, blinds blinds, shelves shelves, shelf shelves, bookcase bookcases,
bookshelf bookshelves, box boxes, night stand|night stands, floor mat|floor mats, clothes clothes, stationery|stationery
items, board boards, vase vases, tissues tissues, plates plates, electronics electronics, drawers drawers, coffee
maker|coffee makers, tray trays, keyboard keyboards, mouse mice, toys toys, glass glasses, toilet paper|toilet paper rolls,
utensils utensils, couch couches, brush brushes, fire place|fire places, battery batteries, traffic cone|traffic
cones, tram trams, van vans, trailer trailers, table tables, lamp lamps, sofa sofas, desk desks, bed beds, cabinet cabinets,
chair chairs, truck trucks, knife knives, child children"""


@fast
def test_plurals_of_real_class_names():
    for entry in " ".join(PLURALS.split()).split(", "):
        one, many = entry.split("|") if "|" in entry else entry.split(" ")
        assert plural(one) == many


# --- the truth ------------------------------------------------------------------------------------------------------

@fast
def test_truths_of_a_scene_worked_out_by_hand():
    # 5: a small cube, centre at 4 m. 8: a cube of 2 m at 4.5 m: further, but its front is nearer (3.5 m, both by z).
    # 9: as small as 5, far away. In the picture 8 is left of 5 is left of 9.
    objects = {5: box(5, (0, 0, 4), (1, 1, 1), (50, 0, 60, 9)), 8: box(8, (-3, 0, 4.4), (2, 2, 2), (0, 5, 100, 50)),
               9: box(9, (0, 3, 12), (1, 1, 0.5), (90, 0, 99, 3))}
    truth = lambda task, *ids, **fields: ground_truth(Question(task, ids, **fields), objects)
    assert truth("depth", 8, 5) is True and truth("depth", 5, 8) is False and truth("depth", 8, 5, relation=1) is False
    assert truth("size", 8, 5) is True and truth("size", 5, 9) is True and truth("size", 5, 9, swapped=True) is False
    assert truth("orientation", 8, 5) is True and truth("orientation", 5, 9, relation=1) is False
    assert truth("distance", 5, 8, 9) is True and truth("distance", 5, 9, 8) is False and truth("distance", 9, 5, 8) is True
    assert truth("counting", 5, 8, 9) == 3.0
    assert truth("abs_distance", 5, 8) == pytest.approx((9 + 0.16) ** 0.5) == truth("abs_distance", 8, 5, swapped=True)


@fast
def test_a_relation_word_is_the_negation_of_its_opposite_and_of_the_swapped_order():
    objects = {5: box(5, (0, 0, 4)), 8: box(8, (1, 0, 6), (1, 2, 1), (5, 0, 80, 10)), 9: box(9, (0, 4, 5))}
    for task in BOOLEAN_TASKS:
        truth = {(r, s): ground_truth(Question(task, objects_of(task), r, s), objects) for r in (0, 1) for s in (False, True)}
        assert truth[0, False] == truth[1, True] != truth[1, False] == truth[0, True]
        assert all(type(t) is bool for t in truth.values())


@fast
def test_without_3d_boxes_only_orientation_and_counting_have_a_truth_and_the_others_say_so():
    flat = {i: replace(box(i, (0, 0, 4), box2d=(i, 0, i + 30, 30)), box3d=None) for i in (5, 8, 9)}
    assert ground_truth(Question("orientation", (5, 8)), flat) is True
    assert ground_truth(Question("counting", (5, 8)), flat) == 2
    for task in ("depth", "size", "distance", "abs_distance"):
        with pytest.raises(DataError, match="3D box"):
            ground_truth(Question(task, objects_of(task)), flat)


# --- the draw -------------------------------------------------------------------------------------------------------

@fast
def test_relation_order_and_template_are_drawn_uniformly_so_that_answers_balance_whatever_the_scene():
    objects = {5: box(5, (0, 0, 4)), 8: box(8, (1, 0, 6), (1, 2, 1), (5, 0, 80, 10)), 9: box(9, (0, 4, 5))}
    rng, n = np.random.default_rng(0), 4000
    for task in BOOLEAN_TASKS:
        drawn = [draw_question(task, objects_of(task), rng) for _ in range(n)]
        assert all(q.object_ids == objects_of(task) and q.named for q in drawn)
        cells = Counter((q.relation, q.swapped, q.template) for q in drawn)
        chi2 = sum((cells[c] - n / 20) ** 2 / (n / 20) for c in product((0, 1), (False, True), range(5)))
        assert len(cells) == 20 and chi2 < 43.8  # 99.9 % of the chi-squared distribution with 19 degrees of freedom
        assert abs(np.mean([ground_truth(q, objects) for q in drawn]) - 0.5) < 3.3 * 0.5 / n ** 0.5


@fast
def test_numeric_questions_have_no_relation_and_counting_no_order():
    rng = np.random.default_rng(0)
    drawn = {task: [draw_question(task, (5, 8), rng) for _ in range(200)] for task in ("counting", "abs_distance")}
    assert {q.relation for qs in drawn.values() for q in qs} == {0}
    assert {q.swapped for q in drawn["counting"]} == {False} and {q.swapped for q in drawn["abs_distance"]} == {False, True}
    assert {compared(q) for q in drawn["abs_distance"]} == {(1, 2), (2, 1)}
