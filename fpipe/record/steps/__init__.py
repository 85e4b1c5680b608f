# SPDX-License-Identifier: Apache-2.0
"""Run segments of a captured model in every step: recorded torch calls, and whole calls as Python.

`fpipe.record.trace` decides at build time what a segment consists of, and assembles its function from the parts in
this folder.
"""
