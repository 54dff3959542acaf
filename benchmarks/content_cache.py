# SPDX-License-Identifier: Apache-2.0
r"""What is saved when an image or a prompt comes again (`sampling/content_cache.py`).

    python -m benchmarks.content_cache                              # the bundled model
    python -m benchmarks.content_cache --config=configs/lavida_o.py    # counts only

Each turn takes a new image, and asks with and without a cache for a first result, for other words
about the same image, and for the first words with another seed. With `--config` nothing runs: the
tokens of whole requests are counted from their plans, and the bytes to keep from their shapes.
"""

import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import flags

from benchmarks import command, measurements, suites, timing
from sparse_lavida_jax import config
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.programs.folder import keep_programs
from sparse_lavida_jax.sampling import costs, prompts, state
from sparse_lavida_jax.sampling.content_cache import num_tokens
from sparse_lavida_jax.scenes import tasks, world

CONFIG = flags.DEFINE_string("config", "", "A config, whose requests are counted.")
TURNS = flags.DEFINE_integer("turns", 21, "Timed turns, after one that is not.", lower_bound=1)

EDITS = ("make the red circle green", "make the blue square red")
GUIDED = {"guidance": 2.0, "guidance_image": 0.5, "layout": False}
# By name: the task, first words and others, and options.
ASKED: dict[str, tuple[str, tuple[str, str], dict[str, Any]]] = {
    "edit": ("edit", EDITS, {}),
    "guided_edit": ("edit", EDITS, GUIDED),
    "ask": ("ask", ("what colour is the circle?", "how many squares are there?"), {}),
}


def main(_: list[str]) -> None:
    """Measures the bundled model, or counts the requests of a config."""
    bench, model = measurements.Bench("content_cache"), "scenes"
    if CONFIG.value:
        settings = config.read(pathlib.Path(CONFIG.value))
        model = settings.name
        chosen = (suites.cases(suite, settings)[0] for suite in ("headline", "edit", "reasoning"))
        rows = (counted(case, settings.model) for case in chosen)
    else:
        keep_programs()  # as the server does
        sides = [SparseLaViDa.from_pretrained(model, content_cache_gb=gb) for gb in (1, 0)]
        rows = (row for name in ASKED for row in measured(sides, name, TURNS.value))
    for row in rows:
        name = f"{row['task']}/{row['method']}"
        path = bench.write(name, {"model": model, "batch": 1, **row}, name=f"{model}/{name}")
        saved = {key: f"{share:.1%}" for key, share in row.items() if key.startswith("saved")}
        print(path.name, saved, flush=True)


def measured(sides: list[SparseLaViDa], name: str, turns: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each request of a turn: seconds, also of CPU, and tokens that were passed.

    Args:
        sides: a pipeline that keeps what it can, and one that keeps nothing.
    """
    task, (words, others), options = ASKED[name]
    asks = {"first": (words, 0), "other_words": (others, 0), "other_seed": (words, 1)}

    def turn_of(pipe: SparseLaViDa, turn: int) -> list[tuple[float, float, int]]:
        shown, cache, found = tasks.sample("edit", 0, turn).image, pipe.content_cache, []
        assert shown is not None
        cache.clear()
        for asked, other in asks.values():
            before, begin, cpu = cache.tokens, time.perf_counter(), time.process_time()
            made = pipe.requests(task, asked, world.render(shown), seed=2 * turn + other, **options)
            passed = pipe.run(made).tokens_passed
            taken = time.perf_counter() - begin, time.process_time() - cpu
            found.append((*taken, passed + before - cache.tokens))
        return found

    turns_of = {pipe: lambda turn, pipe=pipe: turn_of(pipe, turn) for pipe in sides}
    found = timing.in_turn(turns_of, turns + 1)
    # [side, turn, request, number]; the first turn compiles
    both = np.array([found[pipe][1:] for pipe in sides]).transpose(2, 0, 3, 1)
    for method, (cached, uncached) in zip(asks, both, strict=True):
        (wall, cpu, tokens), (uncached_wall, uncached_cpu, uncached_tokens) = cached, uncached
        yield {
            "task": name,
            "method": method,
            **timing.times(wall.tolist()),
            "cpu": timing.times(cpu.tolist()),
            "uncached": timing.times(uncached_wall.tolist())
            | {"cpu": timing.times(uncached_cpu.tolist())},
            "tokens": tokens.mean(),
            "uncached_tokens": uncached_tokens.mean(),
            "saved_seconds": 1 - np.median(wall) / np.median(uncached_wall),
            "saved_cpu_seconds": 1 - np.median(cpu) / np.median(uncached_cpu),
            "saved_tokens": 1 - tokens.mean() / uncached_tokens.mean(),
            "note": "whole request; shares of medians, and of mean tokens; the results are equal",
        }


def counted(case: suites.RequestCase, model: config.Model) -> dict[str, Any]:
    """Returns a row about a request that is not made."""
    settings, (laid,) = case.settings(model), case.sample_inputs(model, [0])
    total = costs.total(costs.costs(case.plan(model), settings, laid.prompt_tokens))
    passed = laid.prompt_tokens.rows
    parts = prompts.parted(case.sample_inputs(model, range(case.batch)), model, keeping=True)
    kept = (state.prompt_bytes(model, part.prompt, settings.modality) for part in parts)
    return {
        "task": case.task,
        "method": "counted",
        "prompt_tokens": passed,
        "uncached_tokens": total,
        "saved_other_words": sum(num_tokens(part.prompt) for part in parts if part.keeps) / total,
        "saved_other_seed": sum(passed) / total,
        "views": sum(map(len, laid.example.shown)),
        "kept_gb": sum(kept) / 1e9,
        "note": "not run; the other words have as many tokens; vision tokens are not counted",
    }


if __name__ == "__main__":
    command.run(main)
