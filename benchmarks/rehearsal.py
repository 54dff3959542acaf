# SPDX-License-Identifier: Apache-2.0
r"""A model of the release's size is made, converted, loaded, sampled and trained on this machine.

    python -m sparse_lavida_jax.bench.rehearsal --scratch=/tmp/rehearsal
    python -m sparse_lavida_jax.bench.rehearsal --scratch=/tmp/rehearsal --layers=2
    python -m sparse_lavida_jax.bench.rehearsal --scratch=/tmp/tiny --tiny

Its numbers are random. Every part runs in its own process, so that its peak memory is its own, and
writes its rows when it is done; the same command skips finished parts of the same size, settings
and software. `--again` measures them again, `--parts` chooses. Folders of the model stay in
`--scratch`, because later parts need them.

* `stand_in`, `convert`, `verify`, `export`, `int8`: folders, one tensor at a time. An export is
  compared with its source file by file and not kept; if it is the same, the source is not kept
  either.
* `load_whole`, `load_image`, `load_int8`: all parameters; those for images; all, with matrices in
  int8.
* `generate`, `edit`, `ask`, `ground`, `inpaint`: sparse requests, each done twice, the second time
  from the record in its PNG if it has one. An image and a text are also cancelled first.
* `presets_image`, `presets_edit`, `presets_text`: sparse against dense, in one process, without the
  seconds of compiling. Of all but sparse images a few steps are timed, and the others follow from
  their operations.
* `lora`, `branch`: a training step with as many layers as fit.

From `generate` to `presets_text`, matrices are int8 and so is what they are multiplied with
(w8a8): on CPUs, XLA copies every bfloat16 matrix of a program to float32, and int8 products copy
nothing. For the same reason training is in float32 there. Widths are those of the release, with
`--tiny` those of the stand-in of the tests, all in one process: then times mean nothing.
"""

import concurrent.futures
import concurrent.futures.process
import contextlib
import os
import pathlib
import shutil
import sys
import time
import traceback
from typing import Any

from absl import flags, logging

from sparse_lavida_jax import config
from sparse_lavida_jax.bench import command, record, release, serving, timing
from sparse_lavida_jax.bench.rehearsal_parts import INT8, MODEL, PARTS, RELEASED, ReleaseRehearsal
from sparse_lavida_jax.checkpoints import model_folder
from sparse_lavida_jax.programs.folder import keep_programs

TINY = flags.DEFINE_bool("tiny", False, "The tests' stand-in in place of the release's widths.")
LAYERS = flags.DEFINE_integer(
    "layers", 0, "Layers, an even number; 0: all, or 4 with --tiny.", lower_bound=0
)
SCRATCH = flags.DEFINE_string("scratch", "", "Folder for the model's folders, which stay there.")
CHOSEN = flags.DEFINE_list("parts", [], "Parts to run; by default all.")
AGAIN = flags.DEFINE_bool("again", False, "Also runs parts that have their rows.")
MINUTES = flags.DEFINE_float(
    "minutes", 0.0, "No further part is begun that would end later; 0: all are.", lower_bound=0.0
)

SUITE = "rehearsal"


def main(_: list[str]) -> None:
    """Runs the parts one after another, and says which of them failed."""
    if not SCRATCH.value:
        sys.exit("bench.rehearsal: --scratch=FOLDER is needed, on a disk with room for the model.")
    layers = LAYERS.value or (4 if TINY.value else release.ALL_LAYERS)
    if layers % 2:
        sys.exit(f"bench.rehearsal: --layers={layers} is odd, and half of them have two branches.")
    if unknown := [name for name in CHOSEN.value if name not in PARTS]:
        sys.exit(f"bench.rehearsal: there is no part {unknown[0]!r}: {', '.join(PARTS)}.")
    asked = ReleaseRehearsal(pathlib.Path(SCRATCH.value).resolve(), layers, TINY.value, AGAIN.value)
    asked.folder.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in PARTS if name in (CHOSEN.value or PARTS)]
    if refusal := _no_room(asked, chosen):
        sys.exit(f"bench.rehearsal: {refusal}")
    failed, child = [], None
    for name in timing.in_time(chosen, MINUTES.value, "the same command runs the rest."):
        child = child or concurrent.futures.ProcessPoolExecutor(1, release.SPAWN)
        try:
            is_right, told = child.submit(run_part, name, asked).result()
        except concurrent.futures.process.BrokenProcessPool:
            is_right, told = False, "ended from outside, most likely for want of memory."
        except Exception as error:  # the other parts do not depend on it
            traceback.print_exception(error)
            is_right, told = False, f"failed: {error!r}"
        print(f"{name}: {told}", flush=True)
        failed += [] if is_right else [name]
        if not asked.tiny or not is_right:  # with --tiny they share programs and parameters
            child = child.shutdown()
    if failed:
        sys.exit(f"bench.rehearsal: not as it should be: {', '.join(failed)}.")


def _no_room(asked: ReleaseRehearsal, chosen: list[str]) -> str:
    """Returns why the disk is too full for the folders to be made; "": it is not."""
    if not {"stand_in", "convert", "export"} & {*chosen} or (asked.folder / INT8).exists():
        return ""
    held = sum(path.stat().st_size for path in asked.folder.rglob("*") if path.is_file())
    free, needed = shutil.disk_usage(asked.folder).free, max(asked.disk_bytes - held, 0)
    told = (
        f"{asked.folder} needs {asked.disk_bytes / 1e9:.1f} GB, of which {held / 1e9:.1f} are there"
    )
    print(f"{told}; {free / 1e9:.1f} GB are free.", flush=True)
    return "" if free >= needed else f"{told}, and only {free / 1e9:.1f} GB are free."


def run_part(name: str, asked: ReleaseRehearsal) -> tuple[bool, str]:
    """Runs a part in this process unless its rows are there, and writes them.

    Returns:
        Whether everything is as it should be, and a line about it.
    """
    with contextlib.suppress(OSError):
        # If memory runs out, this process is to end, and no other.
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    logging.set_verbosity(logging.WARNING)
    keep_programs()
    now = record.circumstances()
    how = asked.how | {"part": name, "software": now["software"]}
    there = [
        row
        for row in record.read_rows(SUITE)
        if row["device"] == now["device"] and not record.differing(row, how)
    ]
    if there and _still_made(name, asked) and not asked.again:
        return not any(map(_wrong, there)), f"its rows are there ({there[0]['created']})."
    bench, begin = record.Bench(SUITE), time.perf_counter()
    try:
        rows = PARTS[name](asked)
    except (config.ConfigError, model_folder.CheckpointError) as error:
        return False, str(error)
    peak = round(serving.memory(os.getpid()).get("peak_rss_gb", 0.0) * 1e9)
    common = how | {"batch": 1, "peak_host_memory_bytes": peak}
    for row_id, row in rows.items():
        row.setdefault("checks", {})
        if row["task"] == "folder":
            row["checks"]["memory"] = asked.tiny or peak <= release.MOST_BYTES
        row = common | {"note": "random weights"} | row
        bench.write(f"{asked.size}/layers{asked.layers}/{row_id}", row)
    wrong = [f"{id_}: {key}" for id_, row in rows.items() for key in _wrong(row)]
    told = f"{time.perf_counter() - begin:.0f} s, at most {peak / 1e9:.2f} GB of memory"
    return not wrong, f"{told}{(wrong and f'; not as it should be: {wrong}') or ''}"


def _wrong(row: dict[str, Any]) -> list[str]:
    return [name for name, is_so in row.get("checks", {}).items() if not is_so]


def _still_made(name: str, asked: ReleaseRehearsal) -> bool:
    """Whether the folder that a part makes is there, or has served its purpose."""
    folders = {"stand_in": (RELEASED, MODEL), "convert": (MODEL,), "int8": (INT8,)}.get(name, ())
    return not folders or any((asked.folder / one / "config.json").is_file() for one in folders)


if __name__ == "__main__":
    command.run(main)
