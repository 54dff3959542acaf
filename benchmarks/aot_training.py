# SPDX-License-Identifier: Apache-2.0
r"""Training steps, and the loss over a vocabulary, compiled for devices that are only described.

    python -m benchmarks.aot_training --loss
    python -m benchmarks.aot_training --configs=configs/lavida_o_lora.py --rows=4
    python -m benchmarks.aot_training --configs=configs/sft_1024.py --chips=v5p:4x4x4

Needs what `aot.py` needs for TPUs, and `aot_requests.py` for an H200. Nothing is timed.
On a GPU every kernel takes max(operations / rate of products, bytes / bandwidth); on TPUs seconds
are those of `aot.py`. MFU is of the vendor's peak, and counts what a batch needs
(`training/flops.py`), not what is computed twice. Every token of a batch has a loss and sees all.
"""

import math
import pathlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging
from jax.sharding import Mesh

from benchmarks import aot, command, hlo, objectives, table
from benchmarks.aot_requests import IMPLEMENTATION, unchecked
from benchmarks.described import DEVICES, DescribedGpu
from benchmarks.measurements import Bench
from sparse_lavida_jax import config
from sparse_lavida_jax.kernels import attention
from sparse_lavida_jax.training import flops, loss, memory

SUITE, LOSS_SUITE = "aot_training", "aot_loss"
GPU = DEVICES["h200"]
# Of a head: width, words, dtype of the kernel (a frozen one has no gradient), and tokens.
HEADS = {
    "words": (4096, 127_378, "float32", (1024, 2048, 4096, 8192)),
    "words, frozen": (4096, 127_378, "bfloat16", (512, 1024, 2048, 4096)),
    "codes": (2048, 8192, "float32", (4096, 16_384)),
    "words of scenes_gpu": (512, 518, "float32", (19_200, 76_800)),
}

CONFIGS = flags.DEFINE_list("configs", [], "Configs whose training steps are compiled.")
CHIPS = flags.DEFINE_enum("chips", "", ["", *aot.TRAINING], "TPUs; by default one H200.")
LOSS = flags.DEFINE_boolean("loss", False, "Compile the loss of each head, plain and in tiles.")
ROWS = flags.DEFINE_integer("rows", 0, "Rows of a batch; 0: those of the config.", lower_bound=0)
TOKENS = flags.DEFINE_list(
    "tokens", ["1024", "-1"], "Tokens of a row in each stream; -1: those of an image."
)
REMAT = flags.DEFINE_enum("remat", "", ["", "none", "attention", "layer"], "As in config.Model.")
DEPTH = flags.DEFINE_integer(
    "depth", 0, "Layers compiled, half of them split; 0: all.", lower_bound=0
)


def costs(kernels: Iterable[hlo.Kernel], turns: Mapping[int, int]) -> dict[str, Any]:
    """Returns the operations and bytes of a program for a GPU, and its least seconds, by kind.

    Args:
        turns: of the loops of the loss, by the number of words in their logits.
    """
    products, copies = (GPU.rates["measured"][of] for of in ("matmul_tflops", "copy_gbps"))
    operations = moved = 0.0
    by_kind: dict[str, float] = dict.fromkeys(("products", "attention", "copies", "others"), 0.0)
    for kernel in kernels:
        sizes = {size for shape in kernel.made for size in shape}
        own = (number for words, number in turns.items() if words in sizes)
        runs = next(own, max(turns.values(), default=1)) if kernel.in_step else 1
        operations += runs * kernel.runs * kernel.operations
        moved += runs * kernel.runs * kernel.bytes
        by_kind[kernel.kind] += runs * kernel.seconds(products * 1e12, copies * 1e9)
    return {
        "operations": operations,
        "bytes_moved": moved,
        "predicted_s": sum(by_kind.values()),
        "predicted_by_kind": by_kind,
    }


def loss_rows(head: str, device: DescribedGpu) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yields an id and values for each number of tokens, plain and in tiles."""
    width, words, dtype, lengths = HEADS[head]
    place, kernel = device.place(), jax.ShapeDtypeStruct((width, words), jnp.dtype(dtype))
    for tokens in lengths:
        taken = loss.tile_of(1, tokens, kernel, jnp.dtype(jnp.bfloat16))
        tile = taken or loss.TILE_TOKENS
        for method, chunk in (("plain", 0), ("tiled", tile)):
            program = objectives.head_program(width, words, tokens, chunk, "bfloat16", dtype, place)
            found: Any = program.memory_analysis()
            yield (
                f"{head}/{tokens}/{method}",
                {
                    "task": head,
                    "method": method,
                    "head_tokens": tokens,
                    "tile": chunk,
                    "is_taken": bool(taken) == bool(chunk),
                    "bytes": {"temporaries": found.temp_size_in_bytes},
                    **costs(hlo.kernels(program.as_text()), {words: -(-tokens // tile)}),
                },
            )


def step_row(settings: config.Config, chips: str, batch: memory.BatchSize) -> dict[str, Any]:
    """Returns the values of the row of a training step.

    Args:
        chips: of `aot.TRAINING`; "": one H200.
    """
    given = jax.tree.map(np.asarray, memory.rows(settings.model, batch))
    sizes = [
        sum(x.size for x in jax.tree.leaves(part))
        for part in jax.eval_shape(lambda: memory.parts(settings))
    ]
    needed = flops.work_of(given, settings.model, sizes[0] / sum(sizes)).flops
    if chips:
        settings, axes = aot.full_run(settings), aot.training_axes(settings, chips)
        step = aot.training(settings, chips, axes, batch)
        count, peak, row = math.prod(axes.values()), step.chip.flops, step.row(settings)
        rate, floor_bytes = peak, 0.0
        row["operations"] = hlo.operations(step.text)
        row["bytes_moved"] = float(sum(step.exchanged().values()))
        row["predicted_s"] = step.projected()["overlapped_s"]
    else:
        takes = attention.takes(
            IMPLEMENTATION, settings.model.compute_dtype, settings.model.head_dim
        )
        changes = {"attention_implementation": IMPLEMENTATION if takes else "reference"}
        settings = config.changed(settings, {"model": changes})
        mesh = Mesh(np.array(GPU.place().mesh.devices), ("data",))
        step = aot.step_on(settings, mesh, batch)
        count, peak, rates = 1, flops.peak(GPU.kind), GPU.rates["measured"]
        lengths = batch.understanding, batch.generation * settings.model.codes_per_token
        words = settings.model.vocab_size, settings.model.codebook_size
        tiles = memory.tiles(settings, batch).values()
        turns = {n: -(-t // tile) for n, t, tile in zip(words, lengths, tiles, strict=True) if tile}
        row = {
            "status": "compiled",
            "model": settings.name,
            "device": {"kind": GPU.kind, "count": 1, "described": True},
            "compile_s": step.seconds,
            "bytes": step.memory(),
            **costs(hlo.kernels(step.text), turns),
        }
        rate = rates["matmul_tflops"] * 1e12
        floor_bytes = 2 * step.memory()["arguments"] / rates["copy_gbps"] / 1e9
    assert peak is not None
    return row | {
        "task": "train_step",
        "remat": settings.model.remat,
        "batch": batch.rows,
        "tokens_per_row": [batch.understanding, batch.generation],
        "needed_operations": needed / count,
        "floor_s": max(needed / count / rate, floor_bytes),
        "predicted_mfu": needed / count / row["predicted_s"] / peak,
        "note": "predicted, not measured",
    }


def main(_: list[str]) -> None:
    """Writes a row for each head and number of tokens, or for each config."""
    logging.set_verbosity(logging.WARNING)
    jax.config.update("jax_platforms", "cpu")  # a GPU that is here is left alone
    described = {"device": {"kind": GPU.kind, "count": 1, "described": True}}
    bench, losses = Bench(SUITE), Bench(LOSS_SUITE)
    try:
        for head in HEADS if LOSS.value else ():
            for row_id, row in loss_rows(head, GPU):
                losses.write(row_id, row | described)
                print(row_id, row, flush=True)
        for path in CONFIGS.value:
            settings = config.read(pathlib.Path(path))
            text, image = map(int, TOKENS.value)
            image = memory.image_tokens(settings) if image < 0 else image
            rows = ROWS.value or settings.train.batch_size
            batch = memory.BatchSize(rows, text, image)
            layers = DEPTH.value or settings.model.num_layers
            changes: dict[str, Any] = {"remat": REMAT.value or settings.model.remat}
            if layers != settings.model.num_layers:
                changes |= {"num_layers": layers, "dual_tower_layers": layers // 2}
            settings = config.changed(settings, {"model": changes})
            with unchecked():
                row = step_row(settings, CHIPS.value, batch) | {"layers_compiled": layers}
            chips = CHIPS.value.replace(":", "-") or "h200"
            bench.write(f"{settings.name}/{settings.model.remat}/{chips}", row)
    except config.ConfigError as error:
        sys.exit(f"benchmarks.aot_training: {error}")
    for suite, rows in ((LOSS_SUITE, losses.rows()), (SUITE, bench.rows())):
        if rows:
            print(f"\n{table.table(suite, rows)}")


if __name__ == "__main__":
    command.run(main)
