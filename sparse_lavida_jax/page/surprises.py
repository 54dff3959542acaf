# SPDX-License-Identifier: Apache-2.0
"""How surprising an image is given captions, for the page: its cells lit by bits, and a ranking."""

import base64
import html

import numpy as np
from PIL import Image, ImageDraw

from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.inference.surprise import BRIGHTEST, Surprise
from sparse_lavida_jax.page import figures, passes

DARKEST = 0.2  # share of the light that is left of a cell without bits
LEAST_SIDE = 384  # pixels of the longer side of an image with its cells lit


def lit(pixels: image_files.Pixels, found: Surprise, caption: int) -> image_files.Pixels:
    """Draws each cell the brighter the more bits it has, and a frame around the worst one.

    Small images are enlarged, every pixel a square.

    Args:
        pixels: the image at the size that was scored.
        caption: its number.
    """
    rows, columns = found.grid
    large = image_files.enlarged(pixels, max(1, LEAST_SIDE // max(pixels.shape[:2])))
    height, width = large.shape[0] // rows, large.shape[1] // columns
    level = np.clip(found.bits[caption] / BRIGHTEST, 0, 1).reshape(rows, columns)
    light = (DARKEST + (1 - DARKEST) * level).repeat(height, axis=0).repeat(width, axis=1)
    image = Image.fromarray(np.round(large * light[..., None]).astype(np.uint8))
    row, column = found.cell(caption)
    x, y = column * width, row * height
    box = (x, y, x + width - 1, y + height - 1)
    ImageDraw.Draw(image).rectangle(box, outline=figures.MASKED, width=max(1, width // 16))
    return np.array(image)


def ranking(pixels: image_files.Pixels, found: Surprise) -> str:
    """Returns the captions with their bits as HTML, the one that fits best first."""
    shown = []
    for place, i in enumerate(found.ranked, 1):
        small = Image.fromarray(lit(pixels, found, i))
        small.thumbnail((passes.SIDE, passes.SIDE), Image.Resampling.NEAREST)
        png = base64.b64encode(image_files.encoded(np.array(small))).decode()
        row, column = found.cell(i)
        bits = f"<b>{found.bits[i].sum():.1f} bits</b>, {found.bits[i].max():.1f} of them in"
        said = f"{place}. {html.escape(found.captions[i])}<br>{bits} row {row}, column {column}"
        image = f'<img src="data:image/png;base64,{png}" alt="">'
        shown.append(f"<figure>{image}<figcaption>{said}</figcaption></figure>")
    return f'<div class="passes">{"".join(shown)}</div>'
