"""The Jacobian penalty in transformers' Trainer and what derives from it, such as TRL's SFTTrainer.

    class StarsTrainer(JacobianPenalty, Trainer):
        pass

    trainer = StarsTrainer(model, args, train_dataset=data, penalty_weight=0.1, turns=DepthLaw())
    trainer.train()

Shapes: B batch, S tokens, D model width.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from stars_fast.base.checks import check_kind
from stars_fast.base.seeds import derive
from stars_fast.data.samples import draw_samples, drawn_number, sample_noise
from stars_fast.dual.dual_pass import first_output
from stars_fast.integrations.batches import Collated, completions_of, samples_of
from stars_fast.models.block_kinds import DecoderStack, ModelTurn
from stars_fast.models.depth import DepthLaw
from stars_fast.models.looped_block import looped_block
from stars_fast.tokens import Tokens
from stars_fast.training.step.penalties.jacobian import jacobian_estimate
from stars_fast.training.step.penalty import PenaltyConfig

__all__ = ["DepthLaw", "JacobianPenalty", "PenaltyConfig"]

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class _Micro(NamedTuple):
    """A micro-batch as it is settled before it runs.

    place: among the micro-batches of its step on this process. turns: None where the model has no
    choice. numbers: places of its samples in the batch of the whole step. share: of all samples of
    the step, times the number of processes, which average.
    """

    step: int
    place: int
    turns: int | None
    samples: Collated
    numbers: list[int]
    share: float


class JacobianPenalty(_Trainer):
    """Adds `||J v||^2` at the last state to the loss of a Trainer; write it before the Trainer.

    Training minimises `(1 - lambda) L + lambda R`, or as `penalty` says. L is what the Trainer
    makes of the model's loss: with `num_items_in_batch` the loss per target of the optimiser step,
    over its micro-batches and processes. R is the mean over all samples of the same step, so that a
    batch may be split among micro-batches and processes as one likes. A sample is a row of the
    batch less its pads, or a packed document (`cu_seq_lens_q`, or `position_ids` without a mask,
    which begin anew with each document), with a direction v of its own. What is made of pads alone
    is none: a row, or a document of the pad token without a target, such as those with which TRL's
    `padding_free` fills up to `pad_to_multiple_of`. Depth and v follow from
    `args.seed`, the step and the sample's place in it: all processes run as many turns, and a
    resumed run repeats them.

    In a trainer that generates (TRL's GRPOTrainer, RLOOTrainer) a sample is a prompt with its
    completion, and R is of the tokens of the completion: v is zero on the prompt, which does not
    count. Depth is the model's own, at which it generates too.

    Evaluation is left alone: the plain loss, at the model's own number of turns. `log` reports
    `penalty`, `token_loss` and `depth`, means since the last line, beside the `loss` of both terms.

    Models:
        Ouro, Huginn (this package's classes), looped decoders: `turns` of the shared block, J of
            one more at h^(t). It is that in the state; where a turn takes in the prelude's output,
            the gradient of R reaches the prelude through it.
        any decoder stack of transformers (Llama, Qwen, ...): its layers count as the block, run
            once, and J is that of one more pass at the state in which they end, before the closing
            norm. `turns` must be None. So too for Ouro by remote code and for Nanbeige, whose turns
            are fixed when they are made, and end with that norm.

    It runs on one process or several with DistributedDataParallel, in fp32, bf16 or under autocast,
    with gradient checkpointing or without. What lies on a device has to be looked at once an
    optimiser step, for the bounds of samples.

    Args:
        args, kwargs: the Trainer's.
        penalty_weight: lambda.
        turns: a law, drawn anew for each micro-batch; a fixed number; or None for the model's own.
        penalty: all settings of the penalty, instead of `penalty_weight`.

    Raises:
        TypeError: a model with no turn, or one of another kind; an argument of the wrong type, or
            of a name that no class here has; no Trainer after this among the bases, or before it.
        ValueError: both `penalty` and `penalty_weight`; `turns` for a model without a choice; a
            penalty with at="last", draw="micro-batches" or direction="step"; DataParallel, FSDP,
            DeepSpeed, tensor, context or sequence parallelism, or `torch_compile`.
    """

    def __init__(
        self,
        *args: Any,
        penalty_weight: float | None = None,
        turns: DepthLaw | int | None = None,
        penalty: PenaltyConfig | None = None,
        **kwargs: Any,
    ) -> None:
        _check_arguments(self, args, kwargs)
        penalty = _settings(penalty_weight, penalty)
        if turns is not None and not isinstance(turns, DepthLaw):
            _check_turns(turns)
        for name, only in (("at", "next"), ("draw", "samples"), ("direction", "random")):
            if getattr(penalty, name) != only:
                raise ValueError(
                    f"penalty: expected {name}={only!r} here, got {getattr(penalty, name)!r}"
                )
        super().__init__(*args, **kwargs)
        _check_launch(self)
        # The Trainer divides by the micro-batches itself; 5.5 lets accelerate do so once more.
        self.accelerator.gradient_accumulation_steps = 1
        self.penalty = penalty
        if _generates(self) and hasattr(self.model, "depth_settings"):
            from stars_fast.models.ouro.generation import adopt_depth

            adopt_depth(self.model)
        if turns is not None and _generates(self):
            raise ValueError(
                f"turns: expected None with {type(self).__name__}, which generates at the model's "
                f"own number of turns, got {turns!r}"
            )
        tol = getattr(getattr(self.model, "config", None), "convergence_tol", None)
        if tol and _generates(self):
            raise ValueError(
                f"model: expected convergence_tol=None with {type(self).__name__}, whose samples "
                f"take as many turns, got {tol!r}"
            )
        self.depth = _depth_law(self.model, turns)
        self._micros: deque[_Micro] = deque()
        self._meter = _Meter(self.args.device)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(JacobianPenalty)]
        for base in before:
            if "compute_loss" in vars(base) and not issubclass(base, JacobianPenalty):
                raise TypeError(
                    f"{cls.__name__}: expected JacobianPenalty before {base.__name__} among the "
                    f"bases, class {cls.__name__}(JacobianPenalty, {base.__name__}), got it after"
                )

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """As the Trainer's; the batches of an optimiser step are known here, and planned."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if _generates(self):  # what it will train on is not there yet, but how many rows
            samples = [Collated(self.args.per_device_train_batch_size, 1)] * len(batches)
        else:
            pad = _pad_id(self)
            samples = [samples_of(batch, pad) for batch in batches]
        self._micros = deque(self._plan(samples))
        self._meter.windows += 1
        return batches, items

    def _plan(self, samples: list[Collated]) -> list[_Micro]:
        """The micro-batches of this process, from the samples in them."""
        step, window = self.state.global_step, len(samples)
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        counts = torch.tensor([[each.count for each in samples]])
        if processes > 1:
            counts = self.accelerator.gather(counts.to(self.args.device)).cpu()
        # In the order of the data: micro-batch by micro-batch, and process by process within each.
        ends = counts.T.flatten().cumsum(0).tolist()
        micros = []
        for place, each in enumerate(samples):
            end = ends[place * processes + rank]
            turns = None
            if self.depth is not None:
                seed = derive(self.args.seed, "depth")
                turns = self.depth.sample(seed, step, place, window)
            numbers = list(range(end - each.count, end))
            share = each.count * processes / max(1, ends[-1])
            micros.append(_Micro(step, place, turns, each, numbers, share))
        return micros

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The Trainer's loss, and in training the penalty with it."""
        inputs = dict(inputs)
        block = _block_of(self.model)
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not self._micros:
            raise RuntimeError("compute_loss: in training, expected a batch of the training loop")
        micro = self._micros.popleft()
        if _generates(self):
            micro = micro._replace(samples=completions_of(inputs))
        elif micro.turns is not None:
            inputs |= {"turns": micro.turns, "tol": 0.0}
        weight = self.penalty.weight_at(micro.step)
        with _last_state(self.model, block) as last:
            found: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = found if return_outputs else (found, None)
        parts = self.current_gradient_accumulation_steps if self._divides(num_items_in_batch) else 1
        penalty = torch.zeros_like(loss)
        total = loss
        if weight:
            # Outside of DDP's forward, which has had the block's parameters in this iteration: a
            # gradient is reduced when the backward has summed all of it.
            share = micro.share * parts
            penalty = share * self._penalty(last, micro, inputs.get("position_ids"))
            total = self.penalty.combine(loss, penalty, weight)
        self._meter.add(loss / parts, penalty / parts, micro, penalised=bool(weight))
        return (total, outputs) if return_outputs else total

    def _penalty(self, last: _Last, micro: _Micro, position_ids: Tensor | None) -> Tensor:
        """Mean over the samples of ||J v||^2 at the last state, a scalar; 0 without a sample."""
        h, injected = last.h, last.inputs
        samples, seed = micro.samples, self.args.seed
        if samples.count == 0:
            return h.new_zeros(())
        if samples.packed:
            position_ids = None  # relative ones are all that matters, and the bounds give them
        elif position_ids is not None and len(position_ids) > 1:
            position_ids = samples.cut(position_ids)
        h = samples.cut(h)
        injected = None if injected is None else samples.cut(injected)
        numbers = micro.numbers
        tokens: Tokens = samples
        scored = samples.completion
        number = drawn_number(self.penalty.fraction, samples.count)
        if number < samples.count:
            chosen = draw_samples(samples.count, number, seed, micro.step, micro.place)
            part = samples.subset(chosen)
            if position_ids is not None and len(position_ids) > 1 and not samples.packed:
                position_ids = part.cut(position_ids)
            h, numbers = part.cut(h), [numbers[i] for i in chosen]
            injected = None if injected is None else part.cut(injected)
            tokens = part.tokens
            scored = None if scored is None else scored[chosen]
        counted = tokens if scored is None else replace(tokens, real=scored)
        v = sample_noise(h, counted, seed, micro.step, numbers)
        mask = tokens.real
        block = looped_block(
            self.model,
            attention_mask=None if mask is None else mask.to(h.device, non_blocking=True),
            position_ids=position_ids,
            cu_seqlens=tokens.cu_seqlens,
            inputs=injected,
        )
        with self.accelerator.autocast():
            return jacobian_estimate(block, h, v, counted, self.penalty)[1]

    def _divides(self, num_items_in_batch: Tensor | int | None) -> bool:
        """Whether the Trainer divides the loss by the number of micro-batches afterwards."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            per_item = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = per_item or self.compute_loss_func is not None
        return not scaled

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the Trainer's, with the means of what was trained since the last line."""
        if "loss" in logs and self._meter.windows:
            sums = self._meter.sums
            if self.accelerator.num_processes > 1:
                sums = self.accelerator.gather(sums[None]).mean(0)
            logs.update(self._meter.means(sums.tolist()))
            self._meter = _Meter(self.args.device)
        super().log(logs, start_time)


class _Meter:
    """Sums since the last line of the log, on the device."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(2, device=device, dtype=torch.float32)  # token loss, penalty
        self.windows = 0
        self.penalised = 0
        self.turns: list[int] = []

    def add(self, loss: Tensor, penalty: Tensor, micro: _Micro, penalised: bool) -> None:
        """Add the shares of one micro-batch."""
        self.sums += torch.stack([loss.detach().float(), penalty.detach().float()])
        self.penalised += penalised and micro.place == 0
        if micro.turns is not None:
            self.turns.append(micro.turns)

    def means(self, sums: list[float]) -> dict[str, float]:
        """By name, per optimiser step; `sums` is `self.sums`, averaged over processes."""
        row = {"token_loss": sums[0] / self.windows}
        if self.penalised:
            row["penalty"] = sums[1] / self.penalised
        if self.turns:
            row["depth"] = sum(self.turns) / len(self.turns)
        return row


def _check_arguments(trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError for what the Trainer would take for something else, or fail on later."""
    own = type(trainer).__mro__
    trainers = own[own.index(JacobianPenalty) + 1 :]
    if not any(hasattr(base, "compute_loss") for base in trainers):
        raise TypeError(
            "JacobianPenalty: expected a Trainer after it among the bases, such as "
            f"class StarsTrainer(JacobianPenalty, Trainer), got {type(trainer).__name__} without"
        )
    # The Trainer itself says if it gets none; TRL's loads one by its name.
    model = kwargs.get("model", args[0] if args else None)
    by_name = isinstance(model, str) and any(b.__module__.startswith("trl.") for b in trainers)
    if model is not None and not by_name and not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a module, got {type(model).__name__}")
    known = inspect.signature(trainers[0]).parameters
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return
    names = [*known, *inspect.signature(JacobianPenalty).parameters]
    for name in kwargs.keys() - known.keys():
        near = get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TypeError(f"{name}: expected an option of {trainers[0].__name__}{hint}")


def _settings(weight: Any, penalty: Any) -> PenaltyConfig:
    """The settings that the arguments penalty_weight and penalty say."""
    if penalty is not None and weight is not None:
        raise ValueError("penalty_weight: expected None when penalty is given, got both")
    if penalty is not None:
        if not isinstance(penalty, PenaltyConfig):
            raise TypeError(f"penalty: expected a PenaltyConfig or None, got {penalty!r}")
        return penalty
    if weight is None:
        return PenaltyConfig()
    check_kind("penalty_weight", weight, float)
    if not 0 <= weight <= 1:
        raise ValueError(f"penalty_weight: expected a number in [0, 1], got {weight!r}")
    return PenaltyConfig(float(weight))


def _check_turns(turns: Any) -> None:
    whole = isinstance(turns, Integral) and not isinstance(turns, bool)
    if not whole or turns < 1:
        kind = ValueError if whole else TypeError
        raise kind(f"turns: expected a DepthLaw, a positive integer or None, got {turns!r}")


def _check_launch(trainer: Any) -> None:
    """Raise ValueError for the ways to run in which the penalty would be wrong or fail."""
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"args: expected one device a process, got {trainer.args.n_gpu} GPUs, over which the "
            "Trainer splits a batch by DataParallel; launch with torchrun"
        )
    for name, found in (
        ("FSDP", trainer.is_fsdp_enabled),
        ("DeepSpeed", trainer.is_deepspeed_enabled),
        ("a parallelism_config", getattr(trainer.accelerator, "parallelism_config", None)),
        ("torch_compile", trainer.args.torch_compile),
    ):
        if found:
            raise ValueError(f"args: expected DistributedDataParallel or one process, got {name}")


def _generates(trainer: Any) -> bool:
    """Whether the trainer makes what it trains on, as TRL's for reinforcement learning do."""
    return hasattr(trainer, "_generate_and_score_completions")


def _pad_id(trainer: Any) -> int | None:
    """The token that the batches are padded with; None where nobody says."""
    collator, processor = trainer.data_collator, trainer.processing_class
    for owner in (
        collator,
        getattr(collator, "tokenizer", None),
        processor,
        getattr(processor, "tokenizer", None),
        trainer.model.config,
    ):
        found = getattr(owner, "pad_token_id", None)
        if found is not None:
            return int(found)
    return None


def _block_of(model: Any) -> ModelTurn | DecoderStack:
    block = looped_block(model)
    if not isinstance(block, (ModelTurn, DecoderStack)):
        raise TypeError(
            "model: expected Ouro, Huginn or a looped decoder of this package, or a decoder stack "
            f"of transformers, got {type(model).__name__}"
        )
    return block


def _depth_law(model: Any, turns: DepthLaw | int | None) -> DepthLaw | None:
    """The law of the number of turns; None where the model has no choice."""
    if not isinstance(_block_of(model), ModelTurn):
        if turns is not None:
            raise ValueError(
                f"turns: expected None for {type(model).__name__}, whose turns can't be chosen, "
                f"got {turns!r}"
            )
        return None
    if isinstance(turns, DepthLaw):
        return turns
    number = model.config.turns if turns is None else turns
    return DepthLaw(law="fixed", value=number, low=number, high=number)


class _Last:
    """The last turn's state and what turns take in, [B, S, D] each, once the model has run.

    learns: whether the model runs for its gradient.
    """

    h: Tensor
    inputs: Tensor | None = None
    learns: bool = True


@contextmanager
def _last_state(model: Any, block: ModelTurn | DecoderStack) -> Iterator[_Last]:
    """The state after the last turn of the newest run of the model for its gradient: TRL runs the
    same one without, as its own reference.

    It is the output of the block's last module. What turns take in is among the output of their
    model: as the Trainer calls it, since PEFT goes around the hooks of the model within, and as
    TRL's head calls that one, whose own output says nothing of it.
    """
    last = _Last()

    def begin(module: nn.Module, args: Any) -> None:
        last.learns = torch.is_grad_enabled()  # within, checkpoints may turn it off

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if last.learns:
            last.h = first_output(output)

    def keep_inputs(module: nn.Module, args: Any, output: Any) -> None:
        found = getattr(output, "inputs", None)
        if last.learns and found is not None:
            last.inputs = found

    outer = {model, block.model} if isinstance(block, ModelTurn) else {model}
    handles = [each.register_forward_pre_hook(begin) for each in outer]
    handles.append(block.last.register_forward_hook(keep))
    if isinstance(block, ModelTurn) and block.injects:
        handles += [each.register_forward_hook(keep_inputs) for each in outer]
    try:
        yield last
    finally:
        for handle in handles:
            handle.remove()
