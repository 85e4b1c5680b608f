# SPDX-License-Identifier: Apache-2.0
"""Random models: nested parts of many kinds, skips, ties, several inputs and outputs, drawn as a description.

A description is a tree of `Leaf`, `Again` and `Nest`, from which a module is built; Hypothesis shrinks it, and it
prints as the code that makes it. Every part of the module is called with a tensor and with the batch, a dict, and
returns a tensor or a tree that contains one.
"""

from tests.common.random_models.cut_places import places
from tests.common.random_models.models import case_of
from tests.common.random_models.strategies import descriptions

__all__ = ["case_of", "descriptions", "places"]
