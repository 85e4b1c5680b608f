# SPDX-License-Identifier: Apache-2.0
"""A process's share of a model: read from files and state dicts, or initialized by a function."""
