# SPDX-License-Identifier: Apache-2.0
"""Measure a model piece by piece, and predict what stages made of the pieces cost."""
