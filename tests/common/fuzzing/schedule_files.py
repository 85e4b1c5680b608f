# SPDX-License-Identifier: Apache-2.0
"""Tables, layouts, calls and certificates of schedules that were altered; then read, checked, timed and drawn."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import schedules
from schedules import Costs, Link, Schedule, certificate, drawing, lower
from schedules.certification import Certificate, certify
from schedules.files.calls import read_call, spell_call
from schedules.files.cells import pipelining
from schedules.files.csv import read_csv, write_csv
from schedules.files.megatron import layout_schedule, read_layout
from tests.common.fuzzing.bounds import REFUSED, ask, call
from tests.common.fuzzing.mutations import mutate_bytes, mutate_value, mutate_words, plant

SMALL = (
    schedules.gpipe(2, 2),
    schedules.one_f_one_b(3, 4),
    schedules.interleaved_1f1b(2, 4, chunks=2),
    schedules.zb_v(2, 4),
    schedules.zb_h1(3, 4),
    schedules.dualpipe(4, 8),
    schedules.chimera(4, 4),
    schedules.recompute(schedules.one_f_one_b(2, 4)),
    schedules.forward_only(2, 3),
)
CALLED = (
    *SMALL,
    schedules.zb_auto(2, 3, costs=Costs(F=(1, 2), comm=Link(latency=1, slow=(((0, 1), 2.0),)))),
    schedules.repeat(schedules.recompute(schedules.one_f_one_b(2, 4), stages=(0,)), times=2),
    schedules.defer_weights(schedules.zb_h1(3, 6), memory=2.5),
)
CELLS = ["0F0", "1B1", "0SEND_F0", "1RECV_F0<0", "0I0", "0W0", "2U0", "0G0", "graph", "0-2", "(0F1;0B0)OVERLAP_F_B"]
CELLS += ["0UNSHARD", "1REDUCE_GRAD1", "0C0", "0R0", "0WAIT_SEND_F0", "0F0.1", "\n", ",", ",,", "999999999F0"]
LAYOUTS = ("Et*3|(tt|)*2,m|L", "E|t|t|L", "Ett|tt|ttL", "E(t|)*6L", "t")
LAYOUT_WORDS = ["E", "t", "m", "L", "|", "(", ")", "*", "3", "999999999", ",", "((((", "*1000000"]
MOST_USED = 2000
"""How many passes a schedule may have that is used after it was read."""


class ScheduleFiles:
    """Valid tables, layouts, calls and certificates."""

    def __init__(self) -> None:
        self.tables = [_write(how) for how in SMALL] + [_write(lower(how)) for how in SMALL]
        self.tables += [_write(how, words=pipelining) for how in SMALL[:5]]
        self.calls = [spell_call(how) for how in CALLED]
        gathered = schedules.shard(schedules.reduce_gradients(schedules.gpipe(2, 2)), limit=1)
        more = [schedules.pipedream(2, 3), schedules.seq_1f1b(2, 2), schedules.offload(schedules.gpipe(2, 6)), gathered]
        self.certificates = [certify(how).text for how in (*SMALL[:7], *more)]

    def try_one(self, seed: int) -> str:
        """Alter one of them, read it, and use it. Return how that ended."""
        drawn = Random(seed)
        return drawn.choice((self._try_table, self._try_call, self._try_certificate, self._try_layout))(drawn)

    def _try_table(self, drawn: Random) -> str:
        text = drawn.choice(self.tables)
        parts = text.replace("\n", ",\n,").split(",")
        joined = ",".join(mutate_words(drawn, parts, CELLS)).replace(",\n,", "\n")
        data = joined.encode(errors="surrogateescape") if drawn.random() < 0.9 and "\ud800" not in joined else None
        data = mutate_bytes(drawn, text.encode()) if data is None else data
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "table.csv")
            file.write_bytes(data)
            if drawn.random() < 0.05:
                plant(drawn, file)
            size = file.stat().st_size if file.is_file() else 0
            found = ask(partial(call, read_csv, file, expected=OSError), most_read=4 * size + 2**16)
            assert not isinstance(found, OSError) or file.is_symlink() or not file.is_file(), found
        if isinstance(found, OSError):
            return "table: no file"
        if found is REFUSED:
            return "table: refused"
        again = ask(read_csv, io.StringIO(_write(found)))
        assert again is not REFUSED, "what was written can't be read"
        assert _write(again) == _write(found), "what was written is read as something else"
        return f"table: {_use(found)}"

    def _try_call(self, drawn: Random) -> str:
        call: Any = drawn.choice(self.calls)
        for _ in range(drawn.choice((1, 1, 2, 3))):
            call = mutate_value(drawn, call)
        if drawn.random() < 0.1:
            for _ in range(drawn.choice((3, 15, 18, 300))):
                call = {"schedule": "forwards", "arguments": {"schedule": call}}
        found = ask(read_call, call)
        if found is REFUSED:
            return "call: refused"
        assert isinstance(found, Schedule)
        return f"call: {_use(found)}"

    def _try_certificate(self, drawn: Random) -> str:
        text = drawn.choice(self.certificates)
        if drawn.random() < 0.7:
            document = json.loads(text)
            for _ in range(drawn.choice((1, 1, 2))):
                document = mutate_value(drawn, document)
            if isinstance(document, dict) and drawn.random() < 0.3 and isinstance(document.get("programs"), list):
                document["programs"] = [
                    " ".join(mutate_words(drawn, one.split(" "), CELLS)) if isinstance(one, str) else one
                    for one in document["programs"]
                ]
            text = json.dumps(document)
        else:
            text = mutate_bytes(drawn, text.encode()).decode("latin-1")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "plan.json")
            file.write_bytes(text.encode(errors="replace"))
            if drawn.random() < 0.05:
                plant(drawn, file)
            size = file.stat().st_size if file.is_file() else 0
            with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
                code = ask(lambda: certificate.main([str(file)]), most_read=4 * size + 2**16)
        assert code == 0 or (code == 1 and "refused: " in err.getvalue() and len(err.getvalue()) < 2000), code
        mine = ask(Certificate.parse, text)
        return f"certificate: {'accepted' if code == 0 else 'refused'}, {'refused' if mine is REFUSED else 'read'}"

    def _try_layout(self, drawn: Random) -> str:
        text = "".join(mutate_words(drawn, list(drawn.choice(LAYOUTS)), LAYOUT_WORDS))
        found = ask(read_layout, text)
        if found is REFUSED:
            return "layout: refused"
        if len(found) > 64:
            return "layout: large"
        how = ask(layout_schedule, text, drawn.choice((1, 2, len(found))), drawn.choice((1, 4, 8)))
        return "layout: not run" if how is REFUSED else f"layout: {_use(how)}"


def _write(plan: Any, **more: Any) -> str:
    file = io.StringIO()
    write_csv(plan, file, **more)
    return file.getvalue()


def _use(found: Any) -> str:
    """Check a schedule or a program, and time and draw it if it is right."""
    schedule = found if isinstance(found, Schedule) else getattr(found, "schedule", found)
    if schedule.stages * schedule.microbatches > MOST_USED or schedule.ranks > MOST_USED:
        return "large"
    if ask(schedules.check, found) is REFUSED:
        return "wrong"
    if ask(lambda: schedules.simulate(schedule, Costs()).makespan) is REFUSED:
        return "right, not timed"
    ask(lambda: drawing.text(schedule))
    return "right"
