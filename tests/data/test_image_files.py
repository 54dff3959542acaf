# SPDX-License-Identifier: Apache-2.0
"""Images are read as displayed, refused with a reason, and written completely or not at all."""

import io
import struct
import tracemalloc
import zlib

import hostile_inputs
import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from sparse_lavida_jax.data import arrays, image_files
from sparse_lavida_jax.data.image_files import ImageError

NOISE = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)


def png_header(width, height):
    """The header of a PNG of any size, without pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + chunk + b"\x00\x00\x00\x00IDAT\x35\xaf\x06\x1e"


# ---------------------------------------------------------------------------------------------
# Reading.


@pytest.mark.parametrize("suffix", [".png", ".webp", ".jpg"])
def test_an_image_comes_back(tmp_path, suffix):
    path = tmp_path / f"picture{suffix}"
    flat = np.full((8, 9, 3), 90, np.uint8)
    image_files.write(path, flat)
    np.testing.assert_allclose(image_files.read(path).astype(int), flat, atol=2)


def test_a_palette_is_looked_up(tmp_path):
    path = tmp_path / "palette.png"
    colours = np.array([[255, 0, 0], [0, 0, 255]], np.uint8)[[[0, 1], [1, 0]]]
    Image.fromarray(colours).convert("P", palette=Image.Palette.ADAPTIVE).save(path)
    np.testing.assert_array_equal(image_files.read(path), colours)


def test_16_bits_of_grey_become_8(tmp_path):
    path = tmp_path / "deep.png"
    Image.fromarray(np.array([[0, 257, 32896, 65535]], np.uint16)).save(path)
    np.testing.assert_array_equal(image_files.read(path)[0, :, 1], [0, 1, 128, 255])


def test_what_is_transparent_shows_white(tmp_path):
    path = tmp_path / "transparent.png"
    Image.fromarray(np.array([[[9, 9, 9, 0], [9, 9, 9, 255]]], np.uint8)).save(path)
    np.testing.assert_array_equal(image_files.read(path), [[[255] * 3, [9] * 3]])


def test_grey_and_cmyk_become_rgb(tmp_path):
    Image.fromarray(np.full((4, 4), 77, np.uint8)).save(tmp_path / "grey.png")
    assert (image_files.read(tmp_path / "grey.png") == 77).all()
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "print.jpg")
    assert (image_files.read(tmp_path / "print.jpg")[..., 0] > 200).all()


def test_a_photograph_on_its_side_is_put_upright(tmp_path):
    path = tmp_path / "photograph.png"
    image = Image.fromarray(NOISE)
    exif = image.getexif()
    exif[0x0112] = 6  # turn by 90 degrees
    image.save(path, exif=exif)
    np.testing.assert_array_equal(image_files.read(path), np.rot90(NOISE, -1))


@pytest.mark.parametrize(
    ("size", "told"),
    [
        ((40_000, 40_000), "more than 67108864 pixels"),
        ((10_000, 10_000), "is 10000x10000: more than 67108864 pixels"),
        ((0, 0), "is not an image that can be read"),
        ((1, 67_000_000), "is 1x67000000: a side may have at most 16384 pixels"),
        ((1, 20_000), "is 1x20000: a side may have at most 16384 pixels"),
        ((6500, 100), "is 6500x100: .* and 64 times those of the other. Cut it"),
    ],
)
def test_a_size_is_refused_before_anything_is_decoded(tmp_path, size, told):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(*size))
    with pytest.raises(ImageError, match=told):
        image_files.read(path)


def test_what_is_no_image_is_named(tmp_path):
    broken = tmp_path / "broken.png"
    image_files.write(
        broken, np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    )
    broken.write_bytes(broken.read_bytes()[:2000])
    text = tmp_path / "text.png"
    text.write_text("a red circle")
    with pytest.raises(ImageError, match=r"^there is no image .*missing.png\.$"):
        image_files.read(tmp_path / "missing.png")
    for path in (broken, text):
        with pytest.raises(ImageError, match=f"{path} is not an image that can be read: "):
            image_files.read(path)
    with pytest.raises(ImageError, match=f"{tmp_path} is not a regular file: give a file in PNG"):
        image_files.read(tmp_path)


def test_what_pillow_stumbles_over_is_named():
    contents = io.BytesIO()
    notes = PngImagePlugin.PngInfo()
    notes.add_text("a", "b" * 2**21, zip=True)  # a decompression bomb, by Pillow's own limit
    Image.fromarray(NOISE).save(contents, "PNG", pnginfo=notes)
    for wrong in (contents.getvalue(), png_header(4, 4)[:20], png_header(4, 4)[:33]):
        with pytest.raises(ImageError, match="the upload is not an image that can be read"):
            image_files.read_bytes(wrong, "the upload")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "RGB"])
def test_a_mask_is_transparent_or_white_where_it_is_painted(mode):
    alpha = np.array([[0, 1, 127], [128, 254, 255]], np.uint8)
    drawn = {
        "RGBA": np.dstack([NOISE[:2, :3], alpha]),
        "LA": np.dstack([NOISE[:2, :3, 0], alpha]),
        "RGB": np.repeat(255 * (alpha == 0)[..., None], 3, axis=-1).astype(np.uint8),
    }[mode]
    file = io.BytesIO()
    Image.fromarray(drawn, mode).save(file, "PNG")
    np.testing.assert_array_equal(image_files.read_transparent(file.getvalue()), alpha == 0)
    with pytest.raises(ImageError, match="the mask is black everywhere and transparent nowhere"):
        image_files.read_transparent(image_files.encoded(np.zeros((2, 2, 3), np.uint8)))


def test_an_animation_is_refused(tmp_path):
    path = tmp_path / "moving.webp"
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(path, save_all=True, append_images=frames[1:], lossless=True)
    with pytest.raises(ImageError, match="is animated, 2 frames"):
        image_files.read(path)


def test_of_a_jpeg_that_holds_several_images_the_first_is_read(tmp_path):
    path = tmp_path / "phone.jpg"
    first, second = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    first.save(path, "MPO", save_all=True, append_images=[second])
    with Image.open(path) as image:
        assert image.n_frames == 2
    red, _, blue = image_files.read(path).mean(axis=(0, 1))
    assert red > 200 > 50 > blue


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "is of type dict: give an array, a Pillow image"),
        (np.zeros((2, 2, 3), complex), "is an array of complex128: give bool, whole"),
        (np.zeros((3, 6, 5)), r"the shape \[3, 6, 5\]: .* channels last"),
        (np.zeros((0, 2, 3), np.uint8), r"the shape \[0, 2, 3\]"),
    ],
)
def test_an_array_that_is_no_image_is_reported(given, told):
    with pytest.raises(ImageError, match=told):
        image_files.check(given)


def test_a_pillow_image_is_an_image():
    np.testing.assert_array_equal(image_files.check(Image.fromarray(NOISE)), NOISE)


# ---------------------------------------------------------------------------------------------
# Masks and boxes.


def test_a_mask_is_where_it_is_white(tmp_path):
    white = np.zeros((6, 5, 3), np.uint8)
    white[1, 2] = 255
    image_files.write(tmp_path / "mask.png", white)
    mask = image_files.read_mask(tmp_path / "mask.png", NOISE)
    assert np.argwhere(mask).tolist() == [[1, 2]]
    assert image_files.check_mask(Image.fromarray(white), NOISE).sum() == 1


def test_a_mask_that_does_not_fit_is_reported(tmp_path):
    with pytest.raises(ImageError, match="the mask is 6x5 and the image 5x6: make them one"):
        image_files.check_mask(np.ones((5, 6), bool), NOISE)
    with pytest.raises(ImageError, match="black everywhere"):
        image_files.check_mask(np.zeros((6, 5), bool), NOISE)


@pytest.mark.parametrize("scale", [1, 2, 4, image_files.MOST_SCALE])
def test_an_enlarged_png_is_read_as_it_was_drawn(tmp_path, scale):
    path = tmp_path / "large.png"
    image_files.write(path, NOISE, {"seed": 3}, scale=scale)
    with Image.open(path) as shown:
        assert shown.size == (5 * scale, 6 * scale)
        assert shown.getpixel((4 * scale, 5 * scale)) == tuple(NOISE[5, 4])
    np.testing.assert_array_equal(image_files.read(path), NOISE)
    np.testing.assert_array_equal(image_files.read_bytes(path.read_bytes()), NOISE)
    assert image_files.read_record(path) == {"seed": 3}


@pytest.mark.parametrize("said", ["4", "1", "0", "-2", "17", "4.0", "many"])
def test_an_image_that_only_says_that_it_is_enlarged_is_read_whole(tmp_path, said):
    path, notes = tmp_path / "changed.png", PngImagePlugin.PngInfo()
    notes.add_text(image_files.SCALE, said)
    changed = image_files.enlarged(NOISE, 4)
    changed[-1, -1] += 1  # by another program that kept what the file says
    Image.fromarray(changed).save(path, pnginfo=notes)
    np.testing.assert_array_equal(image_files.read(path), changed)


def test_a_mask_may_have_the_size_of_the_enlarged_image():
    mask = np.zeros((6 * 4, 5 * 4), bool)
    mask[9, 4:8] = True
    wanted = np.zeros((6, 5), bool)
    wanted[2, 1] = True
    np.testing.assert_array_equal(image_files.check_mask(mask, NOISE), wanted)
    with pytest.raises(ImageError, match="make them one size"):
        image_files.check_mask(mask[:, :-1], NOISE)


@pytest.mark.parametrize("box", [(0, 0, 6, 1), (-1, 0, 2, 2), (3, 0, 3, 2), (0, 4, 2, 3)])
def test_a_box_outside_is_reported(box):
    with pytest.raises(ImageError, match=r"x1 < x2 lie in 0..5, y1 < y2 in 0..6"):
        image_files.check_box(box, (5, 6))


def test_a_box_is_four_numbers():
    assert image_files.check_box((0, 0.5, 5, 6), (5, 6)) == (0, 0.5, 5, 6)
    for box in ((0, 1, 2), (0, 0, float("nan"), 1)):
        with pytest.raises(ImageError, match="not four numbers"):
            image_files.check_box(box, (5, 6))


# ---------------------------------------------------------------------------------------------
# Writing.


def test_a_png_says_how_it_was_drawn(tmp_path):
    record = {"prompt": "ein grüner Kreis 🟢", "seed": 3}
    image_files.write(tmp_path / "new" / "picture.png", NOISE, record)
    assert image_files.read_record(tmp_path / "new" / "picture.png") == record
    np.testing.assert_array_equal(image_files.read(tmp_path / "new" / "picture.png"), NOISE)


def test_a_png_that_does_not_say_is_reported(tmp_path):
    path = tmp_path / "picture.png"
    image_files.write(path, NOISE)
    with pytest.raises(ImageError, match="does not say how it was drawn"):
        image_files.read_record(path)


@pytest.mark.parametrize("name", ["picture.unknown", "picture", "picture.gif"])
def test_a_name_says_the_format(tmp_path, name):
    with pytest.raises(ImageError, match=r"its name must end in \.png, \.jpg"):
        image_files.write(tmp_path / name, NOISE)
    assert not list(tmp_path.iterdir())


def test_an_image_is_not_written_over_a_folder(tmp_path):
    (tmp_path / "picture.png").mkdir()
    with pytest.raises(ImageError, match="that is a folder"):
        image_files.write(tmp_path / "picture.png", NOISE)


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "picture.png"
    image_files.write(path, NOISE)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(
        image_files.ImageWriteError, match=f"written to {path}: No space left on device"
    ):
        image_files.write(path, NOISE + 1)
    monkeypatch.undo()
    assert [one.name for one in tmp_path.iterdir()] == ["picture.png"]
    np.testing.assert_array_equal(image_files.read(path), NOISE)


def test_frames_become_an_animation(tmp_path):
    path = tmp_path / "steps.gif"
    frames = [np.full((8, 8, 3), level, np.uint8) for level in (0, 120, 255)]
    image_files.write_animation(path, frames)
    with Image.open(path) as animation:
        assert animation.n_frames == 3
    with pytest.raises(ImageError, match="no step to show"):
        image_files.write_animation(path, [])
    with pytest.raises(ImageError, match=r"must end in \.gif"):
        image_files.write_animation(tmp_path / "steps.png", frames)


def test_a_sheet_shows_all_in_order():
    shown = image_files.sheet([np.full((4, 4, 3), level, np.uint8) for level in (10, 20, 30)])
    assert shown.shape == (12, 12, 3)
    assert [shown[0, 0, 0], shown[0, 8, 0], shown[8, 0, 0], shown[8, 8, 0]] == [10, 20, 30, 255]


def test_boxes_are_drawn():
    plain = np.full((96, 96, 3), 200, np.uint8)
    drawn = image_files.with_boxes(plain, [(10, 10, 40, 40), None])
    assert (drawn[10, 10:41] == 0).all()
    assert (drawn[20, 20] == 200).all()
    assert (plain == 200).all()


# ---------------------------------------------------------------------------------------------
# What an image may cost to read.


def saved(image: Image.Image, format: str, **how) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **how)
    return file.getvalue()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_images_are_turned_as_pillow_turns_them(format, orientation):
    pixels = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x010F], exif[0x0112], exif[0x9003] = "maker", orientation, "2026:11:26 00:00:00"
    contents = saved(Image.fromarray(pixels), format, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(contents))).convert("RGB")
    np.testing.assert_array_equal(image_files.read_bytes(contents), np.asarray(upright))
    white = np.asarray(upright).mean(axis=-1) > 127
    np.testing.assert_array_equal(image_files.read_transparent(contents), white)


def test_an_orientation_in_xmp_counts_where_exif_has_none():
    image = Image.new("RGB", (24, 40))
    contents = saved(image, "JPEG", xmp=b'<x tiff:Orientation="6"/>')
    assert image_files.read_bytes(contents).shape == (24, 40, 3)


def greedy_exif(entries: int, size: int) -> bytes:
    """EXIF metadata of `size` bytes, each entry of which has all of them as its value."""
    table = b"".join(struct.pack("<HHII", i + 1, 7, size - 8, 8) for i in range(entries))
    block = b"II*\0" + struct.pack("<IH", 8, entries) + table
    return b"Exif\0\0" + block.ljust(size, b"\0")


@pytest.mark.parametrize(
    ("format", "entries", "size"),
    [("PNG", 60_000, 2**22), ("WEBP", 2_000, 2**22), ("JPEG", 5_000, 65_000)],
)
def test_metadata_takes_no_more_memory_than_its_file(format, entries, size):
    contents = saved(Image.new("RGB", (64, 64)), format, exif=greedy_exif(entries, size))
    if format == "JPEG":  # Pillow joins further blocks to the first
        end = contents.index(b"Exif") - 4 + 2 + int.from_bytes(contents[4:6], "big")
        contents = contents[:2] + contents[2:end] * 20 + contents[end:]
    tracemalloc.start()
    try:
        assert image_files.read_bytes(contents).shape == (64, 64, 3)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded():
    with pytest.raises(ImageError, match="has 601 scans: at most 64 are read"):
        image_files.cost(hostile_inputs.jpeg_of_scans(64, 600))
    with pytest.raises(ImageError, match="has 601 scans: at most 64 are read"):
        image_files.read_bytes(hostile_inputs.jpeg_of_scans(64, 600))


@pytest.mark.parametrize("progressive", [False, True])
def test_what_a_phone_adds_to_a_photo_is_no_scan(progressive):
    photo = saved(Image.new("RGB", (80, 40)), "JPEG", progressive=progressive)
    scans = photo.count(b"\xff\xda")
    preview = b"\xff\xe1\x00\x0cab" + b"\xff\xda" * 4
    video = b"\0\0\0\x18ftypmp42" + b"\xff\xda" * 1000
    moving = photo[:2] + preview + photo[2:] + video
    assert image_files.cost(moving) == 3200 * (7 + scans) // 8
    assert image_files.read_bytes(moving).shape == (40, 80, 3)
    many = hostile_inputs.jpeg_of_scans(64, 600)
    for hidden in (b"\xff\xfe\x00\x02" * 2000, b"\xff\xfe\x00\x04\xff\xd9", b"\xff" * 100):
        with pytest.raises(ImageError, match="has 601 scans: at most 64 are read"):
            image_files.cost(many[:2] + hidden + many[2:])


def test_the_cost_of_an_image_is_known_from_its_headers():
    assert image_files.cost(hostile_inputs.png(8192, 8192)) == 2**26
    jpeg = saved(Image.new("RGB", (80, 40)), "JPEG")
    assert image_files.cost(jpeg) == 3200
    progressive = saved(Image.new("RGB", (80, 40)), "JPEG", progressive=True)
    scans = progressive.count(b"\xff\xda")
    assert scans > 1
    assert image_files.cost(progressive) == 3200 * (7 + scans) // 8


def test_reading_ends_when_nobody_waits_for_it():
    noise = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    contents, reads = saved(Image.fromarray(noise), "PNG"), []

    def check():
        reads.append(None)
        if len(reads) > 12:  # headers are read in fewer, pixels in pieces of at most 64 kB
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        image_files.read_bytes(contents, check=check)


def test_reading_an_image_takes_bounded_time(monkeypatch):
    monkeypatch.setattr(image_files, "MOST_SECONDS", 0.2)
    contents = hostile_inputs.jpeg_of_scans(64, 1)
    padded = contents[:2] + b"\xff" * 2**22 + contents[2:]  # which Pillow skips one by one
    with pytest.raises(ImageError, match=r"takes more than 0\.2 s to read"):
        image_files.read_bytes(padded)


@pytest.mark.parametrize("mode", ["I;16", "LA", "P", "RGBA", "CMYK"])
def test_bands_change_no_pixel(mode, monkeypatch):
    values = np.random.default_rng(0).integers(0, 2**16, (37, 29, 4), dtype=np.uint16)
    if mode == "I;16":
        image = Image.fromarray(values[..., 0])
    else:
        image = Image.fromarray((values >> 8).astype(np.uint8), "RGBA").convert(mode)
    contents = saved(image, "JPEG" if mode == "CMYK" else "PNG")
    whole = image_files.read_bytes(contents)
    monkeypatch.setattr(arrays, "BAND", 100)
    np.testing.assert_array_equal(image_files.read_bytes(contents), whole)
