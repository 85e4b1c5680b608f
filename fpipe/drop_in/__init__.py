# SPDX-License-Identifier: Apache-2.0
"""The drop-in module: a pipeline that a script for one device trains as its model.

Runs when the module is made, and in every step.
"""
