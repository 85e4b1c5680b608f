# SPDX-License-Identifier: Apache-2.0
"""Drop-in modules in training libraries; a module of this room imports the library that it is named after.

Runs when a user imports one of these modules.
"""
