# SPDX-License-Identifier: Apache-2.0
"""The names that the code of a function reads."""

from fpipe.record.reads.code_names import Lookup, find_names

TABLE: dict[str, float] = {}
WAYS = ()


def test_names_that_are_only_written_are_not_read():
    def function(self, calls=[]):  # noqa: B006
        global FACTOR  # noqa: PLW0603
        FACTOR += 1
        self.helper.count += 1
        TABLE["unread"] += 1
        self.seen.append(self.width)
        return [WAYS for _ in range(2)], lambda: TABLE["scale"]

    found = find_names(function.__code__)
    assert found.outer == {"TABLE", "WAYS", "range"}
    assert found.attributes == {"helper", "width"}
    assert "scale" in found.keys
    assert "unread" not in found.keys
    assert found.stored == {(Lookup("global"), "FACTOR"), (Lookup("first", "", ("helper",)), "count")}
