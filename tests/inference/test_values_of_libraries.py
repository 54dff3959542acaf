# SPDX-License-Identifier: Apache-2.0
"""What other libraries hand over: arrays, masks, numbers, seeds and texts are taken or refused."""

import copy
import io
import pickle
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from sparse_lavida_jax import SparseLaViDa, SparseLaViDaPipeline, config
from sparse_lavida_jax.checkpoints.model_folder import CheckpointError
from sparse_lavida_jax.conversation import Conversation
from sparse_lavida_jax.data import image_files
from sparse_lavida_jax.data.image_files import ImageError
from sparse_lavida_jax.inference import checks
from sparse_lavida_jax.inference.results import Origin, Result
from sparse_lavida_jax.prompting.request_errors import RequestError

PROMPT = "a red circle above a blue square"
NOISE = np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8)
NOISE[0, 0] = 255  # ranges are read from the largest number
MASK = np.zeros((96, 96), np.uint8)
MASK[:48] = 255
MASK[48:] = 1  # as JPEG makes of black


class OfDlpack:
    """An array of a library that speaks DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OfTorch(OfDlpack):
    def __array__(self, *_, **__):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.\nUse detach.")


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file


@pytest.fixture(scope="module")
def folder(every_task):
    return every_task


@pytest.fixture(scope="module")
def pipe(folder):
    return SparseLaViDa.from_pretrained(folder)


# ---------------------------------------------------------------------------------------------
# Images and masks.

# By name: the same levels as another library, type or range.
FORMS = {
    "jax": jnp.asarray,
    "DLPack": OfDlpack,
    "memory": memoryview,
    "16 bits": lambda x: x.astype(np.uint16) * 257,
    "int": lambda x: x.astype(np.int64),
    "0..1": lambda x: (x / 255).astype(np.float16),
    "0..255": lambda x: x.astype(np.float32),
    "bfloat16": lambda x: jnp.asarray(x, jnp.bfloat16),
    "lists": lambda x: x.tolist(),
    "Pillow": Image.fromarray,
    "bytes": lambda x: png(x).getvalue(),
    "file": png,
    "opacity": lambda x: np.dstack([x, np.full(x.shape[:2], 255, np.uint8)]),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_image_is_the_same_in_every_form(form):
    np.testing.assert_array_equal(image_files.check(FORMS[form](NOISE)), NOISE)


MASK_FORMS = FORMS | {
    "opacity": lambda x: FORMS["opacity"](np.dstack([x, x, x])),
    "0 and 1": lambda x: (x > 1).astype(np.uint8),
    "bool": lambda x: x > 1,
    "I;16": lambda x: Image.fromarray(x.astype(np.uint16)),
    "I": lambda x: Image.fromarray(x.astype(np.int32)),
    "F": lambda x: Image.fromarray((x / 255).astype(np.float32)),
    **{mode: lambda x, mode=mode: Image.fromarray(x).convert(mode) for mode in ("1", "P", "RGBA")},
}


@pytest.mark.parametrize("form", MASK_FORMS)
def test_a_mask_is_the_same_in_every_form(form):
    mask = MASK_FORMS[form](MASK)
    np.testing.assert_array_equal(image_files.check_mask(mask, NOISE), MASK > 1)


@hypothesis.given(
    st.integers(2, 255).flatmap(
        lambda most: st.lists(st.integers(0, most), min_size=12, max_size=12)
    )
)
def test_a_type_decides_nothing_but_how_finely_a_mask_is_written(values):
    mask = np.array(values, np.uint8).reshape(3, 4)
    mask[0, 0] = 255
    like = np.zeros((3, 4, 3), np.uint8)
    forms = [
        mask,
        Image.fromarray(mask),
        mask.astype(int),
        mask / 255,
        mask.astype(np.uint16) * 257,
    ]
    for form in [*forms, Image.fromarray(mask.astype(np.float32)), png(mask).getvalue()]:
        np.testing.assert_array_equal(image_files.check_mask(form, like), mask > 127)


@pytest.mark.parametrize("kind", ["array", "Pillow", "file", "0..1"])
def test_transparency_counts_where_a_pixel_is_transparent(kind, tmp_path):
    canvas = np.zeros((96, 96, 4), np.uint8)  # as canvas.toBlob makes it: opaque everywhere
    canvas[..., 3], canvas[:48, :, :3] = 255, 255
    holed = canvas.copy()
    holed[48:, :, 3] = 0

    def read(mask):
        Image.fromarray(mask).save(tmp_path / "mask.png")
        form = {"array": mask, "0..1": mask / 255, "Pillow": Image.fromarray(mask)}
        return image_files.check_mask(form.get(kind, tmp_path / "mask.png"), NOISE)

    np.testing.assert_array_equal(read(canvas), MASK > 1)
    np.testing.assert_array_equal(read(holed), MASK == 1)
    canvas[..., :3] = 0
    with pytest.raises(ImageError, match="black everywhere and transparent nowhere: paint white"):
        read(canvas)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (NOISE.transpose(2, 0, 1), r"the shape \[3, 96, 96\]: .* channels last"),
        (NOISE[:0], r"the shape \[0, 96, 3\]: .* not empty"),
        (NOISE / 255 - 0.5, "numbers from -0.5 to 0.5: they must lie in 0..1 or 0..255"),
        (NOISE / 250, "from 0 to 1.02: they must lie in 0..1"),
        (NOISE * 1e3, "from 0 to 255000: they must lie"),
        (NOISE / np.float64("nan"), "from nan to nan: they must lie"),
        (np.full((2, 2), np.inf), "to inf: they must lie"),
        (NOISE * 1j, "an array of complex128: give bool, whole numbers or floats"),
        (NOISE.astype(object), "an array of object: give"),
        (OfTorch(NOISE), "of type OfTorch, which cannot be read: Can't call numpy.. on Tensor"),
        (5, "of type int: give an array, a Pillow image, a file or the bytes of one"),
        (b"a", "not an image that can be read: neither PNG"),
        (io.StringIO("a"), "a file of text"),
        (Image.new("La", (2, 2)), "in Pillow's mode La, cannot be read as RGB"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_what_is_not_an_image_or_a_mask_is_refused(given, told):
    for call in (image_files.check, lambda mask: image_files.check_mask(mask, NOISE)):
        with pytest.raises(ImageError, match=told):
            call(given)


def test_a_task_takes_images_and_masks_of_any_library(pipe):
    wanted = pipe.requests("inpaint", PROMPT, NOISE, mask=MASK > 1)[0].mask
    assert wanted[:3].all() and not wanted[3:].any()  # a mask is True where something is drawn
    for image, mask in ((jnp.asarray(NOISE), jnp.asarray(MASK)), (png(NOISE), png(MASK))):
        (request,) = pipe.requests("inpaint", PROMPT, image, mask=mask)
        np.testing.assert_array_equal(request.mask, wanted)
    (kept,) = pipe.requests("inpaint", PROMPT, NOISE, known=jnp.asarray(~wanted))
    np.testing.assert_array_equal(kept.mask, wanted)
    assert len(pipe.requests("caption", None, np.stack([NOISE, NOISE]))) == 2
    with pytest.raises(RequestError, match="2 grids of known cells were given for 1 rows"):
        pipe.requests("inpaint", PROMPT, NOISE, known=[~wanted, ~wanted])


# ---------------------------------------------------------------------------------------------
# Numbers, seeds, texts.

NUMBERS = {
    "steps": 2, "seed": 7, "registers": 1, "num_images": 2, "temperature": 0.5, "guidance": 1.5,
    "layout_temperature": 0.5,
}  # fmt: skip


def fields(request):
    return request.seed, request.sampling, request.size, request.temperature, request.guidance


@pytest.mark.parametrize("of", [np.float64, np.float16, jnp.asarray, np.asarray, OfDlpack])
def test_a_number_may_be_a_scalar_of_any_library(pipe, of):
    given = {name: of(np.asarray(value)) for name, value in NUMBERS.items()}
    made, wanted = (pipe.requests("generate", PROMPT, **one) for one in (given, NUMBERS))
    assert [*map(fields, made)] == [*map(fields, wanted)] and len(made) == 2


def test_several_numbers_may_be_an_array(pipe):
    several = {"temperature": np.array([0.5, 1.0]), "size": jnp.array([96, 96])}
    several |= {"seed": jnp.array([3, 2**31 - 1]), "registers": np.array([1, 0])}
    made = pipe.requests("generate", np.array([PROMPT, PROMPT]), **several)
    assert [(one.seed, one.temperature, one.size) for one in made] == [
        (3, 0.5, (96, 96)),
        (2**31 - 1, 1.0, (96, 96)),
    ]
    assert pipe.requests("generate", PROMPT, size=96)[0].size == (96, 96)
    boxes = [0, 0, 9, 9], np.array([0, 0, 9.0, 9])
    lists, arrays = (pipe.requests("inpaint", PROMPT, NOISE, box=box)[0] for box in boxes)
    np.testing.assert_array_equal(lists.mask, arrays.mask)


@pytest.mark.parametrize(
    "wrong", ["2", True, np.bool_(True), b"2", {}, float("nan"), jax.random.key(0)], ids=str
)
@pytest.mark.parametrize("name", [*NUMBERS, "size", "num_inference_steps"])
def test_what_is_not_a_number_is_refused_by_its_name(pipe, name, wrong):
    with pytest.raises((RequestError, config.ConfigError), match=f"{name}=.* is out of range: it"):
        pipe.requests("generate", PROMPT, **{name: wrong})


@pytest.mark.parametrize(
    ("task", "words", "options", "told"),
    [
        ("generate", [], {}, "give at least one prompt: the list is empty"),
        ("ground", [], {}, "give at least one phrase"),
        ("ask", "how many?", {"shown": []}, "give at least one image"),
        ("generate", b"a", {}, "prompt=b'a' is out of range: it must be a text"),
        ("generate", 5, {}, "prompt=5 is out of range"),
        ("generate", ["a", None], {}, "prompt=None is out of range"),
        ("edit", 5, {}, "instruction=5 is out of range"),
        ("generate", PROMPT, {"layout": 5}, "layout=5 is out of range: it must be True, False or"),
        ("generate", PROMPT, {"order": 5}, "order=5 is out of range: it must be a text"),
        ("generate", PROMPT, {"sampling": {}}, "sampling={} is out of range"),
        ("generate", PROMPT, {"size": [96]}, "size=[96] is out of range: it must be height"),
        ("inpaint", PROMPT, {"box": [1, 2]}, "box=[1, 2] is out of range: it must be four numbers"),
        ("reflect", PROMPT, {"rounds": "2"}, "rounds='2' is out of range"),
        ("ask", "how many?", {"max_new_tokens": True}, "max_new_tokens=True is out of range"),
        ("ask", "how many?", {"earlier": ["ab"]}, "earlier='ab' is out of range: it must be pairs"),
    ],
)  # fmt: skip
def test_what_is_missing_or_of_another_type_is_refused(pipe, task, words, options, told):
    shown = options.get("shown", None if task in ("generate", "reflect") else NOISE)
    with pytest.raises(RequestError, match=re.escape(told)):
        pipe.requests(task, words, shown, **{k: v for k, v in options.items() if k != "shown"})


def test_tasks_of_python_refuse_them_too(pipe):
    for call in (
        lambda: pipe.generate(5),
        lambda: pipe.generate(PROMPT, size="96"),
        lambda: pipe.reflect(PROMPT, rounds=True),
        lambda: pipe.ask([], "how many?"),
        lambda: pipe.ask(None, "how many?", max_new_tokens="8"),
        lambda: pipe.constrained_caption(NOISE, words=[]),
    ):
        with pytest.raises(RequestError, match=r"out of range|at least one"):
            call()


@hypothesis.given(st.integers(0, 2**64 - 1), st.integers(1, 5))
def test_a_seed_of_64_bits_is_folded_and_counted_on(seed, rows):
    wanted = [(seed + i) % 2**31 for i in range(rows)]
    assert checks.row_seeds(seed, rows) == checks.row_seeds(np.uint64(seed), rows) == wanted
    assert checks.row_seeds([seed, seed], 2 * rows, rows) == wanted * 2


@pytest.mark.parametrize("seed", [-1, 2**64, 10**400])
def test_a_seed_out_of_range_is_refused_as_typed(pipe, seed):
    told = f"^seed={str(seed)[:99]}.* is out of range: 0 to 18446744073709551615"
    with pytest.raises(RequestError, match=told):
        pipe.requests("generate", PROMPT, seed=seed, num_images=2)


def test_the_turns_of_a_conversation_count_on_from_a_large_seed(pipe, monkeypatch):
    def run(_, made, callback):
        return Result("ask", (), (made[0].seed,), config.Sampling(), Origin(), {})

    monkeypatch.setattr(type(pipe), "run", run)
    talk = Conversation(pipe, NOISE, seed=2**64 - 1)
    said = [talk.say("ask", "how many circles are there?") for _ in range(2)]
    assert [one.seeds for one in said] == [(2**31 - 1,), (0,)]


# ---------------------------------------------------------------------------------------------
# Copies.


def test_a_pipeline_is_copied_by_loading_it_again(pipe, folder):
    changed = pipe.with_sampling(config.Sampling(num_steps=3))
    for made in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        assert made.model is not pipe.model and made.source == pipe.source
        assert made.settings.sampling.num_steps == 3
    assert copy.copy(pipe).model is pipe.model
    diffusers = SparseLaViDaPipeline(pipe)
    assert copy.deepcopy(diffusers).model.source == pipe.source
    with pytest.raises(CheckpointError, match="made in memory cannot be copied: write it"):
        pickle.dumps(pipe.with_model(pipe.model))
