# SPDX-License-Identifier: Apache-2.0
"""Prompts as strangers write them, with what each one means: forms x colours x counts.

None is from a training generator, and the judge knows nothing of the package's grammar.
"""

import dataclasses
import itertools

COLOURS = ("red", "green", "blue", "yellow", "purple", "cyan")
SHAPES = ("circle", "square", "triangle", "cross")
NUMBERS = ("two", "three", "four")
FOREIGN = ("ein roter Kreis", "un carré bleu", "två gröna trianglar", "una croce gialla", "赤い丸")
FILLS = 5  # prompts of a form

# The meaning after the bar: kinds of things as number, size, colour and shape, where * is anything
# and + several; a relation; or after ! a word that a true warning has.
FORMS = """
a {c} {s} | 1 * {c} {s}
one {c} {s} | 1 * {c} {s}
{c} {s} | 1 * {c} {s}
the {c} {s} | 1 * {c} {s}
an image of a {c} {s} | 1 * {c} {s}
please draw a {c} {s} | 1 * {c} {s}
a   {c}  {s} ! | 1 * {c} {s}
A {C} {S}. | 1 * {c} {s}
a big {c} {s} | 1 large {c} {s}
a tiny {c} {s} | 1 small {c} {s}
a {s}, {c} | 1 * {c} {s}
one small {s}, {c} | 1 small {c} {s}
a {s} that is {c} | 1 * {c} {s}
{n} {c} {p} | {N} * {c} {s}
{N} {c} {p} | {N} * {c} {s}
{n} {p} | {N} * * {s}
{n} large {c} {p} | {N} large {c} {s}
{c} {p} | + * {c} {s}
{p} | + * * {s}
a {c} {s} and a {d} {t} | 1 * {c} {s} | 1 * {d} {t}
{c} {s} and {d} {t} | 1 * {c} {s} | 1 * {d} {t}
a {c} {s}, a {d} {t} | 1 * {c} {s} | 1 * {d} {t}
{c} {s} {d} {t} | 1 * {c} {s} | 1 * {d} {t}
a {s} and a {t} | 1 * * {s} | 1 * * {t}
a {c} {s} with a {d} {t} | 1 * {c} {s} | 1 * {d} {t}
a {c} {s} above a {d} {t} | 1 * {c} {s} | 1 * {d} {t} | above
a {c} {s} below a {d} {t} | 1 * {c} {s} | 1 * {d} {t} | below
a {c} {s} left of a {d} {t} | 1 * {c} {s} | 1 * {d} {t} | left
a {c} {s} right of a {d} {t} | 1 * {c} {s} | 1 * {d} {t} | right
a {c} {s} to the left of a {d} {t} | 1 * {c} {s} | 1 * {d} {t} | left
a {c} {s} to the right of the {d} {t} | 1 * {c} {s} | 1 * {d} {t} | right
a {c} {s} under a {d} {t} | 1 * {c} {s} | 1 * {d} {t} | below
a {c} {s} over a {d} {t} | 1 * {c} {s} | 1 * {d} {t} | above
one {c} {s} on top of one {d} {t} | 1 * {c} {s} | 1 * {d} {t} | above
a {s} above a {t} | 1 * * {s} | 1 * * {t} | above
{C} {S} Left Of {d} {t} | 1 * {c} {s} | 1 * {d} {t} | left
a {c} {s} is beneath a {d} {t} | 1 * {c} {s} | 1 * {d} {t} | below
a {s} that is {c} above a {t} that is {d} | 1 * {c} {s} | 1 * {d} {t} | above
above a {c} {s}, a {d} {t} | 1 * {d} {t} | 1 * {c} {s} | above
a large {c} {s} right of a small {d} {t} | 1 large {c} {s} | 1 small {d} {t} | right
five {c} {p} ! five
10 {p} ! 10
no {p} ! no
a {c} {s} not above a {d} {t} ! not
{n} {c} {p} left of a {d} {t} ! more than two objects
a {c} {s} above a {d} {t} and a {c} {u} ! more than two objects
a {c} {s} and {n} {d} {q} ! one of each
a {c} {s}, a {d} {t} and a {d} {u} ! two kinds
a black {s} ! black
a {c} star ! star
a {c} {s} inside a {d} {t} ! inside
a {c} {s} next to a {d} {t} ! next
a {c} dog on a sofa ! dog
{foreign} ! {foreign_word}
a {c} and {d} {s} ! without a shape
a {c} {s} above ! above
a {c} {s} in the top left corner ! corner
many {c} {p} ! many
a {c} {s} or a {d} {t} ! or
a {c} {s} between two {q} ! between
"""


@dataclasses.dataclass(frozen=True)
class Meant:
    """A prompt, and what it means.

    Attributes:
        kinds: number ("1" to "4", "+" for several), size, colour and shape of each kind of thing,
            "*" for anything; none if no model here was taught such a thing.
        relation: of the first thing to the second; "" if none.
        named: what a true warning names.
    """

    prompt: str
    kinds: tuple[tuple[str, ...], ...] = ()
    relation: str = ""
    named: str = ""

    def is_shown(self, things: list[tuple[int, int, str, str, str]]) -> bool:
        """Whether an image of exactly these things shows it: row, column, size, colour, shape."""
        if not self.kinds:
            return False
        if len(self.kinds) == 1:
            ((number, *kind),) = self.kinds
            right = len(things) > 1 if number == "+" else len(things) == int(number)
            return right and all(_is(kind, thing) for thing in things)
        (_, *first), (_, *second) = self.kinds
        return len(things) == 2 and any(
            _is(first, one) and _is(second, other) and self._related(one, other)
            for one, other in itertools.permutations(things)
        )

    def _related(self, one, other) -> bool:
        return {
            "": True,
            "above": one[0] < other[0],
            "below": one[0] > other[0],
            "left": one[1] < other[1],
            "right": one[1] > other[1],
        }[self.relation]


def _is(kind, thing) -> bool:
    return all(wanted in ("*", found) for wanted, found in zip(kind, thing[2:], strict=True))


def _plural(shape: str) -> str:
    return shape + ("es" if shape == "cross" else "s")


def prompts() -> list[Meant]:
    """Returns `FILLS` prompts of each form."""
    found = []
    for form, fill in itertools.product(enumerate(FORMS.strip().splitlines()), range(FILLS)):
        (number, line), at = form, form[0] + 7 * fill
        shape, other, third = (SHAPES[(at + step) % 4] for step in (0, 1 + fill % 2, 3))
        colour, second = COLOURS[at % 6], COLOURS[(at + 1 + number % 5) % 6]
        count = NUMBERS[(number + fill) % 3]
        filled = line.format(
            c=colour, C=colour.title(), d=second, s=shape, S=shape.title(), t=other, u=third,
            p=_plural(shape), q=_plural(other), n=count, N=NUMBERS.index(count) + 2,
            foreign=FOREIGN[fill], foreign_word=FOREIGN[fill].split()[0].casefold(),
        )  # fmt: skip
        prompt, *meaning = filled.split(" | ")
        if meaning:
            kinds = tuple(tuple(kind.split()) for kind in meaning if " " in kind)
            found.append(Meant(prompt, kinds, *meaning[len(kinds) :]))
        else:
            prompt, named = filled.rsplit(" ! ", 1)
            found.append(Meant(prompt, named=named))
    return found
