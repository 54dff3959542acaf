# SPDX-License-Identifier: Apache-2.0
"""On a GPU too: sampler == training, GPU == CPU, and repeated runs give the same bits."""

import jax
import numpy as np
import pytest
import stand_ins
import tiny
import traces
from flax import nnx

from sparse_lavida_jax import sample, train
from sparse_lavida_jax.models.denoiser import Denoiser

TOLERANCE = 1e-4  # float32 with full matrix products; the order of sums differs from a CPU


@pytest.fixture(autouse=True)
def full_precision():
    """GPUs round the factors of float32 products to 10 bits unless told otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


def moments(modality, device):
    """The states and logits of a tiny sampler run on one device."""
    with jax.default_device(device):
        settings = tiny.model_settings(codes_per_token=4 if modality == "image" else 1)
        model = jax.device_put(tiny.denoiser(settings), device)
        requests = [tiny.request(modality, settings, i, words=n) for i, n in enumerate((3, 12, 5))]
        chosen = traces.settings_of("sparse", modality, settings)
        phases = traces.plan(requests, chosen, num_steps=4 if modality == "image" else 3)
        steps, responses = traces.moments(model, requests, phases, chosen)
        return steps, responses, list(traces.training_logits(model, requests, steps, chosen))


@pytest.mark.parametrize("modality", ["image", "text"])
def test_sampler_logits_are_training_logits_on_the_gpu(modality, gpu):
    steps, _, trained = moments(modality, gpu)
    for moment, logits in zip(steps, trained, strict=True):
        np.testing.assert_allclose(moment.logits, logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_gpu_predicts_what_the_cpu_predicts(modality, gpu):
    here, there = (moments(modality, device)[0][0] for device in (gpu, jax.devices("cpu")[0]))
    np.testing.assert_allclose(here.logits, there.logits, rtol=0, atol=TOLERANCE)
    assert np.abs(there.logits).max() > 0.1


def test_the_same_seed_draws_the_same_tokens_twice(gpu):
    first, second = (moments("image", gpu)[1] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_phase_runs_without_the_host(gpu):
    """Everything a phase needs is on the device before it starts, and nothing comes back."""
    settings = tiny.model_settings()
    model = jax.device_put(tiny.denoiser(settings), gpu)
    requests = [tiny.request("image", settings, i, words=4) for i in range(2)]
    chosen = traces.settings_of("sparse", "image", settings)
    phases = traces.plan(requests, chosen, num_steps=4)
    run = sample.run_phase

    def guarded(*arguments, **options):
        with jax.transfer_guard("disallow"):
            return run(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "run_phase", guarded)
        inputs = tiny.sample_inputs(requests, model.settings, chosen)
        responses = sample.sample(model, inputs, phases, settings=chosen)
    assert (responses != settings.image_mask_id).all()


def test_training_steps_give_the_same_bits_twice(gpu):
    given = stand_ins.settings()
    dataset = stand_ins.batches(given).dataset()

    def losses(steps):
        state = train.init_state(given, Denoiser(given.model, rngs=nnx.Rngs(0)))
        for i in range(steps):
            state, logged = train.train_step(
                state, dataset[i], np.float32(1e-3), settings=given.optimizer
            )
            yield float(logged["loss"])

    first, second = list(losses(4)), list(losses(4))
    assert np.isfinite(first).all() and len({*first}) == 4
    assert first == second
