# SPDX-License-Identifier: Apache-2.0
"""Send values between ranks: `interface` is what the executor requires; `local` and `distributed` implement it."""
