"""phi_T is known by construction: for every cell the answers to x and T(x) are worked out anew and compared with it.

The answers come from tests/reader.py: the prompt's words, the marker colours in the picture and the 3D coordinates of the
transformed view, never from `questions.ground_truth` or the transform's own table.
"""

import os
import runpy
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, count, islice, product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import questions
import reader
from data import BOOLEAN_TASKS, TASKS, Box3D, Object, examples, load_omni3d
from images import size_problem
from questions import Question, draw_question, ground_truth, prompt_text
from scenes import scene
from transforms import (FULL_PARTS, MIN_CROP, PAPER_PARTS, Prompted, Transform, View, apply_to_question, apply_to_view, crop,
                        draw_markers, draw_transform, flip, jitter, make_pair, negates, parts_of, prompted, view_of)

ROOT = Path(__file__).resolve().parent.parent
MINI = Path(os.environ.get("OMNI3D_MINI", ROOT.parent / "shared" / "data" / "omni3d_mini"))
needs_mini = pytest.mark.skipif(not (MINI / "annotations").is_dir(), reason=f"no real photos in {MINI} (OMNI3D_MINI)")
fast = pytest.mark.fast
DRAWN = {"crop": (0.8, 0.75, 0.4, 0.9), "jitter": (0.7, 1.3, 0.8)}          # a part's numbers; the others: True


@cache
def examples_of(task, domain="synthetic", n=2):
    return tuple(islice((e for e in (examples(scene(domain, i), task) for i in count(900)) if e is not None), n))


def rotation(rng):
    q, r = np.linalg.qr(rng.normal(size=(3, 3)))
    return q * np.linalg.det(q)


def random_view(rng, n=3, width=None, height=None, integers=False):
    """A view of random pixels, boxes, cuboids and camera; 2D and 3D have nothing to do with each other."""
    width, height = width or int(rng.integers(60, 400)), height or int(rng.integers(60, 300))
    objects = {}
    for i in range(n):
        xs, ys = np.sort(rng.uniform(0, width, 2)), np.sort(rng.uniform(0, height, 2))
        box = (xs[0], ys[0], xs[1], ys[1])
        if integers:
            box = (np.floor(xs[0]), np.floor(ys[0]), np.ceil(xs[1]), np.ceil(ys[1]))
        objects[i] = Object(i, "box", tuple(map(float, box)), Box3D(rng.uniform((-2, -2, 4), (2, 2, 9)),
                                                                     tuple(rng.uniform(0.5, 2, 3).tolist()), rotation(rng)))
    f, cx, cy = rng.uniform(50, 500), rng.uniform(0.2, 0.8) * width, rng.uniform(0.2, 0.8) * height
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    return View(image, np.array([[f, 0, cx], [0, 1.1 * f, cy], [0, 0, 1]]), objects)


def same(a: View, b: View) -> bool:
    """Equal pixels, camera and objects, bit for bit."""
    def numbers(o):
        return [*o.box2d, *o.box3d.center, *o.box3d.R.ravel(), *o.box3d.dimensions]
    return (np.array_equal(np.asarray(a.image), np.asarray(b.image)) and np.array_equal(a.K, b.K) and list(a.objects) ==
            list(b.objects) and all(numbers(a.objects[i]) == numbers(b.objects[i]) for i in a.objects))


# --- every cell: relation x order x template x subset of parts --------------------------------------------------------

def cells(task):
    """Every question form and every subset of the full set's parts, as fields of Question and of Transform."""
    parts = parts_of(task, "full")
    subsets = list(chain.from_iterable(combinations(parts, n) for n in range(len(parts) + 1)))
    relations, orders = (0, 1) if task in BOOLEAN_TASKS else (0,), (False,) if task == "counting" else (False, True)
    for (relation, swapped, template), subset in product(product(relations, orders, range(5)), subsets):
        drawn = {part: DRAWN.get(part, 1 + (template + len(subset)) % 4 if part == "template" else True) for part in subset}
        yield dict(relation=relation, swapped=swapped, template=template), Transform(**drawn)


@fast
@pytest.mark.parametrize("domain", ["synthetic", "synthetic-outdoor"])
@pytest.mark.parametrize("task", TASKS)
def test_phi_T_is_what_3d_coordinates_say_in_every_cell(task, domain):
    for example in examples_of(task, domain, 1 if task == "distance" else 2):
        view = view_of(example)
        names = {o.id: o.name for o in example.objects}
        view_after = cache(lambda *image_parts: apply_to_view(Transform(*image_parts), view))
        picture = cache(lambda image_parts, ids: draw_markers(view_after(*image_parts), Question(task, ids)))

        @cache
        def answers(image_parts, question):  # by reading, and as the project says
            seen = view_after(*image_parts)
            text = prompt_text(question, names)
            return reader.read(task, text, picture(image_parts, question.object_ids), seen), ground_truth(question, seen.objects)

        n = 0
        for form, T in cells(task):
            x = Question(task, example.object_ids, **form)
            truth, said = answers((False, None, None), x)
            truth_after, said_after = answers((T.flip, T.crop, T.jitter), apply_to_question(T, x))
            assert (truth, truth_after) == pytest.approx((said, said_after))
            if task in BOOLEAN_TASKS:
                assert (truth_after != truth) == negates(T, task), (form, T)
            else:
                assert truth_after == pytest.approx(truth) and not negates(T, task), (form, T)
            n += 1
        assert n == {"counting": 5 * 2**4, "abs_distance": 2 * 5 * 2**7}.get(task, 2 * 2 * 5 * 2**8)


@needs_mini
@pytest.mark.parametrize("source", ["SUNRGBD", "KITTI"])
def test_phi_T_is_what_3d_coordinates_say_on_real_photos(source):
    rng, met = np.random.default_rng(0), Counter()
    for record in load_omni3d(MINI, (source,)):
        record = replace(record, load=cache(record.load))
        for task in TASKS:
            if (example := examples(record, task)) is None:
                continue
            T, question = draw_transform(task, rng), draw_question(task, example.object_ids, rng)
            names = {o.id: o.name for o in example.objects}
            truth, truth_after = (reader.read(task, prompt_text(side.question, names), side.picture, side.view)
                                  for side in make_pair(example, question, T))
            if task in BOOLEAN_TASKS:
                assert (truth_after != truth) == negates(T, task), (example.id, T)
            else:
                assert truth_after == pytest.approx(truth)
            met[task] += 1
    assert min(met[task] for task in TASKS if task != "counting") >= 2, met


# --- flip -----------------------------------------------------------------------------------------------------------

@fast
def test_a_flipped_box_of_requirement_19():
    box3d = Box3D(np.array([-1.0, 0.5, 4.0]), (1.0, 2.0, 3.0), np.eye(3))
    K = np.array([[90.0, 0, 30], [0, 80, 20], [0, 0, 1]])
    flipped = flip(View(Image.new("RGB", (100, 50)), K, {0: Object(0, "bed", (10, 20, 40, 35), box3d)}))
    assert flipped.objects[0].box2d == (60, 20, 90, 35)
    assert flipped.K.tolist() == [[90, 0, 70], [0, 80, 20], [0, 0, 1]]
    assert flipped.objects[0].box3d.center.tolist() == [1, 0.5, 4]


@fast
def test_flipping_twice_is_the_original_bit_for_bit_whatever_the_decimals():
    views = [view_of(e) for task in ("depth", "distance") for d in ("synthetic", "synthetic-outdoor") for e in examples_of(task, d)]
    rng = np.random.default_rng(0)
    for _ in range(50):
        v = random_view(rng)                # through an example, whose coordinates have all 53 bits
        record = replace(scene("synthetic", 1), K=v.K, objects=tuple(v.objects.values()), load=lambda v=v: v.image)
        views.append(view_of(replace(examples_of("depth")[0], record=record, object_ids=tuple(v.objects))))
        assert all(np.abs(np.subtract(views[-1].objects[i].box2d, v.objects[i].box2d)).max() < 1e-9 for i in v.objects)
    for v in views:
        assert same(flip(flip(v)), v) and not same(flip(v), v)


@needs_mini
def test_flipping_real_photos_twice_is_the_original_bit_for_bit():
    for record in load_omni3d(MINI, ("SUNRGBD", "KITTI"))[::3]:
        if (example := examples(record, "orientation")) is not None:
            assert same(flip(flip(view_of(example))), view_of(example))


@fast
def test_flipped_cuboids_seen_by_the_flipped_camera_are_the_mirror_image():
    rng = np.random.default_rng(1)
    for _ in range(100):
        v = random_view(rng)
        mirrored = flip(v)
        assert np.array_equal(np.asarray(mirrored.image)[:, ::-1], np.asarray(v.image))
        for i, o in v.objects.items():
            m = mirrored.objects[i].box3d
            assert np.linalg.det(m.R) == pytest.approx(1) and np.allclose(m.R @ m.R.T, np.eye(3))
            assert m.dimensions == o.box3d.dimensions
            before, after = reader.project(v.K, reader.corners(o.box3d)), reader.project(mirrored.K, reader.corners(m))
            before[:, 0] = v.image.width - before[:, 0]
            order = lambda points: points[np.lexsort(points.round(6).T)]
            assert np.allclose(order(before), order(after), atol=1e-7)


@fast
def test_a_flipped_2d_box_is_the_hull_of_the_flipped_projections_cut_to_the_picture():
    for domain in ("synthetic", "synthetic-outdoor"):
        for example in examples_of("depth", domain, 8):
            mirrored = flip(view_of(example))
            for o in mirrored.objects.values():
                pixels = reader.project(mirrored.K, reader.corners(o.box3d))
                hull = np.clip([*pixels.min(0), *pixels.max(0)], 0, [*mirrored.image.size] * 2)
                assert np.allclose(o.box2d, hull, atol=1e-6)


@fast
def test_a_view_without_camera_and_3d_boxes_can_be_transformed_too():
    v = random_view(np.random.default_rng(2))
    flat = View(v.image, None, {i: replace(o, box3d=None) for i, o in v.objects.items()})
    for T in (Transform(flip=True), Transform(crop=(0.7, 0.7, 0.1, 0.9)), Transform(flip=True, crop=(0.8, 1, 0, 1), jitter=(1, 1, 1))):
        after, full = apply_to_view(T, flat), apply_to_view(T, v)
        assert after.K is None and all(o.box3d is None for o in after.objects.values())
        assert [o.box2d for o in after.objects.values()] == [o.box2d for o in full.objects.values()]


# --- crop -----------------------------------------------------------------------------------------------------------

def window_of(before: View, after: View):
    """The window (x0, y0, x1, y1) that a crop cut out, from the shift of the principal point."""
    x0, y0 = (before.K - after.K)[:2, 2]
    return x0, y0, x0 + after.image.width, y0 + after.image.height


@fast
def test_crops_keep_every_box_whole_and_70_to_100_per_cent_of_each_side_unless_boxes_need_more():
    rng, grew = np.random.default_rng(3), 0
    for _ in range(300):
        v = random_view(rng, n=int(rng.integers(1, 4)), integers=rng.random() < 0.5)
        if rng.random() < 0.3:  # boxes that touch the edges of the picture
            w, h = v.image.size
            v = replace(v, objects={0: replace(v.objects[0], box2d=[(0, 0, 9, h), (w - 9, 0, w, 9), (0, 0, w, h)][rng.integers(3)])})
        shares, place = rng.uniform(0.7, 1, 2), rng.choice([0, 1, rng.random()], 2)
        cut = crop(v, *shares, *place)
        x0, y0, x1, y1 = window = window_of(v, cut)
        assert all(edge == round(edge) for edge in window)
        assert np.array_equal(np.asarray(cut.image), np.asarray(v.image)[round(y0):round(y1), round(x0):round(x1)])
        boxes = np.array([o.box2d for o in v.objects.values()])
        for o, m in zip(v.objects.values(), cut.objects.values()):
            assert np.allclose(m.box2d, np.subtract(o.box2d, (x0, y0, x0, y0)))                  # moved, not clipped
            assert m.box2d[0] >= 0 and m.box2d[1] >= 0 and m.box2d[2] <= cut.image.width and m.box2d[3] <= cut.image.height
            assert m.box3d is o.box3d
        for axis, share in enumerate(shares):
            side, left = v.image.size[axis], cut.image.size[axis]
            needed = np.ceil(boxes[:, axis + 2].max()) - np.floor(boxes[:, axis].min())
            assert left <= side and left >= min(side, MIN_CROP)
            if needed <= share * side and share * side >= MIN_CROP:
                assert abs(left - share * side) <= 0.5 and 0.7 * side - 0.5 <= left
            elif needed > share * side + 0.5:
                grew += 1
                assert left == max(needed, min(MIN_CROP, side))
    assert grew > 50  # both rules were met


@fast
def test_a_crop_can_lie_anywhere_that_keeps_the_boxes_whole():
    v = random_view(np.random.default_rng(4), n=1, width=200, height=200)
    v = replace(v, objects={0: replace(v.objects[0], box2d=(80.0, 90.0, 120.0, 110.0))})
    starts = [window_of(v, crop(v, 0.75, 0.75, at, at))[:2] for at in np.linspace(0, 1, 101)]
    assert starts[0] == (0, 0) and starts[-1] == (50, 50) and sorted(starts) == starts and len(set(starts)) == 51
    edge = replace(v, objects={0: replace(v.objects[0], box2d=(160.0, 0.0, 200.0, 30.0))})
    assert {window_of(edge, crop(edge, 0.75, 0.75, at, at))[:2] for at in (0, 0.5, 1)} == {(50, 0)}


@fast
def test_points_seen_by_the_cropped_camera_move_with_the_pixels():
    rng = np.random.default_rng(5)
    for _ in range(50):
        v = random_view(rng, n=1)
        cut = crop(v, 0.75, 0.85, 0.3, 0.6)
        points = rng.uniform((-2, -2, 3), (2, 2, 9), (20, 3))
        assert np.allclose(reader.project(cut.K, points), reader.project(v.K, points) - window_of(v, cut)[:2])


@fast
@pytest.mark.parametrize("width, height", [(28, 28), (60, 60), (80, 5000), (28, 5600), (11200, 56), (20000, 100), (8000, 56)])
def test_no_crop_makes_a_usable_picture_too_small_or_too_narrow_for_the_model(width, height):
    assert size_problem(width, height) is None
    rng = np.random.default_rng(6)
    x, y = rng.uniform(0, width - 25), rng.uniform(0, height - 25)
    v = View(Image.new("RGB", (width, height)), np.eye(3), {0: Object(0, "car", (x, y, x + 25, y + 25), None)})
    for shares in product((0.7, 1.0), repeat=2):
        cut = crop(v, *shares, 0.5, 0.5)
        assert size_problem(*cut.image.size) is None
        assert all(left >= min(side, 56) for left, side in zip(cut.image.size, (width, height)))


# --- jitter ---------------------------------------------------------------------------------------------------------

@fast
def test_jitter_is_brightness_contrast_saturation_and_leaves_geometry_alone():
    v = random_view(np.random.default_rng(7))
    after = apply_to_view(Transform(jitter=(0.8, 1.2, 0.9)), v)
    assert after.image.size == v.image.size and after.image.mode == "RGB" and after.K is v.K and after.objects is v.objects
    assert np.array_equal(np.asarray(jitter(v.image, 1, 1, 1)), np.asarray(v.image))
    pixels = np.asarray(v.image).astype(float)
    assert np.abs(np.asarray(jitter(v.image, 0.7, 1, 1)) - 0.7 * pixels).max() <= 1
    grey = np.asarray(jitter(v.image, 1, 1, 0)).astype(int)
    assert (grey[..., 0] == grey[..., 1]).all() and np.abs(grey[..., 0] - pixels @ (0.299, 0.587, 0.114)).max() <= 1
    flat = np.asarray(jitter(v.image, 1, 0.5, 1)).astype(float)
    assert flat.std() == pytest.approx(0.5 * pixels.std(), rel=0.02) and abs(flat.mean() - pixels.mean()) < 8


# --- markers, drawn last --------------------------------------------------------------------------------------------

@fast
@pytest.mark.parametrize("task", TASKS)
def test_after_any_transform_each_marker_is_on_its_object_in_a_pure_colour(task):
    rng = np.random.default_rng(8)
    for example in examples_of(task, n=4) + examples_of(task, "synthetic-outdoor", 2):
        for _ in range(25):
            _, x = make_pair(example, draw_question(task, example.object_ids, rng), draw_transform(task, rng))
            if task == "counting":
                assert x.picture.tobytes() == x.view.image.tobytes()
                continue
            mark = "box" if task in ("depth", "distance") else "dot"
            for id_, colour in zip(x.question.object_ids, ("red", "blue", "green")):
                assert reader.marked(x.picture, x.view.objects.values(), colour, mark).id == id_


@fast
def test_markers_are_pure_although_jitter_changed_every_other_red():
    red = View(Image.new("RGB", (120, 120), (255, 0, 0)), None, {i: Object(i, "box", (20 + 50 * i, 20, 50 + 50 * i, 60), None) for i in (0, 1)})
    _, x = (prompted(v, Question("depth", (0, 1))) for v in (red, apply_to_view(Transform(jitter=(0.7, 1.0, 0.8)), red)))
    pixels = np.asarray(x.picture)
    assert tuple(pixels[20, 30]) == (255, 0, 0) and tuple(pixels[59, 49]) == (255, 0, 0) and tuple(pixels[20, 80]) == (0, 0, 255)
    assert tuple(pixels[100, 100]) != (255, 0, 0) and tuple(np.asarray(x.view.image)[20, 30]) != (255, 0, 0)


@fast
def test_boxes_and_dots_lie_inside_the_picture_and_leave_the_smallest_object_visible():
    for width, height in ((112, 112), (730, 530), (1242, 375)):
        objects = {0: Object(0, "car", (0, 0, 26, 25), None), 1: Object(1, "car", (width - 200, height - 80, width, height), None)}
        view = View(Image.new("RGB", (width, height), (9, 9, 9)), None, objects) if width > 112 else View(
            Image.new("RGB", (width, height), (9, 9, 9)), None, {**objects, 1: Object(1, "car", (70, 70, width, height), None)})
        for task in ("depth", "size"):
            pixels = np.asarray(draw_markers(view, Question(task, (0, 1))))
            covered = (pixels[:25, :26] != 9).any(-1).mean()
            assert covered < 0.5, (width, task, covered)
            if task == "depth":
                assert tuple(pixels[0, 0]) == tuple(pixels[24, 25]) == (255, 0, 0) and tuple(pixels[-1, -1]) == (0, 0, 255)
                assert (pixels[25, :26] == 9).all()                             # not a pixel outside its box
            else:  # dots of one size, so that a dot says nothing about what it marks
                areas = [(pixels == colour).all(-1).sum() for colour in ((255, 0, 0), (0, 0, 255))]
                assert abs(areas[0] - areas[1]) <= 0.1 * areas[0]


# --- T_q --------------------------------------------------------------------------------------------------------------

@fast
def test_relabelling_an_unnamed_prompt_leaves_its_text_as_it_was_and_negates_the_answer():
    for task in BOOLEAN_TASKS:
        for example in examples_of(task):
            names = {o.id: o.name for o in example.objects}
            x, x_prime = make_pair(example, Question(task, example.object_ids, named=False), Transform(relabel=True))
            assert prompt_text(x.question, names) == prompt_text(x_prime.question, names)
            assert x.picture.tobytes() != x_prime.picture.tobytes() and x.view.image.tobytes() == x_prime.view.image.tobytes()
            truths = [reader.read(task, prompt_text(side.question, names), side.picture, side.view) for side in (x, x_prime)]
            assert truths[0] != truths[1] and negates(Transform(relabel=True), task)


@fast
def test_relabelling_exchanges_the_compared_objects_and_never_the_anchor():
    T = Transform(relabel=True)
    for task, ids, after in (("depth", (4, 9), (9, 4)), ("distance", (4, 9, 7), (4, 7, 9)), ("abs_distance", (4, 9), (9, 4))):
        assert apply_to_question(T, Question(task, ids)).object_ids == after


@fast
def test_a_question_changes_in_its_fields_only_and_needs_no_words_for_that(monkeypatch):
    monkeypatch.setattr(questions, "TEMPLATES", {})     # whoever touched a word would now stumble
    T = Transform(flip=True, template=3, swap_relation=True, swap_order=True, relabel=True, unnamed=True)
    assert apply_to_question(T, Question("size", (3, 8), relation=1, template=4)) == Question("size", (8, 3), 0, True, 2, False)
    back = replace(T, template=2)
    assert apply_to_question(back, apply_to_question(T, Question("size", (3, 8)))) == Question("size", (3, 8), named=False)


@fast
def test_the_other_template_is_always_another_one():
    for template, step in product(range(5), range(1, 5)):
        assert apply_to_question(Transform(template=step), Question("depth", (1, 2), template=template)).template != template


# --- the draw and the pair ------------------------------------------------------------------------------------------

@fast
def test_the_paper_set_has_six_parts_the_full_set_two_more_and_tasks_leave_out_what_the_table_says():
    assert PAPER_PARTS == ("flip", "crop", "jitter", "template", "swap_relation", "swap_order")
    assert set(FULL_PARTS) - set(PAPER_PARTS) == {"relabel", "unnamed"}
    for task in BOOLEAN_TASKS:
        assert parts_of(task, "paper") == PAPER_PARTS and parts_of(task, "full") == FULL_PARTS
    assert set(parts_of("counting", "full")) == set(parts_of("counting", "paper")) == {"flip", "crop", "jitter", "template"}
    assert set(parts_of("abs_distance", "paper")) == {"flip", "crop", "jitter", "template", "swap_order"}
    assert set(parts_of("abs_distance", "full")) == set(FULL_PARTS) - {"swap_relation"}


@fast
@pytest.mark.parametrize("task, transforms", [("depth", "full"), ("depth", "paper"), ("counting", "full"), ("abs_distance", "full")])
def test_each_part_is_drawn_with_probability_one_half_independently_of_the_others(task, transforms):
    rng, n, parts = np.random.default_rng(9), 6000, parts_of(task, transforms)
    drawn = [draw_transform(task, rng, transforms) for _ in range(n)]
    assert all(set(T.parts) <= set(parts) for T in drawn)
    subsets = Counter(T.parts for T in drawn)
    expected, free = n / 2 ** len(parts), 2 ** len(parts) - 1
    chi2 = sum((c - expected) ** 2 / expected for c in subsets.values()) + (free + 1 - len(subsets)) * expected
    assert chi2 < free + 3.3 * (2 * free) ** 0.5 + 5        # all subsets equally likely: each part 1/2 and independent
    assert all(abs(sum(p in T.parts for T in drawn) / n - 0.5) < 3.3 * 0.5 / n ** 0.5 for p in parts)


@fast
def test_the_numbers_of_a_transform_are_drawn_in_their_ranges():
    rng = np.random.default_rng(10)
    drawn = [draw_transform("depth", rng) for _ in range(3000)]
    crops, jitters = (np.array([v for T in drawn if (v := getattr(T, part))]) for part in ("crop", "jitter"))
    for column, low, high in [*((c, 0.7, 1.0) for c in crops.T[:2]), *((c, 0, 1) for c in crops.T[2:]),
                              *((c, 0.7, 1.3) for c in jitters.T)]:
        assert low <= column.min() < low + 0.01 and high - 0.01 < column.max() <= high
        assert abs(column.mean() - (low + high) / 2) < 0.02
    assert np.abs(np.corrcoef(np.hstack([crops[:1000], jitters[:1000]]).T) - np.eye(7)).max() < 0.12
    steps = Counter(T.template for T in drawn if T.template)
    assert set(steps) == {1, 2, 3, 4} and min(steps.values()) > 300


@fast
def test_a_pair_is_x_as_it_is_and_T_of_it_flipped_then_cropped_then_jittered_then_marked():
    T = Transform(flip=True, crop=(0.75, 0.8, 0.2, 0.7), jitter=(0.8, 1.1, 1.2), swap_relation=True)
    for example in examples_of("depth") + examples_of("counting"):
        question = Question(example.task, example.object_ids)
        x, x_prime = make_pair(example, question, T)
        untouched = view_of(example)
        assert isinstance(x, Prompted) and same(x.view, untouched) and x.question == question
        by_hand = crop(flip(untouched), *T.crop)
        assert same(x_prime.view, replace(by_hand, image=jitter(by_hand.image, *T.jitter)))
        assert x_prime.picture.tobytes() == draw_markers(x_prime.view, x_prime.question).tobytes()
        again = make_pair(example, question, T)[1]
        assert again.picture.tobytes() == x_prime.picture.tobytes() and again.question == x_prime.question
        nothing = make_pair(example, question, Transform())[1]
        assert nothing.picture.tobytes() == x.picture.tobytes() and nothing.question == x.question


@fast
def test_the_demo_writes_a_sheet_with_a_pair_of_each_task(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "transforms.py"), run_name="__main__")
    sheet = np.asarray(Image.open("transforms.png"))
    reds = [(sheet[y] == (255, 0, 0)).all(-1).any() for y in range(len(sheet))]
    assert sum(a and not b for a, b in zip(reds, reds[1:])) >= 5                  # rows with red markers: counting has none
    printed = capsys.readouterr().out
    assert all(task in printed for task in TASKS)
