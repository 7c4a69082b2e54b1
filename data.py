"""Records and examples: what a picture holds, and which objects a question is about (appendix D).

Frames: 2D boxes are (x0, y0, x1, y1) in pixel edges of the picture as it is (x right, y down). 3D boxes are in the
camera frame in metres: x right, y down, z forward. A 3D box's own axes carry (length, height, width) along (x, y, z).

An Omni3D row becomes an `Object` if it passes the single-object filters (D.3), and `examples` picks at most one pair,
triple or class per picture and task: the one with the largest gap, in units of the least gap allowed (Table 8).
**That choice reads the 3D boxes**, as the paper's does, though no answer enters training. `select="2d"` reads only 2D
boxes and names: the same rule without the gap, so that pictures with a detector's boxes alone can be trained on.
Ours: the single-object thresholds (Table 7 is lost), orientation's least gap, and everything about counting.

    python data.py --check FOLDER     # lists unusable rows and pictures, counts examples, prints class balance
    records = split(load_omni3d("data/omni3d", ("SUNRGBD",)), "train")
    example = examples(records[0], "depth")     # None where the picture holds no unambiguous pair
"""
from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Callable, Iterable

import numpy as np
from PIL import Image

from images import DataError, Picture, size_problem
from omni3d import SOURCES, flag, numbers, read_folder, unknown_or, whole

BOOLEAN_TASKS = ("orientation", "depth", "size", "distance")
NUMERIC_TASKS = ("counting", "abs_distance")
TASKS = BOOLEAN_TASKS + NUMERIC_TASKS

# Signs of the eight corners along the box's own axes, Omni3D's order: 0 1 4 5 is the top (y is down).
CORNER_SIGNS = np.array([[-1, -1, -1], [1, -1, -1], [1, 1, -1], [-1, 1, -1],
                         [-1, -1, 1], [1, -1, 1], [1, 1, 1], [-1, 1, 1]], dtype=float)  # (8, 3)


@dataclass(frozen=True, eq=False)
class Box3D:
    """An oriented cuboid in the camera frame: `center` (3,) metres, `dimensions` (w, h, l) metres, `R` (3, 3)."""
    center: np.ndarray
    dimensions: tuple[float, float, float]
    R: np.ndarray

    @cached_property
    def corners(self) -> np.ndarray:
        """(8, 3) corners in metres, Omni3D's order: R @ (signs * (l, h, w) / 2) + center."""
        w, h, l = self.dimensions
        return (CORNER_SIGNS * (np.array([l, h, w]) / 2)) @ self.R.T + self.center  # (8, 3)

    @property
    def volume(self) -> float:
        """w * h * l in cubic metres."""
        w, h, l = self.dimensions
        return w * h * l


@dataclass(frozen=True, eq=False)
class Object:
    """One named thing in a picture; `box3d` is None where the annotation has no valid 3D box."""
    id: int
    name: str
    box2d: tuple[float, float, float, float]
    box3d: Box3D | None


@dataclass(frozen=True, eq=False)
class Record:
    """One picture and its usable objects; the pixels are read only when `load()` is called."""
    image_id: int
    source: str                    # SUNRGBD, KITTI, synthetic or synthetic-outdoor
    width: int                     # pixels
    height: int
    K: np.ndarray | None           # (3, 3) pinhole intrinsics of the picture, in pixels
    objects: tuple[Object, ...]    # those that pass the single-object filters
    counts: dict[str, int]         # instances of each class in the file, usable or not (counting needs all usable)
    load: Callable[[], Image.Image]


@dataclass(frozen=True, eq=False)
class Example:
    """A picture, a task and the objects asked about, in order (object 1, 2, 3; for counting: every instance)."""
    id: str
    record: Record
    task: str
    object_ids: tuple[int, ...]

    @property
    def objects(self) -> tuple[Object, ...]:
        by_id = {o.id: o for o in self.record.objects}
        return tuple(by_id[i] for i in self.object_ids)


# ---- From annotation rows to a record: the single-object filters of D.3 ----------------------------------------------

MIN_VISIBILITY = 0.5   # fraction; unknown passes
MAX_TRUNCATION = 0.35  # fraction; unknown passes
MIN_SIDE_2D = 25       # pixels of the picture as it is: the 2D box's shorter side
MAX_AREA_2D = 0.45     # fraction of the picture
IGNORED_NAMES = ("dontcare", "ignore", "void")  # regions where things were left unlabelled, not things


def parse_box2d(row: dict, width: int, height: int) -> tuple[float, float, float, float] | None:
    """The annotated box, else the projected one cut to the picture, else the projected one: clipped in any case."""
    for key in ("bbox2D_tight", "bbox2D_trunc", "bbox2D_proj"):
        box = numbers(row, key, 4)
        if box is not None:
            x0, y0, x1, y1 = box
            return (min(max(x0, 0.0), width), min(max(y0, 0.0), height),
                    min(max(x1, 0.0), width), min(max(y1, 0.0), height))
    return None


def is_rotation(a, b, c, d, e, f, g, h, i) -> bool:
    """Whether [[a b c] [d e f] [g h i]] is: orthogonal unit rows, the third the cross product of the others."""
    off = (a * a + b * b + c * c - 1, d * d + e * e + f * f - 1, a * d + b * e + c * f,
           b * f - c * e - g, c * d - a * f - h, a * e - b * d - i)
    return max(map(abs, off)) < 0.02


def parse_box3d(row: dict) -> Box3D | None:
    """The 3D box where `valid3D` promises one and its frame is clear, else None."""
    if not flag(row, "valid3D"):
        return None  # what the other 3D fields hold then is meaningless
    center, dimensions, R = (numbers(row, *field) for field in (("center_cam", 3), ("dimensions", 3), ("R_cam", 9)))
    if center is None or dimensions is None or R is None or min(dimensions) <= 0:
        return None
    box = Box3D(np.array(center), tuple(dimensions), np.array(R).reshape(3, 3))
    corners = box.corners  # (8, 3)
    # Unclear frames: a shear or a mirror where a rotation should be; a corner behind the camera that `behind_camera`
    # does not know of; listed corners that are not this box (the usual slip: dimensions in another order).
    if not is_rotation(*R) or corners[:, 2].min() <= 0:
        return None
    listed = numbers(row, "bbox3D_cam", 24)
    if listed is not None and np.abs(corners.ravel() - listed).max() > 0.02 * sum(dimensions):
        return None
    return box


def parse_object(row: dict, width: int, height: int) -> Object | None:
    """One annotation row as an `Object`, or None where a single-object filter drops it. A malformed row raises."""
    flag(row, "valid3D")  # read strictly even where another filter drops the row
    if flag(row, "behind_camera") or row["category_name"].lower() in IGNORED_NAMES:
        return None
    clear = unknown_or(row, "visibility", lambda v: v >= MIN_VISIBILITY)
    whole_enough = unknown_or(row, "truncation", lambda t: t <= MAX_TRUNCATION)
    box2d = parse_box2d(row, width, height)
    if box2d is None or not clear or not whole_enough:
        return None
    x0, y0, x1, y1 = box2d
    if min(x1 - x0, y1 - y0) < MIN_SIDE_2D or (x1 - x0) * (y1 - y0) > MAX_AREA_2D * width * height:
        return None
    return Object(row["id"], row["category_name"], box2d, parse_box3d(row))


def parse_record(image: dict, annotations: list[dict], source: str, load: Callable[[], Image.Image]) -> Record:
    """One Omni3D `image` with its annotation rows as a `Record`; objects by ascending id, whatever the file's order.

    A picture that is too small for the model, or whose up direction is in doubt (`src_flagged`), keeps no object.
    """
    width, height, K = whole(image, "width"), whole(image, "height"), numbers(image, "K", 9)
    objects, errors = {}, []
    for row in annotations:
        try:
            if whole(row, "id") in objects or type(row.get("category_name")) is not str:
                raise DataError(f"row {row['id']}: needs a category_name, and an id of its own")
            objects[row["id"]] = parse_object(row, width, height)
        except DataError as error:
            errors.append(str(error))
    if errors:
        raise DataError("; ".join(errors))
    hidden = flag(image, "src_flagged") or size_problem(width, height)
    usable = () if hidden else tuple(objects[i] for i in sorted(objects) if objects[i] is not None)
    return Record(whole(image, "id"), source, width, height, None if K is None else np.array(K).reshape(3, 3), usable,
                  dict(Counter(row["category_name"] for row in annotations)), load)


# ---- From a record to an example: the pair and triple filters of D.3, Table 8 ----------------------------------------

@dataclass(frozen=True)
class Limits:
    """One column of Table 8: the most overlap (IoU and coverage alike) and the least gap of each task."""
    overlap: float             # any two objects
    same_class_overlap: float  # two of one name, which are easier to mistake for one another
    gap: dict[str, float]      # metres, cubic metres for size, a fraction of the picture's width for orientation


OF_ALL = dict(orientation=0.05, counting=2)
KITTI_LIMITS = Limits(0.35, 0.15, dict(OF_ALL, depth=0.5, size=1.0, distance=0.5, abs_distance=0.5))
SUNRGBD_LIMITS = Limits(0.30, 0.10, dict(OF_ALL, depth=0.3, size=0.5, distance=0.3, abs_distance=0.3))
MAX_COUNT = 5


def limits_of(source: str) -> Limits:
    """Outdoors KITTI's column, indoors (and for pictures of one's own) SUN RGB-D's."""
    return KITTI_LIMITS if source in ("KITTI", "synthetic-outdoor") else SUNRGBD_LIMITS


def gap(task: str, objects: tuple[Object, ...]) -> float:
    """The signed difference that the task is about (D.2), in the picture as annotated.

    Positive means: object 1 is left of | closer to the camera than | bigger than object 2; for distance, object 2 is
    closer to object 1 than object 3 is. abs_distance gives metres between the centres, counting the number of objects.
    """
    if task == "counting":
        return float(len(objects))
    first, second = objects[0], objects[1]
    if task == "orientation":  # pixels; the only boolean task that needs no 3D
        return (second.box2d[0] + second.box2d[2] - first.box2d[0] - first.box2d[2]) / 2
    if task == "depth":        # metres, to the nearest of the eight corners: an object may extend towards the camera
        return float(second.box3d.corners[:, 2].min() - first.box3d.corners[:, 2].min())
    if task == "size":         # cubic metres
        return first.box3d.volume - second.box3d.volume
    near = math.dist(first.box3d.center, second.box3d.center)
    return near if task == "abs_distance" else math.dist(first.box3d.center, objects[2].box3d.center) - near


def distinct(a: Object, b: Object, limits: Limits) -> bool:
    """Whether two objects overlap little enough to be told apart, by coverage: intersection over the smaller 2D box.

    Table 8 bounds IoU too, by the same numbers; IoU <= coverage, so that bound never decides.
    """
    (ax0, ay0, ax1, ay1), (bx0, by0, bx1, by1) = a.box2d, b.box2d
    both = max(0.0, min(ax1, bx1) - max(ax0, bx0)) * max(0.0, min(ay1, by1) - max(ay0, by0))
    limit = limits.same_class_overlap if a.name == b.name else limits.overlap
    return both <= limit * min((ax1 - ax0) * (ay1 - ay0), (bx1 - bx0) * (by1 - by0))


def groups(record: Record, task: str, objects: list[Object], limits: Limits) -> Iterable[tuple[Object, ...]]:
    """Every group of objects that the task may ask about: pairs, anchor-first triples, or all instances of a class."""
    if task == "counting":
        if any(name.lower() in IGNORED_NAMES for name in record.counts):
            return  # instances may hide in the unlabelled region
        for name in sorted({o.name for o in objects}):
            instances = tuple(o for o in objects if o.name == name)
            if len(instances) == record.counts[name] <= MAX_COUNT:  # one filtered out would make the count ambiguous
                yield instances
        return
    apart = {(a.id, b.id) for a, b in combinations(objects, 2) if distinct(a, b, limits)}
    for group in combinations(objects, 3 if task == "distance" else 2):
        if all((a.id, b.id) in apart for a, b in combinations(group, 2)):
            yield group
            if task == "distance":  # the other two anchors
                yield group[1], group[0], group[2]
                yield group[2], group[0], group[1]


def hashed(*key) -> float:
    """A number in [0, 1) that depends on the key alone: the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=6).digest(), "big") / 2 ** 48


def examples(record: Record, task: str, select: str = "gap") -> Example | None:
    """The picture's one example for this task, or None.

    `gap` (the paper): of the valid groups the one with the largest gap in units of the least gap, ties by 2D area; a
    group below the least gap, such as a depth tie, is no example. `2d`: by 2D area alone, except where the gap itself
    is 2D (orientation, counting); it never looks at a 3D box. The order within the example is by a hash of the ids, so
    that "object 1" is not the nearer one more often than not (the anchor stays first; `2d` draws it by that hash).
    """
    if task not in TASKS or select not in ("gap", "2d"):
        raise ValueError(f"task {task!r} must be one of {TASKS} and select {select!r} one of gap, 2d")
    limits = limits_of(record.source)
    least = limits.gap[task] * (record.width if task == "orientation" else 1)
    measured = select == "gap" or task in ("orientation", "counting")
    best, best_score = None, (1.0, 0.0)  # a gap below the least one, a ratio under 1, never wins
    for group in groups(record, task, [o for o in record.objects if select == "2d" or o.box3d is not None], limits):
        area = sum((o.box2d[2] - o.box2d[0]) * (o.box2d[3] - o.box2d[1]) for o in group)
        score = (abs(gap(task, group)) / least if measured else 1.0, area)
        if score > best_score:
            best, best_score = group, score
    if best is None:
        return None
    anchors = 1 if task == "distance" and select == "gap" else 0
    ids = [o.id for o in best]
    ids[anchors:] = sorted(ids[anchors:], key=lambda i: hashed("order", record.image_id, i))
    return Example(f"{record.source}:{record.image_id}:{task}:{'-'.join(map(str, ids))}", record, task, tuple(ids))


# ---- From a folder to records ----------------------------------------------------------------------------------------

def load_omni3d(folder: str | Path, sources: tuple[str, ...] = SOURCES, errors: list | None = None) -> list[Record]:
    """The records of all annotation files of these sources, joined; pictures (FOLDER/file_path) are not opened yet.

    A malformed row raises a DataError. Given a list of `errors`, the messages go there and those pictures are left out.
    """
    records, seen = [], set()
    for path, source, image, rows in read_folder(folder, sources):
        try:
            if whole(image, "id") in seen or type(image.get("file_path")) is not str:
                raise DataError(f"image {image['id']}: needs a file_path, and an id that no image of any file has")
            seen.add(image["id"])
            file = Path(folder) / image["file_path"].lstrip("/")  # Path also mends SUN RGB-D's doubled slashes
            picture = Picture(str(file), whole(image, "width"), whole(image, "height"))
            records.append(parse_record(image, rows, source, picture))
        except DataError as error:
            if errors is None:
                raise DataError(f"{path}: {error}") from None
            errors.append(f"{path}: {error}")
    return records


def split(records: list[Record], which: str) -> list[Record]:
    """`train` (80 %), `test` (20 %) or `all`, by a hash of the image id: a picture is never in both."""
    if which not in ("train", "test", "all"):
        raise ValueError(f"split {which!r} must be train, test or all")
    return [r for r in records if which == "all" or (hashed("split", r.image_id) < 0.2) == (which == "test")]


if __name__ == "__main__":
    from check import main

    raise SystemExit(main())
