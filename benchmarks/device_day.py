# SPDX-License-Identifier: Apache-2.0
r"""What a device day measured, with bars and with what was measured by hand before.

    python -m benchmarks.device_day benchmarks/results/device_day

`launch/device_day.sh` ends with this table, which can be committed.
"""

import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import table
from benchmarks.measurements import read_rows
from sparse_lavida_jax.evals.circumstances import device


def _rate(row: dict[str, Any]) -> float:
    return row["steps_a_second"]


# Names of `bars.toml`, gpu.at_most_s: the suite, the id of the row, and the value.
OF_GPU: dict[str, tuple[str, str, Callable[[dict[str, Any]], float]]] = {
    "image": ("headline", "t2i1024/sparse/b1", lambda row: row["median_s"]),
    "first image, cold": ("first_image", "first image/cold", lambda row: row["total_s"]),
    "first image, warm": ("first_image", "first image/warm", lambda row: row["total_s"]),
    "generate, cold": ("first_image", "generate/cold", lambda row: row["after_imports_s"]),
    "generate, warm": ("first_image", "generate/warm", lambda row: row["after_imports_s"]),
}
# Without a bar: what, before, the suite, the id of the row, and the value.
OTHERS: tuple[tuple[str, str, str, str, Callable[[dict[str, Any]], float]], ...] = (
    ("configs/scenes.py, steps/s", "13.8", "steps", "scenes", _rate),
    ("configs/scenes_gpu.py, steps/s", "", "steps", "scenes_gpu", _rate),
)


def lines(folder: pathlib.Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yields the lines of the table: bars of a GPU, bars of requests, and the rest.

    Args:
        folder: of a device day, with `parts.tsv`.
        kind: of the device.
    """
    by_hand = {tuple(line["bar"]): line for line in table.bars()["by_hand"]}

    def before(*bar: str) -> str:
        line = by_hand.get(bar, {})
        return line.get("told", f"{line['value']:g}" if "value" in line else "")

    for name, wanted in table.bars()["gpu"]["at_most_s"].items():
        value = _admission(folder) if name == "admission" else _value(kind, *OF_GPU[name])
        line = {"what": f"{name}, s", "before": before("gpu", "at_most_s", name)}
        yield line | _judged("at_most_s", value, wanted)
    for section, bar, pattern in by_hand:
        if section == "gpu":
            continue
        name = "speed_bars" if section == "speed" else "attention_bars"
        own = [row for row in table.rows_of(name) if row["device"]["kind"] == kind]
        found = table.measured(own, bar, pattern)
        value = found[-1] if found else None
        what = f"{bar.replace('_', ' ')}: {pattern.replace(' ', ' over ')}"
        line = {"what": what, "before": before(section, bar, pattern)}
        yield line | _judged(bar, value, table.bars()[section][bar][pattern])
    for what, told, suite, row_id, of in OTHERS:
        value = _value(kind, suite, row_id, of)
        measured = "not measured" if value is None else f"{value:.3g}"
        yield {"what": what, "before": told, "measured": measured, "wanted": "", "held": ""}


def _judged(bar: str, value: float | None, wanted: Any) -> dict[str, str]:
    line = {"wanted": table.required(bar, wanted), "measured": "not measured", "held": ""}
    if value is None:
        return line
    return line | {"measured": f"{value:.3g}", "held": table.result(bar, value, wanted)}


def _admission(folder: pathlib.Path) -> float | None:
    """Returns the seconds that the check of the kernel took, its process included."""
    path = folder / "parts.tsv"
    parts = [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []
    taken = [float(seconds.split()[0]) for name, became, seconds in parts
             if (name, became) == ("admission", "done")]  # fmt: skip
    return taken[-1] if taken else None


def _value(kind: str, suite: str, row_id: str, of: Callable[[dict[str, Any]], float]) -> Any:
    found = [row for row in read_rows(suite) if row["device"]["kind"] == kind]
    found = [row for row in found if row["id"] == row_id and row["model"] != "lavida_o_tiny"]
    return of(max(found, key=lambda row: row["created"])) if found else None


def main() -> None:
    """Prints the table."""
    kind = device()["kind"]
    print(f"{kind}\n\n{table.table('device_day', lines(pathlib.Path(sys.argv[1]), kind))}")


if __name__ == "__main__":
    main()
