# SPDX-License-Identifier: Apache-2.0
"""The Trainer of Hugging Face transformers, for processes that are the ranks of one pipeline.

Problem. The Trainer wraps the model in DDP, shards batches by process, clips each process by its own norm, multiplies
the loss by the number of processes, and saves what the first process holds.

Idea. Its accelerator becomes a `PipelineAccelerator`, which settles the first three. The loss is the one that the
drop-in module returns, told of the divisor of accumulated steps, and saving exports all ranks' weights.

Runs when it is called, around every step.
"""

from __future__ import annotations

from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import find_labels

from fpipe.checkpoints.export import export, require_no_other_weights
from fpipe.drop_in.pipelined import Pipelined
from fpipe.errors import InputError
from fpipe.integrations.accelerate import COMPILE, LOADERS, NO_DDP, OWN_RANKS, PipelineAccelerator
from fpipe.integrations.options import Exclusion, Refusals, refusing

_SAVE: Final = "Save with trainer.save_model(path), or with fpipe.save in a callback."
_LOSS: Final = "Compute it in the loss of fpipe.Pipelined(model, loss=...)."
_HALF: Final = "The scaler of float16 sees the gradients of only one rank: use bf16=True."
_CAST: Final = "It converts the parameters: use bf16=True."
_HUB: Final = "Upload the folder that trainer.save_model wrote."

_ARGUMENTS: Final = Refusals(
    "TrainingArguments(...)",
    {
        "save_strategy": Exclusion(_SAVE, accepted=("no",)),
        "remove_unused_columns": Exclusion("The columns are those of the example.", accepted=(False,)),
        "label_smoothing_factor": Exclusion(_LOSS, accepted=(0,)),
        "fp16": Exclusion(_HALF, accepted=(False,)),
        "fp16_full_eval": Exclusion(_CAST, accepted=(False,)),
        "bf16_full_eval": Exclusion(_CAST, accepted=(False,)),
        "torch_compile": Exclusion(COMPILE, accepted=(False,)),
        "use_liger_kernel": Exclusion(
            "It replaces modules: apply it before fpipe.Pipelined(model, ...).", accepted=(False,)
        ),
        "auto_find_batch_size": Exclusion("Each rank would find a different size.", accepted=(False,)),
        "load_best_model_at_end": Exclusion(_SAVE, accepted=(False,)),
        "resume_from_checkpoint": Exclusion("Pass weights=fpipe.load(...) to fpipe.Pipelined.", accepted=(None,)),
        "enable_jit_checkpoint": Exclusion(_SAVE, accepted=(False,)),
        "push_to_hub": Exclusion(_HUB, accepted=(False,)),
        **dict.fromkeys(("parallelism_config", "deepspeed"), Exclusion(OWN_RANKS, accepted=(None,))),
        "fsdp": Exclusion(OWN_RANKS, accepted=(None, False)),
        **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb"), NO_DDP),
        **dict.fromkeys(("ddp_broadcast_buffers", "ddp_static_graph"), NO_DDP),
        "debug": Exclusion("Call fpipe.find_nonfinite(model.pipe).", accepted=([],)),
        "optim": Exclusion(
            "It updates during the backward, but the forward has already computed the gradients.",
            refused=(
                *("lomo", "adalomo", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise"),
                *("galore_adafactor_layerwise", "apollo_adamw_layerwise"),
            ),
        ),
    },
)
_OPTIONS: Final = Refusals(
    "PipelineTrainer(...)",
    {
        "model_init": Exclusion("Pass model=fpipe.Pipelined(...).", accepted=(None,)),
        "compute_loss_func": Exclusion(_LOSS, accepted=(None,)),
    },
)
_METHODS: Final = Refusals(
    "methods of PipelineTrainer",
    {
        "push_to_hub": Exclusion(_HUB),
        "init_hf_repo": Exclusion(_HUB),
        "hyperparameter_search": Exclusion("Make an fpipe.Pipelined and a PipelineTrainer for each trial."),
    },
)
TRANSFORMERS: Final = (_ARGUMENTS, _OPTIONS, _METHODS)


def count_items(inputs: dict[str, Any], targets: Any, shifts: bool) -> float:
    """Return the weight of a microbatch: the number of its labels that are not ignored, or else of its rows.

    If the loss `shifts` labels, the first of each row is no target of a prediction.
    """
    if "shift_labels" in inputs:
        return float(inputs["shift_labels"].ne(-100).sum())
    if "labels" in inputs:
        return float((inputs["labels"][..., 1:] if shifts else inputs["labels"]).ne(-100).sum())
    return len(next(value for value in inputs.values() if isinstance(value, Tensor)))


def _shifts_by_default(model: nn.Module) -> bool:
    """Return whether a model without a loss of its own type, such as GPT2LMHeadModel, has the default one."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return getattr(model, "loss_type", None) is None and type(model).__name__ in known


@refusing(_METHODS)
class PipelineTrainer(Trainer):
    """A `Trainer` of an `fpipe.Pipelined` model whose example is a dict; everything else is as usual.

    Losses are weighed as the Trainer does, by tokens, over all accumulated steps: what is trained is the mean of the
    whole batch. If the pipelined model has a `weight`, that counts, and accumulated steps are averaged as equals.
    `save_model` writes what `from_pretrained` reads. Optimizer state is not in the Trainer's checkpoints, so pass
    `save_strategy="no"`, and `remove_unused_columns=False`, since the columns that the model takes are those of its
    example. Raise `InputError` for what the table `TRANSFORMERS` refuses, for several GPUs in one process, and for an
    `output_dir` with weights that are not of an earlier `save_model`.
    """

    def __init__(self, model: nn.Module, args: TrainingArguments, *rest: Any, **options: Any) -> None:
        if not isinstance(model, Pipelined):
            raise InputError(
                f"PipelineTrainer: got a model of {type(model).__name__}, expected fpipe.Pipelined. Wrap it before: "
                "model = fpipe.Pipelined(model, ...)."
            )
        _ARGUMENTS.require(vars(args))
        LOADERS.require(vars(args.accelerator_config))
        _OPTIONS.require(signature(Trainer.__init__).bind(self, model, args, *rest, **options).arguments)
        if args.n_gpu > 1:
            raise InputError(
                f"PipelineTrainer: got {args.n_gpu} GPUs in one process, expected one: the Trainer would copy the "
                "model to each. Start a process for each with torchrun, or set CUDA_VISIBLE_DEVICES."
            )
        require_no_other_weights(Path(args.output_dir))  # rather than after the training
        super().__init__(model, args, *rest, **options)
        own = model.pipe.model
        self.can_return_loss = True  # which is read off a signature, like the names of labels, and what a model takes
        self.label_names = args.label_names or find_labels(type(own))
        kinds = [one.kind for one in signature(own.forward).parameters.values()]
        self.model_accepts_loss_kwargs = getattr(own, "accepts_loss_kwargs", Parameter.VAR_KEYWORD in kinds)
        if model.pipe.captures.batchings[True].weight is not None:
            self.model_accepts_loss_kwargs = False  # so that the loss is divided by the number of accumulated steps
        else:
            shifts = vars(self).get("_loss_shifts_labels") or _shifts_by_default(own)
            self._count = partial(count_items, shifts=shifts)
            model.weigh(self._count)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, as one whose processes are ranks: the Trainer does not ask which class to make."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = PipelineAccelerator
        self.accelerator.become_one_replica()
        gather, as_objects = self.accelerator.gather_for_metrics, self.args.eval_use_gather_object
        self.gather_function = partial(gather, use_gather_object=as_objects)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor | tuple[Tensor, Any]:
        """Return the loss of a batch; in eval mode, with the model's outputs if requested.

        The Trainer divides sums over tokens by its own number of them, in evaluation, too.
        """
        if not model.training:
            outputs = model(**inputs)
            loss = outputs["loss"]
            if self.model_accepts_loss_kwargs and num_items_in_batch is not None and num_items_in_batch > 0:
                loss = loss * (self._count(inputs, None) / float(num_items_in_batch))
            return (loss, outputs) if return_outputs else loss
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            return model(**inputs, total=float(num_items_in_batch))
        return model(**inputs, scale=1 / self.current_gradient_accumulation_steps)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Train; raise `InputError` for a checkpoint to resume from."""
        _ARGUMENTS.require({"resume_from_checkpoint": resume_from_checkpoint or None})
        return super().train(None, *args, **options)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the operations of the whole model on the first rank, and 0 on others: the Trainer adds them up."""
        name = getattr(self.model, "main_input_name", "input_ids")
        if not self.is_world_process_zero() or name not in inputs or not hasattr(self.model, "num_parameters"):
            return 0
        return 6 * inputs[name].numel() * self.model.pipe.model.num_parameters(exclude_embeddings=True)

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trainable parameters of the whole model."""
        return sum(p.numel() for p in self.model.pipe.model.parameters() if p.requires_grad)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write configuration and weights into a directory, for `from_pretrained`; every rank must call this.

        With them goes the `processing_class`, such as a tokenizer.
        """
        path, model = Path(output_dir or self.args.output_dir), self.model
        export(model.pipe, path, dict(model.named_parameters()), dict(model.named_buffers()))
        if self.args.process_index == 0:
            tools = (getattr(model, "generation_config", None), getattr(self.data_collator, "tokenizer", None))
            for one in (model.config, tools[0], self.processing_class or tools[1]):
                if one is not None:
                    one.save_pretrained(path)
