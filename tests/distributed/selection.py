# SPDX-License-Identifier: Apache-2.0
"""The selection of cases that a job runs: by night all that it can, by day those that its number of ranks adds to.

By day a case runs on two ranks, or on four if a rank in the middle could go wrong.
"""

from __future__ import annotations

from tests.common.sizes import NIGHTLY
from tests.distributed.cases import CASES

# Four ranks add nothing to these, or they take long.
NEEDS_TWO = {
    "what_is_trained_is_verified_from_shares",
    "a_change_that_one_rank_makes_is_raised_on_all",
    "fused_pairs_in_a_vee",
    "two_stages_on_each_rank",
    "wrapped_models",
    "masks_in_a_vee",
    "profiles_of_all_ranks",
    "profiles_of_different_models_are_refused",
    "batches_of_other_shapes",
    "state_of_another_rank",
    *("arguments_that_differ_on_one_rank", "arguments_that_are_wrong_on_one_rank", "calls_that_one_rank_leaves_out"),
    *("optimizers_that_differ_on_one_rank", "checkpoints_that_one_rank_sees_otherwise"),
    *("dropped_and_closed_pipelines_leave_nothing", "a_closed_pipeline_leaves_the_group_of_the_user"),
    "a_dropped_pipeline_leaves_the_collector_nothing",
    "two_thousand_steps_do_not_grow_or_slow_down",
    *(name for name in CASES if name.startswith(("gpt_dropout", "all_frozen", "constants", "own_loss", "recurrent"))),
    *(name for name in CASES if name.endswith("-gpipe") and not name.startswith("skips")),
}

# Their meshes have so many processes.
NEEDS_EIGHT = {name for name in CASES if name.endswith(("_on_2_pp_2_dp_2_fsdp", "_2_tp"))}
NEEDS_FOUR = {name for name in CASES if "_on_2_pp_" in name} - NEEDS_EIGHT
NEEDS_FOUR |= {name for name in CASES if "on_a_mesh" in name} | {"a_mesh_is_verified"}
NEEDS_FOUR |= {"meshes_that_differ_are_refused_on_all_ranks"}
NEEDS_FOUR |= {"split_parameters_are_saved_from_a_mesh_and_loaded_whole"}
NEEDS_FOUR |= {"a_model_on_meta", "data_parallel_pipelines", "told_no_shapes"}

ALONE = {"dies_in_the_middle"}

LAST = "after_the_group_is_gone"

ON_BOTH = {LAST, "another_number_of_ranks", "one_process_computes_the_same"}

ON_FOUR = ON_BOTH | {
    *("stages_on_two_ranks", "evaluation_on_two_ranks", "descending_order", "every_rank_holds_its_own_leaves"),
    *("only_the_ends_hold_the_batch", "weights_where_the_loss_is", "questions_that_one_rank_can_answer"),
    *("sequences_in_parts", "a_dtensor_crosses_a_cut", "predictions_of_two_ranks", "verify_on_every_rank"),
    *("skips-trace-gpipe", "unet-trace-one_f_one_b", "normalised-modules-split_backward"),
    *("tied_sequence-modules-one_f_one_b", "dropping-trace-one_f_one_b", "mlp-trace-split_backward"),
}

MESHES_BY_DAY = {"gpt_zb_v_on_2_pp_2_dp", "gpt_interleaved_on_2_pp_2_fsdp", "gpt_zb_h1_on_2_pp_2_dp_2_fsdp"}
MESHES_BY_DAY |= {"split_gpt_zb_v_on_2_pp_2_fsdp_2_tp"}
MESHES_BY_DAY |= {"experts_zb_v_on_2_pp_2_ep", "parts_of_sequences_zb_v_on_2_pp_2_cp"}

# Front ends and models differ in what they capture, which processes do not see: by day, some are enough.
ZOO_CASES = {name: name.split("-")[:2] for name in CASES if name.count("-") == 2}
EXPORTED_BY_DAY = {"skips-export-split_backward", "chained-export-one_f_one_b"}
TRACED_BY_NIGHT = {
    "gpt_dropout",
    "recurrent",
    "contexts",
    "tied_sequence",
    "normalised",
    "constants",
    "later",
    "in_place",
}
MODULES_BY_DAY = {"dicts", "dropping", "tied_sequence", "normalised"}

SCRIPTS_BY_DAY = {"a_script_that_can_classify_under_zb_v"}

NEEDS_NIGHT = {name for name in CASES if name.startswith("a_script_that_can")} - SCRIPTS_BY_DAY
NEEDS_NIGHT |= {name for name in CASES if "_on_2_pp_" in name} - MESHES_BY_DAY
NEEDS_NIGHT |= {name for name, (_, front) in ZOO_CASES.items() if front in ("fx", "dynamo")}
NEEDS_NIGHT |= {name for name, (_, front) in ZOO_CASES.items() if front == "export"} - EXPORTED_BY_DAY
NEEDS_NIGHT |= {name for name, (model, front) in ZOO_CASES.items() if front == "trace" and model in TRACED_BY_NIGHT}
NEEDS_NIGHT |= {
    name for name, (model, front) in ZOO_CASES.items() if front == "modules" and model not in MODULES_BY_DAY
}
NEEDS_NIGHT |= {
    *("updates_of_other_schedules_and_ties", "norms_count_experts_of_all_processes_on_a_mesh", "a_split_llama"),
    *("smoothed_losses_of_a_split_head_on_a_mesh", "recomputation_in_replicas_of_split_models_on_a_mesh"),
    *("split_blocks_that_run_again", "split_models_are_verified", "two_thousand_steps_do_not_grow_or_slow_down"),
}


def names(size: int, nightly: bool = NIGHTLY) -> list[str]:
    """Return the names of the cases that one job of this size runs, in order."""
    left = NEEDS_EIGHT | (NEEDS_TWO if size != 2 else set()) | (NEEDS_FOUR if size != 4 else set())
    chosen = NEEDS_EIGHT if size == 8 else CASES.keys() - left
    if not nightly:
        chosen -= NEEDS_NIGHT
        chosen &= {2: chosen - (ON_FOUR - ON_BOTH), 4: NEEDS_FOUR | ON_FOUR, 8: chosen}[size]
    return sorted((name for name in CASES if name in chosen - ALONE), key=lambda name: name == LAST)
