# SPDX-License-Identifier: Apache-2.0
"""Our model for lmms-eval: against the installed package, and against its documented interface.

The package comes with `pip install --no-deps lmms-eval`, loguru, pytz, jinja2 and pyyaml. Its base
class uses nothing from torch and transformers, so empty modules can replace them.
"""

import abc
import importlib
import importlib.util
import sys
import types

import pytest
from PIL import Image

from sparse_lavida_jax import config, pipeline

ADAPTER = "sparse_lavida_jax.integrations.lmms_eval"
DOCUMENTS = {
    7: {"shown": [(255, 0, 0)]}, 8: {"shown": [(0, 255, 0), (0, 0, 255)]}, 9: {"shown": []},
}  # fmt: skip


class Pipe(pipeline.SparseLaViDa):
    """Answers with the question and its arguments."""

    def __init__(self, batch_size):
        self.settings, self.prompts = config.Config(), self
        self.engine = types.SimpleNamespace(batch_size=batch_size)
        self.calls = []

    @classmethod
    def from_pretrained(cls, name, batch_size, **_):
        assert name == "models/mine"
        return cls(batch_size)

    def ask(self, words, images, tokens):
        return words, [tuple(image[0, 0].tolist()) for image in images], tokens

    def sample(self, examples, *, sampling, seed, shared):
        assert shared
        self.calls.append((len(examples), sampling.text.step_ratio, sampling.text.steps))
        return list(zip(examples, seed, strict=True))

    def texts(self, said):
        return [f"!! {words}|{shown}|{tokens}|{seed}" for (words, shown, tokens), seed in said]


class Documented(abc.ABC):
    """The base class as the model guide of lmms-eval describes it."""

    is_simple = True

    def __init__(self):
        self.task_dict = {}

    @abc.abstractmethod
    def loglikelihood(self, requests): ...

    @abc.abstractmethod
    def generate_until(self, requests): ...

    @abc.abstractmethod
    def generate_until_multi_round(self, requests): ...


def modules(**contents):
    """Modules by name, with double underscores for dots."""
    return {
        name.replace("__", "."): types.SimpleNamespace(**inside)
        for name, inside in contents.items()
    }


@pytest.fixture(params=["documented", "installed"])
def adapter(request, monkeypatch):
    """The adapter on top of the base class."""
    for name in [name for name in sys.modules if name.split(".")[0] == "lmms_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    if request.param == "documented":
        manifest = types.SimpleNamespace
        stand_ins = modules(
            lmms_eval={}, lmms_eval__api={}, lmms_eval__api__model={"lmms": Documented},
            lmms_eval__models={},
            lmms_eval__models__registry_v2={
                "ModelManifest": lambda name, simple_class_path: manifest(
                    model_id=name, simple_class_path=simple_class_path
                )
            },
        )  # fmt: skip
    else:
        if importlib.util.find_spec("lmms_eval") is None:
            pytest.skip("lmms-eval is not installed: pip install --no-deps lmms-eval")
        empty = modules(
            torch={"nn": types.SimpleNamespace(Module=object), "Tensor": object, "dtype": object},
            torch__nn={"Module": object},
            transformers={"StoppingCriteria": object, "PreTrainedTokenizer": object,
                          "StoppingCriteriaList": object},
        )  # fmt: skip
        stand_ins = {
            name: module for name, module in empty.items()
            if importlib.util.find_spec(name.partition(".")[0]) is None
        }  # fmt: skip
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    if request.param == "installed":
        for missing in ("yaml", "pytz", "jinja2", "loguru"):
            pytest.importorskip(missing, reason=f"lmms-eval needs {missing}")
    loaded = importlib.import_module(ADAPTER)
    monkeypatch.setattr(loaded, "SparseLaViDa", Pipe)
    yield loaded
    sys.modules.pop(ADAPTER, None)


@pytest.fixture
def model(adapter):
    made = adapter.SparseLaViDaLmms(pretrained="models/mine", batch_size="2", seed=3, device="cuda")
    made.task_dict["chartqa"] = {"test": DOCUMENTS}
    return made


def shown(document):
    return [Image.new("RGB", (3, 2), colour) for colour in document["shown"]]


def asked(words, number, **settings):
    return types.SimpleNamespace(args=(words, settings, shown, number, "chartqa", "test"))


def test_answers_come_in_the_order_of_the_requests(model):
    requests = [
        asked("what?", 7, max_new_tokens=16),
        asked("<image>\nwhich?", 8),
        asked("why?", 9, max_new_tokens=16, temperature=0),
        asked("who?", 7, max_new_tokens=16),
    ]
    assert model.generate_until(requests) == [
        "what?|[(255, 0, 0)]|16|3", "which?|[(0, 255, 0), (0, 0, 255)]|256|4", "why?|[]|16|5",
        "who?|[(255, 0, 0)]|16|6",
    ]  # fmt: skip
    assert model.pipe.calls == [(2, 1.0, 8), (1, 1.0, 8), (1, 1.0, 8)]


def test_steps_may_be_chosen(adapter):
    made = adapter.SparseLaViDaLmms(pretrained="models/mine", text_steps="4")
    assert (made.sampling.text.steps, made.sampling.text.step_ratio) == (4, 0.0)
    assert made.sampling.text.temperature == 0.0
    with pytest.raises(ValueError, match="knows no conv_template: model_args are pretrained"):
        adapter.SparseLaViDaLmms(pretrained="models/mine", conv_template="x")


@pytest.mark.parametrize("until", ["|", ["@", "|"]])
def test_an_answer_ends_where_the_task_says(model, until):
    assert model.generate_until([asked("what?", 7, until=until)]) == ["what?"]


def test_what_it_cannot_do_is_reported(model):
    for refused in (model.loglikelihood, model.generate_until_multi_round):
        with pytest.raises(NotImplementedError, match="whose output_type is generate_until"):
            refused([])
    film = types.SimpleNamespace(args=("what?", {}, lambda _: ["a.mp4"], 7, "chartqa", "test"))
    with pytest.raises(TypeError, match="chartqa shows a str"):
        model.generate_until([film])


def test_it_is_found_by_its_name(adapter):
    manifest = adapter.manifest()
    assert manifest.model_id == "sparse_lavida"
    module, _, name = manifest.simple_class_path.rpartition(".")
    assert getattr(importlib.import_module(module), name) is adapter.SparseLaViDaLmms
    registry = importlib.import_module("lmms_eval.models.registry_v2")
    if hasattr(registry, "ModelRegistryV2"):  # the installed one
        known = registry.ModelRegistryV2()
        known.register_manifest(manifest)
        assert known.get_model_class("sparse_lavida") is adapter.SparseLaViDaLmms
