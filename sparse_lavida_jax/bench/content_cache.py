# SPDX-License-Identifier: Apache-2.0
r"""What is saved when an image or a prompt comes again (`sampling/content_cache.py`).

    python -m sparse_lavida_jax.bench.content_cache                              # the bundled model
    python -m sparse_lavida_jax.bench.content_cache --config=configs/lavida_o.py    # counts only

Each turn takes a new image, and asks with and without a cache for a first result, for other words
about the same image, and for the first words with another seed. With `--config` nothing runs: the
tokens of whole requests are counted from their plans, and the bytes to keep from their shapes.
"""

import functools
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import flags

from sparse_lavida_jax import config
from sparse_lavida_jax.bench import command, record, suites, timing
from sparse_lavida_jax.pipeline import SparseLaViDa
from sparse_lavida_jax.sampling import costs, prompts
from sparse_lavida_jax.sampling.content_cache import num_tokens
from sparse_lavida_jax.sampling.state import prompt_bytes
from sparse_lavida_jax.scenes import tasks, world

CONFIG = flags.DEFINE_string("config", "", "A config, whose requests are counted.")
TURNS = flags.DEFINE_integer("turns", 21, "Timed turns, after one that is not.", lower_bound=1)

EDITS = ("make the red circle green", "make the blue square red")
GUIDED = {"guidance": 2.0, "plan": False}
# By name of the row: the task, first words and other words, and options.
ASKED: dict[str, tuple[str, tuple[str, str], dict[str, Any]]] = {
    "edit": ("edit", EDITS, {}),
    "guided_edit": ("edit", EDITS, GUIDED | {"guidance_image": 0.5}),
    "ask": ("ask", ("what colour is the circle?", "how many squares are there?"), {}),
    "guided_generate": ("generate", ("a red circle above a blue square", "a red circle"), GUIDED),
}


def main(_: list[str]) -> None:
    """Measures the bundled model, or counts the requests of a config."""
    bench, model = record.Bench("content_cache"), "scenes"
    if CONFIG.value:
        settings = config.read(pathlib.Path(CONFIG.value))
        model = settings.name
        chosen = (suites.cases(suite, settings)[0] for suite in ("headline", "edit", "reasoning"))
        rows = (counted(case, settings.model) for case in chosen)
    else:
        sides = [SparseLaViDa.from_pretrained(model, 1, content_cache_gb=gb) for gb in (1, 0)]
        rows = (row for name in ASKED for row in measured(*sides, name, TURNS.value))
    for row in rows:
        path = bench.write(row["id"], {"model": model, **row}, name=f"{model}/{row['id']}")
        saved = {name: f"{share:.1%}" for name, share in row.items() if name.startswith("saved")}
        print(path.name, saved, flush=True)


def measured(
    kept: SparseLaViDa, anew: SparseLaViDa, name: str, turns: int
) -> Iterator[dict[str, Any]]:
    """Yields a row for each request of a turn: seconds, and tokens that were passed."""
    task, (words, others), options = ASKED[name]
    asks = {"first": (words, 0), "other_words": (others, 0), "other_seed": (words, 1)}

    def once(pipe: SparseLaViDa, turn: int) -> list[tuple[float, int]]:
        image = None if task == "generate" else world.render(tasks.sample("edit", 0, turn).image)
        found = []
        pipe.content_cache.clear()
        for asked, other in asks.values():
            before, begin = pipe.content_cache.tokens, time.perf_counter()
            seed = 2 * turn + other
            result = pipe.run(pipe.requests(task, asked, image, seed=seed, **options))
            seconds = time.perf_counter() - begin
            found.append((seconds, result.tokens_passed + before - pipe.content_cache.tokens))
        return found

    sides = {pipe: functools.partial(once, pipe) for pipe in (kept, anew)}
    found = {pipe: np.array(one[1:]) for pipe, one in timing.in_turn(sides, turns + 1).items()}
    for number, method in enumerate(asks):
        (seconds, tokens), (seconds_anew, tokens_anew) = (
            found[pipe][:, number].T for pipe in (kept, anew)
        )
        yield {
            "id": f"{name}/{method}",
            "task": name,
            "method": method,
            "batch": 1,
            **timing.times(seconds.tolist()),
            "anew": timing.times(seconds_anew.tolist()),
            "tokens": tokens.mean(),
            "tokens_anew": tokens_anew.mean(),
            "saved_seconds": 1 - np.median(seconds) / np.median(seconds_anew),
            "saved_tokens": 1 - tokens.mean() / tokens_anew.mean(),
            "note": "whole request; the same bits on both sides; of medians, and of mean tokens",
        }


def counted(case: suites.RequestCase, model: config.Model) -> dict[str, Any]:
    """Returns a row about a request that is not made."""
    settings, (example,) = case.settings(model), case.requests([0])
    passed = prompts.lay_out(example, model, settings).prompt_tokens
    total = costs.total(costs.costs(case.plan(model), settings, passed))
    parts = prompts.parted(case.prompt(model), settings.guidance_rows, keeping=True)
    wordless = sum(num_tokens(part.prompt) for part in parts if part.keeps)
    return {
        "id": f"{case.task}/counted",
        "task": case.task,
        "method": "counted",
        "batch": 1,
        "prompt_tokens": passed,
        "tokens_anew": total,
        "saved_tokens_of_other_words": wordless / total,
        "saved_tokens_of_other_seed": sum(passed) / total,
        "views": sum(map(len, example.shown)),
        "kept_gb": sum(prompt_bytes(model, part.prompt, settings.kind) for part in parts) / 1e9,
        "note": "counted, not run; other words are as many; features of the vision tower, which"
        " are kept for both, are no tokens of a pass",
    }


if __name__ == "__main__":
    command.run(main)
