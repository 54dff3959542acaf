# SPDX-License-Identifier: Apache-2.0
r"""How much bfloat16 changes the pixels of decoded images, and the codes of encoded ones.

    python -m sparse_lavida_jax.bench.vq --vq=scenes_g1,scenes_g4

Takes a few seconds. The rows show why the decoder may run in bfloat16 (`sampling.vq_dtype`), but
not the encoder.
"""

import jax
import numpy as np
from absl import flags
from jaxtyping import UInt8

from sparse_lavida_jax.bench import command
from sparse_lavida_jax.bench.record import Bench
from sparse_lavida_jax.models import vq
from sparse_lavida_jax.scenes import tasks, world

VQ = flags.DEFINE_list(
    "vq", ["scenes_g1", "scenes_g4"], "Image tokenizers: bundled names or folders."
)
IMAGES = flags.DEFINE_integer("images", 32, "Number of scenes, from the first.", lower_bound=1)


def moved(model: vq.VQModel, images: UInt8[np.ndarray, "n h w 3"], dtype: str) -> dict[str, float]:
    """Returns how far a dtype changes grey levels of 0 to 255, and how many codes stay the same."""
    codes = vq.encode_images(model, images, batch=1)
    plain = vq.decode_codes(model, codes, batch=1).astype(int)
    other = vq.decode_codes(vq.for_decoding(model, dtype), codes, batch=1).astype(int)
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), model)
    found = np.asarray(jax.jit(_codes)(narrow, images))
    difference = np.abs(other - plain)
    return {
        "largest_difference": float(difference.max()),
        "mean_difference": float(difference.mean()),
        "pixels_moved": float((difference > 0).any(axis=-1).mean()),
        "codes_agreement": float((found == codes).mean()),
    }


def _codes(model: vq.VQModel, images: UInt8[np.ndarray, "n h w 3"]):
    return model.encode(vq.to_float(images).astype(model.codebook.dtype))


def main(_: list[str]) -> None:
    """Writes a row for each image tokenizer."""
    bench = Bench("vq")
    shown = (tasks.sample("edit", 0, i).image for i in range(IMAGES.value))
    images = np.stack([world.render(scene) for scene in shown if scene is not None])
    for name in VQ.value:
        model, settings = vq.load(name)
        row = {
            "task": "decode",
            "method": "bfloat16",
            "model": name,
            "batch": 1,
            "images": len(images),
            "image_size": settings.image_size,
            "note": "grey levels of 0 to 255; codes of a whole encoder in bfloat16",
        } | moved(model, images, "bfloat16")
        print(f"{bench.write(f'{name}/decode/bfloat16', row).name}: {row}", flush=True)


if __name__ == "__main__":
    command.run(main)
