# SPDX-License-Identifier: Apache-2.0
"""The selection of cases that a job runs: by day, those that its number of ranks adds something to."""

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
    "profiles_of_all_ranks",
    "profiles_of_different_models_are_refused",
    "batches_of_other_shapes",
    "state_of_another_rank",
    *(name for name in CASES if name.startswith(("gpt_dropout", "all_frozen", "constants", "own_loss", "recurrent"))),
    *(name for name in CASES if name.endswith("-gpipe") and not name.startswith("skips")),
}

# Their meshes have so many processes.
NEEDS_EIGHT = {name for name in CASES if name.endswith(("_on_2_pp_2_dp_2_fsdp", "_2_tp"))}

MESHES_BY_DAY = {"gpt_zb_v_on_2_pp_2_dp", "llama_interleaved_on_2_pp_2_fsdp", "gpt_zb_h1_on_2_pp_2_dp_2_fsdp"}
MESHES_BY_DAY |= {"split_gpt_zb_v_on_2_pp_2_fsdp_2_tp"}
MESHES_BY_DAY |= {"experts_zb_v_on_2_pp_2_ep", "parts_of_sequences_zb_v_on_2_pp_2_cp"}

NEEDS_FOUR = {name for name in CASES if "_on_2_pp_" in name} - NEEDS_EIGHT
NEEDS_FOUR |= {name for name in CASES if "on_a_mesh" in name} | {"a_mesh_is_verified"}
NEEDS_FOUR |= {"meshes_that_differ_are_refused_on_all_ranks"}
NEEDS_FOUR |= {"split_parameters_are_saved_from_a_mesh_and_loaded_whole"}
NEEDS_FOUR |= {"a_model_on_meta", "data_parallel_pipelines", "dies_in_the_middle", "told_no_shapes"}

ALONE = {"dies_in_the_middle"}

LAST = "after_the_group_is_gone"

# Front ends and models differ in what they capture, which processes do not see: by day, some are enough.
ZOO_CASES = {name: name.split("-")[:2] for name in CASES if name.count("-") == 2}

BY_DAY, ON_FOUR = {"mlp", "skips", "chained"}, {"mlp", "skips", "tied_sequence", "normalised", "unet", "dropping"}

SCRIPTS_BY_DAY = {"a_script_that_can_classify_under_zb_v"}

SCRIPTS_BY_NIGHT = {name for name in CASES if name.startswith("a_script_that_can")} - SCRIPTS_BY_DAY

NEEDS_NIGHT = SCRIPTS_BY_NIGHT | {"updates_of_other_schedules_and_ties", "sequences_in_parts"}
NEEDS_NIGHT |= {"a_split_llama", "split_blocks_that_run_again", "split_models_are_verified"}
NEEDS_NIGHT |= {
    name for name, (model, front) in ZOO_CASES.items() if model not in BY_DAY and front not in ("trace", "modules")
}
NEEDS_NIGHT |= {name for name, (_, front) in ZOO_CASES.items() if front in ("fx", "dynamo")}

# What ranks tell each other before they compute, and refuse, does not depend on how many there are.
REFUSED = {name for name in CASES if name.endswith("_on_one_rank") and name != "refused_on_one_rank"}

NEEDS_NIGHT_ON_FOUR = (
    REFUSED
    | SCRIPTS_BY_NIGHT
    | {name for name in CASES if "_on_2_pp_" in name} - MESHES_BY_DAY
    | {
        *("norms_count_every_parameter_once", "tied_copies_do_not_drift", "a_batch_that_the_model_cannot_take"),
        *("a_head_that_is_read_late", "functions_are_described_alike", "another_body_of_a_schedule", "a_second_thread"),
        "updates_of_other_schedules_and_ties",
        "norms_count_experts_of_all_processes_on_a_mesh",
        *("smoothed_losses_of_a_split_head_on_a_mesh", "recomputation_in_replicas_of_split_models_on_a_mesh"),
        *("split_blocks_that_run_again", "split_models_are_verified", "split_models_are_trained", "a_split_llama"),
        *("state_that_is_placed_otherwise", "what_a_split_model_cannot_do", "columns_and_rows"),
        *("recorded_stages_of_split_modules", "a_split_and_tied_embedding"),
        *("other_tensor_attributes", "two_pipelines_in_turns", "evaluation_everywhere", "recomputation"),
    }
)

NEEDS_NIGHT_ON_FOUR |= {
    name for name, (model, front) in ZOO_CASES.items() if model not in ON_FOUR or front not in ("trace", "modules")
}


def names(size: int) -> list[str]:
    """Return the names of the cases that one job of this size runs, in order."""
    if size == 8:
        return sorted(NEEDS_EIGHT if NIGHTLY else NEEDS_EIGHT & MESHES_BY_DAY)
    left = ALONE | NEEDS_EIGHT | (NEEDS_TWO if size != 2 else set()) | (NEEDS_FOUR if size != 4 else set())
    if not NIGHTLY:
        left |= NEEDS_NIGHT_ON_FOUR if size == 4 else NEEDS_NIGHT
    return sorted((name for name in CASES if name not in left), key=lambda name: name == LAST)
