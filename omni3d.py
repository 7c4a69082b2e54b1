"""The Omni3D annotation format (Brazil et al., CVPR 2023), read strictly: its values, its files and its folders.

A file is `{"info", "images", "categories", "annotations"}`. -1 means "not known", never a measurement; ids start at 0;
`info` may be a list of one dict. A value that is neither good nor a sentinel is an error that names its row: a typing
slip must not become a label. What the rows mean is data.py's part.

    for path, source, image, rows in read_folder("data/omni3d", ("SUNRGBD",)): ...
    python omni3d.py FOLDER     # prints what its annotation files hold
"""
from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Callable, Iterator

from images import DataError

SOURCES = ("SUNRGBD", "KITTI", "own")  # own: files that name none of Omni3D's sets, somebody's own pictures
OTHER_SOURCES = ("Hypersim", "ARKitScenes", "Objectron", "nuScenes")  # in Omni3D's zip too, not used here


def flag(row: dict, key: str) -> bool:
    """A truth value, read strictly: true, false, 0 or 1. Absent is false (a detector's rows know no 3D)."""
    value = row.get(key, False)
    if type(value) in (bool, int) and value in (0, 1):
        return bool(value)
    raise DataError(f"row {row.get('id')}: {key} is {value!r}; it must be true or false")


def whole(row: dict, key: str) -> int:
    """A whole number that must be there. 0 is a good id, so absence is never tested by truth."""
    value = row.get(key)
    if type(value) is int:
        return value
    raise DataError(f"row {row.get('id')}: {key} is {value!r}; it must be a whole number")


def numbers(row: dict, key: str, count: int) -> list[float] | None:
    """`count` finite numbers, flattened; None where absent or *all* -1 (a projected box can truly start at -1)."""
    value = row.get(key)
    if value is None:
        return None
    try:
        flat = [v for line in value for v in line] if hasattr(value[0], "__len__") else list(value)
        good = len(flat) == count and math.isfinite(sum(flat))
    except (TypeError, LookupError):
        good = False
    if not good:
        raise DataError(f"row {row.get('id')}: {key} must be {count} finite numbers, or all -1 where it is not known")
    return None if flat.count(-1) == count else flat


def unknown_or(row: dict, key: str, good: Callable[[float], bool]) -> bool:
    """Whether a number is not known (absent or -1) or good."""
    value = row.get(key)
    if value is None or value == -1:
        return True
    if type(value) not in (int, float) or not math.isfinite(value):
        raise DataError(f"row {row.get('id')}: {key} is {value!r}; it must be a number, -1 where it is not known")
    return good(value)


def source_of(name: str) -> str | None:
    """The Omni3D set that a file name or an info.name speaks of, if any."""
    plain = "".join(filter(str.isalnum, name)).lower()
    return next((s for s in ("SUNRGBD", "KITTI", *OTHER_SOURCES) if s.lower() in plain), None)


def read_file(path: Path) -> tuple[str, list[dict], dict[int, list[dict]]]:
    """One annotation file: its source, its images, and its annotation rows by image id."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); fetch it again") from None
    images, rows = (content.get(key) if type(content) is dict else None for key in ("images", "annotations"))
    if not all(type(part) is list and all(type(entry) is dict for entry in part) for part in (images, rows)):
        raise DataError(f"{path}: needs the lists 'images' and 'annotations' of Omni3D's format")
    names = {c.get("id"): c.get("name") for c in content.get("categories") or []}
    by_image: dict[int, list[dict]] = {image.get("id"): [] for image in images}
    for row in rows:
        if row.get("image_id") not in by_image:
            raise DataError(f"{path}: row {row.get('id')}: image_id {row.get('image_id')!r} is no image of this file")
        row.setdefault("category_name", names.get(row.get("category_id")))
        by_image[row["image_id"]].append(row)
    info = content.get("info") or {}
    info = info[0] if type(info) is list else info
    return source_of(str(info.get("name"))) or source_of(path.stem) or "own", images, by_image


def read_folder(folder: str | Path, sources: tuple[str, ...]) -> Iterator[tuple[Path, str, dict, list[dict]]]:
    """Every image of these sources with its rows, from FOLDER/annotations/*.json, else from FOLDER/Omni3D/*.json."""
    found = False
    for path in sorted(Path(folder).glob("annotations/*.json")) or sorted(Path(folder).glob("Omni3D/*.json")):
        if source_of(path.stem) in OTHER_SOURCES or path.name == "stats.json":
            continue  # not opened: such a file can hold gigabytes
        source, images, by_image = read_file(path)
        for image in images if source in sources else ():
            found = True
            yield path, source, image, by_image.pop(image.get("id"), [])  # popped: the caller may drop them
    if not found:
        raise DataError(f"{folder}: no images of {' or '.join(sources)} in annotations/*.json or Omni3D/*.json; put "
                        "annotation files there, with their source in info.name or in the file's name")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print("usage: python omni3d.py FOLDER")
    else:
        tally = Counter()
        for path, source, _, rows in read_folder(sys.argv[1], SOURCES):
            tally[path.name, source, "images"] += 1
            tally[path.name, source, "rows"] += len(rows)
        for (name, source, what), count in tally.items():
            print(f"{name}  {source}  {count} {what}")
