# SPDX-License-Identifier: Apache-2.0
"""Where an image that was drawn again differs from its record, and by which margins.

The cells of the first step that differs are not consequences of others. The margin that a recorded
code had over the next one is in the record if it was asked for (`SparseLaViDa.with_margins`); the
margin that it has here, below 0, follows from one pass over the plan (`whole_plan.py`).
"""

from typing import Any

import numpy as np
from jaxtyping import Int

from sparse_lavida_jax.inference import proofs
from sparse_lavida_jax.inference.requests import Request
from sparse_lavida_jax.inference.results import Result
from sparse_lavida_jax.inference.tasks import TaskRun
from sparse_lavida_jax.programs import jax_settings
from sparse_lavida_jax.prompting.request_errors import RequestError

MOST_NAMED = 8  # cells


def cells(record: dict[str, Any], result: Result) -> tuple[int, ...]:
    """Returns the cells whose codes are not the recorded ones; all, if their numbers differ.

    None differ from a record that holds no codes.

    Args:
        result: of `SparseLaViDa.replay`.
    """
    recorded, drawn = record.get("codes"), result.tokens[0]
    if not recorded:
        return ()
    if (len(recorded), len(recorded[0])) != drawn.shape:
        return tuple(range(len(drawn)))
    return tuple(np.flatnonzero((np.array(recorded) != drawn).any(axis=1)).tolist())


@jax_settings.defaults()
def told(run: TaskRun, request: Request, record: dict[str, Any], result: Result) -> str:
    """Returns a sentence on the cells that differ, of which there are some.

    Args:
        request: of the record, which was checked (`provenance.check`).
        result: of the request.
    """
    drawn = result.tokens[0]
    said = f"{len(cells(record, result))} of {len(drawn)} cells differ from the record"
    try:
        proofs.check_plan(run, request, record, np.inf)
        step, here = _first(run, request, record, drawn)
    except RequestError as error:
        return f"{said}; their margins are not known: {error}"
    then = dict(enumerate((record.get("margins") or {}).get("image") or ()))
    named = []
    for cell, margin in [*here.items()][:MOST_NAMED]:
        recorded = then.get(cell)
        before = "" if recorded is None else f", when it was drawn {recorded:.2g}"
        named.append(f"cell {cell} (margin here {margin:.2g}{before} logits)")
    more = ", ..." * (len(here) > MOST_NAMED)
    return f"{said}; step {step} is the first: {', '.join(named)}{more}. Others may follow from it."


def _first(
    run: TaskRun, request: Request, record: dict[str, Any], drawn: Int[np.ndarray, "l g"]
) -> tuple[int, dict[int, float]]:
    """Returns the first step with another code, and the margins that the recorded ones have here.

    Raises:
        RequestError: the record holds no codes of such an image, or no pass holds its plan.
    """
    example = run.image_example(request)
    codes = proofs.recorded_codes(run, record, example)
    how = [example], [request], run.sampling, [codes]
    ((_, scores),) = run.engine.scores(*how, stage="image")
    differs = scores.decided & (codes != drawn)[scores.at]
    rows = differs.any(axis=1)
    if not rows.any():
        raise RequestError("the record is damaged: its given cells are not those of the image.")
    first = int(scores.step[rows].min())
    margins = np.where(differs, scores.margin, np.inf).min(axis=1)
    own = np.flatnonzero(rows & (scores.step == first))
    return first, {int(scores.at[i]): float(margins[i]) for i in own}
