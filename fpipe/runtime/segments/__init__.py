# SPDX-License-Identifier: Apache-2.0
"""Run a segment of a captured model: modules as they are, the rest torch call by torch call."""
