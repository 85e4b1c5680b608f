# SPDX-License-Identifier: Apache-2.0
"""The cases of a job, one module per subject; importing this package fills `CASES`."""

from importlib import import_module
from pkgutil import iter_modules

from tests.distributed.cases.checks import CASES

__all__ = ["CASES"]

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")
