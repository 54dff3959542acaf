# SPDX-License-Identifier: Apache-2.0
"""The folder comfyui/ as ComfyUI loads it, and every node against a server."""

import importlib.util
import inspect
import json
import pathlib
import sys
import types

import numpy as np
import pytest

from sparse_lavida_jax.scenes import tasks, world

WHY = "pip install 'sparse-lavida-jax[serve]' to test the nodes of ComfyUI"
for package in ("fastapi", "prometheus_client", "python_multipart"):
    pytest.importorskip(package, reason=WHY)

from serving_on_loopback import served  # noqa: E402

from sparse_lavida_jax.pipeline import SparseLaViDa  # noqa: E402
from sparse_lavida_jax.server import endpoints  # noqa: E402
from sparse_lavida_jax.server.serving import Service  # noqa: E402

FOLDER = pathlib.Path(__file__).parents[2] / "comfyui"
PROMPT = "a red circle above a blue square"
# The socket types of ComfyUI, and ours.
SOCKETS = {"IMAGE", "MASK", "STRING", "INT", "FLOAT", "SPARSE_LAVIDA_SERVER"}
WIDGETS = {
    "STRING": {"multiline"},
    "INT": {"min", "max", "control_after_generate"},
    "FLOAT": {"min", "max", "step"},
}


@pytest.fixture(scope="module")
def package():
    """The package, imported under its whole path as in ComfyUI."""
    name = str(FOLDER).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, FOLDER / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        if importlib.util.find_spec("torch") is None:
            patch.setattr(module.nodes.files, "tensor", lambda array: array)
        yield module
        for own in [one for one in sys.modules if one.startswith(f"{name}.")]:
            del sys.modules[own]


@pytest.fixture(scope="module")
def pipe(every_task):
    return SparseLaViDa.from_pretrained(every_task)


@pytest.fixture(scope="module")
def address(pipe):
    service = Service(pipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSE_LAVIDA_API_KEY", "secret")
        with served(lambda host, port: endpoints.make_app(service, (host,), "secret")) as found:
            yield found


@pytest.fixture(scope="module")
def run(package, address):
    """Runs a node as ComfyUI does; returns its outputs."""

    def of(name, **inputs):
        node = package.NODE_CLASS_MAPPINGS[f"SparseLaViDa{name}"]
        known = node.INPUT_TYPES()
        assert set(known["required"]) - {"server"} <= set(inputs)
        if "server" in known["required"]:
            inputs = {"server": connected, **inputs}
        outputs = getattr(node(), node.FUNCTION)(**inputs)
        assert len(outputs) == len(node.RETURN_TYPES)
        return outputs

    connected = None
    connected, model = of("Connect", address=address, timeout=120)
    assert model == "tiny"
    return of


@pytest.fixture(scope="module")
def shown():
    """Two images in ComfyUI's format."""
    scenes = [tasks.sample("edit", 0, i).image for i in range(2)]
    return np.stack([world.render(scene) for scene in scenes]).astype(np.float32) / 255


def test_the_folder_says_what_comfyui_reads(package):
    nodes = package.NODE_CLASS_MAPPINGS
    assert set(nodes) == set(package.NODE_DISPLAY_NAME_MAPPINGS)
    for name, node in nodes.items():
        assert name.startswith("SparseLaViDa")  # all nodes share one namespace
        assert node.CATEGORY == "Sparse-LaViDa"
        assert set(node.RETURN_TYPES) <= SOCKETS
        assert len(node.RETURN_NAMES) == len(node.RETURN_TYPES)
        inputs = node.INPUT_TYPES()
        assert set(inputs) <= {"required", "optional"}
        known = inputs["required"] | inputs.get("optional", {})
        taken = dict(list(inspect.signature(getattr(node, node.FUNCTION)).parameters.items())[1:])
        assert set(taken) == set(known)
        for key, (kind, options) in known.items():
            assert kind in SOCKETS
            assert set(options) <= {"default", "tooltip"} | WIDGETS.get(kind, set())
            if key in inputs["required"]:
                assert taken[key].default is inspect.Parameter.empty
            elif "default" in options:
                assert options["min"] <= options["default"] <= options["max"]
                assert taken[key].default == options["default"]


def test_images_are_drawn_in_one_batch(run, pipe):
    (images,) = run("Generate", prompt=PROMPT, seed=3, count=2, steps=2, guidance=0.5)
    wanted = pipe.generate(PROMPT, num_images=2, seed=3, steps=2, guidance=0.5)
    assert images.shape == (2, 96, 96, 3)
    np.testing.assert_array_equal(np.asarray(images), np.float32(wanted.pixels) / 255)
    (small,) = run("Generate", prompt=PROMPT, seed=3, width=96, height=96, steps=2)
    assert small.shape == (1, 96, 96, 3)


def test_every_image_of_a_batch_is_edited(run, pipe, shown):
    (images,) = run("Edit", images=shown, instruction="remove it", seed=1, steps=2)
    wanted = pipe.edit(list(np.uint8(np.rint(shown * 255))), "remove it", seed=1, steps=2)
    np.testing.assert_array_equal(np.asarray(images), np.float32(wanted.pixels) / 255)


def test_what_is_masked_is_drawn_and_nothing_else(run, pipe, shown):
    def codes(images):
        return pipe.codec.encode(np.uint8(np.rint(np.asarray(images) * 255)))

    mask = np.zeros((96, 96), np.float32)
    mask[:16, :16] = 1  # one cell
    how = {"prompt": PROMPT, "seed": 1, "steps": 2}
    (images,) = run("Inpaint", images=shown, mask=mask, **how)
    np.testing.assert_array_equal(codes(images)[:, 1:], codes(shown)[:, 1:])
    (images,) = run("Inpaint", images=shown[:1], mask=np.stack([mask, mask[::-1]]), **how)
    kept = (codes(images) == codes(shown[:1])).all(axis=-1)
    assert kept[0, 1:].all()
    assert np.delete(kept[1], 30).all()  # the first of the last row
    with pytest.raises(ValueError, match="2 images and 3 masks do not go together"):
        run("Inpaint", images=shown, mask=np.stack([mask] * 3), **how)


def test_questions_are_answered_with_and_without_images(run, pipe, shown):
    question, pixels = "how many squares are there?", list(np.uint8(np.rint(shown * 255)))
    (answers,) = run("Ask", question=question, seed=1, images=shown, max_tokens=8)
    assert answers == [*pipe.ask(pixels, question, seed=1, max_new_tokens=8).texts]
    (answers,) = run("Ask", question=question, seed=1)
    remark = "This model was trained on questions about an image only: give it one."
    assert answers == [f"{remark} {pipe.ask(None, question, seed=1).text}"]


def test_things_are_found_as_boxes_and_masks(run, pipe, shown):
    phrases = ["blue square", "red circle"]
    masks, said = run("Ground", image=shown[:1], phrases="\n".join(phrases), seed=1)
    wanted = pipe.ground(np.uint8(np.rint(shown[0] * 255)), phrases, seed=1).boxes
    assert [one["label"] for one in json.loads(said)] == phrases
    assert masks.shape == (2, 96, 96)
    for mask, found, box in zip(np.asarray(masks), json.loads(said), wanted, strict=True):
        assert found["bbox_2d"] == (box and pytest.approx(box, abs=0.05))
        left, top, right, bottom = map(round, box or (0, 0, 0, 0))
        assert mask.sum() == mask[top:bottom, left:right].size
    with pytest.raises(ValueError, match="in one image, and 2 were given"):
        run("Ground", image=shown, phrases="blue square", seed=1)


def test_boxes_are_masks_of_their_pixels(package, shown):
    content = json.dumps([{"label": "a", "bbox_2d": [8.4, 0, 16.0, 24.6]}, {"bbox_2d": None}])
    answer = {"choices": [{"message": {"content": content}}]}
    server = types.SimpleNamespace(post=lambda *_: answer)
    masks, _ = package.nodes.Ground().ground(server, shown[:1], "a\nb", 0)
    found, nothing = np.asarray(masks)
    assert found.sum() == found[0:25, 8:16].size
    assert nothing.sum() == 0


def test_the_key_of_the_server_is_in_the_surroundings(run, address, monkeypatch):
    monkeypatch.delenv("SPARSE_LAVIDA_API_KEY")
    with pytest.raises(RuntimeError, match="the key is missing or wrong"):
        run("Connect", address=address)


def test_tensors_may_lie_on_a_device_in_any_type_and_have_gradients(package, shown):
    on_device = types.SimpleNamespace(cpu=lambda: shown)
    half = types.SimpleNamespace(float=lambda: on_device)  # numpy has no bfloat16
    for given in (shown, on_device, half, types.SimpleNamespace(detach=lambda: half)):
        np.testing.assert_array_equal(package.nodes.files.arrays(given), shown)


@pytest.mark.parametrize("first", [804822466654819, 2**31 - 1, 2**64 - 1, -1, np.int64(7)])
def test_any_whole_number_is_a_seed_and_counting_on_wraps(package, shown, first, monkeypatch):
    seeds, nodes = [], package.nodes
    choice = {"choices": [{"message": {"content": "[]"}}]}

    def post(path, body, files=None):
        seeds.append(json.loads(json.dumps(body))["seed"])
        return choice

    server = types.SimpleNamespace(post=post, post_form=post)
    monkeypatch.setattr(nodes.files, "images_of", lambda answers: answers)
    nodes.Generate().generate(server, PROMPT, first, count=2)
    nodes.Edit().edit(server, shown, "remove it", first)
    nodes.Inpaint().inpaint(server, shown, np.ones((96, 96)), PROMPT, first)
    nodes.Ask().ask(server, "how many?", first, images=shown)
    nodes.Ground().ground(server, shown[:1], "a", first)
    rows = [int(first) % 2**31, (int(first) + 1) % 2**31]
    assert sorted(seeds) == sorted([*rows * 4, rows[0]])


def test_seeds_as_large_as_comfyuis_wrap(run, pipe):
    (images,) = run("Generate", prompt=PROMPT, seed=2**31 + 3, steps=2)
    wanted = pipe.generate(PROMPT, seed=3, steps=2)
    np.testing.assert_array_equal(np.asarray(images), np.float32(wanted.pixels) / 255)
    assert run("Generate", prompt=PROMPT, seed=2**64 - 1, steps=2, count=2)[0].shape[0] == 2


@pytest.mark.parametrize(
    "form", ["{}", "{}/", "{}/v1", "{}/v1/", "  {}//\n", "HTTP://{host}/v1", "{host}", "{host}/v1"]
)
def test_an_address_may_be_that_of_openais_clients(run, address, form):
    given = form.format(address, host=address.removeprefix("http://"))
    server, model = run("Connect", address=given)
    assert (server.address, model) == (address, "tiny")
    assert run("Ask", server=server, question="why?", seed=1)[0]


def test_phrases_are_lines_and_at_least_one(run, shown):
    phrases = "a\u2028red circle\r\n\n blue square"
    masks, said = run("Ground", image=shown[:1], phrases=phrases, seed=1)
    assert [one["label"] for one in json.loads(said)] == ["a\u2028red circle", "blue square"]
    assert len(masks) == 2
    for nothing in ("", " \r\n\t\n"):
        with pytest.raises(RuntimeError, match="give at least one phrase"):
            run("Ground", image=shown[:1], phrases=nothing, seed=1)
    with pytest.raises(RuntimeError, match="5000 characters: at most 4000"):
        run("Ground", image=shown[:1], phrases="a" * 5000, seed=1)


def test_images_are_tensors_of_torch(package, shown):
    torch = pytest.importorskip("torch", reason="needs torch")
    tensor = package.nodes.files.tensor(shown[:, ::-1])
    assert tensor.dtype == torch.float32
    np.testing.assert_array_equal(package.nodes.files.arrays(tensor), shown[:, ::-1])


def test_what_goes_wrong_is_a_sentence(run, package, address, shown):
    with pytest.raises(RuntimeError, match="the prompt is empty"):
        run("Generate", prompt=" ", seed=0)
    with pytest.raises(RuntimeError, match="size=7x7 cannot be drawn"):
        run("Generate", prompt=PROMPT, seed=0, width=7, height=7)
    with pytest.raises(RuntimeError, match="mask"):
        run("Inpaint", images=shown, mask=np.ones((64, 64)), prompt=PROMPT, seed=0)
    for wrong in ("file:///etc/passwd", "", "/v1", "ftp://a", "http://"):
        with pytest.raises(RuntimeError, match="is not the address of a server"):
            run("Connect", address=wrong)
    with pytest.raises(RuntimeError, match=r"no server answers at http://127\.0\.0\.1:9"):
        run("Connect", address="http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match=r"404 Not Found|there is nothing at"):
        run("Connect", address=f"{address}/nowhere")
