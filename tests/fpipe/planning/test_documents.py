# SPDX-License-Identifier: Apache-2.0
"""A profile is saved as JSON, and read back equal; anything else is refused by name."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest
from hypothesis import given

from fpipe import InputError, Profile
from fpipe.planning.profile import PROFILE_FORMAT
from fpipe.weights.files import MOST_READ
from tests.common.profiles import plain_profile, profiles


@given(profiles())
def test_what_is_read_equals_what_was_written(profile):
    assert Profile.parse(PROFILE_FORMAT.write(profile)) == profile


def test_a_file_is_read_back(tmp_path):
    profile = plain_profile(4)
    profile.save(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == profile
    assert hash(Profile.read(tmp_path / "profile.json")) == hash(profile)


def test_a_file_that_could_not_be_written_is_as_it_was(tmp_path):
    """A disk that is full when the file is closed, for one; nothing is left beside it."""
    path = tmp_path / "profile.json"
    plain_profile(4).save(path)
    full = OSError(28, "No space left on device")
    with patch("os.fsync", side_effect=full), pytest.raises(InputError, match="No space left on device"):
        plain_profile(3).save(path)
    assert Profile.read(path) == plain_profile(4)
    assert [one.name for one in tmp_path.iterdir()] == ["profile.json"]


def changed(document, path, value):
    """Return a copy of a document with another value at a path."""
    if not path:
        return value
    key, *rest = path
    if isinstance(document, list):
        return [changed(one, rest, value) if k == key else one for k, one in enumerate(document)]
    return {**document, key: changed(document.get(key), rest, value)}


BAD = [
    (["version"], 2, "version: got 2, expected 1"),
    (["kind"], "other", "expected a profile that fpipe saved"),
    (["more"], 1, "got the fields"),
    (["blocks"], [], "blocks: got 0 of them"),
    (["blocks"], 3, "blocks: got 3, expected a list"),
    (["blocks", 1, 0], 7, "blocks[1].name: got 7, expected a text"),
    (["blocks", 1, 2], -1, "blocks[1].units: got -1"),
    (["blocks", 1, 1, 0], ["x"], "blocks[1].marks[0]: got ['x'], expected a list of 3 entries"),
    (["blocks", 1, 1, 0, 2], 0, "blocks[1].marks[0].end: got 0, expected true or false"),
    (["times", 2, 1], -0.5, "times[2].B: got -0.5, expected a finite number of at least 0"),
    (["times", 2], [1, 2], "times[2]: got [1, 2], expected a list of 5 entries"),
    (["times"], [], "times: got 0 entries, expected 4"),
    (["fixed", 0], True, "fixed.F: got True"),
    (["hops"], [[0, 4, 1, 1]], "hops[0]: got [0, 4], expected ascending numbers of blocks below 4"),
    (["hops"], [[2, 1, 1, 1]], "hops[0]: got [2, 1]"),
    (["hops"], [[0, 1, 1.5, 1]], "hops[0].forward: got 1.5, expected an integer"),
    (["activation"], [[8, []]], "activation[0].blocks: got []"),
    (["arrivals"], [[0, 2, 8, 1]], "arrivals[0].saved: got 1, expected a number of blocks from 2 to 4"),
    (["versions", 0], 2**70, "versions[0]: got"),
    (["model"], "x" * 20_000, "model: got"),
    (["link", "latency"], -1, "link: Link: got latency=-1"),
    (["link", "slow"], [[[0], 1]], "link.slow[0][0]: got [0], expected a list of 2 entries"),
    (["link"], {}, "link: got {}"),
]


@pytest.mark.parametrize(("path", "value", "words"), BAD, ids=[words[:40] for _, _, words in BAD])
def test_a_wrong_field_is_named(tmp_path, path, value, words):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(changed(json.loads(PROFILE_FORMAT.write(plain_profile(4))), path, value)))
    with pytest.raises(InputError) as caught:
        Profile.read(file)
    assert str(file) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_lacks_are_refused(tmp_path, number):
    file = tmp_path / "profile.json"
    file.write_text(PROFILE_FORMAT.write(plain_profile(4)).replace('"step": ', f'"step": {number}, "more": '))
    with pytest.raises(InputError, match=number):
        Profile.read(file)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "3", '"text"', "null", "{}"])
def test_other_files_are_refused(tmp_path, text):
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"profile\.json: got .*expected a profile that fpipe saved"):
        Profile.read(file)


def test_files_that_are_missing_binary_or_too_large_are_refused(tmp_path):
    with pytest.raises(InputError, match="FileNotFoundError"):
        Profile.read(tmp_path / "missing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UnicodeDecodeError"):
        Profile.read(tmp_path / "binary.json")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(MOST_READ + 1)
    with pytest.raises(InputError, match="expected a profile"):
        Profile.read(tmp_path / "large.json")
