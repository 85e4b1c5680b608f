# SPDX-License-Identifier: Apache-2.0
"""The package `schedules` that comes with fpipe, and not another one of that name.

Problem. Scripts often have a file `schedules.py` beside them, for learning rates. Python finds it first, and importing
fpipe would end in "'schedules' is not a package". An installed package of that name may hide or overwrite ours.

Idea. Before fpipe imports anything, look where Python finds `schedules`: it must lie beside fpipe, and be ours.

Runs when fpipe is imported.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

HOME = Path(__file__).parents[1] / "schedules"


def require_companion() -> None:
    """Raise `ImportError`, naming the file, if `import schedules` gives another module than the one beside fpipe."""
    try:
        spec = find_spec("schedules")
    except ValueError:  # a module that somebody made by hand
        spec = None
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    if HOME.resolve() not in [Path(place).resolve() for place in places]:
        found = "no file" if spec is None else spec.origin or places
        raise ImportError(
            f"schedules: got {found}, expected the package that comes with fpipe, {HOME}. Python finds the other one "
            "first: rename it, or move it off the path."
        )
    if not hasattr(import_module("schedules"), "lower"):
        raise ImportError(
            f"schedules: got {HOME / '__init__.py'} of another package, which overwrote the one that comes with fpipe. "
            "Run pip uninstall schedules, then pip install --force-reinstall --no-deps fpipe-torch."
        )


require_companion()
