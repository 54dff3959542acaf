# SPDX-License-Identifier: Apache-2.0
r"""What few steps cost, in bits: the likelihood of images under plans of K steps.

    python -m benchmarks.few_steps --part=gap                # the bundled model
    python -m benchmarks.few_steps --part=gap --model=runs/art/model
    python -m benchmarks.few_steps --part=registers --model=art
    python -m benchmarks.few_steps --part=page               # docs/few_steps.md, from the rows
    python -m benchmarks.few_steps --part=code --model=runs/art_style/model  # with a style code
    python -m benchmarks.few_steps --part=holes --model=runs/art_style/model
    python -m benchmarks.few_steps --part=plans --given=words --images=300
    python -m benchmarks.few_steps --part=plans --plan=schedule=linear,revisions=2 --steps=4

Cells of one step are drawn independently of each other, so they cannot agree on what is left open.
What that costs is the *gap*: the bits of an image under a plan of K steps, less those under a plan
of one cell a step. Both are read from one pass over the plan (`inference/surprise.py`), at
temperature 1, without guidance. With `--given=layout` the true layout is given, which in the world
of shapes determines the image; with `--given=words` it is not. Bits of finished plans are kept in
`--finished`.

`--part=registers` says what fewer registers in later steps cost (`sampling.registers_end`), in bits
too: the model's own plan with them against the same plan without. `--part=code` says how much of
the gap a style code closes: the bits that an image and its code cost together, with codes of the
posterior, against the same model without its code. `--part=holes` draws images with codes of the
prior and, of the same prompts, of the posterior of the true image: where the prior draws codes that
no image has, the second are better. `--part=plans` searches the best plan for each number of steps
(`plan_search.py`), counting revisions as steps; with `--search=` it scores the model's own plan,
and with `--plan` the given one. With `--split=open` prompts leave styles and facings to the model.
`--part=styles` draws a figure: a row for each prompt, a column for each code, all of one seed; the
prompts leave styles and facings open.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Float, Int

from benchmarks import command, few_steps_page, measurements, plan_search
from sparse_lavida_jax import config, diffusion, orders
from sparse_lavida_jax.data.batch import RowShape, stack
from sparse_lavida_jax.data.corrupted_rows import Corrupted, CorruptedRow
from sparse_lavida_jax.data.example import Example
from sparse_lavida_jax.data.image_files import Pixels
from sparse_lavida_jax.evals import exact, training_report
from sparse_lavida_jax.inference import surprise
from sparse_lavida_jax.inference.tasks import TaskRun
from sparse_lavida_jax.models.denoiser import Denoiser
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.sampling.presets import RowRequest
from sparse_lavida_jax.scenes.task import Sample
from sparse_lavida_jax.sequence import prompt_row
from sparse_lavida_jax.training import style

PARTS = ["gap", "registers", "code", "holes", "plans", "styles", "page"]
PART = flags.DEFINE_enum("part", "gap", PARTS, "What is done.")
MODEL = flags.DEFINE_string("model", "scenes", "A bundled model, or a model folder.")
CALLED = flags.DEFINE_string("called", "", 'What rows call it, such as "style/s0"; "": --model.')
STEPS = flags.DEFINE_list("steps", ["1", "2", "4", "8", "16", "32"], "Steps of the plans.")
SCHEDULES = flags.DEFINE_list("schedules", ["linear", "cosine", "shift"], "Cells of each step.")
ORDERS = flags.DEFINE_list("orders", ["stratified", "halton", "random"], "Orders of the cells.")
GIVEN = flags.DEFINE_list("given", ["words", "layout"], "What is given of an image.")
COUNT = flags.DEFINE_integer("images", 256, "Unseen images.", lower_bound=16)
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Of images with codes.", lower_bound=0)
SETTINGS = flags.DEFINE_list("search", [*plan_search.SETTINGS], "Settings of plans to search.")
PLAN = flags.DEFINE_list("plan", [], "Settings of a plan to score; empty: plans are searched.")
SPLIT = flags.DEFINE_enum("split", "held_out", ["held_out", "open"], "Prompts of plans.")
IMAGE_SEED = flags.DEFINE_integer("seed", 0, "Of the images that plans draw.", lower_bound=0)
DONE = flags.DEFINE_string("finished", "runs/few_steps.jsonl", "File for finished plans.")

BATCH, SEED = 16, 56
STYLED = 4  # prompts and codes of the figure of styles


def main(_: list[str]) -> None:
    """Does a part."""
    if PART.value == "page":
        few_steps_page.write()
        return
    pipe = SparseLaViDa.from_pretrained(MODEL.value, batch_size=BATCH)
    if PART.value == "plans":
        search_plans(pipe)
        return
    coded = PART.value in ("code", "holes", "styles")
    if coded and not pipe.settings.model.style_parts:
        raise config.ConfigError(f"{MODEL.value} has no style code: name a model that has one.")
    if PART.value == "styles":
        draw_styles(pipe, few_steps_page.DOCS / "few_steps_styles.png")
        return
    rows = {"gap": gap_rows, "registers": register_rows, "code": code_rows, "holes": hole_rows}
    bench = measurements.Bench("few_steps")
    called = CALLED.value or MODEL.value
    for row in rows[PART.value](pipe):
        name = f"{PART.value}/{row['given']}/{row['order']}/{row['schedule']}/k{row['steps']}"
        name += "".join(f"/{row[one]}" for one in ("codes", "registers") if one in row)
        path = bench.write(name, {"model": called, **row}, name=f"{called}/{name}")
        told = (
            f"{one} {row[one]:.3f}" for one in ("bits", "gap", "share", "coherent") if one in row
        )
        print(path.name, *told, flush=True)


def search_plans(pipe: SparseLaViDa) -> None:
    """Searches the best plan for each number of steps, or scores the given one.

    Raises:
        ConfigError: `--search` or `--plan` has an unknown name.
    """
    if unknown := set(filter(None, SETTINGS.value)) - set(plan_search.SETTINGS):
        raise config.ConfigError(
            f"--search={','.join(sorted(unknown))} is unknown: choose of"
            f" {', '.join(plan_search.SETTINGS)}."
        )
    asked = [name for name in plan_search.SETTINGS if name in SETTINGS.value]
    changes = plan_search.changes_of(PLAN.value, pipe.settings.sampling)
    for given in GIVEN.value:
        called = CALLED.value or MODEL.value
        scorer = plan_search.Scorer(pipe, called, given, COUNT.value, IMAGE_SEED.value, SPLIT.value)
        for steps in map(int, STEPS.value):
            if changes:
                scorer.scored(steps, changes)
                continue
            best = plan_search.search(scorer, steps, asked)
            print(f"best of {steps} steps, given {given}: {best}", flush=True)


def plans(cells: int) -> Iterator[tuple[str, str, list[tuple[str, int]]]]:
    """Yields what is given and an order, with the plans of fewer steps than cells."""
    numbers = [int(one) for one in STEPS.value if int(one) < cells]
    cut = [
        (schedule, steps)
        for schedule, steps in itertools.product(SCHEDULES.value, numbers)
        if steps > 1 or schedule == SCHEDULES.value[0]  # one step is the same by all schedules
    ]
    for given, order in itertools.product(GIVEN.value, ORDERS.value):
        yield given, order, cut


def gap_rows(pipe: SparseLaViDa) -> Iterator[dict[str, Any]]:
    """Yields a row for each plan, with its gap to one cell a step in the same order."""
    cells = pipe.settings.model.num_cells
    for given, order, cut in plans(cells):
        least = bits_of(pipe, given, order, "linear", cells)
        for schedule, number in [("linear", cells), *cut]:
            bits = bits_of(pipe, given, order, schedule, number)
            gap = bits - least
            yield {
                "method": schedule, "given": given, "order": order, "schedule": schedule,
                "steps": number, "images": len(bits), "bits": bits.mean(), "gap": gap.mean(),
                "gap_error": gap.std() / len(gap) ** 0.5,
                "note": "bits an image at temperature 1; error: standard, of the paired mean",
            }  # fmt: skip


def register_rows(pipe: SparseLaViDa) -> Iterator[dict[str, Any]]:
    """Yields a row for each last number of registers, with its gap to as many in all steps."""
    own = pipe.settings.sampling
    for given in GIVEN.value:
        plan = given, own.order, own.schedule, own.num_steps
        least = bits_of(pipe, *plan)
        for change in plan_search.SETTINGS["registers"]:
            last = change["registers_end"]
            bits = bits_of(pipe, *plan, last)
            gap = bits - least
            yield {
                "method": str(last), "given": given, "order": own.order, "schedule": own.schedule,
                "steps": own.num_steps, "registers": last, "images": len(bits),
                "bits": bits.mean(), "gap": gap.mean(), "gap_error": gap.std() / len(gap) ** 0.5,
                "note": "bits an image at temperature 1; error: standard, of the paired mean",
            }  # fmt: skip


def bits_of(
    pipe: SparseLaViDa, given: str, order: str, schedule: str, steps: int, registers_end: int = -1
) -> Float[np.ndarray, " n"]:
    """Returns the bits of each image under a plan."""
    key = f"{pipe.source.sha256} {given} {order} {schedule} {steps}"
    key += f" {registers_end}" if registers_end >= 0 else ""
    path = pathlib.Path(DONE.value)
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    known = {line["key"]: line["bits"] for line in lines}
    if len(known.get(key, ())) < COUNT.value:
        known[key] = _bits(pipe, given, order, schedule, steps, registers_end)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({"key": key, "bits": known[key]}) + "\n")
    return np.array(known[key][: COUNT.value])


class Images(NamedTuple):
    """A batch of held-out images.

    Attributes:
        numbers: of their prompts.
        samples: their prompts and scenes.
        examples: prompts, with the layout if it is given.
        codes: of the images.
    """

    numbers: range
    samples: list[Sample]
    examples: list[Example]
    codes: Int[np.ndarray, "b l g"]


def images(pipe: SparseLaViDa, run: TaskRun, given: str) -> Iterator[Images]:
    """Yields the images that are measured."""
    here = exact.world_of(pipe.settings)
    for start in range(0, COUNT.value, BATCH):
        numbers = range(start, min(start + BATCH, COUNT.value))
        samples = [here.sample("draw", SEED, number, "test") for number in numbers]
        codes = run.codec.encode(np.stack([here.render(one.target) for one in samples]))
        asked = [
            pipe.requests("generate", one.prompt, layout=given == "layout" and one.layout,
                          sampling=run.sampling, as_written=True)[0]
            for one in samples
        ]  # fmt: skip
        yield Images(numbers, samples, [run.image_example(one) for one in asked], codes)


def _bits(
    pipe: SparseLaViDa, given: str, order: str, schedule: str, steps: int, registers_end: int = -1
) -> list[float]:
    how = surprise.sampling_of(pipe.settings.sampling, pipe.settings.model)
    how = dataclasses.replace(
        how, num_steps=steps, order=order, schedule=schedule, merge_cells=0, cell_passes=1,
        registers_end=registers_end,
    )  # fmt: skip
    run, found = pipe.task_run(how), list[float]()
    for numbers, _, examples, codes in images(pipe, run, given):
        seeded = [RowRequest(seed=number, temperature=1.0) for number in numbers]
        scored = run.engine.scores(
            examples, seeded, how, list(codes), stage="image", programs=run.programs
        )
        found += [float((scores.bits * scores.decided).sum()) for _, scores in scored]
    return found


def code_rows(pipe: SparseLaViDa) -> Iterator[dict[str, Any]]:
    """Yields a row for each plan: what an image costs with and without its style code, in bits."""
    model = pipe.settings.model
    for given, order, cut in plans(model.num_cells):
        least = coded_bits(pipe, given, order, "linear", model.num_cells)["without"]
        for schedule, steps in cut:
            bits = coded_bits(pipe, given, order, schedule, steps)
            both = bits["with"] + bits["code"]
            gap = bits["without"] - least
            shares = bits["posterior"].mean(axis=0)  # [n c]
            entropy = -(shares * np.log2(np.maximum(shares, 1e-12))).sum(axis=1)
            yield {
                "method": schedule, "given": given, "order": order, "schedule": schedule,
                "steps": steps, "images": len(both), "bits": both.mean(),
                "bits_of_code": bits["code"].mean(), "bits_without": bits["without"].mean(),
                "gap": (both - least).mean(), "gap_without": gap.mean(),
                "gap_error": (both - least).std() / len(both) ** 0.5,
                "perplexity": float(np.mean(2**entropy)),  # of a group
                "note": "a code of the posterior, and its divergence from the prior; temperature 1",
            }  # fmt: skip


def coded_bits(
    pipe: SparseLaViDa, given: str, order: str, schedule: str, steps: int
) -> dict[str, Float[np.ndarray, "b *_n"]]:
    """Returns bits of images with codes, of the codes, and without any; posteriors, and codes."""
    model, sampling = pipe.settings.model, pipe.settings.sampling
    run, side, found = pipe.task_run(sampling), model.grid_size, []
    sizes = orders.counts(schedule, steps, model.num_cells, sampling.shift)
    for numbers, _, examples, codes in images(pipe, run, given):
        rows = []
        for number, example, cells in zip(numbers, examples, codes, strict=True):
            cut = diffusion.plan_blocks(
                orders.order(order, side, side, number), sizes, example.given, merge_cells=1
            )
            prompt = prompt_row(
                example.parts,
                text_mask_id=model.text_mask_id,
                codes_per_token=model.codes_per_token,
            )
            rows.append(CorruptedRow(prompt, cells, "image", cut, model))
        lengths = np.max([row.lengths for row in rows], axis=0)
        shape = RowShape(*(-(-int(length) // 16) * 16 for length in lengths))
        noise = len(rows), model.style_parts * model.style_groups, model.style_values
        noise = jax.random.gumbel(jax.random.key(numbers[0]), noise)
        draws = style.StyleDraws(noise, jnp.ones(len(rows), bool))
        found.append(jax.device_get(_costs(pipe.engine.model, stack(rows, shape, model), draws)))
    return {name: np.concatenate([one[name] for one in found]).astype(float) for name in found[0]}


def hole_rows(pipe: SparseLaViDa) -> Iterator[dict[str, Any]]:
    """Yields rows of what each plan draws, with codes of the prior and of the posterior."""
    for given, order, cut in plans(pipe.settings.model.num_cells):
        values = coded_bits(pipe, given, order, "linear", 1)["values"].astype(int)
        for (schedule, steps), codes in itertools.product(cut, ("prior", "posterior")):
            how = dataclasses.replace(
                pipe.settings.sampling, num_steps=steps, order=order, schedule=schedule,
                order_seed=-1, merge_cells=0, revisions=0, temperature=TEMPERATURE.value,
            )  # fmt: skip
            run, samples, drawn = pipe.task_run(how), list[Sample](), list[Pixels]()
            for batch in images(pipe, run, given):
                asked = [
                    RowRequest(
                        seed=number, temperature=how.temperature,
                        style_code=tuple(values[number].tolist()) if codes == "posterior" else (),
                    )
                    for number in batch.numbers
                ]  # fmt: skip
                made = run.sample("image", batch.examples, asked)
                drawn.extend(run.codec.to_pixels(np.stack(made), None, how.vq_dtype))
                samples += batch.samples
            yield {
                "method": schedule, "given": given, "order": order, "schedule": schedule,
                "steps": steps, "codes": codes, "temperature": how.temperature,
                **plan_search.judged(pipe.settings, samples, drawn, "test"),
                "note": "prompts of the test split; seeds are those of the prompts",
            }  # fmt: skip


def draw_styles(pipe: SparseLaViDa, path: pathlib.Path) -> None:
    """Draws prompts with the same codes: what a code says, it should say of every prompt.

    Images are revised twice.
    """
    samples, count = plan_search.samples_of(pipe.settings, "open"), STYLED
    prompts = [one.prompt for one in itertools.islice(samples, count)]
    how = {"steps": int(STEPS.value[-1]), "revisions": 2, "as_written": True}
    how["temperature"] = TEMPERATURE.value
    drawn = [
        pipe.generate(prompts, style_seed=code, seed=[0] * count, **how).pixels
        for code in range(count)
    ]
    tiles = [
        training_report.Tile(images[number], prompt)
        for number, prompt in enumerate(prompts)
        for images in drawn
    ]
    training_report.sheet(tiles, columns=count).save(path)
    print(path)


@jax.jit
def _costs(
    model: Denoiser, batch: Corrupted, draws: style.StyleDraws
) -> dict[str, Float[jax.Array, "b *_n"]]:
    assert batch.image_target is not None and batch.image_weight is not None
    code, divergence, posterior = style.coded(model, batch, None, draws)
    found = {"code": divergence / jnp.log(2), "posterior": posterior}
    found["values"] = code.argmax(axis=-1)
    for name, carried in (("with", code), ("without", jnp.zeros_like(code))):
        streams = batch.understanding, batch.generation
        hidden, _ = model(*streams, wanted="generation", style=carried)
        logits = jax.nn.log_softmax(model.image_logits(hidden["generation"], batch.image_target))
        own = jnp.take_along_axis(logits, batch.image_target[..., None], axis=-1)[..., 0]
        weight = batch.image_weight > 0
        weight = weight if weight.ndim == 3 else weight[..., None]
        found[name] = -(own * weight).sum(axis=(1, 2)) / jnp.log(2)
    return found


if __name__ == "__main__":
    command.run(main)
