"""The penalised Trainer on tiny models, and the gradient of its step written out by hand."""

from functools import partial
from pathlib import Path

import fresh
import huginn_models
import torch
import torch.nn.functional as F
from decoder_models import decoder
from ouro_models import model, tokens
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from stars_fast.base.seeds import derive
from stars_fast.data.samples import sample_noise
from stars_fast.integrations.transformers import JacobianPenalty
from stars_fast.models.looped_decoder import LoopedDecoderForCausalLM
from stars_fast.tokens import Tokens

IGNORED = -100


class StarsTrainer(JacobianPenalty, Trainer):
    pass


def huginn(dtype=torch.float64, **fields):
    """A Huginn whose noise before the first turn is in training that of evaluation."""
    net = huginn_models.model(dtype=dtype, **fields)
    net.first_state = partial(type(net).first_state, net, seed=net.config.state_seed)
    return net


def looped(dtype=torch.float64, name="qwen3", **options):
    """A looped decoder whose turns take in the prelude's output, off its start."""
    options = {"injection": "adapter", "state": "learned", "norm_between": True} | options
    net = LoopedDecoderForCausalLM.from_decoder(decoder(name, dtype), **options)
    generator = torch.Generator().manual_seed(2)
    for part in (net.model.adapter, net.model.learned, net.model.norm_between):
        for p in [] if part is None else part.parameters():
            p.data += 0.1 * torch.randn(p.shape, generator=generator).to(dtype)
    return net


def llama(dtype=torch.float64):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


NETS = {"ouro": model, "huginn": huginn, "looped": looped, "llama": llama}
"""Models by name; all but the last take any number of turns."""


def own_turn(net, h, out):
    """A turn of one of these, at the prelude's output that a call gave."""
    if net.config.model_type == "huginn_raven":
        return net.turn(h, out.inputs, net.prepare(h))
    inputs = {"inputs": out.inputs} if net.config.model_type == "looped_decoder" else {}
    return net.model.turn(h, net.model.prepare(h, **inputs))


def first_layer(net):
    """A weight before the turns where they take in what comes before them, else in a turn."""
    if net.config.model_type == "huginn_raven":
        return net.part("prelude")[0].mlp.proj.weight
    if net.config.model_type == "looped_decoder":
        return net.model.prelude_layers[0].mlp.up_proj.weight
    return net.model.layers[0].mlp.up_proj.weight


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimiser step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        named = ((n.removeprefix("module."), p.grad) for n, p in model.named_parameters())
        self.steps.append({n: g.clone() for n, g in named if g is not None})


def arguments(folder, micro=2, accumulation=1, kind=TrainingArguments, **options):
    settings = {
        "max_steps": 1, "logging_steps": 1, "learning_rate": 1e-3, "report_to": [], "seed": 5,
        "use_cpu": True, "save_strategy": "no", "max_grad_norm": 0.0,
        "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return kind(
        str(folder),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        **settings | options,
    )


def run_two_processes(script, *words):
    """Run a script of the folder beside this one as two processes of one group."""
    fresh.two_ranks(Path(__file__).parent / "scripts" / script, *words)


def documents(lengths, prompt=2):
    """Documents of these lengths whose first `prompt` tokens are no targets."""
    rows = [tokens(1, n, seed=n + 31 * i)[0] for i, n in enumerate(lengths)]
    labels = [torch.cat([torch.full((prompt,), IGNORED), row[prompt:]]) for row in rows]
    return [{"input_ids": r, "labels": s} for r, s in zip(rows, labels, strict=True)]


def padded(side):
    """A collator that pads on that side; token 0 is no document's."""

    def collate(rows):
        longest = max(len(row["input_ids"]) for row in rows)

        def pad(x, value):
            room = longest - len(x)
            return F.pad(x, (room, 0) if side == "left" else (0, room), value=value)

        ids = torch.stack([pad(row["input_ids"], 0) for row in rows])
        labels = torch.stack([pad(row["labels"], IGNORED) for row in rows])
        return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}

    return collate


def recording(collate, into):
    """The collator, which also keeps the documents of each batch."""

    def collated(rows):
        into.append([dict(row) for row in rows])
        return collate(rows)

    return collated


def by_hand(net, micros, turns, weight, *, seed, step=0, turn=own_turn, state=None):
    """Gradients of (1 - weight) L + weight R over the micro-batches of a step.

    Each document runs alone and unpadded, and J v is a difference of the turn in fp64; `turn` is
    called with the model, a state and the output of the document's call.
    """
    net.zero_grad()
    docs = [
        (*(torch.as_tensor(doc[name])[None] for name in ("input_ids", "labels")), t)
        for docs, t in zip(micros, turns, strict=True)
        for doc in docs
    ]
    targets = sum(int((labels[:, 1:] != IGNORED).sum()) for _, labels, _ in docs)
    total = 0.0
    for number, (ids, labels, t) in enumerate(docs):
        options = {} if t is None else {"turns": t}
        out = net(ids, output_hidden_states=True, **options)
        loss = F.cross_entropy(out.logits[0, :-1], labels[0, 1:], reduction="sum") / targets
        h = (out.hidden_states[-1] if state is None else state(net, ids)).detach()
        v = sample_noise(h, Tokens(*h.shape[:2]), seed, step, [number])
        v = v / v.norm()

        def at(s, h=h, v=v, out=out):
            return turn(net, h + s * 1e-3 * v, out)

        jv = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / 12e-3
        total = total + (1 - weight) * loss + weight * jv.square().sum() / len(docs)
    total.backward()
    return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


def turns_of(law, window, *, seed, step=0):
    return [law.sample(derive(seed, "depth"), step, micro, window) for micro in range(window)]
