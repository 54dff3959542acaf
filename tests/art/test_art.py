# SPDX-License-Identifier: Apache-2.0
"""The world of real art: its sheet, its scenes, and the judge that reads them from pixels."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from PIL import Image

from sparse_lavida_jax.art import codebook, dice, judge, sheet, world
from sparse_lavida_jax.art.dice import ArtDice
from sparse_lavida_jax.art.world import ArtScene, Placed

SHEET = sheet.load()


def scenes(count, stream="test", **limits):
    return [ArtDice(7, stream, index).scene(**limits) for index in range(count)]


def swapped(scene, old, **changes):
    """Returns a scene whose thing `old` is another one."""
    kept = [thing for thing in scene.things if thing is not old]
    return ArtScene.of(scene.background, [*kept, dataclasses.replace(old, **changes)])


def without(scene, old):
    return ArtScene.of(scene.background, [thing for thing in scene.things if thing is not old])


def half(thing, image, other):
    """Returns an image in which half of the cells of a thing are those of another image."""
    rows, columns = (slice(8 * one.start, 8 * one.stop) for one in thing.cells)
    middle = 8 * ((columns.start + columns.stop) // 16)
    mixed = image.copy()
    mixed[rows, middle : columns.stop] = other[rows, middle : columns.stop]
    return mixed


# ---------------------------------------------------------------------------------------------
# The sheet.


def test_the_sheet_has_things_of_all_groups_in_three_styles_with_names_in_three_languages():
    groups = [thing.group for thing in SHEET.things]
    assert len(groups) == 120
    assert {*groups} == {"animals", "food", "vehicles", "objects", "faces"}
    for spoken in zip(*(thing.names for thing in SHEET.things), strict=True):
        assert len({*spoken}) == len(SHEET.things)
        assert all(spoken)
    assert {size: part.shape for size, part in SHEET.sprites.items()} == {
        "small": (120, 3, 24, 24, 4), "large": (120, 3, 40, 40, 4)
    }  # fmt: skip
    seen = SHEET.sprites["large"][..., 3] > 127
    assert seen.any(axis=-1).any(axis=-1).all()


def test_the_shipped_sheet_comes_with_the_names_of_its_authors():
    notice = (sheet.SHIPPED / "NOTICE").read_text()
    for words in ("Google", "Twitter", "CC-BY 4.0", "Microsoft", "Miles Johnson", "MIT License"):
        assert words in notice


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Packages with two things; the drawing of the second is wide, with a margin."""
    folder = tmp_path_factory.mktemp("node_modules")
    for number, path in enumerate(sheet.STYLES.values()):
        for code, box in (("1f43b", (0, 0, 64, 64)), ("1f68c-fe0f", (8, 20, 56, 44))):
            image = Image.new("RGBA", (64, 64))
            image.paste((50 * number, 100, 200, 255), box)
            (folder / path.format(code)).parent.mkdir(parents=True, exist_ok=True)
            image.save(folder / path.format(code))
    for language in sheet.LANGUAGES:
        names = [{"hexcode": code, "label": f"{language} {code}"} for code in ("1F43B", "1F68C")]
        (folder / sheet.NAMES.format(language)).parent.mkdir(parents=True)
        (folder / sheet.NAMES.format(language)).write_text(json.dumps(names))
    return folder


def test_a_sheet_is_made_from_packages_written_and_read(packages, tmp_path):
    made = sheet.make(packages, "# comment\nanimals 1F43B\nvehicles 1F68C <\n")
    sheet.write(made, tmp_path)
    loaded = sheet.load(tmp_path)
    assert loaded.things == made.things
    assert [thing.names[1] for thing in made.things] == ["de 1F43B", "de 1F68C"]
    for size, side in sheet.SIZES.items():
        assert (loaded.sprites[size] == made.sprites[size]).all()
        alpha = made.sprites[size][1, 2, ..., 3]
        assert alpha.any(axis=0).all()  # as wide as the box
        assert np.flatnonzero(alpha.any(axis=1)).tolist() == [*range(side // 4, 3 * side // 4)]
    assert sheet.overview(made, "small").shape == (24, 8 * 3 * 24, 3)


def test_a_sheet_of_too_few_things_is_not_written(packages, tmp_path, monkeypatch, capsys):
    (tmp_path / "things.txt").write_text("animals 1F43B\nvehicles 1F68C <\n")
    asked = [f"--packages={packages}", f"--things={tmp_path}/things.txt", f"--out={tmp_path}/made"]
    monkeypatch.setattr("sys.argv", ["sheet", *asked])
    with pytest.raises(SystemExit):
        sheet.main()
    assert "things.txt lists 2 things; list 8" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "listed, said",
    [
        ("animals 1F43B\nanimals 1F43B", "two things are called en 1F43B"),
        ("animals 1F4FF", "'animals 1F4FF' is not a thing"),
        ("animals 1F43B ^", "perhaps < or >"),
    ],
)
def test_a_list_with_a_mistake_is_refused(packages, listed, said):
    with pytest.raises(ValueError, match=said):
        sheet.make(packages, listed)


def test_a_package_without_a_drawing_is_named(packages, tmp_path):
    with pytest.raises(FileNotFoundError):
        sheet.make(tmp_path, "animals 1F43B")
    (packages / sheet.STYLES["fluent"].format("1f43b")).unlink()
    with pytest.raises(FileNotFoundError, match="'en 1F43B' in fluent style"):
        sheet.make(packages, "animals 1F43B")


# ---------------------------------------------------------------------------------------------
# Scenes.


def test_a_scene_is_the_same_for_the_same_number_and_its_things_share_no_cell():
    first, again = scenes(40), scenes(40)
    assert first == again
    assert len({*first}) == 40
    assert {len(scene) for scene in first} == {1, 2, 3, 4, 5}
    things = [thing for scene in first for thing in scene.things]
    assert {thing.size for thing in things} == {*sheet.SIZES}
    assert {thing.facing for thing in things} == {"", "left", "right"}
    assert {thing.x % 2 for thing in things} == {0, 1}  # in the middle of cells, too
    assert {scene.background for scene in first} == {*world.BACKGROUNDS}
    for scene in first:
        assert not any(world.overlap(*pair) for pair in itertools.combinations(scene.things, 2))


def test_training_shows_held_out_looks_alone_and_held_out_pairs_never():
    looks = dice.held_out_looks(SHEET)
    assert len({*looks}) == 15  # of 360
    assert len(dice.held_out_pairs(SHEET)) == 120
    alone = 0
    for scene in scenes(400):
        shown = {(thing.name, thing.style) for thing in scene.things}
        if len(scene) == 1:
            alone += not shown.isdisjoint(looks)
        else:
            assert shown.isdisjoint(looks)
            names = itertools.permutations([thing.name for thing in scene.things], 2)
            assert not any(frozenset(pair) in dice.held_out_pairs(SHEET) for pair in names)
    assert alone > 5


def test_held_out_scenes_show_a_held_out_look_or_pair_in_company():
    made = [ArtDice(0, "test", index, held_out=True).scene() for index in range(60)]
    assert all(len(scene) > 1 and dice.is_held_out(scene, SHEET) for scene in made)
    looks = dice.held_out_looks(SHEET)
    by_look = [any((thing.name, thing.style) in looks for thing in scene.things) for scene in made]
    assert 0 < sum(by_look) < 60


def test_images_for_the_tokenizer_hold_out_the_same():
    crowds = [ArtDice(0, "crowd", index).crowd() for index in range(15)]
    assert not any(dice.is_held_out(scene, SHEET) for scene in crowds)
    assert np.mean([len(scene) for scene in crowds]) > 5
    assert dice.crowds((0, 1), 2).shape == (2, 96, 96, 3)


def test_a_thing_is_drawn_at_its_place_and_faces_where_it_should():
    left = Placed(2, 3, "airplane", "noto", "large", "left")
    right = dataclasses.replace(left, facing="right")
    images = [world.render(ArtScene("pink", (thing,))) for thing in (left, right)]
    parts = [image[8:48, 12:52] for image in images]
    assert (parts[0] == parts[1][:, ::-1]).all()
    assert (parts[0] != parts[1]).any()
    sprite = SHEET.sprites["large"][SHEET.numbers["airplane"], 0]
    solid = sprite[..., 3] == 255
    assert (parts[1][solid] == sprite[solid][:, :3]).all()  # its drawings face right
    images[0][8:48, 12:52] = world.BACKGROUNDS["pink"]
    assert (images[0] == world.BACKGROUNDS["pink"]).all()


def test_a_thing_outside_of_the_image_is_refused():
    scene = ArtScene("blue", (Placed(20, 3, "bear", "noto", "large"),))
    with pytest.raises(ValueError, match="bear is not inside the image, which is 24 steps wide"):
        world.render(scene)
    assert world.render(scene, side=128).shape == (128, 128, 3)


# ---------------------------------------------------------------------------------------------
# The judge.


def check_read(scene, **limits):
    reading = judge.read(world.render(scene, **limits))
    assert (reading.scene, reading.fault) == (scene, "")
    assert all(one.is_coherent for one in reading.found)


def test_true_scenes_are_read_exactly():
    for scene in scenes(30):
        check_read(scene)


@pytest.mark.slow
def test_true_scenes_are_read_exactly_with_every_drawing():
    for number, thing in enumerate(SHEET.things):
        for style, size in itertools.product(sheet.STYLES, sheet.SIZES):
            for facing in ("left", "right") if thing.drawn else ("",):
                background = tuple(world.BACKGROUNDS)[number % len(world.BACKGROUNDS)]
                placed = Placed(number % 14, number % 11, thing.name, style, size, facing)
                check_read(ArtScene(background, (placed,)))
    for scene in scenes(1000, "slow"):  # with those above 1,984: none may be misread
        check_read(scene)


def test_an_empty_image_and_a_larger_one_are_read():
    check_read(ArtScene("green", ()))
    check_read(ArtDice(0, "large", 0, side=128).scene(5, 5), side=128)
    with pytest.raises(ValueError, match=r"this one is 96x104"):
        judge.read(np.zeros((104, 96, 3), np.uint8))


def test_noise_does_not_disturb():
    for scene in scenes(10):
        noise = np.random.default_rng(0).normal(0, 8, (96, 96, 3))
        noisy = np.clip(world.render(scene) + noise, 0, 255).astype(np.uint8)
        reading = judge.read(noisy)
        assert (reading.scene, reading.fault) == (scene, "")


def faulty(scene, reading):
    return bool(reading.fault) or len(reading.found) < len(scene)


@pytest.mark.parametrize("number", range(12))
def test_planted_faults_are_found(number):
    draw = ArtDice(3, "faults", number)
    scene = draw.scene(1, 3)
    thing = draw.pick(scene.things)
    style = draw.pick([style for style in sheet.STYLES if style != thing.style])
    other = swapped(scene, thing, style=style)
    image, wrong, empty = (world.render(s) for s in (scene, other, without(scene, thing)))
    assert judge.read(wrong).scene == other  # of another style
    mixed = judge.read(half(thing, image, wrong))
    assert faulty(scene, mixed)
    if len(mixed.found) == len(scene):
        assert "is mixed" in mixed.fault or "lacks a part" in mixed.fault
    assert faulty(scene, judge.read(half(thing, image, empty)))  # cut off
    ghost = ((image.astype(int) + empty) // 2).astype(np.uint8)
    assert faulty(scene, judge.read(ghost))
    assert faulty(scene, judge.read(np.where(np.indices(image.shape)[0] % 16 < 8, image, wrong)))
    if thing.facing:
        opposite = {"left": "right", "right": "left"}[thing.facing]
        mirrored = world.render(swapped(scene, thing, facing=opposite))
        assert judge.read(mirrored).scene == swapped(scene, thing, facing=opposite)
        assert faulty(scene, judge.read(half(thing, image, mirrored)))


def test_a_scribble_is_a_ghost():
    image = world.render(ArtScene("white", (Placed(2, 2, "fox", "noto", "small"),)))
    image[64:72, 40:60] = (20, 120, 40)
    reading = judge.read(image)
    assert [one.thing.name for one in reading.found] == ["fox"]
    assert reading.ghosts == ((8, 5), (8, 6), (8, 7))
    assert reading.fault == "the cell in row 9, column 6 shows something that is not a thing"


def test_what_cannot_be_told_apart_is_listed():
    assert judge.unclear(SHEET) == {("bus", "facing")}


def test_copies_are_named():
    images = np.stack([world.render(scene) for scene in scenes(4, low=3)])
    right = {"named": 1, "same": 1, "coherent": 1, "ghosts": 0, "right": 1}
    assert judge.naming(images, images) == right
    blank = np.full_like(images, 243)
    assert judge.naming(images, blank) == dict.fromkeys(right, 0)


def test_a_codebook_of_means_meets_what_is_common_exactly():
    rng = np.random.default_rng(1)
    rare = rng.normal(5, 1, (40, 3)).astype(np.float32)
    common = np.tile(np.float32([[0, 0, 0], [-3, 0, 0]]), (500, 1))
    codes = codebook.means(np.concatenate([rare, common]), 8)
    assert codes.shape == (8, 3)
    for point in common[:2]:
        assert np.abs(codes - point).sum(axis=1).min() < 1e-6
    assert len(codebook.means(common, 8)) == 2  # there are no more


def test_the_report_of_a_tokenizer_names_things():
    image = world.render(scenes(1)[0])[None]
    said = "things named 1.000, same 1.000, coherent 1.000, ghosts 0.000, right 1.000"
    assert codebook.report(image, image) == said
