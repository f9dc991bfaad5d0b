"""Images of rows: every form that they come in, and what is refused before anybody is given it."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.config.tree import DataConfig
from streamrl.data.characters import write_tokenizer
from streamrl.data.images import MARK, ImageReader
from streamrl.data.mapped_rows import open_mapped
from streamrl.data.problems import Problem, read_problem
from streamrl.data.streamed import StreamedProblems
from streamrl.data.tokenizer import load_tokenizer
from streamrl.errors import DataError
from tests.support.images import GIF, JPEG, WEBP, data_url, png
from tests.support.refusals import refused

KEYED = DataConfig(images_key="images")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The data's folder, with something beside it."""
    (tmp_path / "secret.png").write_bytes(png(99))
    found = tmp_path / "data"
    (found / "pics").mkdir(parents=True)
    (found / "pics" / "1.png").write_bytes(png(1))
    return found


def read(folder: Path, given: Any, prompt: Any = "p", max_bytes: int = 10_000) -> tuple[Any, list[bytes]]:
    text, images = ImageReader(folder, max_bytes).read(given, prompt)
    assert all((one.image.sha256, one.image.num_bytes) == (hashlib.sha256(one.data).hexdigest(), len(one.data)) for one in images)
    return text, [one.data for one in images]


def test_a_field_has_images_in_any_of_these_forms(folder: Path) -> None:
    for given, found in (
        (None, []),
        ([], []),
        ("pics/1.png", [png(1)]),
        ("pics/../pics/1.png", [png(1)]),
        (png(2), [png(2)]),
        (data_url(png(2)), [png(2)]),
        (data_url(JPEG, "image/jpg"), [JPEG]),
        ({"bytes": png(2), "path": "/elsewhere/2.png"}, [png(2)]),
        ({"bytes": None, "path": "pics/1.png"}, [png(1)]),
        (["pics/1.png", png(2), GIF, JPEG, WEBP], [png(1), png(2), GIF, JPEG, WEBP]),
    ):
        assert read(folder, given) == ("p", found)


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


TEXT = {"type": "text", "text": "a", "image": None}  # Parquet gives each part all fields


def test_parts_of_messages_become_a_text_and_images_in_their_order(folder: Path) -> None:
    for given, parts, text, found in (
        (None, [TEXT], "a", []),
        (None, [TEXT, {"type": "image_url", "image_url": {"url": data_url(png(2))}}, TEXT], f"a{MARK}a", [png(2)]),
        (None, [{"type": "image_url", "image_url": data_url(GIF, "image/gif")}], MARK, [GIF]),
        (None, [{"type": "image", "image": {"bytes": png(3), "path": None}}, TEXT], f"{MARK}a", [png(3)]),
        (["pics/1.png", png(2)], [{"type": "image"}, TEXT, {"type": "image", "text": None}], f"{MARK}a{MARK}", [png(1), png(2)]),
        ([png(1)], [{"type": "image", "image": png(5)}, {"type": "image"}], MARK + MARK, [png(5), png(1)]),
        (png(4), [TEXT], "a", [png(4)]),
    ):
        prompt, images = read(folder, given, user(*parts))
        assert (prompt, images) == ([{"role": "user", "content": text}], found), parts


@pytest.mark.parametrize(
    ("given", "parts", "said"),
    [
        (None, [{"type": "image"}], "more parts than the field has"),
        ([png(1), png(2)], [{"type": "image"}], "as many image parts in the messages as the field has images, 2, got 1"),
        ([png(1)], [{"type": "image", "image": png(2)}], "got 0"),
        (None, [{"type": "input_audio", "input_audio": {}}], "of the types text, image, image_url, got 'input_audio'"),
        (None, ["a"], "got 'str'"),
        (None, [{"type": "text"}], "got 'text'"),
        (None, [{"type": "image_url", "image_url": {"url": 3}}], "got int"),
        (None, [{"type": "image_url"}], "got NoneType"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit_are_refused(folder: Path, given: Any, parts: list[Any], said: str) -> None:
    with refused(DataError, said):
        read(folder, given, user(*parts))


def links(folder: Path) -> None:
    """What leads out of the folder, or nowhere, and what is no file."""
    (folder / "out.png").symlink_to(folder.parent / "secret.png")
    (folder / "up").symlink_to(folder.parent)
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    (folder / "cut.png").write_bytes(png(1)[:-9])
    with (folder / "large.png").open("wb") as file:
        file.truncate(100 << 20)
    (folder / "text.png").write_text("<svg/>")
    (folder / "empty.png").touch()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("pics/2.png", "got none: No such file or directory"),
        ("../secret.png", "which lies outside"),
        ("pics/../../secret.png", "which lies outside"),
        ("out.png", "which lies outside"),
        ("up/secret.png", "which lies outside"),
        ("/etc/hostname", "which lies outside"),
        ("loop", "got none"),
        ("pipe", "which is none"),
        ("pics", "which is none"),
        ("a\0b", "got none: "),
        ("x" * 5000, "got none: File name too long"),
        ("", "an empty text"),
        (7, "got int"),
        ({"bytes": None, "path": None}, "got NoneType"),
        ("https://example.com/a.png", "got the address"),
        ("file:///etc/passwd", "got the address"),
        ("cut.png", "expected a whole image/png"),
        ("large.png", "got one of 104857600 where 10000 are left"),
        (png(1) * 1000, "where 10000 are left"),
        ([png(1)] * 1000, "at most 64 images, got 1000"),
        ([bytes(6000), bytes(6000)], "image 0: expected an image"),
        ([png(1, 8) + bytes(6000)] * 2, "image 1: expected at most 10000 bytes for all images of a row"),
        (data_url(b"\0" * 12000), "got one of 12000"),
        ("text.png", "got 6 bytes that begin with 3c7376672f3e"),
        ("empty.png", "got 0 bytes that are none"),
        (data_url(JPEG, "image/png"), "expected image/png, as its data URL says, got image/jpeg"),
        (data_url(png(1), "text/html"), "expected text/html, as its data URL says, got image/png"),
        ("data:image/png,abc", "in base64"),
        ("data:image/png;base64,@@@@", "in base64"),
        (data_url(png(1)) + "=", "in base64"),
        (GIF[:-1], "expected a whole image/gif"),
        (JPEG[:-2], "expected a whole image/jpeg"),
        (WEBP[:-1], "expected a whole image/webp"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_image_within_its_bounds_is_refused(folder: Path, given: Any, said: str) -> None:
    links(folder)
    with refused(DataError, said):
        read(folder, given)


def test_a_row_says_where_it_stands_and_a_field_that_is_not_there_is_no_null(folder: Path) -> None:
    path = str(folder / "rows.jsonl")
    row = {"prompt": "p", "label": "l"}
    with pytest.raises(DataError, match=r"'images' at .*rows.jsonl line 3"):
        read_problem(row, KEYED, row_number=0, line=3, path=path)
    assert read_problem({**row, "images": None}, KEYED, row_number=0, line=3, path=path).images == ()
    with pytest.raises(DataError, match=r"image 0: .* 'no' in .*rows.jsonl line 3"):
        read_problem({**row, "images": "no"}, KEYED, row_number=0, line=3, path=path)
    parts = {**row, "prompt": user({"type": "image", "image": png(1)})}
    with refused(DataError, hint="data.images_key"):
        read_problem(parts, DataConfig(), row_number=0, line=3, path=path)


async def test_rows_of_datasets_are_read_when_their_turn_comes(folder: Path) -> None:
    """As `datasets` writes its feature Image, and with a folder of images elsewhere."""
    write_tokenizer(folder / "model")
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": png(5), "path": "/home/somebody/5.png"}, {"bytes": None, "path": "1.png"}, None, {"bytes": b"no", "path": None}]
    columns = {"prompt": pa.array(list("abcd")), "label": pa.array(list("abcd")), "images": pa.array(rows, image)}
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    config = DataConfig(images_key="images", images_folder=str(folder / "pics"), chat_template=False)
    problems = StreamedProblems(open_mapped(str(folder / "rows.parquet"), folder), config, load_tokenizer(folder / "model"))
    first, second, third, broken = problems.take(range(4))
    assert [[one.data for one in p.images] for p in (first, second, third) if isinstance(p, Problem)] == [[png(5)], [png(1)], []]
    assert not isinstance(broken, Problem) and broken.reason == "row_broken" and "row 4" in broken.detail
