# SPDX-License-Identifier: Apache-2.0
"""How values are sent between ranks. `contract` is what the executor requires; `local` and `distributed` provide it."""
