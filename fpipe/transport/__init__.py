# SPDX-License-Identifier: Apache-2.0
"""How a value crosses ranks. `contract` says what the executor asks for; `local` and `distributed` provide it."""
