"""Synthetic scenes: shaded cuboids on a ground plane, rendered from a seed, in the same records as real photos.

Size, colour, depth, position and heading are drawn independently of the class name: a name tells nothing. Each scene is
a function of (domain, image id) alone, so nothing is stored; `Record.load()` draws the picture again.

    python scenes.py           # writes scenes.png, a contact sheet, and prints how many scenes give an example per task
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from PIL import Image, ImageDraw

import data
from data import CORNER_SIGNS, Record

# Faces of a cuboid as corner indices (Omni3D order) and their outward normals in the box's own frame.
FACES = np.array([[0, 1, 5, 4], [3, 2, 6, 7], [0, 3, 7, 4], [1, 2, 6, 5], [0, 1, 2, 3], [4, 5, 6, 7]])   # (6, 4)
NORMALS = np.array([[0, -1, 0], [0, 1, 0], [-1, 0, 0], [1, 0, 0], [0, 0, -1], [0, 0, 1]], dtype=float)  # (6, 3)
LIGHT = np.array([0.35, -0.85, -0.4])                                        # towards the light, camera frame


@dataclass(frozen=True)
class Domain:
    """How one family of scenes is drawn. Lengths in metres, angles in degrees, picture size in pixels."""
    names: tuple[str, ...]
    size: tuple[int, int]                    # width, height of the picture
    focal: tuple[float, float]               # focal length, as a share of the picture's width
    camera_height: tuple[float, float]
    pitch: tuple[float, float]               # camera tilt downwards
    depth: tuple[float, float]               # of object centres
    side: tuple[float, float]                # width, height and length of a cuboid
    objects: tuple[int, int]                 # least and most cuboids


DOMAINS = {
    "synthetic": Domain(("table", "chair", "lamp", "box", "sofa", "desk", "bed", "cabinet"), (112, 112), (0.75, 0.85),
                        (2.4, 2.8), (34, 42), (1.8, 4.4), (0.6, 1.6), (3, 5)),
    "synthetic-outdoor": Domain(("car", "van", "truck", "cyclist", "tram", "trailer"), (168, 84), (0.75, 0.85),
                                (2.6, 3.4), (8, 14), (5.0, 18.0), (1.6, 4.5), (2, 4)),
}
SAME_CLASS = 0.35            # share of scenes in which one class is repeated (for counting)


def scene(domain: str, image_id: int) -> Record:
    """The scene with this id as a `Record`, through the same parser and filters as an Omni3D file."""
    image, annotations = annotate(domain, image_id)
    return data.parse_record(image, annotations, domain, partial(render, domain, image_id))


@dataclass(frozen=True, eq=False)
class Cuboid:
    """One drawn cuboid: what is annotated (camera frame, metres) and what is painted (pixels)."""
    name: str
    colour: np.ndarray                       # (3,) 0..255
    center: np.ndarray                       # (3,)
    whl: tuple[float, float, float]
    R: np.ndarray                            # (3, 3)
    corners: np.ndarray                      # (8, 3)
    faces: list                              # those turned to the camera: (brightness 0.45..1, polygon in pixels)


@lru_cache(maxsize=16)                       # annotate and render of one scene share the drawing
def draw_scene(domain: str, image_id: int) -> tuple[np.ndarray, float, list[np.ndarray], list[Cuboid]]:
    """K (3, 3), the horizon's pixel row, wall and ground colour, and the cuboids, of one scene."""
    d = DOMAINS[domain]
    rng = np.random.default_rng([image_id, list(DOMAINS).index(domain)])
    width, height = d.size
    f = width * rng.uniform(*d.focal)
    K = np.array([[f, 0, width / 2], [0, f, height / 2], [0, 0, 1]])                            # (3, 3)
    pitch, up = np.radians(rng.uniform(*d.pitch)), rng.uniform(*d.camera_height)
    tilt = np.array([[1, 0, 0], [0, np.cos(pitch), -np.sin(pitch)], [0, np.sin(pitch), np.cos(pitch)]])  # world->camera
    names = rng.permutation(d.names)[:rng.integers(d.objects[0], d.objects[1] + 1)].tolist()
    if rng.random() < SAME_CLASS:
        names = [names[0]] * len(names)
    shades = [dull(rng), dull(rng)]                                # wall and ground colour
    cuboids, placed = [], []                                       # placed: (x, z, radius) of what stands already
    for name in names:
        for _ in range(30):                                        # tries to find a free spot; else one cuboid fewer
            w, h, l = rng.uniform(*d.side, size=3).tolist()
            z = rng.uniform(*d.depth)
            x = rng.uniform(-0.42, 0.42) * width / f * z
            radius = math.hypot(w, l) / 2
            if all((x - px) ** 2 + (z - pz) ** 2 > (radius + pr) ** 2 for px, pz, pr in placed):
                placed.append((x, z, radius))
                yaw, colour = rng.uniform(0, 2 * np.pi), dull(rng)
                turn = np.array([[np.cos(yaw), 0, np.sin(yaw)], [0, 1, 0], [-np.sin(yaw), 0, np.cos(yaw)]])
                center = tilt @ np.array([x, up - h / 2, z])       # y is down: the ground lies `up` below the camera
                cuboids.append(_cuboid(name, colour, center, (w, h, l), tilt @ turn, K))
                break
    return K, height / 2 - f * np.tan(pitch), shades, cuboids


def dull(rng: np.random.Generator) -> np.ndarray:
    """A greyish colour (3,), 0..255: markers are the only saturated red, blue and green in a picture."""
    return rng.integers(70, 215) + rng.integers(-25, 26, size=3)


def _cuboid(name, colour, center, whl, R, K) -> Cuboid:
    """Corners, and the faces turned to the camera with their shading."""
    w, h, l = whl
    corners = (CORNER_SIGNS * (np.array([l, h, w]) / 2)) @ R.T + center                         # (8, 3)
    pixels = project(K, corners)                                                                # (8, 2)
    normals = NORMALS @ R.T                                                                     # (6, 3)
    facing = ((corners[FACES].mean(1) * normals).sum(1) < 0).tolist()                           # (6,)
    light = (0.45 + 0.55 * np.clip(normals @ LIGHT, 0, 1)).tolist()                             # (6,)
    faces = [(light[f], pixels[FACES[f]].ravel().tolist()) for f in range(6) if facing[f]]
    return Cuboid(name, colour, center, whl, R, corners, faces)


def project(K: np.ndarray, points: np.ndarray) -> np.ndarray:
    """(n, 3) camera-frame points in metres -> (n, 2) pixels; points nearer than 5 cm count as 5 cm away."""
    z = np.maximum(points[:, 2:], 0.05)                                                         # (n, 1)
    return points[:, :2] / z * K[[0, 1], [0, 1]] + K[:2, 2]                                     # (n, 2)


def far_to_near(cuboids: list[Cuboid]) -> list[tuple[int, Cuboid]]:
    """Painting order (painter's algorithm; cuboids do not touch, so the order by distance serves)."""
    return sorted(enumerate(cuboids), key=lambda item: -np.linalg.norm(item[1].center))


def render(domain: str, image_id: int) -> Image.Image:
    """The picture of a scene, 8-bit RGB, without markers."""
    _, horizon, (wall, ground), cuboids = draw_scene(domain, image_id)
    width, height = DOMAINS[domain].size
    image = Image.new("RGB", (width, height), tuple(wall.tolist()))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, horizon, width, height), fill=tuple(ground.tolist()))
    for _, cuboid in far_to_near(cuboids):
        for brightness, polygon in cuboid.faces:
            draw.polygon(polygon, fill=tuple((cuboid.colour * brightness).astype(int).tolist()), outline=(25, 25, 25))
    return image


def annotate(domain: str, image_id: int) -> tuple[dict, list[dict]]:
    """The scene as Omni3D's `image` and `annotation` dicts.

    `visibility` is the share of a cuboid's pixels inside the picture that no other one hides, counted on painted maps.
    """
    K, _, _, cuboids = draw_scene(domain, image_id)
    width, height = DOMAINS[domain].size
    owner, alone = Image.new("L", (width, height), 255), [0] * len(cuboids)
    draw = ImageDraw.Draw(owner)
    for index, cuboid in far_to_near(cuboids):
        silhouette = Image.new("L", (width, height))
        outline = ImageDraw.Draw(silhouette)
        for _, polygon in cuboid.faces:
            draw.polygon(polygon, fill=index)
            outline.polygon(polygon, fill=1)
        alone[index] = silhouette.histogram()[1]
    seen = owner.histogram()
    annotations = []
    for index, cuboid in enumerate(cuboids):
        pixels = project(K, cuboid.corners)                                                     # (8, 2)
        x0, y0, x1, y1 = proj = (*pixels.min(0).tolist(), *pixels.max(0).tolist())
        trunc = (max(x0, 0), max(y0, 0), min(x1, width), min(y1, height))
        inside = max(0, trunc[2] - trunc[0]) * max(0, trunc[3] - trunc[1])
        annotations.append({
            "id": image_id * 10 + index, "image_id": image_id, "category_name": cuboid.name, "valid3D": True,
            "category_id": DOMAINS[domain].names.index(cuboid.name),
            "behind_camera": bool((cuboid.corners[:, 2] <= 0.05).any()),
            "bbox2D_tight": [-1, -1, -1, -1], "bbox2D_proj": list(proj), "bbox2D_trunc": list(trunc),
            "center_cam": cuboid.center.tolist(), "dimensions": list(cuboid.whl), "R_cam": cuboid.R.tolist(),
            "bbox3D_cam": cuboid.corners.tolist(), "visibility": seen[index] / max(1, alone[index]),
            "truncation": 1 - inside / ((x1 - x0) * (y1 - y0)), "segmentation_pts": seen[index],
            "lidar_pts": -1, "depth_error": -1})
    image = {"id": image_id, "width": width, "height": height, "K": K.tolist(), "file_path": f"{domain}/{image_id}"}
    return image, annotations


def contact_sheet(domain: str, image_ids: range, columns: int = 8) -> Image.Image:
    """Many scenes beside and below each other, the first at the top left."""
    width, height = DOMAINS[domain].size
    sheet = Image.new("RGB", (columns * width, -(-len(image_ids) // columns) * height), "white")
    for n, image_id in enumerate(image_ids):
        sheet.paste(render(domain, image_id), (n % columns * width, n // columns * height))
    return sheet


if __name__ == "__main__":
    N = 500
    sheets = [contact_sheet("synthetic", range(24)), contact_sheet("synthetic-outdoor", range(15), columns=5)]
    both = Image.new("RGB", (max(s.width for s in sheets), sum(s.height for s in sheets)), "white")
    for sheet, y in zip(sheets, (0, sheets[0].height)):
        both.paste(sheet, (0, y))
    both.save("scenes.png")
    print(f"wrote scenes.png; of {N} scenes this many give an example:")
    for domain in DOMAINS:
        records = [scene(domain, image_id) for image_id in range(N)]
        given = {task: sum(data.examples(r, task) is not None for r in records) for task in data.TASKS}
        print(f"{domain:<18}", ", ".join(f"{task} {n}" for task, n in given.items()))
