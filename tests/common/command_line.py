# SPDX-License-Identifier: Apache-2.0
"""Run `python -m schedules` in this process."""

from schedules.__main__ import main


def answer(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err
