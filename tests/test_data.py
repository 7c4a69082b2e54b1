"""Rows become records strictly, examples are unambiguous, splits are stable, and bad pictures are found beforehand."""

import io
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import check
from data import TASKS, Box3D, Object, Record, examples, gap, load_omni3d, parse_record, split
from images import DataError, bad_pictures, open_image, size_problem

ROOT = Path(__file__).resolve().parent.parent
MINI = Path(os.environ.get("OMNI3D_MINI", ROOT.parent / "shared" / "data" / "omni3d_mini"))
needs_mini = pytest.mark.skipif(not (MINI / "annotations").is_dir(), reason=f"no real photos in {MINI} (OMNI3D_MINI)")
fast = pytest.mark.fast
W, H = 400, 300


def corners_by_hand(center, dimensions, R):
    """Omni3D's corner order, written out: length along the box's x, height along y, width along z."""
    w, h, l = dimensions
    signs = ["---", "+--", "++-", "-+-", "--+", "+-+", "+++", "-++"]
    local = [[(1 if s == "+" else -1) * side / 2 for s, side in zip(sign, (l, h, w))] for sign in signs]
    return [[sum(R[i][j] * p[j] for j in range(3)) + center[i] for i in range(3)] for p in local]


def row(id=0, name="chair", box=(100, 100, 160, 150), center=(0.0, 0.0, 3.0), dimensions=(1.0, 1.0, 1.0), **other):
    R = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    return {"id": id, "image_id": 0, "category_id": 0, "category_name": name, "valid3D": True, "behind_camera": False,
            "bbox2D_tight": list(box), "bbox2D_trunc": [-1] * 4, "bbox2D_proj": [-1] * 4, "center_cam": list(center),
            "dimensions": list(dimensions), "R_cam": R, "bbox3D_cam": corners_by_hand(center, dimensions, R),
            "visibility": -1, "truncation": -1, "segmentation_pts": -1, "lidar_pts": -1, "depth_error": -1, **other}


def record(*rows, source="SUNRGBD", **image):
    image = {"id": 0, "width": W, "height": H, "K": [[300, 0, 200], [0, 300, 150], [0, 0, 1]], **image}
    return parse_record(image, list(rows), source, lambda: None)


def kept(**fields) -> bool:
    return len(record(row(**fields)).objects) == 1


# --- one row: the single-object filters, the sentinels, requirement 25 ---------------------------------------------

@fast
@pytest.mark.parametrize("field, passes, fails", [
    ("visibility", [-1, 0.5, 1, None], [0.499, 0, -0.2]),
    ("truncation", [-1, 0, 0.35, None], [0.351, 1.0]),
    ("behind_camera", [False, 0], [True, 1]),
    ("name", ["chair", "pedestrian"], ["dontcare", "DontCare", "ignore", "void"]),
    ("box", [(0, 0, 25, 60), (10, 10, 280, 210)], [(0, 0, 24.9, 60), (0, 0, 60, 24.9), (10, 10, 281, 210)]),
    ("bbox2D_tight", [[-1, 50, 100, 100], [-1, -1, 100, 100]], [[-1, -1, -1, -1], None, [500, 100, 600, 200]]),
])
def test_each_filter_passes_and_drops_on_the_two_sides_of_its_threshold(field, passes, fails):
    assert all(kept(**{field: value}) for value in passes)
    assert not any(kept(**{field: value}) for value in fails)


@fast
def test_the_2d_box_is_tight_then_trunc_then_proj_and_always_inside_the_picture():
    absent, tight, trunc, proj = [-1] * 4, [50, 60, 150, 160], [40, 50, 140, 150], [-30, 200, 120, 900]
    box = lambda **boxes: record(row(**boxes)).objects[0].box2d
    assert box(bbox2D_tight=tight, bbox2D_trunc=trunc, bbox2D_proj=proj) == (50, 60, 150, 160)
    assert box(bbox2D_tight=absent, bbox2D_trunc=trunc, bbox2D_proj=proj) == (40, 50, 140, 150)
    assert box(bbox2D_tight=absent, bbox2D_trunc=absent, bbox2D_proj=proj) == (0, 200, 120, H)
    assert box(bbox2D_tight=[-1, 60, 150, 160], bbox2D_trunc=trunc) == (0, 60, 150, 160)  # one -1 is a coordinate


@fast
def test_valid3d_is_read_strictly_and_without_it_no_3d_field_is_looked_at():
    assert all(record(row(valid3D=yes)).objects[0].box3d is not None for yes in (True, 1))
    nonsense = dict(center_cam="?", dimensions=[None] * 3, R_cam=[], bbox3D_cam=7)
    assert all(record(row(valid3D=no) | nonsense).objects[0].box3d is None for no in (False, 0))
    for value in ("maybe", "true", 2, 0.5, None, [True]):
        with pytest.raises(DataError, match="row 4711: valid3D"):
            record(row(), row(id=4711, valid3D=value, visibility=0.1))  # also where a filter would drop the row


@fast
@pytest.mark.parametrize("bad", [
    dict(bbox2D_tight=[1, 2, 3]), dict(bbox2D_tight="1234"), dict(bbox2D_tight=[0, 0, float("nan"), 9]),
    dict(center_cam=[0, 0, float("inf")]), dict(visibility="full"), dict(truncation=float("nan")),
    dict(R_cam=[[1, 0], [0, 1]]), dict(name=None), dict(name=3)])
def test_a_malformed_row_is_an_error_of_one_line_that_names_it(bad):
    with pytest.raises(DataError, match="row 815") as caught:
        record(row(), row(id=815, **bad))
    assert "\n" not in str(caught.value)


@fast
def test_every_malformed_row_of_a_picture_is_named_and_ids_may_be_zero_but_not_twice():
    with pytest.raises(DataError, match="row 5.*row 6"):
        record(row(id=5, valid3D="?"), row(id=6, truncation="?"))
    with pytest.raises(DataError, match="row 0"):
        record(row(id=0), row(id=0))
    assert record(row(id=0)).objects[0].id == 0


@fast
@pytest.mark.parametrize("unclear", [
    dict(dimensions=(-1, -1, -1)), dict(dimensions=(1, 0, 1)), dict(center_cam=[-1, -1, -1]), dict(R_cam=None),
    dict(center=(0, 0, 0.4)),                                     # a corner behind the camera
    dict(R_cam=[[-1, 0, 0], [0, 1, 0], [0, 0, 1]], bbox3D_cam=None),       # a mirror
    dict(R_cam=[[1, 0.1, 0], [0, 1, 0], [0, 0, 1]], bbox3D_cam=None)])     # a shear
def test_a_3d_box_in_an_unclear_frame_is_not_trusted_but_its_2d_box_stays(unclear):
    assert record(row(**unclear)).objects[0].box3d is None


@fast
def test_dimensions_in_another_order_than_the_listed_corners_are_found_out():
    whl = (1.0, 1.5, 2.0)
    assert record(row(dimensions=whl)).objects[0].box3d is not None
    listed = corners_by_hand((0, 0, 3), (2.0, 1.5, 1.0), np.eye(3))
    assert record(row(dimensions=whl, bbox3D_cam=listed)).objects[0].box3d is None


@fast
def test_corners_and_volume_agree_with_the_definition_written_out():
    R = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    R *= np.sign(np.linalg.det(R))
    box = Box3D(np.array([0.3, -0.2, 4.0]), (1.0, 1.5, 2.0), R)
    assert np.allclose(box.corners, corners_by_hand((0.3, -0.2, 4.0), (1.0, 1.5, 2.0), R))
    edges = [np.linalg.norm(box.corners[i] - box.corners[0]) for i in (1, 3, 4)]
    assert np.allclose(edges, [2.0, 1.5, 1.0]) and np.isclose(np.prod(edges), box.volume)


@fast
def test_a_picture_too_small_or_of_unclear_up_direction_keeps_no_object_yet_counts_all():
    far = row(id=1, center=(0, 0, 6), box=(200, 100, 260, 150))
    assert len(record(row(), far).objects) == 2
    for unfit in (dict(src_flagged=True), dict(height=27), dict(width=28 * 201, height=28)):
        assert record(row(), far, **unfit).objects == () and record(row(), far, **unfit).counts == {"chair": 2}
    with pytest.raises(DataError, match="src_flagged"):
        record(row(), src_flagged="no")


# --- pairs and triples: Table 8 ------------------------------------------------------------------------------------

def pair(first=None, second=None, **kwargs):
    """Two objects that pass everything, changed as asked."""
    first = {"center": (-0.8, 0, 3.0), "box": (60, 100, 120, 160), "name": "chair", **(first or {})}
    second = {"center": (0.8, 0, 4.0), "box": (220, 100, 280, 160), "name": "table", **(second or {})}
    return record(row(id=10, **first), row(id=11, **second), **kwargs)


@cache
def iou_and_coverage(a, b):
    """By counting pixels."""
    masks = []
    for x0, y0, x1, y1 in (a, b):
        mask = np.zeros((H, W), bool)
        mask[y0:y1, x0:x1] = True
        masks.append(mask)
    both = (masks[0] & masks[1]).sum()
    return both / (masks[0] | masks[1]).sum(), both / min(masks[0].sum(), masks[1].sum())


@fast
@pytest.mark.parametrize("source, other_name, same_name", [("SUNRGBD", 0.30, 0.10), ("synthetic", 0.30, 0.10),
                                                           ("KITTI", 0.35, 0.15), ("synthetic-outdoor", 0.35, 0.15)])
def test_pairs_that_overlap_too_much_are_dropped_and_one_class_is_stricter(source, other_name, same_name):
    for name, limit in (("table", other_name), ("chair", same_name)):
        for shift in range(40, 101):  # two boxes 100 wide and 100 high, `shift` px apart
            a, b = (50, 50, 150, 150), (50 + shift, 50, 150 + shift, 150)
            pair_of_boxes = pair({"box": a}, {"box": b, "name": name}, source=source)
            expected = max(iou_and_coverage(a, b)) <= limit + 1e-9
            assert (examples(pair_of_boxes, "depth") is not None) == expected, (name, shift)
            assert (examples(pair_of_boxes, "depth", "2d") is not None) == expected


@fast
def test_a_small_box_inside_a_large_one_is_dropped_by_coverage_though_its_iou_is_small():
    assert examples(pair({"box": (20, 20, 320, 180)}, {"box": (100, 50, 130, 80)}), "depth") is None


@fast
@pytest.mark.parametrize("source, depth, volume, distance", [("SUNRGBD", 0.3, 0.5, 0.3), ("KITTI", 0.5, 1.0, 0.5)])
def test_each_task_needs_its_least_gap(source, depth, volume, distance):
    def has(task, first, second, third=None):
        rows = [row(id=i, center=center, dimensions=whl, name=f"thing {i}", box=(20 + 120 * i, 100, 80 + 120 * i, 160))
                for i, (center, whl) in enumerate(filter(None, (first, second, third)))]
        return examples(record(*rows, source=source), task) is not None

    cube = (1.0, 1.0, 1.0)
    for more, expected in ((-1e-6, False), (1e-6, True)):
        assert has("depth", ((0, 0, 3), cube), ((1, 0, 3 + depth + more), cube)) == expected
        assert has("size", ((0, 0, 3), cube), ((1, 0, 4), (1 + volume + more, 1.0, 1.0))) == expected
        assert has("abs_distance", ((0, 0, 3), cube), ((0, 0, 3 + distance + more), cube)) == expected
        # three in a row, `step` apart: from an end the others are step and 2 step away, from the middle equally far
        row_of = lambda step: [((0, 0, 3 + i * step), cube) for i in range(3)]
        assert has("distance", *row_of(distance + more)) == expected and not has("distance", *row_of(distance / 2))


@fast
def test_depth_is_to_the_nearest_corner_and_a_tie_there_is_no_example():
    """Centres 3 and 3.5 m, but the nearest faces are both at 2.5 m."""
    tie = pair({"center": (-0.8, 0, 3.0)}, {"center": (0.8, 0, 3.5), "dimensions": (2.0, 1.0, 1.0)})
    assert examples(tie, "depth") is None and examples(tie, "size") is not None


@fast
def test_orientation_needs_five_percent_of_the_width_between_the_box_centres():
    for shift, expected in ((0.05 * W - 0.5, False), (0.05 * W, True)):
        above = pair({"box": (100, 20, 160, 80)}, {"box": (100 + shift, 120, 160 + shift, 180)})
        assert all((examples(above, "orientation", select) is not None) == expected for select in ("gap", "2d"))


def random_record(seed: int, count: int = 6, image_id: int = 0, source: str = "SUNRGBD") -> Record:
    """`count` cubes; boxes of 30 to 80 px somewhere, 3D boxes unrelated to them."""
    rng = random.Random(seed)
    rows = []
    for i in rng.sample(range(1000), count):
        x, y, w, h = rng.randint(0, 300), rng.randint(0, 200), rng.randint(30, 80), rng.randint(30, 80)
        rows.append(row(id=i, name=rng.choice(["chair", "table", "lamp"]), box=(x, y, x + w, y + h),
                        center=(rng.uniform(-2, 2), rng.uniform(-1, 1), rng.uniform(2, 6)),
                        dimensions=[rng.uniform(0.3, 1.5) for _ in range(3)]))
    return record(*rows, id=image_id, source=source)


def best_by_brute_force(r: Record, task: str, select: str) -> frozenset | None:
    """The spec's rule again, over all ordered groups and with IoU and coverage from counted pixels."""
    least = {"orientation": 0.05 * r.width, "depth": 0.3, "size": 0.5, "distance": 0.3, "abs_distance": 0.3}[task]
    best = None
    for group in itertools.permutations(r.objects, 3 if task == "distance" else 2):
        if any(max(iou_and_coverage(a.box2d, b.box2d)) > (0.1 if a.name == b.name else 0.3)
               for a, b in itertools.combinations(group, 2)):
            continue
        a, b, c = (*group, group[0])[:3]
        apart = lambda p, q: float(np.linalg.norm(p.box3d.center - q.box3d.center))
        nearest = lambda o: np.array(corners_by_hand(o.box3d.center, o.box3d.dimensions, o.box3d.R))[:, 2].min()
        measure = {"orientation": lambda: np.mean(a.box2d[::2]) - np.mean(b.box2d[::2]),
                   "depth": lambda: nearest(a) - nearest(b),
                   "size": lambda: np.prod(a.box3d.dimensions) - np.prod(b.box3d.dimensions),
                   "distance": lambda: apart(a, b) - apart(a, c), "abs_distance": lambda: apart(a, b)}[task]
        difference = abs(measure()) / least if select == "gap" or task == "orientation" else 1.0
        area = sum((o.box2d[2] - o.box2d[0]) * (o.box2d[3] - o.box2d[1]) for o in group)
        if difference >= 1 and (best is None or (difference, area) > best[0]):
            best = ((difference, area), group)
    if best is None:
        return None
    group = best[1]
    anchor = group[0].id if task == "distance" and select == "gap" else None
    return anchor, frozenset(o.id for o in group)


@fast
@pytest.mark.parametrize("select", ["gap", "2d"])
@pytest.mark.parametrize("task", [t for t in TASKS if t != "counting"])
def test_the_example_is_the_one_that_brute_force_finds(task, select):
    found = 0
    for seed in range(15):
        r = random_record(seed)
        example = examples(r, task, select)
        expected = best_by_brute_force(r, task, select)
        assert (example is None) == (expected is None)
        if example is not None:
            found += 1
            anchor, ids = expected
            assert frozenset(example.object_ids) == ids and len(example.object_ids) == len(ids)
            assert anchor is None or example.object_ids[0] == anchor
    assert found >= 6


@fast
def test_the_sign_of_the_gap_says_left_closer_bigger():
    left_near_big = Object(1, "a", (0, 0, 40, 40), Box3D(np.array([0.0, 0, 2]), (1.2, 1.0, 1.0), np.eye(3)))
    right_far_small = Object(2, "b", (100, 0, 140, 40), Box3D(np.array([0.0, 0, 5]), (0.5, 0.5, 0.5), np.eye(3)))
    between = Object(3, "c", (50, 0, 90, 40), Box3D(np.array([0.0, 0, 3]), (0.5, 0.5, 0.5), np.eye(3)))
    assert gap("orientation", (left_near_big, right_far_small)) == 100
    assert gap("depth", (left_near_big, right_far_small)) == pytest.approx(4.75 - 1.4)  # the width lies along z
    assert gap("size", (left_near_big, right_far_small)) == pytest.approx(1.2 - 0.125)
    assert gap("abs_distance", (left_near_big, right_far_small)) == pytest.approx(3.0)
    assert gap("distance", (left_near_big, between, right_far_small)) == pytest.approx(3.0 - 1.0)
    for task in ("orientation", "depth", "size"):
        assert gap(task, (right_far_small, left_near_big)) == -gap(task, (left_near_big, right_far_small))


@fast
def test_two_d_selection_never_touches_a_3d_box_and_gap_selection_needs_one():
    class Forbidden:
        def __getattr__(self, name):
            raise AssertionError("3D was read")

    r = random_record(3)
    plain = {t: examples(r, t, "2d") for t in TASKS}
    objects = tuple(Object(o.id, o.name, o.box2d, Forbidden()) for o in r.objects)
    sealed = Record(r.image_id, r.source, W, H, None, objects, r.counts, r.load)
    without = record(*[{"id": o.id, "category_name": o.name, "bbox2D_tight": list(o.box2d)} for o in r.objects], K=None)
    for task in TASKS:
        for other in (sealed, without):
            example = examples(other, task, "2d")
            assert (example and example.object_ids) == (plain[task] and plain[task].object_ids)
        assert examples(without, task, "gap") is None
    assert without.K is None and sum(example is not None for example in plain.values()) >= 5


@fast
def test_the_order_of_the_objects_does_not_tell_the_answer_nor_depends_on_the_file():
    for task in ("orientation", "depth", "size", "distance"):
        for select in ("gap", "2d"):
            # ids grow with depth and from left to right, as in a file sorted by its annotator
            signs = []
            for image_id in range(150):
                rows = [row(id=i, name=f"thing {i}", box=(20 + 120 * i, 100, 80 + 120 * i, 160),
                            center=(i - 1, 0, 2.5 + i ** 1.5), dimensions=(1 + 0.6 * i, 1, 1)) for i in range(3)]
                chosen = examples(record(*rows, id=image_id), task, select)
                signs.append(gap(task, chosen.objects) > 0)
                assert examples(record(*rows[::-1], id=image_id), task, select).object_ids == chosen.object_ids
            assert abs(np.mean(signs) - 0.5) < 0.16, (task, select)  # four standard deviations


@fast
def test_unknown_tasks_and_selections_are_refused():
    for task, select in (("colour", "gap"), ("depth", "3d")):
        with pytest.raises(ValueError):
            examples(random_record(0), task, select)


# --- counting ------------------------------------------------------------------------------------------------------

def crowd(count, name="chair", first_id=0, **last):
    """`count` instances side by side; the last one is changed."""
    boxes = [(10 + 60 * i, 100, 50 + 60 * i, 140) for i in range(count)]
    rows = [row(id=first_id + i, name=name, box=box) for i, box in enumerate(boxes[:-1])]
    return rows + [row(id=first_id + count - 1, name=name, box=boxes[-1], **last)]


@fast
def test_counting_asks_for_a_class_of_two_to_five_with_no_instance_filtered_out():
    for count in range(1, 7):
        example = examples(record(*crowd(count)), "counting")
        assert (example is not None) == (2 <= count <= 5)
        if example:
            assert gap("counting", example.objects) == count == len(set(example.object_ids))
    for hidden in (dict(visibility=0.2), dict(truncation=0.9), dict(behind_camera=True), dict(bbox2D_tight=[-1] * 4)):
        assert examples(record(*crowd(3, **hidden)), "counting") is None
    hiding = row(id=9, name="dontcare", valid3D=False)  # a region in which chairs were left unlabelled
    assert examples(record(*crowd(3), hiding), "counting") is None
    assert examples(record(*crowd(3, valid3D=False)), "counting") is None
    assert len(examples(record(*crowd(3, valid3D=False)), "counting", "2d").object_ids) == 3
    both = examples(record(*crowd(2, "table"), *crowd(4, "chair", 10)), "counting")
    assert {o.name for o in both.objects} == {"chair"}


# --- splits --------------------------------------------------------------------------------------------------------

@fast
def test_the_split_is_disjoint_complete_a_fifth_and_the_same_in_every_process():
    records = [record(id=i) for i in range(3000)]
    train, test = ({r.image_id for r in split(records, which)} for which in ("train", "test"))
    assert not train & test and len(train | test) == 3000 and abs(len(test) / 3000 - 0.2) < 0.03
    assert len(split(records, "all")) == 3000 and {r.image_id for r in split(records[::-1], "test")} == test
    code = ("from data import *; rs = [Record(i, 'KITTI', 99, 99, None, (), {}, None) for i in range(3000)];"
            "print(sorted(r.image_id for r in split(rs, 'test')))")
    for seed in ("1", "2"):
        out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed},
                             capture_output=True, text=True, check=True).stdout
        assert json.loads(out) == sorted(test)
    with pytest.raises(ValueError):
        split(records, "dev")


# --- folders -------------------------------------------------------------------------------------------------------

def write(folder: Path, name: str, images, rows, info={"name": "SUNRGBD_train"}):
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    categories = [{"id": 0, "name": "pedestrian"}]
    content = {"info": info, "images": images, "annotations": rows, "categories": categories}
    (folder / "annotations" / name).write_text(json.dumps(content))


def image(id=0, path=None, **other):
    K = [[300, 0, 200], [0, 300, 150], [0, 0, 1]]
    return {"id": id, "width": W, "height": H, "file_path": path or f"{id}.png", "K": K, **other}


@fast
def test_a_file_with_id_zero_a_listed_info_a_doubled_slash_and_no_category_name_is_read(tmp_path):
    nameless = row(id=0)
    del nameless["category_name"]
    write(tmp_path, "a.json", [image(0, "/SUNRGBD//kv1///x.png")], [nameless], info=[{"name": "SUNRGBD_val"}])
    (tmp_path / "SUNRGBD/kv1").mkdir(parents=True)
    Image.new("RGB", (W, H), "red").save(tmp_path / "SUNRGBD/kv1/x.png")
    (r,) = load_omni3d(tmp_path)
    assert (r.source, r.image_id, r.objects[0].id, r.objects[0].name) == ("SUNRGBD", 0, 0, "pedestrian")
    assert r.load().getpixel((5, 5)) == (255, 0, 0) and r.load().size == (W, H)


@fast
def test_all_files_of_a_source_are_joined_and_the_source_comes_from_info_or_file_name(tmp_path):
    write(tmp_path, "train.json", [image(1)], [], info={"name": "SUNRGBD_train"})
    write(tmp_path, "Omni3D_SUNRGBD_val.json", [image(2)], [], info={})
    write(tmp_path, "KITTI_test.json", [image(3)], [], info=[{}])
    write(tmp_path, "holiday.json", [image(4)], [], info={"name": "my photos"})
    (tmp_path / "annotations/Hypersim_train.json").write_text("not even JSON: it is never opened")
    (tmp_path / "annotations/stats.json").write_text('{"n_ims": 3}')
    ids = lambda *sources: {r.image_id for r in load_omni3d(tmp_path, *sources)}
    assert ids(("SUNRGBD",)) == {1, 2} and ids(("KITTI",)) == {3} and ids(("own",)) == {4} and ids() == {1, 2, 3, 4}
    (tmp_path / "annotations").rename(tmp_path / "Omni3D")
    assert ids() == {1, 2, 3, 4}


@fast
def test_what_is_wrong_with_a_folder_is_said_in_one_line_with_file_and_row(tmp_path):
    def message(folder, **kwargs):
        with pytest.raises(DataError) as caught:
            load_omni3d(folder, **kwargs)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "nowhere" in message(tmp_path / "nowhere")
    write(tmp_path / "a", "SUNRGBD.json", [image(1)], [row(id=8, valid3D="maybe") | {"image_id": 1}])
    assert "SUNRGBD.json" in message(tmp_path / "a") and "row 8: valid3D" in message(tmp_path / "a")
    assert "KITTI" in message(tmp_path / "a", sources=("KITTI",))
    errors = []
    assert load_omni3d(tmp_path / "a", errors=errors) == [] and "row 8" in errors[0]
    write(tmp_path / "b", "SUNRGBD.json", [image(1)], [row(id=9) | {"image_id": 77}])
    assert "row 9" in message(tmp_path / "b") and "77" in message(tmp_path / "b")
    write(tmp_path / "c", "SUNRGBD_train.json", [image(5)], [])
    write(tmp_path / "c", "SUNRGBD_val.json", [image(5)], [])
    assert "SUNRGBD_val.json: image 5" in message(tmp_path / "c")
    for text in ("{", "[]", '{"images": 3, "annotations": []}', '{"images": [1], "annotations": []}'):
        (tmp_path / "b/annotations/SUNRGBD.json").write_text(text)
        assert "SUNRGBD.json" in message(tmp_path / "b")


BIG = """
import json, resource, sys, time
sys.path.insert(0, {root!r})
from data import load_omni3d, examples
start = time.process_time()
records = load_omni3d({folder!r})
seconds = time.process_time() - start
print(json.dumps([len(records), sum(len(r.objects) for r in records), seconds,
                  resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20]))
"""


def test_ten_thousand_pictures_load_in_seconds_and_under_two_gigabytes(tmp_path):
    eight = [row(box=(40 * j, 100, 40 * j + 38, 150), center=(j - 4.1, 0.1, 3.1 + j)) for j in range(8)]
    rows = [eight[j] | {"id": 8 * i + j, "image_id": i} for i in range(10_000) for j in range(8)]
    write(tmp_path, "SUNRGBD_train.json", [image(i) for i in range(10_000)], rows)
    script = BIG.format(root=str(ROOT), folder=str(tmp_path))
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    pictures, objects, seconds, gigabytes = json.loads(out)
    assert (pictures, objects) == (10_000, 80_000) and seconds < 40 and gigabytes < 2


# --- pictures: requirements 16, 17, 18 -----------------------------------------------------------------------------

def saved(path: Path, picture: Image.Image, **options) -> Path:
    picture.save(path, **options)
    return path


def half_transparent(mode: str) -> Image.Image:
    """40x40: the left half opaque black, the right half fully transparent black."""
    picture = Image.new("RGBA", (40, 40), (0, 0, 0, 255))
    picture.paste((0, 0, 0, 0), (20, 0, 40, 40))
    if mode != "P":
        return picture.convert(mode)
    palette = Image.new("P", (40, 40), 0)
    palette.putpalette([0, 0, 0, 9, 9, 9] + [0] * 762)
    palette.paste(1, (20, 0, 40, 40))
    return palette


@fast
def test_every_common_mode_becomes_8_bit_rgb_with_transparency_over_white(tmp_path):
    for mode in ("LA", "RGBA", "P"):
        options = {"transparency": 1} if mode == "P" else {}
        rgb = open_image(saved(tmp_path / f"{mode}.png", half_transparent(mode), **options))
        assert (rgb.mode, rgb.getpixel((5, 5)), rgb.getpixel((35, 5))) == ("RGB", (0, 0, 0), (255, 255, 255)), mode
    assert open_image(saved(tmp_path / "L.png", Image.new("L", (40, 40), 77))).getpixel((0, 0)) == (77, 77, 77)
    assert open_image(saved(tmp_path / "1.png", Image.new("1", (40, 40), 1))).getpixel((0, 0)) == (255, 255, 255)
    red = open_image(saved(tmp_path / "cmyk.tif", Image.new("CMYK", (40, 40), (0, 255, 255, 0)))).getpixel((0, 0))
    assert red[0] > 200 and max(red[1:]) < 60
    blended = Image.new("RGBA", (40, 40), (255, 0, 0, 128))
    assert open_image(saved(tmp_path / "soft.png", blended)).getpixel((0, 0)) == (255, 127, 127)


@fast
@pytest.mark.parametrize("name", ["deep.png", "deep.tif"])
def test_16_bit_grey_is_scaled_not_saturated(tmp_path, name):
    ramp = np.linspace(0, 65535, 40 * 40).astype(np.uint16).reshape(40, 40)
    got = np.asarray(open_image(saved(tmp_path / name, Image.fromarray(ramp))))[..., 0]
    assert np.abs(got - ramp / 257).max() <= 0.5 and len(np.unique(got)) == 256
    wide = saved(tmp_path / "wide.tif", Image.fromarray(np.full((40, 40), 70000, np.int32)))
    with pytest.raises(DataError, match="wide.tif"):
        open_image(wide)
    with pytest.raises(DataError, match="float.tif"):
        open_image(saved(tmp_path / "float.tif", Image.fromarray(np.zeros((40, 40), np.float32))))


@fast
def test_the_exif_orientation_is_applied_and_the_size_must_be_the_annotations(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: shown upright, 60x40 becomes 40x60
    saved(tmp_path / "0.png", Image.new("RGB", (60, 40)), exif=exif)
    assert open_image(tmp_path / "0.png").size == (40, 60)
    write(tmp_path, "SUNRGBD.json", [image(0, width=40, height=60), image(1, "0.png", width=60, height=40)], [])
    upright, lying = load_omni3d(tmp_path)
    assert upright.load().size == (40, 60)
    with pytest.raises(DataError, match="0.png is 40x60 but its annotation says 60x40"):
        lying.load()


@fast
def test_pictures_too_small_or_too_narrow_for_the_model_are_refused_by_one_rule(tmp_path):
    sizes = {(1, 1): False, (16, 16): False, (332, 27): False, (28, 28): True, (28, 5600): True, (28, 5601): False}
    for size, fine in sizes.items():
        path = saved(tmp_path / "x.png", Image.new("RGB", size))
        assert (size_problem(*size) is None) == fine
        assert (bad_pictures([lambda: open_image(path)]) == [None]) == fine


@pytest.fixture
def eight(tmp_path) -> Path:
    """Eight pictures of two chairs: half a JPEG, an empty file, HTML named .jpg, a missing one, four good ones."""
    whole = io.BytesIO()
    Image.effect_noise((W, H), 60).convert("RGB").save(whole, "JPEG")
    content = {f"good{i}.jpg": whole.getvalue() for i in range(4)}
    content |= {"half.jpg": whole.getvalue()[: len(whole.getvalue()) // 2], "empty.jpg": b"",
                "page.jpg": b"<!DOCTYPE html><html><body>404 Not Found</body></html>"}
    for name, blob in content.items():
        (tmp_path / name).write_bytes(blob)
    names = sorted(content) + ["missing.jpg"]
    rows = [row(id=10 * i + j, box=(40 + 150 * j, 100, 100 + 150 * j, 160), center=(j, 0, 3 + j)) | {"image_id": i}
            for i in range(8) for j in range(2)]
    write(tmp_path, "SUNRGBD.json", [image(i, name) for i, name in enumerate(names)], rows)
    return tmp_path


BAD = ("half.jpg", "empty.jpg", "page.jpg", "missing.jpg")


@fast
def test_bad_files_are_all_found_beforehand_and_raise_by_name_later(eight):
    records = load_omni3d(eight)
    problems = dict(zip((Path(r.load.path).name for r in records), bad_pictures([r.load for r in records])))
    assert {name for name, problem in problems.items() if problem} == set(BAD) and len(problems) == 8
    for r in records:
        name = Path(r.load.path).name
        if name in BAD:
            with pytest.raises(DataError, match=name):
                r.load()
        else:
            assert r.load().size == (W, H)
    assert len({problems[name].split(".jpg")[1] for name in BAD}) == 4  # four different reasons


def run_check(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "data.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)


@fast
def test_the_check_lists_bad_pictures_and_exits_0_while_some_are_usable(eight):
    done = run_check("--check", eight)
    assert done.returncode == 0 and not done.stderr
    assert all(name in done.stdout for name in BAD) and "good" not in done.stdout
    assert "SUNRGBD: 4 pictures" in done.stdout and "True 50 % by construction" in done.stdout


@fast
@pytest.mark.parametrize("fault", ["no folder", "malformed row", "no example", "abbreviation"])
def test_the_check_exits_2_with_a_line_on_stderr_where_the_folder_is_unusable(eight, fault):
    folder = eight / "nowhere" if fault == "no folder" else eight
    if fault == "malformed row":
        write(eight, "SUNRGBD_more.json", [image(90, "good0.jpg"), image(91, "good1.jpg")],
              [row(id=901, valid3D="maybe") | {"image_id": 90}, row(id=902, valid3D=7) | {"image_id": 91}])
    if fault == "no example":
        for path in eight.glob("*.jpg"):
            path.unlink()
    done = run_check("--chec" if fault == "abbreviation" else "--check", folder)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    if fault == "malformed row":
        assert "row 901" in done.stdout and "row 902" in done.stdout


@fast
def test_without_arguments_the_usage_is_printed():
    done = run_check()
    assert done.returncode == 0 and "--check FOLDER" in done.stdout


@fast
def test_the_best_constant_answer_to_counts_of_two_to_five_is_three_and_scores_07125():
    assert check.best_constant([2, 3, 4, 5]) == (3.0, pytest.approx(0.7125))
    truths = np.random.default_rng(0).lognormal(size=150)
    dense = max(np.mean(np.maximum(0, 1 - np.abs(c - truths) / truths)) for c in np.linspace(0.01, 5, 5000))
    assert check.best_constant(list(truths))[1] == pytest.approx(dense, abs=2e-3)


# --- real photos ---------------------------------------------------------------------------------------------------

def iou_of(a, b) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    both = max(0, width) * max(0, height)
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


@needs_mini
@fast
def test_real_3d_boxes_project_onto_their_2d_boxes_and_meet_their_listed_corners():
    listed = {a["id"]: a["bbox3D_cam"] for path in (MINI / "annotations").glob("*.json")
              for a in json.loads(path.read_text())["annotations"]}
    overlaps = {"KITTI": [], "SUNRGBD": []}
    for r in load_omni3d(MINI):
        for o in r.objects:
            assert np.allclose(o.box3d.corners, listed[o.id], atol=1e-4)
            pixels = o.box3d.corners @ r.K.T
            pixels = np.clip(pixels[:, :2] / pixels[:, 2:], 0, (r.width, r.height))
            overlaps[r.source].append(iou_of((*pixels.min(0), *pixels.max(0)), o.box2d))
    assert len(overlaps["KITTI"]) == 128 and np.median(overlaps["KITTI"]) > 0.9 and min(overlaps["KITTI"]) > 0.4
    assert len(overlaps["SUNRGBD"]) == 16 and np.median(overlaps["SUNRGBD"]) > 0.6


@needs_mini
@fast
def test_real_photos_give_these_examples():
    records = load_omni3d(MINI)
    assert Counter(r.source for r in records) == {"KITTI": 46, "SUNRGBD": 4}
    counts = Counter((e.record.source, e.task) for r in records for t in TASKS if (e := examples(r, t)))
    # KITTI has no counting example: nearly every frame has dontcare regions, in which more may hide
    assert [counts["KITTI", t] for t in TASKS] == [23, 23, 20, 18, 0, 23]
    assert [counts["SUNRGBD", t] for t in TASKS] == [4, 4, 2, 2, 1, 4]
    assert not any(problem for problem in bad_pictures([r.load for r in records]))


@needs_mini
def test_the_check_of_real_photos_exits_0():
    done = run_check("--check", MINI)
    assert done.returncode == 0 and "KITTI: 46 pictures" in done.stdout and "malformed rows: none" in done.stdout
