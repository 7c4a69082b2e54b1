"""The transform T = (T_I, T_q): a second view of the same question whose effect on the answer is known (D.4).

Every part is drawn independently with probability 0.5. Some parts negate the true answer, the others keep it; an even
number of negations cancels out, so phi_T is the identity or the negation, known without knowing any answer.

    part            acts on                  orientation  depth  size  distance  abs_distance  counting
    flip            image, boxes, camera     negates      keeps  keeps keeps     keeps         keeps
    crop            image, boxes, camera     keeps        keeps  keeps keeps     keeps         keeps
    jitter          image                    keeps        keeps  keeps keeps     keeps         keeps
    template        text                     keeps        keeps  keeps keeps     keeps         keeps
    swap_relation   text                     negates     negates negates negates -             -
    swap_order      text                     negates     negates negates negates keeps         -
    relabel         which object is which    negates     negates negates negates keeps         -
    unnamed         text (listing)           keeps        keeps  keeps keeps     keeps         -

`relabel` and `unnamed` are ours (`--transforms full`). Without them a policy that never looks at the image can be
perfectly consistent on depth, size and distance: no image-side part of the paper's set negates those answers.
Differs from Figure 13 (a 50-60 % crop): crops keep 70-100 % of each side, as section D.4 says.

    python transforms.py       # writes transforms.png, a sheet of pairs of synthetic scenes, one for each task
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance

from data import BOOLEAN_TASKS, TASKS, Box3D, Example, Object, examples
from images import size_problem
from questions import MARKS, Question, draw_question, prompt_text

PAPER_PARTS = ("flip", "crop", "jitter", "template", "swap_relation", "swap_order")
FULL_PARTS = PAPER_PARTS + ("relabel", "unnamed")
TRANSFORM_SETS = {"paper": PAPER_PARTS, "full": FULL_PARTS}
NEGATING = {"flip": ("orientation",), "swap_relation": BOOLEAN_TASKS, "swap_order": BOOLEAN_TASKS,
            "relabel": BOOLEAN_TASKS}
NOT_USED = {"counting": ("swap_relation", "swap_order", "relabel", "unnamed"), "abs_distance": ("swap_relation",)}

CROP_SHARE = (0.7, 1.0)      # of each side
MIN_CROP = 56                # pixels: two merged patches of Qwen2.5-VL; a crop never leaves less (or the side itself)
JITTER = (0.7, 1.3)          # brightness, contrast and saturation factors
RGB = {"red": (255, 0, 0), "blue": (0, 0, 255), "green": (0, 255, 0)}
MIRROR = np.diag([-1.0, 1.0, 1.0])


@dataclass(frozen=True, eq=False)
class View:
    """What one prompt shows: pixels (no markers yet), camera and the objects asked about, all in this image's frame."""
    image: Image.Image                 # 8-bit RGB
    K: np.ndarray | None               # (3, 3) intrinsics in pixels of `image`
    objects: Mapping[int, Object]      # by id


@dataclass(frozen=True)
class Transform:
    """The drawn parts. Numbers are drawn here, once, so that applying a transform is deterministic."""
    flip: bool = False
    crop: tuple[float, float, float, float] | None = None    # share of width, of height; position x, y in [0, 1]
    jitter: tuple[float, float, float] | None = None         # brightness, contrast, saturation factors
    template: int = 0                                        # 1-4: so many templates further on (cyclically)
    swap_relation: bool = False
    swap_order: bool = False
    relabel: bool = False
    unnamed: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that were drawn."""
        return tuple(part for part in FULL_PARTS if getattr(self, part))


def parts_of(task: str, transforms: str) -> tuple[str, ...]:
    """The parts that the set `transforms` ('paper' or 'full') uses for this task."""
    return tuple(p for p in TRANSFORM_SETS[transforms] if p not in NOT_USED.get(task, ()))


def draw_transform(task: str, rng: np.random.Generator, transforms: str = "full") -> Transform:
    """T ~ the transform set: each part of the task independently with probability 0.5 (D.4, Sampling Strategy)."""
    drawn = {part: _draw_part(part, rng) for part in parts_of(task, transforms) if rng.random() < 0.5}
    return Transform(**drawn)


def _draw_part(part: str, rng: np.random.Generator):
    if part == "crop":
        return (*rng.uniform(*CROP_SHARE, size=2).tolist(), *rng.random(2).tolist())
    if part == "jitter":
        return tuple(rng.uniform(*JITTER, size=3).tolist())
    if part == "template":
        return int(rng.integers(1, 5))
    return True


def negates(transform: Transform, task: str) -> bool:
    """phi_T: True where the answers to x and T(x) must differ, by the parity of the negating parts (D.4)."""
    return sum(task in NEGATING.get(part, ()) for part in transform.parts) % 2 == 1


# ------------------------------------------------------------------------------------------------- T_q: the question
def apply_to_question(transform: Transform, question: Question) -> Question:
    """T_q(q). Changes fields, never words. `relabel` exchanges which object is called 1 and 2 (distance: 2 and 3)."""
    ids = list(question.object_ids)
    if transform.relabel:
        i, j = (1, 2) if question.task == "distance" else (0, 1)
        ids[i], ids[j] = ids[j], ids[i]
    return replace(question, object_ids=tuple(ids),
                   relation=question.relation ^ int(transform.swap_relation),
                   swapped=question.swapped ^ transform.swap_order,
                   template=(question.template + transform.template) % 5,
                   named=question.named and not transform.unnamed)


# ---------------------------------------------------------------------------------------------------- T_I: the image
def apply_to_view(transform: Transform, view: View) -> View:
    """T_I(I): flip, then crop, then jitter, on pixels, 2D boxes, 3D boxes and camera together. No markers yet."""
    if transform.flip:
        view = flip(view)
    if transform.crop:
        view = crop(view, *transform.crop)
    if transform.jitter:
        view = replace(view, image=jitter(view.image, *transform.jitter))
    return view


def flip(view: View) -> View:
    """Mirror left and right. Pixel edges: x -> W - x and cx -> W - cx; in the camera frame x -> -x, R -> M R M.

    M R M with M = diag(-1, 1, 1) keeps det R = +1: the mirrored cuboid is again a rotated cuboid, with its corners in
    another order (they are computed from R). Flipping twice gives the original back, bit for bit, where pixel
    coordinates lie on `view_of`'s grid.
    """
    width = view.image.width
    mirror = np.array([[-1.0, 0, width], [0, 1, 0], [0, 0, 1]])                                  # (3, 3) in pixels
    K = None if view.K is None else mirror @ view.K @ MIRROR                                     # (3, 3)
    objects = {}
    for id_, o in view.objects.items():
        x0, y0, x1, y1 = o.box2d
        box3d = o.box3d and Box3D(MIRROR @ o.box3d.center, o.box3d.dimensions, MIRROR @ o.box3d.R @ MIRROR)
        objects[id_] = replace(o, box2d=(width - x1, y0, width - x0, y1), box3d=box3d)
    return View(view.image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), K, objects)


def crop(view: View, share_w: float, share_h: float, at_x: float, at_y: float) -> View:
    """Cut out a window of the given share of each side that holds every box of `view.objects` whole.

    `at_x`, `at_y` in [0, 1] place the window among the allowed positions. Where the boxes need more than the share, the
    window grows to hold them; it is never under MIN_CROP pixels (or the side, if that is smaller). Where the window
    would be too narrow for the model (a panorama), the picture stays whole. 3D boxes stay as they are: the camera has
    not moved, only its principal point.
    """
    boxes = np.array([o.box2d for o in view.objects.values()])                                   # (objects, 4)
    x0, x1 = _window(view.image.width, share_w, at_x, boxes[:, 0].min(), boxes[:, 2].max())
    y0, y1 = _window(view.image.height, share_h, at_y, boxes[:, 1].min(), boxes[:, 3].max())
    if size_problem(x1 - x0, y1 - y0):
        return view
    K = None if view.K is None else view.K - np.array([[0, 0, x0], [0, 0, y0], [0, 0, 0]])       # (3, 3)
    objects = {id_: replace(o, box2d=(o.box2d[0] - x0, o.box2d[1] - y0, o.box2d[2] - x0, o.box2d[3] - y0))
               for id_, o in view.objects.items()}
    return View(view.image.crop((x0, y0, x1, y1)), K, objects)


def _window(side: int, share: float, at: float, low: float, high: float) -> tuple[int, int]:
    """One axis of the crop window, whole pixels: the interval [start, end) that holds [low, high]."""
    low, high = max(0, int(np.floor(low))), min(side, int(np.ceil(high)))
    length = min(side, max(round(share * side), high - low, MIN_CROP))
    first, last = max(0, high - length), min(low, side - length)      # every start in between keeps the boxes whole
    start = first + round(at * (last - first))
    return start, start + length


def jitter(image: Image.Image, brightness: float, contrast: float, saturation: float) -> Image.Image:
    """Colour adjustment; geometry untouched. Markers are drawn later, so red stays red."""
    image = ImageEnhance.Brightness(image).enhance(brightness)
    image = ImageEnhance.Contrast(image).enhance(contrast)
    return ImageEnhance.Color(image).enhance(saturation)


# ------------------------------------------------------------------------------------------------ markers, drawn last
def draw_markers(view: View, question: Question) -> Image.Image:
    """The picture the model sees: object 1 red, 2 blue, 3 green, as dots or boxes by task (D.2); counting has none.

    Markers grow with the picture but leave its smallest marked object visible. They are of one size in a picture, so
    that a dot says nothing about the size of what it marks.
    """
    image = view.image.copy()
    if question.task not in MARKS:
        return image
    draw, side = ImageDraw.Draw(image), max(image.size)
    boxes = [view.objects[id_].box2d for id_ in question.object_ids]
    smallest = min(min(x1 - x0, y1 - y0) for x0, y0, x1, y1 in boxes)
    line = max(3, round(min(side / 200, smallest / 10)))                           # pixels
    radius = max(5, round(min(side / 80, smallest / 6)))                           # pixels
    for (x0, y0, x1, y1), colour in zip(boxes, RGB.values()):
        if MARKS[question.task] == "box":
            draw.rectangle((x0, y0, max(x0, x1 - 1), max(y0, y1 - 1)), outline=colour, width=line)
        else:
            x, y = (x0 + x1) / 2, (y0 + y1) / 2
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour, outline=(255, 255, 255))
    return image


# --------------------------------------------------------------------------------------------------- the pair (x, x')
@dataclass(frozen=True, eq=False)
class Prompted:
    """One side of a pair before tokenising: the view, the question, and the picture with its markers."""
    view: View
    question: Question
    picture: Image.Image


def view_of(example: Example) -> View:
    """The untransformed view of an example: its picture with the objects asked about, 2D boxes and camera on the grid."""
    K = example.record.K
    objects = {o.id: replace(o, box2d=tuple(on_grid(np.array(o.box2d)).tolist())) for o in example.objects}
    return View(example.record.load(), None if K is None else on_grid(K), objects)


def on_grid(pixels: np.ndarray) -> np.ndarray:
    """Rounded to 2^-32 px: W - x is then exact in double precision, so mirroring twice loses nothing."""
    return np.round(pixels * 2.0**32) / 2.0**32


def prompted(view: View, question: Question) -> Prompted:
    """Put view and question together; the markers go on here, after every image transform."""
    return Prompted(view, question, draw_markers(view, question))


def make_pair(example: Example, question: Question, transform: Transform) -> tuple[Prompted, Prompted]:
    """(x, x') = (x, T(x)) of Algorithm 1, lines 1 and 2."""
    view = view_of(example)
    return (prompted(view, question),
            prompted(apply_to_view(transform, view), apply_to_question(transform, question)))


# ----------------------------------------------------------------------------------------------------- a sheet to look at
def draw_sheet(pairs: list[tuple[Prompted, Prompted, Transform]], zoom: int = 3, line: int = 12) -> Image.Image:
    """Pairs one below the other: T and what it does to the answer, then x and x' side by side, each over its prompt."""
    column = max(470, *(zoom * side.picture.width + 10 for pair in pairs for side in pair[:2]))         # pixels
    heights = [zoom * max(x.picture.height, x_prime.picture.height) + 7 * line for x, x_prime, _ in pairs]
    sheet = Image.new("RGB", (2 * column, sum(heights)), "white")
    draw, y = ImageDraw.Draw(sheet), 0
    for (x, x_prime, transform), height in zip(pairs, heights):
        effect = "differ" if negates(transform, x.question.task) else "match"
        title = f"{x.question.task}: T = {', '.join(transform.parts) or 'identity'}: answers must {effect}"
        draw.text((5, y + 2), title, "black")
        for left, side in ((5, x), (column + 5, x_prime)):
            picture = side.picture.resize((zoom * side.picture.width, zoom * side.picture.height), Image.Resampling.NEAREST)
            sheet.paste(picture, (left, y + line + 4))
            words = prompt_text(side.question, {i: o.name for i, o in side.view.objects.items()})
            draw.multiline_text((left, y + line + 6 + picture.height), words, "black", spacing=1)
        y += height
    return sheet


if __name__ == "__main__":
    from scenes import scene

    demo = []
    for seed, task in enumerate(TASKS):
        rng = np.random.default_rng(seed)
        example = next(filter(None, (examples(scene("synthetic", i), task) for i in range(10 * seed, 1000))))
        transform = draw_transform(task, rng)
        demo.append((*make_pair(example, draw_question(task, example.object_ids, rng), transform), transform))
    draw_sheet(demo).save("transforms.png")
    print(f"wrote transforms.png: x and x' = T(x) for {', '.join(TASKS)}")
