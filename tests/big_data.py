"""An Omni3D annotation file as large as SUN RGB-D's, made of random rooms: to measure reading, filtering and pairing."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT, FOCAL = 730, 530, 530.0
NAMES = ("table", "chair", "sofa", "bed", "desk", "cabinet", "lamp", "bookcase", "night stand", "monitor")
SIGNS = np.array([[-1, -1, -1], [1, -1, -1], [1, 1, -1], [-1, 1, -1], [-1, -1, 1], [1, -1, 1], [1, 1, 1], [-1, 1, 1]])


def write_rooms(folder, images, boxes=8, seed=0, pictures=0):
    """`images` pictures of 730x530 with `boxes` cuboids each, turned about the vertical; the first `pictures` really exist."""
    rng, rows, listed = np.random.default_rng(seed), [], []
    for image_id in range(images):
        listed.append({"id": image_id, "width": WIDTH, "height": HEIGHT, "file_path": f"pictures/{image_id}.jpg",
                       "K": [[FOCAL, 0, WIDTH / 2], [0, FOCAL, HEIGHT / 2], [0, 0, 1]], "src_flagged": False})
        z = rng.uniform(2, 6, boxes)
        centers = np.stack([rng.uniform(-0.5, 0.5, boxes) * z, rng.uniform(-0.3, 0.3, boxes) * z, z], 1)
        sizes, angles = rng.uniform(0.3, 1.2, (boxes, 3)), rng.uniform(0, 2 * np.pi, boxes)
        for n, (center, (w, h, l), angle) in enumerate(zip(centers, sizes, angles)):
            R = np.array([[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]])
            corners = (SIGNS * np.array([l, h, w]) / 2) @ R.T + center
            u, v = FOCAL * corners[:, 0] / corners[:, 2] + WIDTH / 2, FOCAL * corners[:, 1] / corners[:, 2] + HEIGHT / 2
            box = [float(u.min()), float(v.min()), float(u.max()), float(v.max())]
            rows.append({"id": image_id * boxes + n, "image_id": image_id, "category_id": n % len(NAMES),
                         "category_name": NAMES[rng.integers(len(NAMES))], "valid3D": True, "bbox2D_tight": [-1, -1, -1, -1],
                         "bbox2D_proj": box, "bbox2D_trunc": [max(box[0], 0), max(box[1], 0), min(box[2], WIDTH), min(box[3], HEIGHT)],
                         "bbox3D_cam": corners.tolist(), "center_cam": center.tolist(), "dimensions": [w, h, l], "R_cam": R.tolist(),
                         "behind_camera": False, "visibility": -1, "truncation": 0.0, "segmentation_pts": -1, "lidar_pts": -1,
                         "depth_error": -1})
    folder = Path(folder)
    for part in ("annotations", "pictures"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for image_id in range(pictures):
        small = rng.integers(0, 255, (HEIGHT // 8, WIDTH // 8, 3), dtype=np.uint8)              # smooth, as photographs are
        Image.fromarray(small).resize((WIDTH, HEIGHT), Image.BICUBIC).save(folder / f"pictures/{image_id}.jpg", quality=90)
    content = {"info": {"name": "SUNRGBD"}, "images": listed, "categories": [], "annotations": rows}
    (folder / "annotations" / "SUNRGBD_big.json").write_text(json.dumps(content))
    return str(folder)
