# SPDX-License-Identifier: Apache-2.0
"""Pipelines as text and as bytes: what each stage holds, and what crosses each cut."""
