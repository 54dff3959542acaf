# SPDX-License-Identifier: Apache-2.0
"""The meaning of words in the art world, and judges that several tasks share.

A judge returns what is wrong with a response, "" if nothing is. Words without a meaning raise
`GrammarError`, whose message becomes the reason in `tasks.score`.
"""

from collections import Counter
from collections.abc import Sequence

from sparse_lavida_jax.art.grammar import Art, ArtRequest
from sparse_lavida_jax.art.judge import SceneReading, unclear
from sparse_lavida_jax.art.sheet import Sheet, load
from sparse_lavida_jax.art.world import ArtScene, Placed
from sparse_lavida_jax.scenes.grammar import GrammarError
from sparse_lavida_jax.scenes.rules import CORRECT
from sparse_lavida_jax.scenes.task import Sample


def related(relation: str, first: Placed, second: Placed) -> bool:
    """Whether one thing is in a relation to another: their boxes do not overlap on that axis."""
    (x1, y1, x2, y2), (u1, v1, u2, v2) = first.box, second.box
    return {
        "left of": x2 <= u1,
        "right of": u2 <= x1,
        "above": y2 <= v1,
        "below": v2 <= y1,
    }[relation]


def reference(scene: ArtScene, thing: Placed) -> Art | None:
    """Describes one thing unambiguously, with its size only if needed; None if that is too little.

    Style and facing are not used: they may be what is asked for.
    """
    for phrase in (Art(thing.name), Art(thing.name, thing.size)):
        if sum(phrase.matches(other) for other in scene.things) == 1:
            return phrase
    return None


def find(scene: ArtScene, phrase: Art) -> Placed:
    """Returns the one thing that a phrase describes."""
    found = [thing for thing in scene.things if phrase.matches(thing)]
    if len(found) != 1:
        raise GrammarError(f"the scene has {len(found)} of '{phrase}', it must have one")
    return found[0]


def assigned(phrases: Sequence[Art], things: Sequence[Placed]) -> list[int | None]:
    """Returns the number of a thing for each description, the most specific ones first."""
    left, found = dict(enumerate(things)), dict[int, int]()
    order = sorted(range(len(phrases)), key=lambda number: phrases[number].count(None))
    for number in order:
        place = next((i for i, one in left.items() if phrases[number].matches(one)), None)
        if place is not None:
            found[number] = place
            del left[place]
    return [found.get(number) for number in range(len(phrases))]


def faults(request: ArtRequest, things: Sequence[Placed]) -> list[str]:
    """Returns what is missing of a request, too many, or in the wrong place."""
    phrases = request.phrases
    found = assigned(phrases, things)
    missing = [phrase for phrase, place in zip(phrases, found, strict=True) if place is None]
    extra = [thing for number, thing in enumerate(things) if number not in found]
    listed = [
        f"{_described(thing, phrase).times(1)} should be {phrase.times(1)}"
        for phrase, thing in zip(missing, extra, strict=False)
    ]
    listed += [f"{phrase.times(1)} is missing" for phrase in missing[len(extra) :]]
    listed += [f"{Art(thing.name).times(1)} is too many" for thing in extra[len(missing) :]]
    if request.relation and not listed:
        first, second = (things[place] for place in found if place is not None)
        if not related(request.relation, first, second):
            listed = [f"the {first.name} is not {request.relation} the {second.name}"]
    return listed


def _described(thing: Placed, phrase: Art) -> Art:
    """Describes a thing with what a phrase says of another one."""
    shown = Art.of(thing)
    said = (shown[i] if value is not None else None for i, value in enumerate(phrase[1:], 1))
    return Art(thing.name, *said)


def verdict(request: ArtRequest, scene: ArtScene) -> str:
    """Returns "is correct", or everything that is wrong with a scene for a request."""
    listed = faults(request, scene.things)
    if request.background not in (None, scene.background):
        listed.append(f"the background is {scene.background}, not {request.background}")
    return ", ".join(listed) or CORRECT


def drawn(sample: Sample, reading: SceneReading) -> str:
    """Judges an image drawn for a request."""
    request = ArtRequest.parse(sample.prompt, sample.sheet)
    said = reading.fault or verdict(request, reading.scene)
    return "" if said == CORRECT else said


def coherence(sample: Sample, reading: SceneReading) -> tuple[int, int, int]:
    """Counts the things that a request asks for: the coherent ones, the found ones, and all.

    Coherent is what is found with every cell of one style and one facing.
    """
    request = ArtRequest.parse(sample.prompt, sample.sheet)
    names = [Art(phrase.name) for phrase in request.phrases]
    places = [i for i in assigned(names, reading.scene.things) if i is not None]
    return sum(reading.found[i].is_coherent for i in places), len(places), len(names)


def clear(phrase: Art, sheet: Sheet) -> Art:
    """Leaves out what cannot be told from the pixels of a thing, such as the facing of a bus."""
    kept = {
        kind: value if (phrase.name, kind) not in unclear(sheet) else None
        for kind, value in (("style", phrase.style), ("facing", phrase.facing))
    }
    return phrase._replace(**kept)


def described(sample: Sample, output: str) -> str:
    """Compares a description with the image, in any order and grouping, as far as it is clear."""
    request = ArtRequest.parse(output, sample.sheet)
    said, shown = (
        Counter(clear(phrase, sample.sheet or load()) for phrase in phrases)
        for phrases in (request.phrases, map(Art.of, sample.image.things))
    )
    if request.background != sample.image.background:
        return f"the background is {sample.image.background}, not {request.background}"
    faults = [f"{phrase.times(1)} is not described" for phrase in shown - said]
    faults += [f"there is no such {phrase}" for phrase in said - shown]
    if not faults:
        return ""
    f1 = 2 * (said & shown).total() / (said.total() + shown.total())
    return f"F1 {f1:.2f}: {', '.join(faults)}"
