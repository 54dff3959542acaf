# SPDX-License-Identifier: Apache-2.0
"""The card of a scored model: `python -m benchmarks.quality --card=FOLDER`."""

from benchmarks.measurements import read_rows
from sparse_lavida_jax.checkpoints import cards, model_folder
from sparse_lavida_jax.evals import exact, scorers
from sparse_lavida_jax.sampling import presets


def write(checkpoint: str, folder: str, method: str = "") -> None:
    """Copies a model folder; the README of the copy is a model card with the rows of the model.

    Rows of several images per prompt, which repeat the score of one, are left out.

    Args:
        method: that of the rows; by default what the model was trained for.

    Raises:
        CheckpointError: there is no such model, or it has no rows, or the copy cannot be written.
    """
    source = model_folder.find_model(checkpoint)
    known = model_folder.lineage(source)
    method = method or presets.default_preset(model_folder.read_config(source).model)
    rows = [
        row
        for row in read_rows("quality")
        if row["checkpoint"] in known and row["method"] == method and "layouts" not in row
    ]
    if not rows:
        raise model_folder.CheckpointError(
            f"{checkpoint} was not scored: leave --card out first, which writes its rows."
        )
    rows.sort(key=lambda row: row["task"])
    metrics = [metric for row in rows for metric in exact.from_json(row).metrics]
    text = cards.card(source, checkpoint, scorers.table(metrics))
    model_folder.copy_with_readme(source, folder, text)
