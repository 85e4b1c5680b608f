# SPDX-License-Identifier: Apache-2.0
"""Find the names that a function reads in its bytecode: globals, variables that it closes over, attributes, keys.

A load that only feeds an update doesn't count: `calls += 1` and `seen.append(x)` don't affect the result.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

import dis
from collections import Counter
from dataclasses import dataclass
from types import CodeType

GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
FREE = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
STORING = frozenset({"STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"})
SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})
CHANGING = frozenset(
    {"append", "appendleft", "extend", "insert", "add", "update", "remove", "discard", "clear", "setdefault"}
)


@dataclass(frozen=True)
class CodeNames:
    """The names that some code reads and stores.

    - `outer`: the globals and free variables that it reads.
    - `attributes`: the attributes that it reads, of any object.
    - `keys`: its strings, which may be keys of mappings.
    - `stored`: the attributes and variables that it assigns to.
    """

    outer: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()

    def __or__(self, other: CodeNames) -> CodeNames:
        return CodeNames(
            self.outer | other.outer,
            self.attributes | other.attributes,
            self.keys | other.keys,
            self.stored | other.stored,
        )


def find_names(code: CodeType) -> CodeNames:
    """Return the names that `code`, and the functions defined in it, read and store.

    >>> def counting(self):
    ...     seen.append(table["key"])
    ...     self.calls += 1
    ...     return self.scale * factor
    >>> found = find_names(counting.__code__)
    >>> sorted(found.outer), sorted(found.attributes), sorted(found.keys)
    (['factor', 'table'], ['scale'], ['key'])
    """
    steps = [step for step in dis.get_instructions(code) if step.opname not in SKIPPED]
    outer, attributes, keys, stored = Counter[str](), set[str](), set[str](), set[str]()
    for before, step, after in zip([None, *steps], steps, [*steps[1:], None], strict=False):
        what, name = step.opname, step.argval
        changing = after is not None and after.opname in ATTRIBUTE and after.argval in CHANGING
        if what in GLOBAL or what in FREE:
            outer[name] += not changing
        elif what in ATTRIBUTE:
            changed = name in CHANGING or (before is not None and before.opname == "COPY")  # x.n += 1 copies x
            if not changing and not changed:
                attributes.add(name)
        elif what in STORING:
            stored.add(name)
            if before is not None and before.opname == "BINARY_OP" and before.argrepr.endswith("="):
                outer[name] -= what != "STORE_ATTR"
        elif what == "LOAD_CONST" and isinstance(name, str):
            stored_at = after is not None and after.opname in ("COPY", "STORE_SUBSCR")  # d["n"] += 1 copies d and "n"
            keys.update([] if stored_at else [name])
    found = CodeNames(
        frozenset(name for name, count in outer.items() if count > 0),
        frozenset(attributes),
        frozenset(keys),
        frozenset(stored),
    )
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= find_names(inner)
    return found
