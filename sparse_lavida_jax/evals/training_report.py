# SPDX-License-Identifier: Apache-2.0
"""What a run shows: sheets of images while it trains, and `report.md` at its end."""

import dataclasses
import pathlib
import statistics
import textwrap
import time
from collections.abc import Sequence

import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sparse_lavida_jax import config
from sparse_lavida_jax.art import tasks as art_tasks
from sparse_lavida_jax.checkpoints import cards, model_folder
from sparse_lavida_jax.data import files, image_files, markdown
from sparse_lavida_jax.evals import exact, held_out, nearest, scorers
from sparse_lavida_jax.inference.engine import planned_costs
from sparse_lavida_jax.mixture.record_batches import MixtureBatches
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.sampling import costs
from sparse_lavida_jax.scenes import grammar, tasks, world
from sparse_lavida_jax.training import lengths, metrics

CHECK_PROMPTS = 48  # drawing prompts scored during training
SHEET_COLUMNS = 6
CAPTION_LINES = 4
CAPTION_HEIGHT = 10 * CAPTION_LINES  # pixels
SPEED_RUNS = 5  # the median is reported
ALL_TASKS = {*tasks.TASKS, *art_tasks.TASKS}
LOSS_ROWS = 10  # in the table of losses
NLL = "nll: mean negative log-likelihood of a text token or image code in nats; lower is better."


@dataclasses.dataclass(frozen=True)
class Tile:
    """An image on a sheet, with its caption."""

    pixels: np.ndarray
    caption: str
    ok: bool | None = None


def sheet(tiles: Sequence[Tile], columns: int = SHEET_COLUMNS) -> Image.Image:
    """Returns images in a grid with captions, in green or red if they were judged.

    Small images are enlarged, so that there is room for a caption below each.
    """
    images = [_enlarged(np.asarray(tile.pixels)) for tile in tiles]
    side = images[0].shape[0]
    rows = -(-len(tiles) // columns)
    width, height = columns * (side + 8), rows * (side + CAPTION_HEIGHT + 8)
    page = Image.new("RGB", (width, height), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(9)
    for i, tile in enumerate(tiles):
        x, y = i % columns * (side + 8) + 4, i // columns * (side + CAPTION_HEIGHT + 8) + 4
        page.paste(Image.fromarray(images[i]), (x, y))
        colour = {None: "black", True: "darkgreen", False: "firebrick"}[tile.ok]
        for line, text in enumerate(_wrap(tile.caption, font, side)):
            pen.text((x, y + side + 1 + 10 * line), text, fill=colour, font=font)
    return page


def check(pipe: SparseLaViDa, path: pathlib.Path, prompts: Sequence[str] = ()) -> dict[str, float]:
    """Draws test prompts during a run, saves a sheet and returns scores to log.

    Args:
        prompts: what to draw with prepared data, whose images no program can judge.
    """
    source = pipe.settings.data.source
    scores: dict[str, float] = {}
    if source == "prepared":
        images = pipe.generate(prompts).pixels if prompts else ()
        tiles = [Tile(image, words) for image, words in zip(images, prompts, strict=True)]
    else:
        here = exact.world_of(pipe.settings)
        numbers = range(CHECK_PROMPTS)
        samples = [here.sample("draw", exact.EVAL_SEED, number, "test") for number in numbers]
        images = pipe.generate([one.prompt for one in samples], as_written=True).pixels
        tiles = [
            Tile(image, sample.prompt, here.score(sample, image).ok)
            for sample, image in zip(samples, images, strict=True)
        ]
        scores["draw"] = sum(bool(tile.ok) for tile in tiles) / len(tiles)
        if source == "scenes":
            result = exact.tally("draw", samples, images)
            right, asked = result.columns.get("single", (0, 0))
            scores["single"] = right / max(asked, 1)
            scores["attribute_precision"] = result.attribute_precision or 0.0
        else:
            scores |= exact.coherence(samples, images)
        for task in pipe.settings.train.eval_tasks:
            scores[task] = exact.evaluate(pipe, task, CHECK_PROMPTS).share
    if tiles:
        _save(sheet(tiles[: 4 * SHEET_COLUMNS] if scores else tiles), path)
    return scores


def model_card(settings: config.Config, steps: int, seconds: float, base_readme: str = "") -> str:
    """Returns the README of a model folder: what the model is, its origin and its licence.

    Args:
        base_readme: of the model that training started from, if any.
    """
    how = f"(seed {settings.seed}, {steps} steps, {seconds / 60:.0f} minutes)"
    command = f"`python -m sparse_lavida_jax.main --config=configs/{settings.name}.py`"
    own = settings.data.source == "prepared"
    data = f"on the images and texts of `{files.title(settings.data.folder)}`"
    if settings.train.init_from:
        base, on = files.title(settings.train.init_from), data if own else f"by {command}"
        return (
            f"# {settings.name}\n\nTrained {on} {how} from the model `{base}`. Its licence,"
            f" below, also applies to these parameters.\n\n{base_readme}"
        )
    if own:
        return (
            f"# {settings.name}\n\nA Sparse-LaViDa trained from scratch {how} {data}. Their"
            " owners decide how it may be used.\n"
        )
    return (
        f"# {settings.name}\n\nA small Sparse-LaViDa trained from scratch by {command} {how}"
        " on data that the package generates. Parameters: Apache-2.0, like the code.\n"
    )


def write(
    pipe: SparseLaViDa,
    folder: pathlib.Path,
    *,
    step: int,
    seconds: float,
    data: MixtureBatches | None = None,
) -> pathlib.Path:
    """Writes `report.md`: curve, exact scores, examples and measured speed of a finished run.

    With prepared data it has the losses, including those of held-out records, the newest sheet of
    images, and samples with their nearest training images, but no scores: no program here can judge
    what the images show.

    Args:
        data: the prepared data that the model was trained on; None for the small world.
    """
    settings, log = pipe.settings, folder / "metrics.jsonl"
    parameters = sum(leaf.size for leaf in jax.tree.leaves(pipe.model))
    parts = [
        f"# {settings.name}",
        f"{parameters / 1e6:.2f} M parameters, {step} steps in {seconds / 60:.1f} minutes (without"
        f" compiling them) on {jax.devices()[0].device_kind}, seed {settings.seed}.",
    ]
    if data is not None:
        enough, sentence = lengths.outcome(settings, log, step, seconds)
        parts += [f"{sentence}.", "## While it trained", NLL, _losses(log)]
        if settings.data.held_out:
            parts += ["## Held-out records", held_out.compare(pipe.model, data)]
        parts += _newest_sheet(folder)
        records = [] if pipe.codec is None else data.captioned(nearest.MOST_RECORDS)
        if records:
            said, shown = nearest.compare(pipe, records, settings.train.eval_prompts, enough)
            _save(sheet([Tile(*one) for one in shown]), folder / "images/nearest.png")
            # Captions as text, too: the font of the sheet only has Latin letters.
            pairs = zip(shown[::2], shown[1::2], strict=True)
            words = "\n".join(f"1. {one}; {other}" for (_, one), (_, other) in pairs)
            parts += ["## Nearest training images", said, "![nearest](images/nearest.png)", words]
    else:
        parts[-1] += (
            " Scores come from programs that read pixels and text, on prompts that training never"
            " draws from."
        )
        parts += ["## While it trained", _curve(log)]
        table, *shown = _scene_sections(pipe, folder)
        parts += ["## Exact scores", table, *shown]
        _show_scores(folder / "model", table)
        if settings.data.source == "art":
            said, tiles, _ = nearest.remembered(pipe, settings.train.eval_prompts)
            _save(sheet([Tile(*one) for one in tiles]), folder / "images/nearest.png")
            parts += ["## Nearest training images", said, "![nearest](images/nearest.png)"]
        parts += ["## Speed", _speed(pipe)]
    path = folder / "report.md"
    files.write_text(path, "\n\n".join(parts) + "\n")
    return path


def _losses(path: pathlib.Path) -> str:
    """Returns a table of mean losses for each tenth of a run."""
    logged = [row for row in metrics.read_metrics(path) if row.get("loss") is not None]
    if not logged:
        return "No loss was logged (train.log_every)."
    names = [n for n in ("loss", "text_nll", "image_nll") if any(n in row for row in logged)]
    lines = []
    for tenth in np.array_split(np.arange(len(logged)), min(LOSS_ROWS, len(logged))):
        part = [logged[i] for i in tenth]
        found = [[row[name] for row in part if row.get(name) is not None] for name in names]
        means = (f"{np.mean(values):.4f}" if values else "" for values in found)
        lines.append((part[-1]["step"], *means))
    return markdown.table(("up to step", *names), lines)


def _newest_sheet(folder: pathlib.Path) -> list[str]:
    sheets = [*folder.glob("images/[0-9]*.png")]
    if not sheets:
        return []
    newest = max(sheets, key=lambda path: path.name)
    return [f"## Samples\n\n![samples]({newest.relative_to(folder).as_posix()})"]


def _scene_sections(pipe: SparseLaViDa, folder: pathlib.Path) -> list[str]:
    """Returns a table of exact scores for every trained task, and sections with examples."""
    found, parts, here = [], [], exact.world_of(pipe.settings)
    prompts = pipe.settings.train.eval_prompts
    for task in [task for task in pipe.settings.data.tasks if task in here.tasks.TASKS]:
        samples = [here.sample(task, exact.EVAL_SEED, i, "test") for i in range(prompts)]
        outputs = exact.answer(pipe, samples)
        found += exact.tally(task, samples, outputs, here).metrics
        if title := here.tasks.TABLE[task].label:
            tiles = [
                tile
                for sample, output in zip(samples[:12], outputs[:12], strict=True)
                for tile in _tiles(sample, output, here)
            ]
            name = title.lower()
            _save(sheet(tiles), folder / f"images/{name}.png")
            parts.append(f"## {title}\n\n![{name}](images/{name}.png)")
    return [scorers.table(found), *parts]


def _show_scores(folder: pathlib.Path, table: str) -> None:
    """Adds scores to the README of a model folder, if there is one."""
    readme = folder / "README.md"
    if readme.is_file():
        said = cards.with_scores(files.read_text(readme), table)
        model_folder.copy_with_readme(folder, folder, said)


def _tiles(
    sample: tasks.Sample, output: exact.Output, here: exact.SmallWorld = exact.SCENES
) -> list[Tile]:
    """Returns the images that were shown and the output."""
    ok = here.score(sample, output).ok
    shown = None if sample.image is None else here.render(sample.image)
    if isinstance(output, str):
        blank = here.render(here.empty) if shown is None else shown
        return [Tile(_with_box(blank, output, here.frame), f"{sample.prompt} {output.strip()}", ok)]
    if shown is None:
        return [Tile(output, sample.prompt, ok)]
    return [Tile(shown, sample.prompt), Tile(output, "->", ok)]


def _curve(path: pathlib.Path) -> str:
    """Returns a table of the checks during a run: the image scores over time."""
    checks = [row for row in metrics.read_metrics(path) if "draw" in row]
    if not checks:
        return "No image was scored while it trained (train.image_seconds, train.eval_every)."
    tasks_scored = dict.fromkeys(name for row in checks for name in row if name in ALL_TASKS)
    names = [
        name for name in ("attribute_precision", "single", "found", "coherent") if name in checks[0]
    ]
    names += tasks_scored
    lines = [
        (
            row["step"],
            f"{row['seconds'] / 60:.1f}",
            *(f"{row[name]:.2f}" if name in row else "" for name in names),
        )
        for row in checks
    ]
    return markdown.table(("step", "minutes", *(name.replace("_", " ") for name in names)), lines)


def _speed(pipe: SparseLaViDa) -> str:
    """Times sparse and dense decoding of images in turn, with the same weights."""
    settings = pipe.settings
    blank = np.zeros((settings.model.num_cells, settings.model.codes_per_token), np.int32)
    examples = [pipe.encoder.image_example("a red circle", blank) for _ in range(pipe.batch_size)]
    names = ("sparse", "dense")
    samplings = [dataclasses.replace(settings.sampling, preset=name) for name in names]
    times: list[list[float]] = [[] for _ in samplings]
    for _ in range(SPEED_RUNS + 1):
        for taken, sampling in zip(times, samplings, strict=True):
            begin = time.perf_counter()
            pipe.sample(examples, sampling=sampling)
            taken.append(time.perf_counter() - begin)
    # The first run includes compilation.
    sparse, dense = (1000 * statistics.median(taken[1:]) / len(examples) for taken in times)
    example, block = examples[0], pipe.prompts.text_block_len
    passed = [costs.total(planned_costs(settings.model, one, example, block)) for one in samplings]
    return (
        f"{settings.sampling.num_steps} steps, batch {len(examples)}, median of {SPEED_RUNS} on"
        f" this machine: sparse {sparse:.1f} ms per image, dense {dense:.1f} ms:"
        f" **{dense / sparse:.1f} times faster**. Tokens passed through the model per image:"
        f" sparse {passed[0]}, dense {passed[1]}."
    )


def _enlarged(pixels: np.ndarray) -> np.ndarray:
    """Returns an image whose sides are at least those of an image of scenes."""
    factor = -(-world.IMAGE_SIZE // pixels.shape[0])
    return pixels.repeat(factor, axis=0).repeat(factor, axis=1)


def _with_box(pixels: np.ndarray, text: str, frame: int = grammar.LOCATIONS - 1) -> np.ndarray:
    try:
        found = grammar.parse_box(text.strip(), frame)
        edges = [edge * pixels.shape[0] // frame for edge in found]
    except grammar.GrammarError:
        return pixels
    (left, right), (top, bottom) = sorted(edges[::2]), sorted(edges[1::2])
    return image_files.with_boxes(pixels, [(left, top, right, bottom)])


def _wrap(text: str, font, width: int) -> list[str]:
    """Returns the lines of a caption that fit below its image, `...` in place of the rest.

    Args:
        width: of the image, in pixels.
    """
    text = text.replace("><", "> <")  # LOC tokens have no spaces between them
    letters, lines = width, [text]
    while any(font.getlength(line) > width for line in lines):
        letters -= 1
        lines = textwrap.wrap(text, letters, max_lines=CAPTION_LINES, placeholder="...")
    return lines


def _save(image: Image.Image, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
