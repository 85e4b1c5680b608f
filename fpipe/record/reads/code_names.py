# SPDX-License-Identifier: Apache-2.0
"""Find what a function reads and assigns in its bytecode: globals, variables that it closes over, attributes, keys.

A load that only feeds an update doesn't count as a read: `calls += 1` and `seen.append(x)` don't affect the result.

Idea. Reads are collected by name: `x.scale` reads the attribute `scale` of any object. Assignments say where they go:
`self.common.width = 3` assigns the `width` of what is found at `common` of the function's first argument. So a name
that is assigned to some object hides no change of another object's attribute.

Runs when a plan is made: once per kind of batch.
"""

from __future__ import annotations

import dis
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, NamedTuple

GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
FREE = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
STORING = frozenset({"STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"})
SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME", "COPY_FREE_VARS", "MAKE_CELL"})
CHANGING = frozenset(
    {"append", "appendleft", "extend", "insert", "add", "update", "remove", "discard", "clear", "setdefault"}
)


class Lookup(NamedTuple):
    """An object that code finds: a variable, and the attributes looked up from there, one in the other.

    `root`: "global", "free", "first" (the function's first argument), or "" for an unknown object.
    """

    root: str
    variable: str = ""
    attributes: tuple[str, ...] = ()

    def then(self, name: str) -> Lookup:
        """Return the lookup of an attribute of the object."""
        return self._replace(attributes=(*self.attributes, name))


UNKNOWN, FIRST = Lookup(""), Lookup("first")


@dataclass(frozen=True)
class CodeNames:
    """The names that some code reads, and what it assigns to.

    - `outer`: the globals and free variables that it reads.
    - `attributes`: the attributes that it reads, of any object. `own`: those that it reads of its first argument.
    - `keys`: its strings, which may be keys of mappings.
    - `stored`: the attributes that it assigns to: the owner and the name. For a variable, the owner is empty, and its
      root says whether it is a global.
    - `grown`: the containers to which it adds elements, or whose elements it assigns.
    """

    outer: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    stored: set[tuple[Lookup, str]] = field(default_factory=set)
    grown: set[Lookup] = field(default_factory=set)

    def update(self, other: CodeNames) -> None:
        """Add the names of other code."""
        for name, found in vars(self).items():
            found |= vars(other)[name]


def find_names(code: CodeType) -> CodeNames:
    """Return the names that `code`, and the functions defined in it, read and assign.

    >>> def counting(self):
    ...     seen.append(table["key"])
    ...     self.calls += 1
    ...     return self.scale * factor
    >>> found = find_names(counting.__code__)
    >>> sorted(found.outer), sorted(found.attributes), sorted(found.keys)
    (['factor', 'table'], ['scale'], ['key'])
    >>> found.stored
    {(Lookup(root='first', variable='', attributes=()), 'calls')}
    """
    return _find(code, code.co_varnames[0] if code.co_argcount else "")


def _find(code: CodeType, first: str) -> CodeNames:
    """Return what `code` reads and assigns; `first` is the variable that holds the outermost function's argument."""
    found = _Reader(code, first).read()
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            inside = _find(inner, "" if first in inner.co_varnames else first)
            own = {*code.co_cellvars}  # what it does to variables of `code`, and to what they hold, is nobody else's
            stored = {(lookup, name) for lookup, name in inside.stored if not _is_in(own, lookup, name)}
            grown = {lookup for lookup in inside.grown if not _is_in(own, lookup)}
            found.update(replace(inside, stored=stored, grown=grown))
    return found


def _is_in(variables: Collection[str], lookup: Lookup, name: str = "") -> bool:
    """Return whether a lookup starts in one of these variables of the function around."""
    return lookup.root == "free" and (lookup.variable or name) in variables


class _Reader:
    """Reads one code object; `first` is the variable that holds the first argument of the outermost function.

    `stack` is the top of Python's stack: how the code found each object there.
    """

    def __init__(self, code: CodeType, first: str) -> None:
        self.code, self.first = code, first
        self.found, self.outer = CodeNames(), Counter[str]()
        self.variables: dict[str, Lookup] = {}
        self.stack: list[Lookup] = []

    def read(self) -> CodeNames:
        """Return what the code reads and assigns, without the functions in it."""
        steps = [step for step in dis.get_instructions(self.code) if step.opname not in SKIPPED]
        for before, step, after in zip([None, *steps], steps, [*steps[1:], None], strict=False):
            self._collect(before, step, after)
            self._follow(step)
        self.found.outer.update(name for name, count in self.outer.items() if count > 0)
        return self.found

    def _collect(self, before: dis.Instruction | None, step: dis.Instruction, after: dis.Instruction | None) -> None:
        """Add the names that a step reads, unless it only feeds an update."""
        what, name = step.opname, step.argval
        changing = after is not None and after.opname in ATTRIBUTE and after.argval in CHANGING
        if what in GLOBAL or what in FREE:
            self.outer[name] += not changing
        elif what in ATTRIBUTE:
            changed = name in CHANGING or (before is not None and before.opname == "COPY")  # x.n += 1 copies x
            if not changing and not changed:
                self.found.attributes.add(name)
                self.found.own.update([name] if self._top() == FIRST else [])
        elif what in STORING:
            if before is not None and before.opname == "BINARY_OP" and before.argrepr.endswith("="):
                self.outer[name] -= what != "STORE_ATTR"
        elif what == "LOAD_CONST" and isinstance(name, str):
            stored_at = after is not None and after.opname in ("COPY", "STORE_SUBSCR")  # d["n"] += 1 copies d and "n"
            self.found.keys.update([] if stored_at else [name])

    def _follow(self, step: dis.Instruction) -> None:
        """Do to the stack what a step does, and note what it assigns; forget the stack if the step does anything else.

        A method or function that is about to be called is one object here, although Python pushes two.
        """
        what = step.opname
        if what.startswith("LOAD_"):
            self._load(what, step.argval)
        elif what.startswith("STORE_"):
            self._store(what, step.argval)
        elif what == "COPY":
            self.stack.append(self._top(step.arg or 1))
        elif what == "SWAP" and len(self.stack) >= (count := step.arg or 2):
            self.stack[-1], self.stack[-count] = self.stack[-count], self.stack[-1]
        elif what in ("BINARY_OP", "BINARY_SUBSCR", "COMPARE_OP"):
            self._pop(2)
            self.stack.append(UNKNOWN)
        elif what == "CALL":
            argument = self._top()
            self._pop(step.arg or 0)
            self.stack.append(self._call(self._pop(), argument))
        else:
            self.stack.clear()

    def _load(self, what: str, name: Any) -> None:
        """Push what a step loads."""
        if what in GLOBAL:
            self.stack.append(Lookup("global", name))
        elif what in FREE:
            self.stack.append(FIRST if name == self.first else Lookup("free", name))
        elif what.startswith("LOAD_FAST"):  # some versions load two at once
            variables = name if isinstance(name, tuple) else (name,)
            self.stack += [FIRST if one == self.first else self.variables.get(one, UNKNOWN) for one in variables]
        elif what in ATTRIBUTE:
            self.stack.append(self._pop().then(name))
        elif what == "LOAD_CONST":
            self.stack.append(UNKNOWN)
        else:
            self.stack.clear()

    def _store(self, what: str, name: Any) -> None:
        """Note what a step assigns to."""
        if what == "STORE_SUBSCR":
            self._pop()
            self.found.grown.add(self._pop())
        elif what == "STORE_ATTR":
            self.found.stored.add((self._pop(), name))
        elif what in ("STORE_GLOBAL", "STORE_DEREF"):
            inside = name in self.code.co_cellvars
            self.found.stored.update([] if inside else [(Lookup("global" if what == "STORE_GLOBAL" else "free"), name)])
        elif what == "STORE_FAST":
            self.variables[name] = UNKNOWN if name in self.variables else self._top()  # which one depends on the way
        else:
            self.stack.clear()
        self._pop()

    def _call(self, function: Lookup, argument: Lookup) -> Lookup:
        """Return what a call returns, if it is known; note what it adds elements to."""
        if function == Lookup("global", "type"):
            return argument.then("__class__")
        if function.attributes and function.attributes[-1] in CHANGING:
            self.found.grown.add(function._replace(attributes=function.attributes[:-1]))
        return UNKNOWN

    def _top(self, depth: int = 1) -> Lookup:
        return self.stack[-depth] if len(self.stack) >= depth else UNKNOWN

    def _pop(self, count: int = 1) -> Lookup:
        """Remove so many objects from the stack, and return the last one removed."""
        last = UNKNOWN
        for _ in range(count):
            last = self.stack.pop() if self.stack else UNKNOWN
        return last
