# SPDX-License-Identifier: Apache-2.0
"""Today's names for those of before December 2026, in what was written or is typed with them.

PNGs, model folders, run directories and benchmark rows keep their bytes and are renamed when read.
On the command line and in Python an old name is refused with the new one.
"""

from typing import Any

NAMES = {
    "plan": "layout",  # in words; a plan is the sampler's
    "plans": "layouts",
    "no_plan": "no_layout",
    "plan_drop": "layout_drop",
    "edit_plan": "edit_layout",
    "fill_plan": "fill_layout",
}
# Sampling settings that moved into a section, by their former names.
_TEXT = (
    "preset", "temperature", "block_len", "top_k", "top_p", "steps", "step_ratio", "schedule",
    "shift", "confidence", "commit", "threshold", "factor", "entropy", "most", "block_order",
)  # fmt: skip
_RELEASED = (
    "confidence_noise_schedule", "confidence_noise_end", "confidence_noise_shift",
    "temperature_schedule", "temperature_end", "guidance_schedule", "guidance_end",
)  # fmt: skip
SECTIONS = {
    **{f"text_{name}": ("text", name) for name in _TEXT},
    **{name: ("released", name) for name in _RELEASED},
    "released_behaviour": ("released", "text_behaviour"),
}
# Tasks of the small world whose random numbers follow from the old name, so that runs repeat.
_FIRST_NAMES = {name: old for old, name in NAMES.items() if name.endswith("layout")}


def current(values: Any) -> Any:
    """Returns settings, a record or a row with today's names.

    Keys of dictionaries are renamed, and names of tasks: the items of lists and the value of
    `task`. Other values are not: `diffusion.blocks` may be "plan".
    """
    if isinstance(values, list):
        if values and isinstance(values[0], int | float):
            return values  # a record may hold a million codes
        return [NAMES.get(one, one) if isinstance(one, str) else current(one) for one in values]
    if not isinstance(values, dict):
        return values
    renamed = {}
    for key, value in values.items():
        is_task = key == "task" and isinstance(value, str)
        found = NAMES.get(value, value) if is_task else current(value)
        if key == "sampling" and isinstance(found, dict):
            found = _in_sections(found)
        renamed[NAMES.get(key, key)] = found
    return renamed


def _in_sections(sampling: dict[Any, Any]) -> dict[Any, Any]:
    """Returns sampling settings, with those that moved put into their sections."""
    found = {key: value for key, value in sampling.items() if key not in SECTIONS}
    for key in SECTIONS.keys() & sampling.keys():
        section, name = SECTIONS[key]
        inside = found.setdefault(section, {})
        if isinstance(inside, dict):  # else it is refused later
            found[section] = inside | {name: sampling[key]}
    return found


def before(values: Any) -> Any:
    """Returns settings with the names of before, from which older digests were made."""
    if isinstance(values, list):
        return [_OLD.get(one, one) if isinstance(one, str) else before(one) for one in values]
    if not isinstance(values, dict):
        return values
    return {_OLD.get(key, key): before(value) for key, value in values.items()}


_OLD = {name: old for old, name in NAMES.items()}


def stream_of(task: str) -> str:
    """Returns the name of a task's stream of random numbers: the first name that it had."""
    return _FIRST_NAMES.get(task, task)


def hint(name: str, dashes: str = "", section: str = "") -> str:
    """Returns "`--plan` is now `--layout`." for an old name, else "".

    Args:
        name: of a setting, an option or a task, with underscores or dashes between its words.
        dashes: "--" for an option of the command line.
        section: of the settings that have no such name.
    """
    old = name.replace("-", "_")
    moved = SECTIONS.get(old, ()) if section.lower() == "sampling" else ()
    new = NAMES.get(old) or ".".join(moved)
    if not new:
        return ""
    spelled = new.replace("_", "-") if dashes else new
    return f"`{dashes}{name}` is now `{dashes}{spelled}`."
