# SPDX-License-Identifier: Apache-2.0
"""The model accepts calls of diffusers' image pipelines, and refuses unsupported arguments."""

import ast
import importlib.util
import inspect
import pathlib

import jax
import numpy as np
import pytest
import stand_ins
from PIL import Image

import sparse_lavida_jax
from sparse_lavida_jax.inference.requests import TASK_SPECS
from sparse_lavida_jax.integrations.diffusers_pipeline import SparseLaViDaPipeline
from sparse_lavida_jax.prompting.request_errors import RequestError
from sparse_lavida_jax.scenes import tasks, world

PROMPT = "a red circle above a blue square"
QUICK = {"num_inference_steps": 2, "layout": False}
# Torch tensors in place of a prompt, of initial masks, or of noise levels.
TENSORS = {"latents", "prompt_embeds", "negative_prompt_embeds", "sigmas"}
IMAGE_PIPELINES = (
    "flux/pipeline_flux",
    "lumina2/pipeline_lumina2",
    "qwenimage/pipeline_qwenimage",
    "stable_diffusion_xl/pipeline_stable_diffusion_xl",
)
# Pipelines of text by masked diffusion, for arguments that are not about text.
TEXT_PIPELINES = ("diffusion_gemma/pipeline_diffusion_gemma", "llada2/pipeline_llada2")
OF_TEXT = {"messages", "add_generation_prompt", "gen_length", "eos_early_stop", "eos_token_id"}


@pytest.fixture(scope="module")
def pipe(every_task):
    with stand_ins.quick_compilation():
        yield sparse_lavida_jax.SparseLaViDaPipeline.from_pretrained(every_task)


@pytest.fixture(scope="module")
def shown():
    return Image.fromarray(world.render(tasks.sample("edit", 0, 0).image))


def test_images_are_those_of_our_own_interface(pipe):
    """Their scale is ours plus one: uncond + s (cond - uncond), (1+g) cond - g uncond."""
    made = pipe(PROMPT, guidance_scale=2.5, num_images_per_prompt=2, generator=3, **QUICK)
    wanted = pipe.model.generate(PROMPT, steps=2, guidance=1.5, num_images=2, seed=3, layout=False)
    assert [image.size for image in made.images] == [(96, 96)] * 2
    np.testing.assert_array_equal(made.images, wanted.pixels)
    assert made.result.seeds == (3, 4)


def test_an_image_is_edited_and_with_a_mask_inpainted(pipe, shown):
    hole = np.zeros((96, 96), bool)
    hole[:16, :16] = True  # one cell
    mask = Image.fromarray(hole)
    made = [
        pipe("remove it", shown, generator=1, **QUICK),
        pipe(PROMPT, image=shown, mask_image=mask, generator=1, **QUICK),
    ]
    assert [one.result.task for one in made] == ["edit", "inpaint"]
    codes = [pipe.model.codec.encode(np.array(one)[None]) for one in (shown, made[1].images[0])]
    np.testing.assert_array_equal(codes[0][:, 1:], codes[1][:, 1:])


def test_images_come_in_the_form_that_is_asked_for(pipe):
    how = {"generator": 3, **QUICK}
    (pixels,) = pipe(PROMPT, return_dict=False, **how)[0]
    numbers = pipe(PROMPT, output_type="np", **how).images
    assert (numbers.dtype, numbers.shape) == (np.float32, (1, 96, 96, 3))
    np.testing.assert_array_equal(np.rint(numbers[0] * 255), pixels)
    cells = pipe(PROMPT, output_type="latent", **how).images
    np.testing.assert_array_equal(pipe.model.codec.to_pixels(cells)[0], pixels)


def test_a_callback_looks_at_every_step_of_the_image(pipe):
    seen = []

    def look(of, step, timestep, given):
        seen.append((of, step, timestep, given["latents"]))
        return given

    how = {"num_inference_steps": 4, "num_images_per_prompt": 3, "callback_on_step_end": look}
    made = pipe(PROMPT, output_type="latent", **how)
    assert [one[:3] for one in seen] == [(pipe, step, 3 - step) for step in range(4)]
    masked = pipe.model.settings.model.image_mask_id
    assert all((latents == masked).any() for *_, latents in seen[:-1])
    np.testing.assert_array_equal(seen[-1][-1], made.images)


def stop(*_):
    raise InterruptedError


def test_a_callback_stops_by_an_exception_and_changes_nothing(pipe):
    with pytest.raises(InterruptedError):
        pipe(PROMPT, callback_on_step_end=stop, **QUICK)
    with pytest.raises(AttributeError):
        pipe._interrupt = True
    with pytest.raises(RequestError, match="other \\['latents'\\]: it may read, not change"):
        pipe(PROMPT, callback_on_step_end=lambda *_: {"latents": 0}, **QUICK)
    with pytest.raises(ValueError, match="read-only"):
        pipe(PROMPT, callback_on_step_end=lambda *a: a[-1]["latents"].fill(0), **QUICK)


def seeds_of(pipe, generator, **more):
    return pipe(PROMPT, generator=generator, **QUICK, **more).result.seeds


def test_generators_are_ints_those_of_numpy_and_lists_of_them(pipe):
    def of(seed):
        return np.random.default_rng(seed)

    drawn = seeds_of(pipe, of(1))
    assert drawn == seeds_of(pipe, of(1)) != seeds_of(pipe, of(2))
    advancing = of(1)
    assert seeds_of(pipe, advancing) == drawn != seeds_of(pipe, advancing)
    listed = seeds_of(pipe, [7, of(1), np.int64(5)], num_images_per_prompt=3)
    assert listed == (7, *drawn, 5)
    assert seeds_of(pipe, None) != seeds_of(pipe, None)
    assert seeds_of(pipe, 2**64 - 1) == seeds_of(pipe, np.uint64(2**31 - 1)) == (2**31 - 1,)
    assert seeds_of(pipe, np.random.RandomState(1)) == seeds_of(pipe, np.random.RandomState(1))


def test_the_seed_of_a_torch_generator_is_read(pipe):
    torch = pytest.importorskip("torch", reason="needs torch")
    assert seeds_of(pipe, torch.Generator().manual_seed(5)) == (5,)
    listed = [torch.Generator().manual_seed(i) for i in (8, 6)]
    assert seeds_of(pipe, listed, num_images_per_prompt=2) == (8, 6)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"prompt": None}, "the prompt is empty"),
        ({"negative_prompt": "a cross"}, "negative_prompt cannot be honoured"),
        ({"negative_prompt": ["", "a cross"]}, "negative_prompt cannot be honoured"),
        ({"output_type": "pt"}, "output_type='pt' is not known: pil, np, latent"),
        ({"height": 96}, "give both, or neither"),
        ({"height": 40, "width": 96}, "size=40x96 cannot be drawn"),
        ({"generator": "7"}, "generator='7' holds no seed"),
        ({"generator": 2**64}, "generator=18446744073709551616 is out of range: 0 to 184467440"),
        ({"eta": 0.5}, "eta=0.5 is out of range: 0, or leave it out"),
        ({"strength": 0.8}, "strength=0.8 is out of range: 1, or leave it out"),
        ({"clip_skip": 2}, "clip_skip=2 is out of range"),
        ({"lightness": 2}, "generate takes no lightness. It takes as_written, best_of"),
        ({"num_images_per_prompt": "2"}, "num_images_per_prompt='2' is out of range"),
        ({"guidance_scale": True}, "guidance_scale=True is out of range: it must be a number"),
        ({"height": 96.5, "width": 96}, "height=96.5 is out of range: it must be a whole number"),
        ({"negative_prompt": 5}, "negative_prompt=5 is out of range: it must be a text"),
        ({"generator": True}, "generator=True is out of range: it must be a whole number"),
        ({"generator": jax.random.key(0)}, "holds no seed: give an int, a numpy.random.Generator"),
        ({"mask_image": np.zeros((96, 96))}, "is about an image: give one"),
        (
            {
                "callback_on_step_end": stop,
                "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"],
            },
            "\\['prompt_embeds'\\]: there is only 'latents'",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(pipe, asked, told):
    with pytest.raises(ValueError, match=told):
        pipe(**{"prompt": PROMPT, **asked})


def test_an_empty_negative_prompt_is_what_guidance_does_anyway(pipe):
    assert pipe(PROMPT, negative_prompt="", generator=1, **QUICK).result.seeds == (1,)
    assert pipe([PROMPT], negative_prompt=[""], generator=1, **QUICK).result.seeds == (1,)


def test_arguments_that_change_nothing_are_taken(pipe, shown):
    neutral = {
        "eta": 0.0, "strength": 1.0, "clip_skip": None, "cross_attention_kwargs": None,
        "negative_prompt_2": "", "max_sequence_length": 512, "guidance_rescale": 0.0,
        "height": np.int64(96), "width": np.int64(96),
    }  # fmt: skip
    wanted = pipe(PROMPT, generator=1, **QUICK)
    made = pipe(PROMPT, generator=1, **neutral, **QUICK | {"num_inference_steps": np.int32(2)})
    np.testing.assert_array_equal(made.images[0], wanted.images[0])
    edited = [pipe("remove it", shown, generator=1, **more, **QUICK) for more in ({}, neutral)]
    np.testing.assert_array_equal(*(one.images[0] for one in edited))


def test_methods_that_spare_memory_or_show_progress_are_taken(pipe):
    pipe.set_progress_bar_config(disable=True)
    pipe.enable_model_cpu_offload(gpu_id=0)
    for what in ("attention_slicing", "vae_slicing", "vae_tiling"):
        getattr(pipe, f"enable_{what}")()
        getattr(pipe, f"disable_{what}")()
    pipe.enable_xformers_memory_efficient_attention()
    pipe.safety_checker = None
    with pytest.raises(AttributeError, match="has no scheduler: its sampler, adapters and memory"):
        pipe.scheduler = pipe.scheduler
    with pytest.raises(AttributeError):
        pipe.safety_checker = len
    assert not hasattr(pipe, "enable_freeu")


LINES = {
    "use_safetensors": True, "variant": "fp16", "safety_checker": None, "device_map": "auto",
    "cache_dir": "models", "token": None, "low_cpu_mem_usage": True, "feature_extractor": None,
    "requires_safety_checker": False, "local_files_only": True, "revision": None,
    "torch_dtype": "auto",
}  # fmt: skip


def test_a_model_is_loaded_as_scripts_write_it(pipe):
    folder = pipe.model.loading["name"]
    made = sparse_lavida_jax.SparseLaViDaPipeline.from_pretrained(folder, **LINES)
    assert made.dtype == pipe.dtype == np.float32 and made.device == "cpu"
    assert made.to(made.device, dtype="float32").model is made.to("cpu").model
    assert made.to("cpu", jax.numpy.float16).dtype == made.to(dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("scenes", {"safety_checker": len}, "safety_checker=.* is out of range: None, or leave"),
        ("scenes", {"torch_dtype": "int8"}, "dtype='int8' is out of range: auto, float32, bf"),
        ("scenes", {"scheduler": 1}, "scheduler=1 is out of range: it cannot be honoured, leave"),
        ("nobody/nothing", {"token": "a"}, "token='a' is out of range: leave it out, and set HF_"),
    ],
)
def test_what_a_loader_cannot_honour_is_refused(name, given, told):
    with pytest.raises(RequestError, match=told):
        SparseLaViDaPipeline.from_pretrained(name, **given)


class TorchDtype:
    def __str__(self):
        return "torch.bfloat16"


def test_parameters_are_loaded_as_torch_names_them(pipe, monkeypatch):
    asked = []

    def load(name, **options):
        asked.append((name, options))
        return pipe.model

    monkeypatch.setattr(sparse_lavida_jax.SparseLaViDa, "from_pretrained", load)
    SparseLaViDaPipeline.from_pretrained("a", torch_dtype=TorchDtype(), revision="main")
    SparseLaViDaPipeline.from_pretrained("a", dtype="float32")
    SparseLaViDaPipeline.from_pretrained("a")
    assert asked == [
        ("a", {"dtype": "bfloat16", "revision": "main"}),
        ("a", {"dtype": "float32"}),
        ("a", {"dtype": None}),
    ]


def test_it_is_on_the_device_where_jax_placed_it(pipe, monkeypatch):
    assert pipe.to("cpu") is pipe
    with pytest.raises(ValueError, match="is on cpu and cannot be moved to cuda"):
        pipe.to("cuda")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert pipe.to("cuda:0") is pipe
    with pytest.raises(ValueError, match="moved to cuda:1"):
        pipe.to("cuda:1")


# ---------------------------------------------------------------------------------------------
# Against the source of diffusers; importing it would need torch.


def of_diffusers(path):
    """Returns the parameters of a pipeline's `__call__` with the sources of their defaults."""
    spec = importlib.util.find_spec("diffusers")
    if spec is None:
        pytest.skip("needs the sources of diffusers: pip install --no-deps diffusers")
    source = pathlib.Path(spec.submodule_search_locations[0], "pipelines", f"{path}.py")
    (call,) = (
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "__call__"
    )
    names = [one.arg for one in call.args.args[1:]]
    return dict(zip(names, map(ast.unparse, call.args.defaults), strict=True))


OURS = dict(list(inspect.signature(SparseLaViDaPipeline.__call__).parameters.items())[1:])


def test_what_all_image_pipelines_take_is_taken():
    theirs = [of_diffusers(path) for path in IMAGE_PIPELINES]
    shared = set.intersection(*map(set, theirs))
    assert {"negative_prompt", "num_images_per_prompt", "callback_on_step_end"} <= shared
    assert shared - TENSORS <= set(OURS)


def test_what_the_pipelines_of_masked_diffusion_take_is_taken():
    theirs = [of_diffusers(path) for path in TEXT_PIPELINES]
    shared = set.intersection(*map(set, theirs))
    assert {"prompt", "num_inference_steps", "generator", "return_dict"} <= shared
    assert shared - OF_TEXT - {"temperature"} <= set(OURS)
    assert "temperature" in TASK_SPECS["generate"].takes


@pytest.mark.parametrize("path", IMAGE_PIPELINES)
def test_defaults_are_theirs(path):
    """Except for steps and scales, which depend on the model; ours come from the checkpoint."""
    theirs = of_diffusers(path)
    assert next(iter(OURS)) == next(iter(theirs)) == "prompt"
    for name in ("num_images_per_prompt", "output_type", "return_dict"):
        assert OURS[name].default == ast.literal_eval(theirs[name])
    assert [*OURS["callback_on_step_end_tensor_inputs"].default] == ["latents"]
    assert ast.literal_eval(theirs["callback_on_step_end_tensor_inputs"]) == ["latents"]


def test_a_callback_of_theirs_says_itself_what_it_looks_at(pipe):
    pytest.importorskip("torch", reason="needs torch")
    callbacks = pytest.importorskip("diffusers.callbacks", reason="needs diffusers")
    how = {"generator": 1, "callback_on_step_end": callbacks.SDCFGCutoffCallback()}
    with pytest.raises(RequestError, match="there is only 'latents'"):
        pipe(PROMPT, **how, **QUICK)
