# SPDX-License-Identifier: Apache-2.0
"""How far a reader walks with one request, and what an import of the pipeline pulls in.

    python -m benchmarks.walk
    python -m benchmarks.walk --listed

Runs `generate("a red circle", seed=1)` twice in one process, and profiles the second call: without
a layout of words, and without compiling, which the first call did. Counts code of the package only:
functions, lambdas and comprehensions whose file lies in it.
"""

import argparse
import ast
import collections
import dataclasses
import dis
import pathlib
import subprocess
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

PACKAGE = "sparse_lavida_jax"


@dataclasses.dataclass
class Walk:
    """What one call enters.

    Attributes:
        functions: how often each function was entered.
        crossings: how often a function was called from another file of the package, by the file
            of the caller and the function.
    """

    functions: collections.Counter[CodeType]
    crossings: collections.Counter[tuple[str, CodeType]]

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.functions}


def walked(root: pathlib.Path, call: Callable[[], Any]) -> Walk:
    """Returns what `call` enters, in this thread, of the files under `root`."""
    walk, within = Walk(collections.Counter(), collections.Counter()), f"{root}/"

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(within) or _goes_on(frame):
            return
        walk.functions[code] += 1
        caller = frame.f_back
        while caller and not caller.f_code.co_filename.startswith(within):
            caller = caller.f_back  # through functions of other packages, such as `map`
        if caller and caller.f_code.co_filename != code.co_filename:
            walk.crossings[caller.f_code.co_filename, code] += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return walk


def _goes_on(frame: FrameType) -> bool:
    """Whether a frame is a generator that goes on after a yield, which is not a call."""
    at = frame.f_lasti
    name, argument = dis.opname[frame.f_code.co_code[at]], frame.f_code.co_code[at + 1]
    return name == "RESUME" and argument & 3 != 0


def imported() -> list[str]:
    """Returns the modules of the package that importing the pipeline loads, in a new process."""
    code = f"import sys, {PACKAGE}.pipeline; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return sorted(name for name in found.stdout.split() if name.split(".")[0] == PACKAGE)


def repeated_classes(root: pathlib.Path) -> dict[str, list[str]]:
    """Returns the names that more than one class of the package has, with their files."""
    places = collections.defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(root)))
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="scenes", help="model to draw with")
    parser.add_argument("--listed", action="store_true", help="list what was counted")
    flags = parser.parse_args()

    import sparse_lavida_jax
    from sparse_lavida_jax.pipeline import SparseLaViDa

    root = pathlib.Path(sparse_lavida_jax.__file__).parent
    pipe = SparseLaViDa.from_pretrained(flags.model)

    def draw() -> None:
        pipe.generate("a red circle", seed=1, layout=False)

    draw()
    walk, modules, repeated = walked(root, draw), imported(), repeated_classes(root)
    print(f"second image: {len(walk.files)} files, {len(walk.functions)} functions,", end=" ")
    print(f"{walk.crossings.total()} calls from another file")
    print(f"modules after import of the pipeline: {len(modules)}")
    print("class names that occur twice:", ", ".join(repeated) or "none")
    if not flags.listed:
        return

    def named(code: CodeType) -> str:
        return f"{pathlib.Path(code.co_filename).relative_to(root)}:{code.co_qualname}"

    print("\nfunctions entered, with the number of times:")
    for code, times in sorted(walk.functions.items(), key=lambda item: named(item[0])):
        print(f"{times:5} {named(code)}")
    print("\ncalls from another file:")
    for (caller, code), times in walk.crossings.most_common():
        print(f"{times:5} {pathlib.Path(caller).relative_to(root)} -> {named(code)}")
    print("\nmodules:", *modules, sep="\n    ")
    for name, files in repeated.items():
        print(f"class {name}:", *files, sep="\n    ")


if __name__ == "__main__":
    main()
