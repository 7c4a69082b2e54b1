"""Pictures: every file becomes 8-bit RGB by one rule, and every picture that cannot be used is found before training.

Ours; the papers say nothing about it. The rules, one each:
- **Mode.** Transparency is laid over white; 16-bit grey is scaled (65535 is white); the rest is Pillow's conversion.
- **Orientation.** The EXIF flag is applied, so a picture is what a viewer shows. It must then have the width and height
  of its annotation: boxes drawn on a picture of another size would be silently wrong.
- **Size.** A shorter side under 28 px (one visual token of Qwen2.5-VL) or an aspect ratio over 200 (the limit of its
  processor) is refused at preparation; nothing is ever enlarged. The crop of transforms.py never goes below that.
- **Bad files.** `bad_pictures` finds them before training: they are named and left out. A file that breaks later raises
  a `DataError` that names it and ends the run; nothing is retried, skipped or replaced by another picture.

    image = open_image("photo.png")          # PIL, mode RGB
    size_problem(332, 27)                    # '332x27 is too small: the shorter side must be at least 28 px'
"""
from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, Iterable

import numpy as np
from PIL import Image, ImageOps

MIN_SIDE = 28      # pixels: patch 14 x merge 2, one visual token
MAX_ASPECT = 200   # longer / shorter side: Qwen's smart_resize refuses more


class DataError(ValueError):
    """Bad input data. The message is one line: which file, which row, and the mend."""


def size_problem(width: int, height: int) -> str | None:
    """Why a picture of this size cannot be used, or None."""
    if min(width, height) < MIN_SIDE:
        return f"{width}x{height} is too small: the shorter side must be at least {MIN_SIDE} px"
    if max(width, height) > MAX_ASPECT * min(width, height):
        return f"{width}x{height} is too narrow: the sides' ratio must be at most {MAX_ASPECT}"
    return None


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode as 8-bit RGB."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        # convert("RGB") would saturate: everything above 255 becomes white.
        values = np.asarray(image).astype(np.int64)  # (H, W)
        if values.min() < 0 or values.max() > 65535:
            raise DataError("grey values outside 0..65535; save it as 8-bit or 16-bit grey")
        grey = ((values * 255 + 32767) // 65535).astype(np.uint8)  # (H, W), rounded
        return Image.fromarray(grey).convert("RGB")
    if image.mode == "F":
        raise DataError("floating-point grey has no agreed white; save it as 8-bit")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")


def open_image(path: str | os.PathLike) -> Image.Image:
    """The picture at `path`, fully decoded, upright, 8-bit RGB; a DataError that names the file where that fails."""
    try:
        with Image.open(path) as image:
            image.load()  # a header alone proves nothing: half a JPEG has a good one
            rgb = to_rgb(ImageOps.exif_transpose(image))
        reason = size_problem(*rgb.size)
        if reason is None:
            return rgb
        reason = "is refused: " + reason
    except FileNotFoundError:
        reason = "is missing; put it there or remove its row"
    except Image.UnidentifiedImageError:
        size = os.path.getsize(path)
        reason = ("is an empty file" if size == 0 else "is not a picture, whatever its name says") + "; fetch it again"
    except DataError as error:
        reason = f"cannot be used: {error}"
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = f"cannot be decoded ({' '.join(str(error).split())}); fetch it again"
    raise DataError(f"{path} {reason}")


@dataclass(frozen=True)
class Picture:
    """A picture on disk, read when called; `width` and `height` are those of its annotation, in pixels."""
    path: str
    width: int
    height: int

    def __call__(self) -> Image.Image:
        image = open_image(self.path)
        if image.size != (self.width, self.height):
            raise DataError(f"{self.path} is {image.width}x{image.height} but its annotation says {self.width}x"
                            f"{self.height}; boxes would be misplaced: use the picture the annotation was made for")
        return image


def bad_pictures(loaders: Iterable[Callable[[], Image.Image]]) -> list[str | None]:
    """For each loader (`record.load`) why its picture cannot be used, or None: decodes all, once, in threads."""
    def problem(load: Callable[[], Image.Image]) -> str | None:
        try:
            load()
        except DataError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:  # Pillow decodes without the GIL
        return list(pool.map(problem, loaders))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(bad_pictures([lambda: open_image(name)])[0] or f"{name} {open_image(name).size} is usable")
    if len(sys.argv) == 1:
        print("usage: python images.py PICTURE ...")
        for size in ((1, 1), (16, 16), (332, 27), (6000, 28), (1242, 375)):
            print(f"{size[0]}x{size[1]}: {size_problem(*size) or 'usable'}")
