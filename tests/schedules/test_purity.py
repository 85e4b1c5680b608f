# SPDX-License-Identifier: Apache-2.0
"""`schedules` stands on the standard library alone, and its public names do not change by accident."""

import subprocess
import sys

import schedules

PROBE = """
import importlib, pkgutil, sys

class OnlyTheStandardLibrary:
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root != "schedules" and root not in sys.stdlib_module_names:
            raise ImportError(f"{name} is not in the standard library")

sys.meta_path.insert(0, OnlyTheStandardLibrary())
import schedules
found = [module.name for module in pkgutil.walk_packages(schedules.__path__, "schedules.")]
LARGE = {f"schedules.arrays.{name}" for name in ("abreast", "codes", "lives", "lowered", "paths", "posts", "ticks")}
names = [name for name in found if not name.startswith("schedules.testing") and name not in LARGE]
for name in names:
    importlib.import_module(name)
large = schedules.one_f_one_b(ranks=64, microbatches=256)
schedules.simulate(large), schedules.critical_path(large)
next(schedules.lower(large).actions(0))
assert not LARGE & {*sys.modules}
try:
    import schedules.testing
except ImportError as error:
    assert "hypothesis" in str(error)
else:
    raise AssertionError("the probe blocks nothing")
print(*names)
"""


def test_nothing_but_the_standard_library_is_imported():
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"schedules.checking.rules", "schedules.__main__", "schedules.families.fill_drain"} <= set(
        done.stdout.split()
    )


NAMES = """
Action ArgumentError B Bound C Certificate Costs CriticalPath Device DeviceRun F certify
Factory G Graph GraphError I KINDS Limits OwnKind Link PipelineError
Placement Problem Program
ProgramError R Rule Schedule ScheduleError SearchProgress SearchResult SizeError Sizes
SolverError Span TableError Timeline TimelineError U VocabularyError W alternate
bidirectional bound breadth_first chain check chimera connect cp_sat critical_path dag defer_weights drawing dualpipe
dualpipe_v eager_1f1b
estimate forward_only forwards from_rows gis gpipe group_passes
hanayo interleaved_1f1b interleaved_zero_bubble kfkb linear list_versions looped lower
memory_over_time merge_backward merge_in_order mirror one_f_one_b overlap parse pipedream
offload pipedream_2bw play prefer recompute
reduce_gradients repeat run_on_device schedule search seq_1f1b shard simulate
spans split_backward sum_replicas summarize transform update_weights v_1f1b v_half v_min v_schedule vee wave zb_auto
zb_h1 zb_h2 zb_v
"""


def test_the_public_names():
    assert sorted(schedules.__all__) == sorted(NAMES.split())
    assert all(hasattr(schedules, name) for name in schedules.__all__)
