"""A second pair of eyes: reads prompt and picture as a person would, and works the answer out from 3D coordinates.

Nothing here is shared with the project: the words are read with patterns of their own, which object is called "object 1"
is read off the marker's colour in the picture, and the geometry is typed again.
"""

import itertools
import re

import numpy as np

COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255), "green": (0, 255, 0)}
RELATION = {"orientation": r"object (\d) (?:is )?(?:more )?to the (left|right)\b",
            "depth": r"object (\d) (?:is )?(closer to|further from) the camera",
            "size": r"object (\d) (?:is )?(bigger|smaller)\b",
            "distance": r"object (\d) (?:is )?(closer to|further from) object 1\b"}


def asked(task, text):
    """(subject, word, other): "is object `subject` `word` ... object `other`?" from a boolean prompt."""
    question = text.splitlines()[-2]
    (subject, word), = re.findall(RELATION[task], question, re.IGNORECASE)
    mentioned = set(re.findall(r"object (\d)", question, re.IGNORECASE)) - ({"1"} if task == "distance" else set())
    other, = mentioned - {subject}
    return int(subject), word, int(other)


def listed(text):
    """{number: (colour, mark, name or None)} from the listing."""
    line = re.compile(r'- object (\d)(?: = "([^"]*)")?, (?:highlighted by|marked with) a (red|blue|green) (box|dot)\.')
    return {int(n): (colour, mark, name or None) for n, name, colour, mark in line.findall(text)}


def outline(box):
    """Pixels (x, y) of a box drawn into a picture, the box in pixel edges."""
    x0, y0, x1, y1 = int(box[0]), int(box[1]), int(box[2] - 1), int(box[3] - 1)
    return [(x, y) for x in range(x0, x1 + 1) for y in (y0, y1)] + [(x, y) for y in range(y0, y1 + 1) for x in (x0, x1)]


def marked(picture, objects, colour, mark):
    """The object (of those given) that bears a marker of this colour in the picture."""
    pixels = np.asarray(picture)  # (H, W, 3)

    def share(o):
        x0, y0, x1, y1 = o.box2d
        spots = outline(o.box2d) if mark == "box" else [(int((x0 + x1) / 2), int((y0 + y1) / 2))]
        return (pixels[[y for _, y in spots], [x for x, _ in spots]] == COLOURS[colour]).all(1).mean()

    shares = {o.id: share(o) for o in objects}
    bearer = max(shares, key=shares.get)
    assert shares[bearer] > 0.55 and sum(s > 0.55 for s in shares.values()) == 1, (colour, shares)  # lines may cross
    return next(o for o in objects if o.id == bearer)


def corners(box3d):
    """(8, 3), in any order: center +- the three half axes; the box's x carries length, y height, z width."""
    w, h, l = box3d.dimensions
    axes = [box3d.R[:, k] * side / 2 for k, side in enumerate((l, h, w))]
    return np.array([box3d.center + sum(s * a for s, a in zip(signs, axes)) for signs in itertools.product((-1, 1), repeat=3)])


def volume(box3d):
    """From the corners: the determinant of three edges that leave one of them."""
    c = corners(box3d)
    return abs(np.linalg.det(np.stack([c[4] - c[0], c[2] - c[0], c[1] - c[0]])))


def project(K, points):
    """(n, 3) -> (n, 2) pixels of a pinhole camera."""
    return np.array([[K[0, 0] * x / z + K[0, 2], K[1, 1] * y / z + K[1, 2]] for x, y, z in points])


def answer(task, text, called):
    """The true answer to a prompt; `called` maps the numbers of the listing to objects, {} for counting: all of them."""
    if task == "counting":
        return float(len(called))
    if task == "abs_distance":
        a, b = (called[int(n)] for n in re.findall(r"object (\d)", text.splitlines()[-2]))
        return float(np.sqrt(sum((p - q) ** 2 for p, q in zip(a.box3d.center, b.box3d.center))))
    subject, word, other = asked(task, text)
    a, b = called[subject], called[other]
    if task == "orientation":
        a, b = (sum(o.box2d[::2]) / 2 for o in (a, b))
        return a < b if word == "left" else a > b
    if task == "size":
        return volume(a.box3d) > volume(b.box3d) if word == "bigger" else volume(a.box3d) < volume(b.box3d)
    if task == "depth":
        a, b = (min(corners(o.box3d)[:, 2]) for o in (a, b))
    else:
        a, b = (np.linalg.norm(o.box3d.center - called[1].box3d.center) for o in (a, b))
    return bool(a < b if word == "closer to" else a > b)


def read(task, text, picture, view):
    """The true answer to what is shown: words, marker colours and geometry of the view, nothing else."""
    objects = list(view.objects.values())
    if task == "counting":
        return answer(task, text, dict(enumerate(objects)))
    called = {n: marked(picture, objects, colour, mark) for n, (colour, mark, _) in listed(text).items()}
    assert sorted(called) == list(range(1, len(objects) + 1)) and len({o.id for o in called.values()}) == len(objects)
    return answer(task, text, called)
