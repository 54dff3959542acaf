# SPDX-License-Identifier: Apache-2.0
"""Config files: Python programs whose `get_config` returns the settings. Run only your own."""

import contextlib
import dataclasses
import importlib.util
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from sparse_lavida_jax import config


def read(path: pathlib.Path, base: config.Config | None = None) -> config.Config:
    """Runs a config file and returns what its `get_config` gave, checked.

    It may import the config files next to it: `import scenes`.

    Args:
        path: the file; `configs/evaluate.py:mme` gives its `get_config` an argument.
        base: where everything comes from that the file does not set; None: the defaults.

    Raises:
        ConfigError: there is no such file, it cannot be run, or it sets what does not exist or is
            out of range.
    """
    given = run(path, "get_config")
    return config.build(config.Config, given) if base is None else changed(base, given)


def changed(base: config.Config, given: ConfigDict | dict[str, Any]) -> config.Config:
    """Returns settings with those of `given` in their place, section by section, checked.

    What is no section, such as the weights of tasks, is replaced as a whole.

    Raises:
        ConfigError: `given` sets what does not exist or is out of range.
    """
    return config.build(config.Config, _over(base, given))


def run(path: pathlib.Path, function: str) -> Any:
    """Runs a config file and returns what a function of it gives.

    Args:
        path: the file, with an argument for the function after a colon, if it takes one.
            `eval_mme.py` is the older name of `evaluate.py:mme`.

    Raises:
        ConfigError: there is no such file, it has no such function, or it cannot be run.
    """
    path, arguments = _split(path)
    if not path.is_file() or path.suffix != ".py":
        raise config.ConfigError(f"there is no config file {path}. {listed(path.parent)}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise config.ConfigError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    try:
        with _importable(path.parent):
            spec.loader.exec_module(module)
            if not hasattr(module, function):
                raise config.ConfigError(f"{path} has no function {function}.")
            return getattr(module, function)(*arguments)
    except config.ConfigError:
        raise
    except Exception as error:  # the file may do anything
        raise config.ConfigError(f"{path} failed: {type(error).__name__}: {error}") from error


def _split(path: pathlib.Path) -> tuple[pathlib.Path, list[str]]:
    """Returns the file, and the argument for its function if there is one."""
    if match := re.fullmatch(r"(.*\.py):(\w+)", str(path)):
        return pathlib.Path(match[1]), [match[2]]
    benchmarks = path.parent / "evaluate.py"
    if path.stem.startswith("eval_") and not path.is_file() and benchmarks.is_file():
        return benchmarks, [path.stem.removeprefix("eval_")]
    return path, []


def _over(base: Any, given: Any) -> dict[str, Any]:
    """Returns settings with those of `given` in their place, section by section."""
    merged = config.to_dict(base)
    for name in given:
        section = getattr(base, name, None)
        inside = dataclasses.is_dataclass(section) and isinstance(given[name], dict | ConfigDict)
        merged[name] = _over(section, given[name]) if inside else given[name]
    return merged


@contextlib.contextmanager
def _importable(folder: pathlib.Path) -> Iterator[None]:
    """Lets the files of a folder be imported by name, and forgets them afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if (folder / f"{name}.py").is_file():
                del sys.modules[name]


def listed(folder: pathlib.Path) -> str:
    """Returns a sentence that names the Python files of a folder."""
    names = ", ".join(sorted(str(path) for path in folder.glob("*.py")))
    if names:
        return f"There are: {names}."
    return (
        f"There is none in {folder.resolve()}: those of this project lie in the folder configs/ of"
        " its repository, not in the package that pip installs."
    )
